"""The head and its loss in one: as near to FP64 as the naive code, never with the whole logits; as a model's head."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.nn import LinearCrossEntropy, linear_cross_entropy
from mezzo.pytorch import linear_cross_entropy as module

ROWS, WIDTH, CLASSES = 90, 24, 41
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=["one chunk", "many"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sizes that cut even these small tensors: 13 rows a chunk, 11 classes a block of the weight's gradient."""
    if request.param == "many":
        cut(monkeypatch, rows=13, classes=11)
    return str(request.param)


def cut(monkeypatch: pytest.MonkeyPatch, rows: int, classes: int, width: int = WIDTH) -> None:
    monkeypatch.setattr(module, "BUFFER", 0)
    monkeypatch.setattr(module, "FEWEST", rows)
    monkeypatch.setattr(module, "_BLOCK", classes * width)


@dataclass(frozen=True)
class Row:
    """A call: its options, and which kind of target it has."""

    kwargs: dict[str, Any]
    bias: bool = False
    weighted: bool = False
    probabilities: bool = False
    ignored: int = 0

    def inputs(self, rows: int = ROWS) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Input, weight and bias in FP32 that bf16 and fp16 hold exactly; target; class weights."""
        torch.manual_seed(0)
        shapes = [(rows, WIDTH), (CLASSES, WIDTH), *([(CLASSES,)] if self.bias else [])]
        tensors = [torch.randn(shape).mul(16).round().div(16).clamp(-4, 4) for shape in shapes]
        target = torch.randint(CLASSES, (rows,))
        if self.ignored:
            target[torch.arange(0, rows, 3)] = self.kwargs.get("ignore_index", -100)
        if self.probabilities:
            target = torch.randn(rows, CLASSES).softmax(1)
        return tensors, target, torch.rand(CLASSES) + 0.1 if self.weighted else None


OPTIONS = [
    Row({}, bias=True),
    Row({"ignore_index": 7}, ignored=1, weighted=True, bias=True),
    Row({"label_smoothing": 0.1}),
    Row({"reduction": "sum", "label_smoothing": 1.0}, weighted=True, ignored=1),
    Row({"reduction": "none"}, ignored=1),
    Row({"reduction": "none", "label_smoothing": 0.2}, weighted=True, bias=True),
    Row({}, probabilities=True),
]


def leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def naive(tensors: list[Tensor], target: Tensor, weight: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    logits = F.linear(*tensors)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    target = target.to(wide.dtype) if target.is_floating_point() else target
    return F.cross_entropy(wide, target, None if weight is None else weight.to(wide.dtype), **kwargs)


def ours(tensors: list[Tensor], target: Tensor, weight: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    bias = tensors[2] if len(tensors) > 2 else None
    return linear_cross_entropy(tensors[0], tensors[1], target, bias, class_weight=weight, **kwargs)


def seed_of(loss: Tensor) -> Tensor:
    """What arrives in backward: one number, or another one for each row."""
    torch.manual_seed(1)
    if loss.dim():
        return torch.rand(loss.shape, dtype=torch.float64).mul(2.0).to(loss.dtype)
    return torch.full_like(loss, 2.0)


def derived(call: Any, tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    loss = call(tensors, *rest)
    return [loss.detach(), *torch.autograd.grad(loss, tensors, seed_of(loss))]


def bounds(row: Row, tensors: list[Tensor], target: Tensor, weight: Tensor | None) -> list[Tensor]:
    """The sums of absolute products behind each gradient: what one rounding of each moves it by, in units."""
    wide = [tensor.double() for tensor in tensors]
    logits = F.linear(*wide).requires_grad_()
    wide_target = target.double() if row.probabilities else target
    loss = F.cross_entropy(logits, wide_target, None if weight is None else weight.double(), **row.kwargs)
    slope = torch.autograd.grad(loss, logits, seed_of(loss).double())[0].abs()
    return [slope @ wide[1].abs(), slope.t() @ wide[0].abs(), slope.sum(0)]


@pytest.mark.parametrize("row", OPTIONS, ids=repr)
@pytest.mark.parametrize("native", ["native", "emulated"])
@pytest.mark.parametrize("fmt", HALVES)
def test_no_further_from_fp64_than_the_naive_code(
    fmt: str, native: str, row: Row, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", fmt if native == "native" else "")
    tensors, target, weight = row.inputs()
    rest = (target, weight, row.kwargs)
    truth = derived(naive, leaves(tensors, torch.float64), *rest)
    plain = derived(naive, leaves(tensors, HALVES[fmt]), *rest)
    found = derived(ours, leaves(tensors, HALVES[fmt]), *rest)
    unit = torch.finfo(HALVES[fmt]).eps / 2
    assert found[0].dtype is torch.float32
    assert {gradient.dtype for gradient in found[1:]} == {HALVES[fmt]}
    # Of the same gradient of the logits, ours rounds each chunk's product and their sum; theirs one whole product,
    # which may be lucky: three roundings between the two.
    rooms = [2.0**-22 * truth[0].abs(), *(3 * unit * bound for bound in bounds(row, tensors, target, weight))]
    for mine, theirs, exact, room in zip(found, plain, truth, rooms):
        off, their_off = (mine.double() - exact).abs(), (theirs.double() - exact).abs()
        assert bool((off <= their_off + room).all())
        assert float(off.norm()) <= 1.1 * float(their_off.norm()) + 2.0**-22 * float(exact.norm())


# Autocast context -> the format that operands are rounded to, and the bound of the gradients' error.
REGIONS = {
    "mezzo bf16": (lambda: mezzo.autocast("bf16", "cpu"), torch.bfloat16, 2e-2),
    "mezzo fp16": (lambda: mezzo.autocast("fp16", "cpu"), torch.float16, 1e-6),
    "torch bf16": (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16, 2e-2),
    "linear in fp32": (lambda: mezzo.autocast("bf16,op.linear=fp32", "cpu"), torch.float32, 1e-6),
    "none": (lambda: torch.autocast("cpu", enabled=False), torch.float32, 1e-6),
}


@pytest.mark.parametrize("name", REGIONS)
def test_autocast_decides_the_format_of_the_products(name: str, chunks: str) -> None:
    """Inputs that the format rounds: the loss is that of the rounded ones."""
    region, dtype, bound = REGIONS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(CLASSES, WIDTH)
    target = torch.randint(CLASSES, (ROWS,))
    mixed = [x.bfloat16() if dtype is torch.bfloat16 else x, weight]
    low = [tensor.detach().requires_grad_() for tensor in mixed]
    with region():
        loss = ours(low, target, None, {})
    rounded = [tensor.to(dtype).double().requires_grad_() for tensor in mixed]
    truth = naive(rounded, target, None, {})
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(truth.item(), rel=2e-4 if dtype is torch.bfloat16 else 2e-7)
    for tensor, found, exact in zip(low, torch.autograd.grad(loss, low), torch.autograd.grad(truth, rounded)):
        assert found.dtype is tensor.dtype
        assert float((found - exact).norm() / exact.norm()) < bound


class Watch(TorchDispatchMode):
    """Counts matrix products, and the elements of the largest tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.products += 1
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.largest = max(self.largest, item.numel())
        return out


