"""Parameters and optimizer states of a run that are stored in fewer bits, and parameters moved by one ulp.

Before an outermost call, a module's weights that an optimizer trains are stored in 16 bits, and that optimizer becomes
Mezzo's of the same name, which keeps the masters. What can't be stored so stays as it is, and is named at the end.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.errors import UsageError
from mezzo.pytorch.autocast.modules import fitting
from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.pytorch.monitor.module_paths import unwrapped
from mezzo.pytorch.optim.adopt import adopt
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.step import parameters
from mezzo.pytorch.weights.stored_parameters import lower_weights

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session

SHARDED = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class Storage:
    """Stores weights and optimizer states as the policy says, for the modules that are called outermost."""

    def __init__(self, session: Session) -> None:
        policy = session.policy
        self._session = session
        self.wanted = (policy.params, policy.state) != ("fp32", "fp32")
        self._settled: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lowered: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # of each parameter seen
        self._counts = (0, 0)  # parameters stored in 16 bits, and all
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
                "that Mezzo can replace (torch.optim.AdamW, Adam or SGD)"
            )
            return
        weights = "weights fp32"
        if policy.params != "fp32":
            lowered, all_of_them = self._counts
            weights = (
                f"weights {policy.params} ({lowered} of {all_of_them} parameters), masters {policy.masters}"
            )
        passes, steps = session.journal.losses, session.journal.updates
        if session.lowered_weights and steps and passes >= 2 * steps:
            session.journal.note(
                f"{passes} backward passes for {steps} optimizer steps: accumulated gradients of {policy.params} "
                f"weights were added in {policy.params}; mezzo.MixedPrecision(..., accumulate=N) adds them in FP32"
            )
        session.journal.note(f"{weights}, state {policy.state}")

    def adopt(self, optimizer: Any) -> None:
        """Make the optimizer Mezzo's, if states or masters of the policy need that and it isn't."""
        if not self.wanted or optimizer in self._adopted:
            return
        policy, name = self._session.policy, type(optimizer).__name__
        if isinstance(optimizer, FusedOptimizer):
            self._session.journal.note(
                f"{name} is one of Mezzo's optimizers: the script's arguments decide how it stores states"
            )
            return
        try:
            adopt(optimizer, masters=policy.masters, state=policy.state)
        except UsageError as error:
            self._session.journal.note(f"the weights and states of {name} stay FP32: {error}")
            return
        self._any_adopted = True
        self._adopted.add(optimizer)

    def _lower(self, module: nn.Module) -> None:
        model = unwrapped(module)
        stay = f"the weights of {type(model).__name__} stay FP32"
        if any(kind.__name__ in SHARDED for part in module.modules() for kind in type(part).__mro__):
            self._session.journal.note(f"{stay}: it is wrapped for data parallelism")
            return
        trained = {id(p) for optimizer in self._adopted for p in parameters(optimizer)}
        keep = [name for name, p in model.named_parameters() if id(p) not in trained]
        names: set[str] = set()
        try:
            names = set(lower_weights(model, fitting(self._session.policy, model), keep=keep))
        except UsageError as error:
            self._session.journal.note(f"{stay}: {error}")
        lowered, all_of_them = self._counts
        for name, parameter in model.named_parameters():
            before = self._lowered.get(parameter)
            self._lowered[parameter] = now = name in names or bool(before)
            lowered, all_of_them = lowered + (now and not before), all_of_them + (before is None)
        self._counts = lowered, all_of_them
        self._session.lowered_weights = lowered


def nudge(parameters: Iterable[Tensor]) -> int:
    """Move each element of each FP32 parameter one ulp, by coins of a generator of our own; the number of tensors."""
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
