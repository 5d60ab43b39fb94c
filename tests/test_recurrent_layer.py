"""One recurrent layer in one direction: 16-bit factors, FP32 sums, and states that are carried in FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mezzo.core.errors import UnknownNameError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.recurrent import reference
from mezzo.pytorch.kernels.recurrent.layer import layer
from mezzo.pytorch.kernels.recurrent.reference import GATES
from mezzo.pytorch.machine import ASSUME_NATIVE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("compute", [BF16, FP16], ids=["bf16", "fp16"])
KINDS = pytest.mark.parametrize("kind", list(GATES))
CARRIED = pytest.mark.parametrize("hidden_fp32", [True, False], ids=["fp32", "rounded"])

# Steps, sequences, input and hidden width; no width but one is a multiple of 16.
SHAPES = [(5, 3, 7, 9), (1, 2, 3, 5), (3, 1, 16, 32), (2, 4, 5, 530)]


class Case(NamedTuple):
    """A layer's tensors."""

    kind: str
    input: Tensor
    h0: Tensor
    c0: Tensor | None
    weights: tuple[Tensor | None, ...]

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.input, self.h0, self.c0, *self.weights) if t is not None]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Case:
        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else function(t)

        input, h0 = function(self.input), function(self.h0)
        return Case(self.kind, input, h0, of(self.c0), tuple(of(w) for w in self.weights))

    def fresh(self, dtype: torch.dtype | None = None) -> Case:
        return self.mapped(lambda t: t.detach().to(dtype or t.dtype, copy=True).requires_grad_())


def case(
    kind: str, shape: tuple[int, int, int, int], *, bias: bool = True, sizes: list[int] | None = None
) -> Case:
    steps, batch, width, columns = shape
    made = torch.Generator().manual_seed(3)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=made) * scale

    rows = GATES[kind] * columns
    input = normal(steps, batch, width) if sizes is None else normal(sum(sizes), width)
    weights = [normal(rows, width, scale=width**-0.5), normal(rows, columns, scale=columns**-0.5)]
    biases = [normal(rows, scale=0.3), normal(rows, scale=0.3)] if bias else [None, None]
    if (
        kind == "rnn_relu" and bias
    ):  # far from 0, where a rounding would make all of an element's gradient or nothing
        biases[0] = torch.tensor([5.0, -5.0]).repeat(rows)[:rows]
    h0, c0 = normal(batch, columns, scale=0.5), normal(batch, columns) if kind == "lstm" else None
    return Case(kind, input, h0, c0, (*weights, *biases, None)).fresh()


Out = tuple[Tensor, ...]


def run(given: Case, compute: torch.dtype, hidden_fp32: bool = True, **more: Any) -> Out:
    found = layer(*given, compute=compute, hidden_fp32=hidden_fp32, **more)  # type: ignore[arg-type]
    return tuple(t for t in found if t is not None)


def naive(given: Case, *, reverse: bool = False, sizes: list[int] | None = None) -> Out:
    """The layer in its tensors' own dtype, every operation rounded to it: FP64 for the truth, 16 bits for the bound."""
    kind, input, h0, c0, (w_ih, w_hh, b_ih, b_hh, _) = given
    assert w_ih is not None
    assert w_hh is not None
    zero = h0.new_zeros(len(w_ih))
    parts = input.unbind(0) if sizes is None else input.split(sizes)
    h, c = [*h0.unbind(0)], [*c0.unbind(0)] if c0 is not None else []
    outputs: dict[int, Tensor] = {}
    for t in reversed(range(len(parts))) if reverse else range(len(parts)):
        n = len(parts[t])
        x, before = parts[t], torch.stack(h[:n])
        a = x @ w_ih.t() + (zero if b_ih is None else b_ih)
        b = before @ w_hh.t() + (zero if b_hh is None else b_hh)
        if kind == "lstm":
            i, f, g, o = (a + b).chunk(4, 1)
            cell = f.sigmoid() * torch.stack(c[:n]) + i.sigmoid() * g.tanh()
            c[:n] = cell.unbind(0)
            new = o.sigmoid() * cell.tanh()
        elif kind == "gru":
            (ra, za, na), (rb, zb, nb) = a.chunk(3, 1), b.chunk(3, 1)
            n_gate = (na + (ra + rb).sigmoid() * nb).tanh()
            z = (za + zb).sigmoid()
            new = (1 - z) * n_gate + z * before
        else:
            new = (a + b).tanh() if kind == "rnn_tanh" else (a + b).relu()
        h[:n] = new.unbind(0)
        outputs[t] = new
    ordered = [outputs[t] for t in range(len(parts))]
    output = torch.stack(ordered) if sizes is None else torch.cat(ordered)
    return (output, torch.stack(h), torch.stack(c)) if c else (output, torch.stack(h))


