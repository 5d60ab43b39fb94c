"""Lookups in 16-bit tables: PyTorch's forward, and a gradient that is summed in FP32 and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.pytorch.autocast.plan import plan
from mezzo.pytorch.memory import PeakTensorBytes

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, COLUMNS = 5, 8


def gradient_and_truth(fmt: str, call: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The gradient of a 16-bit table in a context, PyTorch's gradient, and the FP64 truth."""
    torch.manual_seed(0)
    table = torch.randn(ROWS, COLUMNS).to(FORMATS[fmt])
    low, plain, wide = (t.clone().requires_grad_() for t in (table, table, table.double()))
    with mezzo.autocast(fmt, "cpu"):
        out = call(*args, low, **kwargs)
    assert out.dtype is FORMATS[fmt]
    assert torch.equal(out, call(*args, table.float(), **kwargs).to(out.dtype))
    seed = (torch.randn(out.shape) + 0.5).to(out.dtype)
    out.backward(seed)
    call(*args, plain, **kwargs).backward(seed)
    call(*args, wide, **kwargs).backward(seed.double())
    assert low.grad.dtype is FORMATS[fmt]
    return [t.grad for t in (low, plain, wide) if t.grad is not None]


def off(grad: Tensor, truth: Tensor) -> float:
    return float((grad.double() - truth).norm() / truth.norm())


LOOKUPS: list[tuple[Any, dict[str, Any]]] = [
    (F.embedding, {}),
    (F.embedding, {"padding_idx": -1}),
    (F.embedding, {"scale_grad_by_freq": True}),
    (F.embedding_bag, {"mode": "sum"}),
    (F.embedding_bag, {"mode": "mean", "padding_idx": -1}),
    (F.embedding_bag, {"mode": "max", "padding_idx": 3}),
    (F.embedding_bag, {"mode": "sum", "scale_grad_by_freq": True}),
    (F.embedding_bag, {"mode": "mean", "include_last_offset": True, "offsets": torch.arange(0, 2049, 8)}),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("call", "kwargs"), LOOKUPS)
def test_a_gradient_is_rounded_once(call: Any, kwargs: dict[str, Any], fmt: str) -> None:
    shape = (2048,) if "offsets" in kwargs else (256, 8)
    tokens = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1))
    grad, native, truth = gradient_and_truth(fmt, call, tokens, **kwargs)
    assert off(grad, truth) < 1.05 * off(truth.to(FORMATS[fmt]), truth) + 1e-6
    assert off(native, truth) > 1.5 * off(grad, truth), "PyTorch sums in FP32 now: the kernel may go"


@pytest.mark.parametrize("padding", [None, 3, 7], ids=["no padding", "padding", "padding of no bag"])
def test_bags_read_and_copy_only_the_rows_that_occur(padding: int | None) -> None:
    table = torch.randn(1 << 14, 64).bfloat16().requires_grad_()
    indices, offsets = torch.tensor([5, 3, 5, 16_000]), torch.tensor([0, 0, 2])  # the first bag is empty
    peak = PeakTensorBytes()
    peak.start()
    held = peak.stop().peak_bytes
    for mode in range(3):  # sums, means, maxima
        rest = (offsets, False, mode, False, None, False, padding)
        peak.start()
        with mezzo.autocast("bf16", "cpu"):
            out, *others = torch.embedding_bag(table, indices, *rest)
        assert peak.stop().peak_bytes - held < table.nbytes / 50
        wide, *expected = torch.embedding_bag(table.detach().float(), indices, *rest)
        assert torch.equal(out, wide.bfloat16())
        if mode == 2:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, expected))
        peak.start()
        (grad,) = torch.autograd.grad(out.float().sum(), table)
        assert peak.stop().peak_bytes - held < 1.1 * table.nbytes
        del out, others, wide, grad


def test_weights_of_a_bag_s_samples_are_differentiated_too() -> None:
    tokens = torch.randint(0, ROWS, (256, 8), generator=torch.Generator().manual_seed(1))
    given = [torch.randn(ROWS, COLUMNS).bfloat16(), torch.rand(256, 8).bfloat16()]
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        table, samples = leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in given]
        with mezzo.autocast("bf16", "cpu", enabled=dtype is torch.bfloat16):
            out = F.embedding_bag(tokens, table, mode="sum", per_sample_weights=samples)
        assert out.dtype is dtype
        found.append(torch.autograd.grad(out.sum(), leaves))
    for low, exact in zip(*found):
        assert off(low, exact) < 1.05 * off(exact.bfloat16(), exact) + 1e-6


def test_what_is_left_to_pytorch() -> None:
    tokens = torch.tensor([1, 1, 3])
    low = nn.Embedding(5, 2, dtype=torch.bfloat16)
    sparse = nn.Embedding(5, 2, sparse=True, dtype=torch.bfloat16)
    wide = [nn.Embedding(5, 2, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    with mezzo.autocast("bf16", "cpu"):
        assert all("EmbeddingBackward0" in str(table(tokens).grad_fn) for table in (*wide, sparse))
        assert "_Embedding" in str(low(tokens).grad_fn)
        low(torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert torch.equal(low.weight.grad, torch.zeros(5, 2, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert "EmbeddingBackward0" in str(low(tokens).grad_fn)
    assert plan(mezzo.policy("bf16"), "cuda")["embedding"].how == "pytorch"
