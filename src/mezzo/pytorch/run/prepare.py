"""What happens once for each module that is called outermost, before its first forward pass.

Its device resolves `auto`; the policy's module patterns are applied; a paired run nudges its weights; and where the
policy stores weights or the optimizer's state in fewer bits (`Storage`), they are stored so.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.errors import UsageError
from mezzo.core.policy_text import matches
from mezzo.pytorch.autocast import dispatch
from mezzo.pytorch.autocast.modules import (
    apply_module_overrides,
    described,
    fitting,
    no_such_module,
    with_heads,
)
from mezzo.pytorch.hardware import leaves_autocast_off, switch_off_tf32
from mezzo.pytorch.kernels.unseen import unseen
from mezzo.pytorch.monitor.module_paths import unwrapped
from mezzo.pytorch.step import parameters

if TYPE_CHECKING:
    from mezzo.core.policy import Policy
    from mezzo.pytorch.run.optimizers import Steps
    from mezzo.pytorch.run.session import Session

_LOWERED = (torch.bfloat16, torch.float16)
_AUTOCAST_OFF = ("fp32", "tf32")

FOLLOWS = "_mezzo_follows"
"""Mark in a module's `__dict__`: the policy has it, or a module around it, in FP32, and no call of it is outermost."""


class Preparation:
    """Prepares each module that is called outermost, once.

    Args:
        session: the run.
        steps: is told of modules whose calls are part of a compiled function.
    """

    def __init__(self, session: Session, steps: Steps) -> None:
        self._session = session
        self._steps = steps
        self._storage = Storage(session)
        # What is moved already: a compiled step in FP32 shows us inner modules, too.
        self._nudged: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        # By id, for it is asked at each call and a WeakKeyDictionary is slow.
        self._known: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self._paths: dict[str, None] = {}  # of the modules of all models that were called
        self._waiting: list[str] = []  # patterns that none of them has matched

    def prepare(self, module: nn.Module, *, traced: bool = False) -> bool:
        """Whether this module's call is under the policy: it has floating parameters, all of FP32 or wider but for
        those that we lowered.

        Args:
            module: the module that is called outermost.
            traced: whether a compiler traces the call: its weights must stay what they are.
        """
        known = self.knows(module)
        if known is None:
            known = self._first_call(module)
            key = id(module)
            self._known[key] = weakref.ref(module, lambda _: self._known.pop(key, None)), known
        if known and self._storage.wanted:
            self._storage.settle(module, traced=traced)
        if known and traced and self._session.scaling:
            self._steps.traced.add(module)
            self._session.networks.call(module)
        return known

    def knows(self, module: nn.Module) -> bool | None:
        """Whether a call of this module was under the policy before; None if it was never called."""
        found = self._known.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    @unseen
    def _first_call(self, module: nn.Module) -> bool:
        session = self._session
        own = [p for p in module.parameters() if p.is_floating_point()]
        if not own:
            return False
        model, name = unwrapped(module), type(unwrapped(module)).__name__
        lowered = next((p.dtype for p in own if p.dtype in _LOWERED), None)
        if (
            lowered is not None and not session.lowered_weights
        ):  # else it may be by us, or a copy of such a one
            session.stand_back(
                f"{name} holds {str(lowered).removeprefix('torch.')} parameters: the script chooses its formats itself",
                "to have Mezzo do it, keep the model in FP32: take out the line that makes it 16 bits",
            )
            return False
        first = not session.device_type
        session.resolve(next(iter(own)).device.type)
        for part in module.modules():
            if isinstance(part, nn.parallel.DistributedDataParallel):
                session.wrappers.update(dict.fromkeys(map(id, part.parameters()), weakref.ref(part)))
        emulated = not leaves_autocast_off(session.policy, session.device_type)
        exact = session.policy.compute == "fp32" or (session.policy.compute == "tf32" and emulated)
        if first and exact and switch_off_tf32():
            session.journal.note(
                f"the script had switched TF32 on; under the policy {session.policy.compute} products are FP32's"
            )
        if session.lowers or not session.compiled:  # a compiled step in FP32 shows inner modules, too
            session.modules.setdefault(name)
        policy = with_heads(session.policy, model)
        for note in described(policy, model)[:1]:
            session.journal.note(note)
        if policy.modules and not policy.is_fp32:
            self._override(model, policy, first)
        if first and session.lowers:
            # After the overrides, which may bring another policy: then nothing rules alone.
            dispatch.rule_alone(session.policy, session.device_type)
        if session.request.nudge and not session.journal.updates:
            fresh = [p for p in own if not is_lazy(p) and p not in self._nudged]
            self._nudged.update(dict.fromkeys(fresh))
            nudge(fresh)
        return True

    def finish(self, status: int) -> None:
        """The script is over: how its weights were stored; a pattern that still waits for its model is a mistake."""
        session = self._session
        self._storage.finish()
        if self._waiting and status == 0 and session.request.stop_after is None:
            models = ", ".join(session.modules)
            session.fatal = no_such_module(self._waiting[0], self._paths, f"what was called ({models})")

    def _override(self, model: nn.Module, policy: Policy, first: bool) -> None:
        self._paths.update(dict.fromkeys(path for path, _ in model.named_modules()))
        patterns = [pattern for pattern, _ in policy.modules] if first else self._waiting
        self._waiting = [p for p in patterns if not any(matches(p, path) for path in self._paths)]
        if first:
            for pattern in self._waiting:
                self._wait_for(pattern, model)
        fits = fitting(policy, model)
        if not fits.modules:
            return
        formats = apply_module_overrides(model, fits, self._session.device_type).formats
        # What runs inside a module in FP32 follows it: autocast is off there, and a call would pass for outermost.
        for path, fmt in formats.items():
            if fmt in _AUTOCAST_OFF:
                for name, inner in model.get_submodule(path).named_modules(prefix=path):
                    if name and formats.get(name, fmt) in _AUTOCAST_OFF:
                        inner.__dict__[FOLLOWS] = True

    def _wait_for(self, pattern: str, model: nn.Module) -> None:
        """Patterns may be written for another model than the first that is called, if the script has made it by then.

        Raises:
            UnknownNameError: there is none that the pattern matches.
        """
        if not any(matches(pattern, path) for other in _others(model) for path, _ in other.named_modules()):
            self._session.fatal = error = no_such_module(pattern, self._paths)
            raise error
        print(
            f"mezzo: module pattern {pattern!r} matches nothing in {type(model).__name__}, the first model that is "
            "called; it waits for another one",
            file=sys.stderr,
        )


