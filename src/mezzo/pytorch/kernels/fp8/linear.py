"""A linear layer whose three products have 8-bit factors: e4m3fn for values, e5m2 for gradients, FP32 sums.

    y  = x w^T + b        x, w in e4m3fn
    dx = g w              g in e5m2 (its range matters more than its third bit), w in e4m3fn
    dw = g^T x            g in e5m2, x in e4m3fn
    db = sum of g         of g itself, in FP32

Between forward and backward the layer holds x in 8 bits and the weight itself, whose codes are made again in backward:
one read of the weight against N * K bytes in every layer of the model for the whole step.

*Tensorwise*, each of x, w, g has one scale and one set of codes for both of its products. *Rowwise*, a scale must be
constant along the dimension that a product sums over, so each product casts its factors anew: x and w by row for y, g
by row and w by column for dx, g and x by column for dw; what is held is then x's codes by column.

See Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), sections 3 and 3.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.core.fp8 import Fp8Scaling
from mezzo.pytorch.kernels.emulated import EMULATED
from mezzo.pytorch.kernels.fp8 import cast, history, quantize, widen
from mezzo.pytorch.kernels.fp8.native import Factor, gemm_dtype, product
from mezzo.pytorch.kernels.fp8.payoff import pays
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.unseen import unseen

__all__ = ["fp8_linear"]

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: Fp8Scaling) -> Tensor:
    """``F.linear`` with 8-bit factors and FP32 sums, forward and backward.

    Naive code, tensorwise and dynamic (`quantize` of `mezzo.pytorch.kernels.fp8` gives codes and their scale)::

        def values(x, dtype):
            codes, scale = quantize(x, dtype)
            return codes.float() / scale

        x, w = values(input, e4m3fn), values(weight, e4m3fn)
        output = (x @ w.T + bias.bfloat16()).bfloat16()
        # backward, for the gradient of the output:
        g = values(grad, e5m2)
        dinput, dweight, dbias = (g @ w).bfloat16(), g.T @ x, grad.float().sum(0)

    each gradient then in the dtype of what it is of. An FP32 weight's gradient is the FP32 sum itself where the product
    can give it: natively with tensorwise scales, and where emulation multiplies in FP32. Rowwise natively, and where
    emulation multiplies in bf16, it was rounded to bf16 once.

    With K or N no multiple of 16, an empty input, or a layer that does not pay by `payoff.pays`, this is ``F.linear``
    of bf16 values, exactly.

    Args:
        input: [..., K], FP32, bf16, fp16 or FP64 (by way of FP32).
        weight: [N, K], of any of these; FP32 values are rounded to 8 bits once, not by way of bf16.
        bias: [N] or None; added as bf16, before the result is rounded, as fp8 hardware does.
        scaling: how scales are found. Delayed scales keep their history with the `weight` object (`history`); under
            compilers and transforms, which cannot keep one, they are dynamic.

    Returns:
        [..., N], bf16. A NaN or infinity in a row of the input makes the row NaN (infinities have no code in e4m3fn);
        one in the weight makes its column NaN. In the gradient infinities stay such. Scales ignore them.

    Raises:
        UsageError: a dtype that is no floating format; a second derivative (8-bit codes of the input are held, and its
            values, by which that would be taken, are not).
        RuntimeError: the weight was changed in place between forward and backward.
    """
    for name, given in (("input", input), ("weight", weight), ("bias", bias)):
        if given is not None and given.dtype not in _FLOATING:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATING)
            raise UsageError(f"fp8_linear(): {name} is {given.dtype}. Give it one of {allowed}.")
    is_matrix = weight.dim() == 2 and input.dim() > 0 and input.shape[-1] == weight.shape[1]
    if not is_matrix or not input.numel() or not pays(*weight.shape[::-1], input.device.type, scaling):
        return _in_bf16(input, weight, bias)
    result: Tensor
    if is_plain(input, weight, bias):
        result = _Fp8Linear.apply(_up_to_fp32(input), weight, bias, _Past(weight, scaling), scaling)  # type: ignore[no-untyped-call]
    else:
        function = _Composed if torch.compiler.is_compiling() else _WithTangents
        result = function.apply(_up_to_fp32(input), _up_to_fp32(weight), bias, scaling)[0]  # type: ignore[no-untyped-call]
    return result


def _in_bf16(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if gemm_dtype(input.device.type) is not torch.bfloat16:
        result: Tensor = EMULATED["linear"](input, weight, bias, compute=torch.bfloat16)
        return result
    low = None if bias is None else bias.to(torch.bfloat16)
    return F.linear(input.to(torch.bfloat16), weight.to(torch.bfloat16), low)


def _up_to_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.float64 else x


class _Kept(NamedTuple):
    """What backward needs: x's codes and inverse scale, and the weight's forward scale (tensorwise)."""

    codes: Tensor | None
    inv_scale: Tensor | None
    weight_scale: Tensor


class _Past:
    """How a call casts whole tensors: by their own largest magnitude, or by the weight's history."""

    __slots__ = ("_history", "_is_training", "_scaling")

    def __init__(self, weight: Tensor | None, scaling: Fp8Scaling) -> None:
        self._scaling = scaling
        self._history = history.of(weight) if weight is not None and scaling.history else None
        self._is_training = torch.is_grad_enabled()  # asked here: an autograd function's forward runs without

    def quantize(self, role: str, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes and their scale, of shape []."""
        if self._history is not None:
            return self._history.quantize(role, x, dtype, self._scaling, record=self._is_training)
        return quantize(x, dtype, self._scaling.margin)


def _along(x: Tensor, dim: int, dtype: torch.dtype, scaling: Fp8Scaling) -> Factor:
    """Codes with a scale for each row (dim 1 is summed over) or each column (dim 0 is)."""
    codes, scale = quantize(x, dtype, scaling.margin, dim)
    return Factor(codes, scale.reciprocal())


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, scaling: Fp8Scaling, past: _Past, keep: bool
) -> tuple[Tensor, _Kept]:
    """x [M, K], w [N, K] -> y [M, N] and what is held of x, if `keep` (the weight needs a gradient)."""
    if scaling.granularity == "rowwise":
        left, right = _along(x, 1, FORWARD, scaling), _along(w, 1, FORWARD, scaling)
        held = _along(x, 0, FORWARD, scaling) if keep else None
        weight_scale = right.inv_scale  # unused in backward, which casts by column
    else:
        codes, weight_scale = past.quantize("weight", w, FORWARD)
        right = Factor(codes, weight_scale.reciprocal())
        codes, scale = past.quantize("input", x, FORWARD)
        left = Factor(codes, scale.reciprocal())
        held = left if keep else None
    y = product("NT", left, right, bias)
    return y, _Kept(
        None if held is None else held.codes, None if held is None else held.inv_scale, weight_scale
    )


def _backward(
    g: Tensor, w: Tensor | None, kept: _Kept, scaling: Fp8Scaling, past: _Past, dw_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """g [M, N] -> dx [M, K] if there is a weight, dw [N, K] if there are codes of x."""
    held = None if kept.codes is None or kept.inv_scale is None else Factor(kept.codes, kept.inv_scale)
    # bf16 unless more is wanted: an fp16 or bf16 weight's gradient is rounded once either way.
    produced = torch.float32 if dw_dtype is not torch.bfloat16 else torch.bfloat16
    dx = dw = None
    if scaling.granularity == "rowwise":
        if w is not None:
            dx = product("NN", _along(g, 1, BACKWARD, scaling), _along(w, 0, FORWARD, scaling))
        if held is not None:
            dw = product("TN", _along(g, 0, BACKWARD, scaling), held, out_dtype=produced)
    else:
        codes, scale = past.quantize("gradient", g, BACKWARD)
        gradient = Factor(codes, scale.reciprocal())
        if w is not None:
            again = Factor(cast(w, kept.weight_scale, FORWARD), kept.weight_scale.reciprocal())
            dx = product("NN", gradient, again)
        if held is not None:
            dw = product("TN", gradient, held, out_dtype=produced)
    return dx, None if dw is None else dw.to(dw_dtype)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


class _Fp8Linear(torch.autograd.Function):
    """On plain tensors: holds what is needed and no more, and knows delayed scales."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, past: _Past, scaling: Fp8Scaling
    ) -> Tensor:
        for_input, for_weight, *_ = ctx.needs_input_grad
        wide = _up_to_fp32(weight.detach()).contiguous()
        y, kept = _forward(_rows(input), wide, bias, scaling, past, for_weight)
        ctx.save_for_backward(weight if for_input else None, *kept)
        ctx.scaling, ctx.past = scaling, past
        ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y.view(*input.shape[:-1], y.shape[-1])

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if not is_plain(grad):
            raise UsageError(
                "fp8_linear(): a batch of gradients (is_grads_batched=True), which its casts cannot take. Take them "
                "one at a time, or with torch.func.vmap over torch.func.vjp."
            )
        weight, *kept = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.no_grad():
            results = _gradients(ctx, grad, weight, _Kept(*kept), ctx.past)
        if again:
            # A leaf, so that the results have a history even where this gradient has none.
            anchor = torch.zeros((), requires_grad=True)
            results = tuple(None if r is None else _FirstOnly.apply(r, anchor) for r in results)  # type: ignore[no-untyped-call]
        return *results, None, None


