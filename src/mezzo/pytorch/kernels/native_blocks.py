"""Products of block formats on tensor cores, by `torch.nn.functional.scaled_mm`: the layouts that it needs.

Both factors have the summed dimension innermost. A product is one of `mezzo.core.recipes.HARDWARE`:

    mxfp8      e4m3fn or e5m2, a scale of e8m0 for 32 elements, swizzled
    nvfp4      e2m1, two in a byte, a scale of e4m3fn for 16 elements, swizzled, and one of FP32 for the tensor
    fp8-block  e4m3fn or e5m2, FP32 scales for 128 elements, or of the second factor for 128 x 128

*Swizzled* is the order of cuBLAS (its manual, "1D block scaling factors layout"): tiles of 128 rows and 4 columns, with
scale (r, c) of a tile at 16 (r mod 32) + 4 (r div 32) + c. No GPU with these products was used to write this. Tests
check layouts by PyTorch's meta kernel, and values by reading the layouts back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.pytorch.kernels.quantized import Quantized

_PACKED = 32  # elements of e2m1 in 16 bytes, to which rows are aligned


def product(
    kind: str, form: str, a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``"NT"``, ``"NN"`` or ``"TN"`` as in `quantized_linear.product`; a bias is added in FP32, before rounding."""
    (left, inv_left), (right, inv_right) = _rows(a, form == "TN"), _rows(b, form != "NT")
    if kind == "fp8-block":
        settings = _tiles(inv_left, right, inv_right)
    elif kind == "mxfp8":
        left_scales, right_scales = [_e8m0(left, inv_left)], [_e8m0(right, inv_right)]
        settings = _blocks(F.ScalingType.BlockWise1x32, left_scales, right_scales)
    else:
        (left, inv_left), (right, inv_right) = _e2m1(left, inv_left), _e2m1(right, inv_right)
        both = [inv_left, a.tensor_scale], [inv_right, b.tensor_scale]
        settings = _blocks(F.ScalingType.BlockWise1x16, *both)
    produced = out_dtype if bias is None else torch.float32
    result = F.scaled_mm(left, right.t(), output_dtype=produced, **settings)
    return result if bias is None else (result + bias.to(torch.bfloat16)).to(out_dtype)


def _rows(factor: Quantized, is_down: bool) -> tuple[Tensor, Tensor]:
    """Codes [R, S], contiguous, and their scales [R or R / height, S / block], of a factor [R, S]; [S, R] if down."""
    if not is_down:
        return factor.codes.contiguous(), factor.inv_scale
    return transposed(factor.codes), factor.inv_scale.t()


def transposed(x: Tensor) -> Tensor:
    """x.t(), contiguous. `contiguous` would keep the strides of one row."""
    return x.t().clone(memory_format=torch.contiguous_format)


def _for_each_row(codes: Tensor, scales: Tensor) -> Tensor:
    """Scales [R, S / block]: those of a block of several rows are repeated."""
    height = codes.shape[0] // scales.shape[0]
    return scales if height == 1 else scales.repeat_interleave(height, 0)


def _blocks(kind: F.ScalingType, left: list[Any], right: list[Any]) -> dict[str, Any]:
    levels, swizzles = [kind], [F.SwizzleType.SWIZZLE_32_4_4]
    if len(left) == 2:
        levels, swizzles = [*levels, F.ScalingType.TensorWise], [*swizzles, F.SwizzleType.NO_SWIZZLE]
    return {
        "scale_a": left,
        "scale_recipe_a": levels,
        "swizzle_a": swizzles,
        "scale_b": right,
        "scale_recipe_b": levels,
        "swizzle_b": swizzles,
    }


def _tiles(left: Tensor, codes: Tensor, scales: Tensor) -> dict[str, Any]:
    """Scales with rows innermost; of 128 x 128 elements with the summed dimension innermost, padded to 4."""
    is_square = codes.shape[0] > scales.shape[0]
    if is_square:
        scales = F.pad(scales, (0, -scales.shape[1] % 4)).contiguous().t()
    else:
        scales = transposed(scales).t()
    return {
        "scale_a": transposed(left).t(),
        "scale_recipe_a": F.ScalingType.BlockWise1x128,
        "scale_b": scales,
        "scale_recipe_b": F.ScalingType.BlockWise128x128 if is_square else F.ScalingType.BlockWise1x128,
    }


def _e8m0(codes: Tensor, scales: Tensor) -> Tensor:
    """The biased exponents of powers of two; NaN is 255."""
    scales = _for_each_row(codes, scales).contiguous()
    return swizzled((scales.view(torch.int32) >> 23).to(torch.uint8)).view(torch.float8_e8m0fnu)


def _e2m1(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 4 bits, the first of two in the low half of a byte, and scales of e4m3fn; NaN is in the scales alone."""
    rows, columns = codes.shape
    patterns = codes.view(torch.uint8)
    magnitudes = patterns & 0x7F
    scales = _for_each_row(codes, scales).to(torch.float8_e4m3fn)
    # 0.5 is 0x30 in e4m3fn and 1 here; the others, from 1 on, are 4 patterns apart.
    short = ((magnitudes.clamp(min=0x30) - 0x30) >> 2) + (magnitudes == 0x30) | patterns >> 4 & 8
    missing = -columns % _PACKED
    short, patterns = F.pad(short, (0, missing)), F.pad(scales.view(torch.uint8), (0, missing // 16))
    first, second = short.view(rows, -1, 2).unbind(2)
    return (first | second << 4).view(torch.float4_e2m1fn_x2), swizzled(patterns).view(torch.float8_e4m3fn)


def swizzled(scales: Tensor) -> Tensor:
    """Scales [R, C] of one byte, flat and in cuBLAS's order, with zeros up to whole tiles of 128 x 4."""
    padded = F.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    rows, columns = padded.shape
    return padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()
