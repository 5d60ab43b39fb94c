"""One walk over the rows of a head's input: logits of some rows, their loss, their gradient, and what that adds up to.

Logits live in one buffer that all chunks share, and the gradient takes their place in it. So what is held beside the
results is that buffer, a block of the weight's gradient, and nothing of the size [rows, classes].

How many rows make a chunk is a bargain. Each chunk reads the weight twice and adds to the weight's gradient once, which
is 14 bytes an element of the weight (bf16), for 6 floating-point operations an element and row. On a core with
AVX512-BF16, 131,072 classes and width 384 took as long with 512 rows as with 256, and 9 % longer with 128. A GPU
has more operations for each byte and would want more rows; none was at hand to say how many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.pytorch.nn import rows as of_rows
from mezzo.pytorch.nn.arithmetic import Arithmetic
from mezzo.pytorch.nn.options import Options

BUFFER = 32 << 20
"""Bytes of logits that a chunk may have, where that gives it `FEWEST` rows or more."""

FEWEST = 256
"""Rows of a chunk, however many classes there are."""

_BLOCK = 1 << 20
"""Elements of the weight's gradient that are 16 bits before its FP32 sum takes them: a CPU's cache keeps them."""


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
            losses[rows], found_lse[rows] = of_rows.loss(
                logits, head.target[rows], head.class_weight, head.options
            )
        if scale is not None:
            of_rows.gradient(
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
