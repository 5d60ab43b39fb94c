"""A linear layer whose three products have quantized factors and FP32 sums: quantize -> GEMM -> rescale.

    NT   y  [M, N] = x [M, K] w [N, K]^T + b
    NN   dx [M, K] = g [M, N] w [N, K]
    TN   dw [N, K] = g [M, N]^T x [M, K]
         db [N]    = sum of g                   of g itself, in FP32

A `Recipe` says how each of the six factors is quantized. For backward the layer keeps x as quantized for TN, and the
weight itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.recipes import RECIPES, Factor, Recipe
from mezzo.pytorch.hardware import native_formats
from mezzo.pytorch.kernels import native_blocks
from mezzo.pytorch.kernels.emulated import emulated
from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.quantized import Quantized, quantize

PATH = "MEZZO_FP8"
"""Environment variable that forces ``native`` or ``emulated`` for every device."""

PATHS = ("emulated", "native")
# Products -> the first and last compute capability whose tensor cores have them, and the first CUDA whose cuBLAS has.
NATIVE: Mapping[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = MappingProxyType(
    {
        "fp8": ((8, 9), (99, 9), (11, 8)),
        "fp8-block": ((9, 0), (9, 9), (12, 9)),
        "mxfp8": ((10, 0), (99, 9), (12, 8)),
        "nvfp4": ((10, 0), (99, 9), (12, 8)),
    }
)
MULTIPLE = 16  # of the rows of native fp8 factors: hardware's loads are aligned to 16 bytes


def product(
    form: str,
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    recipe: Recipe = RECIPES["fp8"],
) -> Tensor:
    """One of the three products, ``"NT"``, ``"NN"`` or ``"TN"``, of factors as stored; a bias only with bf16 results.

    Naive code, for NT and one scale a factor::

        a, b = (f.codes.double() * f.inv_scale for f in (a, b))
        return (a @ b.T + bias.bfloat16()).to(out_dtype)
    """
    kind = recipe.hardware
    if is_native(a.codes.device, kind):
        if kind == "fp8":
            return _native(form, a, b, bias, out_dtype)
        return native_blocks.product(kind, form, a, b, bias, out_dtype)
    dtype = _dtype(a.codes.device, recipe.is_exact_in_bf16)
    low = None if bias is None else bias.to(torch.bfloat16)
    scales = [factor.tensor_scale for factor in (a, b) if factor.tensor_scale is not None]
    eager = not torch.compiler.is_compiling()  # Dynamo can't trace the call that follows
    if low is not None and not scales and eager and torch._C._functorch.get_interpreter_stack() is not None:
        dtype = torch.float32  # a batched bf16 product would be rounded before the bias is added, and after
    left = a.values(dtype).t() if form == "TN" else a.values(dtype)
    right = b.values(dtype).t() if form == "NT" else b.values(dtype)
    if left.shape[1] != right.shape[0]:  # blocks of two sizes: the rest is zeros
        count = min(left.shape[1], right.shape[0])
        left, right = left[:, :count], right[:count]
    if form == "NT" and not scales:
        return F.linear(left, right.t(), None if low is None else low.to(dtype)).to(out_dtype)
    result = torch.mm(left, right)
    if scales:
        result = result.to(torch.float32).mul_(math.prod(scales[1:], start=scales[0]))
        if low is not None:
            result += low
    return result.to(out_dtype)


def _dtype(device: torch.device, in_bf16: bool) -> torch.dtype:
    return gemm_dtype(device.type) if in_bf16 else torch.float32


def _native(form: str, a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`torch._scaled_mm`, with the shared dimension innermost in both factors and sizes in multiples of 16."""
    left, right = a.codes, b.codes
    inv_left, inv_right = a.inv_scale, b.inv_scale
    if form == "TN":
        short = -left.shape[0] % MULTIPLE
        left, right = (_with_rows(codes, short) for codes in (left, right))
        left = native_blocks.transposed(left)
    columns = right.t() if form == "NT" else native_blocks.transposed(right).t()
    is_rowwise = inv_left.numel() > 1 or inv_right.numel() > 1
    if not is_rowwise:
        inv_left, inv_right = inv_left.reshape(()), inv_right.reshape(())
    else:  # [M, 1] and [1, N], and strides of 1 where there is but one element
        inv_left, inv_right = inv_left.flatten().unsqueeze(1), inv_right.flatten().unsqueeze(0)
    # Rowwise products give FP32 only with CUDA 12.9's cuBLAS and later.
    produced = torch.bfloat16 if is_rowwise else out_dtype
    low = None if bias is None else bias.to(torch.bfloat16)
    # With fast accumulation sums keep about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    how: dict[str, Any] = {"bias": low, "out_dtype": produced, "use_fast_accum": False}
    return torch._scaled_mm(left, columns, inv_left, inv_right, **how).to(out_dtype)


