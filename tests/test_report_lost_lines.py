"""Records of which lines were not read: what follows stands at its own step, in every curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import run_records
from mezzo.core.records import LossRecord, Record, UpdateRecord
from mezzo.report.figures import loss_scale
from mezzo.report.run import Run, read_run
from test_report import drawn
from test_report_run import made, outline


def cut(path: Path, *kinds_and_numbers: tuple[str, int]) -> None:
    """Damage the lines of these records."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = {
        kind: [place for place, line in enumerate(lines) if line.startswith(f'{{"kind": "{kind}"')]
        for kind, _ in kinds_and_numbers
    }
    for kind, number in kinds_and_numbers:
        lines[places[kind][number]] = "?" + lines[places[kind][number]][20:]
    path.write_text("".join(lines), encoding="utf-8")


def test_behind_a_loss_that_was_not_read_the_others_stand_at_their_own_step(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records(steps=100, findings=False))
    whole = read_run(path)
    cut(path, ("loss", 10), ("loss", 11), ("loss", 40))
    run = read_run(path)
    assert run.lost == {10, 11, 40}
    assert len(run.losses) == 100
    assert run.recorded_losses == 97
    kept = [place for place in range(100) if place not in run.lost]
    assert run.losses[kept].tolist() == whole.losses[kept].tolist()
    text = outline(tmp_path / "r").text
    assert "97 losses recorded" in text
    assert "the loss is NaN" not in text  # it was not read, which is another thing
    assert "what follows stands at its step" in text


def test_a_real_nan_behind_a_lost_loss_is_told_at_its_own_step(tmp_path: Path) -> None:
    records: list[Record] = [LossRecord(i, float("nan") if i == 7 else 1.0, 0.0) for i in range(9)]
    path = made(tmp_path / "r", records)
    cut(path, ("loss", 3))
    assert "the loss is NaN at step 7." in outline(tmp_path / "r").text


def test_behind_an_update_that_was_not_read_the_scale_stands_at_its_own_update(tmp_path: Path) -> None:
    path = made(tmp_path / "r", run_records.records(steps=200))
    cut(path, ("update", 20), ("update", 30))
    figure = drawn("chart", loss_scale([read_run(path)], "s1", "fp16"))
    assert "Updates 90, 91: forward of exp" in figure
    assert "Update 170: backward of SqrtBackward0" in figure
    assert "5 of 198 updates skipped, at 1, 3, 90, 91, 170" in figure


@pytest.mark.parametrize("indices", [[0, 0, 1, 1, 2, 2], [0, 10**12, 1, 2], [5, 6, 7], [-3, -2, -1]])
@pytest.mark.parametrize("damaged", [False, True])
def test_indices_that_no_single_loop_gives_leave_the_order_as_it_is(
    indices: list[int], damaged: bool, tmp_path: Path
) -> None:
    """Two loops that share a file, an index that is itself broken, a file whose head is gone."""
    records: list[Record] = []
    for index in indices:
        records += [
            LossRecord(index, float(len(records)), 0.0),
            UpdateRecord(index, 0, True, False, 2.0, 0.0),
        ]
    path = made(tmp_path / "r", records)
    if damaged:
        path.write_text("?\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    run = read_run(path)
    assert run.losses[~run_lost(run)].tolist() == [2.0 * n for n in range(len(indices))]
    assert len(run.losses) < 100
    outline(tmp_path / "r")


def run_lost(run: Run) -> np.ndarray:  # type: ignore[type-arg]
    return np.isin(np.arange(len(run.losses)), list(run.lost))
