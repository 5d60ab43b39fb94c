"""Skipping an optimizer's step on the device: PyTorch's contract of `grad_scale` and `found_inf`, and its one
hole.

A fused optimizer with `_step_supports_amp_scaling` reads two tensors that are set on it for one call of
`step`: `grad_scale`, by which it divides the gradients, and `found_inf`, at which it leaves parameters, state
and step count as they are. The host need not know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether this optimizer, in the state in which it is, leaves no trace of a step that it is told to skip.

    False for the fused SGD with momentum until it has moved once: it allocates its buffers with `empty_like`
    at its first step, fills them only if that step is not skipped, and takes them for filled at the next
    (torch 2.13, `_fused_sgd`): the momentum then starts from whatever the memory held.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not isinstance(optimizer, SGD):
        return True
    return not any(
        group["momentum"] != 0
        and any(
            param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
            for param in group["params"]
        )
        for group in optimizer.param_groups
    )


def step_on_device(
    optimizer: Optimizer,
    found_inf: Tensor,
    grad_scale: Tensor | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call `optimizer.step`, which does nothing where `found_inf` is not 0.

    Args:
        optimizer: one that `can_skip_on_device`. A `grad_scale` that the user set on it is multiplied in.
        found_inf: 0-dim FP32.
        grad_scale: 0-dim FP32 that the gradients are still multiplied with; None if they are unscaled.
        args: for `optimizer.step`.
        kwargs: for `optimizer.step`.
    """
    own = getattr(optimizer, "grad_scale", None)
    if own is not None:
        grad_scale = own if grad_scale is None else grad_scale * own
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **(kwargs or {}))
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
