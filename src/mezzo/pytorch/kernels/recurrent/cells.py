"""Recurrent cells: one step of a layer, as scripts call it in a loop of their own.

What a layer does once a sequence, a cell would do at each call: round its weights to 16 bits, and multiply for their
gradients. Both are put off here along the chain that the state makes. The first cell of a chain rounds the weights
(`Weights`), and each later one, handed the state that the one before made, finds them there. Backward collects
the factors of the weights' gradients as it goes from cell to cell, and multiplies when it comes to the weights,
once, in FP32: PyTorch's autocast makes a 16-bit gradient of the whole weight at each step, and adds them up in 16 bits.

The rounded weights live as long as the graph that the states hang on. They are used again only while autocast would use
its own copies again, and the weights are at the version at which they were rounded; outside of recorded gradients
each call rounds them anew, as the optimizer's step may lie between any two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.recurrent import reference
from mezzo.pytorch.kernels.recurrent.ops import FORMATS, all_in, takes, whole
from mezzo.pytorch.kernels.recurrent.products import add_to, factor_dtype
from mezzo.pytorch.kernels.recurrent.reference import GATES
from mezzo.pytorch.kernels.unseen import unseen

_aten = torch.ops.aten
_sigmoid_slope: Callable[..., Tensor] = _aten.sigmoid_backward.default
_tanh_slope: Callable[..., Tensor] = _aten.tanh_backward.default

_ROWS = 4096  # of factors that are multiplied at once


def cell(
    kind: str,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    compute: torch.dtype,
    hidden_fp32: bool,
) -> Any:
    """Run one cell; `mezzo.pytorch.kernels.recurrent` says what it gives."""
    op = getattr(_aten, f"{kind}_cell").default
    is_pair = not isinstance(hx, Tensor) and len(hx) == 2
    h, c = hx if is_pair else (hx, None)
    tensors = (input, h, c, w_ih, w_hh, b_ih, b_hh)
    if is_pair is not (kind == "lstm") or not all_in(FORMATS, tensors):
        return op(input, hx, w_ih, w_hh, b_ih, b_hh)
    if not takes(tensors) or not _fits(kind, *tensors):
        return whole(op, [input, hx, w_ih, w_hh, b_ih, b_hh], 1, 0, compute, hidden_fp32)
    if not is_plain(*tensors):
        return _by_reference(kind, tensors, compute, hidden_fp32)
    given = (w_ih, w_hh, b_ih, b_hh)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        weights, token = _found(h, kind, given, compute) or _made(kind, given, compute)
        found = _Cell.apply(input, h, c, token, *given, weights, hidden_fp32)  # type: ignore[no-untyped-call,unused-ignore]
        return found if kind == "lstm" else found[0]
    step = _forward(Weights(kind, given, compute), input, h, c, hidden_fp32)
    return step.h if step.c is None else (step.h, step.c)


class Weights:
    """A cell's parameters as one product's factor, and what its backward has gathered for their gradients.

    The gates are one product of input and state side by side, [N, I + H] times [gates, I + H]. But a GRU's candidate
    hears of the state through its reset gate, so that its products, and its sums [N, 4 H], keep the two apart.

    Args:
        kind: of cell.
        given: w_ih, w_hh, b_ih, b_hh.
        compute: the 16-bit format.
    """

    __slots__ = ("bias", "compute", "factor", "kind", "pending", "sources", "versions", "width")

    def __init__(self, kind: str, given: tuple[Tensor | None, ...], compute: torch.dtype) -> None:
        w_ih, w_hh, b_ih, b_hh = given
        assert w_ih is not None
        assert w_hh is not None
        self.kind, self.compute, self.sources = kind, compute, given
        self.versions = tuple(None if t is None else t._version for t in given)
        self.width = width = w_hh.shape[1]
        columns = w_ih.shape[1]
        # Freed with the graph; from each backward that is under way, what it is to multiply.
        self.pending: dict[int, list[tuple[Tensor, Tensor]]] = {}
        with torch.no_grad():
            low = w_ih.new_empty((len(w_hh), columns + width), dtype=compute)
            low[:, :columns], low[:, columns:] = w_ih, w_hh
            self.factor = low.to(factor_dtype(compute))
            self.bias = _bias(kind, b_ih, b_hh, width)

    def are(self, kind: str, given: tuple[Tensor | None, ...], compute: torch.dtype) -> bool:
        """Whether these are the rounded values of the parameters given, as they are now."""
        return (
            kind is self.kind
            and compute is self.compute
            and all(a is b for a, b in zip(given, self.sources))
            and all(t is None or t._version == version for t, version in zip(given, self.versions))
        )

    def gradients(self, task: int, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Those of w_ih, w_hh, b_ih, b_hh, FP32, of all cells that this backward has come by."""
        pending = self.pending.pop(task, [])
        if not pending:
            return [None] * 4
        inputs, is_gru = self.factor.shape[1] - self.width, self.kind == "gru"
        total = torch.zeros(self.factor.shape)
        of_bias = torch.zeros(pending[0][0].shape[1])
        while pending:
            some: list[tuple[Tensor, Tensor]] = []
            while pending and (not some or sum(len(g) for g, _ in some) + len(pending[-1][0]) <= _ROWS):
                some.append(pending.pop())
            grads = torch.cat([g for g, _ in some])
            factors = torch.cat([f for _, f in some]).to(grads.dtype)
            if is_gru:
                add_to(total[:, :inputs], grads[:, : len(total)], factors[:, :inputs])
                add_to(total[:, inputs:], _of_state(grads, self.width), factors[:, inputs:])
            else:
                add_to(total, grads, factors)
            of_bias += grads.sum(0, dtype=torch.float32)
        of_b_ih = of_b_hh = of_bias
        if is_gru:
            of_b_ih, of_b_hh = of_bias[: len(total)], _of_state(of_bias, self.width)
        pairs = zip((total[:, :inputs], total[:, inputs:], of_b_ih, of_b_hh), needed)
        return [
            grad.to(source.dtype, copy=True).contiguous() if wanted and source is not None else None
            for (grad, wanted), source in zip(pairs, self.sources)
        ]


