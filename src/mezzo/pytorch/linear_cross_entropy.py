"""A linear layer and the cross entropy of its output, in chunks of rows, so that the logits never exist as a whole.

All chunks share one buffer. The forward pass turns a chunk's logits into its loss, then into their gradient, and adds
that to the gradients of input and weight: three products, as without chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import check_whole
from mezzo.core.rules import Rule
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.dtypes import SIXTEEN_BITS, name_of
from mezzo.pytorch.hardware import native_formats
from mezzo.pytorch.kernels import cross_entropy
from mezzo.pytorch.kernels.cross_entropy.reference import Rows
from mezzo.pytorch.kernels.plain import is_plain, wide_row

BUFFER = 32 << 20  # bytes of logits in a chunk, if that gives it `FEWEST` rows or more

FEWEST = 256
"""Least rows in a chunk. On a core with AVX512-BF16 512 rows took as long, 128 took 9 % longer. No GPU was measured."""

_BLOCK = 1 << 20
"""Elements of the weight's gradient in 16 bits before they are added to its FP32 sum: they stay in a CPU's cache."""

_TOP = 8  # before a loss scale arrives, a gradient of 1/n times a probability is below fp16's smallest number
"""fp16 gradients of logits are at most two to this power before FP32 products sum them."""

_PIECE = 1 << 20  # elements of a 16-bit gradient that are multiplied in FP32 at a time


_Three = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias
_Formats = tuple[torch.dtype, torch.dtype]  # what operands are rounded to, and the format of the products


@dataclass(frozen=True)
class Options:
    """The options of `F.cross_entropy` except the class weights, checked."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        reductions = ("mean", "none", "sum")
        if self.reduction not in reductions:
            raise unknown_name("reduction", str(self.reduction), reductions, where="linear_cross_entropy: ")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(
                f"linear_cross_entropy: label_smoothing is {self.label_smoothing}. It must be between 0 and 1."
            )


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
    """Cross entropy of a linear layer's output, without holding the whole output.

    Naive code (which is what runs under `torch.compile` and `torch.func`, and for tensor subclasses, FP64, targets that
    are probabilities, and class weights that require gradients)::

        logits = F.linear(input, weight, bias).flatten(0, -2)
        F.cross_entropy(logits.float(), target.flatten(), class_weight, ignore_index=ignore_index,
                        reduction=reduction, label_smoothing=label_smoothing)

    Products are computed in autocast's format, or without autocast in that of the tensors; the loss in FP32 (FP64 for
    FP64). NaN and infinities propagate; a mean over no rows, or only ignored ones, is NaN with zero gradients.

    Args:
        input: [..., in].
        weight: [classes, in], as in nn.Linear.
        target: integers [...], each a class or `ignore_index`; or probabilities [..., classes], floating.
        bias: [classes].
        class_weight: [classes], a factor for each class's loss.
        ignore_index: rows with this target are left out of the loss and get no gradient.
        reduction: ``"mean"`` (over the targets' class weights; over rows for probabilities), ``"sum"``, ``"none"``.
        label_smoothing: the share of each target that is spread evenly over all classes, from 0 to 1.

    Returns:
        A number, or for ``"none"`` the losses [...]. The weight's gradient is summed in FP32 and rounded once
        (a bf16 weight's again where the loss's own gradient is not a power of two).

    Raises:
        UsageError: shapes or dtypes that do not fit; a label smoothing outside [0, 1]; in backward, a second derivative
            (``create_graph=True``) or a batch of gradients (``is_grads_batched=True``).
        UnknownNameError: an unknown reduction.
        IndexError: a target is neither a class nor `ignore_index` (on a GPU, the device's own assertion).
    """
    options = Options(reduction, ignore_index, label_smoothing)
    _check_shapes(input, weight, target, bias, class_weight)
    if torch.compiler.is_compiling() or not _is_ours(input, weight, target, bias, class_weight):
        return _naive(F.linear(input, weight, bias), target, class_weight, options)
    formats = _formats(input, weight, bias)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, target, class_weight, options, formats, torch.is_grad_enabled()
    )
    return loss


