"""Gradients unscaled and looked at in a handful of kernels, whatever their number: the PyTorch backend.

Steps on a GPU are bound by launches. `gradients.py` has the same one gradient at a time, and is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from mezzo.keras.scaling.gradients import is_narrow, is_overwritten


def unscale_together(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Any, in_variables_format: bool
) -> tuple[list[Any], list[Any]] | None:
    """As `gradients.unscale`; None where some gradient is none of what PyTorch's kernels for lists take."""
    here = [at for at, gradient in enumerate(gradients) if gradient is not None]
    if not here or not _kernels_take([gradients[at] for at in here]):
        return None
    with torch.no_grad():
        unscaled: list[Any] = list(gradients)
        touched = [at for at in here if not is_overwritten(variables[at])]
        if touched:
            wide = [gradients[at].float() if is_narrow(gradients[at]) else gradients[at] for at in touched]
            for at, gradient in zip(touched, torch._foreach_div(wide, scale)):
                narrow_again = in_variables_format and is_narrow(variables[at])
                unscaled[at] = gradient.to(_format(variables[at])) if narrow_again else gradient
        # The largest magnitude: NaN if any is NaN, and infinite in a narrow format exactly if some element is.
        norms = torch._foreach_norm([unscaled[at] for at in here], float("inf"))
        largest = [
            amax.to(_format(variables[at])) if is_narrow(variables[at]) else amax
            for at, amax in zip(here, norms)
        ]
        widest = torch.float64 if any(amax.dtype == torch.float64 for amax in largest) else torch.float32
        flags = torch.stack([amax.to(widest) for amax in largest]).isfinite().logical_not().unbind()
    bad: list[Any] = [None] * len(gradients)
    for at, flag in zip(here, flags):
        bad[at] = flag
    return unscaled, bad


def _kernels_take(gradients: list[Any]) -> bool:
    """Whether they are ordinary tensors of floating point on one device, none empty (which has no largest element)."""
    return all(
        isinstance(gradient, Tensor)
        and gradient.layout == torch.strided
        and gradient.is_floating_point()
        and gradient.numel() > 0
        and gradient.device == gradients[0].device
        for gradient in gradients
    )


def _format(variable: Any) -> torch.dtype:
    made: torch.dtype = getattr(torch, keras.backend.standardize_dtype(variable.dtype))
    return made
