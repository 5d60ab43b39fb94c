"""A recurrent layer as PyTorch operations, a step at a time: its specification, which can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""w_ih, w_hh, b_ih, b_hh, w_hr, in PyTorch's layout and order of gates."""

State = tuple[Tensor, Tensor | None]
"""Hidden and cell state in FP32, [n, H]; only an LSTM has the second."""

Carried = Callable[[Tensor], Tensor]
"""How an FP32 state goes to the next step: as it is, or rounded."""

GATES: Mapping[str, int] = MappingProxyType({"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1})
"""How many rows of the weights there are for each element of the hidden state, by kind of layer."""


def layer(
    kind: str,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Weights,
    *,
    compute: torch.dtype,
    hidden_fp32: bool,
    reverse: bool = False,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer in one direction; see `layer.layer`. Nothing is checked here."""

    def factor(x: Tensor) -> Tensor:
        return x.to(compute).float()

    def carried(x: Tensor) -> Tensor:
        return x if hidden_fp32 else factor(x)

    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    step = _STEPS[kind]
    recurrent = factor(w_hh).t()
    projection = None if w_hr is None else factor(w_hr).t()
    given = _plus(factor(input) @ factor(w_ih).t(), b_ih)
    rows = given.unbind(0) if batch_sizes is None else given.split(batch_sizes.tolist())
    lengths = [len(row) for row in rows]
    states = carried(h0.float()), None if c0 is None else carried(c0.float())

    outputs: list[Tensor] = []
    done: list[State] = []
    live = _part(states, 0, 0 if reverse else lengths[0])
    order = reversed(range(len(rows))) if reverse else range(len(rows))
    for t in order:
        count = lengths[t]
        if count > len(live[0]):  # reverse: sequences that end here begin here
            live = _joined(live, _part(states, len(live[0]), count))
        elif count < len(live[0]):
            done.append(_part(live, count, len(live[0])))
            live = _part(live, 0, count)
        h, c = live
        product = _plus(factor(h) @ recurrent, b_hh)
        h, c = step(rows[t], product, (h, c), carried)
        if projection is not None:
            h = factor(h) @ projection
        live = carried(h), c
        outputs.append(live[0].to(compute))
    if reverse:
        outputs.reverse()
    for part in reversed(done):
        live = _joined(live, part)
    output = torch.stack(outputs) if batch_sizes is None else torch.cat(outputs)
    kept = torch.float32 if hidden_fp32 else compute
    h, c = live
    return output, h.to(kept), None if c is None else c.to(kept)


def _lstm(given: Tensor, product: Tensor, state: State, carried: Carried) -> State:
    assert state[1] is not None
    i, f, g, o = (given + product).chunk(4, 1)
    c = carried(f.sigmoid() * state[1] + i.sigmoid() * g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru(given: Tensor, product: Tensor, state: State, carried: Carried) -> State:
    r, z, n = given.chunk(3, 1)
    r_product, z_product, n_product = product.chunk(3, 1)
    n = (n + (r + r_product).sigmoid() * n_product).tanh()
    return n + (z + z_product).sigmoid() * (state[0] - n), None


def _rnn_tanh(given: Tensor, product: Tensor, state: State, carried: Carried) -> State:
    return (given + product).tanh(), None


def _rnn_relu(given: Tensor, product: Tensor, state: State, carried: Carried) -> State:
    return (given + product).relu(), None


_STEPS: Mapping[str, Callable[[Tensor, Tensor, State, Carried], State]] = MappingProxyType(
    {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}
)


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.float()


def _part(state: State, start: int, stop: int) -> State:
    h, c = state
    return h[start:stop], None if c is None else c[start:stop]


def _joined(first: State, second: State) -> State:
    (h, c), (more_h, more_c) = first, second
    return torch.cat((h, more_h)), None if c is None or more_c is None else torch.cat((c, more_c))
