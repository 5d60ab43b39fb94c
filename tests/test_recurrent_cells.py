"""Recurrent cells: PyTorch's numbers, gradients that are multiplied once a chain, and no stale weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.pytorch.kernels import recurrent
from mezzo.pytorch.kernels.recurrent import cells

KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
STEPS, BATCH, IN, WIDTH = 6, 4, 5, 7


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def parameters(kind: str, bias: str = "both") -> list[Tensor | None]:
    gates = KINDS[kind] * WIDTH
    made: list[Tensor | None] = [torch.randn(gates, n) * 0.4 for n in (IN, WIDTH)]
    made += [torch.randn(gates) * 0.4 if bias in ("both", side) else None for side in ("ih", "hh")]
    return [None if p is None else p.requires_grad_() for p in made]


def chain(
    kind: str, xs: Tensor, states: list[Tensor], weights: list[Any], cell: Callable[..., Any]
) -> list[Tensor]:
    """The states that a loop of cells goes through, h and c in turn."""
    seen = []
    for x in xs:
        found = cell(x, states if kind == "lstm" else states[0], *weights)
        states = list(found) if kind == "lstm" else [found]
        seen += states
    return seen


def ours(kind: str, compute: torch.dtype = torch.bfloat16, hidden_fp32: bool = True) -> Callable[..., Any]:
    op = getattr(recurrent, f"{kind}_cell")
    return lambda *args: op(*args, compute=compute, hidden_fp32=hidden_fp32)


def started(kind: str) -> list[Tensor]:
    return [(torch.randn(BATCH, WIDTH) * 0.3).requires_grad_() for _ in range(1 + (kind == "lstm"))]


def off(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("hidden_fp32", [True, False], ids=["fp32 state", "16-bit state"])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", ["both", "ih", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_gives_what_pytorch_gives(
    kind: str, bias: str, compute: torch.dtype, hidden_fp32: bool
) -> None:
    xs = torch.randn(STEPS, BATCH, IN, requires_grad=True)
    states, weights = started(kind), parameters(kind, bias)

    def run(cell: Callable[..., Any], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [xs, *states, *weights]
        copies = [None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in leaves]
        n = 1 + len(states)
        seen = chain(kind, copies[0], copies[1:n], copies[n:], cell)  # type: ignore[arg-type]
        loss = sum((t.double() * t.detach().double().cos()).sum() for t in seen)
        return seen, list(torch.autograd.grad(loss, [t for t in copies if t is not None]))

    got, gradients = run(ours(kind, compute, hidden_fp32), torch.float32)
    truth, true_gradients = run(getattr(torch, f"{kind}_cell"), torch.float64)
    for state, true in zip(got, truth, strict=True):
        assert state.dtype is (torch.float32 if hidden_fp32 else compute)
        assert off(state.detach(), true.detach()) < 4 * torch.finfo(compute).eps
        if hidden_fp32 and kind != "rnn_relu":  # whose state is a product, which may have been rounded itself
            assert not torch.equal(state, state.to(compute).float())
    for gradient, true in zip(gradients, true_gradients, strict=True):
        assert gradient.dtype is torch.float32
        assert off(gradient, true) < 6 * torch.finfo(compute).eps


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_the_layer(kind: str) -> None:
    xs, states, weights = torch.randn(STEPS, BATCH, IN), started(kind), parameters(kind)
    seen = chain(kind, xs, states, weights, ours(kind))
    rows = [state.unsqueeze(0) for state in states]
    rest = (weights, True, 1, 0.0, False, False, False)
    how = {"compute": torch.bfloat16, "hidden_fp32": True}
    output, *ends = getattr(recurrent, kind)(xs, rows if kind == "lstm" else rows[0], *rest, **how)
    for t, h in enumerate(seen[:: len(states)]):
        torch.testing.assert_close(h, output[t].float(), rtol=0.02, atol=0.01)
    for mine, end in zip(seen[-len(states) :], ends, strict=True):
        torch.testing.assert_close(mine, end[0], rtol=0.01, atol=0.01)


FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("of_weights", FORMATS, ids=str)
@pytest.mark.parametrize("of_input", FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_every_input_dtype(kind: str, of_input: torch.dtype, of_weights: torch.dtype) -> None:
    xs = torch.randn(STEPS, BATCH, IN).to(of_input).requires_grad_()
    states = [state.detach().to(of_input).requires_grad_() for state in started(kind)]
    weights = [p.detach().to(of_weights).requires_grad_() for p in parameters(kind) if p is not None]
    seen = chain(kind, xs, states, weights, ours(kind))
    assert {state.dtype for state in seen} == {torch.float32}
    leaves = [xs, *states, *weights]
    for leaf, gradient in zip(leaves, torch.autograd.grad(sum(s.sum() for s in seen), leaves), strict=True):
        assert gradient.dtype is leaf.dtype
        assert gradient.isfinite().all()


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[cells.Weights]:
    """The weights that were rounded, each time that they were."""
    made: list[Any] = []
    init = cells.Weights.__init__

    def counted(self: cells.Weights, *args: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(cells, "Weights", type("Weights", (cells.Weights,), {"__init__": counted}))
    return made


def test_weights_are_rounded_once_a_chain_and_freed_with_it(rounded: list[Any]) -> None:
    xs, states, weights = torch.randn(STEPS, BATCH, IN), started("lstm"), parameters("lstm")
    gc.collect()
    gc.disable()
    try:
        seen = chain("lstm", xs, states, weights, ours("lstm"))
        assert len(rounded) == 1
        seen[-1].sum().backward()
        del seen
        assert rounded[0]() is None
    finally:
        gc.enable()
    with torch.no_grad():
        chain("lstm", xs, states, weights, ours("lstm"))
    assert len(rounded) == 1 + STEPS  # the optimizer's step may lie between any two


@pytest.mark.parametrize("how", ["in place", "autocast forgot", "another weight", "detached state"])
def test_a_weight_that_may_have_changed_is_rounded_anew(how: str, rounded: list[Any]) -> None:
    x, states, weights = torch.randn(BATCH, IN), started("gru"), parameters("gru")
    h = ours("gru")(x, states[0], *weights)
    w_hh = weights[1]
    assert w_hh is not None
    if how == "in place":
        with torch.no_grad():
            w_hh.add_(1.0)
    elif how == "another weight":
        weights[1] = (w_hh.detach() + 1.0).requires_grad_()
    elif how == "detached state":
        h = h.detach()
        w_hh.data.add_(1.0)
    else:
        w_hh.data.add_(1.0)
        torch.set_autocast_cache_enabled(False)
    try:
        got = ours("gru")(x, h, *weights)
    finally:
        torch.set_autocast_cache_enabled(True)
    assert len(rounded) == 2
    fresh = ours("gru")(x, h.detach(), *[None if w is None else w.detach() for w in weights])
    assert torch.equal(got, fresh)


def test_backward_twice_in_part_and_to_the_input_alone() -> None:
    xs = torch.randn(STEPS, BATCH, IN, requires_grad=True)
    states, weights = started("lstm"), parameters("lstm")
    seen = chain("lstm", xs, states, weights, ours("lstm"))
    early, late = seen[0].square().sum(), seen[-1].square().sum()
    leaves = [w for w in weights if w is not None]
    (of_xs,) = torch.autograd.grad(late, xs, retain_graph=True)
    assert of_xs.abs().sum() > 0
    gathered = seen[0].grad_fn.mezzo_cell[0].pending  # type: ignore[union-attr]
    assert not gathered  # nobody asked for the weights' gradients
    both = torch.autograd.grad(early + late, leaves, retain_graph=True)
    again = torch.autograd.grad(early + late, leaves, retain_graph=True)
    apart = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (early, late)]
    frozen = torch.autograd.grad(late, leaves[:1], retain_graph=True)
    for one, other, first, second in zip(both, again, *apart, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, first + second, rtol=0.01, atol=0.01 * float(one.abs().max()))
    assert torch.equal(frozen[0], apart[1][0])
    assert not gathered


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # PyTorch's own forward mode
@pytest.mark.parametrize("kind", KINDS)
def test_torch_func_and_higher_derivatives(kind: str) -> None:
    xs = torch.randn(STEPS, BATCH, IN)
    states, weights = [s.detach() for s in started(kind)], parameters(kind)

    def loss(xs: Tensor) -> Tensor:
        return chain(kind, xs, states, weights, ours(kind, torch.float16))[-1].square().sum()

    leaf = xs.clone().requires_grad_()
    (truth,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(xs), truth, rtol=0.01, atol=0.01)
    along = torch.randn_like(xs)
    _, slope = torch.func.jvp(loss, (xs,), (along,))
    torch.testing.assert_close(slope, (truth * along).sum(), rtol=0.02, atol=0.02)
    many = torch.randn(3, STEPS, BATCH, IN)
    batched = torch.func.vmap(loss)(many)
    torch.testing.assert_close(batched[1], loss(many[1]), rtol=0.01, atol=0.01)

    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    penalty = torch.autograd.grad(first.square().sum(), [w for w in weights if w is not None])
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in penalty)


def test_what_does_not_fit_raises_as_in_pytorch() -> None:
    weights = parameters("lstm")
    x, h, c = torch.randn(BATCH, IN), torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    rows = [
        ((x, [h, c[:2]]), "doesn't match hidden1 batch size"),
        ((x[:, :2], [h, c]), "inconsistent input_size"),
        ((x, [h, c[:, :3]]), "inconsistent hidden_size"),
        ((x, [h]), "expects two hidden states"),
        ((x.to("meta"), [h, c]), "device"),
        ((x.double(), [h, c]), "dtype"),
    ]
    for args, message in rows:
        with pytest.raises(RuntimeError, match=message):
            ours("lstm")(*args, *weights)
    with pytest.raises(RuntimeError, match="weight_ih first dim"):
        ours("gru")(x, h, *weights)


def test_an_empty_batch_fp64_and_nan() -> None:
    weights = parameters("gru")
    empty = ours("gru")(torch.zeros(0, IN), torch.zeros(0, WIDTH), *weights)
    assert empty.shape == (0, WIDTH)
    assert empty.dtype is torch.float32
    x, h = torch.randn(BATCH, IN), torch.randn(BATCH, WIDTH)
    wide = [None if w is None else w.detach().double() for w in weights]
    assert torch.equal(
        ours("gru")(x.double(), h.double(), *wide), torch.gru_cell(x.double(), h.double(), *wide)
    )
    clean = ours("gru")(x, h, *weights)
    x[1, 0], x[2, 0] = float("nan"), float("inf")
    found = ours("gru")(x, h, *weights)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert torch.equal(found[2].isnan(), torch.gru_cell(x, h, *weights)[2].isnan())


def test_modules_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `nn.LSTMCell` hands over goes in as it is: the unbatched input, and no state at all."""
    module = nn.LSTMCell(IN, WIDTH)
    monkeypatch.setattr(torch.nn.modules.rnn._VF, "lstm_cell", ours("lstm"))
    h, c = module(torch.randn(IN))
    assert h.shape == c.shape == (WIDTH,)
    assert h.dtype is torch.float32
