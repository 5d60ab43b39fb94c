"""Records as TensorBoard events, read back with TensorBoard's own reader."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import run_records
from mezzo import MixedPrecision
from mezzo.core.errors import UsageError
from mezzo.core.ranges import Histogram, RangeRow
from mezzo.core.records import LossRecord, RangesRecord, Record, RecordWriter, RunEnded, UpdateRecord, read
from mezzo.pytorch.monitor.tensorboard import TensorBoardWriter
from trainers import stepped

pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    return found


def written(folder: Path, records: list[Record]) -> Any:
    writer = TensorBoardWriter(folder)
    for record in records:
        writer.write(record)
    writer.close()
    return events(folder)


def values(found: Any, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in found.Scalars(tag)]


def test_losses_and_updates_are_scalars_at_the_records_times(tmp_path: Path) -> None:
    before = time.time()
    found = written(
        tmp_path,
        [
            LossRecord(0, 2.5, 0.0), UpdateRecord(0, 0, True, False, 65536.0, 0.5),
            LossRecord(1, float("inf"), 1.0), UpdateRecord(1, 0, False, True, 65536.0, 1.5, "inf"),
            UpdateRecord(2, 1, True, False, 8.0, 100.0),
        ],
    )  # fmt: skip
    assert values(found, "loss") == [(0, 2.5), (1, float("inf"))]
    assert values(found, "loss_scale") == [(0, 65536.0), (1, 65536.0)]
    assert values(found, "skipped") == [(0, 0.0), (1, 1.0)]
    assert values(found, "loss_scale/optimizer 1") == [(2, 8.0)]
    first = found.Scalars("loss_scale")[0].wall_time
    assert found.Scalars("loss_scale/optimizer 1")[0].wall_time - first == pytest.approx(99.5, abs=1e-3)
    assert before <= found.Scalars("loss")[0].wall_time <= time.time()


def test_a_histogram_keeps_its_counts_by_exponent(tmp_path: Path) -> None:
    row = RangeRow("fc", "weight gradient", "fp32", Histogram(-30, [1, 0, 3], zeros=5), "weight")
    found = written(tmp_path, [RangesRecord(40, 0, 1.0, 2.0**10, [row])])
    (one,) = found.Histograms("log2 weight gradient/fc.weight")
    histogram = one.histogram_value
    assert one.step == 40
    assert (histogram.min, histogram.max, histogram.num) == (-30.0, -27.0, 4)
    assert list(histogram.bucket_limit) == [-30.0, -29.0, -28.0, -27.0]
    assert list(histogram.bucket) == [0.0, 1.0, 0.0, 3.0]
    assert histogram.sum == -29.5 - 3 * 27.5


def test_a_whole_run_is_written_with_its_findings_as_text(tmp_path: Path) -> None:
    found = written(tmp_path, run_records.records(steps=100, modules=["a", "b"]))
    assert len(found.Scalars("loss")) == 100
    texts = {name.removesuffix("/text_summary") for name in found.Tags()["tensors"]}
    assert texts == {"run", "findings", "formats", "end"}
    shown = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("findings/text_summary")]
    assert len(shown) == 4
    assert "    overflow: forward of exp in blocks.1.attention" in shown[2]
    assert "    try: Use bf16: its range is FP32's." in shown[2]
    assert len(found.Histograms("log2 activation/a")) == 13
    found = written(tmp_path / "hostile names", run_records.hostile())
    assert len(found.Tags()["histograms"]) == 6


def test_a_training_writes_to_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = TensorBoardWriter(tmp_path / "tb", also=RecordWriter(tmp_path / "run.jsonl"))
    mp = MixedPrecision(model, optimizer, "fp16", records=writer)
    for _ in range(3):
        stepped(mp, lambda: model(torch.ones(8, 4)).square().mean())
    mp.close()
    writer.close()
    found = events(tmp_path / "tb")
    assert len(found.Scalars("loss")) == 3
    assert [one.value for one in found.Scalars("loss_scale")] == [65536.0] * 3
    kept = [record.loss for record in read(tmp_path / "run.jsonl") if isinstance(record, LossRecord)]
    assert kept == pytest.approx([one.value for one in found.Scalars("loss")], rel=1e-6)


def test_after_close_and_in_a_forked_child_nothing_is_written(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write(LossRecord(0, 1.0, 0.0))
    with warnings.catch_warnings():
        # Of forking a process with the writer's thread, from Python 3.12 on.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            writer._events = None  # whoever touches it fails
            writer.write(LossRecord(1, 1.0, 0.0))
            writer.close()
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.close()
    writer.close()
    writer.write(RunEnded(0, 1.0))
    found = events(tmp_path)
    assert values(found, "loss") == [(0, 1.0)]
    assert found.Tags()["tensors"] == []


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path)


@pytest.mark.heavy
def test_tensorflow_is_not_imported_and_torch_can_compile_afterwards(tmp_path: Path) -> None:
    """TensorFlow and then Triton in one process abort it. A child, because here they may be imported already."""
    source = (
        "import sys\nfrom mezzo.pytorch.monitor.tensorboard import TensorBoardWriter\n"
        "TensorBoardWriter(sys.argv[1]).close()\nassert 'tensorflow' not in sys.modules\nimport torch._dynamo\n"
    )
    child = [sys.executable, "-c", source, str(tmp_path)]
    ran = subprocess.run(child, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("rank", "name", "own"), [(0, "a", "a"), (1, "a", "a-rank1"), (1, "rank1", "rank1")])
def test_each_rank_has_events_and_records_of_its_own(
    rank: int, name: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    TensorBoardWriter(tmp_path / name, also=tmp_path / f"{name}.jsonl").close()
    assert {each.name for each in tmp_path.iterdir()} == {own, f"{own}.jsonl"}
