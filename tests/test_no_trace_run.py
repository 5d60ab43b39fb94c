"""A skipped step of `mezzo run` leaves no trace: a script with bad batches ends where it ends without them, to the bit.

One row a family of optimizers, with BatchNorm, spectral_norm and a module's own average in the model. A script's own
scheduler and its own average of the weights are left out: it is told nothing of a skip, since it must stay unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from run_scripts import Ran

SCRIPT = """
import hashlib, json, sys, warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
kind, run = sys.argv[1:]
torch.manual_seed(0)


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
            self.mean.data.lerp_(x.detach().float().mean(0), 0.1)
        return x - self.mean


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 2, sparse=True)
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        return self.norm(self.table((x[:, 0].abs().clamp(max=9) * 1.5).long()) * x[:, 1:2])


if kind == "SparseAdam":
    model = Words()
else:
    bias = kind != "Muon"
    model = nn.Sequential(
        nn.Linear(4, 8, bias=bias), nn.BatchNorm1d(8, affine=bias), nn.Tanh(), Average(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8, bias=bias)), nn.Linear(8, 2, bias=bias),
    )
settings = {"Rprop": {"lr": 0.01}, "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
            "SGD": {"lr": 0.1, "momentum": 0.9}, "LBFGS": {"lr": 0.1, "max_iter": 3},
            "AdamW": {"lr": 0.05, "fused": True}, "Adam": {"lr": 0.05, "amsgrad": True}}
optimizer = getattr(torch.optim, kind)(list(model.parameters()), **settings.get(kind, {"lr": 0.05}))
good = 0
for event in run:
    g = torch.Generator().manual_seed(good)
    x, y = torch.randn(16, 4, generator=g), torch.randint(0, 2, (16,), generator=g)
    x = x * (float("inf") if event == "b" else 1.0)
    good += event == "g"

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if kind == "LBFGS":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def digest(tree):
    return hashlib.sha256(json.dumps(tree, default=lambda t: t.double().flatten().tolist()).encode()).hexdigest()


print(json.dumps({
    "parameters": digest(dict(model.named_parameters())),
    "buffers": digest(dict(model.named_buffers())),
    "optimizer": digest(optimizer.state_dict()),
    "finite": all(bool(t.isfinite().all()) for t in model.state_dict().values()),
}))
"""


FAMILIES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


Launch = Callable[..., Ran]


def ended(launch: Launch, kind: str, run: str, policy: str) -> dict[str, Any]:
    ran = launch(SCRIPT, kind, run, policy=policy)
    assert ran.status == 0, ran.err
    assert [update.moved for update in ran.of("update")] == [event == "g" for event in run]
    found: dict[str, Any] = json.loads(ran.lines[-1])
    assert found.pop("finite")
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_trace(kind: str, launch: Launch) -> None:
    policy = "fp16,loss_scale=128"
    assert ended(launch, kind, "bgbbgbg", policy) == ended(launch, kind, "ggg", policy)


@pytest.mark.parametrize("masters", ["split", pytest.param("split8,state=int8", marks=pytest.mark.heavy)])
def test_no_trace_in_16_bit_weights(masters: str, launch: Launch) -> None:
    policy = f"bf16,masters={masters},loss_scale=128"
    assert ended(launch, "AdamW", "gbbgbg", policy) == ended(launch, "AdamW", "ggg", policy)


def test_every_optimizer_of_torch_has_a_row() -> None:
    from bad_steps import CLOSURES, OPTIMIZERS

    assert set(FAMILIES) == {name.split()[0] for name in (*OPTIMIZERS, *CLOSURES)}
