"""One walk over the rows of a head's input: logits of some rows, their loss, their gradient, and what that adds up to.

Logits live in one buffer that all chunks share, and the gradient takes their place in it. So what is held beside the
results is that buffer, a block of the weight's gradient, and nothing of the size [rows, classes].

How many rows make a chunk is a bargain. Each chunk reads the weight twice and adds to the weight's gradient once, which
is 14 bytes an element of the weight (bf16), for 6 floating-point operations an element and row. On a core with
AVX512-BF16, 131,072 classes and width 384 took as long with 512 rows as with 256, and 9 % longer with 128. A GPU
has more operations for each byte and would want more rows; none was at hand to say how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.rules import Rule
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.kernels.cross_entropy import rows_gradient, rows_loss
from mezzo.pytorch.kernels.cross_entropy.reference import check_targets
from mezzo.pytorch.machine import native_formats
from mezzo.pytorch.region import identity

REDUCTIONS = ("mean", "none", "sum")

_HALVES = (torch.bfloat16, torch.float16)

BUFFER = 32 << 20
"""Bytes of logits that a chunk may have, where that gives it `FEWEST` rows or more."""

FEWEST = 256
"""Rows of a chunk, however many classes there are."""

_BLOCK = 1 << 20
"""Elements of the weight's gradient that are 16 bits before its FP32 sum takes them: a CPU's cache keeps them."""

_ROWS_PIECE = 1 << 20
"""Logits that are in FP32, with some temporaries of their size, at one time."""


@dataclass(frozen=True)
class Options:
    """The options of `torch.nn.functional.cross_entropy`, but for the class weights, which are a tensor.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target with this index neither counts nor gets a gradient.
        label_smoothing: from 0 to 1: how much of each target is spread evenly over all classes.

    Raises:
        UnknownNameError: another reduction.
        UsageError: a label smoothing outside [0, 1].
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", str(self.reduction), REDUCTIONS, where="linear_cross_entropy: ")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(
                f"linear_cross_entropy: label_smoothing={self.label_smoothing}. It is a share: give 0 to 1."
            )


