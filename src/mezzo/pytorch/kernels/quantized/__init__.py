"""Quantization of a matrix by a `Factor`: codes, and the scales of their blocks.

Sources: OCP Microscaling Formats (MX) 1.0; "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149);
Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.formats import FORMATS, named
from mezzo.core.recipes import ELEMENTS, HADAMARD, Factor
from mezzo.core.rounding import RoundingPlan
from mezzo.pytorch.dtypes import FLOATS, dtype_of
from mezzo.pytorch.kernels.backend import KERNELS, cpu_loops
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.rounding import random_integers

_MANTISSA = (1 << 23) - 1  # of an FP32 pattern
_PLANS = {name: RoundingPlan(named(name), FORMATS["fp32"], "saturate") for name in ELEMENTS}
_LARGEST = torch.finfo(torch.float32).max
_SIXTH = float(torch.tensor(1.0) / 6)  # in FP32
# The signs of the random Hadamard transform, fixed (arXiv 2509.25149, as Transformer Engine has them).
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(slots=True, eq=False)
class Quantized:
    """A matrix [R, C] as ``codes * inv_scale * tensor_scale``.

    `codes` is e4m3fn or e5m2; elements of 6 and 4 bits are values of e4m3fn. `inv_scale` [R or fewer, C or fewer] has
    one FP32 number for each block. `tensor_scale` is FP32 [] or None: a factor of the whole, which a product applies
    to its sums. Rows and columns are padded with zeros to whole blocks.
    """

    codes: Tensor
    inv_scale: Tensor
    tensor_scale: Tensor | None = None
    _values: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """``codes * inv_scale``, kept for a second product of the same factor; exact in bf16 but for FP32 scales."""
        if self._values is None or self._values.dtype is not dtype:
            kernel = _kernel(self.codes, self.inv_scale)
            if kernel is not None and dtype in (torch.bfloat16, torch.float32):
                self._values = kernel.decode(self.codes, self.inv_scale, dtype)
            else:
                self._values = _by_block(torch.mul, self.codes.to(torch.float32), self.inv_scale).to(dtype)
        return self._values


def quantize(x: Tensor, factor: Factor, dim: int = 1, dtype: torch.dtype | None = None) -> Quantized:
    """Codes and scales of a matrix [R, C] whose dimension `dim` a product sums over; with `dtype` the values as well.

    Naive code, for one power of two for the whole matrix::

        inv_scale = 2.0 ** ceil(log2(x.abs().max() / factor.largest))
        codes = (x.float() / inv_scale).to(torch.float8_e4m3fn)
    """
    kernel = _kernel(x) if x.dtype in FLOATS and factor.scale != "fp32" else None
    if kernel is not None and (fused := _fused(kernel, x.detach(), factor, dim, dtype)) is not None:
        return fused
    wide = _in_blocks(x.detach().to(torch.float32), factor, dim)
    if factor.hadamard:
        wide = hadamard(wide, dim)
    block = _block(wide, factor, dim)
    found = _with_scales(wide, amax(wide, block), factor)
    if factor.scale.startswith("e8m0") or not named(factor.element).has_nan:
        found.inv_scale = torch.where(_magnitude(wide, block).isfinite(), found.inv_scale, math.nan)
    return found


def _block(x: Tensor, factor: Factor, dim: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    other, summed = factor.block
    height, width = (other, summed) if dim == 1 else (summed, other)
    return height or x.shape[0], width or x.shape[1]


def _kernel(*tensors: Tensor) -> ModuleType | None:
    """The compiled loops, if there are any and they may read these tensors."""
    fits = all(x.device.type == "cpu" and x.numel() > 0 for x in tensors) and is_plain(*tensors)
    return cpu_loops("quantized.cpu", os.environ.get(KERNELS)) if fits else None


def _fused(
    kernel: ModuleType, x: Tensor, factor: Factor, dim: int, dtype: torch.dtype | None
) -> Quantized | None:
    """The same in one pass over memory, two with a scale of the tensor; None if an element is not finite."""
    x = _in_blocks(x, factor, dim).contiguous()
    if factor.hadamard and dim == 0:
        x = kernel.mixed(x, _mixing(x.device))
    elif factor.hadamard:
        x = hadamard(x.to(torch.float32), dim).to(torch.bfloat16)
    block, tensor_scale = _block(x, factor, dim), None
    least, most = (1, 253) if factor.scale == "power-of-two" else (0, 254)
    given = [least, most, _top(factor) if factor.scale == "e8m0-floor" else 0]
    if factor.scale == "e4m3fn" or block == x.shape:
        largest = _magnitude(x, (x.shape[0], x.shape[1])).to(torch.float32).view(())
        if factor.scale == "e4m3fn":
            encode_tensor, tensor_scale = _of_tensor(largest)
            given = [_pattern(encode_tensor * _SIXTH), _pattern(tensor_scale), 0]
        else:
            exponent = _pattern(_power_scale(largest, factor)) >> 23
            given = [exponent, exponent, 0]
    found = kernel.quantize(x, factor, block, given, dtype)
    if found is None:
        return None
    codes, inv_scale, values = found
    return Quantized(codes, inv_scale, tensor_scale, values)


def _pattern(number: Tensor) -> int:
    """The bits of an FP32 [] on a CPU."""
    return int(number.view(torch.int32))


def amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest finite magnitude of each block of (height, width) elements, 0 if there is none. No host sync."""
    return _magnitude(x.nan_to_num(0.0, 0.0, 0.0), block)


