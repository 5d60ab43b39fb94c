"""precision="auto": first by what the hardware has, then by timing the user's own first steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mezzo.core.policy import Policy
from mezzo.core.trial import PrecisionTrial, TrialDecision
from mezzo.pytorch import hardware

# bf16 first: it has FP32's range, and so needs no loss scale and skips no step.
PREFERENCE = ("bf16", "fp16")


def resolve(policy: Policy, device_type: str) -> tuple[Policy, str]:
    """Replace `auto` by a format that this device trains in natively: bf16, else fp16, else fp32.

    Naive code::

        for name in ("bf16", "fp16"):
            if name in hardware.native_formats(device_type):
                return replace(policy, compute=name)
        return replace(policy, compute="fp32")

    Args:
        policy: any policy. One whose compute is not `auto` comes back as it is.
        device_type: `"cpu"`, `"cuda"`, ...

    Returns:
        The policy without `auto`, and a plain sentence that says why.
    """
    if policy.compute != "auto":
        return policy, f"{policy.compute}: as asked"
    native = hardware.native_formats(device_type)
    for name in PREFERENCE:
        if name in native:
            return policy.resolved(name), f"{name}: this {device_type} device multiplies {name} in hardware"
    return (
        policy.resolved("fp32"),
        f"FP32: this {device_type} device has no fast 16-bit format to train in, so 16 bits would be "
        "slower; ask for "
        "bf16 or fp16 by name to use it all the same",
    )


class TimedTrial:
    """Runs a `PrecisionTrial` over steps that someone else takes: start the clock, stop it, ask what is next.

    A step is the sum of its pieces, each from `start` to `pause`; what lies between (the data loader) isn't
    counted. The device is waited for at both ends, during the trial only.

    Args:
        trial: the pure machine.
        device_type: whose queue to wait for; nothing to wait for on a CPU.
        clock: seconds; tests hand in their own.
    """

    def __init__(
        self, trial: PrecisionTrial, device_type: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._trial = trial
        self._device_type = device_type
        self._clock = clock
        self._started: float | None = None
        self._seconds = 0.0

    @property
    def precision(self) -> str:
        """The format for the next step."""
        return self._trial.precision

    @property
    def decision(self) -> TrialDecision | None:
        """What was decided; None while the trial runs."""
        return self._trial.decision

    def start(self) -> None:
        """A piece of a step begins here, unless one has begun already."""
        if self._started is None:
            self._started = self._now()

    def pause(self) -> None:
        """The piece ends here."""
        if self._started is not None:
            self._seconds += max(0.0, self._now() - self._started)
        self._started = None

    def finish(self, *, counts: bool) -> None:
        """The step ends here. It is dropped unless it `counts` (a skipped one has no optimizer in it) and was
        timed.
        """
        self.pause()
        if counts and self._seconds > 0.0:
            self._trial = self._trial.observe(self._seconds)
        self._seconds = 0.0

    def _now(self) -> float:
        if self._device_type != "cpu":
            torch.accelerator.synchronize()
        return self._clock()
