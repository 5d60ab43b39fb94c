"""A model's head and its cross entropy in one: the logits exist a chunk of rows at a time, and never as a whole.

The logits of a language model are its largest tensor: 2,048 tokens x 131,072 classes are 0.5 GB in bf16, and
autocast makes an FP32 copy, its logarithm of the softmax and a gradient of each. Here (`sweep`) a chunk's logits
become its loss, then its gradient, and then what that adds to the gradients of input and weight, before the next
chunk takes their place.

Gradients are made in the forward pass, where the logits are at hand, so that each product is computed once: three
in all, as without any chunks. For a mean or a sum this is possible since the rows' shares are known from the targets
alone; what arrives in backward (a loss scale, one over a window) is one number, by which the gradients are
multiplied. For ``reduction="none"`` each row has a number of its own, so backward makes the logits again: four
products. A second backward through a retained graph does that too.

fp16 needs care: without the loss scale, which arrives last, a gradient of 1/n times a probability is below fp16's
smallest number. So a chunk's gradients are scaled by the power of two that brings the largest possible one to
2^8, products are summed and kept in FP32, and the power is taken back in FP32 with what arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.nn.sweep import Arithmetic, Gradients, Head, Options, arithmetic_of, check_shapes, sweep

_TOP = 8
"""fp16 gradients of logits are at most two to this power before FP32 products sum them."""

_PIECE = 1 << 20
"""Elements of a 16-bit gradient that are FP32 while they are multiplied."""


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of a linear layer's output, which is never held as a whole.

    Naive code::

        logits = F.linear(input, weight, bias).flatten(0, -2)
        F.cross_entropy(logits.float(), target.flatten(), class_weight, ignore_index=ignore_index,
                        reduction=reduction, label_smoothing=label_smoothing)

    Inside a region the products are computed in its format, and the loss in FP32; outside, in the tensors' own.
    FP64 is FP64 throughout. NaN and infinities spread as in the naive code; a mean over no rows is NaN, and so
    is one whose targets are all ignored, with gradients of zero.

    Under `torch.compile`, in `torch.func` transforms, for tensor subclasses, and where the target or the class weights
    want a gradient, it *is* the naive code, whole logits included; and so is a second derivative.

    Args:
        input: [..., in].
        weight: [classes, in], as nn.Linear has it.
        target: integers [...], each a class or `ignore_index`; or [..., classes], floating: their probabilities.
        bias: [classes].
        class_weight: [classes], a factor for each class's loss.
        ignore_index: rows with this target don't count, and get no gradient.
        reduction: ``"mean"`` (over the targets' class weights; over rows, for probabilities), ``"sum"``, ``"none"``.
        label_smoothing: the share of each target that is spread evenly over all classes, from 0 to 1.

    Returns:
        FP32 (FP64 for FP64): a number, or for ``"none"`` the losses [...]. The weight's gradient has its dtype; it is
        summed over chunks in FP32 and rounded once.

    Raises:
        UsageError: shapes or dtypes that don't go together; a label smoothing outside [0, 1].
        UnknownNameError: another reduction.
        IndexError: a target is neither a class nor `ignore_index` (on a GPU, the device's own assertion).
    """
    options = Options(reduction, ignore_index, label_smoothing)
    check_shapes(input, weight, target, bias, class_weight)
    if torch.compiler.is_compiling() or not _is_ours(input, weight, target, bias, class_weight):
        return _naive(input, weight, target, bias, class_weight, options)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call,unused-ignore]
        input,
        weight,
        bias,
        target,
        class_weight,
        options,
        arithmetic_of(input, weight, bias),
        torch.is_grad_enabled(),
    )
    return loss


