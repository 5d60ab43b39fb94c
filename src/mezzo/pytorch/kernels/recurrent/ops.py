"""Whole recurrent ops over one layer's kernel: layers, directions, dropout between layers, packed sequences.

An aten op is a stack: each layer's output is the next one's input, the two directions of a layer stand side by side in
its output, and every layer and direction has its own row of the states. So the stack is PyTorch operations, which
autograd differentiates, around `layer.layer`, and dropout is PyTorch's own op on the tensor that PyTorch gives it.

What that kernel can't take (a graph in the making, another device, arguments that don't fit together) goes to
PyTorch's op as a whole, in FP32 between casts (`whole`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.pytorch.kernels.emulated.call import Emulated
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.recurrent.layer import Weights, layer
from mezzo.pytorch.kernels.recurrent.reference import GATES

FORMATS = (torch.float32, torch.bfloat16, torch.float16)


class _Call(NamedTuple):
    """The arguments of either overload: what `input` alone or `data` alone has is None or False in the other's."""

    input: Tensor
    batch_sizes: Tensor | None
    hx: Any  # an LSTM's is [h_0, c_0]
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def states(self) -> tuple[Tensor, ...]:
        return (self.hx,) if isinstance(self.hx, Tensor) else tuple(self.hx)


def call(
    kind: str, args: Sequence[Any], named: Mapping[str, Any], compute: torch.dtype, hidden_fp32: bool
) -> Any:
    """Run one op of either overload; `mezzo.pytorch.kernels.recurrent` says what it gives."""
    overload, given = _bound(kind, args, named)
    tensors = (given.input, *given.states, *given.params)
    if not all_in(FORMATS, tensors):
        return overload(*args, **named)
    ours = takes(tensors)
    if ours and _fits(kind, given):
        return _stack(kind, given, compute, hidden_fp32)
    place = 1 if given.batch_sizes is None else 2
    plain = [value for value in given if value is not None]
    if given.batch_sizes is not None:
        plain.pop()  # batch_first
    with _without_onednn() if ours else contextlib.nullcontext():
        return whole(overload, plain, place, 1, compute, hidden_fp32)


def all_in(formats: Sequence[torch.dtype], tensors: Sequence[Tensor | None]) -> bool:
    """Whether every tensor is of one of the formats: FP64, complex and integers are PyTorch's own affair."""
    return all(tensor is None or tensor.dtype in formats for tensor in tensors)


def takes(tensors: Sequence[Tensor | None]) -> bool:
    """Whether Mezzo's kernel takes these tensors: all on a CPU, and not where a compiler records a graph.

    To a compiler a step of a loop is a dozen nodes, and PyTorch's own op one. `torch.func` and subclasses of tensors
    are served by the kernel's reference, which is made of operations that they know.
    """
    if not all(tensor is None or tensor.device.type == "cpu" for tensor in tensors):
        return False
    if is_plain(*tensors):
        return True
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return not torch.compiler.is_compiling() and (in_transform or not _is_recorded(tensors))


