"""StepResult: what one step did, kept as tensors on the device until someone reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mezzo.core.finding import Finding


@dataclass(frozen=True, repr=False)
class StepResult:
    """What `MixedPrecision.step` did. Reading any of it may wait for the device; making it does not.

    Nothing here holds on to a graph or to gradients: the result of a step is a few 0-dim tensors, and can be
    kept.

    Args:
        updated: whether the call ended a window, so that the optimizer's turn came.
        found_inf: 0-dim tensor or bool, whether a gradient was NaN or infinite; None if nobody looked, since
            without a loss scale a step is never skipped.
        loss_tensor: 0-dim, detached, the last loss that was handed in (not divided, not scaled); None where there
            is none: a flush with nothing accumulated.
        grad_norm_tensor: 0-dim 2-norm of the unscaled gradients before clipping; None inside a window, and
            where the step had no use for it.
        scale_tensor: 0-dim FP32 loss scale that this step's loss was multiplied with; None without one.
        note: why nothing happened, where nothing did.
        weight_overflow_tensor: 0-dim FP32, above 0 once a weight has become infinite in its 16-bit format;
            None where weights are FP32 or the optimizer does not tell.
        finding: where the value that was not finite came from, if the step was skipped and traced.
    """

    updated: bool
    found_inf: Tensor | bool | None = None
    loss_tensor: Tensor | None = None
    grad_norm_tensor: Tensor | None = None
    scale_tensor: Tensor | None = None
    note: str = ""
    weight_overflow_tensor: Tensor | None = None
    finding: Finding | None = None

    @property
    def skipped(self) -> bool:
        """Whether the optimizer's turn came and was passed over because a gradient was NaN or infinite."""
        return self.updated and bool(self.found_inf)

    @property
    def moved(self) -> bool:
        """Whether the optimizer moved the parameters: step your own scheduler, count your steps, by this."""
        return self.updated and not self.skipped

    @property
    def reason(self) -> str:
        """Why the optimizer did not move, or that a weight is infinite, in a sentence; empty if all is well."""
        if self.skipped:
            found = f". {self.finding}" if self.finding is not None else ""
            return (
                f"a gradient was NaN or infinite at loss scale {self.loss_scale:g}; parameters and optimizer "
                f"are as before{found}"
            )
        if self.updated and self.weight_overflow:
            return (
                "a weight has become infinite in its 16-bit format: its master is past the format's largest "
                "number. A smaller learning rate, or weights='fp32'"
            )
        return self.note

    @property
    def weight_overflow(self) -> bool:
        """Whether a weight was written infinite in its 16-bit format, in this step or one before it."""
        return self.weight_overflow_tensor is not None and bool(self.weight_overflow_tensor)

    @property
    def loss(self) -> float | None:
        """The loss as it was handed to `step`; for `flush` the last of the window; None if nothing was accumulated."""
        return None if self.loss_tensor is None else float(self.loss_tensor)

    @property
    def grad_norm(self) -> float | None:
        """The gradients' total 2-norm, unscaled and before clipping; None where the optimizer's turn did not
        come, and where the step had no use for it: without `clip_norm` (`math.inf` asks for the norm alone), unless
                a `mezzo.optim` optimizer looks for NaN under a loss scale, which gives it too.

                NaN or infinite if a gradient is.
        """
        return None if self.grad_norm_tensor is None else float(self.grad_norm_tensor)

    @property
    def loss_scale(self) -> float:
        """The loss scale that was used; 1.0 without one."""
        return 1.0 if self.scale_tensor is None else float(self.scale_tensor)

    def __repr__(self) -> str:
        return (
            f"StepResult(moved={self.moved}, skipped={self.skipped}, reason={self.reason!r}, "
            f"loss={self.loss}, grad_norm={self.grad_norm}, loss_scale={self.loss_scale:g})"
        )
