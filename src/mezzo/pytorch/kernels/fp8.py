"""A linear layer whose three products have 8-bit factors and FP32 sums: quantize -> GEMM -> rescale.

    NT   y  [M, N] = x [M, K] w [N, K]^T + b    x, w in the forward format (e4m3fn)
    NN   dx [M, K] = g [M, N] w [N, K]          g in the backward format (e5m2: range matters more to gradients)
    TN   dw [N, K] = g [M, N]^T x [M, K]
         db [N]    = sum of g                   of g itself, in FP32

Scales are powers of two. Tensorwise, both products of a tensor share one scale and one set of codes. Rowwise scales
are constant along the dimension that a product sums over, so each product quantizes again. For backward the layer keeps
x in 8 bits and the weight itself. See Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.compute import COMPUTE
from mezzo.core.errors import UsageError, unknown_name
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.hardware import native_formats
from mezzo.pytorch.kernels.emulated import emulated
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.unseen import unseen

__all__ = [
    "Quantized",
    "amax",
    "decode",
    "encode",
    "fp8_linear",
    "is_native",
    "misfit",
    "product",
    "quantize",
]

FORWARD, BACKWARD = dtype_of(COMPUTE["fp8"].forward), dtype_of(COMPUTE["fp8"].backward)
_MANTISSA = (1 << 23) - 1  # of an FP32 pattern

PATH = "MEZZO_FP8"
"""Environment variable that forces ``native`` or ``emulated`` for every device."""

PATHS = ("emulated", "native")
NATIVE_FROM = (8, 9)  # first compute capability whose tensor cores multiply fp8: CUDA C++ Programming Guide
MULTIPLE = 16  # of K and N: hardware's loads are aligned to 16 bytes


class Quantized:
    """One factor of a product: its codes [R, C], and FP32 powers of two, [], [R, 1] or [1, C], to multiply them by."""

    __slots__ = ("_values", "codes", "inv_scale")

    def __init__(self, codes: Tensor, inv_scale: Tensor) -> None:
        self.codes, self.inv_scale = codes, inv_scale
        self._values: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """The decoded numbers, kept for a second product of the same factor."""
        if self._values is None or self._values.dtype is not dtype:
            self._values = decode(self.codes).mul_(self.inv_scale).to(dtype)
        return self._values


def quantize(x: Tensor, dtype: torch.dtype, granularity: str = "tensorwise", dim: int = 1) -> Quantized:
    """Codes and inverse scales of a tensor [R, C]; rowwise one scale for each line along `dim`, the summed dimension.

    Naive code::

        inv_scale = 2.0 ** ceil(log2(amax(x, granularity, dim) / finfo(dtype).max))
        return (x.float() / inv_scale).to(dtype), inv_scale
    """
    wide = x.detach().to(torch.float32)
    if x.device.type == "cpu" and is_plain(x):
        # If all values are finite, PyTorch's cast needs no correction: half the time, and no device waits.
        largest = _magnitude(wide, granularity, dim)
        if largest.isfinite().all():
            inv_scale = inv_scale_of(largest, dtype)
            return Quantized((wide / inv_scale).contiguous().to(dtype), inv_scale)
    inv_scale = inv_scale_of(amax(wide, granularity, dim), dtype)
    return Quantized(encode((wide / inv_scale).contiguous(), dtype), inv_scale)


def amax(x: Tensor, granularity: str, dim: int = 1) -> Tensor:
    """The largest finite magnitude of the elements that share a scale; 0 if there is none. No host sync."""
    return _magnitude(x.nan_to_num(0.0, 0.0, 0.0), granularity, dim)


def _magnitude(x: Tensor, granularity: str, dim: int) -> Tensor:
    """The largest magnitude of the elements that share a scale; NaN if one is NaN."""
    if granularity == "rowwise":
        return x.abs().amax(dim, keepdim=True)  # `aminmax` along a dimension takes ten times as long
    low, high = x.aminmax()
    return torch.maximum(-low, high)


def inv_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """``2 ** ceil(log2(amax / finfo(dtype).max))``, from 2**-126 to 2**126."""
    # The exponent is the quotient's biased one, plus 1 if its mantissa is not 0.
    quotient = (amax / torch.finfo(dtype).max).view(torch.int32)
    return (((quotient + _MANTISSA) >> 23).clamp(1, 253) << 23).view(torch.float32)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of FP32 values, rounded to nearest even: finite ones saturate, infinity in e4m3fn is NaN."""
    largest = torch.finfo(dtype).max
    if dtype is torch.float8_e4m3fn:
        return x.nan_to_num(math.nan, math.nan, math.nan).clamp(-largest, largest).to(dtype)
    # 0 for finite values, minus infinity for infinity: ten times as fast as `torch.where` of `isinf`.
    cut = x.nan_to_num(0.0).sub_(x)
    return x.clamp(-largest, largest).sub_(cut).to(dtype)


