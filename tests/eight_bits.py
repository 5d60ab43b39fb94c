"""fp8's quantization and linear layer by the names of its scaling, as a policy has them."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.recipes import Factor, recipe_of
from mezzo.pytorch.kernels import quantized
from mezzo.pytorch.kernels.quantized import Quantized
from mezzo.pytorch.kernels.quantized_linear import quantized_linear

NAMES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
BLOCKS = {"tensorwise": (0, 0), "rowwise": (1, 0)}


def quantize(x: Tensor, dtype: torch.dtype, scaling: str = "tensorwise", dim: int = 1) -> Quantized:
    return quantized.quantize(x, Factor(NAMES[dtype], BLOCKS[scaling]), dim)


def amax(x: Tensor, scaling: str, dim: int = 1) -> Tensor:
    rows, columns = x.shape
    return quantized.amax(
        x, {"tensorwise": (rows, columns), "rowwise": ((1, columns), (rows, 1))[1 - dim]}[scaling]
    )


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: str = "tensorwise"
) -> Tensor:
    return quantized_linear(x, weight, bias, recipe=recipe_of("fp8", scaling))
