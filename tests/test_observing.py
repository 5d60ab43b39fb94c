"""The calls that observers of a MixedPrecision's steps receive: in which order, with which scale."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from mezzo.core.errors import UsageError
from mezzo.core.records import LossRecord, Record, RecordWriter, read
from mezzo.pytorch.training import mixed_precision
from mezzo.pytorch.training.mixed_precision import MixedPrecision
from mezzo.report import build_any
from test_run_watch import CALL, UPDATE, Told
from trainers import refused

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

RECORD = LossRecord(7, 7.0, 7.0)
X = torch.linspace(-1, 1, 12).reshape(3, 4)


STEP = [*CALL, "backward_begins", *UPDATE]


def trained(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[nn.Module, MixedPrecision, Told]:
    observer = Told()
    monkeypatch.setattr(mixed_precision, "observers_for", lambda *args, **kwargs: [observer])
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, MixedPrecision(model, optimizer, "fp16", loss_scale=1024, **options), observer


def loss_of(mp: MixedPrecision, model: nn.Module, factor: float = 1.0) -> Tensor:
    with mp.autocast():
        return model(X).float().square().mean() * factor


def test_one_step_and_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Record] = []
    model, mp, observer = trained(monkeypatch, records=Mock(write=written.append))
    assert mp.step(loss_of(mp, model)).finding is None
    assert observer.names == STEP
    assert [len(args) for args in observer.given("call_begins")] == [1]
    assert [tuple(output.shape) for output in observer.given("call_ended")] == [(3, 2)]
    assert observer.given("backward_begins") == observer.given("update_begins") == [1024.0]
    (ended,) = observer.update_ended.call_args_list
    assert ended.kwargs == {"index": 0, "number": 0, "skipped": False, "loss_scale": 1024.0}
    observer.record.append(RECORD)
    mp.close()
    assert [record.kind for record in written] == ["loss", "update", "loss"]
    assert written[-1] == RECORD


@pytest.mark.parametrize("kind", [str, Path])
def test_records_go_to_a_path_that_report_reads(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "own.jsonl"
    for _ in range(2):  # the second closes the first, and writes the file anew
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mp = MixedPrecision(model, optimizer, "bf16", device_type="cpu", records=kind(file))
        mp.step(loss_of(mp, model))
        mp.close()
    assert [record.kind for record in read(file)] == ["loss", "update"]
    assert build_any(file) == tmp_path / "own.html"


@pytest.mark.parametrize("records", [3, "no/such/folder/run.jsonl"])
def test_records_that_cannot_be_written(records: object) -> None:
    model = nn.Linear(3, 2)
    with refused(UsageError, f"records is {records!r}", "'run.jsonl'"):
        MixedPrecision(model, torch.optim.SGD(model.parameters()), "bf16", records=records)


def test_a_constructor_that_fails_leaves_the_records_of_an_earlier_run(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("an earlier run")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adadelta(model.parameters())
    with refused(UsageError, "release_gradients"):
        MixedPrecision(model, optimizer, "bf16", release_gradients=True, device_type="cpu", records=file)
    assert file.read_text() == "an earlier run"
    for records in (file, os.devnull):  # a device can't be truncated
        MixedPrecision(model, optimizer, "bf16", device_type="cpu", records=records).close()
    assert file.read_text() == ""


def test_a_skipped_step_brings_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mp, _ = trained(monkeypatch)
    result = mp.step(loss_of(mp, model, float("inf")))
    assert result.skipped
    assert result.finding is mp.findings[0]
    assert "forward of linear in 2" in result.reason


def test_what_is_not_observed_and_what_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mp, observer = trained(monkeypatch)
    with torch.no_grad():
        model(X)
    model.eval()
    model(X)
    model.train()
    assert observer.names == []
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3, 5))
    observer.reset_mock()
    mp.step(loss_of(mp, model))
    assert observer.names == STEP
    loss = loss_of(mp, model)
    loss.backward()  # frees the graph
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        mp.step(loss)
    assert observer.names[-1] == "step_dropped"
    mp.close()
    observer.reset_mock()
    model(X)
    assert observer.names == []
    assert not hooks(model)


def hooks(model: nn.Module) -> list[Any]:
    return [*model._forward_hooks, *model._forward_pre_hooks]


@pytest.mark.parametrize("observed", [False, True])
def test_one_that_is_dropped_is_gone_with_its_hooks(observed: bool, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    writer = RecordWriter(tmp_path / "run.jsonl")
    options: dict[str, Any] = {"watch": 1, "trace": True} if observed else {"trace": False}
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", records=writer, **options)
    assert bool(hooks(model)) == observed
    mp.step(loss_of(mp, model))
    gone = weakref.ref(mp)
    gc.disable()  # no cycle holds it
    try:
        del mp
        assert gone() is None
    finally:
        gc.enable()
    assert not hooks(model)
    writer.close()
    kinds = [record.kind for record in read(tmp_path / "run.jsonl")]
    assert kinds == ["loss", "update"] + ["ranges"] * observed
