"""Session: what one run of a script knows of itself while it runs. Every patched function holds the same
one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mezzo.core.errors import MezzoError
from mezzo.core.loss_scale import LossScale, NoLossScale, Observation, StaticLossScale
from mezzo.core.policy import Policy
from mezzo.pytorch.launch.companions import Companions
from mezzo.pytorch.training.networks import Networks
from mezzo.scripts.journal import Journal
from mezzo.scripts.runner import RunRequest

if TYPE_CHECKING:
    from mezzo.core.trial import TrialDecision
    from mezzo.pytorch.auto import TimedTrial


@dataclass
class Session:
    """The state of a run.

    Attributes:
        policy: the policy as asked for; `auto` until the first model call shows the device.
        scale: the loss-scale machine's state. `NoLossScale` switches all scaling off.
        lowers: whether anything runs in fewer than 32 bits. A plain attribute, for Dynamo guards on it.
        left_alone: why Mezzo stands back for the rest of the run; None while it does its work.
        model_calls: outermost calls of modules with parameters.
        lowered_calls: those that ran in 16 bits; fewer where the trial of `auto` ran others in FP32.
        compiled: whether a module's call was traced into a compiled function of the script's.
        reruns: backward passes that overflowed and were run again before anyone saw their gradients.
        fatal: the user's mistake that only a model call could show (a module pattern that matches nothing).
        modules: class names of the modules called outermost, in order of their first call.
        optimizers: the optimizers alive (weak), for telling whose gradients are whose.
        optimizers_made: how many have been made so far.
        lowered_weights: weights stored in 16 bits; with any, the script can't be left alone any more.
        stand_ins: Mezzo's optimizers (weak) that took over the work of one of the script's, and whose.
        companions: who looks at the training steps.
        networks: the running statistics of the models called, and what a skipped step puts back.
        wrappers: id of a parameter -> (weakly) the data parallelism that adds its gradients over a process group.
    """

    request: RunRequest
    policy: Policy
    journal: Journal
    scale: LossScale = field(default_factory=NoLossScale)
    device_type: str = ""
    lowers: bool = False
    left_alone: str | None = None
    model_calls: int = 0
    lowered_calls: int = 0
    modules: dict[str, None] = field(default_factory=dict)
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    optimizers_made: int = 0
    lowered_weights: int = 0
    stand_ins: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)
    trial: TimedTrial | None = None
    precision_reason: str = ""
    fatal: MezzoError | None = None
    reruns: int = 0
    compiled: bool = False
    companions: Companions = field(init=False)
    networks: Networks = field(default_factory=Networks)
    wrappers: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _whose: int | None = None  # the optimizer whose steps the scale counts "in a row" now
    _in_a_row: dict[int, dict[str, int]] = field(default_factory=dict)  # what it has counted of the others

    def __post_init__(self) -> None:
        self.companions = Companions(self)
        if self.policy.compute != "auto":
            self._settle()

    def _settle(self) -> None:
        self.lowers = not self.policy.is_fp32
        self.scale = self.policy.make_loss_scale()

    @property
    def scaling(self) -> bool:
        """Whether backward passes are scaled."""
        return self.left_alone is None and not isinstance(self.scale, NoLossScale)

    def stand_back(self, why: str, mend: str) -> None:
        """Leave the script alone from here on; the first reason is the one told, with what the user may do about it.

        Once weights are in 16 bits, a call outside a region would fail for its FP32 inputs. So regions then go on,
        and what the script does itself rules only inside its own.
        """
        if self.device_type:
            from mezzo.pytorch.region import dispatch

            dispatch.end_rule(self.device_type)
        if self.lowered_weights:
            self.journal.note(f"not left alone, though {why}: inside that its own choice rules")
        elif self.left_alone is None:
            self.left_alone = why
            self.companions.step_dropped()
            self.journal.note(f"left alone: {why}")
            self.journal.note(mend)

    def resolve(self, device_type: str) -> None:
        """The device is known: replace `auto`, and begin the trial that decides whether 16 bits pay here."""
        if self.device_type:
            return
        self.device_type = device_type
        if self.policy.compute == "auto":
            from mezzo.core.trial import PrecisionTrial
            from mezzo.pytorch.auto import TimedTrial, resolve

            self.policy, self.precision_reason = resolve(self.policy, device_type)
            self._settle()
            if self.policy.compute != "fp32":
                self.trial = TimedTrial(PrecisionTrial(self.policy.compute), device_type)

    def enter(self) -> Policy:
        """An outermost call begins: its policy, which is FP32 by turns while the trial of `auto` runs."""
        self.model_calls += 1
        if self.trial is None:
            policy = self.policy
        else:
            self.trial.start()
            policy = self.policy_now
        self.lowered_calls += self.lowers and policy is not _FP32
        return policy

    @property
    def policy_now(self) -> Policy:
        """The policy of the step that runs."""
        return _FP32 if self.trial is not None and self.trial.precision == "fp32" else self.policy

    def observe(self, *, found_inf: bool, optimizer: int | None = None) -> None:
        """One step is over: the scale for the next.

        All optimizers share one scale. What it counts "in a row" (its hysteresis, its patience) is counted for each:
        else a good step of one would hide for ever that another never moves.

        Args:
            found_inf: whether a gradient was not finite.
            optimizer: the number of the one whose step it was; None: of whoever stepped last.

        Raises:
            LossScaleCollapseError: the scale is at its floor and the patience with this optimizer ran out.
        """
        if optimizer is not None and optimizer != self._whose:
            if self._whose is not None:
                counted = {name: getattr(self.scale, name) for name in _COUNTED if hasattr(self.scale, name)}
                self._in_a_row[self._whose] = counted
                its_own = self._in_a_row.get(optimizer, dict.fromkeys(counted, 0))
                self.scale = replace(self.scale, **its_own)  # type: ignore[arg-type]
            self._whose = optimizer
        self.scale = self.scale.next(Observation(found_inf))

    def overflowed(self, scale: float) -> float:
        """A backward at `scale`, whose gradients nobody has seen yet, overflowed: the scale at which to run
        it again.

        It halves until 1, whatever the machine's own factor; a dynamic machine learns of it.
        """
        self.reruns += 1
        if not isinstance(self.scale, (NoLossScale, StaticLossScale)) and self.scale.scale > 1.0:
            self.observe(found_inf=True)
        return max(1.0, scale * 0.5)

    def decide(self, decision: TrialDecision) -> None:
        """The trial of `auto` is over."""
        self.trial = None
        self.precision_reason = decision.reason
        if decision.precision == "fp32":
            self.policy = Policy("fp32", state=self.policy.state)
            self._settle()


_FP32 = Policy("fp32")
_COUNTED = ("overflows", "stuck", "skips")  # of a loss scale's state: what a good step sets to 0
