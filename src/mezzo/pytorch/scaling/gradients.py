"""The gradients of one optimizer: gather them, unscale and check them, measure and clip them. Nothing waits.

A sparse gradient takes part by its values. Each pass is one fused call per device and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.errors import UsageError


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def values(params: Iterable[Tensor], *, allow_fp16: bool = False) -> list[Tensor]:
    """The tensors that hold the gradients' numbers: `p.grad`, or the values of a sparse one.

    A sparse gradient becomes coalesced; parameters without one are left out.

    Raises:
        UsageError: an fp16 gradient (unless allowed): dividing it by the loss scale would flush it to zero.
    """
    found = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.dtype is torch.float16 and not allow_fp16:
            raise UsageError(
                "cannot unscale an fp16 gradient: its small values would flush to zero. The weights are fp16 "
                "(did you call model.half()?). Keep them FP32 and lower the compute: mezzo.autocast('fp16'). Or, "
                "over an optimizer of mezzo.optim, call scaler.step(optimizer) alone, which unscales as it reads; "
                "to clip too, use mezzo.MixedPrecision(clip_norm=...)."
            )
        if grad.is_sparse:
            # Entries of one index can be finite apart and overflow together, and a norm is of their sums.
            param.grad = grad = grad.coalesce()
            grad = grad._values()
        found.append(grad)
    return found


def unscale_(grads: list[Tensor], inv_scale: Tensor) -> dict[torch.device, Tensor]:
    """Multiply gradients in place by `inv_scale`, and say for each device whether any of them was NaN or
    infinite.

    Naive code::

        for g in grads:
            found_inf[g.device] = max(found_inf[g.device], float(not g.isfinite().all()))
            g.mul_(inv_scale)

    Args:
        grads: dense tensors of any devices and floating dtypes.
        inv_scale: 0-dim FP32; finite.

    Returns:
        Device -> 0-dim FP32, 0.0 or 1.0, in the order in which the devices came.
    """
    grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        grouped.setdefault((grad.device, grad.dtype), []).append(grad)
    found: dict[torch.device, Tensor] = {}
    inverses: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _), group in grouped.items():
            if device not in found:
                found[device] = torch.zeros((), dtype=torch.float32, device=device)
                inverses[device] = inv_scale.to(device, non_blocking=True)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found[device], inverses[device])
    return found


def combined(found: Iterable[Tensor], device: torch.device) -> Tensor:
    """One number on one device out of each device's: 0.0 where all were finite, 1.0 otherwise."""
    flags = [flag.to(device, non_blocking=True) for flag in found]
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


@torch.no_grad()
def clip_(grads: list[Tensor], clip_value: float | None, clip_norm: float | None) -> Tensor | None:
    """Clip unscaled gradients in place and return their total 2-norm as it was before, if `clip_norm` asks for it.

    Value first, then norm: shrinking the norm can't push an element past the value bound again, so that both
    bounds hold afterwards. The returned norm is of the gradients as backward left them: 0-dim, NaN or
    infinite if they are. A `clip_norm` of infinity measures and clips nothing.
    """
    total = None if clip_norm is None else torch.nn.utils.get_total_norm(grads)
    if clip_value is not None:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)
    if clip_norm is not None and total is not None and clip_norm < math.inf:
        bounded = total if clip_value is None else torch.nn.utils.get_total_norm(grads)
        # As torch.nn.utils.clip_grad_norm_: a factor of 1 is multiplied in rather than branched on.
        factor = (clip_norm / (bounded + 1e-6)).clamp(max=1.0)
        for device, group in _by_device(grads).items():
            torch._foreach_mul_(group, factor.to(device, non_blocking=True))
    return total


def clipped(
    sum_of_squares: Tensor, multiplier: Tensor | None, clip_norm: float | None
) -> tuple[Tensor | None, Tensor]:
    """By what gradients are to be multiplied so that they are clipped as well, and their norm before that.

    Naive code::

        norm = multiplier * sqrt(sum_of_squares)
        return multiplier * min(1, clip_norm / (norm + 1e-6)), norm

    Args:
        sum_of_squares: 0-dim FP64, over gradients as they lie.
        multiplier: 0-dim FP32 that they are multiplied with in any case; None for 1.
        clip_norm: largest total 2-norm; None or infinity for any.

    Returns:
        0-dim FP32 each; None for a multiplier of 1.
    """
    norm = sum_of_squares.sqrt()
    if multiplier is not None:
        norm = norm * multiplier
    if clip_norm is not None and clip_norm < math.inf:
        # As torch.nn.utils.clip_grad_norm_: a factor of 1 is multiplied in rather than branched on.
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        multiplier = (factor if multiplier is None else factor * multiplier).float()
    return multiplier, norm.float()


def _by_device(grads: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    grouped: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        grouped.setdefault(grad.device, []).append(grad)
    return grouped
