"""Parameters for the optimizer benchmarks: about a given number, in one tensor or in the many of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

SIZES = {"1M": 2**20, "16M": 2**24, "128M": 2**27}
WIDTHS = {"1M": 64, "16M": 256, "128M": 768}
LAYERS = 12
CONTEXT = 1024
PATTERN = 2**20  # random numbers are drawn for so many elements, and repeated: drawing is slow


def transformer(size: str) -> list[tuple[int, ...]]:
    """The parameters' shapes of a GPT-2 of 12 layers whose vocabulary fills it up to `size`: 148 tensors.

    >>> sum(torch.Size(shape).numel() for shape in transformer("16M")) / 2**24 > 0.99
    True
    """
    d = WIDTHS[size]
    norm: list[tuple[int, ...]] = [(d,), (d,)]
    attention: list[tuple[int, ...]] = [(3 * d, d), (3 * d,), (d, d), (d,)]
    mlp: list[tuple[int, ...]] = [(4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    body = LAYERS * [*norm, *attention, *norm, *mlp]
    context = min(CONTEXT, 4 * d)
    rest = [*body, (context, d), *norm]
    vocabulary = (SIZES[size] - sum(torch.Size(shape).numel() for shape in rest)) // d
    return [(vocabulary, d), (context, d), *body, *norm]


LAYOUTS: Mapping[str, Callable[[str], Sequence[tuple[int, ...]]]] = {
    "one": lambda size: [(SIZES[size],)],
    "many": transformer,
}


def parameters(size: str, layout: str, dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Weights of about 0.02 and gradients of about 1e-3, representable in bf16, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    return [_parameter(shape, draw, dtype, device) for shape in LAYOUTS[layout](size)]


def _parameter(
    shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype, device: str
) -> nn.Parameter:
    def normal(size: float) -> Tensor:
        numel = torch.Size(shape).numel()
        drawn = torch.empty(min(numel, PATTERN), dtype=torch.bfloat16).normal_(generator=draw).mul_(size)
        tiled = drawn.repeat(-(-numel // PATTERN))[:numel].view(shape)
        return tiled.to(device=device, dtype=dtype, copy=True)

    param = nn.Parameter(normal(0.02))
    param.grad = normal(1e-3)
    return param