class LinearCrossEntropy(nn.Linear):
    """A model's last linear layer and its cross entropy: ``head(hidden, target)`` is the loss.

    Naive code::

        head = nn.Linear(in_features, num_classes, bias)
        loss = nn.CrossEntropyLoss(weight, ignore_index=..., reduction=..., label_smoothing=...)
        loss(head(hidden).flatten(0, -2).float(), target.flatten())

    An `nn.Linear` with the same parameters, names and initial values: a checkpoint of the linear layer loads, and
    `weight` may be tied to an embedding's. See `linear_cross_entropy` for formats, memory, errors and options.

    Args:
        in_features: size of the input's last dimension.
        num_classes: size of the vocabulary.
        bias: whether the logits have one.
        weight: [num_classes], the classes' weights in the loss; becomes the buffer `class_weight`, which is not saved.

    Example:
        >>> head = LinearCrossEntropy(8, 100)  # hidden size 8, 100 classes
        >>> head(torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)).shape
        torch.Size([])
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
        check_whole("LinearCrossEntropy: in_features", in_features, 1)
        check_whole("LinearCrossEntropy: num_classes", num_classes, 1)
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.options = Options(reduction, ignore_index, label_smoothing)
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise UsageError(
                f"LinearCrossEntropy: weight has shape {list(weight.shape)}. It must be [{num_classes}], one per class."
            )
        self.register_buffer("class_weight", weight, persistent=False)

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of hidden states [..., in] against targets [...], reduced. For logits call `logits`."""
        if target is None:
            raise UsageError(
                "LinearCrossEntropy: no target is given. For the loss call head(hidden, target), for logits "
                "head.logits(hidden)."
            )
        named: dict[str, Any] = {"class_weight": self.class_weight, **vars(self.options)}
        return linear_cross_entropy(input, self.weight, target, self.bias, **named)

    def logits(self, input: Tensor) -> Tensor:
        """The logits [..., num_classes] of hidden states [..., in], as from ``nn.Linear``: for evaluation."""
        return F.linear(input, self.weight, self.bias)


def _check_shapes(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> None:
    rows, classes = input.shape[:-1], weight.shape[0]
    fits = weight.dim() == 2 and input.dim() > 0 and input.shape[-1] == weight.shape[1]
    fits = fits and all(given is None or given.shape == (classes,) for given in (bias, class_weight))
    if target.is_floating_point():
        fits = fits and target.shape == (*rows, classes)
    else:
        fits = fits and target.shape == rows and target.dtype is not torch.bool and not target.is_complex()
    if fits:
        return
    given = {"input": input, "weight": weight, "bias": bias, "class_weight": class_weight}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items() if x is not None)
    raise UsageError(
        f"linear_cross_entropy: shapes do not fit: {shapes}, target {list(target.shape)} of {target.dtype}. Use input "
        "[..., in], weight [classes, in], bias and class_weight [classes], and as target integers [...] or "
        "probabilities [..., classes]."
    )


def _is_ours(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> bool:
    """Whether chunks can compute everything that is needed."""
    return (
        is_plain(input, weight, target, bias, class_weight)
        and not weight.is_meta
        and not target.is_floating_point()
        and torch.float64 not in (input.dtype, weight.dtype)
        and not (class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled())
    )


def _formats(input: Tensor, weight: Tensor, bias: Tensor | None) -> _Formats:
    """The format that operands are rounded to, and the format of the products (FP32 where hardware has no fast products
    in the first). It is autocast's, FP32 if the policy's rule for `linear` says so, or outside of autocast the tensors'
    own.
    """
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    device, low = weight.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        policy = active_policy.current_policy(device)
        decision = None if policy is None else policy.rule_for("linear")
        is_wide = decision is not None and decision.rule in (Rule.FP32, Rule.INTERNAL_FP32)
        low = torch.float32 if is_wide else torch.get_autocast_dtype(device)
    elif any(tensor.dtype is not low for tensor in tensors) or not weight.is_floating_point():
        named = ", ".join(name_of(tensor.dtype) for tensor in tensors)
        raise UsageError(
            f"linear_cross_entropy: input, weight and bias are {named}. Outside of autocast they need the same "
            "floating-point format. Convert them, or use: with mezzo.autocast('bf16')."
        )
    is_emulated = low in SIXTEEN_BITS and name_of(low) not in native_formats(device)
    return low, torch.float32 if is_emulated else low


def _naive(logits: Tensor, target: Tensor, class_weight: Tensor | None, options: Options) -> Tensor:
    """The definition, in PyTorch's operations, on whole logits."""
    shape, named = logits.shape[:-1], dict(vars(options))
    if logits.dtype is not torch.float64:
        logits = logits.float()
    if target.is_floating_point():
        rows, named["ignore_index"] = target.reshape(-1, target.shape[-1]).to(logits.dtype), -100
    else:
        rows = target.reshape(-1).long()
    weight = None if class_weight is None else class_weight.to(logits.dtype)
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows, weight, **named)
    return loss.reshape(shape) if options.reduction == "none" else loss


