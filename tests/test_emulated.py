"""Emulated ops in a context: bit for bit (round the inputs; the FP32 op; round the output), forward and backward."""

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
from mezzo.pytorch.memory import _StorageCounter

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")
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
    exact: bool = True  # nothing that backward keeps is lossy
    double_backward: bool = True

    def __str__(self) -> str:
        return f"{self.op}{'-' + self.note if self.note else ''}"

    def __call__(self, tensors: list[Tensor], spec: str = "") -> list[Tensor]:
        """The results, in a context or (with an empty spec) as PyTorch has them."""
        name, _, overload = self.op.partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        rule = ",op.bilinear=lower" if self.op == "bilinear" else ""
        with mezzo.autocast(f"{spec or 'fp32'}{rule}", "cpu"):
            result = op(*self.build(*tensors), **self.kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    def by_hand(self, tensors: list[Tensor], spec: str) -> list[Tensor]:
        """The contract, word for word, with casts that autograd sees: (round; the FP32 op; round)."""
        dtype = FORMATS[spec]
        return [t.to(dtype) for t in self([t.to(dtype).to(torch.float32) for t in tensors])]


def stack(*rest: Any, sizes: Tensor | None = None) -> Callable[..., tuple[Any, ...]]:
    """Recurrent layers: (input, state..., weights...) -> (input, hx, params, rest...)."""
    batches = () if sizes is None else (sizes,)
    return lambda x, h, c, *params: (x, *batches, [h, c], list(params), *rest)


def single(*rest: Any) -> Callable[..., tuple[Any, ...]]:
    return lambda x, h, *params: (x, h, list(params), *rest)


STATES = [(1, 2, 3)] * 2
LSTM = [(12, 5), (12, 3), (12,), (12,)]
GRU = [(9, 5), (9, 3), (9,), (9,)]
RNN = [(3, 5), (3, 3), (3,), (3,)]
CONV = ([1, 1], [1, 0], [1, 2], False, [0, 0], 1)
SIZES = torch.tensor([3, 2, 2])
REST = (True, 1, 0.0, True, False, False)
PACKED = (True, 1, 0.0, True, False)

ROWS = [
    Row("linear", [(4, 5), (3, 5), (3,)]),
    Row("linear", [(0, 5), (3, 5), (3,)], note="empty"),
    Row("bilinear", [(4, 5), (4, 3), (2, 5, 3), (2,)]),
    Row("matmul", [(2, 1, 4, 5), (3, 5, 3)]),
    Row("mm", [(7, 1), (1, 3)]),
    Row("addmm", [(3,), (4, 5), (5, 3)], {"beta": 0.5, "alpha": 2}),
    Row("addr", [(4, 5), (4,), (5,)]),
    Row("baddbmm", [(1, 4, 3), (2, 4, 5), (2, 5, 3)], {"beta": -1.5}),
    Row("linalg_multi_dot", [(4, 5), (5, 3), (3, 6)], build=lambda *t: (list(t),), exact=False),
    Row("linalg_vecdot", [(4, 5), (4, 5)], {"dim": 0}),
    Row("einsum", [(2, 4, 5), (2, 3, 5)], build=lambda *t: ("bij,bkj->bik", list(t))),
    Row("conv1d", [(2, 4, 9), (6, 2, 3), (6,)], {"groups": 2, "stride": [2]}),
    Row("conv2d", [(3, 7, 5), (4, 3, 3, 3), (4,)], {"padding": [1, 1]}, note="unbatched"),
    Row("conv2d.padding", [(2, 3, 7, 5), (4, 3, 3, 2), (4,)], {"padding": "same"}),
    Row("conv_tbc", [(7, 2, 4), (3, 4, 5), (5,)], {"pad": 1}),
    Row("conv_transpose2d.input", [(2, 4, 5, 3), (4, 3, 3, 3)], {"groups": 2}),
    Row("convolution", [(2, 3, 7, 5), (4, 3, 3, 3), (4,)], build=lambda *t: (*t, *CONV)),
    Row("prelu", [(2, 3, 4), (3,)]),
    Row("lstm.input", [(4, 2, 5), *STATES, *LSTM], {}, stack(*REST), exact=False, double_backward=False),
    Row("lstm.data", [(7, 5), *[(1, 3, 3)] * 2, *LSTM], {}, stack(*PACKED, sizes=SIZES), exact=False),
    Row("gru.input", [(4, 2, 5), (1, 2, 3), *GRU], {}, single(*REST), exact=False),
    Row("rnn_tanh.input", [(4, 2, 5), (1, 2, 3), *RNN], {}, single(*REST), exact=False),
    Row("lstm_cell", [(2, 5), (2, 3), (2, 3), *LSTM], {}, lambda x, h, c, *p: (x, [h, c], *p), exact=False),
    Row("gru_cell", [(2, 5), (2, 3), *GRU], exact=False),
    Row("rnn_relu_cell", [(2, 5), (2, 3), *RNN], exact=False),
]


def leaves_of(row: Row) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for shape in row.shapes]