def decode(codes: Tensor) -> Tensor:
    """The FP32 values of codes: ``codes.float()``, exactly."""
    # PyTorch's conversion from e4m3fn takes 3 ms per million elements on a CPU. fp16 has the same layout with one more
    # exponent bit and takes 0.1 ms, so codes are moved to fp16's bits. (Inductor cannot mix bf16 and fp16.)
    if codes.device.type != "cpu" or torch.compiler.is_compiling():
        return codes.to(torch.float32)
    if codes.dtype is not torch.float8_e4m3fn:
        return (codes.view(torch.int8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
    bits = codes.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~0x4000)  # drop the sign's copy
    bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))  # only NaN, 0x7F, carries into this bit
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)  # 2 ** (15 - 7): the biases' difference


def product(
    form: str, a: Quantized, b: Quantized, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """One of the three products, ``"NT"``, ``"NN"`` or ``"TN"``, of factors as stored; a bias only with bf16 results.

    Naive code, for NT::

        a, b = (f.codes.double() * f.inv_scale for f in (a, b))
        return (a @ b.T + bias.bfloat16()).to(out_dtype)
    """
    if is_native(a.codes.device):
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
    """`torch._scaled_mm`, with the shared dimension innermost in both factors and sizes in multiples of 16."""
    left, right = a.codes, b.codes
    inv_left, inv_right = a.inv_scale, b.inv_scale
    if form == "TN":
        short = -left.shape[0] % MULTIPLE
        left, right = (_with_rows(codes, short) for codes in (left, right))
        left = _transposed(left)
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
        use_fast_accum=False,  # with it sums keep about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)
    )
    return result.to(out_dtype)


def _transposed(codes: Tensor) -> Tensor:
    return codes.t().clone(memory_format=torch.contiguous_format)


def _with_rows(codes: Tensor, count: int) -> Tensor:
    # Concatenation and padding of 8-bit floats are not everywhere; of bytes they are.
    return F.pad(codes.view(torch.uint8), (0, 0, 0, count)).view(codes.dtype) if count else codes


def misfit(in_features: int, out_features: int) -> str:
    """Why a linear layer cannot multiply in fp8, as a clause without a full stop; empty if it can."""
    for count, noun in ((in_features, "inputs"), (out_features, "outputs")):
        if count % MULTIPLE or not count:
            return f"bf16: {count} {noun} are not a multiple of {MULTIPLE}, which fp8 products need"
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def is_native(device: torch.device) -> bool:
    """Whether a device computes fp8 products by `torch._scaled_mm`: CUDA from 8.9 on, unless MEZZO_FP8 forces one."""
    forced = os.environ.get(PATH)
    if forced:
        if forced not in PATHS:
            raise unknown_name("fp8 implementation", forced, PATHS, where=f"{PATH}={forced!r}: ")
        return forced == "native"
    # AMD's first fp8 has other codes (e4m3fnuz), and its capability numbers mean something else.
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device.index) >= NATIVE_FROM


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def gemm_dtype(device_type: str) -> torch.dtype:
    """The format of emulated products, exact in both: bf16 where the device is fast in it, else FP32."""
    return torch.bfloat16 if "bf16" in native_formats(device_type) else torch.float32


