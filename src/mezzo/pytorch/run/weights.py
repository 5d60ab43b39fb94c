"""Weights of a run in 16 bits, the policy's and the script's own, and weights moved by one ulp.

The policy's (`Storage`): before an outermost call, a module's weights that an optimizer trains are stored in 16 bits,
and that optimizer becomes Mezzo's of the same name, which keeps the masters. What can't be stored so stays as it is,
and is named at the end.

The script's own, trained without masters: what they lose is measured, and `--masters` gives them masters. A weight w in
bf16 moves only if its update is at least half an ulp of w, which is |w| / 256 to |w| / 512. Smaller updates are lost at
each step, however many there are.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.errors import UsageError
from mezzo.core.records import SWITCHED_OFF
from mezzo.pytorch.autocast.modules import fitting
from mezzo.pytorch.distributed import local
from mezzo.pytorch.dtypes import SIXTEEN_BITS, name_of
from mezzo.pytorch.kernels.not_traced import breaks_graph, not_traced
from mezzo.pytorch.module_paths import unwrapped, unwrapped_path
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.with_masters import WithMasters, put_masters
from mezzo.pytorch.step import parameters
from mezzo.pytorch.weights.shards import part
from mezzo.pytorch.weights.stored_parameters import lower_weights

if TYPE_CHECKING:
    from mezzo.pytorch.run.optimizers import Known
    from mezzo.pytorch.run.session import Session

SHARDED = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_BEFORE_WRAPPING = (
    "it is wrapped for data parallelism. To store them in 16 bits, edit the script: first mezzo.lower_weights(model), "
    "then the wrapper, then mezzo.MixedPrecision with an optimizer of mezzo.optim (docs/distributed.md)"
)
STEPS = 5  # of each optimizer are measured
_SAMPLE = 65_536  # elements of each weight


class Storage:
    """Stores weights and optimizer states as the policy says, for the modules that are called outermost."""

    def __init__(self, session: Session) -> None:
        policy = session.policy
        self._session = session
        self.wanted = (policy.params, policy.state) != ("fp32", "fp32")
        self._settled: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        # Why a parameter stays FP32; "": it does not.
        self._why: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self._counts = Counter[str]()  # of the parameters, by that
        self._any_adopted = False

    @not_traced
    def settle(self, module: nn.Module, *, traced: bool) -> None:
        """Before an outermost call of a module: lower its weights and adopt their optimizers, if any is new."""
        session = self._session
        if self._settled.get(module) == session.optimizers_made:
            return
        if traced:
            name = type(unwrapped(module)).__name__
            session.journal.note(f"the weights of {name} stay FP32: a compiled function calls it")
            return
        if torch.is_inference_mode_enabled():  # what is made here could never be trained
            return
        ids = {id(p) for p in module.parameters()}
        for optimizer in list(session.optimizers):
            if not ids.isdisjoint(map(id, parameters(optimizer))):
                self.adopt(optimizer)
        if session.policy.params != "fp32":
            self._lower(module)
        self._settled[module] = session.optimizers_made

    def finish(self) -> None:
        """The script is over: note how weights and states were stored."""
        session, policy = self._session, self._session.policy
        if not self.wanted or session.left_alone is not None or not session.device_type:
            return
        if not self._any_adopted:
            session.journal.note(
                "weights and optimizer states stay FP32: before its first model call, the script made no optimizer "
                "whose weights Mezzo can store so (torch.optim.AdamW, Adam, SGD or Muon; any with masters=fp32)"
            )
            return
        weights, lowered = "weights fp32", self._counts[""]
        stay = ", ".join(f"{count} of {why}" for why, count in self._counts.items() if why and count)
        if lowered:
            total = sum(self._counts.values())
            weights = f"weights {policy.params} ({lowered} of {total} parameters), masters {policy.masters}"
        passes, steps = session.journal.losses, session.journal.updates
        if session.lowered_weights and steps and passes >= 2 * steps:
            session.journal.note(
                f"{passes} backward passes for {steps} optimizer steps: accumulated gradients of {policy.params} "
                f"weights were added in {policy.params}; mezzo.MixedPrecision(..., accumulate=N) adds them in FP32"
            )
        if lowered or stay or policy.state != "fp32":
            session.journal.note(f"{weights}, state {policy.state}{stay and f'; FP32: {stay}'}")

    def adopt(self, optimizer: Any) -> None:
        """Make the optimizer Mezzo's, if states or masters of the policy need that and it isn't."""
        if not self.wanted or optimizer in self._adopted:
            return
        policy, note, name = self._session.policy, self._session.journal.note, type(optimizer).__name__
        if isinstance(optimizer, (FusedOptimizer, WithMasters)):
            note(f"{name} is one of Mezzo's optimizers: the script's arguments decide how it stores states")
            return
        separate = policy.masters == policy.state == "fp32"
        try:
            put_masters(optimizer, policy.masters, policy.state, separate=separate)
        except UsageError as error:
            note(f"the weights and states of {name} stay FP32: {str(error).partition(': ')[2]}")
            return
        if isinstance(optimizer, WithMasters):
            optimizer._patch_step_function()  # of its new class, whose step is asked before the masters are in it
        self._any_adopted = True
        self._adopted.add(optimizer)

    def _lower(self, module: nn.Module) -> None:
        model, policy = unwrapped(module), self._session.policy
        trained = {id(p) for optimizer in self._adopted for p in parameters(optimizer)}
        keep = [name for name, p in model.named_parameters() if id(p) not in trained]
        try:
            if _is_wrapped(module):
                if any(self._why.get(p) == "" for p in model.parameters()):
                    return  # they had 16 bits before it was wrapped
                raise UsageError(_BEFORE_WRAPPING)
            names = set(lower_weights(model, fitting(policy, model), keep=keep))
        except UsageError as error:
            self._session.journal.note(f"the weights of {type(model).__name__} stay FP32: {error}")
            return
        for name, parameter in model.named_parameters():
            path, reason = name.rpartition(".")[0], "normalization"
            if name not in names and parameter.dtype is not torch.float32:
                continue  # lowered before
            if name in keep:
                reason = "no optimizer that Mezzo replaces"
            elif policy.format_inside(unwrapped_path(path)) not in (None, policy.params):
                reason = "the policy's format"
            why = "" if name in names else f"{type(model.get_submodule(path)).__name__} ({reason})"
            if parameter in self._why:
                self._counts[self._why[parameter]] -= 1
            self._why[parameter] = why
            self._counts[why] += 1
        self._session.lowered_weights = self._counts[""]


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a module is, contains or is inside one that is wrapped for data parallelism."""
    made = torch.distributed.is_available() and torch.distributed.is_initialized()
    around = [each for each in others(module) if isinstance(each, DistributedDataParallel)] if made else []
    parts = [*module.modules(), *(each for each in around if unwrapped(module) in each.modules())]
    return any(kind.__name__ in SHARDED for part in parts for kind in type(part).__mro__)