def _bias(kind: str, b_ih: Tensor | None, b_hh: Tensor | None, width: int) -> Tensor | None:
    """What is added to the sums, FP32: of a GRU for r, z, and the candidate's input and state."""
    given = [b.float() for b in (b_ih, b_hh) if b is not None]
    if kind != "gru" or not given:
        return sum(given[1:], given[0]) if given else None
    ih, hh = (torch.zeros(3 * width) if b is None else b.float() for b in (b_ih, b_hh))
    return torch.cat((ih[: 2 * width] + hh[: 2 * width], ih[2 * width :], hh[2 * width :]))


def _of_state(sums: Tensor, width: int) -> Tensor:
    """Of a GRU's r, z, and the candidate's input and state: all but the input's."""
    return torch.cat((sums[..., : 2 * width], sums[..., 3 * width :]), -1)


class _Step(NamedTuple):
    """One step: the states as they are returned, and what backward needs."""

    h: Tensor
    c: Tensor | None
    factors: Tensor
    sums: Tensor


class _Gather(torch.autograd.Function):
    """The parameters' gradients, when backward has come by all cells that used them; its output is but a token."""

    @staticmethod
    def forward(ctx: Any, weights: Weights, *given: Tensor | None) -> Tensor:
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        return torch.empty(())

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        task = torch._C._current_graph_task_id()
        return (None, *ctx.weights.gradients(task, ctx.needs_input_grad[1:]))


def _made(kind: str, given: tuple[Tensor | None, ...], compute: torch.dtype) -> tuple[Weights, Tensor]:
    weights = Weights(kind, given, compute)
    return weights, _Gather.apply(weights, *given)  # type: ignore[no-untyped-call,unused-ignore]


def _found(
    h: Tensor, kind: str, given: tuple[Tensor | None, ...], compute: torch.dtype
) -> tuple[Weights, Tensor] | None:
    """The rounded weights with which this state was made, if they are these."""
    node: Any = h.grad_fn
    kept = getattr(node, "mezzo_cell", None)
    if kept is None or not torch.is_autocast_cache_enabled() or not kept[0].are(kind, given, compute):
        return None
    found: tuple[Weights, Tensor] = kept
    return found


