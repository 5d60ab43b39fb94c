"""A recurrent layer on a CPU: products by PyTorch's libraries, and between two of them one pass of a compiled kernel.

Steps are taken in groups. The input's product is that of a whole group, and so are, in backward, the products that
make the input's and the weights' gradients: what is made for a group is made in the same memory for the next, which
stays in the cache, and no FP32 copy of a whole sequence is ever held.
"""

from __future__ import annotations

from ctypes import addressof, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp
from mezzo.pytorch.kernels.recurrent import cpu_backward_job as back_words
from mezzo.pytorch.kernels.recurrent import cpu_forward_job as words
from mezzo.pytorch.kernels.recurrent.cpu_kernels import backward_kernel, forward_kernel
from mezzo.pytorch.kernels.recurrent.products import add_to, factor, factor_dtype, times
from mezzo.pytorch.kernels.recurrent.saved import Gradients, Kept, Settings, Wanted

ALONE = 1 << 12
"""Elements of a state up to which one thread is done before a second has begun."""

# Rows of a group, a step at the least. In backward a group's bf16 weight gradient is rounded once, hence few of them.
_ROWS = 512
_BACKWARD_ROWS = {torch.float32: 512, torch.bfloat16: 4096}  # by the factors' dtype
_KEPT = {"lstm": 4, "gru": 4, "rnn_tanh": 0, "rnn_relu": 0}  # 16-bit numbers for each element of the output
_Job = c_int64 * 18


@dataclass(frozen=True, slots=True)
class Group:
    """Some steps: the rows that they have together, and each one's rows among them."""

    start: int
    stop: int
    steps: tuple[int, ...]


