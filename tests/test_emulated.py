"""Emulated ops: bit for bit (round the inputs; the FP32 op; round the output), forward and backward."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.rules import RULES, Rule
from mezzo.pytorch.kernels.emulated import EMULATED
from mezzo.pytorch.memory import _StorageCounter

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No input is so small that its FP32 copy is kept."""
    monkeypatch.setattr("mezzo.pytorch.kernels.emulated.SMALL", -1)


@dataclass(frozen=True)
class Row:
    """An op, the shapes of its tensors, how they become its arguments, and its other arguments."""

    op: str
    shapes: list[tuple[int, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    build: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors
    note: str = ""
    double_backward: bool = True

    def __str__(self) -> str:
        return f"{self.op}{'-' + self.note if self.note else ''}"


def _stack(*rest: Any) -> Callable[..., tuple[Any, ...]]:
    """Recurrent layers: (input, state..., weights...) -> (input, hx, params, rest...)."""
    return lambda x, h, c, *params: (x, [h, c], list(params), *rest)


def _single(*rest: Any) -> Callable[..., tuple[Any, ...]]:
    return lambda x, h, *params: (x, h, list(params), *rest)


LSTM = [(12, 5), (12, 3), (12,), (12,)]
GRU = [(9, 5), (9, 3), (9,), (9,)]
RNN = [(3, 5), (3, 3), (3,), (3,)]
CONV = ([1, 1], [1, 0], [1, 2], False, [0, 0], 1)
SIZES = torch.tensor([3, 2, 2])

RNN_REST = (True, 1, 0.0, True, False, False)
PACKED_REST = (True, 1, 0.0, True, False)

ROWS = [
    Row("linear", [(4, 5), (3, 5), (3,)]),
    Row("linear", [(0, 5), (3, 5), (3,)], note="empty"),
    Row("bilinear", [(4, 5), (4, 3), (2, 5, 3), (2,)]),
    Row("matmul", [(2, 1, 4, 5), (3, 5, 3)]),
    Row("linalg_matmul", [(4, 5), (5, 3)]),
    Row("mm", [(7, 1), (1, 3)]),
    Row("bmm", [(2, 7, 5), (2, 5, 3)]),
    Row("mv", [(4, 5), (5,)]),
    Row("addmm", [(3,), (4, 5), (5, 3)], {"beta": 0.5, "alpha": 2}),
    Row("addmv", [(4,), (4, 5), (5,)]),
    Row("addr", [(4, 5), (4,), (5,)]),
    Row("addbmm", [(4, 3), (2, 4, 5), (2, 5, 3)]),
    Row("baddbmm", [(1, 4, 3), (2, 4, 5), (2, 5, 3)], {"beta": -1.5}),
    Row("chain_matmul", [(4, 5), (5, 3), (3, 6)], build=lambda *t: (list(t),)),
    Row("linalg_multi_dot", [(4, 5), (5, 3), (3, 6)], build=lambda *t: (list(t),)),
    Row("linalg_vecdot", [(4, 5), (4, 5)], {"dim": 0}),
    Row("einsum", [(2, 4, 5), (2, 3, 5)], build=lambda *t: ("bij,bkj->bik", list(t))),
    Row("conv1d", [(2, 4, 9), (6, 2, 3), (6,)], {"groups": 2, "stride": [2]}),
    Row("conv2d", [(3, 7, 5), (4, 3, 3, 3), (4,)], {"padding": [1, 1]}, note="unbatched"),
    Row("conv2d.padding", [(2, 3, 7, 5), (4, 3, 3, 2), (4,)], {"padding": "same"}),
    Row("conv3d", [(1, 2, 4, 5, 3), (3, 2, 2, 2, 2), (3,)], {"dilation": [1, 2, 1]}),
    Row("conv_tbc", [(7, 2, 4), (3, 4, 5), (5,)], {"pad": 1}),
    Row("conv_transpose1d", [(2, 4, 5), (4, 3, 3), (3,)], {"stride": [2], "output_padding": [1]}),
    Row("conv_transpose2d", [(2, 4, 5, 3), (4, 3, 3, 3)], {"groups": 2}),
    Row("conv_transpose3d.input", [(1, 2, 3, 3, 2), (2, 3, 2, 2, 2)], {"padding": [1, 1, 1]}),
    Row("convolution", [(2, 3, 7, 5), (4, 3, 3, 3), (4,)], build=lambda *t: (*t, *CONV)),
    Row(
        "_convolution",
        [(2, 3, 7, 5), (4, 3, 3, 3), (4,)],
        build=lambda *t: (*t, *CONV, *[False] * 2, *[True] * 2),
    ),
    Row("prelu", [(2, 3, 4), (3,)]),
    Row("lstm.input", [(4, 2, 5), *[(1, 2, 3)] * 2, *LSTM], build=_stack(*RNN_REST), double_backward=False),
    Row(
        "lstm.data",
        [(7, 5), *[(1, 3, 3)] * 2, *LSTM],
        build=lambda x, h, c, *p: (x, SIZES, [h, c], list(p), *PACKED_REST),
    ),
    Row("gru.input", [(4, 2, 5), (1, 2, 3), *GRU], build=_single(*RNN_REST)),
    Row("gru.data", [(7, 5), (1, 3, 3), *GRU], build=lambda x, h, *p: (x, SIZES, h, list(p), *PACKED_REST)),
    Row("rnn_tanh.input", [(4, 2, 5), (1, 2, 3), *RNN], build=_single(*RNN_REST)),
    Row("rnn_relu.input", [(4, 2, 5), (1, 2, 3), *RNN], build=_single(*RNN_REST)),
    Row("lstm_cell", [(2, 5), (2, 3), (2, 3), *LSTM], build=lambda x, h, c, *p: (x, [h, c], *p)),
    Row("gru_cell", [(2, 5), (2, 3), *GRU]),
    Row("rnn_tanh_cell", [(2, 5), (2, 3), *RNN]),
    Row("rnn_relu_cell", [(2, 5), (2, 3), *RNN]),
]


def _inputs(row: Row, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in row.shapes]


def _naive(row: Row, tensors: list[Tensor], compute: torch.dtype) -> list[Tensor]:
    """The contract, word for word, with casts that autograd sees: (round; the FP32 op; round)."""
    wide = [t.to(compute).to(torch.float32) for t in tensors]
    return _floats(EMULATED[row.op].op(*row.build(*wide), **row.kwargs), compute)


def _floats(result: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else list(result)
    return [t.to(dtype) if dtype else t for t in found]


def _loss(outputs: list[Tensor]) -> Tensor:
    torch.manual_seed(1)
    return sum((t.float() * torch.randn(t.shape)).sum() for t in outputs) + 0.0 * outputs[0].sum()


class _Bytes:
    """Counts the distinct storages that reach the saved-tensor hooks, but for those given."""

    def __init__(self, alive: list[Tensor]) -> None:
        self._alive = {t.untyped_storage().data_ptr() for t in alive}
        self._kept: dict[int, Tensor] = {}

    def pack(self, saved: Tensor) -> Tensor:
        pointer = saved.untyped_storage().data_ptr()
        if pointer not in self._alive:
            self._kept[pointer] = saved
        return saved

    @property
    def total(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._kept.values())

    def during(self, run: Callable[[], Any]) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t):
            self.result = run()
        return self.total


@pytest.mark.parametrize("compute", HALVES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_forward_is_round_compute_round_bit_for_bit(row: Row, compute: torch.dtype) -> None:
    tensors = _inputs(row)
    got = _floats(EMULATED[row.op](*row.build(*tensors), compute=compute, **row.kwargs))
    with torch.no_grad():
        quiet = _floats(EMULATED[row.op](*row.build(*tensors), compute=compute, **row.kwargs))
    for mine, silent, truth in zip(got, quiet, _naive(row, tensors, compute)):
        assert mine.dtype == compute
        assert mine.stride() == truth.stride()
        assert torch.equal(mine, truth)
        assert torch.allclose(silent.float(), truth.float(), rtol=2 * torch.finfo(compute).eps, atol=1e-6)
        assert not silent.requires_grad


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_stay_within_the_error_of_sixteen_bit_hardware(row: Row) -> None:
    compute = torch.bfloat16
    tensors = _inputs(row)

    def gradients(run: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        return list(torch.autograd.grad(_loss(run(leaves)), leaves))

    truth = gradients(lambda leaves: _floats(EMULATED[row.op].op(*row.build(*leaves), **row.kwargs)))
    naive = gradients(lambda leaves: _naive(row, leaves, compute))
    mine = gradients(
        lambda leaves: _floats(EMULATED[row.op](*row.build(*leaves), compute=compute, **row.kwargs))
    )
    for true, cast, ours in zip(truth, naive, mine):
        assert ours.dtype == torch.float32
        if EMULATED[row.op].keep_rank is None or row.op in ("matmul", "linalg_matmul", "einsum"):
            assert torch.equal(ours, cast)  # nothing that it keeps is lossy
        if ours.numel():
            error, allowed = (ours - true).abs().max(), (cast - true).abs().max()
            assert error <= 1.5 * allowed + 2 * torch.finfo(compute).eps * true.abs().max()
        assert torch.equal(ours, ours.to(compute).float())  # hardware gives gradients in 16 bits


def test_values_at_the_edges() -> None:
    tiny, huge = 2.0**-24, 65504.0
    x = torch.tensor([[tiny, tiny / 2, -0.0, 65519.0, 65520.0, math.inf, math.nan, 1 + 2.0**-11]]).t()
    one = torch.ones(1, 1)
    got = EMULATED["mm"](x, one, compute=torch.float16).flatten().tolist()
    # A tie goes to even: half of the smallest subnormal to 0, 65520 to infinity, 1 + ulp/2 to 1.
    assert got[:2] == [tiny, 0.0]
    assert got[3:6] == [huge, math.inf, math.inf]
    assert math.isnan(got[6])
    assert got[7] == 1.0
    # FP32 sums hold what 16-bit sums would lose or overflow on the way.
    wide = EMULATED["mm"](
        torch.tensor([[60000.0, 60000.0, -60000.0]]), torch.ones(3, 1), compute=torch.float16
    )
    assert wide.item() == 60000.0
    long = EMULATED["mm"](torch.ones(1, 4096), torch.ones(4096, 1), compute=torch.bfloat16)
    assert long.item() == 4096.0  # a bf16 running sum stops at 256


@pytest.mark.parametrize(
    ("kwargs", "note"),
    [
        ({"is_causal": True, "scale": 0.3}, "causal"),
        ({"attn_mask": torch.randn(2, 1, 5, 6)}, "float mask"),
        ({"enable_gqa": True}, "grouped queries"),
        ({"dropout_p": 0.5}, "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention(kwargs: dict[str, Any], note: str) -> None:
    heads = 1 if "enable_gqa" in kwargs else 2
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, heads, 6, 8), torch.randn(2, heads, 6, 8)
    op = EMULATED["scaled_dot_product_attention"]
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def rounded(value: Any) -> Any:
        return value.half().float() if isinstance(value, Tensor) and value.is_floating_point() else value

    torch.manual_seed(3)
    mine = op(q, k, v, compute=torch.float16, **kwargs)
    torch.manual_seed(3)
    truth = op.op(*map(rounded, leaves), **{name: rounded(value) for name, value in kwargs.items()}).half()
    assert torch.equal(mine, truth)
    for ours, true in zip(
        torch.autograd.grad(_loss([mine]), leaves), torch.autograd.grad(_loss([truth]), leaves)
    ):
        assert torch.allclose(ours, true, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("row", [row for row in ROWS if row.double_backward], ids=str)
def test_double_backward(row: Row) -> None:
    tensors = [(t.detach() * 0.3).requires_grad_() for t in _inputs(row)]  # gates far from saturation
    if not all(t.numel() for t in tensors):
        return

    def penalty(outputs: list[Tensor]) -> list[Tensor | None]:
        first = torch.autograd.grad(_loss([t * t for t in outputs]), tensors, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), tensors, allow_unused=True))

    compute = torch.bfloat16
    mine = penalty(_floats(EMULATED[row.op](*row.build(*tensors), compute=compute, **row.kwargs)))
    tolerance = 0.02 if EMULATED[row.op].keep_rank is None else 0.05
    for ours, true in zip(mine, penalty(_naive(row, tensors, compute))):
        assert (ours is None) == (true is None)
        if ours is not None and true is not None:
            assert torch.isfinite(true).all()
            assert torch.allclose(ours, true, rtol=0, atol=tolerance * float(true.abs().max()) + 1e-6)


MEMORY = [
    Row("linear", [(64, 32), (48, 32), (48,)]),
    Row("matmul", [(4, 1, 16, 8), (4, 8, 16)]),
    Row("bmm", [(4, 16, 8), (4, 8, 16)]),
    Row("conv1d", [(2, 4, 64), (6, 4, 3)]),
    Row("conv2d", [(2, 4, 16, 16), (6, 4, 3, 3)]),
    Row("scaled_dot_product_attention", [(2, 2, 32, 16)] * 3),
    Row("scaled_dot_product_attention", [(2, 2, 32, 16)] * 3, {"dropout_p": 0.1}, note="dropout"),
    Row("gru.input", [(8, 16, 5), (1, 16, 3), *GRU], build=_single(True, 1, 0.0, True, False, False)),
]


@pytest.mark.parametrize("row", MEMORY, ids=str)
def test_backward_keeps_sixteen_bits(row: Row, packing: None) -> None:
    leaves = _inputs(row)
    weights = leaves[1:] if row.op not in ("matmul", "bmm", "scaled_dot_product_attention") else []
    inputs = [t for t in leaves if all(t is not w for w in weights)]
    active = [t * 1.0 for t in inputs]  # what layers pass on are no leaves

    def run(emulated: bool) -> int:
        op = EMULATED[row.op]
        args = row.build(*active, *weights)
        if emulated:
            return _Bytes(weights).during(lambda: op(*args, compute=torch.float16, **row.kwargs))
        return _Bytes(weights).during(lambda: op.op(*args, **row.kwargs))

    assert run(True) <= 0.6 * run(False)


def test_a_sixteen_bit_input_and_a_parameter_are_kept_as_they_are(packing: None) -> None:
    x = torch.randn(8, 4).half().requires_grad_()
    active = x * 1
    weight = torch.nn.Parameter(torch.randn(3, 4))
    kept = _Bytes([active, weight])
    assert kept.during(lambda: EMULATED["linear"](active, weight, compute=torch.float16)) == 0


@pytest.mark.parametrize(
    ("op", "arguments", "kept"),
    [
        # q, k, v and the output are handed over in 16 bits; the FP32 log-sum-exp of each row is not.
        ("scaled_dot_product_attention", [(2, 3, 16, 8)] * 3, 4 * 2 * 3 * 16),
        ("rnn_tanh_cell", [(4, 5), (4, 3), (3, 5), (3, 3), (3,), (3,)], 0),
    ],
)
def test_a_result_is_kept_as_the_caller_has_it(op: str, arguments: list[tuple[int, ...]], kept: int) -> None:
    given = [torch.randn(shape).half().requires_grad_() for shape in arguments]
    active = [tensor * 1 for tensor in given]
    made: list[Tensor] = []
    storages: set[int] = set()

    class Saved:
        def pack(self, tensor: Tensor) -> Tensor:
            made.append(tensor)
            storages.add(tensor.untyped_storage().data_ptr())
            return tensor

    with torch.autograd.graph.saved_tensors_hooks(Saved().pack, lambda tensor: tensor):
        out = EMULATED[op](*active, compute=torch.float16)
    assert out.untyped_storage().data_ptr() in storages
    known = {tensor.untyped_storage().data_ptr() for tensor in (out, *active)}
    new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made}
    assert sum(size for place, size in new.items() if place not in known) == kept
    wide = [tensor.detach().float().requires_grad_() for tensor in given]
    expected = torch.autograd.grad(
        EMULATED[op].op(*wide).half().float().square().sum(), wide, allow_unused=True
    )
    found = torch.autograd.grad(out.float().square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.float(), other, rtol=2e-2, atol=2e-3 * float(other.abs().max()))


def test_a_saved_result_changed_in_place_is_refused() -> None:
    """As PyTorch refuses it of the native op, which saved the same tensor."""
    q = (torch.randn(2, 3, 16, 8).half().requires_grad_()) * 1
    out = EMULATED["scaled_dot_product_attention"](q, q, q, compute=torch.float16)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_channels_last_stays() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    out = EMULATED["conv2d"](x, weight, compute=torch.bfloat16)
    assert out.is_contiguous(memory_format=torch.channels_last)
    naive = _naive(Row("conv2d", []), [x, weight], torch.bfloat16)[0]
    for mine, truth in zip(
        torch.autograd.grad(out.float().square().sum(), (x, weight)),
        torch.autograd.grad(naive.float().square().sum(), (x, weight)),
    ):
        assert torch.equal(mine, truth)


def test_a_failure_leaves_the_next_call_emulated() -> None:
    with pytest.raises(RuntimeError):
        EMULATED["mm"](torch.ones(2, 3), torch.ones(2, 3), compute=torch.float16)
    assert EMULATED["mm"](torch.ones(1, 1), torch.ones(1, 1), compute=torch.float16).dtype == torch.float16


# Kernels of a GPU with FP32 arithmetic or statistics among their results; the ops that call them are emulated whole.
NATIVE_ONLY = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "_cudnn_rnn",
    "_mps_convolution",
}


def test_every_lower_op_of_the_table_has_a_path() -> None:
    lower = {op for op, row in RULES.items() if row.rule is Rule.LOWER}
    assert lower <= EMULATED.keys() | NATIVE_ONLY
    assert not EMULATED.keys() & NATIVE_ONLY


def test_the_fp32_copies_are_gone_when_the_op_is_done() -> None:
    """Not when the collector comes by: a training step's peak is reached long before that."""
    layers = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4)))
    x = torch.randn(4, 8, 32, 32)
    activation, weights = x.numel() * 2, sum(p.numel() * 4 for p in layers.parameters())

    def held() -> int:
        counter = _StorageCounter()
        gc.collect()
        gc.disable()
        try:
            with counter, mezzo.autocast("fp16", "cpu"):
                counter._counting = True
                out = layers(x)
            assert out.dtype is torch.float16
            return counter._bytes
        finally:
            gc.enable()
            counter.stop()

    held()  # the first call under a mode imports what it needs, and a frame of that import keeps an op's tensors
    # x in FP32 and, until the region ends, in fp16; the parameters; each layer's output in 16 bits.
    assert held() == 2 * activation + activation + weights + 4 * activation
