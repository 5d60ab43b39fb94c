"""How a run stores weights and the optimizer's state, where the policy says otherwise than FP32.

The script has built FP32 weights and one of PyTorch's optimizers. Before an outermost call of a module, those
of its weights that an optimizer of the script's trains are stored in 16 bits (`mezzo.pytorch.weights`), and that
optimizer's work is taken over by Mezzo's of the same name (`mezzo.pytorch.optim.adopt`), which keeps their masters.
The script's optimizer stays the object that it was. An optimizer that is made later is met before the next outermost
call.

What can't be taken over stays as it is, and is named at the end of the run: weights of an optimizer that Mezzo has no
form of, weights without an optimizer (a frozen teacher), those of a module that is wrapped for data parallelism
(whose buckets are laid out already) or that only a compiled function calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from mezzo.core.errors import UsageError
from mezzo.core.policy import Policy

if TYPE_CHECKING:
    from torch import nn

    from mezzo.pytorch.launch.session import Session


def check(policy: Policy) -> None:
    """Whether an unmodified script can be run with weights stored as this policy says.

    Raises:
        UsageError: it can't; what can.
    """
    if policy.params == "fp16":
        raise UsageError(
            f"policy '{policy}': a script that is run unchanged unscales each gradient where it is stored, and in "
            "fp16 that would flush the small ones to zero. Leave params and masters out (weights stay FP32, "
            "computed in fp16), use bf16, or write mezzo.MixedPrecision(..., weights='masters') into the script."
        )
    if policy.params not in ("fp32", policy.activations):
        raise UsageError(
            f"policy '{policy}': a script that is run unchanged can store weights in {policy.params} where "
            f"compute is {policy.params}, too. Use {policy.params},params={policy.params}."
        )


class Storage:
    """Stores weights and states as the policy says, for the modules that are called outermost.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        policy = session.policy
        self._session = session
        self.wanted = (policy.params, policy.state) != ("fp32", "fp32")
        self._settled: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._met: MutableMapping[Any, bool] | None = None  # parameter -> whether it was lowered
        self._counts = {True: 0, False: 0}
        self._taken_over = 0

    def settle(self, module: nn.Module) -> None:
        """Before an outermost call of a module: lower its weights and adopt their optimizers, if any is new."""
        if not self.wanted or self.knows(module):
            return
        import torch

        if torch.is_inference_mode_enabled():  # what is made here could never be trained
            return
        self._adopt_all(module)
        if self._session.policy.params != "fp32":
            self._lower(module)
        self._settled[module] = self._session.optimizers_made  # adopting makes optimizers, too

    def knows(self, module: nn.Module) -> bool:
        """Whether nothing is left to do for this module."""
        return self._settled.get(module) == self._session.optimizers_made

    def left_out(self, why: str) -> None:
        """Some weights stay as they are, and this is why."""
        if self.wanted:
            self._session.journal.note(why)

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
            counts = f"{self._counts[True]} of {sum(self._counts.values())} parameters"
            weights = f"weights {policy.params} ({counts}), masters {policy.masters}"
        passes, steps = session.journal.losses, session.journal.updates
        if session.lowered_weights and steps and passes >= 2 * steps:
            session.journal.note(
                f"{passes} backward passes for {steps} optimizer steps: where gradients of {policy.params} weights "
                f"added up, they did so in {policy.params}; mezzo.MixedPrecision(accumulate=N) adds them in FP32"
            )
        session.journal.note(f"{weights}, state {policy.state}")

    def _adopt_all(self, module: nn.Module) -> None:
        own = {id(p) for p in module.parameters()}
        for optimizer in list(self._session.optimizers):
            if optimizer not in self._adopted and own & set(map(id, _parameters(optimizer))):
                self._adopt(optimizer)

    def _adopt(self, optimizer: Any) -> None:
        from mezzo.pytorch.optim.adopt import adopt
        from mezzo.pytorch.optim.fused import FusedOptimizer

        policy = self._session.policy
        name = type(optimizer).__name__
        if isinstance(optimizer, FusedOptimizer):
            if optimizer not in self._session.stand_ins:
                self.left_out(f"{name} is Mezzo's own: it stores weights and states as the script says")
            return
        try:
            fused = adopt(optimizer, masters=policy.masters, state=policy.state)
        except UsageError as error:
            self.left_out(f"the weights and states of {name} stay FP32: {error}")
            return
        self._taken_over += 1
        self._adopted.add(optimizer)
        self._adopted.add(fused)
        self._session.stand_ins[fused] = optimizer

    def _lower(self, module: nn.Module) -> None:
        from mezzo.pytorch.region.modules import fitting
        from mezzo.pytorch.weights.lowering import lower_weights
        from mezzo.pytorch.wrappers import unwrapped

        model = unwrapped(module)
        if _is_sharded(module):
            self.left_out(
                f"the weights of {type(model).__name__} stay FP32: it is wrapped for data parallelism"
            )
            return
        trained = {id(p) for o in self._adopted for p in _parameters(o)}
        keep = [name for name, p in model.named_parameters() if id(p) not in trained]
        try:
            lowered = set(lower_weights(model, fitting(self._session.policy, model), keep=keep))
        except UsageError as error:
            self.left_out(f"the weights of {type(model).__name__} stay FP32: {error}")
            lowered = set()
        self._count(model, lowered)
        self._session.lowered_weights = self._counts[True]

    def _count(self, model: nn.Module, lowered: Iterable[str]) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        if self._met is None:
            self._met = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters():
            before, now = self._met.get(parameter), name in lowered
            if before is None:
                self._counts[now] += 1
            elif now and not before:
                self._counts[True] += 1
                self._counts[False] -= 1
            self._met[parameter] = bool(before or now)


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_sharded(module: nn.Module) -> bool:
    from torch import nn

    kinds = ("FullyShardedDataParallel", "FSDPModule")
    return any(
        isinstance(m, nn.parallel.DistributedDataParallel)
        or any(kind.__name__ in kinds for kind in type(m).__mro__)
        for m in module.modules()
    )