def forward(
    settings: Settings,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    keeps: bool,
) -> Kept:
    """The output, the last states, and what backward needs.

    Args:
        settings: of the layer.
        x: [rows, I], contiguous, in `settings.compute`; the rows of each step after those of the one before.
        h0: [N, H].
        c0: [N, H] of an LSTM.
        weights: w_ih, w_hh, b_ih, b_hh.
        keeps: whether there will be a backward.
    """
    kind, compute, batch = settings.kind, settings.compute, len(h0)
    w_ih, w_hh, b_ih, b_hh = weights
    rows, columns = len(x), h0.shape[1]
    width = len(w_hh)
    dtype = factor_dtype(compute)
    offsets = settings.offsets
    groups = _groups(settings, offsets, _ROWS)

    out = x.new_empty((rows, columns))
    kept = x.new_empty((rows if keeps else batch, _KEPT[kind] * columns))
    cells = h0.new_empty((0,) if c0 is None else (rows if keeps else batch, columns), dtype=settings.carried)
    hidden = _state(h0, settings)
    cell = None if c0 is None else _state(c0, settings)
    state = torch.empty(h0.shape, dtype=dtype).copy_(h0.detach().to(compute))
    bias = _biases(kind, b_ih, b_hh, width, columns)
    most = max(group.stop - group.start for group in groups)
    multiply_input = times(factor(w_ih, compute, dtype), most)
    multiply = times(factor(w_hh, compute, dtype), batch)
    space, product = x.new_empty((most, width), dtype=dtype), x.new_empty((batch, width), dtype=dtype)
    wide = x.new_empty((most, x.shape[1]), dtype=dtype) if dtype is not compute else None

    job = _Job()
    address = addressof(job)
    kernel = forward_kernel(kind, compute, dtype, settings.hidden_fp32)
    blocks = -(-columns // words.BLOCK)
    job[words.BLOCKS], job[words.COLUMNS] = blocks, columns
    job[words.BIAS] = bias.data_ptr()
    job[words.FACTOR], job[words.HIDDEN] = state.data_ptr(), hidden.data_ptr()
    job[words.CELL] = 0 if cell is None else cell.data_ptr()
    kept_at, out_at, cells_at = (t.data_ptr() for t in (kept, out, cells))
    given_step, out_step = width * space.element_size(), columns * out.element_size()
    kept_step = kept.shape[1] * kept.element_size() if keeps else 0
    cells_step = columns * cells.element_size() if keeps else 0
    job[words.KEPT], job[words.CELLS] = kept_at, cells_at

    sizes = settings.sizes
    count, views = -1, (state, product)
    for group in reversed(groups) if settings.reverse else groups:
        part = x[group.start : group.stop]
        if wide is not None:
            part = wide[: len(part)].copy_(part)
        given = multiply_input(part, space[: len(part)])
        given_at = given.data_ptr()
        for t in reversed(group.steps) if settings.reverse else group.steps:
            start = offsets[t]
            if sizes[t] != count:
                count = sizes[t]
                views = state[:count], product[:count]
                job[words.ITEMS] = count * blocks
                call = openmp.alone if count * columns <= ALONE else openmp.parallel
            made = multiply(*views)
            job[words.PRODUCT] = made.data_ptr()
            job[words.COUNTER] = 0
            job[words.GIVEN] = given_at + (start - group.start) * given_step
            job[words.OUT] = out_at + start * out_step
            if keeps:
                job[words.KEPT] = kept_at + start * kept_step
                job[words.CELLS] = cells_at + start * cells_step
            call(kernel, address)
    return Kept(
        out,
        hidden.to(settings.carried),
        None if cell is None else cell.to(settings.carried),
        kept if keeps else None,
        cells if keeps and c0 is not None else None,
    )


def backward(
    settings: Settings,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor | None, Tensor | None],
    wanted: Wanted,
) -> Gradients:
    """The gradients that are wanted, in FP32 but for the input's.

    Args:
        settings: of the layer.
        grads: of the output, in `settings.compute`, and of the last states; None for zeros.
        x: as `forward` got it; so `h0`, `c0`.
        h0: see there.
        c0: see there.
        weights: w_ih, w_hh.
        kept: the output, the sums before the gates, the cell states.
        wanted: which gradients.
    """
    kind, compute, batch = settings.kind, settings.compute, len(h0)
    w_ih, w_hh = weights
    out, sums, cells = kept
    columns, width = h0.shape[1], len(w_hh)
    dtype = factor_dtype(compute)
    offsets, sizes = settings.offsets, settings.sizes
    groups = _groups(settings, offsets, _BACKWARD_ROWS[dtype])
    is_gru = kind == "gru"

    d_out = torch.zeros_like(out) if grads[0] is None else grads[0].reshape(out.shape).contiguous()
    hidden_grad, cell_grad = (_started(grad, h0) for grad in grads[1:])
    product = x.new_zeros((batch, columns), dtype=dtype)
    first_h = factor(h0, compute, compute)
    first_c = None if c0 is None else _state(c0, settings).to(settings.carried)
    multiply = times(factor(w_hh, compute, dtype).t().contiguous(), batch)
    most = max(group.stop - group.start for group in groups)
    multiply_given = times(factor(w_ih, compute, dtype).t().contiguous(), most) if wanted.input else None
    gates_grad = x.new_empty((most, width), dtype=dtype)
    given_grad = torch.empty_like(gates_grad) if is_gru else gates_grad
    before = x.new_empty((most, columns), dtype=dtype)
    is_wide = dtype is not compute
    wide = x.new_empty((most, x.shape[1]), dtype=dtype) if is_wide else None
    dx = torch.empty_like(x) if wanted.input else None
    d_ih = _zeros(w_ih) if wanted.w_ih else None
    d_hh = _zeros(w_hh) if wanted.w_hh else None
    bias_grad = torch.zeros(4 * columns if is_gru else width)

    job = _Job()
    address = addressof(job)
    kernel = backward_kernel(kind, compute, dtype, settings.hidden_fp32)
    blocks = -(-columns // back_words.BLOCK)
    job[back_words.ITEMS], job[back_words.COLUMNS] = blocks, columns
    job[back_words.BIAS_GRAD] = bias_grad.data_ptr()
    job[back_words.HIDDEN_GRAD], job[back_words.PRODUCT] = hidden_grad.data_ptr(), product.data_ptr()
    job[back_words.CELL_GRAD] = cell_grad.data_ptr()
    job[back_words.BEFORE_ALL] = first_h.data_ptr()
    job[back_words.CELLS_BEFORE_ALL] = 0 if first_c is None else first_c.data_ptr()
    sums = out if sums is None or not sums.numel() else sums
    out_at, sums_at, d_out_at = out.data_ptr(), sums.data_ptr(), d_out.data_ptr()
    cells_at, cells_step = (0, 0) if cells is None else (cells.data_ptr(), columns * cells.element_size())
    gates_at, given_at, before_at = gates_grad.data_ptr(), given_grad.data_ptr(), before.data_ptr()
    out_step, sums_step = columns * out.element_size(), sums.shape[1] * sums.element_size()
    grad_step, before_step = width * gates_grad.element_size(), columns * before.element_size()

    begins = len(sizes) - 1 if settings.reverse else 0
    earlier = 1 if settings.reverse else -1
    count, target = -1, product
    for group in groups if settings.reverse else reversed(groups):
        for t in group.steps if settings.reverse else reversed(group.steps):
            start, here = offsets[t], offsets[t] - group.start
            if sizes[t] != count:
                count = sizes[t]
                target = product[:count]
                job[back_words.ROWS] = count
                call = openmp.alone if count * columns <= ALONE else openmp.parallel
            job[back_words.COUNTER] = 0
            job[back_words.OUT_GRAD] = d_out_at + start * out_step
            job[back_words.KEPT] = sums_at + start * sums_step
            job[back_words.CELLS] = cells_at + start * cells_step
            job[back_words.GATES_GRAD] = gates_at + here * grad_step
            if is_gru:
                job[back_words.GIVEN_GRAD] = given_at + here * grad_step
            job[back_words.FACTOR] = before_at + here * before_step
            if t == begins:
                job[back_words.ROWS_BEFORE] = 0
            else:
                job[back_words.ROWS_BEFORE] = min(count, sizes[t + earlier])
                job[back_words.BEFORE] = out_at + offsets[t + earlier] * out_step
                job[back_words.CELLS_BEFORE] = cells_at + offsets[t + earlier] * cells_step
            call(kernel, address)
            if t != begins or wanted.h0:
                made = multiply(gates_grad[here : here + count], target)
                if made is not target:
                    target.copy_(made)
        size = group.stop - group.start
        part, of_gates, of_given = x[group.start : group.stop], gates_grad[:size], given_grad[:size]
        if d_hh is not None:
            add_to(d_hh, of_gates, before[:size])
        if d_ih is not None:
            add_to(d_ih, of_given, part if wide is None else wide[:size].copy_(part))
        if dx is not None and multiply_given is not None:
            into = dx[group.start : group.stop]
            made = multiply_given(of_given, into if wide is None else wide[:size])
            if made is not into:
                into.copy_(made)
    d_h0 = hidden_grad.add_(product) if wanted.h0 else None
    db_ih = db_hh = bias_grad
    if is_gru:
        db_ih, db_hh = bias_grad[:width], torch.cat((bias_grad[: 2 * columns], bias_grad[width:]))
    of_ih, of_hh = wanted.biases
    d_c0 = cell_grad if wanted.c0 else None
    return Gradients(dx, d_h0, d_c0, d_ih, d_hh, db_ih if of_ih else None, db_hh.clone() if of_hh else None)


def _groups(settings: Settings, offsets: tuple[int, ...], most: int) -> list[Group]:
    """Steps in groups of at most so many rows."""
    groups: list[Group] = []
    steps: list[int] = []
    for t, size in enumerate(settings.sizes):
        if steps and offsets[t] + size - offsets[steps[0]] > most:
            groups.append(Group(offsets[steps[0]], offsets[t], tuple(steps)))
            steps = []
        steps.append(t)
    groups.append(Group(offsets[steps[0]], offsets[-1], tuple(steps)))
    return groups


def _state(given: Tensor, settings: Settings) -> Tensor:
    """A state in FP32, which is written to: the caller's, as it is carried."""
    if settings.hidden_fp32:
        return given.detach().to(torch.float32, copy=True).contiguous()
    return given.detach().to(settings.compute).float().contiguous()


def _started(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros(like.shape, dtype=torch.float32)
    return grad.to(torch.float32, copy=True).contiguous()


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape, dtype=torch.float32)


def _biases(kind: str, b_ih: Tensor | None, b_hh: Tensor | None, width: int, columns: int) -> Tensor:
    """What is added before the gates, FP32; for a GRU r, z, n of the input and n of the state."""
    ih, hh = (torch.zeros(width) if b is None else b.detach().float() for b in (b_ih, b_hh))
    if kind != "gru":
        return ih + hh
    return torch.cat((ih[: 2 * columns] + hh[: 2 * columns], ih[2 * columns :], hh[2 * columns :]))