def gradients(given: Case, outputs: Out) -> list[Tensor]:
    made = torch.Generator().manual_seed(7)
    seeds = [torch.randn(out.shape, generator=made).bfloat16().to(out.dtype) for out in outputs]
    return list(torch.autograd.grad(outputs, given.tensors(), seeds))


@pytest.fixture(autouse=True, params=["native", "emulated", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Factors in bf16 or in FP32, or PyTorch operations."""
    if request.param != "reference" and not backend.is_installed("numba"):
        pytest.skip("numba is not installed")
    monkeypatch.setenv(backend.KERNELS, "reference" if request.param == "reference" else "numba")
    monkeypatch.setenv(ASSUME_NATIVE, "bf16" if request.param == "native" else "")
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@HALVES
@KINDS
@CARRIED
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("reverse", "sizes"), [(False, None), (True, True)], ids=["padded", "packed reverse"]
)
def test_no_number_is_worse_than_in_the_naive_16_bit_code(
    kind: str,
    shape: tuple[int, int, int, int],
    reverse: bool,
    sizes: Any,
    compute: torch.dtype,
    hidden_fp32: bool,
) -> None:
    steps, batch = shape[:2]
    lengths = [max(1, batch - t) for t in range(steps)] if sizes else None
    given = case(kind, shape, bias=not reverse or kind in ("gru", "rnn_relu"), sizes=lengths)
    exact, low, mine = given.fresh(torch.float64), given.fresh(compute), given.fresh()
    packed = torch.tensor(lengths) if lengths else None
    truths = naive(exact, reverse=reverse, sizes=lengths)
    theirs = naive(low, reverse=reverse, sizes=lengths)
    ours = run(mine, compute, hidden_fp32, reverse=reverse, batch_sizes=packed)
    kept = FP32 if hidden_fp32 else compute
    assert [out.dtype for out in ours] == [compute, *[kept] * (len(ours) - 1)]
    rows = [*zip(ours, theirs, truths)]
    rows += zip(gradients(mine, ours), gradients(low, theirs), gradients(exact, truths))
    eps, squares, bounds, count = torch.finfo(compute).eps, 0.0, 0.0, 0
    for got, its, truth in ((a, b, c.detach()) for a, b, c in rows):
        assert got.shape == truth.shape
        error, bound = ((t.detach().double() - truth).abs() for t in (got, its))
        assert (error <= bound + 2 * eps * truth.abs().max()).all()
        of_truth = truth.square().mean()
        squares += float(error.square().sum() / of_truth)
        bounds += float(bound.square().sum() / of_truth)
        count += truth.numel()
    assert squares <= bounds + (0.5 * eps) ** 2 * count


MODULES: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
}


@HALVES
@KINDS
@pytest.mark.parametrize("reverse", [False, True])
def test_one_step_of_exact_products_is_fp32s(kind: str, reverse: bool, compute: torch.dtype) -> None:
    """Small multiples of a quarter: no product is rounded, so the states are FP32's but for sigmoid and tanh."""
    given = case(kind, (1, 3, 6, 10))
    quarters = given.mapped(lambda t: ((4 * t).round().clamp(-3, 3) / 4).detach())
    module = MODULES[kind](6, 10)
    for parameter, value in zip(module.parameters(), quarters.weights):
        parameter.data.copy_(value)
    state: Any = quarters.h0[None] if quarters.c0 is None else (quarters.h0[None], quarters.c0[None])
    out, last = module(quarters.input, state)
    expected = [out[0], *(t[0] for t in (last if isinstance(last, tuple) else (last,)))]
    got = run(quarters, compute, reverse=reverse)
    assert torch.equal(got[0][0], got[1].to(compute))
    for mine, theirs in zip(got[1:], expected[1:]):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=3e-7)


def counter(kind: str) -> Case:
    """A layer of one element whose state grows a little at each of 4000 steps."""

    def bias(*values: float) -> Tensor:
        return torch.tensor(values)

    zeros, state = [torch.zeros(GATES[kind], 1) for _ in range(2)], torch.zeros(1, 1)
    input = torch.zeros(4000, 1, 1)
    if kind == "lstm":  # c += 0.0009
        return Case(kind, input, state, state, (*zeros, bias(0.0, 30.0, math.atanh(0.0018), 0.0), None, None))
    if kind == "gru":  # h += (1 - h) / 1024
        return Case(kind, input, state, None, (*zeros, bias(0.0, math.log(1023), 30.0), None, None))
    one = torch.ones(1, 1)  # relu: h += 2**-12
    return Case(kind, input, state, None, (zeros[0], one, bias(2.0**-12), None, None))


@pytest.mark.heavy
@HALVES
@pytest.mark.parametrize(
    ("kind", "total", "stuck"), [("lstm", 3.6, 1.1), ("gru", 1 - math.exp(-4000 / 1024), 0.6)]
)
def test_what_a_step_adds_is_not_lost_where_the_state_is_carried_in_fp32(
    kind: str, total: float, stuck: float, compute: torch.dtype, way: str
) -> None:
    given = counter(kind)
    truth = naive(given.fresh(torch.float64))[-1].item()
    assert truth == pytest.approx(total, rel=1e-3)
    with torch.no_grad():
        assert run(given, compute, True)[-1].item() == pytest.approx(truth, rel=1e-3)
        if compute is BF16:
            assert run(given, compute, False)[-1].item() < stuck


@pytest.mark.heavy
def test_a_plain_layers_state_is_a_factor_and_rounded_in_any_case() -> None:
    """Its only way from step to step is the product: 16-bit factors lose the same, whatever is carried."""
    with torch.no_grad():
        carried, rounded = (run(counter("rnn_relu"), BF16, hidden)[-1].item() for hidden in (True, False))
    assert rounded == 2.0**-4
    assert carried == pytest.approx(rounded, rel=2**-7)


@HALVES
@KINDS
@pytest.mark.parametrize("reverse", [False, True])
def test_a_packed_sequence_is_each_sequence_alone(kind: str, reverse: bool, compute: torch.dtype) -> None:
    sizes = [4, 4, 3, 1]
    given = case(kind, (4, 4, 6, 8), sizes=sizes)
    out, *last = run(given, compute, reverse=reverse, batch_sizes=torch.tensor(sizes))
    starts = [sum(sizes[:t]) for t in range(len(sizes))]
    for row in range(4):
        rows = [start + row for start, size in zip(starts, sizes) if row < size]
        alone = given.mapped(lambda t: t)._replace(
            input=given.input[rows][:, None],
            h0=given.h0[row : row + 1],
            c0=None if given.c0 is None else given.c0[row : row + 1],
        )
        own, *own_last = run(alone, compute, reverse=reverse)
        torch.testing.assert_close(out[rows], own[:, 0], rtol=2 * torch.finfo(compute).eps, atol=1e-3)
        for a, b in zip(last, own_last):
            torch.testing.assert_close(a[row], b[0], rtol=2 * torch.finfo(compute).eps, atol=1e-3)


@pytest.mark.parametrize("reverse", [False, True])
@HALVES
def test_a_projection_is_within_the_naive_codes_error(reverse: bool, compute: torch.dtype) -> None:
    module = nn.LSTM(6, 10, proj_size=4, bidirectional=True)
    weights = tuple(p.detach() for p in list(module.parameters())[5 if reverse else 0 :][:5])
    ordered = (*weights[:4], weights[4])
    x, h0, c0 = (case("lstm", (5, 3, 6, 10)).mapped(torch.detach)[i] for i in (1, 2, 3))
    given = Case("lstm", x, h0[:, :4], c0, ordered).fresh()  # type: ignore[arg-type]
    exact = module.double()
    states = [torch.stack([given.h0, given.h0]).double(), torch.stack([c0, c0]).double()]  # type: ignore[list-item]
    truth, (h_n, c_n) = exact(x.double(), tuple(states))  # type: ignore[attr-defined]
    got = run(given, compute, reverse=reverse)
    part = slice(4, 8) if reverse else slice(0, 4)
    for mine, theirs in zip(got, (truth[..., part], h_n[int(reverse)], c_n[int(reverse)])):
        assert (mine.double() - theirs).abs().max() <= 4 * torch.finfo(compute).eps
    assert all(g.isfinite().all() for g in gradients(given, got))


def kept_bytes(forward: Callable[[], object], own: list[Tensor]) -> int:
    """Bytes that autograd holds, but for the tensors that are there anyway."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    for tensor in own:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(held.values())


@HALVES
@KINDS
def test_at_most_half_of_fp32s_bytes_are_kept(kind: str, compute: torch.dtype, way: str) -> None:
    if way == "reference":
        pytest.skip("PyTorch's operations keep what they keep")
    given = case(kind, (24, 8, 32, 32))
    module = MODULES[kind](32, 32)
    input = given.input.detach().clone().requires_grad_()
    theirs = kept_bytes(lambda: module(input), list(module.parameters()))
    ours = kept_bytes(lambda: run(given, compute), [w for w in given.weights if w is not None])
    state = given.h0.nbytes * (1 if given.c0 is None else 2)  # the caller's, which PyTorch was not given
    assert ours - state <= 0.5 * theirs


@KINDS
@pytest.mark.parametrize("wanted", ["input", "h0", "w_ih", "w_hh", "b_ih", "b_hh", "input h0 b_hh", ""])
def test_only_what_needs_a_gradient_gets_one(kind: str, wanted: str) -> None:
    names = ("input", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")
    full = case(kind, (3, 2, 5, 6))
    every = dict(zip(names, (full.input, full.h0, full.c0, *full.weights)))
    run(full, BF16)[0].float().square().sum().backward()
    some = full.fresh()
    for name, tensor in zip(names, (some.input, some.h0, some.c0, *some.weights)):
        if tensor is not None:
            tensor.requires_grad_(name in wanted.split())
    out = run(some, BF16)[0]
    assert out.requires_grad is bool(wanted)
    if wanted:
        out.float().square().sum().backward()
    for name, tensor in zip(names, (some.input, some.h0, some.c0, *some.weights)):
        if tensor is not None:
            assert (tensor.grad is not None) is (name in wanted.split())
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, every[name].grad)


@KINDS
def test_every_dtype_gets_its_gradients_in_it_and_no_gradient_changes_no_bit(kind: str) -> None:
    given = case(kind, (3, 2, 5, 6))
    mixed = Case(
        kind,
        given.input.half(),
        given.h0.bfloat16(),
        given.c0,
        (given.weights[0].double(), *given.weights[1:]),
    )  # type: ignore[union-attr]
    mixed = mixed.fresh()
    outputs = run(mixed, FP16)
    found = torch.autograd.grad(outputs[0].sum(), mixed.tensors(), allow_unused=True)
    assert [g.dtype for g in found if g is not None] == [t.dtype for t in mixed.tensors()]
    with torch.no_grad():
        again = run(mixed, FP16)
    assert all(torch.equal(a, b) for a, b in zip(outputs, again))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_relu"])
def test_two_threads_write_all_that_one_writes(kind: str) -> None:
    given = case(kind, (2, 5, 8, 1100))  # more than `ALONE`, and blocks that are no whole ones
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs = run(given, FP16)
        found.append([*outputs, *gradients(given, outputs)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@HALVES
@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_as_in_the_naive_code(kind: str, bad: float, compute: torch.dtype) -> None:
    given = case(kind, (4, 3, 5, 6)).mapped(torch.detach)
    given.input[1, 1, 2] = bad
    given.weights[0][:, 2] = 0.5  # type: ignore[index]
    got = run(given, compute)
    expected = naive(given.fresh(FP32))
    for mine, theirs in zip(got, expected):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.isinf(), theirs.isinf())


def test_nan_in_a_gradient_reaches_all_that_depends_on_it() -> None:
    given = case("gru", (3, 2, 4, 5))
    out = run(given, BF16)[0]
    seed = torch.zeros_like(out)
    seed[2, 0, 0] = math.nan
    dx, dh0, *_ = torch.autograd.grad(out, given.tensors(), seed)
    assert dx[:, 0].isnan().all()
    assert not dx[:, 1].isnan().any()
    assert dh0[0].isnan().all()


@pytest.mark.parametrize("index", [0, 3])
def test_a_change_in_place_before_backward_is_noticed(index: int, way: str) -> None:
    if way == "reference":
        pytest.skip("PyTorch's operations keep copies of what may change")
    given = case("lstm", (3, 2, 4, 5))
    low = given._replace(input=given.input.detach().bfloat16())
    out = run(low, BF16)[0]
    with torch.no_grad():
        (low.input if index == 0 else low.weights[1]).mul_(2)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@KINDS
def test_a_changed_output_is_noticed(kind: str, way: str) -> None:
    if way == "reference":
        pytest.skip("PyTorch's operations keep copies of what may change")
    out = run(case(kind, (3, 2, 4, 5)), BF16)[0]
    total = (out * 1).sum()
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@KINDS
def test_a_second_derivative_is_the_naive_codes(kind: str) -> None:
    given, exact = (case(kind, (3, 2, 4, 5)).fresh(dtype) for dtype in (FP32, torch.float64))
    found = []
    for tensors, outputs in ((given, run(given, FP16)), (exact, naive(exact))):
        first = torch.autograd.grad(
            (outputs[0] / 8).double().square().mean(), tensors.tensors(), create_graph=True
        )
        total = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(total, tensors.tensors()))  # type: ignore[arg-type]
    for mine, truth in zip(*found):
        assert (mine.double() - truth).norm() <= 0.01 * truth.norm() + 1e-4


@pytest.mark.heavy
@KINDS
def test_transforms_and_tracers_take_it_apart(kind: str) -> None:
    given = case(kind, (3, 2, 4, 5)).mapped(torch.detach)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        changed = given._replace(input=x, weights=(w, *given.weights[1:]))
        return run(changed, BF16)[0].float().square().sum()

    x, w = given.input.clone().requires_grad_(), given.weights[0].clone().requires_grad_()  # type: ignore[union-attr]
    plain = torch.autograd.grad(loss(x, w), (x, w))
    transformed = torch.func.grad(loss, (0, 1))(x.detach(), w.detach())
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    traced = torch.autograd.grad(compiled(x, w), (x, w))
    for others in (transformed, traced):
        for a, b in zip(plain, others):
            assert (a - b).norm() <= 0.02 * a.norm()
    outputs = [run(given._replace(input=x), BF16)[1]]
    batch = torch.tensor([1.0, 2.0])[:, None, None] * torch.ones_like(outputs[0])
    many = torch.autograd.grad(outputs, [x], [batch], is_grads_batched=True, retain_graph=True)[0]
    one = torch.autograd.grad(outputs, [x], [batch[0]])[0]
    assert (many[0] - one).norm() <= 0.02 * one.norm()


def test_checkpoints_and_hooks_see_what_is_kept() -> None:
    given = case("lstm", (3, 2, 4, 5))
    whole = gradients(given, run(given, BF16))
    again = torch.utils.checkpoint.checkpoint(
        lambda x: run(given._replace(input=x), BF16), given.input, use_reentrant=False
    )
    for a, b in zip(whole, gradients(given, again)):
        assert torch.equal(a, b)


def test_what_is_wrong_says_so() -> None:
    given = case("gru", (3, 2, 4, 5))
    with pytest.raises(UnknownNameError, match="unknown kind of recurrent layer 'gur'"):
        run(given._replace(kind="gur"), BF16)
    with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
        run(given._replace(input=given.input[:0]), BF16)
    with pytest.raises(RuntimeError):
        run(given._replace(input=given.input[:, :, :3]), BF16)
    with pytest.raises(RuntimeError):
        run(given._replace(h0=given.h0[:, :4]), BF16)


@HALVES
@KINDS
@CARRIED
def test_compiled_and_reference_differ_by_roundings_of_products(
    kind: str, compute: torch.dtype, hidden_fp32: bool, way: str
) -> None:
    given = case(kind, (6, 3, 8, 12))
    mine = run(given, compute, hidden_fp32)
    theirs = [
        t
        for t in reference.layer(*given, compute=compute, hidden_fp32=hidden_fp32)  # type: ignore[arg-type]
        if t is not None
    ]
    few = {"reference": 0.0, "emulated": 1.0, "native": 4.0}[way] * torch.finfo(compute).eps
    if compute is FP16 and way == "native":
        few = torch.finfo(compute).eps
    for a, b in zip([*mine, *gradients(given, mine)], [*theirs, *gradients(given, tuple(theirs))]):
        assert (a.double() - b.double()).norm() <= few * b.double().norm()


def test_sigmoid_and_tanh_are_within_their_bound(way: str) -> None:
    if way != "emulated":
        pytest.skip("once is enough")
    numba = pytest.importorskip("numba")
    from mezzo.pytorch.kernels.recurrent import cpu_functions as functions

    constants, sigmoid, tanh = functions.constants, functions.sigmoid, functions.tanh
    sigmoid_and_rest, tanh_and_slope = functions.sigmoid_and_rest, functions.tanh_and_slope

    @numba.njit  # type: ignore[untyped-decorator,unused-ignore]
    def fill(x: Any, out: Any) -> None:
        k = constants()
        for i in range(len(x)):
            out[0, i], out[1, i] = sigmoid(x[i], k), tanh(x[i], k)
            out[2, i], out[3, i] = sigmoid_and_rest(x[i], k)
            out[4, i], out[5, i] = tanh_and_slope(x[i], k)

    small = np.ldexp(np.linspace(0.5, 1, 50_001), np.arange(-30, 7)[:, None]).ravel()
    x = np.concatenate((small, -small, np.linspace(-80, 80, 400_001), [0.0, -0.0])).astype(np.float32)
    out = np.empty((6, len(x)), np.float32)
    fill(x, out)
    wide = torch.from_numpy(x).double()
    s, t = wide.sigmoid(), wide.tanh()
    slope = 1 / torch.cosh(wide).square()
    for got, truth, bound in zip(out, (s, t, s, (-wide).sigmoid(), t, slope), (2.5, 2.5, 3.0, 3.0, 3.0, 5.0)):
        mine = torch.from_numpy(got)
        inside = (truth.abs() > 2.0**-100) & (wide.abs() < 25 if truth is slope else True)
        ulp = torch.from_numpy(np.spacing(np.abs(truth.numpy()).astype(np.float32))).double()
        assert ((mine.double() - truth).abs() / ulp)[inside].max() <= bound
    ends = np.array([math.nan, math.inf, -math.inf, 1e30, -1e30, 200.0, -200.0], np.float32)
    at_ends = np.empty((6, len(ends)), np.float32)
    fill(ends, at_ends)
    assert np.isnan(at_ends[:, 0]).all()
    assert at_ends[0, 1:].tolist() == at_ends[2, 1:].tolist() == [1, 0, 1, 0, 1, 0]
    assert at_ends[1, 1:].tolist() == at_ends[4, 1:].tolist() == [1, -1, 1, -1, 1, -1]
