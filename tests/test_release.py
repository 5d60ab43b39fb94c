"""Gradient release: the same bits as a step after backward, no hook left behind, one gradient alive at a time.

First `GradientRelease` alone, then `MixedPrecision(release_gradients=True)`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from alive import bytes_alive
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.optimizers import SGD, AdamW, Lion
from mezzo.pytorch.training.release import GradientRelease
from training_steps import (  # noqa: F401
    INF,
    batch,
    everything,
    network,
    nobody_owns_anything,
    peak_bytes,
    run,
    same,
    who_decides,
)


class Plain(nn.Module):
    """Two layers and a head; the second is frozen in `Frozen`, the head is the embedding in `Tied`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(x)))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Twice(Plain):
    def inner(self, x: Tensor) -> Tensor:
        return self.first(torch.tanh(self.first(super().inner(x))))


class Dropped(Plain):
    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().inner(x), 0.3)


class Checkpointed(Plain):
    def inner(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return nn.functional.dropout(super(Checkpointed, self).inner(x), 0.3)

        y: Tensor = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
        return y


MODELS: dict[str, Callable[[], Plain]] = {
    kind.__name__: kind for kind in (Plain, Tied, Frozen, Twice, Dropped, Checkpointed)
}
OPTIMIZERS: dict[str, Callable[[Any], FusedOptimizer]] = {
    "AdamW": lambda params: AdamW(params, 1e-2),
    "AdamW, split": lambda params: AdamW(params, 1e-2, masters="split"),
    "AdamW, lean": lambda params: AdamW(params, 1e-2, masters="split8", state="int8"),
    "SGD": lambda params: SGD(params, 0.1, momentum=0.9),
    "Lion": lambda params: Lion(params, 1e-3, masters="none", state="bf16"),
}


class Training:
    """A model, its optimizer and its steps, released or not."""

    def __init__(self, kind: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[kind]()
        if optimizer not in ("AdamW", "SGD"):
            self.model.bfloat16()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.release = GradientRelease(self.optimizer)
        self.params = list(self.model.parameters())

    def loss(self, step: int, micro: int = 0) -> Tensor:
        torch.manual_seed(1000 * step + micro)
        x = torch.randint(11, (6, 5))
        return nn.functional.cross_entropy(self.model(x).flatten(0, 1).float(), x.roll(1).flatten())

    def released(
        self, loss: Tensor, seed: Tensor | None = None, **how: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        return self.release.backward(loss, seed, self.params, **how)

    def plain(
        self,
        loss: Tensor,
        seed: Tensor | None = None,
        multiplier: Tensor | None = None,
        clip_norm: float | None = None,
        check: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The naive code."""
        torch.autograd.backward(loss, seed)
        total = sum_of_squares([p.grad for p in self.params if p.grad is not None])
        norm = total.sqrt() if multiplier is None else total.sqrt() * multiplier
        if clip_norm is not None:
            factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            multiplier = (factor if multiplier is None else factor * multiplier).float()
        found = 1.0 - total.isfinite().float()
        if not (check and bool(found)):
            self.optimizer.step(multiplier=multiplier)
        self.optimizer.zero_grad()
        return found, norm.float()

    def bits(self) -> list[Any]:
        """Every byte of the model and of the optimizer's state."""
        tensors = [*self.params]
        for param in self.params:
            tensors += [value for _, value in sorted(self.optimizer.state[param].items())]
        return [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in tensors]

    def hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in self.params)


HOW: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipped": {"clip_norm": 0.05},
    "not clipped": {"clip_norm": 1e6},
    "checked": {"check": True, "multiplier": torch.tensor(2.0**-10)},
    "checked and clipped": {"check": True, "clip_norm": 0.05, "multiplier": torch.tensor(2.0**-10)},
    "unscaled": {"multiplier": torch.tensor(2.0**-10)},
}


ROWS = {(kind, "AdamW") for kind in MODELS} | {("Tied", optimizer) for optimizer in OPTIMIZERS}


@pytest.mark.parametrize(("kind", "optimizer"), sorted(ROWS))
@pytest.mark.parametrize("how", sorted(HOW))
def test_it_is_the_step_after_backward_to_the_bit(kind: str, optimizer: str, how: str) -> None:
    ours, naive = Training(kind, optimizer), Training(kind, optimizer)
    before = ours.bits()
    seed = torch.tensor(2.0**10) if "multiplier" in HOW[how] else None
    for step in range(4):
        found, norm = ours.released(ours.loss(step), seed, **HOW[how])
        naive_found, naive_norm = naive.plain(naive.loss(step), seed, **HOW[how])
        if found is not None:
            assert found == naive_found == 0
        if norm is not None:
            assert torch.equal(norm, naive_norm)
        assert (found is None, norm is None) == (
            not how.startswith("checked"),
            how in ("as it is", "unscaled"),
        )
        assert all(param.grad is None for param in ours.params)
    assert ours.bits() == naive.bits() != before
    assert ours.hooks() == 0
    assert torch.equal(ours.model.unused, torch.ones(3))


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_overflowed_changes_no_byte(optimizer: str, bad: float) -> None:
    ours = Training("Tied", optimizer)
    ours.released(ours.loss(0), check=True)
    before = ours.bits()
    found, norm = ours.released(ours.loss(1), torch.tensor(bad), check=True, clip_norm=1.0)
    assert ours.bits() == before
    assert float(found) == 1  # type: ignore[arg-type]
    assert norm is not None
    assert not math.isfinite(float(norm))
    assert all(param.grad is None for param in ours.params)
    assert ours.hooks() == 0
    ours.released(ours.loss(1), check=True)
    assert ours.bits() != before


@pytest.mark.parametrize("how", sorted(HOW))
def test_what_earlier_losses_have_left_is_part_of_the_step(how: str) -> None:
    ours, naive = Training("Tied", "AdamW"), Training("Tied", "AdamW")
    for step in range(3):
        for training in (ours, naive):
            training.loss(step, micro=1).backward()
            training.model.unused.grad = torch.full((3,), 0.5)  # of a loss that only this one reached
        ours.released(ours.loss(step), **HOW[how])
        naive.plain(naive.loss(step), **HOW[how])
    assert ours.bits() == naive.bits()
    assert not torch.equal(ours.model.unused, torch.ones(3))
    assert all(param.grad is None for param in ours.params)


@pytest.mark.parametrize(
    ("how", "seed", "runs"),
    [
        ("as it is", 1.0, 1),
        ("unscaled", 1.0, 1),
        ("clipped", 1.0, 2),
        ("checked", 1.0, 2),
        ("checked", math.inf, 1),
    ],
)
def test_backward_runs_as_often_as_it_must(how: str, seed: float, runs: int) -> None:
    ours = Training("Plain", "SGD")
    loss, seen = ours.loss(0), []
    loss.register_hook(seen.append)
    ours.released(loss, torch.tensor(seed), **HOW[how])
    assert len(seen) == runs


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("how", sorted(HOW))
def test_an_exception_within_backward_leaves_no_hook(how: str) -> None:
    ours = Training("Plain", "AdamW")
    x = torch.randint(11, (6, 5))
    loss = ours.model.head(Broken.apply(ours.model.inner(ours.model.embedding(x)))).square().mean()
    with pytest.raises(RuntimeError, match="out of memory, say"):
        ours.released(loss, **HOW[how])
    assert ours.hooks() == 0


@pytest.mark.parametrize("how", ["as it is", "clipped"])
def test_a_loss_of_another_model_is_refused(how: str) -> None:
    ours, other = Training("Plain", "SGD"), Training("Plain", "SGD")
    before = ours.bits()
    with pytest.raises(UsageError, match="depends on no parameter of this optimizer"):
        ours.released(other.loss(0), **HOW[how])
    assert ours.bits() == before
    assert ours.hooks() == 0


MODES = {
    "fp32": ("bf16", {"state": None}),
    "split": ("bf16", {"masters": "split"}),
    "split8 int8": ("bf16", {"masters": "split8", "state": "int8"}),
    "masters fp16": ("fp16", {"masters": "fp32"}),
    "fp16": ("fp16", {}),
}


def made(mode: str, *, release: bool = True, model: nn.Module | None = None, **arguments: Any) -> Any:
    precision, modes = MODES[mode]
    model = network() if model is None else model
    return mezzo.MixedPrecision(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        precision,
        release_gradients=release,
        **(modes | arguments),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_the_step_after_backward(
    mode: str, clip_norm: float | None, accumulate: int, decides: str
) -> None:
    """With overflows in between: same weights, states, scales and buffers to the last bit."""
    factors = [1.0, 1.0, INF, 1.0, 1.0, 1.0] if MODES[mode][0] == "fp16" else [1.0] * 6
    scale = mezzo.DynamicLossScale(init=2.0**8) if MODES[mode][0] == "fp16" else None
    arguments = {"clip_norm": clip_norm, "accumulate": accumulate, "loss_scale": scale}
    told = {}
    trained = {}
    for release in (False, True):
        trained[release] = mp = made(mode, release=release, **arguments)
        told[release] = [run(mp, index, factor) for index, factor in enumerate(factors)]
    left, right = trained[False], trained[True]
    # torch's AdamW over FP32 weights stays torch's own without release.
    if mode in ("fp32", "fp16"):
        left, right = [[p.detach() for p in mp.model.parameters()] for mp in (left, right)]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(left, right))
    else:
        assert same(everything(left), everything(right))
    assert [r.skipped for r in told[True]] == [r.skipped for r in told[False]]
    assert trained[True].loss_scale == trained[False].loss_scale
    assert all(p.grad is None for p in trained[True].model.parameters())
    if clip_norm is not None:
        norms = [[r.grad_norm for r in told[release] if r.stepped] for release in (True, False)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_peak_is_weights_states_and_the_largest_gradient(clip_norm: float | None) -> None:
    """Lean AdamW: 2 + 1 + 2 * (1 + 2/64) bytes, and 2 more of one layer in eight; kept gradients: 2 of all."""
    peaks = {}
    for release in (True, False):
        others = bytes_alive()
        layers = [nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh()) for _ in range(8)]
        mp = made("split8 int8", model=nn.Sequential(*layers), release=release, clip_norm=clip_norm)
        peaks[release] = peak_bytes(mp, torch.randn(2, 256)) - others / (8 * 256**2)
        mp.close()
        del mp, layers
        gc.collect()
    assert peaks[True] <= 5.07 + 2 / 8 + 0.25
    assert peaks[False] >= 7.06


def test_two_networks() -> None:
    generator, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mp_g, mp_d = made("split", model=generator), made("split", model=judge, clip_norm=1.0)
    noise = torch.randn(5, 3)
    for mp, other in ((mp_d, generator), (mp_g, judge)):
        with mp.autocast():
            loss = judge(generator(noise)).float().mean()
        before = [p.detach().clone() for p in other.parameters()]
        assert mp.step(loss).stepped
        assert same([p.detach() for p in other.parameters()], before)


def test_graphs_that_can_not_be_released_are_refused_and_nothing_moves() -> None:
    model = network()
    mp = made("split", model=model)
    run(mp)
    before = everything(mp)
    with mp.autocast():
        loss = model(batch()[0]).float().mean()
    with pytest.raises(UsageError, match="retain_graph"):
        mp.step(loss, retain_graph=True)
    assert same(everything(mp)[: len(list(model.parameters()))], before[: len(list(model.parameters()))])
    again = made("split")
    x = batch()[0].requires_grad_()
    with again.autocast():
        loss = checkpoint(again.model, x, use_reentrant=True).float().mean()
    before = [p.detach().clone() for p in again.model.parameters()]
    with pytest.raises(UsageError, match="use_reentrant=False"):
        again.step(loss)
    assert same([p.detach() for p in again.model.parameters()], before)
    kept = made("split")
    with kept.autocast():
        loss = checkpoint(kept.model, batch()[0], use_reentrant=False).float().mean()
    assert kept.step(loss).stepped


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_sparse_gradient_is_refused_by_name(clip_norm: float | None) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    mp = made("split", model=model, clip_norm=clip_norm)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="sparse"):
        mp.step(model(torch.tensor([1, 1, 3])).float().sum())
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