def _with_rows(codes: Tensor, count: int) -> Tensor:
    # Concatenation and padding of 8-bit floats are not everywhere; of bytes they are.
    return F.pad(codes.view(torch.uint8), (0, 0, 0, count)).view(codes.dtype) if count else codes


def misfit(recipe: Recipe, in_features: int, out_features: int) -> str:
    """Why a linear layer cannot multiply by a recipe, as a clause without a full stop; empty if it can."""
    multiple = recipe.multiple
    for count, noun in ((in_features, "inputs"), (out_features, "outputs")):
        if count % multiple or not count:
            return f"bf16: {count} {noun} are not a multiple of {multiple}, which {recipe.name} products need"
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def is_native(device: torch.device, kind: str = "fp8") -> bool:
    """Whether a device computes a recipe's `hardware` products itself; see `why_emulated`.

    Raises:
        UsageError: MEZZO_FP8=native, where this is not possible.
        UnknownNameError: another value of MEZZO_FP8.
    """
    forced = os.environ.get(PATH)
    if not forced:
        return not why_emulated(device, kind)
    if forced not in PATHS:
        raise unknown_name("fp8 implementation", forced, PATHS, where=f"{PATH}={forced!r}: ")
    if forced == "native" and (not kind or (kind != "fp8" and device.type != "cuda")):
        raise UsageError(
            f"{PATH}='native': {why_emulated(device, kind)}. Use {PATH}=emulated, or unset it: Mezzo then chooses."
        )
    return forced == "native"


def why_emulated(device: torch.device, kind: str) -> str:
    """Why a device does not compute a recipe's `hardware` products, a clause without a full stop; empty if it does."""
    if not kind:
        return "no GPU has products of these factors"
    (first, last, cuda), version = NATIVE[kind], torch.version.cuda
    least, most = (f"{major}.{minor}" for major, minor in (first, last))
    needs = f"{kind} products need an NVIDIA GPU of compute capability {least}"
    needs += f" to {most}" if last < (99, 9) else " or later"
    # AMD's first fp8 has other codes (e4m3fnuz), and its capability numbers mean something else.
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return needs
    capability = torch.cuda.get_device_capability(device.index)
    if not first <= capability <= last:
        return f"{needs}; this one has {capability[0]}.{capability[1]}"
    if version is not None and tuple(map(int, version.split(".")[:2])) < cuda:
        return (
            f"{kind} products need a PyTorch for CUDA {cuda[0]}.{cuda[1]} or later; this one is for {version}"
        )
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def gemm_dtype(device_type: str) -> torch.dtype:
    """The format of emulated factors, exact in both: bf16 where the device is fast in it (results too), else FP32."""
    return torch.bfloat16 if "bf16" in native_formats(device_type) else torch.float32


def quantized_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe = RECIPES["fp8"]
) -> Tensor:
    """``F.linear`` of input [..., K], weight [N, K] and bias [N] with quantized factors and FP32 sums; returns bf16.

    Naive code, where `values` quantizes a factor and decodes it::

        x, w = values(input, recipe.output[0]), values(weight, recipe.output[1])
        output = (x @ w.T + bias.bfloat16()).bfloat16()
        # backward, for the gradient of the output:
        g, w = values(grad, recipe.input_gradient[0]), values(weight, recipe.input_gradient[1])
        dinput = (g @ w).bfloat16()
        g, x = values(grad, recipe.weight_gradient[0]), values(input, recipe.weight_gradient[1])
        dweight, dbias = g.T @ x, grad.float().sum(0)

    Gradients have the dtype of their tensor. If K and N do not fit the recipe's multiple, or the input is empty,
    this is ``F.linear`` of bf16 values. A NaN or infinity in a row of the input makes the row NaN, one in the weight
    its column, and with blocks those that share its block; in gradients of e5m2 infinities stay infinities.

    Raises:
        UsageError: a second derivative, which would need the input's values.
        RuntimeError: the weight was changed in place between forward and backward.
    """
    is_matrix = weight.dim() == 2 and input.dim() > 0 and input.shape[-1] == weight.shape[1]
    if not is_matrix or not input.numel() or misfit(recipe, *weight.shape[::-1]):
        return in_bf16(input, weight, bias)
    # A tensor of torch.func does not show whether it needs a gradient.
    for_weight = (weight.requires_grad and torch.is_grad_enabled()) or not is_plain(input, weight, bias)
    result: Tensor = _QuantizedLinear.apply(input, weight, bias, recipe, for_weight)[0]  # type: ignore[no-untyped-call]
    return result