def others(model: nn.Module) -> Iterator[nn.Module]:
    """All modules alive that are not part of this one."""
    inside = {id(part) for part in model.modules()}
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and id(thing) not in inside and "_modules" in thing.__dict__:
            yield thing


def holders(model: nn.Module) -> list[nn.Module]:
    """The LightningModules that contain this module. Lightning calls their `training_step` instead of the module."""
    return [one for one in others(model) if hasattr(type(one), "training_step") and model in one.modules()]


def lowered(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """An optimizer's 16-bit weights that no master goes with, each with its group."""
    if not isinstance(optimizer, (FusedOptimizer, WithMasters)):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.dtype in SIXTEEN_BITS and param.requires_grad:
                    yield group, param


def trains(module: nn.Module) -> bool:
    """Whether a module has parameters to train: `--own off` lets a frozen one keep its format."""
    return any(p.requires_grad and p.is_floating_point() for p in module.parameters())


def widen(session: Session, module: nn.Module, name: str) -> None:
    """Make 16-bit parameters and buffers FP32, in place, where `--own off` found no setting to switch off."""
    low = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in SIXTEEN_BITS]
    if low and _is_wrapped(module):
        session.fatal = error = UsageError(
            f"--own off: {name} has 16-bit parameters and is wrapped for data parallelism. Make its parameters FP32 "
            "before it is wrapped."
        )
        raise error
    for tensor in low:
        session.journal.note(f"{SWITCHED_OFF}{name} in {str(tensor.dtype).removeprefix('torch.')}")
        tensor.data = tensor.detach().float()
        tensor.grad = None if tensor.grad is None else tensor.grad.float()


