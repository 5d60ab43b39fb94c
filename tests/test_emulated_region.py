"""Emulated ops as a region reaches them: fp16 on a machine without it, under autograd, torch.func and compile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from mezzo.pytorch.kernels.emulated.packing import made_again
from mezzo.pytorch.memory import _StorageCounter

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _square(out: Tensor) -> Tensor:
    return out.float().square().sum()


ROWS: dict[str, tuple[Loss, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda w, x: _square(F.linear(x, w)), (3, 4), (6, 4)),
    "matmul": (lambda w, x: _square(x @ w), (4, 3), (6, 4)),
    "conv2d": (lambda w, x: _square(F.conv2d(x, w)), (4, 2, 3, 3), (5, 2, 8, 8)),
    "attention": (lambda q, k: _square(F.scaled_dot_product_attention(q, k, k)), (2, 2, 5, 8), (2, 2, 5, 8)),
}


def _region(loss: Loss) -> Loss:
    def within(weight: Tensor, x: Tensor) -> Tensor:
        with mezzo.autocast("fp16", "cpu"):
            return loss(weight, x)

    return within


def _eager(loss: Loss, weight: Tensor, x: Tensor) -> Tensor:
    leaf = weight.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, x), leaf)[0]


def _close(mine: Tensor, truth: Tensor) -> bool:
    return torch.allclose(mine, truth, rtol=0, atol=4e-3 * float(truth.abs().max()))


@pytest.mark.parametrize("op", ROWS)
def test_the_region_emulates(op: str) -> None:
    loss, weight_shape, x_shape = ROWS[op]
    weight, x = torch.randn(weight_shape), torch.randn(x_shape)
    low = weight.half().float(), x.half().float()
    with mezzo.autocast("fp16", "cpu"):
        assert torch.equal(loss(weight, x), loss(*low))
    assert _close(_eager(_region(loss), weight, x), _eager(loss, *low))


@pytest.mark.parametrize("op", ROWS)
def test_torch_func_inside_and_outside_the_region(op: str) -> None:
    loss, weight_shape, x_shape = ROWS[op]
    weight, x = torch.randn(weight_shape), torch.randn(x_shape)
    truth = _eager(_region(loss), weight, x)
    inside = torch.func.grad(_region(loss))(weight, x)
    with mezzo.autocast("fp16", "cpu"):
        outside = torch.func.grad(loss)(weight, x)
    assert inside.dtype == outside.dtype == torch.float32
    assert _close(inside, truth)
    assert _close(outside, truth)


@pytest.mark.heavy
@pytest.mark.parametrize("op", ROWS)
def test_compiled(op: str) -> None:
    loss, weight_shape, x_shape = ROWS[op]
    weight, x = torch.randn(weight_shape), torch.randn(x_shape)
    compiled = torch.compile(_region(loss), backend="aot_eager", fullgraph=True)
    assert _close(_eager(compiled, weight, x), _eager(_region(loss), weight, x))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("op", "kept"),
    [
        ("linear", [((6, 4), torch.float16), ((3, 4), None)]),
        ("conv2d", [((5, 2, 8, 8), torch.float16), ((4, 2, 3, 3), None)]),
        ("matmul", [((6, 4), torch.float16), ((4, 3), None)]),
    ],
)
def test_a_compiler_keeps_the_sixteen_bit_tensor(
    op: str, kept: list[tuple[tuple[int, ...], torch.dtype | None]]
) -> None:
    """And of a parameter the parameter (None), not its FP32 copy of 16-bit values."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    function, weight_shape, x_shape = {
        "linear": (F.linear, (3, 4), (6, 4)),
        "conv2d": (F.conv2d, (4, 2, 3, 3), (5, 2, 8, 8)),
        "matmul": (torch.matmul, (4, 3), (6, 4)),
    }[op]
    saved: list[tuple[tuple[int, ...], torch.dtype | None]] = []

    def forward(graph: torch.fx.GraphModule, _: object) -> Any:
        _, *others = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        for node in others:
            value = node.meta["val"]
            saved.append((tuple(value.shape), None if node.op == "placeholder" else value.dtype))
        return make_boxed_func(graph.forward)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(weight_shape))

        def forward(self, x: Tensor) -> Tensor:
            with mezzo.autocast("fp16", "cpu"):
                return function(x + 1, self.weight).float().sum()

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    layer, x = Layer(), torch.randn(x_shape, requires_grad=True)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    found = torch.autograd.grad(compiled(x), (layer.weight, x))
    for mine, truth in zip(found, torch.autograd.grad(layer(x), (layer.weight, x)), strict=True):
        assert torch.equal(mine, truth)
    assert sorted(saved, key=str) == sorted(kept, key=str)


def test_what_a_recording_says_of_other_ops_is_left_as_it_was() -> None:
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    with made_again():
        assert "recompute" not in traceback.current_meta  # nothing records
    with traceback.preserve_node_meta():
        with made_again():
            assert traceback.current_meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
        assert "recompute" not in traceback.current_meta
        traceback.current_meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with pytest.raises(RuntimeError, match="boom"), made_again():
            raise RuntimeError("boom")
        assert traceback.current_meta.pop("recompute") is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_modules_train(kind: Callable[..., nn.Module]) -> None:
    module = kind(4, 6)
    x = torch.randn((3, 4) if "Cell" in kind.__name__ else (5, 3, 4), requires_grad=True)
    with mezzo.autocast("fp16", "cpu"):
        out = module(x)
    first = out[0] if isinstance(out, tuple) else out
    assert first.dtype == torch.float16
    _square(first).backward()
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


def test_packed_sequences() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))
    with mezzo.autocast("fp16", "cpu"):
        out, _ = nn.LSTM(4, 6)(packed)
    assert out.data.dtype == torch.float16
    out.data.float().sum().backward()


def test_gradient_penalty() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 1))
    x = torch.randn(3, 2, 8, requires_grad=True)
    with mezzo.autocast("fp16", "cpu"):
        score = model(x).float().sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (slope.norm() - 1).square().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "weight" in name)


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