def loss_of(outputs: list[Tensor]) -> Tensor:
    torch.manual_seed(1)
    return sum((t.float() * torch.randn(t.shape)).sum() for t in outputs) + 0.0 * outputs[0].sum()


@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_forward_is_round_compute_round_bit_for_bit(row: Row, spec: str) -> None:
    tensors = leaves_of(row)
    with torch.no_grad():
        quiet = row(tensors, spec)
    for mine, silent, truth in zip(row(tensors, spec), quiet, row.by_hand(tensors, spec)):
        assert (mine.dtype, mine.stride()) == (FORMATS[spec], truth.stride())
        assert torch.equal(mine, truth)
        eps = torch.finfo(mine.dtype).eps
        assert torch.allclose(silent.float(), truth.float(), rtol=2 * eps, atol=1e-6)
        assert not silent.requires_grad


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_stay_within_the_error_of_sixteen_bit_hardware(row: Row) -> None:
    tensors = leaves_of(row)

    def gradients(run: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        return list(torch.autograd.grad(loss_of(run(leaves)), leaves))

    truth = gradients(row)
    by_hand = gradients(lambda leaves: row.by_hand(leaves, "bf16"))
    mine = gradients(lambda leaves: row(leaves, "bf16"))
    for true, cast, ours in zip(truth, by_hand, mine):
        assert ours.dtype == torch.float32
        if row.exact:
            assert torch.equal(ours, cast)
        if ours.numel():
            error, allowed = (ours - true).abs().max(), (cast - true).abs().max()
            assert error <= 1.5 * allowed + 2 * torch.finfo(torch.bfloat16).eps * true.abs().max()
        assert torch.equal(ours, ours.bfloat16().float())  # hardware gives gradients in 16 bits


@pytest.mark.parametrize("row", [row for row in ROWS if row.double_backward and not row.note], ids=str)
def test_double_backward(row: Row) -> None:
    tensors = [(t.detach() * 0.3).requires_grad_() for t in leaves_of(row)]  # gates far from saturation

    def penalty(outputs: list[Tensor]) -> list[Tensor | None]:
        first = torch.autograd.grad(loss_of([t * t for t in outputs]), tensors, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), tensors, allow_unused=True))

    for ours, true in zip(penalty(row(tensors, "bf16")), penalty(row.by_hand(tensors, "bf16"))):
        assert (ours is None) == (true is None)
        if ours is not None:
            assert torch.isfinite(true).all()
            tolerance = (0.02 if row.exact else 0.05) * float(true.abs().max()) + 1e-6
            assert torch.allclose(ours, true, rtol=0, atol=tolerance)


