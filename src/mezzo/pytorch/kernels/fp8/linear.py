"""A linear layer whose three products have 8-bit factors and FP32 sums.

    y  = x w^T + b        x, w in the forward format (e4m3fn)
    dx = g w              g in the backward format (e5m2: range matters more to gradients than a third bit)
    dw = g^T x
    db = sum of g         of g itself, in FP32

`mezzo.core.compute` names the two formats. Between forward and backward the layer holds x in 8 bits and the weight
itself, which is quantized again in backward: that is one read of the weight instead of N * K bytes held in every layer.

*Tensorwise*, each of x, w, g has one scale and one set of codes for both of its products. *Rowwise*, a scale must be
constant along the dimension that a product sums over, so each product quantizes its factors anew, and what is held is
x's codes by column.

See Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), sections 3 and 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.compute import COMPUTE
from mezzo.core.errors import UsageError
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.kernels.emulated import EMULATED
from mezzo.pytorch.kernels.fp8 import Quantized, quantize
from mezzo.pytorch.kernels.fp8.gemm import gemm_dtype, misfit, product
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.unseen import unseen

__all__ = ["fp8_linear"]

FORWARD, BACKWARD = dtype_of(COMPUTE["fp8"].forward), dtype_of(COMPUTE["fp8"].backward)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fp8_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: str = "tensorwise"
) -> Tensor:
    """``F.linear`` with 8-bit factors and FP32 sums, forward and backward.

    Naive code, tensorwise (`quantize` of `mezzo.pytorch.kernels.fp8` gives codes and the inverse of their scale)::

        def values(x, dtype):
            q = quantize(x, dtype)
            return q.codes.float() * q.inv_scale

        x, w = values(input, e4m3fn), values(weight, e4m3fn)
        output = (x @ w.T + bias.bfloat16()).bfloat16()
        # backward, for the gradient of the output:
        g = values(grad, e5m2)
        dinput, dweight, dbias = (g @ w).bfloat16(), g.T @ x, grad.float().sum(0)

    Each gradient is in the dtype of its tensor. An FP32 weight's gradient is the FP32 sum itself where the product can
    give it: natively with tensorwise scales, and where emulation multiplies in FP32. Otherwise it was rounded to bf16
    once.

    If K or N is not a multiple of 16, or the input is empty, this is ``F.linear`` of bf16 values, exactly.

    Args:
        input: [..., K], FP32, bf16, fp16 or FP64 (by way of FP32).
        weight: [N, K], of any of these; FP32 values are rounded to 8 bits once, not by way of bf16.
        bias: [N] or None; added as bf16, before the result is rounded, as fp8 hardware does.
        scaling: ``tensorwise`` or ``rowwise``.

    Returns:
        [..., N], bf16. A NaN or infinity in a row of the input makes the row NaN (infinities have no code in e4m3fn);
        one in the weight makes its column NaN. In the gradient infinities stay infinities. Scales ignore them.

    Raises:
        UsageError: a dtype that is not a floating format; a second derivative (8-bit codes of the input are held, and
            the values that it would need are not).
        RuntimeError: the weight was changed in place between forward and backward.
    """
    for name, given in (("input", input), ("weight", weight), ("bias", bias)):
        if given is not None and given.dtype not in _FLOATING:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATING)
            raise UsageError(f"fp8_linear(): {name} is {given.dtype}. Give it one of {allowed}.")
    is_matrix = weight.dim() == 2 and input.dim() > 0 and input.shape[-1] == weight.shape[1]
    if not is_matrix or not input.numel() or misfit(*weight.shape[::-1]):
        return _in_bf16(input, weight, bias)
    plain = is_plain(input, weight, bias)
    function = _Fp8Linear if plain or torch.compiler.is_compiling() else _WithTangents
    # A transform's tensor does not tell whether it needs a gradient.
    for_weight = (weight.requires_grad and torch.is_grad_enabled()) or not plain
    result: Tensor = function.apply(_up_to_fp32(input), _up_to_fp32(weight), bias, scaling, for_weight)[0]  # type: ignore[no-untyped-call]
    return result


def _in_bf16(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if gemm_dtype(input.device.type) is not torch.bfloat16:
        result: Tensor = EMULATED["linear"](input, weight, bias, compute=torch.bfloat16)
        return result
    low = None if bias is None else bias.to(torch.bfloat16)
    return F.linear(input.to(torch.bfloat16), weight.to(torch.bfloat16), low)


def _up_to_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.float64 else x


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


class _Fp8Linear(torch.autograd.Function):
    """Holds what backward needs and no more. Made of operations that vmap and compilers take apart."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, scaling: str, for_weight: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The output, and what is held of x [M, K] for the weight's gradient: codes and their inverse scale."""
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
        ctx.save_for_forward(input, weight)
        ctx.scaling = scaling
        ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        eager = not torch.compiler.is_compiling()
        if eager and torch._C._functorch.is_legacy_batchedtensor(grad):
            raise UsageError(
                "fp8_linear(): a batch of gradients (is_grads_batched=True), which its casts cannot take. Take them "
                "one at a time, or with torch.func.vmap over torch.func.vjp."
            )
        weight, codes, inv_scale = ctx.saved_tensors
        with torch.no_grad():
            results = _gradients(ctx, grad, weight, None if codes is None else Quantized(codes, inv_scale))
        if eager and torch.is_grad_enabled():
            # A leaf, so that the results have a history even where this gradient has none.
            anchors = (grad, torch.zeros((), requires_grad=True), *(() if weight is None else (weight,)))
            results = tuple(None if r is None else _FirstOnly.apply(r, *anchors) for r in results)  # type: ignore[no-untyped-call]
        return *results, None, None


def _gradients(
    ctx: Any, grad: Tensor, weight: Tensor | None, held: Quantized | None
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias: with respect to the input if the weight was saved, and so on."""
    input_dtype, weight_dtype, bias_dtype = ctx.dtypes
    scaling = ctx.scaling
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
        # bf16 unless more is wanted: an fp16 or bf16 weight's gradient is rounded once either way.
        produced = torch.bfloat16 if weight_dtype is torch.bfloat16 else torch.float32
        dw = product("TN", by_column, held, out_dtype=produced).to(weight_dtype)
    if ctx.needs_input_grad[2]:
        db = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, db


class _WithTangents(_Fp8Linear):
    """Forward mode as well; apart, since Dynamo takes no function that has it."""

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        """Tangents pass the casts as gradients do, unchanged; they are multiplied in FP32 with the 8-bit values."""
        input, weight = ctx.saved_tensors

        def values(x: Tensor) -> Tensor:
            return quantize(_rows(x), FORWARD, ctx.scaling).values(torch.float32).view(x.shape)

        total = torch.zeros((), device=weight.device) if db is None else db.float()
        if dx is not None:
            total = total + F.linear(dx.float(), values(weight))
        if dw is not None:
            total = total + F.linear(values(input), dw.float())
        return total.to(torch.bfloat16), None, None


class _FirstOnly(torch.autograd.Function):
    """A gradient that is used as a number, and refuses to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *anchors: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        """As in backward."""
        return _FirstOnly.backward(ctx, *tangents)

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UsageError(
            "fp8_linear(): a gradient of its gradient. The layer holds its input in 8 bits only, from which no second "
            "derivative can be taken. Leave the layers that need one in bf16: module.NAME=bf16 in the policy."
        )
