"""Whole recurrent ops: PyTorch's numbers, shapes, random streams and complaints, with an FP32 state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mezzo.pytorch.kernels import recurrent
from mezzo.pytorch.kernels.recurrent.ops import _without_onednn
from mezzo.pytorch.kernels.unseen import unseen

STEPS, BATCH, IN, WIDTH = 9, 4, 5, 7
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **rest: nn.RNN(*sizes, nonlinearity="relu", **rest),
}
HALVES = [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Row:
    """A kind of layer and what its module is built with."""

    kind: str
    built: dict[str, Any] = field(default_factory=dict)

    def module(self, *sizes: int, seed: int = 0) -> nn.RNNBase:
        torch.manual_seed(seed)
        return KINDS[self.kind](*(sizes or (IN, WIDTH)), **self.built)

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{name}={value}" for name, value in self.built.items())])


ROWS = [
    *(Row(kind) for kind in KINDS),
    Row("lstm", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    Row("gru", {"num_layers": 3, "bias": False}),
    Row("rnn_tanh", {"num_layers": 2, "bidirectional": True}),
    Row("lstm", {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    Row("lstm", {"proj_size": 3, "bias": False}),
    Row("gru", {"num_layers": 3, "dropout": 0.4, "bidirectional": True}),
    Row("lstm", {"num_layers": 2, "dropout": 0.5, "batch_first": True}),
]


class Autocast:
    """The ops as kernels at the CPU's Autocast key, under a plain `torch.autocast`."""

    def __init__(self, compute: torch.dtype, hidden_fp32: bool) -> None:
        self.compute, self.hidden_fp32 = compute, hidden_fp32

    def __call__(self, module: Callable[..., Any], *args: Any) -> Any:
        with torch.autocast("cpu", self.compute):
            return module(*args)


@pytest.fixture
def autocast() -> Iterator[Callable[[torch.dtype, bool], Autocast]]:
    """What registers the ops, and takes them away again."""
    library = torch.library.Library("aten", "IMPL")
    current = Autocast(torch.bfloat16, True)
    key = torch._C.DispatchKey.AutocastCPU  # type: ignore[attr-defined]

    def register(name: str, op: Callable[..., Any]) -> None:
        @unseen
        def run(*args: Any, **named: Any) -> Any:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
            try:
                return op(*args, compute=current.compute, hidden_fp32=current.hidden_fp32, **named)
            finally:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the dispatcher says that a kernel is replaced
            library.impl(name, run, "AutocastCPU")

    for kind in KINDS:
        register(f"{kind}.input", getattr(recurrent, kind))
        register(f"{kind}.data", getattr(recurrent, kind))
        register(f"{kind}_cell", getattr(recurrent, f"{kind}_cell"))

    def using(compute: torch.dtype, hidden_fp32: bool) -> Autocast:
        current.compute, current.hidden_fp32 = compute, hidden_fp32
        return current

    yield using
    library._destroy()


