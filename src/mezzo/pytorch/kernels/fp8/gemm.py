"""Products of quantized factors: GEMM with FP32 accumulation, then rescale.

Three products serve a linear layer, named as in BLAS by which factor is transposed:

    NT   y  [M, N] = x [M, K] w [N, K]^T
    NN   dx [M, K] = g [M, N] w [N, K]
    TN   dw [N, K] = g [M, N]^T x [M, K]

Each sums in FP32 over the shared dimension, multiplies by the inverse scales, and rounds once.

*Native* is `torch._scaled_mm`. The hardware takes both factors with the shared dimension innermost (the second
"column-major") and sizes in multiples of 16, so NN copies w's codes transposed, and TN both codes, padded with zeros
where M is not a multiple of 16. `use_fast_accum` stays off: with it the sums stay in the tensor cores' own
accumulators, which keep about 14 bits (DeepSeek-V3 technical report, arXiv 2412.19437, 3.3.2).

*Emulated* is an ordinary product of the values that the codes stand for. An 8-bit value times a power of two is exact
in bf16, so a bf16 product with FP32 sums, where the device is fast in it, gives the hardware's result up to the order
of the sum; elsewhere the product is FP32's. Some CPUs' bf16 products flush values below 2^-126 to zero: codes of a
tensor whose largest magnitude is under 2^-108.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.errors import unknown_name
from mezzo.pytorch.kernels.fp8 import Quantized
from mezzo.pytorch.machine import ASSUME_NATIVE, native_formats

PATH = "MEZZO_FP8"
"""Environment variable that forces one way for every device: ``native`` or ``emulated``."""

PATHS = ("emulated", "native")
NATIVE_FROM = (8, 9)
"""First compute capability whose tensor cores multiply fp8: CUDA C++ Programming Guide, Ada Lovelace."""

MULTIPLE = 16
"""What K and N must be multiples of: 16 bytes is what the hardware's loads are aligned to."""


def product(
    form: str,
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    native: bool | None = None,
) -> Tensor:
    """One of the three products above.

    Naive code, for NT::

        a, b = (f.codes.double() * f.inv_scale for f in (a, b))
        return (a @ b.T + bias.bfloat16()).to(out_dtype)

    Args:
        form: ``"NT"``, ``"NN"`` or ``"TN"``.
        a, b: the factors as they lie in memory; scales either [] on both, or one for each row and column of the result.
        bias: [N], rounded to bf16 and added before the result is rounded; only with bf16 results.
        out_dtype: of the result. A bf16 GEMM's and a rowwise native product's FP32 results were rounded to bf16 once.
        native: force the way; None for what `is_native` says.

    Returns:
        of `out_dtype`. NaN and infinities of the factors go where IEEE 754 sums take them.
    """
    if is_native(a.codes.device) if native is None else native:
        return _native(form, a, b, bias, out_dtype)
    dtype = gemm_dtype(a.codes.device.type)
    if bias is not None and torch._C._functorch.peek_interpreter_stack() is not None:
        dtype = torch.float32  # a batched bf16 product would be rounded before the bias is added, and after
    left, right = a.values(dtype), b.values(dtype)
    if form == "NT":
        low = None if bias is None else bias.to(torch.bfloat16).to(dtype)
        return F.linear(left, right, low).to(out_dtype)
    return torch.mm(left if form == "NN" else left.t(), right).to(out_dtype)


def _native(form: str, a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    left, right = a.codes, b.codes
    inv_left, inv_right = a.inv_scale, b.inv_scale
    if form == "TN":
        short = -left.shape[0] % MULTIPLE
        left, right = _transposed(_rows_added(left, short)), _rows_added(right, short)
    columns = right.t() if form == "NT" else _transposed(right).t()
    is_rowwise = inv_left.dim() == 2
    if is_rowwise:  # [M, 1] and [1, N], and strides of 1 where there is but one element
        inv_left, inv_right = inv_left.flatten().unsqueeze(1), inv_right.flatten().unsqueeze(0)
    # Rowwise products give FP32 only with CUDA 12.9's cuBLAS and later.
    produced = torch.bfloat16 if is_rowwise else out_dtype
    result = torch._scaled_mm(
        left,
        columns,
        inv_left,
        inv_right,
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=produced,
        use_fast_accum=False,
    )
    return result.to(out_dtype)


def _transposed(codes: Tensor) -> Tensor:
    return codes.t().clone(memory_format=torch.contiguous_format)


def _rows_added(codes: Tensor, count: int) -> Tensor:
    # Concatenation and padding of 8-bit floats are not everywhere; of bytes they are.
    return F.pad(codes.view(torch.uint8), (0, 0, 0, count)).view(codes.dtype) if count else codes


def misfit(in_features: int, out_features: int) -> str:
    """Why a linear layer cannot multiply in fp8, as a clause without a full stop; empty if it can.

    >>> misfit(64, 10), misfit(64, 64)
    ('bf16: 10 outputs are not a multiple of 16, which fp8 products need', '')
    """
    for count, noun in ((in_features, "inputs"), (out_features, "outputs")):
        if count % MULTIPLE or not count:
            return f"bf16: {count} {noun} are not a multiple of {MULTIPLE}, which fp8 products need"
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def is_native(device: torch.device) -> bool:
    """Whether fp8 products on a device are `torch._scaled_mm`: CUDA from compute capability 8.9, or as MEZZO_FP8 says.

    Raises:
        UnknownNameError: MEZZO_FP8 is neither ``native`` nor ``emulated``.
    """
    return _is_native(device.type, device.index, os.environ.get(PATH))


@functools.lru_cache(maxsize=64)
def _is_native(device_type: str, index: int | None, forced: str | None) -> bool:
    if forced:
        if forced not in PATHS:
            raise unknown_name("way of fp8", forced, PATHS, where=f"{PATH}={forced!r}: ")
        return forced == "native"
    # AMD's first fp8 has other codes (e4m3fnuz), and its capability numbers mean something else.
    if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(index) >= NATIVE_FROM


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def gemm_dtype(device_type: str) -> torch.dtype:
    """The format in which emulated fp8 factors are multiplied: bf16 where the device is fast in it, else FP32."""
    return _gemm_dtype(device_type, os.environ.get(ASSUME_NATIVE))


@functools.lru_cache(maxsize=64)
def _gemm_dtype(device_type: str, assumed: str | None) -> torch.dtype:
    return torch.bfloat16 if "bf16" in native_formats(device_type) else torch.float32