class LostUpdates:
    """Measures the share of updates that leave their 16-bit weight as it was, in an optimizer's first steps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counts: dict[str, list[int]] = {}  # by optimizer and format: updates lost, all, steps

    @contextmanager
    def measured(self, optimizer: Any, known: Known) -> Iterator[None]:
        """Measure the step inside. Not counted: a learning rate of 0, a gradient of 0, a step that is not taken."""
        before = [
            (param, _sample(param).clone())
            for group, param in lowered(optimizer)
            if group.get("lr") != 0 and type(param.detach()) is Tensor
        ]
        skipped = getattr(optimizer, "found_inf", None)
        yield
        # After the step: a closure computes the gradients inside it.
        dense = [
            (p, old, p.grad) for p, old in before if p.grad is not None and p.grad.layout is torch.strided
        ]
        if not dense or (skipped is not None and bool(skipped)):
            return
        known.unmeasured = (known.unmeasured or 1) - 1
        what = f"{type(optimizer).__name__} trains {name_of(dense[0][0].dtype)} weights"
        counts = self._counts.setdefault(what, [0, 0, 0])
        for param, old, grad in dense:
            moves = _sample(grad) != 0
            counts[0] += int(((_sample(param) == old) & moves).sum())
            counts[1] += int(moves.sum())
        counts[2] += 1

    def finish(self) -> None:
        """The script is over: note what was lost, and how to keep it."""
        for what, (lost, updates, steps) in self._counts.items():
            if updates and lost:
                self._session.journal.note(
                    f"{what} without FP32 masters: in {steps} early steps {100 * lost / updates:.0f} % of the updates "
                    "were smaller than half a unit in the last place of their weight, and were lost"
                )
                self._session.journal.note(f"to keep them: {self._session.command('', '--masters', 'split')}")


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)]


class Masters:
    """`--masters`: FP32 masters under the script's own optimizers, from their first step or `load_state_dict` on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counts: Counter[str] = Counter()  # weights with masters, by kind and optimizer

    @not_traced
    def supply(self, optimizer: Any) -> bool:
        """Give the optimizer's 16-bit weights masters, which changes its class; False if it has none."""
        weights = [param for _, param in lowered(optimizer)] if self._session.request.masters else []
        if weights:
            how = put_masters(optimizer, self._session.request.masters)
            self._counts[f"{how} masters under {type(optimizer).__name__}"] += len(weights)
        return bool(weights)

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The `Optimizer.load_state_dict` of a run: a state with masters needs an optimizer that has them."""

        def load_state_dict(optimizer: Any, state_dict: Any) -> Any:
            if self.supply(optimizer):
                return optimizer.load_state_dict(state_dict)
            return original(optimizer, state_dict)

        return breaks_graph(load_state_dict, inner="DEFAULT")

    def finish(self) -> None:
        """The script is over: note what got masters."""
        if kind := self._session.request.masters:
            for what, weights in self._counts.items():
                self._session.journal.note(f"{what}: {weights} weights")
            if not self._counts:
                self._session.journal.note(
                    f"--masters {kind} changed nothing: no optimizer of the script has 16-bit weights without masters"
                )


def nudge(parameters: Iterable[Tensor]) -> int:
    """Move each element of each FP32 parameter one ulp, by coins of a generator of our own; the number of tensors."""
    generator = torch.Generator("cpu")
    generator.manual_seed(0x6E75646765)
    moved: set[int] = set()
    with torch.no_grad():
        for parameter in parameters:
            own = local(parameter.data)
            place = own.data_ptr() or id(parameter)  # a rank's part may be empty
            if parameter.dtype is not torch.float32 or not parameter.numel() or place in moved:
                continue
            moved.add(place)
            # Of the whole parameter: each rank moves its part of a `DTensor` as one process would.
            coins = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = part(torch.where(coins, -math.inf, math.inf), parameter)
            own.copy_(torch.nextafter(own, towards.to(own.device)))
    return len(moved)