class LinearCrossEntropy(nn.Linear):
    """A model's last linear layer and its cross entropy: ``head(hidden, target)`` is the loss.

    Naive code::

        head = nn.Linear(in_features, num_classes, bias)
        loss = nn.CrossEntropyLoss(weight, ignore_index=..., reduction=..., label_smoothing=...)
        loss(head(hidden).flatten(0, -2).float(), target.flatten())

    It is an `nn.Linear` to whatever initialises, shards or counts those: parameters, their names and their first
    values are the same, and so a checkpoint of the linear layer loads. `weight` may be tied to an embedding's. See
    `linear_cross_entropy` for formats, memory and errors.

    Args:
        in_features: size of the last dimension of what it is given.
        num_classes: size of the vocabulary.
        bias: whether the logits have one.
        weight: [num_classes], the classes' weights in the loss; kept as the buffer `class_weight`, which is not saved.
        ignore_index: rows with this target don't count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: from 0 to 1.
        device: of the parameters.
        dtype: of the parameters.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.options = Options(reduction, ignore_index, label_smoothing)
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise UsageError(
                f"LinearCrossEntropy: weight {list(weight.shape)}. It is the classes' weights in the loss: give "
                f"[{num_classes}]."
            )
        self.register_buffer("class_weight", weight, persistent=False)

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of [..., in] against targets [...], reduced; without a target a UsageError names `logits`."""
        if target is None:
            raise UsageError(
                "LinearCrossEntropy: no target. Call head(hidden, target) for the loss, or head.logits(hidden) for "
                "the logits."
            )
        options = self.options
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            class_weight=self.class_weight,
            ignore_index=options.ignore_index,
            reduction=options.reduction,
            label_smoothing=options.label_smoothing,
        )

    def logits(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., num_classes], as ``nn.Linear`` gives them: for evaluation and generation."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The sizes, and the options that are not PyTorch's defaults."""
        given = [
            f"{key}={value!r}" for key, value in vars(self.options).items() if value != vars(Options())[key]
        ]
        return ", ".join([super().extra_repr(), *given])


