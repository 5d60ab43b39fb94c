"""Runs with bad batches, and the same runs without them, which a skipped step must equal.

A run is a word such as "gbg": good and bad steps, in order. Each good step has its own batch, so that "gbg" and "gg"
see the same data. The loss scale stands still: at another scale fp16 may round other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

INF = float("inf")

# A first step; several in a row and apart in the middle. Each is followed by a good one.
RUNS = ("bg", "gbbgbggbbbg")

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

# Without `capturable`, which torch refuses on a CPU, and `differentiable`, whose graph would outlive a step.
optim = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.1, maximize=True),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.01, foreach=False),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.05, foreach=False),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.05, foreach=True),
    "Adam amsgrad fused": lambda p: optim.Adam(p, lr=0.05, amsgrad=True, fused=True, maximize=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05, foreach=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.05, fused=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, t0=2, foreach=False),
    "Muon": lambda p: optim.Muon(p, lr=0.05),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05, decoupled_weight_decay=True, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05, foreach=False),
    "RMSprop centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9, foreach=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01, foreach=False),
    "SGD": lambda p: optim.SGD(p, lr=0.1, foreach=False),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD momentum fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "SparseAdam": lambda p: optim.SparseAdam(list(p), lr=0.05),
}
# A loop with a closure: under GradScaler and `mezzo run` only.
CLOSURES: dict[str, Make] = {
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
    "LBFGS strong Wolfe": lambda p: optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
}


class Words(nn.Module):
    """For an optimizer of sparse gradients; a bad batch makes its inner sums overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x[:, :1].abs().clamp(max=15).long() % 16)[:, 0]
        return rows * (x.sum() / x.shape[0])


def network(kind: str = "", *, statistics: bool = True) -> nn.Module:
    """A small network that the optimizer of this kind can train.

    Args:
        kind: a key of the tables above.
        statistics: whether it has running statistics.
    """
    torch.manual_seed(3)
    if kind == "SparseAdam":
        return Words()
    bias = kind != "Muon"  # which takes matrices only
    norm = nn.BatchNorm1d(8, affine=bias) if statistics else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8, bias=bias), norm, nn.Tanh(), nn.Linear(8, 2, bias=bias))


def batch(index: int, event: str) -> tuple[Tensor, Tensor]:
    """The batch of a good step, or one that no format can hold."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(16, 4, generator=generator)
    y = torch.randint(0, 2, (16,), generator=generator)
    return (x * INF if event == "b" else x), y


def batches(run: str) -> Iterable[tuple[Tensor, Tensor]]:
    """A run's batches: the n-th good one is the same in every run."""
    good = 0
    for event in run:
        yield batch(good, event)
        good += event == "g"


def same(left: Any, right: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal, the tensors bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        left, right = left.detach(), right.detach()
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def is_finite(tree: Any) -> bool:
    """Whether every tensor of the nest is."""
    if isinstance(tree, Tensor):
        return bool(tree.isfinite().all())
    if isinstance(tree, dict):
        tree = list(tree.values())
    return all(map(is_finite, tree)) if isinstance(tree, (list, tuple)) else True
