"""MixedPrecision(release_gradients=True): the same bits as a step after backward, with one gradient alive at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from alive import bytes_alive
from mezzo.core.errors import UsageError
from training_steps import INF, NAN, Broken, batch, everything, network, peak_bytes, run, same

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("bf16", {}),
    "split": ("bf16", {"masters": "split"}),
    "split8 int8": ("bf16", {"masters": "split8", "state": "int8"}),
    "masters fp16": ("fp16", {"masters": "fp32"}),
    "fp16": ("fp16", {}),
}


def made(mode: str, *, release: bool = True, model: nn.Module | None = None, **arguments: Any) -> Any:
    precision, modes = MODES[mode]
    model = network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return mezzo.MixedPrecision(model, optimizer, precision, release_gradients=release, **(modes | arguments))


class Shared(nn.Module):
    """A tied weight, a layer that is used twice, a frozen one, an unused one, and dropout; perhaps checkpointed."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(11, 8)
        self.twice, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)
        self._checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.twice(torch.tanh(self.frozen(self.twice(x)))), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x.abs() * 5).long().clamp(max=10))
        x = checkpoint(self.inner, x, use_reentrant=False) if self._checkpointed else self.inner(x)
        return self.head(x).mean(1)


MODELS = {"plain": network, "shared": lambda: Shared(False), "checkpointed": lambda: Shared(True)}


def hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize(("mode", "kind"), [(m, "plain") for m in MODES] + [("split", k) for k in MODELS])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_the_usual_step(mode: str, kind: str, clip_norm: Any, accumulate: int, decides: str) -> None:
    """With overflows in between: same weights, states, scales and buffers to the last bit."""
    fp16 = MODES[mode][0] == "fp16"
    scale = mezzo.DynamicLossScale(init=2.0**8) if fp16 else None
    sides, results = [], []
    for release in (False, True):
        arguments = {"clip_norm": clip_norm, "accumulate": accumulate, "loss_scale": scale}
        mp = made(mode, release=release, model=MODELS[kind](), **arguments)
        results.append([])
        for index in range(6):
            torch.manual_seed(index)
            results[-1].append(run(mp, index, INF if fp16 and index == 2 else 1.0))
        sides.append(mp)
    after, released = sides
    if mode in ("fp32", "fp16"):  # torch's AdamW over FP32 weights stays torch's own without release
        pairs = zip(after.model.parameters(), released.model.parameters())
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
    else:
        assert same(everything(after), everything(released))
    assert [r.skipped for r in results[0]] == [r.skipped for r in results[1]]
    assert after.loss_scale == released.loss_scale
    assert all(p.grad is None for p in released.model.parameters())
    assert hooks(released.model) == 0
    if clip_norm is not None:
        norms = [[r.grad_norm for r in told if r.stepped] for told in results]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:MixedPrecision. the parameters had gradients")
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_gradients_that_are_there_already_are_part_of_the_step(clip_norm: float | None) -> None:
    sides = []
    for release in (False, True):
        mp = made("split", release=release, clip_norm=clip_norm)
        for p in mp.model.parameters():
            p.grad = torch.full_like(p, 0.5)
        sides.append([run(mp).grad_norm, *everything(mp)])
    assert sides[0][0] == pytest.approx(sides[1][0])
    assert same(sides[0][1:], sides[1][1:])


@pytest.mark.parametrize(
    ("mode", "clip_norm", "factor", "runs"),
    [("fp32", None, 1.0, 1), ("fp32", 1.0, 1.0, 2), ("fp16", None, 1.0, 2), ("fp16", 1.0, NAN, 1)],
)
def test_when_backward_runs_twice(mode: str, clip_norm: float | None, factor: float, runs: int) -> None:
    mp = made(mode, clip_norm=clip_norm, trace=False)
    seen: list[Tensor] = []
    mp.model[3].register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0]))
    run(mp, factor=factor)
    assert len(seen) == runs


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_exception_within_backward_leaves_no_hook(clip_norm: float | None) -> None:
    mp = made("split", clip_norm=clip_norm)
    with mp.autocast():
        loss = mp.model[3](Broken.apply(torch.tanh(mp.model[0](batch()[0])))).float().mean()
    with pytest.raises(RuntimeError, match="out of memory"):
        mp.step(loss)
    assert hooks(mp.model) == 0
    assert run(mp).stepped


@pytest.mark.heavy
@pytest.mark.usefixtures("tensors_only")
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


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("row", ["retained graph", "reentrant", "sparse", "another model"])
def test_losses_that_can_not_be_released_change_nothing(row: str, clip_norm: float | None) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True)) if row == "sparse" else network()
    mp = made("split", model=model, clip_norm=clip_norm)
    x = batch()[0].requires_grad_()
    with mp.autocast():
        if row == "sparse":
            loss, message = model(torch.tensor([1, 1, 3])).float().sum(), "sparse"
        elif row == "reentrant":
            loss, message = checkpoint(model, x, use_reentrant=True).float().mean(), "use_reentrant=False"
        elif row == "another model":
            loss, message = network()(x).float().mean(), "no parameter of this optimizer"
        else:
            loss, message = model(x).float().mean(), "retain_graph"
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=message):
        mp.step(loss, retain_graph=row == "retained graph")
    assert same([p.detach() for p in model.parameters()], before)
    assert all(p.grad is None for p in model.parameters())