_Head = tuple[Tensor, Tensor, Tensor | None, Rows]
"""Input, weight and bias in the format of the products; targets and options, to which chunks add their logits."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        input, weight, bias, target, class_weight, options, formats, records = given
        ctx.rest = options, formats
        needs = [records and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(weight.device.type, enabled=False):
            head = _head((input, weight, bias), target, class_weight, *ctx.rest)
            divisor = weight.new_ones((), dtype=torch.float32)
            if options.reduction == "mean":
                divisor = cross_entropy.divisor_of_mean(head[-1])
            scale = factor = None
            if any(needs) and options.reduction != "none":
                scale, factor = _scale(head, divisor.reciprocal().expand(target.numel()))
            losses, lse, made = _walk(head, weight.dtype, scale=scale, needs=needs)
            loss = losses.view(input.shape[:-1]) if options.reduction == "none" else losses.sum() / divisor
        ctx.save_for_backward(input, weight, bias, target, class_weight, lse, divisor)
        # Not saved: backward takes them once, and then frees them.
        ctx.made = None if scale is None else (made, factor)
        ctx.like = [None if leaf is None else (leaf.shape, leaf.dtype) for leaf in (input, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = arrived
        if torch.is_grad_enabled() or not is_plain(grad):
            raise UsageError(
                "linear_cross_entropy: no second derivative (create_graph=True) and no batch of gradients "
                "(is_grads_batched=True), since the gradients are computed in the forward pass. Use "
                "F.cross_entropy(F.linear(input, weight), target)."
            )
        made, ctx.made = ctx.made, None
        with torch.autocast(grad.device.type, enabled=False):
            gradients, factor = made or _again(ctx, grad)
        if made is not None:
            factor = grad if factor is None else grad * factor
        results = [
            None if gradient is None else _times(gradient, factor, like[1]).view(like[0])
            for gradient, like in zip(gradients, ctx.like)
        ]
        return *results, *[None] * 5


def _head(
    leaves: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor,
    class_weight: Tensor | None,
    options: Options,
    formats: _Formats,
) -> _Head:
    input, weight, bias = leaves
    rounded, product = formats
    x, w, b = (
        None if t is None else t.detach().to(rounded).to(product)
        for t in (input.reshape(-1, weight.shape[1]), weight, bias)
    )
    assert x is not None
    assert w is not None
    rows = target.reshape(-1).long()
    given = Rows(x, rows, wide_row(class_weight), options.ignore_index, options.label_smoothing)
    return x, w, b, given


def _scale(head: _Head, shares: Tensor) -> tuple[Tensor, Tensor | None]:
    """What `_walk` multiplies the rows' gradients by, and the power of two to divide out afterwards, if any."""
    x, _, _, given = head
    if x.dtype is not torch.float16 or not len(shares):
        return shares.contiguous(), None
    largest = shares.abs().amax()
    if given.weight is not None:
        largest = largest * given.weight.abs().amax()
    exponent = torch.frexp(largest).exponent.clamp(-100, 100) - _TOP
    return torch.ldexp(shares, -exponent), torch.ldexp(torch.ones_like(largest), exponent)


