"""A launched script's steps are told to those who look at them, at the moments that `StepObserver` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launching import Ran, launcher
from mezzo.core.finding import Finding
from mezzo.core.records import OverflowRecord, Record
from mezzo.pytorch.launch import companions

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
for step in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    model.eval(); model(x); model.train()
"""


class Told:
    """Writes down what it is told."""

    finding: Finding | None = None

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.records: list[Record] = []
        self.finished = False

    def call_begins(self, model: Any, args: Any, kwargs: Any) -> None:
        self.told.append(("call_begins", type(model).__name__, len(args), sorted(kwargs)))

    def call_ended(self, model: Any, output: Any) -> None:
        self.told.append(("call_ended", str(output.dtype).removeprefix("torch."), output.requires_grad))

    def backward_begins(self, loss: Any, scale: Any) -> None:
        assert loss.grad_fn is not None
        self.told.append(("backward_begins", scale))

    def update_begins(self, optimizer: Any, scale: Any) -> None:
        self.told.append(("update_begins", type(optimizer).__name__, scale))

    def update_ended(
        self, optimizer: Any, *, index: int, number: int, skipped: bool, loss_scale: float
    ) -> None:
        self.told.append(("update_ended", index, number, skipped, loss_scale))
        if skipped:
            self.finding = Finding("overflow", module="2", op="linear")
            self.records.append(OverflowRecord(index, number, 0.0, loss_scale, self.finding))

    def step_dropped(self) -> None:
        self.told.append(("step_dropped",))

    def drain(self) -> list[Record]:
        records, self.records = self.records, []
        return records

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    one = Told()
    monkeypatch.setattr(companions, "watchers_for", lambda session: [one])
    monkeypatch.setattr(companions, "tracer_for", lambda session: None)
    return one


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return launcher(tmp_path, capsys)


@pytest.mark.parametrize(
    ("policy", "seen", "scale"),
    [("fp32", "float32", 1.0), ("bf16", "bfloat16", 1.0), ("fp16", "float16", 65536.0)],
)
def test_a_plain_loop_is_told_in_order(launch: Any, told: Told, policy: str, seen: str, scale: float) -> None:
    ran = launch(TRAIN, policy=policy, watch=1)
    assert ran.status == 0, ran.err
    expected: list[tuple[Any, ...]] = []
    for index in range(4):
        expected += [
            ("call_begins", "Sequential", 1, []),
            ("call_ended", seen, True),
            ("backward_begins", scale),
            ("update_begins", "SGD", 1.0),
            ("update_ended", index, 0, False, scale),
        ]
    assert told.told == [*expected, ("step_dropped",)]
    assert told.finished


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_the_script_is_ended_after_so_many_updates(launch: Any, policy: str) -> None:
    source = TRAIN.replace("for step", "import atexit\ntry:\n  for step").replace("\n    ", "\n      ")
    source += "  print('not reached')\nfinally:\n  print('finally')\n"
    ran = launch(source, policy=policy, stop_after=3)
    assert (ran.status, ran.lines) == (0, ["finally"]), ran.err
    assert len(ran.of("update")) == len(ran.of("loss")) == 3
    assert "ended after 3 updates of the first optimizer, as asked" in ran.notes
    assert ran.of("end")[0].status == 0