def flat(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def off(got: Tensor, truth: Tensor) -> float:
    """The distance of two tensors over the truth's length."""
    return float((got.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm())


def quietly(run: Callable[[], Any]) -> Any:
    """What PyTorch computes, without oneDNN's word on projections."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        return run()


@pytest.mark.parametrize("hidden_fp32", [True, False], ids=["fp32 state", "16-bit state"])
@pytest.mark.parametrize("compute", HALVES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_modules_give_what_pytorch_gives(
    row: Row, compute: torch.dtype, hidden_fp32: bool, autocast: Callable[..., Autocast]
) -> None:
    module = row.module()
    x = torch.randn((BATCH, STEPS, IN) if module.batch_first else (STEPS, BATCH, IN))
    lengths = torch.tensor([3, 9, 1, 9])
    packed = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
    single = x[0] if module.batch_first else x[:, 0]
    tolerance = 6 * torch.finfo(compute).eps
    for given in (x, packed, single):
        torch.manual_seed(1)
        truth = quietly(lambda given=given: module(given))
        after = torch.get_rng_state()
        torch.manual_seed(1)
        got = autocast(compute, hidden_fp32)(module, given)
        assert torch.equal(torch.get_rng_state(), after)
        output, *states = [leaf for leaf in flat(got) if leaf.is_floating_point()]
        true_output, *true_states = [leaf for leaf in flat(truth) if leaf.is_floating_point()]
        assert output.dtype is compute
        assert output.stride() == true_output.stride()
        torch.testing.assert_close(output.float(), true_output, rtol=0, atol=tolerance)
        for state, true_state in zip(states, true_states, strict=True):
            assert state.dtype is (torch.float32 if hidden_fp32 else compute)
            torch.testing.assert_close(state.float(), true_state, rtol=0, atol=tolerance)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_packed_batch_is_its_sequences_one_by_one(row: Row) -> None:
    module = row.module().eval()
    lengths = [9, 4, 4, 1]
    x = torch.randn(STEPS, len(lengths), IN)
    packed = pack_padded_sequence(x, torch.tensor(lengths))
    both = 1 + module.bidirectional
    rows = module.num_layers * both
    seen = getattr(module, "proj_size", 0) or WIDTH
    states = [torch.randn(rows, len(lengths), seen) * 0.3]
    if row.kind == "lstm":
        states.append(torch.randn(rows, len(lengths), WIDTH) * 0.3)
    op = getattr(recurrent, row.kind)
    rest = (module._flat_weights, module.bias, module.num_layers, 0.0, False, module.bidirectional)
    how = {"compute": torch.bfloat16, "hidden_fp32": True}

    def hx(part: slice) -> Any:
        chosen = [state[:, part] for state in states]
        return chosen if row.kind == "lstm" else chosen[0]

    whole = op(packed.data, packed.batch_sizes, hx(slice(None)), *rest, **how)
    padded, _ = pad_packed_sequence(nn.utils.rnn.PackedSequence(whole[0], packed.batch_sizes))
    for i, length in enumerate(lengths):
        alone = op(x[:length, i : i + 1], hx(slice(i, i + 1)), *rest, False, **how)
        torch.testing.assert_close(padded[:length, i : i + 1].float(), alone[0].float(), rtol=0, atol=0.02)
        for end, end_alone in zip(whole[1:], alone[1:], strict=True):
            torch.testing.assert_close(end[:, i : i + 1], end_alone, rtol=0, atol=0.01)


@pytest.mark.parametrize("hidden_fp32", [True, False], ids=["fp32 state", "16-bit state"])
@pytest.mark.parametrize("compute", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_handed_on_loses_nothing(kind: str, compute: torch.dtype, hidden_fp32: bool) -> None:
    """Two halves of a sequence are the whole, to the bit: truncated backpropagation forgets no digits."""
    module = Row(kind, {"num_layers": 2}).module()
    x = torch.randn(STEPS, BATCH, IN)
    op = getattr(recurrent, kind)
    rest = (module._flat_weights, True, 2, 0.0, True, False, False)
    zeros = torch.zeros(2, BATCH, WIDTH)
    start = [zeros, zeros] if kind == "lstm" else zeros
    how = {"compute": compute, "hidden_fp32": hidden_fp32}
    whole = op(x, start, *rest, **how)
    first = op(x[:4], start, *rest, **how)
    middle = [state.detach() for state in first[1:]]
    second = op(x[4:], middle if kind == "lstm" else middle[0], *rest, **how)
    assert torch.equal(torch.cat((first[0], second[0])), whole[0])
    for one, other in zip(second[1:], whole[1:], strict=True):
        assert torch.equal(one, other)


FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("of_states", FORMATS, ids=str)
@pytest.mark.parametrize("of_weights", FORMATS, ids=str)
@pytest.mark.parametrize("of_input", FORMATS, ids=str)
def test_every_input_dtype(of_input: torch.dtype, of_weights: torch.dtype, of_states: torch.dtype) -> None:
    module = Row("lstm", {"num_layers": 2, "bidirectional": True}).module()
    x = torch.randn(STEPS, BATCH, IN).to(of_input).requires_grad_()
    states = [(torch.randn(4, BATCH, WIDTH) * 0.3).to(of_states).requires_grad_() for _ in range(2)]
    weights = [w.detach().to(of_weights).requires_grad_() for w in module._flat_weights]

    def run(dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor]]:
        def as_leaf(t: Tensor) -> Tensor:
            return t.detach().to(dtype or t.dtype).requires_grad_()

        leaves = [as_leaf(t) for t in (x, *states, *weights)]
        args = (leaves[0], leaves[1:3], leaves[3:], True, 2, 0.0, True, True, False)
        if dtype is None:
            outputs = recurrent.lstm(*args, compute=torch.bfloat16, hidden_fp32=True)
        else:
            outputs = torch.lstm(*args)
        loss = sum((out.double() * out.double().detach().cos()).sum() for out in outputs)
        return list(outputs), list(torch.autograd.grad(loss, leaves))

    (outputs, gradients), (true_outputs, true_gradients) = run(None), run(torch.float64)
    assert [out.dtype for out in outputs] == [torch.bfloat16, torch.float32, torch.float32]
    assert [g.dtype for g in gradients] == [of_input, *[of_states] * 2, *[of_weights] * 16]
    for got, truth in zip([*outputs, *gradients], [*true_outputs, *true_gradients], strict=True):
        assert off(got, truth) < 0.02


@pytest.mark.heavy
@pytest.mark.parametrize("built", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_no_further_off_than_pytorchs(kind: str, built: dict[str, Any]) -> None:
    """Against FP64, PyTorch's bf16 kernels beside ours: each tensor's error, the mean of the seeds.

    Where relu's slope jumps, both are off by whole units that were switched the other way: chance, to a tenth.
    """
    seeds = 8
    errors: dict[str, list[float]] = {}
    for seed in range(seeds):
        module = Row(kind, built).module(24, 32, seed=seed)
        x = torch.randn(48, 16, 24)
        slope = torch.randn(48, 16, 32 * (1 + module.bidirectional))

        def gradients(
            run: Callable[[nn.RNNBase, Tensor], Tensor],
            dtype: torch.dtype = torch.float32,
            module: nn.RNNBase = module,
            x: Tensor = x,
            slope: Tensor = slope,
        ) -> dict[str, Tensor]:
            twin, leaf = copy.deepcopy(module).to(dtype), x.to(dtype, copy=True).requires_grad_()
            (run(twin, leaf).to(dtype) * slope.to(dtype)).sum().backward()
            named = {name: p.grad for name, p in twin.named_parameters()} | {"input": leaf.grad}
            return {name: grad for name, grad in named.items() if grad is not None}

        def native(twin: nn.RNNBase, leaf: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return twin(leaf)[0]

        def ours(hidden_fp32: bool) -> Callable[[nn.RNNBase, Tensor], Tensor]:
            return lambda twin, leaf: called(twin, leaf, torch.bfloat16, hidden_fp32)[0]

        truth = gradients(lambda twin, leaf: twin(leaf)[0], torch.float64)
        for run in (native, ours(True), ours(False)):
            for name, grad in gradients(run).items():
                errors.setdefault(name, []).append(off(grad, truth[name]))
    for name, found in errors.items():
        theirs, with_fp32, with_half = (sum(found[i::3]) / seeds for i in range(3))
        allowed = 1.1 if kind == "rnn_relu" else 1.0
        assert with_fp32 <= allowed * theirs, (name, with_fp32, theirs)
        assert with_half <= allowed * theirs, (name, with_half, theirs)


def called(module: nn.RNNBase, x: Tensor, compute: torch.dtype, hidden_fp32: bool) -> tuple[Tensor, ...]:
    """The op of a module, called without a dispatcher."""
    kind = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}[module.mode]
    rows = module.num_layers * (1 + module.bidirectional)
    zeros = torch.zeros(rows, x.shape[1], module.hidden_size)
    hx = [zeros, zeros] if kind == "lstm" else zeros
    rest = (module.num_layers, module.dropout, module.training, module.bidirectional, False)
    op = getattr(recurrent, kind)
    found: tuple[Tensor, ...] = op(
        x, hx, module._flat_weights, module.bias, *rest, compute=compute, hidden_fp32=hidden_fp32
    )
    return found


def test_arguments_by_name() -> None:
    module = Row("gru").module()
    packed = pack_padded_sequence(torch.randn(STEPS, 2, IN), torch.tensor([9, 5]))
    hx = torch.zeros(1, 2, WIDTH)
    names = ("has_biases", "num_layers", "dropout", "train", "bidirectional")
    rest = dict(zip(names, (True, 1, 0.0, True, False)))
    how = {"compute": torch.float16, "hidden_fp32": False}
    truth = recurrent.gru(*packed[:2], hx, module._flat_weights, *rest.values(), **how)
    for got in (
        recurrent.gru(*packed[:2], hx, params=module._flat_weights, **rest, **how),
        recurrent.gru(*packed[:2], hx, module._flat_weights, **rest, **how),
        recurrent.gru(
            data=packed.data, batch_sizes=packed[1], hx=hx, params=module._flat_weights, **rest, **how
        ),
    ):
        assert torch.equal(got[0], truth[0])
    x = torch.randn(STEPS, 2, IN)
    got = recurrent.gru(x, hx, module._flat_weights, **rest, batch_first=False, **how)
    assert torch.equal(got[0], recurrent.gru(x, hx, module._flat_weights, *rest.values(), False, **how)[0])


def _weights(kind: str = "gru", **factory: Any) -> list[Tensor]:
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    shapes = [(gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)]
    return [torch.zeros(shape, **factory) for shape in shapes]


def _zeros(*shape: int, **factory: Any) -> Tensor:
    return torch.zeros(*shape, **factory)


REST = (True, 1, 0.0, False, False)
COMPLAINTS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "no steps": ("gru", (_zeros(0, 2, 3), _zeros(1, 2, 4), _weights(), *REST, False), "larger than 0"),
    "width": ("lstm", (_zeros(5, 2, 7), [_zeros(1, 2, 4)] * 2, _weights("lstm"), *REST, False), "shapes"),
    "batch": ("lstm", (_zeros(5, 2, 3), [_zeros(1, 3, 4)] * 2, _weights("lstm"), *REST, False), "match"),
    "layers": ("gru", (_zeros(5, 2, 3), _zeros(2, 2, 4), _weights(), *REST, False), "hidden states"),
    "parameters": ("gru", (_zeros(5, 2, 3), _zeros(1, 2, 4), _weights()[:3], *REST, False), "number of"),
    "one state": ("lstm", (_zeros(5, 2, 3), [_zeros(1, 2, 4)], _weights("lstm"), *REST, False), "two hidden"),
    "integers": (
        "gru",
        (_zeros(5, 2, 3, dtype=torch.int64), _zeros(1, 2, 4), _weights(), *REST, False),
        "same dtype",
    ),
    "complex": (
        "gru",
        (_zeros(5, 2, 3, dtype=torch.complex64), _zeros(1, 2, 4), _weights(), *REST, False),
        "same dtype",
    ),
    "fp64 and fp32": (
        "gru",
        (_zeros(5, 2, 3, dtype=torch.float64), _zeros(1, 2, 4), _weights(), *REST, False),
        "same dtype",
    ),
    "devices": (
        "gru",
        (_zeros(5, 2, 3, device="meta"), _zeros(1, 2, 4), _weights(), *REST, False),
        "same device",
    ),
    "growing": (
        "gru",
        (_zeros(6, 3), torch.tensor([2, 3, 1]), _zeros(1, 2, 4), _weights(), *REST),
        "match the size",
    ),
    "too many": ("gru", (_zeros(6, 3), torch.tensor([4, 3]), _zeros(1, 4, 4), _weights(), *REST), "exceeds"),
}


@pytest.mark.parametrize("case", COMPLAINTS)
def test_what_does_not_fit_raises_as_in_pytorch(case: str) -> None:
    kind, args, message = COMPLAINTS[case]
    with pytest.raises(RuntimeError, match=message):
        getattr(recurrent, kind)(*args, compute=torch.bfloat16, hidden_fp32=True)


def test_fp64_is_left_alone() -> None:
    module = Row("lstm", {"num_layers": 2}).module().double()
    x = torch.randn(STEPS, BATCH, IN, dtype=torch.float64)
    zeros = torch.zeros(2, BATCH, WIDTH, dtype=torch.float64)
    args = (x, [zeros, zeros], module._flat_weights, True, 2, 0.0, False, False, False)
    for got, truth in zip(
        recurrent.lstm(*args, compute=torch.float16, hidden_fp32=False), torch.lstm(*args), strict=True
    ):
        assert torch.equal(got, truth)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_an_empty_batch_and_tensors_without_values(kind: str) -> None:
    for batch, device in ((0, "cpu"), (2, "meta")):
        hx = _zeros(1, batch, 4, device=device)
        states = [hx, hx] if kind == "lstm" else hx
        args = (_zeros(5, batch, 3, device=device), states, _weights(kind, device=device), *REST, False)
        out, *ends = getattr(recurrent, kind)(*args, compute=torch.bfloat16, hidden_fp32=True)
        assert out.shape == (5, batch, 4)
        assert out.dtype is torch.bfloat16
        assert [end.dtype for end in ends] == [torch.float32] * len(ends)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_sequence(kind: str) -> None:
    module = Row(kind).module()
    x = torch.randn(STEPS, 3, IN)
    clean = called(module, x, torch.bfloat16, True)[0]
    x[4, 0, 0] = float("nan")
    x[4, 1, 0] = float("inf")
    found = called(module, x, torch.bfloat16, True)[0]
    assert found[4:, 0].isnan().all()
    assert torch.equal(found[:4], clean[:4])
    assert torch.equal(found[:, 2], clean[:, 2])
    with torch.no_grad():
        truth = module(x)[0]
    assert torch.equal(found[4:, 1].isnan(), truth[4:, 1].isnan())


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("hidden_fp32", [True, False], ids=["fp32 state", "16-bit state"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_compiled(kind: str, hidden_fp32: bool, autocast: Callable[..., Autocast]) -> None:
    """Once as Dynamo does it, which leaves the layer out of its graph, and once with the layer in it.

    With gradients PyTorch's own LSTM can't be in a graph ("expected all tensors ... to be Tensors").
    """
    module = Row(kind, {"num_layers": 2}).module()
    x = torch.randn(STEPS, BATCH, IN)
    region = autocast(torch.bfloat16, hidden_fp32)

    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x * 1.0)

    truth = flat(region(module, x))
    for in_graph in (False, True):
        torch._dynamo.reset()
        with (
            torch._dynamo.config.patch(allow_rnn=in_graph),
            torch.set_grad_enabled(not in_graph or kind == "gru"),
        ):
            compiled = torch.compile(run, backend="aot_eager", fullgraph=in_graph)
            found = flat(compiled(x))
            if found[0].requires_grad:
                module.zero_grad()
                found[0].float().square().sum().backward()
                assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
        assert [t.dtype for t in found] == [t.dtype for t in truth]
        for got, true in zip(found, truth, strict=True):
            torch.testing.assert_close(got, true, rtol=0, atol=0.02)


@pytest.mark.heavy
@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda make: make.__name__)
def test_a_compiled_loop_of_cells(make: Callable[..., nn.Module], autocast: Callable[..., Autocast]) -> None:
    torch.manual_seed(0)
    module = make(IN, WIDTH)
    x = torch.randn(3, BATCH, IN)
    region = autocast(torch.bfloat16, True)

    def loop(x: Tensor) -> list[Tensor]:
        state, seen = None, []
        with torch.autocast("cpu", torch.bfloat16):
            for step in x:
                state = module(step, state)
                seen += flat(state)
        return seen

    truth = region(loop, x)
    torch._dynamo.reset()
    found = torch.compile(loop, backend="aot_eager", fullgraph=True)(x)
    for got, true in zip(found, truth, strict=True):
        assert got.dtype is true.dtype is torch.float32
        torch.testing.assert_close(got, true, rtol=0, atol=0.02)
    found[-1].sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # PyTorch's own forward mode
@pytest.mark.parametrize("kind", KINDS)
def test_torch_func_and_higher_derivatives(kind: str) -> None:
    module = Row(kind, {"num_layers": 2, "bidirectional": True}).module()
    x = torch.randn(STEPS, BATCH, IN)

    def loss(x: Tensor, compute: torch.dtype = torch.float16) -> Tensor:
        return called(module, x, compute, True)[0].float().square().sum()

    leaf = x.clone().requires_grad_()
    (truth,) = torch.autograd.grad(loss(leaf), leaf)
    close = {"rtol": 0, "atol": 0.01 * float(truth.abs().max())}
    torch.testing.assert_close(torch.func.grad(loss)(x), truth, **close)
    one_by_one = torch.func.vmap(torch.func.grad(loss), in_dims=1, out_dims=1)(x.unsqueeze(2))
    torch.testing.assert_close(one_by_one.squeeze(2), truth, **close)
    along = torch.randn_like(x)
    _, slope = torch.func.jvp(loss, (x,), (along,))
    torch.testing.assert_close(slope, (truth * along).sum(), rtol=0.02, atol=0.02)

    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * along).sum(), leaf)
    wide = x.clone().requires_grad_()
    with _without_onednn():  # whose LSTM has no second derivative
        (true_first,) = torch.autograd.grad(module(wide)[0].square().sum(), wide, create_graph=True)
        (true_second,) = torch.autograd.grad((true_first * along).sum(), wide)
    assert off(second, true_second) < 0.05


def test_checkpointed() -> None:
    module = Row("lstm", {"num_layers": 2, "dropout": 0.5}).module()
    x = torch.randn(STEPS, BATCH, IN, requires_grad=True)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(run(x).float().square().sum(), [x, *module.parameters()]))

    def plain(x: Tensor) -> Tensor:
        return called(module, x, torch.bfloat16, True)[0]

    def again(x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
        return found

    for one, other in zip(gradients(plain), gradients(again), strict=True):
        assert torch.equal(one, other)


def test_the_page_runs() -> None:
    """`docs/recurrent.md`, block after block."""
    page = (Path(__file__).parents[1] / "docs" / "recurrent.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    with torch.random.fork_rng():
        exec("\n".join(blocks), {})
