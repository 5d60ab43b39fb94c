"""Emulated ops as a region reaches them: fp16 on a machine without it, under autograd, torch.func and compile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_modules_train(kind: Callable[..., nn.Module]) -> None:
    module = kind(4, 6)
    x = torch.randn((3, 4) if "Cell" in kind.__name__ else (5, 3, 4), requires_grad=True)
    with mezzo.autocast("fp16", "cpu"):
        out = module(x)
    first = out[0] if isinstance(out, tuple) else out
    # A cell's output is its state, which stays FP32.
    assert first.dtype == (torch.float32 if "Cell" in kind.__name__ else torch.float16)
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
