"""What the tests of other libraries' trainers share: small models, batches, an overflow, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

OVERFLOW = 1e30
"""Times an input, it overflows in fp16."""

# Of Transformers' TrainingArguments.
USUAL: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 8,
    "logging_steps": 2,
    "report_to": [],
}
USUAL |= {"disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}


def network(outputs: int = 3) -> nn.Sequential:
    """Eight inputs, with BatchNorm; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=drawn), torch.randint(3, (16,), generator=drawn)) for _ in range(count)
    ]


def llama(vocabulary: int = 64, dtype: torch.dtype = torch.float32) -> Any:
    """A language model whose weights are bf16 numbers, in any format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **size)).to(torch.bfloat16).to(dtype)


def stepped(mp: Any, compute: Callable[..., Tensor], *given: Any) -> Any:
    """The result of a MixedPrecision's step on a loss that is computed in its context."""
    with mp.autocast():
        loss = compute(*given)
    return mp.step(loss)


def logged(trainer: Any, name: str = "loss") -> list[Any]:
    """One entry of each row of training in a Transformers Trainer's log."""
    return [row.get(name) for row in trainer.state.log_history if "loss" in row]


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@contextmanager
def refused(error: type[Exception], *parts: str) -> Iterator[None]:
    """The block raises the error, and its message has these parts."""
    with pytest.raises(error) as raised:
        yield
    assert [part for part in parts if part not in str(raised.value)] == []
