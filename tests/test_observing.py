"""What those who look at a MixedPrecision's steps are told: in which order, with which scale."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.core.overflow import OverflowReport
from mezzo.core.records import LossRecord, Record, RecordWriter, read
from mezzo.pytorch.training import mixed_precision
from mezzo.pytorch.training.mixed_precision import MixedPrecision


class Told:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.finding: OverflowReport | None = None

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.heard.append(("call", len(args), sorted(kwargs)))

    def call_ended(self, model: nn.Module, output: Any) -> None:
        self.heard.append(("returned", tuple(output.shape)))

    def backward_begins(self, loss: Tensor, scale: Tensor | float) -> None:
        self.heard.append(("backward", float(scale)))

    def update_begins(self, optimizer: Any, scale: Tensor | float) -> None:
        self.gradient = optimizer.param_groups[0]["params"][0].grad.clone() / float(scale)
        self.heard.append(("turn", float(scale)))

    def update_ended(
        self, optimizer: Any, *, index: int, number: int, skipped: Tensor | bool, loss_scale: Tensor | float
    ) -> None:
        self.heard.append(("turned", index, number, bool(skipped), float(loss_scale)))
        self.finding = OverflowReport("overflow", "0", "exp") if skipped else None

    def step_dropped(self) -> None:
        self.heard.append("dropped")

    def drain(self) -> list[Record]:
        return [LossRecord(7, 7.0, 7.0)]


def trained(
    monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, MixedPrecision, Told]:
    told = Told()
    monkeypatch.setattr(mixed_precision, "observers_for", lambda *args, **kwargs: [told])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options.setdefault("precision", "fp16")
    return model, optimizer, MixedPrecision(model, optimizer, loss_scale=1024, **options), told


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def loss_of(mp: MixedPrecision, model: nn.Module, factor: float = 1.0) -> Tensor:
    with mp.autocast():
        return model(X).float().square().mean() * factor


def test_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, mp, told = trained(monkeypatch)
    assert mp.step(loss_of(mp, model)).finding is None
    assert told.heard == [
        ("call", 1, []),
        ("returned", (3, 2)),
        ("backward", 1024.0),
        ("turn", 1024.0),
        ("turned", 0, 0, False, 1024.0),
    ]


def test_a_window_and_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, mp, told = trained(monkeypatch, accumulate=4)
    for _ in range(4):
        mp.step(loss_of(mp, model))
    full = told.gradient
    assert [what for what in told.heard if what[0] in ("backward", "turn")] == [("backward", 256.0)] * 4 + [
        ("turn", 1024.0)
    ]
    model, _, mp, told = trained(monkeypatch, accumulate=4)
    mp.step(loss_of(mp, model))
    mp.flush()
    # A quarter of the window has a quarter of its gradient; divided by the factor it is the window's mean again.
    assert told.heard[-2] == ("turn", 256.0)
    assert torch.allclose(told.gradient, full, rtol=1e-3)


def test_a_skipped_step_brings_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, mp, _ = trained(monkeypatch)
    result = mp.step(loss_of(mp, model, float("inf")))
    assert result.skipped
    assert result.finding is mp.findings[0]
    assert "forward of exp in 0" in result.reason


def test_a_backward_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, mp, told = trained(monkeypatch)
    loss = loss_of(mp, model)
    loss.backward()  # frees the graph
    with pytest.raises(RuntimeError, match="second time"):
        mp.step(loss)
    assert told.heard[-1] == "dropped"


def test_evaluation_and_calls_without_gradients_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _mp, told = trained(monkeypatch)
    with torch.no_grad():
        model(X)
    model.eval()
    model(X)
    assert told.heard == []


def test_a_call_that_raises_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, mp, told = trained(monkeypatch)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3, 5))
    told.heard.clear()
    mp.step(loss_of(mp, model))
    assert told.heard[:2] == [("call", 1, []), ("returned", (3, 2))]


def test_close_takes_the_hooks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, mp, told = trained(monkeypatch)
    mp.close()
    told.heard.clear()
    model(X)
    assert told.heard == []
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("observed", [False, True])
def test_one_that_is_dropped_is_gone_with_its_hooks(observed: bool, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    writer = RecordWriter(tmp_path / "run.jsonl")
    options: dict[str, Any] = {"watch": 1, "trace": True} if observed else {}
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", records=writer, **options)
    mp.step(loss_of(mp, model))
    gone = weakref.ref(mp)
    gc.disable()  # no cycle holds it
    try:
        del mp
        assert gone() is None
    finally:
        gc.enable()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    writer.close()
    kinds = [record.kind for record in read(tmp_path / "run.jsonl")]
    assert kinds == ["loss", "update"] + ["ranges"] * observed


def test_nobody_looks_no_hook() -> None:
    model = nn.Linear(4, 2)
    MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", trace=False)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_records_of_observers_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        def __init__(self) -> None:
            self.records: list[Record] = []

        def write(self, record: Record) -> None:
            self.records.append(record)

    writer = Writer()
    model, _, mp, _ = trained(monkeypatch, records=writer)
    mp.step(loss_of(mp, model))
    mp.close()
    assert [record.kind for record in writer.records] == ["loss", "update", "loss"]
    assert writer.records[-1] == LossRecord(7, 7.0, 7.0)