def _magnitude(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block; NaN if one is NaN."""
    if block == tuple(x.shape):
        low, high = x.aminmax()
        return torch.maximum(-low, high).abs().view(1, 1)  # not -0.0, whose inverse is minus infinity
    (rows, columns), (height, width) = x.shape, block
    magnitudes = x.abs()
    if height == 1 and width == columns:
        return magnitudes.amax(1, keepdim=True)
    if width == 1 and height == rows:
        return magnitudes.amax(0, keepdim=True)
    return magnitudes.reshape(rows // height, height, columns // width, width).amax((1, 3))


def _with_scales(wide: Tensor, largest: Tensor, factor: Factor) -> Quantized:
    if factor.scale == "e4m3fn":
        return _nvfp4(wide, largest, factor)
    if factor.scale == "fp32":
        inv_scale = largest / factor.largest
        inv_scale = torch.where(inv_scale > 0, inv_scale, 1.0)
    else:
        inv_scale = _power_scale(largest, factor)
    scaled = _by_block(torch.div, wide, inv_scale).contiguous()
    return Quantized(_codes(scaled, factor), inv_scale)


def _power_scale(largest: Tensor, factor: Factor) -> Tensor:
    """The power of two for the largest magnitude of a block: ``2 ** ceil(log2(largest / factor.largest))``."""
    if factor.scale == "e8m0-floor":
        return _power_of_two(((largest.view(torch.int32) >> 23) - _top(factor)).clamp(0, 254))
    # The exponent is the quotient's biased one, plus 1 if its mantissa is not 0.
    quotient = (largest / factor.largest).view(torch.int32)
    biased = (quotient + _MANTISSA) >> 23
    if factor.scale == "e8m0":  # from 2**-127 to 2**127
        return _power_of_two(biased.clamp(max=254) * (quotient > 1 << 22))
    return _power_of_two(biased.clamp(1, 253))  # from 2**-126 to 2**126


def _top(factor: Factor) -> int:
    """The exponent of the largest element."""
    return math.frexp(factor.largest)[1] - 1


def _power_of_two(biased: Tensor) -> Tensor:
    """``2 ** (biased - 127)``, for 0 as well."""
    return torch.where(biased > 0, biased << 23, 1 << 22).view(torch.float32)


def _nvfp4(wide: Tensor, largest: Tensor, factor: Factor) -> Quantized:
    """4-bit elements, a scale in e4m3fn for each block, one in FP32 for the tensor; operation by operation in FP32."""
    encode_tensor, decode_tensor = _of_tensor(largest.amax())
    in_range = (largest * (encode_tensor * _SIXTH)).clamp(max=448.0)
    block_scale = in_range.to(torch.float8_e4m3fn).to(torch.float32)
    to_codes = (1.0 / (block_scale * decode_tensor)).clamp(max=_LARGEST)
    scaled = _by_block(torch.mul, wide, to_codes).contiguous()
    return Quantized(_codes(scaled, factor), block_scale, decode_tensor)


def _of_tensor(of_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4's factor of a tensor whose largest magnitude is given, and its inverse."""
    # `number / tensor` would multiply by the reciprocal, which rounds twice.
    encode_tensor = (torch.full_like(of_tensor, 448.0 * 6.0) / of_tensor).clamp(max=_LARGEST)
    encode_tensor = torch.where((encode_tensor == 0) | (of_tensor == 0), 1.0, encode_tensor)
    return encode_tensor, 1.0 / encode_tensor


def _codes(x: Tensor, factor: Factor) -> Tensor:
    """Codes of FP32 values; of 4 and 6 bits as e4m3fn, saturated. In 8 bits infinity is NaN, or e5m2's infinity."""
    dtype = dtype_of("e5m2" if factor.element == "e5m2" else "e4m3fn")
    if factor.stochastic or factor.element not in ("e4m3fn", "e5m2"):
        random = random_integers(x) if factor.stochastic else None
        rounded: Tensor = _PLANS[factor.element].round(x, torch, random)
        if named(factor.element).has_nan:
            rounded = torch.where(x.isfinite(), rounded, x if factor.element == "e5m2" else math.nan)
        return rounded.to(dtype)
    return encode(x, dtype)


def hadamard(x: Tensor, dim: int) -> Tensor:
    """FP32 [R, C] with each 16 elements along `dim` multiplied by ``diag(signs) H / 4``, rounded to bf16."""
    matrix = _mixing(x.device)
    rows, columns = x.shape
    if dim == 1:
        mixed = (x.reshape(-1, HADAMARD) @ matrix).view(rows, columns)
    else:
        mixed = (matrix.t() @ x.reshape(-1, HADAMARD, columns)).view(rows, columns)
    return mixed.to(torch.bfloat16).to(torch.float32)


def _mixing(device: torch.device) -> Tensor:
    """The transform's FP32 matrix [16, 16]."""
    i = torch.arange(HADAMARD, device=device)
    bits = i[:, None] & i[None, :]
    odd = (bits ^ bits >> 1 ^ bits >> 2 ^ bits >> 3) & 1
    signs = torch.tensor(_SIGNS, dtype=torch.float32, device=device)
    return signs[:, None] * (1.0 - 2.0 * odd) / 4


def _in_blocks(x: Tensor, factor: Factor, dim: int) -> Tensor:
    """With zeros added so that both dimensions are whole blocks."""
    other, summed = factor.block
    if factor.hadamard:
        summed = math.lcm(summed or 1, HADAMARD)
    height, width = (other, summed) if dim == 1 else (summed, other)
    below, right = -x.shape[0] % (height or 1), -x.shape[1] % (width or 1)
    return F.pad(x, (0, right, 0, below)) if below or right else x


def _by_block(op: Callable[[Tensor, Tensor], Tensor], x: Tensor, scales: Tensor) -> Tensor:
    """``op(x, scale)`` with the scale of each element's block, for x [R, C] and scales [R or fewer, C or fewer]."""
    if all(count in (1, size) for count, size in zip(scales.shape, x.shape)):
        return op(x, scales)
    (rows, columns), (down, across) = x.shape, scales.shape
    blocks = x.reshape(down, rows // down, across, columns // across)
    return op(blocks, scales[:, None, :, None]).view(rows, columns)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of FP32 values, rounded to nearest even: finite ones saturate, infinity in e4m3fn is NaN."""
    largest = torch.finfo(dtype).max
    if dtype is torch.float8_e4m3fn:
        return x.nan_to_num(math.nan, math.nan, math.nan).clamp(-largest, largest).to(dtype)
    return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)