def _others(model: nn.Module) -> Iterator[nn.Module]:
    """All modules alive that are no part of this one."""
    inside = {id(part) for part in model.modules()}
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and id(thing) not in inside and "_modules" in thing.__dict__:
            yield thing


def nudge(parameters: Iterable[Tensor]) -> int:
    """Move each element of each FP32 parameter to the next FP32 number up or down; the number of tensors moved.

    It is the smallest change that a run can have, for a noise floor. Naive code, with a fair coin for each element::

        p.data = torch.nextafter(p.data, inf if coin else -inf)

    The coins come from a generator of our own with a fixed seed, so the script's random streams are untouched and two
    nudged runs are the same run. Zero goes to the smallest subnormal, the largest finite number may go to infinity,
    NaN stays NaN. Tensors of other formats, and elements that two parameters share, are moved at most once.
    """
    generator = torch.Generator("cpu")
    generator.manual_seed(0x6E75646765)
    moved: set[int] = set()
    with torch.no_grad():
        for parameter in parameters:
            data = parameter.detach()
            if data.dtype is not torch.float32 or not data.numel() or data.data_ptr() in moved:
                continue
            moved.add(data.data_ptr())
            coins = torch.rand(data.shape, generator=generator) < 0.5
            towards = torch.where(coins, -math.inf, math.inf).to(data.device)
            parameter.data.copy_(torch.nextafter(data, towards))
    return len(moved)