def in_bf16(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 values."""
    if gemm_dtype(input.device.type) is not torch.bfloat16:
        result: Tensor = emulated(torch.ops.aten.linear.default, torch.bfloat16)(input, weight, bias)
        return result
    low = None if bias is None else bias.to(torch.bfloat16)
    return F.linear(input.to(torch.bfloat16), weight.to(torch.bfloat16), low)


class _QuantizedLinear(torch.autograd.Function):
    generate_vmap_rule = True  # made of operations that vmap and compilers take apart

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, for_weight: bool
    ) -> tuple[Tensor | None, ...]:
        """The output; x [M, K] as kept for the weight's gradient: codes and their scales."""
        x, w = input.detach().reshape(-1, input.shape[-1]), weight.detach()
        dtype = _dtype(x.device, recipe.is_exact_in_bf16)
        left, right = (quantize(value, factor, 1, dtype) for value, factor in zip((x, w), recipe.output))
        y = product("NT", left, right, bias, recipe=recipe)
        y = y.view(*input.shape[:-1], w.shape[0])
        if not for_weight:
            return y, None, None, None
        held = left
        if not _is_shared(recipe.output[0], recipe.weight_gradient[1]):
            held = quantize(x, recipe.weight_gradient[1], 0)
        return y, held.codes, held.inv_scale, held.tensor_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        input, weight, bias, recipe, _ = inputs
        _, *held = output
        for_input, for_weight, *_ = ctx.needs_input_grad
        ctx.mark_non_differentiable(*(each for each in held if each is not None))
        ctx.save_for_backward(weight if for_input else None, *(held if for_weight else (None, None, None)))
        ctx.recipe = recipe
        ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    @not_traced
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        eager = not torch.compiler.is_compiling()
        if eager and torch._C._functorch.is_legacy_batchedtensor(grad):
            raise UsageError(
                "quantized_linear(): is_grads_batched=True is not supported. Compute one gradient at a time, or use "
                "torch.func.vmap over torch.func.vjp."
            )
        weight, codes, *scales = ctx.saved_tensors
        with torch.no_grad():
            results = _gradients(ctx, grad, weight, None if codes is None else Quantized(codes, *scales))
        if eager and torch.is_grad_enabled():
            # A leaf, so that the results have a history even if this gradient has none.
            anchors = (grad, torch.zeros((), requires_grad=True), *(() if weight is None else (weight,)))
            results = tuple(None if r is None else _FirstOnly.apply(r, *anchors) for r in results)  # type: ignore[no-untyped-call]
        return *results, None, None


def _gradients(
    ctx: Any, grad: Tensor, weight: Tensor | None, held: Quantized | None
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias, each if wanted."""
    (input_dtype, weight_dtype, bias_dtype), recipe = ctx.dtypes, ctx.recipe
    g = grad.detach().reshape(-1, grad.shape[-1])
    dtype = _dtype(g.device, recipe.is_exact_in_bf16)
    dx = dw = db = by_row = None
    if weight is not None:
        by_row = quantize(g, recipe.input_gradient[0], 1, dtype)
        right = quantize(weight, recipe.input_gradient[1], 0, dtype)
        dx = product("NN", by_row, right, recipe=recipe)
        dx = dx.view(*grad.shape[:-1], dx.shape[-1]).to(input_dtype)
    if held is not None:
        shares = by_row is not None and _is_shared(recipe.input_gradient[0], recipe.weight_gradient[0])
        by_column = by_row if shares else quantize(g, recipe.weight_gradient[0], 0, dtype)
        assert by_column is not None
        produced = torch.bfloat16 if weight_dtype is torch.bfloat16 else torch.float32
        dw = product("TN", by_column, held, None, produced, recipe=recipe).to(weight_dtype)
    if ctx.needs_input_grad[2]:
        db = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, db


def _is_shared(by_row: Factor, by_column: Factor) -> bool:
    """Whether two products take the same codes of a tensor: one block for the whole, whichever dimension is summed."""
    return by_row == by_column and by_row.block == (0, 0) and not by_row.hadamard


class _FirstOnly(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *anchors: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    @not_traced
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UsageError(
            "quantized_linear(): second derivatives are not supported, because the layer keeps its input quantized. "
            "Compute the layers that need them in bf16: add module.NAME=bf16 to the policy."
        )