def check_shapes(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> None:
    """Raise a UsageError that says which of the shapes or dtypes does not go with the others."""
    where = "linear_cross_entropy: "
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"{where}input {list(input.shape)} and weight {list(weight.shape)}. Give input [..., in] and weight "
            "[classes, in], as for F.linear."
        )
    classes = weight.shape[0]
    for name, tensor in (("bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tuple(tensor.shape) != (classes,):
            raise UsageError(f"{where}{name} {list(tensor.shape)}. Give [{classes}], one number a class.")
    rows = input.shape[:-1]
    if target.is_floating_point():
        if target.shape != (*rows, classes):
            raise UsageError(
                f"{where}target {list(target.shape)} of {target.dtype}. Probabilities of the classes have the shape "
                f"{[*rows, classes]}; class indices are integers."
            )
    elif target.dtype is torch.bool or target.is_complex():
        raise UsageError(
            f"{where}target of {target.dtype}. Give class indices (int64), or their probabilities (FP32)."
        )
    elif target.shape != rows:
        raise UsageError(
            f"{where}target {list(target.shape)} with input {list(input.shape)}. Give one index a row: "
            f"{list(rows)}."
        )


@dataclass(frozen=True)
class Arithmetic:
    """How operands become products.

    Args:
        rounded: the format that the operands are rounded to.
        product: the format that they then have, and logits and their gradients with them. It is wider than
            `rounded` where this machine has no fast products in that: then FP32 serves, between the same roundings.
    """

    rounded: torch.dtype
    product: torch.dtype

    @property
    def sums(self) -> torch.dtype:
        """The format of losses and of sums over rows: FP32, or FP64 for FP64."""
        return torch.float64 if self.product is torch.float64 else torch.float32

    def operand(self, tensor: Tensor) -> Tensor:
        """A tensor as a product takes it; itself where it is so already."""
        return tensor.to(self.rounded).to(self.product)


def arithmetic_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> Arithmetic:
    """What F.linear would compute in, here: autocast's dtype inside a region, else the tensors' own.

    FP64 is left alone by autocast, and so it is here. A policy that gives `linear` the rule ``fp32`` is obeyed.

    Raises:
        UsageError: dtypes that differ and that no region makes equal.
    """
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    dtypes = {tensor.dtype for tensor in tensors}
    device = weight.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        policy = identity.current_policy(device)
        decision = None if policy is None else policy.rule_for("linear")
        if decision is not None and decision.rule in (Rule.FP32, Rule.INTERNAL_FP32):
            return Arithmetic(torch.float32, torch.float32)
        low = torch.get_autocast_dtype(device)
        return _stored_in(low, device)
    if len(dtypes) > 1 or not weight.is_floating_point():
        named = ", ".join(name_of(tensor.dtype) for tensor in tensors)
        raise UsageError(
            f"linear_cross_entropy: input, weight and bias of {named}. Outside a region, and with fp64, all have "
            "one floating format: cast one side, or enter mezzo.autocast."
        )
    return _stored_in(weight.dtype, device)


def _stored_in(dtype: torch.dtype, device_type: str) -> Arithmetic:
    if dtype in _HALVES and name_of(dtype) not in native_formats(device_type):
        return Arithmetic(dtype, torch.float32)
    return Arithmetic(dtype, dtype)


@dataclass(frozen=True)
class Head:
    """What a walk reads: operands in the format of the products, and the loss's constants.

    Args:
        input: [n, in].
        weight: [classes, in].
        bias: [classes], or None.
        target: int64 [n], or floating [n, classes].
        class_weight: [classes] in the format of the sums, or None.
        options: the loss's options.
        arithmetic: what the formats are.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    options: Options
    arithmetic: Arithmetic


@dataclass
class Gradients:
    """Of the sum of the rows' losses times their scales; None where it was not wanted.

    Args:
        input: [n, in], in the format of the products; FP32 where that is fp16.
        weight: [classes, in], in the format of the sums; of the products if that was asked for.
        bias: [classes], in the format of the sums.
    """

    input: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def sweep(
    head: Head,
    *,
    lse: Tensor | None = None,
    scale: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (False, False, False),
    unsummed: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Gradients]:
    """The loss and log-sum-exp of each row, and, if there is a scale, gradients.

    Naive code::

        logits = F.linear(head.input, head.weight, head.bias)
        losses = F.cross_entropy(logits.float(), head.target, reduction="none", ...)
        gradients = torch.autograd.grad(losses, (head.input, head.weight, head.bias), scale)

    Args:
        head: what is read.
        lse: of an earlier walk over the same; the losses are then left at zero.
        scale: [n] in the format of the sums: what each row's gradient is multiplied by before it is rounded.
        needs: whether the gradients of input, weight and bias are wanted.
        unsummed: the format in which the weight's gradient is wanted: where one chunk has all rows there is nothing
            to sum, and a 16-bit product is the gradient.
    """
    count, classes = len(head.input), len(head.weight)
    step = rows_of_chunk(count, classes, head.weight.element_size())
    sums = head.arithmetic.sums
    losses = head.input.new_zeros(count, dtype=sums)
    found_lse = head.input.new_zeros(count, dtype=sums) if lse is None else lse
    gradients = Gradients() if scale is None else _empty(head, needs, sums if step < count else unsummed)
    scratch = _scratch(head, gradients.weight)
    buffer = head.input.new_empty((step, classes))
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        logits = _logits(head, rows, buffer)
        if lse is None:
            losses[rows], found_lse[rows] = loss_of(
                logits, head.target[rows], head.class_weight, head.options
            )
        if scale is not None:
            gradient_of(
                logits, head.target[rows], found_lse[rows], scale[rows], head.class_weight, head.options
            )
            _add(gradients, logits, head, rows, scratch)
    return losses, found_lse, gradients


def rows_of_chunk(count: int, classes: int, element_size: int) -> int:
    """Rows of each chunk but the last: as many as `BUFFER` holds, at least `FEWEST`, and chunks of one size."""
    most = max(FEWEST, BUFFER // max(1, classes * element_size))
    chunks = -(-count // most)
    return max(1, -(-count // max(1, chunks)))


def _logits(head: Head, rows: slice, buffer: Tensor) -> Tensor:
    """The logits of some rows, in the buffer."""
    out = buffer[: rows.stop - rows.start]
    if head.bias is None:
        return torch.mm(head.input[rows], head.weight.t(), out=out)
    return torch.addmm(head.bias, head.input[rows], head.weight.t(), out=out)


def _scratch(head: Head, total: Tensor | None) -> Tensor | None:
    """A block of the weight's gradient in its sum's format; None where products add to that by themselves."""
    if total is None or total.dtype is head.arithmetic.product:
        return None
    classes, width = total.shape
    if total.device.type != "cpu":  # no such cache to stay in, and one large product is better than many
        return torch.empty_like(total)
    return total.new_empty((min(classes, max(1, _BLOCK // max(1, width))), width))


def _empty(head: Head, needs: tuple[bool, bool, bool], format_of_weight: torch.dtype) -> Gradients:
    """Where gradients go: the first chunk overwrites them, and zeros serve where there is none."""
    sums, product = head.arithmetic.sums, head.arithmetic.product
    make = head.input.new_empty if len(head.input) else head.input.new_zeros
    is_direct = format_of_weight is product is not torch.float16
    return Gradients(
        make(head.input.shape, dtype=sums if product is torch.float16 else product) if needs[0] else None,
        make(head.weight.shape, dtype=product if is_direct else sums) if needs[1] else None,
        head.input.new_zeros(len(head.weight), dtype=sums) if needs[2] else None,
    )


def _add(gradients: Gradients, slope: Tensor, head: Head, rows: slice, scratch: Tensor | None) -> None:
    """Add what some rows contribute, `slope` being the gradient of their logits."""
    x = head.input[rows]
    if gradients.input is not None:
        _product(slope, head.weight, gradients.input[rows])
    if gradients.weight is not None:
        _add_weight(gradients.weight, slope, x, rows.start == 0, scratch)
    if gradients.bias is not None:
        gradients.bias += slope.sum(0, dtype=gradients.bias.dtype)


def _add_weight(total: Tensor, slope: Tensor, x: Tensor, is_first: bool, scratch: Tensor | None) -> None:
    """total += slope^T x, or = at first; by blocks of classes, so that what is 16 bits, then FP32, stays in cache."""
    if scratch is None:
        torch.addmm(total, slope.t(), x, beta=0 if is_first else 1, out=total)
        return
    for start in range(0, len(total), len(scratch)):
        part = total[start : start + len(scratch)]
        left = slope[:, start : start + len(scratch)].t()
        if is_first:
            _product(left, x, part)
        else:
            part += _product(left, x, scratch[: len(part)])


def _product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right in `out`'s format, which is that of the operands or wider.

    A product of fp16 operands is never rounded to fp16: a sum over rows may pass 65504, and no loss scale could
    help, since it is applied afterwards.
    """
    if out.dtype is left.dtype:
        return torch.mm(left, right, out=out)
    if left.dtype is not torch.float16:
        return out.copy_(torch.mm(left, right))
    if left.is_cuda:
        return out.copy_(torch.mm(left, right, out_dtype=out.dtype))
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def loss_of(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The loss of each row and its log-sum-exp, FP32 (FP64 for FP64), [n] both.

    Class indices go to the kernels. The rest is PyTorch operations: FP64, which only tests and small models use, and
    targets that are probabilities, which are as large as the logits themselves. With the mass `q` of `_mass`, a row's
    loss is ``sum(q) * lse - sum(q * x)`` and its gradient ``sum(q) * softmax(x) - q``.

    Args:
        logits: [n, classes], contiguous.
        target: int64 [n], or floating [n, classes].
        class_weight: [classes], in the format of the result.
        options: the reduction is not looked at.
    """
    if _is_kernels(logits, target):
        return rows_loss(logits, target, class_weight, options.ignore_index, options.label_smoothing)
    losses, lse = (logits.new_empty(len(logits), dtype=_wide(logits)) for _ in range(2))
    for rows in _pieces(logits):
        x = logits[rows].to(losses.dtype)
        q = _mass(target[rows], x, class_weight, options)
        lse[rows] = x.logsumexp(1)
        each = (lse[rows, None] - x).mul_(q)
        losses[rows] = each.masked_fill_(q == 0, 0.0).sum(1)  # what has no mass may be impossible
    return losses, lse


def gradient_of(
    logits: Tensor, target: Tensor, lse: Tensor, scale: Tensor, class_weight: Tensor | None, options: Options
) -> None:
    """Overwrite each row of logits by the gradient of its loss times its scale, which is of `lse`'s format."""
    if _is_kernels(logits, target):
        index, smoothing = options.ignore_index, options.label_smoothing
        rows_gradient(logits, target, lse, scale, class_weight, index, smoothing, logits)
        return
    for rows in _pieces(logits):
        x = logits[rows].to(lse.dtype)
        q = _mass(target[rows], x, class_weight, options)
        slope = (x - lse[rows, None]).exp_().mul_(q.sum(1, keepdim=True)).sub_(q).mul_(scale[rows, None])
        if not target.is_floating_point():
            slope.masked_fill_((target[rows] == options.ignore_index)[:, None], 0.0)
        logits[rows] = slope.to(logits.dtype)


def _is_kernels(logits: Tensor, target: Tensor) -> bool:
    return logits.dtype is not torch.float64 and not target.is_floating_point()


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _mass(target: Tensor, x: Tensor, class_weight: Tensor | None, options: Options) -> Tensor:
    """`q`, in x's format: ``w * ((1 - s) * p + s / C)`` for targets `p`, class weights `w`, label smoothing `s` and `C`
    classes. An index is a `p` with a single 1; rows of zeros for ignored targets."""
    classes, smoothing = x.shape[1], options.label_smoothing
    if target.is_floating_point():
        mass = target.to(x.dtype)
    else:
        check_targets(target, classes, options.ignore_index)
        ignored = target == options.ignore_index
        mass = F.one_hot(target.masked_fill(ignored, 0), classes).to(x.dtype)
    if smoothing:
        mass = mass * (1.0 - smoothing) + smoothing / classes
    if class_weight is not None:
        mass = mass * class_weight
    return mass if target.is_floating_point() else mass.masked_fill(ignored[:, None], 0.0)


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, _ROWS_PIECE // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)
