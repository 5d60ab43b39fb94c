"""What the optimizer tests share: every optimizer as a row, models with awkward shapes, gradients, and states compared
to the bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.optim import SGD, Adam, AdamW, FusedOptimizer

STATES = ("fp32", "bf16", "int8")
MASTERS = ("fp32", "split", "split8", "none")
MODES = [(masters, state) for masters in MASTERS for state in STATES]

# Zero dimensions, one element, a last group of 64 that is short, more than one block of a kernel.
SHAPES = ((), (1,), (5, 13), (64,), (3, 65), (130, 257))


@dataclass(frozen=True)
class Rule:
    """An optimizer and its settings; torch's own of the same name."""

    name: str
    ours: type[FusedOptimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Iterable[Any], **modes: str) -> FusedOptimizer:
        return self.ours(params, **self.settings, **modes)  # type: ignore[call-arg]

    def torch(self, params: Iterable[Any], **how: bool) -> Optimizer:
        return self.ours.TORCH(params, **self.settings, **how)


RULES = [
    Rule("AdamW", AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    Rule("Adam", Adam, {"lr": 1e-2, "betas": (0.8, 0.99)}),
    Rule("Adam-L2", Adam, {"lr": 1e-2, "weight_decay": 0.05}),
    Rule("Adam-up", Adam, {"lr": 1e-2, "maximize": True}),
    Rule("SGD", SGD, {"lr": 0.05}),
    Rule("SGD-momentum", SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    Rule("SGD-nesterov", SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]
BY_NAME = {rule.name: rule for rule in RULES}


def parameters(dtype: Any = torch.bfloat16, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    """Parameters whose values bf16 holds, so that every format starts from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [nn.Parameter(value.to(dtype)) for value in made]


def one(*shape: int, dtype: torch.dtype = torch.bfloat16, value: float = 1.0) -> nn.Parameter:
    param = nn.Parameter(torch.full(shape, value, dtype=dtype))
    param.grad = torch.full(shape, 0.5, dtype=dtype)
    return param


def weights(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """bf16 gradients of one step, from 1e-4 to 10, with zeros."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = []
    for shape in shapes:
        size = torch.exp(torch.randn(shape, generator=generator) * 2 - 2)
        value = torch.randn(shape, generator=generator) * size
        made.append(torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, value).bfloat16())
    return made


def run(
    optimizer: Optimizer,
    params: Sequence[nn.Parameter],
    steps: Iterable[int],
    dtype: torch.dtype | None = None,
    each: Callable[[int], None] = lambda step: None,
) -> None:
    """Steps with `gradients`, as the weights' dtype takes them, or as `dtype`."""
    for step in steps:
        for param, grad in zip(params, gradients(step, [tuple(param.shape) for param in params])):
            param.grad = grad.to(dtype or param.dtype)
        each(step)
        optimizer.step()
        optimizer.zero_grad()


def saved_and_loaded(state: Any) -> Any:
    """What `torch.save` and `torch.load` make of it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's patterns, so that NaN equals NaN and -0 is not 0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()])


def everything(optimizer: Optimizer) -> list[Tensor]:
    """All that a step may change: weights and states, in order, as patterns."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found.append(bits(param).clone())
            entries = optimizer.state.get(param, {})
            found += [bits(value).clone() for value in entries.values() if isinstance(value, Tensor)]
    return found


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right):
        assert torch.equal(one, other)