def _gradients(
    ctx: Any, grad: Tensor, weight: Tensor | None, kept: _Kept, past: _Past
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias that are needed, in their dtypes."""
    input_dtype, weight_dtype, bias_dtype = ctx.dtypes
    g = _rows(grad)
    wide = None if weight is None else _up_to_fp32(weight.detach()).contiguous()
    dx, dw = (
        _backward(g, wide, kept, ctx.scaling, past, weight_dtype)
        if weight is not None or kept.codes is not None
        else (None, None)
    )
    db = g.sum(0, dtype=torch.float32).to(bias_dtype) if ctx.needs_input_grad[2] else None
    return None if dx is None else dx.view(*grad.shape[:-1], dx.shape[-1]).to(input_dtype), dw, db


class _Composed(torch.autograd.Function):
    """The same in operations that `torch.func`, vmap, compilers and subclasses take apart; scales are dynamic."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, kept = _forward(_rows(input), weight.contiguous(), bias, scaling, _Past(None, scaling), True)
        assert kept.codes is not None
        assert kept.inv_scale is not None
        return (y.view(*input.shape[:-1], y.shape[-1]), kept.codes, kept.inv_scale, kept.weight_scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        input, weight, bias, scaling = inputs
        _, codes, inv_scale, weight_scale = output
        ctx.mark_non_differentiable(codes, inv_scale, weight_scale)
        ctx.save_for_backward(weight, codes, inv_scale, weight_scale)
        ctx.save_for_forward(input, weight)
        ctx.scaling = scaling
        ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        weight, codes, inv_scale, weight_scale = ctx.saved_tensors
        for_input, for_weight, *_ = ctx.needs_input_grad
        kept = _Kept(codes if for_weight else None, inv_scale if for_weight else None, weight_scale)
        results = _gradients(ctx, grad, weight if for_input else None, kept, _Past(None, ctx.scaling))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            results = tuple(None if r is None else _FirstOnly.apply(r, grad, weight) for r in results)  # type: ignore[no-untyped-call]
        return *results, None


class _WithTangents(_Composed):
    """Forward mode as well; apart, since Dynamo takes no function that has it."""

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Tangents pass the casts as gradients do, unchanged; they are multiplied in FP32 with the 8-bit values."""
        input, weight = ctx.saved_tensors
        dim = 1 if ctx.scaling.granularity == "rowwise" else None

        def values(x: Tensor) -> Tensor:
            codes, scale = quantize(_rows(x), FORWARD, ctx.scaling.margin, dim)
            return widen(codes, scale.reciprocal(), torch.float32).view(x.shape)

        total = torch.zeros((), device=weight.device) if db is None else db.float()
        if dx is not None:
            total = total + F.linear(dx.float(), values(weight))
        if dw is not None:
            total = total + F.linear(values(input), dw.float())
        return total.to(torch.bfloat16), None, None, None


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
