"""Rows whose call, run again, is not the same call; and calls that are not plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from faults.models import Trainee, cnn, recurrent, stack, transformer
from faults.plants import Root, stateful
from faults.rows.fault import Expected, Fault
from faults.rows.planting import both, grown


class _Draws(nn.Module):
    """Is given an iterator, and takes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.gain = 1.0

    def forward(self, rows: Iterator[Tensor]) -> Tensor:
        x = torch.stack(list(rows))
        return self.last(torch.relu(self.first(x)) * self.gain)


def _iterated() -> Trainee:
    trainee = stack()
    torch.manual_seed(31)
    model = _Draws()
    trainee.models["main"] = model
    trainee.optimizers["main"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainee.losses = _of_rows
    return trainee


def _of_rows(trainee: Trainee, batch: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    x, y = batch
    yield "main", lambda: F.mse_loss(trainee.model(iter(x)).float(), y)


def _strong(trainee: Trainee) -> None:
    trainee.model.gain = 1e7


def _mezzos(params: Any) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-3)


def _split(params: Any) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-3, masters="split")


ROWS: list[Fault] = [
    Fault(
        "again: what the module's own generator draws",
        "perceptron",
        partial(stack, tail=stateful.OwnGenerator),
        Expected("tail", "mul", "overflow", line="drawn > 0.95"),
        repeats=2,
    ),
    Fault(
        "again: what Python's generator draws",
        "perceptron",
        partial(stack, tail=stateful.PythonRandom),
        Expected("tail", "mul", "overflow", line="torch.tensor(gains)"),
        repeats=2,
    ),
    Fault(
        "again: what NumPy's generator draws",
        "perceptron",
        partial(stack, tail=stateful.NumpyRandom),
        Expected("tail", "mul", "overflow", line="noise > 0.95"),
        repeats=2,
    ),
    Fault(
        "again: a schedule by the number of calls",
        "CNN",
        partial(cnn, tail=stateful.Counts),
        Expected("tail", "mul", "overflow", line="* strength"),
    ),
    Fault(
        "again: a list of what was seen",
        "perceptron",
        partial(stack, tail=stateful.Remembers),
        Expected("tail", "half", "overflow", line="self.seen[-1]"),
    ),
    Fault(
        "again: an iterator as argument",
        "perceptron",
        _iterated,
        Expected("", "mul", "overflow", line="* self.gain"),
        plant=_strong,
        repeats=2,
    ),
    Fault(
        "again: vmap",
        "perceptron",
        partial(stack, tail=stateful.PerSample),
        Expected("tail", "mul", "overflow", line="(row + 0.1) * gain"),
    ),
    Fault(
        "again: a division in place behind other writes in place",
        "CNN",
        partial(cnn, middle=stateful.InPlaceChain),
        Expected("middle", "div", "invalid", line="x /= "),
        mended=False,
    ),
    Fault(
        "again: an exponential on an island of FP32",
        "transformer",
        partial(transformer, tail=stateful.Island),
        Expected("tail", "exp", "overflow", line="torch.exp("),
        mended=False,
    ),
    Fault(
        "again: a forward hook of the script's own",
        "recurrent",
        partial(recurrent, tail=stateful.Hooked),
        Expected("tail.layer", "mul", "overflow", line="(output + 0.1) *", also="tail"),
    ),
    Fault(
        "again: a backward hook of the script's own",
        "recurrent",
        partial(recurrent, tail=stateful.HookedBackward),
        Expected("tail.layer", "", "invalid", "backward", also="tail"),
        mended=False,
    ),
    Fault(
        "again: a module under two names",
        "perceptron",
        partial(stack, tail=stateful.Twice),
        Expected("tail.one", "linear", "overflow", line="self.other(", also="tail.other"),
        plant=both(Trainee.arm, grown("tail.one", 10.0)),
    ),
    Fault(
        "again: gradients released in backward",
        "perceptron",
        partial(stack, tail=Root, optimizer=_mezzos),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        options={"release_gradients": True},
        mended=False,
    ),
    Fault(
        "again: bf16 weights, split from their masters",
        "perceptron",
        partial(stack, tail=Root, optimizer=_split),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        precision="bf16,loss_scale=1",
        options={"weights": "split"},
        mended=False,
    ),
]