class Storage:
    """Stores weights and the optimizer's state as the policy says, for the modules that are called outermost.

    The script has built FP32 weights and one of PyTorch's optimizers. Before an outermost call of a module, those of
    its weights that an optimizer of the script's trains are stored in 16 bits, and that optimizer's work is taken over
    by Mezzo's of the same name (`adopt`), which keeps their masters. The script's optimizer stays the object that it
    was. An optimizer that is made later is met before the next outermost call. What can't be taken over stays as it
    is, and is named at the end of the run.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        policy = session.policy
        self._session = session
        self.wanted = (policy.params, policy.state) != ("fp32", "fp32")
        self._settled: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._met: MutableMapping[Any, bool] = WeakIdKeyDictionary()  # parameter -> whether it was lowered
        self._lowered = self._met_in_all = 0  # parameters
        self._taken_over = 0

    @unseen
    def settle(self, module: nn.Module, *, traced: bool) -> None:
        """Before an outermost call of a module: lower its weights and adopt their optimizers, if any is new."""
        if self._settled.get(module) == self._session.optimizers_made:
            return
        if traced:
            name = type(unwrapped(module)).__name__
            self._session.journal.note(f"the weights of {name} stay FP32: a compiled function calls it")
            return
        if torch.is_inference_mode_enabled():  # what is made here could never be trained
            return
        own = {id(p) for p in module.parameters()}
        for optimizer in list(self._session.optimizers):
            if optimizer not in self._adopted and own & set(map(id, parameters(optimizer))):
                self._adopt(optimizer)
        if self._session.policy.params != "fp32":
            self._lower(module)
        self._settled[module] = self._session.optimizers_made  # adopting makes optimizers, too

    def finish(self) -> None:
        """The script is over: say how weights and states were stored."""
        session, policy = self._session, self._session.policy
        if not self.wanted or session.left_alone is not None or not session.device_type:
            return
        if not self._taken_over:
            session.journal.note(
                "weights and states stay FP32: no optimizer that Mezzo has a form of was made before a model call"
            )
            return
        weights = "weights fp32"
        if policy.params != "fp32":
            counts = f"{self._lowered} of {self._met_in_all} parameters"
            weights = f"weights {policy.params} ({counts}), masters {policy.masters}"
        passes, steps = session.journal.losses, session.journal.updates
        if session.lowered_weights and steps and passes >= 2 * steps:
            session.journal.note(
                f"{passes} backward passes for {steps} optimizer steps: where gradients of {policy.params} weights "
                f"added up, they did so in {policy.params}; mezzo.MixedPrecision(accumulate=N) adds them in FP32"
            )
        session.journal.note(f"{weights}, state {policy.state}")

    def _adopt(self, optimizer: Any) -> None:
        from mezzo.pytorch.optim.adopt import adopt
        from mezzo.pytorch.optim.fused import FusedOptimizer

        policy, name = self._session.policy, type(optimizer).__name__
        if isinstance(optimizer, FusedOptimizer):
            if optimizer not in self._session.stand_ins:
                self._session.journal.note(
                    f"{name} is Mezzo's own: it stores weights and states as the script says"
                )
            return
        try:
            fused = adopt(optimizer, masters=policy.masters, state=policy.state)
        except UsageError as error:
            self._session.journal.note(f"the weights and states of {name} stay FP32: {error}")
            return
        self._taken_over += 1
        self._adopted |= {optimizer, fused}
        self._session.stand_ins[fused] = optimizer

    def _lower(self, module: nn.Module) -> None:
        from mezzo.pytorch.weights.lowering import lower_weights

        model = unwrapped(module)
        stay = f"the weights of {type(model).__name__} stay FP32"
        if _is_sharded(module):
            self._session.journal.note(f"{stay}: it is wrapped for data parallelism")
            return
        trained = {id(p) for o in self._adopted for p in parameters(o)}
        keep = [name for name, p in model.named_parameters() if id(p) not in trained]
        lowered: set[str] = set()
        try:
            lowered = set(lower_weights(model, fitting(self._session.policy, model), keep=keep))
        except UsageError as error:
            self._session.journal.note(f"{stay}: {error}")
        for name, parameter in model.named_parameters():
            before = self._met.get(parameter)
            self._met[parameter] = now = name in lowered or bool(before)
            self._met_in_all += before is None
            self._lowered += now and not before
        self._session.lowered_weights = self._lowered


def _is_sharded(module: nn.Module) -> bool:
    kinds = ("FullyShardedDataParallel", "FSDPModule")
    return any(
        isinstance(m, nn.parallel.DistributedDataParallel)
        or any(kind.__name__ in kinds for kind in type(m).__mro__)
        for m in module.modules()
    )
