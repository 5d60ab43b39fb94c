"""Gradient release: the same bits as a step after backward, no hook left behind, one gradient alive at a time."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alive import bytes_alive
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.optimizers import SGD, AdamW, Lion
from mezzo.pytorch.training.release import GradientRelease


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


@pytest.mark.parametrize("how", ["as it is", "checked"])
def test_an_exception_of_the_optimizers_comes_out_and_leaves_no_hook(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Training("Plain", "AdamW")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise UsageError("not this one")

    monkeypatch.setattr(ours.optimizer, "step_parameters", fail)
    with pytest.raises(UsageError, match="not this one"):
        ours.released(ours.loss(0), **HOW[how])
    assert ours.hooks() == 0


@pytest.mark.parametrize("how", ["as it is", "clipped"])
def test_a_loss_of_another_model_is_refused(how: str) -> None:
    ours, other = Training("Plain", "SGD"), Training("Plain", "SGD")
    before = ours.bits()
    with pytest.raises(UsageError, match="depends on no parameter of this optimizer"):
        ours.released(other.loss(0), **HOW[how])
    assert ours.bits() == before
    assert ours.hooks() == 0


def test_a_reentrant_checkpoint_is_refused() -> None:
    ours = Training("Plain", "SGD")
    before = ours.bits()
    x = torch.randn(3, 8, requires_grad=True)
    loss = checkpoint(ours.model.inner, x, use_reentrant=True).sum()
    with pytest.raises(UsageError, match="Use use_reentrant=False"):
        ours.released(loss)
    assert ours.bits() == before


def test_a_model_whose_gradients_are_reduced_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reducing(nn.Linear):
        pass

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Reducing)
    GradientRelease.check_model(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(UsageError, match=r"1 is in DistributedDataParallel.*fully_shard"):
        GradientRelease.check_model(nn.Sequential(nn.Linear(1, 1), Reducing(1, 1)))


def test_a_scheduler_does_not_miss_the_step() -> None:
    ours = Training("Plain", "SGD")
    scheduler = torch.optim.lr_scheduler.StepLR(ours.optimizer, 1)
    ours.released(ours.loss(0))
    scheduler.step()  # its warning would be an error here
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_the_first_pass_sees_the_very_gradients_of_the_second() -> None:
    ours = Training("Checkpointed", "SGD")
    loss = ours.loss(0)
    passes: list[list[Tensor]] = [[], []]
    for seen, keep in zip(passes, (True, False)):
        torch.autograd.backward(loss, retain_graph=keep)
        seen += [p.grad.clone() for p in ours.params if p.grad is not None]
        ours.optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*passes))


WIDTH, DEPTH, BATCH = 512, 6, 4


def peak(step: Callable[[nn.Module, FusedOptimizer, Tensor], None]) -> tuple[int, int]:
    """Peak bytes of a training step, and the bytes of one layer's gradient."""
    others = bytes_alive()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    optimizer = SGD(model.parameters(), 1e-3)
    x = torch.randn(BATCH, WIDTH)
    gc.collect()
    counter = PeakTensorBytes()
    held = sum(p.nbytes for p in model.parameters())
    for _ in range(2):
        counter.start()
        step(model, optimizer, x)
        record = counter.stop()
    return record.peak_bytes - others - held, WIDTH * WIDTH * 4


def peak_of(how: dict[str, Any] | None) -> tuple[int, int]:
    def step(model: nn.Module, optimizer: FusedOptimizer, x: Tensor) -> None:
        loss = model(x).square().mean()
        if how is None:
            loss.backward()
            optimizer.step(
                multiplier=torch.ones(())
            )  # for the kernel's blocks, of which the released one has as many
            optimizer.zero_grad()
        else:
            GradientRelease(optimizer).backward(loss, None, list(model.parameters()), **how)

    return peak(step)


@pytest.mark.heavy
def test_one_gradient_is_alive_at_a_time() -> None:
    alone, layer = peak_of(None)
    assert alone >= DEPTH * layer
    activations = (
        2 * (DEPTH + 2) * BATCH * WIDTH * 4
    )  # saved for backward, and the gradients of the last of them
    for how in ("as it is", "clipped", "checked and clipped"):
        released, _ = peak_of(HOW[how])
        assert released <= alone - (DEPTH - 1) * layer + activations, how
        assert released < 2 * layer


def test_a_copy_of_a_released_training_goes_on_alike() -> None:
    ours = Training("Plain", "AdamW, split")
    ours.released(ours.loss(0))
    other = copy.deepcopy(ours)
    for training in (ours, other):
        training.released(training.loss(1), clip_norm=0.1)
    assert ours.bits() == other.bits()