def _forward(weights: Weights, x: Tensor, h: Tensor, c: Tensor | None, hidden_fp32: bool) -> _Step:
    compute, width = weights.compute, weights.width
    factors = x.new_empty((len(x), weights.factor.shape[1]), dtype=compute)
    factors[:, : x.shape[1]] = x
    factors[:, x.shape[1] :] = h
    sums = _sums(weights, factors.to(weights.factor.dtype), x.shape[1])
    low = sums.to(compute)
    pre = sums.float() if weights.bias is None else sums + weights.bias
    carried = torch.float32 if hidden_fp32 else compute
    wide_h = h.to(carried).float()
    if weights.kind == "lstm":
        assert c is not None
        i, f, _, o = pre.sigmoid().chunk(4, 1)
        new_c = (f * c.to(carried)).addcmul_(i, pre[:, 2 * width : 3 * width].tanh()).to(carried)
        return _Step((o * new_c.float().tanh()).to(carried), new_c, factors, low)
    if weights.kind == "gru":
        r, z = pre[:, : 2 * width].sigmoid().chunk(2, 1)
        n = torch.addcmul(pre[:, 2 * width : 3 * width], r, pre[:, 3 * width :]).tanh()
        return _Step(torch.addcmul(n, z, wide_h - n).to(carried), None, factors, low)
    new_h = pre.tanh() if weights.kind == "rnn_tanh" else pre.relu()
    return _Step(new_h.to(carried), None, factors, low)


def _sums(weights: Weights, factors: Tensor, inputs: int) -> Tensor:
    """What the gates are made of, but for the bias: [N, gates], of a GRU [N, 4 H]."""
    if weights.kind != "gru":
        return torch.mm(factors, weights.factor.t())
    both = 2 * weights.width
    of_x = torch.mm(factors[:, :inputs], weights.factor[:, :inputs].t())
    of_h = torch.mm(factors[:, inputs:], weights.factor[:, inputs:].t())
    return torch.cat((of_x[:, :both].float() + of_h[:, :both], of_x[:, both:], of_h[:, both:]), 1)


def _below(weights: Weights, grads: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Gradients of input and state, as factors, from those of the sums."""
    if weights.kind != "gru":
        below = torch.mm(grads, weights.factor)
        return below[:, :inputs], below[:, inputs:]
    of_x = torch.mm(grads[:, : 3 * weights.width], weights.factor[:, :inputs])
    return of_x, torch.mm(_of_state(grads, weights.width), weights.factor[:, inputs:])


class _Cell(torch.autograd.Function):
    """One step; the parameters are inputs only for the sake of derivatives of derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        token: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        weights: Weights,
        hidden_fp32: bool,
    ) -> tuple[Tensor, ...]:
        step = _forward(weights, x, h, c, hidden_fp32)
        ctx.save_for_backward(x, h, c, w_ih, w_hh, b_ih, b_hh, step.c, step.factors, step.sums)
        ctx.mezzo_cell = weights, token
        ctx.hidden_fp32 = hidden_fp32
        ctx.set_materialize_grads(False)
        return (step.h,) if step.c is None else (step.h, step.c)

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, new_c, factors, sums = ctx.saved_tensors
        weights: Weights
        weights, token = ctx.mezzo_cell
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_plain(*grads, *given):
            found = _again(weights, grads, given, needs, ctx.hidden_fp32)
            return (*found[:3], None, *found[3:], None, None)
        x, h, c = given[:3]
        d_sums, d_h, d_c = _slopes(weights, grads, h, c, new_c, sums)
        low = d_sums.to(weights.compute)
        multiplied = low.to(weights.factor.dtype)
        if needs[3] and torch._C._will_engine_execute_node(token.grad_fn):
            task = torch._C._current_graph_task_id()
            weights.pending.setdefault(task, []).append((multiplied, factors))
        d_x = None
        if needs[0] or needs[1]:
            of_x, of_product = _below(weights, multiplied, x.shape[1])
            if needs[0]:
                d_x = of_x.to(x.dtype)
            d_h = of_product if d_h is None else d_h.add_(of_product)
        return (
            d_x,
            d_h.to(h.dtype) if needs[1] and d_h is not None else None,
            d_c.to(c.dtype) if needs[2] and d_c is not None else None,
            torch.zeros(()) if needs[3] else None,
            *(None,) * 6,
        )