def _walk(
    head: _Head,
    stored: torch.dtype,
    *,
    lse: Tensor | None = None,
    scale: Tensor | None = None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, _Three]:
    """FP32 losses [n], FP64 log-sum-exps [n] (found unless given), and, with a `scale`, the gradients that `needs` asks
    for.

    Naive code::

        losses = F.cross_entropy(F.linear(input, weight, bias).float(), given.target, reduction="none", ...)
        gradients = torch.autograd.grad(losses, (input, weight, bias), scale)

    `stored` is the format of the parameter `weight`. A single chunk's product is rounded to it at once if it is bf16.
    """
    x, weight, bias, given = head
    (count, width), classes = x.shape, len(weight)
    step = rows_of_chunk(count, classes, weight.element_size())
    kernel = cross_entropy.kernel_for(x.device.type, given)
    losses = x.new_zeros(count, dtype=torch.float32)
    found_lse = x.new_zeros(count, dtype=torch.float64) if lse is None else lse
    wide = torch.float32 if x.dtype is torch.float16 else x.dtype
    summed = stored if step >= count and stored is x.dtype is torch.bfloat16 else torch.float32
    sizes = (((count, width), wide), ((classes, width), summed), ((classes,), torch.float32))
    dx, dw, db = (
        x.new_zeros(size, dtype=dtype) if needed and scale is not None else None
        for needed, (size, dtype) in zip(needs, sizes)
    )
    buffer = x.new_empty((step, classes))
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        logits = buffer[: rows.stop - start]
        if bias is None:
            torch.mm(x[rows], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[rows], weight.t(), out=logits)
        part = given._replace(logits=logits, target=given.target[rows])
        if lse is None:
            losses[rows], found_lse[rows] = kernel.rows_loss(part)
        if scale is None:
            continue
        kernel.rows_gradient(part, found_lse[rows], scale[rows], logits)
        if dx is not None and dx.dtype is logits.dtype:
            torch.mm(logits, weight, out=dx[rows])
        elif dx is not None:
            dx[rows] = _product(logits, weight)
        if dw is not None:
            _add_product(dw, logits.t(), x[rows])
        if db is not None:
            db += logits.sum(0, dtype=torch.float32)
    return losses, found_lse, (dx, dw, db)


def rows_of_chunk(count: int, classes: int, element_size: int) -> int:
    """Rows of each chunk but the last: as many as `BUFFER` holds, at least `FEWEST`, evenly distributed."""
    most = max(FEWEST, BUFFER // max(1, classes * element_size))
    chunks = -(-count // most)
    return max(1, -(-count // max(1, chunks)))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right; in FP32 for fp16, because a sum over rows may exceed 65504 before a loss scale applies."""
    if left.dtype is not torch.float16:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; on a CPU by blocks of rows, so that 16-bit products stay in its cache."""
    if left.dtype is total.dtype:
        torch.addmm(total, left, right, out=total)
        return
    rows, width = total.shape
    step = max(1, _BLOCK // max(1, width)) if total.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        total[start : start + step] += _product(left[start : start + step], right)


def _again(ctx: Any, grad: Tensor) -> tuple[_Three, Tensor | None]:
    """The gradients from logits that are computed again: for ``reduction="none"``, and a second backward."""
    *leaves, target, class_weight, lse, divisor = ctx.saved_tensors
    head = _head(tuple(leaves), target, class_weight, *ctx.rest)
    shares = grad.reshape(-1) if grad.dim() else grad.expand(target.numel())
    scale, factor = _scale(head, shares / divisor)
    return _walk(head, leaves[1].dtype, lse=lse, scale=scale, needs=list(ctx.needs_input_grad[:3]))[2], factor


def _times(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """gradient * factor in `dtype`, computed in FP32, in place if the format is right."""
    if factor is None or (factor.device.type == "cpu" and factor.item() == 1.0):
        return gradient.to(dtype)
    if gradient.dtype is torch.float32:
        return gradient.mul_(factor).to(dtype)
    if gradient.dtype is not dtype:
        return gradient.to(dtype).mul_(factor)
    for piece in gradient.view(-1).split(_PIECE):
        piece.copy_(piece.float().mul_(factor))
    return gradient