def _is_ours(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> bool:
    """Whether the tensors can be taken in chunks, and no gradient is wanted that chunks don't make."""
    wants_more = target.requires_grad or (class_weight is not None and class_weight.requires_grad)
    return (
        is_plain(input, weight, target, bias, class_weight)
        and not weight.is_meta
        and not (wants_more and torch.is_grad_enabled())
    )


def _naive(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    options: Options,
) -> Tensor:
    """The definition, in PyTorch's operations: whole logits, in whatever region there is."""
    logits = F.linear(input, weight, bias)
    if logits.dtype is not torch.float64:
        logits = logits.float()
    is_probability = target.is_floating_point()
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1, target.shape[-1]).to(logits.dtype)
        if is_probability
        else target.reshape(-1).long(),
        None if class_weight is None else class_weight.to(logits.dtype),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    return loss.reshape(input.shape[:-1]) if options.reduction == "none" else loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        options: Options,
        arithmetic: Arithmetic,
        records: bool,
    ) -> Tensor:
        ctx.rest = (options, arithmetic)
        needs = _three(records and needed for needed in ctx.needs_input_grad[:3])
        with torch.autocast(weight.device.type, enabled=False):
            head = _head(input, weight, bias, target, class_weight, *ctx.rest)
            divisor = _divisor(head)
            scale = factor = None
            if any(needs) and options.reduction != "none":
                scale, factor = _scale(head, divisor.reciprocal().expand(len(head.input)))
            losses, lse, made = sweep(head, scale=scale, needs=needs, unsummed=weight.dtype)
            loss = losses.view(input.shape[:-1]) if options.reduction == "none" else losses.sum() / divisor
        ctx.save_for_backward(input, weight, bias, target, class_weight, lse, divisor)
        # Not among what is saved: they are handed over once, and then no longer held.
        ctx.made = None if scale is None else (made, factor)
        ctx.formats = (input.shape, input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = arrived
        needs = _three(ctx.needs_input_grad[:3])
        made, ctx.made = ctx.made, None
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled() or not is_plain(grad):
                return (*_differentiable(ctx, grad, needs), *[None] * 5)
            if made is not None:
                gradients, factor = made
                factor = grad if factor is None else grad * factor
            else:
                gradients, factor = _again(ctx, grad, needs)
        shape, *formats = ctx.formats
        dx, dw, db = (
            None if gradient is None else _times(gradient, factor, dtype)
            for gradient, dtype in zip((gradients.input, gradients.weight, gradients.bias), formats)
        )
        return (None if dx is None else dx.view(shape), dw, db, *[None] * 5)


def _three(flags: Iterable[bool]) -> tuple[bool, bool, bool]:
    first, second, third = flags
    return first, second, third


def _head(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: Options,
    arithmetic: Arithmetic,
) -> Head:
    """The operands as the products take them, rows in one dimension."""
    return Head(
        arithmetic.operand(input.reshape(-1, weight.shape[1])),
        arithmetic.operand(weight),
        None if bias is None else arithmetic.operand(bias),
        target.reshape(-1, len(weight)) if target.is_floating_point() else target.reshape(-1).long(),
        None if class_weight is None else class_weight.to(arithmetic.sums),
        options,
        arithmetic,
    )


def _divisor(head: Head) -> Tensor:
    """What the sum of the rows' losses is divided by: known from the targets alone."""
    target, options = head.target, head.options
    if options.reduction != "mean":
        count = torch.ones((), device=target.device)
    elif target.is_floating_point():
        count = torch.full((), len(target), device=target.device)
    else:
        counts = target != options.ignore_index
        if head.class_weight is None:
            count = counts.sum()
        else:  # an index that is neither is refused by the walk, which comes next
            index = target.clamp(0, len(head.class_weight) - 1)
            count = head.class_weight[index].masked_fill(~counts, 0.0).sum()
    return count.to(head.arithmetic.sums)


def _scale(head: Head, shares: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a walk multiplies the rows' gradients by, and the power of two that is owed afterwards, if any."""
    if head.arithmetic.product is not torch.float16 or not len(shares):
        return shares.contiguous(), None
    largest = shares.abs().amax()
    if head.class_weight is not None:
        largest = largest * head.class_weight.abs().amax()
    exponent = torch.frexp(largest).exponent.clamp(-100, 100) - _TOP
    return torch.ldexp(shares, -exponent), torch.ldexp(torch.ones_like(largest), exponent)


def _again(ctx: Any, grad: Tensor, needs: tuple[bool, bool, bool]) -> tuple[Gradients, Tensor | None]:
    """The gradients from logits that are computed a second time, each row's loss having a factor of its own."""
    input, weight, bias, target, class_weight, lse, divisor = ctx.saved_tensors
    head = _head(input, weight, bias, target, class_weight, *ctx.rest)
    shares = grad.reshape(-1) if grad.dim() else grad.expand(len(head.input))
    scale, factor = _scale(head, shares.to(lse.dtype) / divisor)
    return sweep(head, lse=lse, scale=scale, needs=needs, unsummed=weight.dtype)[2], factor


def _differentiable(ctx: Any, grad: Tensor, needs: tuple[bool, bool, bool]) -> list[Tensor | None]:
    """The gradients as PyTorch operations, the definition's own: for a second derivative, and for a batch of them."""
    input, weight, bias, target, class_weight, _, _ = ctx.saved_tensors
    options, arithmetic = ctx.rest
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        low_bias = None if bias is None else arithmetic.operand(bias)
        loss = _naive(
            arithmetic.operand(input), arithmetic.operand(weight), target, low_bias, class_weight, options
        )
    wanted = [tensor for tensor, needed in zip((input, weight, bias), needs) if needed]
    found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=again))
    return [next(found) if needed else None for needed in needs]


def _times(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """gradient * factor in `dtype`, the product in FP32 and in place: no copy of what has the right format already."""
    if factor is None or (factor.device.type == "cpu" and factor.item() == 1.0):
        return gradient.to(dtype)
    if gradient.dtype in (torch.float32, torch.float64):
        return gradient.mul_(factor).to(dtype)
    if gradient.dtype is not dtype:
        return gradient.to(dtype).mul_(factor)
    for piece in gradient.view(-1).split(_PIECE):
        piece.copy_(piece.float().mul_(factor))
    return gradient