def fp8_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: str = "tensorwise"
) -> Tensor:
    """``F.linear`` of input [..., K], weight [N, K] and bias [N] with 8-bit factors and FP32 sums; returns bf16.

    Naive code, tensorwise::

        def values(x, dtype):
            q = quantize(x, dtype)
            return q.codes.float() * q.inv_scale

        x, w = values(input, e4m3fn), values(weight, e4m3fn)
        output = (x @ w.T + bias.bfloat16()).bfloat16()
        # backward, for the gradient of the output:
        g = values(grad, e5m2)
        dinput, dweight, dbias = (g @ w).bfloat16(), g.T @ x, grad.float().sum(0)

    Gradients have the dtype of their tensor. If K or N is not a multiple of 16, or the input is empty, this is
    ``F.linear`` of bf16 values. A NaN or infinity in a row of the input makes the row NaN, one in the weight its
    column; in gradients infinities stay infinities. Scales ignore them.

    Raises:
        UsageError: a second derivative, which would need the input's values.
        RuntimeError: the weight was changed in place between forward and backward.
    """
    is_matrix = weight.dim() == 2 and input.dim() > 0 and input.shape[-1] == weight.shape[1]
    if not is_matrix or not input.numel() or misfit(*weight.shape[::-1]):
        return _in_bf16(input, weight, bias)
    # A tensor of torch.func does not show whether it needs a gradient.
    for_weight = (weight.requires_grad and torch.is_grad_enabled()) or not is_plain(input, weight, bias)
    result: Tensor = _Fp8Linear.apply(input, weight, bias, scaling, for_weight)[0]  # type: ignore[no-untyped-call]
    return result


def _in_bf16(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if gemm_dtype(input.device.type) is not torch.bfloat16:
        result: Tensor = emulated(torch.ops.aten.linear.default, torch.bfloat16)(input, weight, bias)
        return result
    low = None if bias is None else bias.to(torch.bfloat16)
    return F.linear(input.to(torch.bfloat16), weight.to(torch.bfloat16), low)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


class _Fp8Linear(torch.autograd.Function):
    generate_vmap_rule = True  # made of operations that vmap and compilers take apart

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, scaling: str, for_weight: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The output; x [M, K] as kept for the weight's gradient: codes and their inverse scale."""
        x, w = _rows(input), weight.detach()
        left, right = (quantize(factor, FORWARD, scaling, dim=1) for factor in (x, w))
        y = product("NT", left, right, bias).view(*input.shape[:-1], w.shape[0])
        if not for_weight:
            return y, None, None
        held = quantize(x, FORWARD, scaling, dim=0) if scaling == "rowwise" else left
        return y, held.codes, held.inv_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        input, weight, bias, scaling, _ = inputs
        _, codes, inv_scale = output
        for_input, for_weight, *_ = ctx.needs_input_grad
        if codes is not None:
            ctx.mark_non_differentiable(codes, inv_scale)
        held = (codes, inv_scale) if for_weight else (None, None)
        ctx.save_for_backward(weight if for_input else None, *held)
        ctx.scaling = scaling
        ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        eager = not torch.compiler.is_compiling()
        if eager and torch._C._functorch.is_legacy_batchedtensor(grad):
            raise UsageError(
                "fp8_linear(): is_grads_batched=True is not supported. Compute one gradient at a time, or use "
                "torch.func.vmap over torch.func.vjp."
            )
        weight, codes, inv_scale = ctx.saved_tensors
        with torch.no_grad():
            results = _gradients(ctx, grad, weight, None if codes is None else Quantized(codes, inv_scale))
        if eager and torch.is_grad_enabled():
            # A leaf, so that the results have a history even if this gradient has none.
            anchors = (grad, torch.zeros((), requires_grad=True), *(() if weight is None else (weight,)))
            results = tuple(None if r is None else _FirstOnly.apply(r, *anchors) for r in results)  # type: ignore[no-untyped-call]
        return *results, None, None


def _gradients(
    ctx: Any, grad: Tensor, weight: Tensor | None, held: Quantized | None
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias, each if wanted."""
    (input_dtype, weight_dtype, bias_dtype), scaling = ctx.dtypes, ctx.scaling
    g = _rows(grad)
    dx = dw = db = by_row = None
    if weight is not None:
        by_row = quantize(g, BACKWARD, scaling, dim=1)
        dx = product("NN", by_row, quantize(weight, FORWARD, scaling, dim=0))
        dx = dx.view(*grad.shape[:-1], dx.shape[-1]).to(input_dtype)
    if held is not None:
        shares = by_row is not None and scaling == "tensorwise"
        by_column = by_row if shares else quantize(g, BACKWARD, scaling, dim=0)
        assert by_column is not None
        produced = torch.bfloat16 if weight_dtype is torch.bfloat16 else torch.float32
        dw = product("TN", by_column, held, out_dtype=produced).to(weight_dtype)
    if ctx.needs_input_grad[2]:
        db = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, db


class _FirstOnly(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *anchors: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UsageError(
            "fp8_linear(): second derivatives are not supported, because the layer keeps its input in 8 bits only. "
            "Compute the layers that need them in bf16: add module.NAME=bf16 to the policy."
        )
