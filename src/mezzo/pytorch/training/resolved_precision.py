"""ResolvedPrecision: the policy of a training as applied. Under `auto` it changes at most twice."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mezzo.core.loss_scale import LossScale
from mezzo.core.policy import PRESETS, Policy
from mezzo.pytorch import auto
from mezzo.pytorch.autocast.context import Context, context_of
from mezzo.pytorch.autocast.modules import ModuleOverrides, apply_module_overrides, with_heads
from mezzo.pytorch.distributed import Ranks
from mezzo.pytorch.loss_scaler import LossScaler

_NOTHING = nullcontext()


class ResolvedPrecision:
    """The policy of one training, applied: autocast context, loss scale (`scaler`) and module overrides.

    `policy` is the one of the next step, without `auto`; `decision` says why it is (`why`, if decided before), None
    while a `trial` runs.
    """

    def __init__(
        self, model: nn.Module, asked: Policy, device_type: str, loss_scale: LossScale | None, why: str
    ) -> None:
        self.asked = asked
        self._model = model
        self.device = next((param.device for param in model.parameters()), torch.device(device_type))
        self._device_type = device_type
        self._asked_scale = loss_scale
        self._overrides: ModuleOverrides | None = None
        self.trial: auto.TimedTrial | None = None
        self.decision: auto.TrialDecision | None = None
        resolved, reason = auto.resolve(asked, device_type)
        if asked.compute == "auto" and resolved.compute != "fp32":
            self.trial = auto.TimedTrial(resolved.compute, device_type)
        else:
            self.decision = auto.TrialDecision(resolved.compute, math.nan, why or reason)
        self._apply(resolved)

    def _apply(self, policy: Policy) -> None:
        """Apply a policy without `auto`, with its loss scale at its first state."""
        self._planned = with_heads(policy, self._model)
        scale = policy.make_loss_scale() if self._asked_scale is None else self._asked_scale
        self.scaler = LossScaler.of(scale, self.device)
        self.enter(self._planned.at(0))

    def enter(self, policy: Policy) -> None:
        """Compute by this policy from now on."""
        self.policy = policy
        self._regions = {
            name: context_of(chosen, self._device_type)
            for name, chosen in (("fp32", PRESETS["fp32"]), (policy.compute, policy))
        }
        self.end()
        if policy.modules:
            self._overrides = apply_module_overrides(self._model, policy, self._device_type)

    def counted(self, updates: int) -> None:
        """So many updates are over: the next one may be the first in bf16."""
        if (policy := self._planned.at(updates)) is not self.policy:
            self.enter(policy)

    def end(self) -> None:
        """Take the policy's overrides off the model."""
        if self._overrides is not None:
            self._overrides.remove()
            self._overrides = None

    @property
    def precision(self) -> str:
        """The compute format of the next step."""
        return self.trial.precision if self.trial is not None else self.policy.compute

    @property
    def active_scaler(self) -> LossScaler | None:
        """The loss scale of the next step; None without one, and in the FP32 steps of a trial, which need none."""
        return None if self.trial is not None and self.trial.precision == "fp32" else self.scaler

    @property
    def to_change(self) -> str:
        """The setting by which the format will change after a number of steps; empty if it won't."""
        if self.trial is not None:
            return "precision='auto'"
        over = self.policy is self._planned.at(sys.maxsize)
        return "" if over else f"bf16_from={self._planned.bf16_from}"

    def context(self) -> AbstractContextManager[Context]:
        """The autocast context of the next step."""
        if torch.compiler.is_dynamo_compiling():  # which can't enter a context that it did not see made
            return context_of(self.policy, self._device_type)
        return self._regions[self.precision]

    def outside(self) -> AbstractContextManager[Any]:
        """No autocast, also if the loop's context is still open: ops in backward would run in its format."""
        if not torch.is_autocast_enabled(self._device_type):
            return _NOTHING
        return context_of(self.policy, self._device_type, enabled=False)

    def step_ended(self, *, counts: bool, ranks: Ranks) -> None:
        """Count the step in the trial, and settle once it has decided, for all ranks alike."""
        if self.trial is not None:
            self.trial.finish(counts=counts)
            if ranks:
                self.trial.agree(ranks)
            if self.trial.decision is not None:
                self.settle(self.trial.decision)

    def settle(self, decision: auto.TrialDecision) -> None:
        """The trial is over."""
        self.trial, self.decision = None, decision
        if decision.precision != self.policy.compute:
            self._apply(self.asked.resolved(decision.precision))
