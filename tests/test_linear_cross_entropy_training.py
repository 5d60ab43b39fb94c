"""LinearCrossEntropy as a model's head: in every kind of training, next to the layer and the loss that it replaces."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.nn import LinearCrossEntropy
from mezzo.pytorch import linear_cross_entropy as module

VOCABULARY, WIDTH = 31, 16
TOKENS = torch.arange(40).view(4, 10) * 7 % VOCABULARY


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER", 0)
    monkeypatch.setattr(module, "FEWEST", 7)
    monkeypatch.setattr(module, "_BLOCK", 5 * WIDTH)


class Language(nn.Module):
    """Tokens and the next ones -> the loss; the head's weight is the embedding's."""

    def __init__(self, fused: bool, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = (
            LinearCrossEntropy(WIDTH, VOCABULARY) if fused else nn.Linear(WIDTH, VOCABULARY, bias=False)
        )
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        hidden = self.mix(self.token(tokens)).tanh()
        if isinstance(self.head, LinearCrossEntropy):
            out: Tensor = self.head(hidden, following)
            return out
        return F.cross_entropy(self.head(hidden).float().flatten(0, -2), following.flatten())


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [((TOKENS + step) % VOCABULARY, (TOKENS + step + 3) % VOCABULARY) for step in range(steps)]


Train = Callable[[Language], list[float]]


def short(precision: str, **kwargs: Any) -> Train:
    def train(model: Language) -> list[float]:
        mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.02), precision, **kwargs)
        losses = []
        for batch in batches(12):
            with mp.autocast():
                loss = model(*batch)
            losses.append(float(mp.step(loss).loss))
        mp.close()
        return losses

    return train


def loop(region: Callable[[], Any], scaler: Callable[[], Any] | None = None) -> Train:
    def train(model: Language) -> list[float]:
        optimizer, scaling = torch.optim.AdamW(model.parameters(), lr=0.02), scaler and scaler()
        losses = []
        for batch in batches(12):
            with region():
                loss = model(*batch)
            (loss if scaling is None else scaling.scale(loss)).backward()
            if scaling is None:
                optimizer.step()
            else:
                scaling.step(optimizer)
                scaling.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return train


TRAININGS: dict[str, Train] = {
    "fp32": loop(lambda: torch.autocast("cpu", enabled=False)),
    "torch.autocast bf16": loop(lambda: torch.autocast("cpu", torch.bfloat16)),
    "mezzo.GradScaler fp16": loop(lambda: mezzo.autocast("fp16", "cpu"), lambda: mezzo.GradScaler("cpu")),
    "split, accumulate": short("bf16", masters="split", accumulate=2),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TRAININGS)
def test_trains_as_the_layer_and_the_loss_do(name: str, tied: bool) -> None:
    fused, plain = (TRAININGS[name](Language(kind, tied)) for kind in (True, False))
    assert fused[-1] < fused[0] - 0.3
    assert fused == pytest.approx(plain, rel=1e-5 if name == "fp32" else 1e-2)


def test_a_linear_layer_to_everyone_else() -> None:
    weights = torch.rand(VOCABULARY)
    torch.manual_seed(3)
    head = LinearCrossEntropy(WIDTH, VOCABULARY, bias=True, weight=weights, label_smoothing=0.1)
    torch.manual_seed(3)
    linear = nn.Linear(WIDTH, VOCABULARY)
    assert isinstance(head, nn.Linear)
    assert list(head.state_dict()) == ["weight", "bias"]
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    head.load_state_dict(nn.Linear(WIDTH, VOCABULARY).state_dict())
    hidden, target = torch.randn(3, 5, WIDTH), torch.randint(VOCABULARY, (3, 5))
    assert torch.equal(head.logits(hidden), F.linear(hidden, head.weight, head.bias))
    loss = nn.CrossEntropyLoss(head.class_weight, label_smoothing=0.1)
    expected = loss(head.logits(hidden).flatten(0, 1), target.flatten())
    for copied in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.eval()):
        torch.testing.assert_close(copied(hidden, target), expected)
    with pytest.raises(UsageError, match=r"head.logits\(hidden\)"):
        head(hidden)
    with pytest.raises(UsageError, match=r"\[31\]"):
        LinearCrossEntropy(WIDTH, VOCABULARY, weight=torch.rand(3))