def test_values_at_the_edges() -> None:
    tiny, huge = 2.0**-24, 65504.0
    x = torch.tensor([[tiny, tiny / 2, -0.0, 65519.0, 65520.0, math.inf, math.nan, 1 + 2.0**-11]]).t()
    # FP32 sums hold what 16-bit sums would lose or overflow on the way.
    with mezzo.autocast("fp16", "cpu"):
        got = (x @ torch.ones(1, 1)).flatten().tolist()
        assert (torch.tensor([[60000.0, 60000.0, -60000.0]]) @ torch.ones(3, 1)).item() == 60000.0
    with mezzo.autocast("bf16", "cpu"):
        assert (torch.ones(1, 4096) @ torch.ones(4096, 1)).item() == 4096.0  # a bf16 running sum stops at 256
    # A tie goes to even: half of the smallest subnormal to 0, 65520 to infinity, 1 + ulp/2 to 1.
    assert got[:2] == [tiny, 0.0]
    assert got[3:6] == [huge, math.inf, math.inf]
    assert math.isnan(got[6])
    assert got[7] == 1.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": torch.randn(2, 1, 5, 6).half().float()},
        {"enable_gqa": True},
        {"dropout_p": 0.5},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_attention(kwargs: dict[str, Any]) -> None:
    """Of numbers that fp16 holds."""
    heads = 1 if "enable_gqa" in kwargs else 2
    shapes = [(2, 2, 5, 8), (2, heads, 6, 8), (2, heads, 6, 8)]
    leaves = [torch.randn(shape).half().float().requires_grad_() for shape in shapes]
    outs = []
    for spec in ("fp16", "fp32"):
        torch.manual_seed(3)
        with mezzo.autocast(spec, "cpu"):
            outs.append(nn.functional.scaled_dot_product_attention(*leaves, **kwargs).half())
    assert torch.equal(*outs)
    for ours, true in zip(*(torch.autograd.grad(loss_of([out]), leaves) for out in outs)):
        assert torch.allclose(ours, true, rtol=0.01, atol=0.01)


def kept_bytes(run: Callable[[], Any], alive: list[Tensor]) -> int:
    """The bytes of the distinct storages that autograd saves, but for those given and the results'."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = run()
    known = {t.untyped_storage().data_ptr() for t in (*alive, *results)}
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in known)


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        (Row("linear", [(64, 32), (48, 32), (48,)]), 2),
        (Row("matmul", [(4, 1, 16, 8), (4, 8, 16)]), 0),
        (Row("conv2d", [(2, 4, 16, 16), (6, 4, 3, 3)]), 1),
        (Row("scaled_dot_product_attention", [(2, 2, 32, 16)] * 3, {"dropout_p": 0.1}), 0),
        (Row("gru.input", [(8, 16, 5), (1, 16, 3), *GRU], build=single(True, 1, 0.0, True, False, False)), 4),
    ],
    ids=str,
)
def test_backward_keeps_sixteen_bits(row: Row, weights: int, packing: None) -> None:
    leaves = leaves_of(row)
    count = len(leaves) - weights
    given = [*(t * 1.0 for t in leaves[:count]), *leaves[count:]]  # what layers pass on are no leaves
    low, wide = (kept_bytes(lambda spec=spec: row(given, spec), leaves[count:]) for spec in ("fp16", ""))
    assert low <= 0.6 * wide


def test_a_sixteen_bit_input_and_a_parameter_are_kept_as_they_are(packing: None) -> None:
    given = [torch.randn(8, 4).half().requires_grad_() * 1, nn.Parameter(torch.randn(3, 4))]
    assert kept_bytes(lambda: Row("linear", [])(given, "fp16"), given) == 0


@pytest.mark.parametrize(
    ("op", "shapes", "kept"),
    [
        # q, k, v and the output are handed over in 16 bits; the FP32 log-sum-exp of each row is not.
        ("scaled_dot_product_attention", [(2, 3, 16, 8)] * 3, 4 * 2 * 3 * 16),
        ("rnn_tanh_cell", [(4, 5), (4, 3), (3, 5), (3, 3), (3,), (3,)], 0),
    ],
)
def test_a_result_is_kept_as_the_caller_has_it(op: str, shapes: list[tuple[int, ...]], kept: int) -> None:
    leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    given = [leaf * 1 for leaf in leaves]
    row, found = Row(op, shapes), []
    assert kept_bytes(lambda: found.extend(row(given, "fp16")) or found, given) == kept
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(row(wide)[0].half().float().square().sum(), wide, allow_unused=True)
    for one, other in zip(torch.autograd.grad(found[0].float().square().sum(), leaves), truth, strict=True):
        assert torch.allclose(one.float(), other, rtol=2e-2, atol=2e-3 * float(other.abs().max()))


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
    # x in FP32 and, until the context ends, in fp16; the parameters; each layer's output in 16 bits.
    assert held() == 2 * activation + activation + weights + 4 * activation