def _slopes(
    weights: Weights,
    grads: tuple[Tensor | None, ...],
    h: Tensor,
    c: Tensor | None,
    new_c: Tensor | None,
    sums: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the sums before the gates, of the state beside the product, of the cell state; all FP32."""
    width = weights.width
    pre = sums.float() if weights.bias is None else sums + weights.bias
    d_h = torch.zeros(h.shape) if grads[0] is None else grads[0].float()
    if weights.kind == "lstm":
        assert c is not None
        assert new_c is not None
        i, f, _, o = pre.sigmoid().chunk(4, 1)
        g, shown = pre[:, 2 * width : 3 * width].tanh(), new_c.float().tanh()
        d_c = _tanh_slope(d_h * o, shown)
        if grads[1] is not None:
            d_c += grads[1]
        carried = c.to(new_c.dtype)
        of_i, of_f = _sigmoid_slope(d_c * g, i), _sigmoid_slope(d_c * carried, f)
        of_g, of_o = _tanh_slope(d_c * i, g), _sigmoid_slope(d_h * shown, o)
        return torch.cat((of_i, of_f, of_g, of_o), 1), None, d_c.mul_(f)
    if weights.kind == "gru":
        r, z = pre[:, : 2 * width].sigmoid().chunk(2, 1)
        product = pre[:, 3 * width :]
        n = torch.addcmul(pre[:, 2 * width : 3 * width], r, product).tanh()
        of_n = _tanh_slope(d_h - d_h * z, n)
        of_z = _sigmoid_slope(d_h * (h - n), z)
        of_r = _sigmoid_slope(of_n * product, r)
        return torch.cat((of_r, of_z, of_n, of_n * r), 1), d_h * z, None
    if weights.kind == "rnn_tanh":
        return _tanh_slope(d_h, pre.tanh()), None, None
    return d_h * (pre > 0), None, None


def _by_reference(
    kind: str, tensors: tuple[Tensor | None, ...], compute: torch.dtype, hidden_fp32: bool
) -> Any:
    """The step as operations that can be differentiated again and that `torch.func` takes apart."""
    x, h, c, w_ih, w_hh, b_ih, b_hh = tensors
    assert x is not None
    assert h is not None
    assert w_ih is not None
    assert w_hh is not None
    _, new_h, new_c = reference.layer(
        kind,
        x.unsqueeze(0),
        h,
        c,
        (w_ih, w_hh, b_ih, b_hh, None),
        compute=compute,
        hidden_fp32=hidden_fp32,
    )
    return new_h if new_c is None else (new_h, new_c)


def _again(
    weights: Weights,
    grads: tuple[Tensor | None, ...],
    given: list[Tensor | None],
    needs: tuple[bool, ...],
    hidden_fp32: bool,
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, and those of a batch of gradients: of x, h, c and parameters."""
    again = torch.is_grad_enabled()
    needed = (*needs[:3], *needs[4:8])
    wanted = [t for t, need in zip(given, needed) if need and t is not None]
    with torch.enable_grad():
        outputs = _by_reference(weights.kind, tuple(given), weights.compute, hidden_fp32)
    pairs = [
        (out, grad)
        for out, grad in zip((outputs,) if isinstance(outputs, Tensor) else outputs, grads)
        if grad is not None
    ]
    if not pairs:
        return [None] * len(given)
    outs, slopes = zip(*pairs)
    found = iter(torch.autograd.grad(outs, wanted, slopes, create_graph=again, allow_unused=True))
    return [next(found) if need and t is not None else None for t, need in zip(given, needed)]


def _fits(
    kind: str,
    input: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> bool:
    """Whether all shapes go together; where they don't, PyTorch's op says what is wrong."""
    if input.dim() != 2 or w_hh.dim() != 2 or not input.numel():
        return False
    gates, width = w_hh.shape
    state = (len(input), width)
    return (
        bool(width)
        and gates == GATES[kind] * width
        and w_ih.shape == (gates, input.shape[1])
        and h.shape == state
        and (c is None or c.shape == state)
        and (b_ih is None or b_ih.shape == (gates,))
        and (b_hh is None or b_hh.shape == (gates,))
    )