@pytest.fixture
def of_64_rows(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """512 rows of 16 and 2,000 classes, in chunks of 64 rows and blocks of 100 classes."""
    cut(monkeypatch, rows=64, classes=100, width=16)
    torch.manual_seed(0)
    return torch.randn(512, 16), torch.randn(2000, 16), torch.randint(2000, (512,))


@pytest.mark.parametrize("kwargs", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("fmt", HALVES)
def test_the_largest_tensor_is_a_chunk(fmt: str, kwargs: Any, of_64_rows: tuple[Tensor, ...]) -> None:
    x, weight, target = of_64_rows
    leaf, table = x.requires_grad_(), weight.requires_grad_()
    with Watch() as watch:
        with mezzo.autocast(fmt, "cpu"):
            loss = linear_cross_entropy(leaf, table, target, **kwargs)
        loss.sum().backward()
    assert watch.largest == 64 * 2000


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_native_fp16_gradients_neither_vanish_nor_overflow(
    reduction: str, of_64_rows: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probability of 2^-11 over 512 rows is 1e-6, where fp16 has four bits; 512 rows of 64 are beyond 65504."""
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "fp16")
    x, weight, target = of_64_rows
    tensors = [(x.abs() * 64).half().float(), (weight / 2048).half().float()]
    target = torch.zeros_like(target)
    low, exact = leaves(tensors, torch.float32), leaves(tensors, torch.float64)
    with mezzo.autocast("fp16", "cpu"):
        loss = ours(low, target, None, {"reduction": reduction})
    truth = naive(exact, target, None, {"reduction": reduction})
    found, want = (torch.autograd.grad(value.sum(), side) for value, side in ((loss, low), (truth, exact)))
    for mine, expected in zip(found, want):
        assert float((mine - expected).norm() / expected.norm()) < 5e-4
        others = expected[1:]  # classes that are no row's target
        assert float((mine[1:] - others).norm() / others.norm()) < 1e-3


def test_backward_may_run_again_over_a_kept_graph(chunks: str) -> None:
    row = Row({}, bias=True, ignored=1)
    tensors, target, weight = row.inputs(rows=30)
    low = leaves(tensors, torch.bfloat16)
    loss = ours(low, target, weight, {})
    first = torch.autograd.grad(loss, low, torch.tensor(2.0), retain_graph=True)
    again = torch.autograd.grad(loss, low, torch.tensor(2.0), retain_graph=True)
    last = torch.autograd.grad(loss, low, torch.tensor(2.0))
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, again, last))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_inputs_of_any_rank_and_no_rows() -> None:
    torch.manual_seed(0)
    w = torch.randn(CLASSES, WIDTH)
    for shape in [(WIDTH,), (7, WIDTH), (3, 7, WIDTH), (2, 3, 5, WIDTH), (4, 0, WIDTH)]:
        x = torch.randn(shape).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        target = torch.randint(CLASSES, shape[:-1]).to(torch.int32)
        rows = linear_cross_entropy(x, w, target, reduction="none")
        assert rows.shape == shape[:-1]
        own = F.cross_entropy(F.linear(x, w).reshape(-1, CLASSES), target.flatten().long(), reduction="none")
        torch.testing.assert_close(rows.flatten(), own)
        (gradient,) = torch.autograd.grad(linear_cross_entropy(x, w, target, reduction="sum"), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(own.sum(), x)[0])
    empty = torch.empty(0, WIDTH)
    table = w.requires_grad_()
    loss = linear_cross_entropy(empty, table, torch.empty(0, dtype=torch.int64))
    assert bool(loss.isnan())
    loss.backward()
    assert not table.grad.any()


def test_nothing_to_learn_from_and_what_is_not_finite(chunks: str) -> None:
    tensors, target, _ = Row({}).inputs()
    for dtype in (torch.bfloat16, torch.float64):
        low = leaves(tensors, dtype)
        loss = ours(low, torch.full_like(target, -100), None, {})
        loss.backward()
        assert bool(loss.isnan())
        assert [bool(tensor.grad.any()) for tensor in low] == [False, False]  # type: ignore[union-attr]
    tensors[0][4] = float("nan")
    rows = ours(leaves(tensors, torch.bfloat16), target, None, {"reduction": "none"})
    assert rows.isnan().nonzero().flatten().tolist() == [4]
    low, plain = leaves(tensors, torch.bfloat16), leaves(tensors, torch.bfloat16)
    ours(low, target, None, {}).backward()
    naive(plain, target, None, {}).backward()
    mine, theirs = ({*x[0].grad.isnan().any(1).nonzero().flatten().tolist()} for x in (low, plain))  # type: ignore[union-attr]
    assert {4} <= mine <= theirs  # on some CPUs, oneDNN's bf16 products spread a NaN to the row before


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": ({"weight": torch.ones(5, 3)}, UsageError, r"\[2, 4\].*\[5, 3\]"),
    "class weights": ({"class_weight": torch.ones(4)}, UsageError, r"class_weight \[4\]"),
    "target's shape": ({"target": torch.tensor([1])}, UsageError, r"target \[1\]"),
    "reduction": ({"reduction": "avg"}, UnknownNameError, "'avg'.*mean, none"),
    "smoothing": ({"label_smoothing": 1.5}, UsageError, "label_smoothing is 1.5"),
    "formats": ({"weight": torch.ones(5, 4).bfloat16()}, UsageError, "fp32, bf16"),
    "no such class": ({"target": torch.tensor([0, 5])}, IndexError, "5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_raises(name: str) -> None:
    kwargs, error, message = WRONG[name]
    right = {"input": torch.ones(2, 4), "weight": torch.ones(5, 4), "target": torch.tensor([0, 4])}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**right, **kwargs})
    if error is IndexError:
        wide = {key: value.double() for key, value in right.items() if key != "target"}
        with pytest.raises(error, match=message):
            linear_cross_entropy(**{**wide, **kwargs})


TOKENS = torch.arange(40).view(4, 10) * 7 % CLASSES


class Language(nn.Module):
    """Tokens and the next ones -> the loss; the head's weight is the embedding's."""

    def __init__(self, fused: bool, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(CLASSES, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = LinearCrossEntropy(WIDTH, CLASSES) if fused else nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        hidden = self.mix(self.token(tokens)).tanh()
        if isinstance(self.head, LinearCrossEntropy):
            return self.head(hidden, following)
        return F.cross_entropy(self.head(hidden).float().flatten(0, -2), following.flatten())


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [((TOKENS + step) % CLASSES, (TOKENS + step + 3) % CLASSES) for step in range(steps)]


def trained(model: Language, precision: str, **kwargs: Any) -> list[float]:
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.02), precision, **kwargs)
    losses = []
    for batch in batches(12):
        with mp.autocast():
            loss = model(*batch)
        losses.append(float(mp.step(loss).loss))
    return losses


TRAININGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "split, accumulate": {"precision": "bf16", "masters": "split", "accumulate": 2},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TRAININGS)
def test_trains_as_the_layer_and_the_loss_do(name: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, rows=7, classes=5)
    fused, plain = (trained(Language(kind, tied), **TRAININGS[name]) for kind in (True, False))
    assert fused[-1] < fused[0] - 0.3
    assert fused == pytest.approx(plain, rel=1e-5 if name == "fp32" else 1e-2)


def test_a_linear_layer_to_everyone_else() -> None:
    weights = torch.rand(CLASSES)
    torch.manual_seed(3)
    head = LinearCrossEntropy(WIDTH, CLASSES, bias=True, weight=weights, label_smoothing=0.1)
    torch.manual_seed(3)
    linear = nn.Linear(WIDTH, CLASSES)
    assert isinstance(head, nn.Linear)
    assert list(head.state_dict()) == ["weight", "bias"]
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    head.load_state_dict(nn.Linear(WIDTH, CLASSES).state_dict())
    hidden, target = torch.randn(3, 5, WIDTH), torch.randint(CLASSES, (3, 5))
    assert torch.equal(head.logits(hidden), F.linear(hidden, head.weight, head.bias))
    loss = nn.CrossEntropyLoss(head.class_weight, label_smoothing=0.1)
    expected = loss(head.logits(hidden).flatten(0, 1), target.flatten())
    for copied in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.eval()):
        torch.testing.assert_close(copied(hidden, target), expected)
    with pytest.raises(UsageError, match=r"head.logits\(hidden\)"):
        head(hidden)
    with pytest.raises(UsageError, match=r"\[41\]"):
        LinearCrossEntropy(WIDTH, CLASSES, weight=torch.rand(3))
    for sizes, message in (
        (("a", 3), "in_features is 'a'.* integer of at least 1"),
        ((3, 2.5), "num_classes is 2.5"),
        ((3, -2), "num_classes is -2"),
    ):
        with pytest.raises(UsageError, match=message):
            LinearCrossEntropy(*sizes)