def _is_recorded(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a tensor has no values, as in a trace, an export or on the device ``meta``."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in tensors)


def whole(
    op: Callable[..., Any],
    args: Sequence[Any],
    place: int,
    outputs: int,
    compute: torch.dtype,
    hidden_fp32: bool,
) -> Any:
    """PyTorch's op in FP32 on rounded factors, with the states at both ends as the policy carries them.

    On a GPU this is cuDNN in FP32, whose states are FP32 within a call whatever `hidden_fp32` says; it decides only
    what comes in and goes out.

    Args:
        op: an overload that takes `args` by position.
        args: its arguments; tensors of any floating dtype.
        place: where among them the states are.
        outputs: how many of the op's results come before the final states.
        compute: the format of products' factors and of the output.
        hidden_fp32: whether states come in and go out in FP32; else in `compute`.
    """
    if not hidden_fp32:
        with _uncompacted():
            return Emulated(op)(*args, compute=compute)
    hx = args[place]
    wide_hx = hx.float() if isinstance(hx, Tensor) else [state.float() for state in hx]
    states: list[Tensor] = []

    def without_states(*rest: Any) -> tuple[Tensor, ...]:
        found = op(*rest[:place], wide_hx, *rest[place:])
        found = (found,) if isinstance(found, Tensor) else tuple(found)
        states.extend(found[outputs:])
        return found[:outputs]

    with _uncompacted():
        out = Emulated(without_states)(*args[:place], *args[place + 1 :], compute=compute)
    found = (*out, *states)
    return found if len(found) > 1 else found[0]


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Of shapes that don't fit oneDNN's LSTM says nothing, and reads past the end of what it got."""
    before = torch._C._get_mkldnn_enabled()  # type: ignore[attr-defined,unused-ignore]
    torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined,unused-ignore]
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)  # type: ignore[attr-defined,unused-ignore]


class _uncompacted(warnings.catch_warnings):  # noqa: N801
    """Without cuDNN's advice to compact the weights: these are rounded copies, new at every call."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")


def _bound(kind: str, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Callable[..., Any], _Call]:
    """The overload that these arguments are for, and the arguments."""
    packet = getattr(torch.ops.aten, kind)
    is_packed = (
        "batch_sizes" in named
        or (len(args) > 3 and not isinstance(args[3], (bool, int)))
        or (len(args) == 3 and "params" in named)
    )
    if is_packed:
        return packet.data, _packed(*args, **named)
    return packet.input, _padded(*args, **named)


def _padded(
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> _Call:
    return _Call(input, None, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _packed(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> _Call:
    return _Call(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional, False)


def _fits(kind: str, given: _Call) -> bool:
    """Whether all shapes go together; where they don't, PyTorch's op says what is wrong."""
    x, sizes = given.input, given.batch_sizes
    states = given.states
    if x.dim() != (3 if sizes is None else 2) or not x.numel() or len(states) != (kind == "lstm") + 1:
        return False
    if sizes is None:
        batch = x.shape[0 if given.batch_first else 1]
    else:
        if sizes.dim() != 1 or not len(sizes) or sizes.dtype != torch.int64 or sizes.device.type != "cpu":
            return False
        counts = sizes.tolist()
        if counts[-1] < 1 or sum(counts) != len(x) or counts != sorted(counts, reverse=True):
            return False
        batch = counts[0]
    rows = given.num_layers * (1 + given.bidirectional)
    if any(state.dim() != 3 or state.shape[:2] != (rows, batch) for state in states):
        return False
    seen, width = states[0].shape[2], states[-1].shape[2]  # narrower than the cell state: a projection
    projected = seen != width
    each = 2 + 2 * given.has_biases + projected
    if not width or not seen or len(given.params) != rows * each:
        return False
    gates = GATES[kind] * width
    expected: list[tuple[int, ...]] = []
    for row in range(rows):
        below = x.shape[-1] if row < 1 + given.bidirectional else seen * (1 + given.bidirectional)
        biases = [(gates,), (gates,)] if given.has_biases else []
        expected += [(gates, below), (gates, seen), *biases, *([(seen, width)] if projected else [])]
    return all(tensor.shape == shape for tensor, shape in zip(given.params, expected))


def _stack(kind: str, given: _Call, compute: torch.dtype, hidden_fp32: bool) -> tuple[Tensor, ...]:
    states = [state.unbind(0) for state in given.states]
    projected = given.states[0].shape[2] != given.states[-1].shape[2]
    weights = _by_row(given.params, given.has_biases, projected)
    directions = 1 + given.bidirectional

    x = given.input.transpose(0, 1) if given.batch_first else given.input
    if given.bidirectional:
        x = x.to(compute)  # once for both
    ends: list[list[Tensor]] = [[] for _ in states]
    for level in range(given.num_layers):
        outputs = []
        for direction in range(directions):
            row = level * directions + direction
            output, *final = layer(
                kind,
                x,
                states[0][row],
                states[1][row] if kind == "lstm" else None,
                weights[row],
                compute=compute,
                hidden_fp32=hidden_fp32,
                reverse=direction == 1,
                batch_sizes=given.batch_sizes,
            )
            outputs.append(output)
            for end, state in zip(ends, final):
                if state is not None:
                    end.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if given.dropout and given.train and level < given.num_layers - 1:
            x = torch.dropout(x, given.dropout, True)
    if given.batch_first:
        x = x.transpose(0, 1)
    return (x, *(torch.stack(end) for end in ends))


def _by_row(params: Sequence[Tensor], has_biases: bool, projected: bool) -> list[Weights]:
    """The parameters of each layer and direction: w_ih, w_hh, then biases and projection where there are any."""
    found = []
    each = 2 + 2 * has_biases + projected
    for start in range(0, len(params), each):
        row = list(params[start : start + each])
        w_hr = row.pop() if projected else None
        b_ih, b_hh = row[2:] if has_biases else (None, None)
        found.append((row[0], row[1], b_ih, b_hh, w_hr))
    return found
