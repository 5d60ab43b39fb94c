"""The optimizer's turn at the end of a window: from scaled gradients in `.grad` to a move, or to a skip.

Three ways. `InPlace` is for any `torch.optim.Optimizer`, which reads `.grad` as it is: the gradients are
unscaled, checked and clipped where they lie, a pass over memory each. `OnePass` is for a `FusedOptimizer`:
its kernel multiplies as it reads, so no gradient is ever written. One read of them gives norm and found_inf,
and that only where a loss scale or `clip_norm` asks for it. `Released` is the same turn taken within backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.pytorch import distributed
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.scaling import gradients
from mezzo.pytorch.scaling.device_scale import inverse, reading_is_free
from mezzo.pytorch.scaling.fused_step import can_skip_on_device, step_on_device
from mezzo.pytorch.training import checks as checks_of_training
from mezzo.pytorch.training.release import GradientRelease
from mezzo.pytorch.training.window import Window


@dataclass(frozen=True)
class Outcome:
    """What a turn did.

    Args:
        found_inf: 0-dim FP32, 0.0 where every gradient was finite; None if nobody looked.
        skipped: whether the optimizer held still; a tensor where only the device knows.
        norm: 0-dim, total 2-norm of the unscaled gradients before clipping; None if nobody asked for it.
    """

    found_inf: Tensor | None
    skipped: Tensor | bool
    norm: Tensor | None


class Turn(Protocol):
    """Moves the parameters by the gradients of a window, or skips."""

    def __call__(self, window: Window, *, follows: bool) -> Outcome:
        """Take the turn.

        Args:
            window: what the gradients are a sum of.
            follows: whether somebody must be told at once if it was skipped, which makes the host wait.
        """
        ...


class InPlace:
    """Unscale, check and clip in `.grad`, then call the optimizer's step.

    Args:
        optimizer: any.
        clip_value: largest magnitude of an unscaled element.
        clip_norm: largest total 2-norm; after `clip_value`.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None, clip_norm: float | None) -> None:
        self._optimizer = optimizer
        self._clip_value = clip_value
        self._clip_norm = clip_norm
        self._clips = clip_value is not None or clip_norm is not None

    def __call__(self, window: Window, *, follows: bool) -> Outcome:
        """Take the turn; see `Turn`."""
        grads = gradients.values(gradients.parameters(self._optimizer))
        if not grads:
            raise checks_of_training.no_gradient()
        found: Tensor | None = None
        if window.scale is not None:
            flags = gradients.unscale_(grads, inverse(window.scale) * window.rescale)
            found = gradients.combined(flags.values(), window.scale.device)
        elif window.rescale != 1.0:
            with torch.no_grad():
                torch._foreach_mul_(grads, window.rescale)
        norm = gradients.clip_(grads, self._clip_value, self._clip_norm) if self._clips else None
        return Outcome(found, self._step(found, follows), norm)

    def _step(self, found: Tensor | None, follows: bool) -> Tensor | bool:
        if found is None:
            self._optimizer.step()
            return False
        if not follows and not reading_is_free(found) and can_skip_on_device(self._optimizer):
            step_on_device(self._optimizer, found)
            return found
        skipped = bool(found)
        if not skipped:
            self._optimizer.step()
        return skipped


class OnePass:
    """Leave `.grad` as backward left it: the optimizer's kernel unscales and clips what it reads.

    Naive code::

        inv_scale = accumulate / seen / scale
        norm = inv_scale * sqrt(sum((g.double() ** 2).sum() for g in grads))
        found_inf = not isfinite(norm)
        optimizer.step(multiplier=inv_scale * min(1, clip_norm / (norm + 1e-6)), found_inf=found_inf)

    The sum of squares is FP64, so it is finite wherever every gradient is, and one read tells both. Where there
    is a process group, all ranks agree on them.

    Args:
        optimizer: a FusedOptimizer, or the torch optimizer that one was made from and whose `step` is its.
        clip_norm: largest total 2-norm.
    """

    def __init__(self, optimizer: FusedOptimizer, clip_norm: float | None) -> None:
        self._optimizer = optimizer
        self._clip_norm = clip_norm

    def __call__(self, window: Window, *, follows: bool) -> Outcome:
        """Take the turn; see `Turn`."""
        params = list(gradients.parameters(self._optimizer))
        first = next((param.grad for param in params if param.grad is not None), None)
        if first is None:
            raise checks_of_training.no_gradient()
        found: Tensor | None = None
        norm: Tensor | None = None
        multiplier: Tensor | None = None
        device = first.device if window.scale is None else window.scale.device
        if window.scale is not None:
            multiplier = inverse(window.scale) * window.rescale
        elif window.rescale != 1.0:
            multiplier = torch.full((), window.rescale, device=device)
        if window.scale is not None or self._clip_norm is not None:
            sums = self._sums_of_squares(params).to(device, non_blocking=True)
            if window.scale is not None:
                found = 1.0 - sums.isfinite().all().float()
            found, total = distributed.agreed(found, sums, params)
            multiplier, norm = gradients.clipped(total, multiplier, self._clip_norm)
        return Outcome(found, self._step(multiplier, found, follows), norm)

    def _sums_of_squares(self, params: list[Tensor]) -> Tensor:
        for param in params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                checks.gradient(param.grad, param, type(self._optimizer).__name__)
        return distributed.own_sum_of_squares(params)

    def _step(self, multiplier: Tensor | None, found: Tensor | None, follows: bool) -> Tensor | bool:
        if found is None:
            self._optimizer.step(multiplier=multiplier)
            return False
        if follows or reading_is_free(found):
            skipped = bool(found)
            if not skipped:
                self._optimizer.step(multiplier=multiplier)
            return skipped
        self._optimizer.step(multiplier=multiplier, found_inf=found)
        return found


class Released:
    """Take the turn within backward, a parameter at a time.

    Args:
        optimizer: the one that steps.
        shown: the user's object over it, to which schedulers hold.
        clip_norm: largest total 2-norm.
    """

    def __init__(self, optimizer: FusedOptimizer, shown: Optimizer, clip_norm: float | None) -> None:
        self._release = GradientRelease(optimizer)
        self._shown = shown
        self._clip_norm = clip_norm

    def __call__(self, loss: Tensor, params: list[Tensor], window: Window) -> Outcome:
        """Run backward from a window's only loss."""
        found, norm = self._release.backward(
            loss,
            window.seed(loss),
            params,
            multiplier=None if window.scale is None else inverse(window.scale),
            clip_norm=self._clip_norm,
            check=window.scale is not None,
        )
        self._shown._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for it
        torch.clear_autocast_cache()  # no hook of the optimizer's has told the region that weights moved
        return Outcome(found, False if found is None else found, norm)


def settled(skipped: Tensor | bool, *, follows: bool) -> Tensor | bool:
    """Whether the optimizer held still, as a bool where the host must know at once or reads it for nothing."""
    if isinstance(skipped, Tensor) and (follows or reading_is_free(skipped)):
        return bool(skipped)
    return skipped
