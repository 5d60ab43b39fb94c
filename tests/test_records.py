"""Run records: every record comes back from its line, NaN and infinities too; files survive a kill in
mid-line."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.core import records
from mezzo.core.errors import UsageError
from mezzo.core.records import from_line, read, to_line
from mezzo.runner import lifecycle

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
started = st.builds(records.RunStarted, machine=st.dictionaries(st.text(), plain, max_size=3))
any_record: st.SearchStrategy[records.Record] = st.one_of(
    started, *(st.from_type(kind) for kind in records.Record.__args__ if kind is not records.RunStarted)
)


def same(left: Any, right: Any) -> bool:
    """Equal in type and value; NaN equals NaN, and -0.0 is not 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(any_record)
def test_every_record_comes_back_from_its_line(record: records.Record) -> None:
    line = to_line(record)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(name))
    back = from_line(line)
    assert type(back) is type(record)
    assert same(asdict(back), asdict(record))


@given(st.lists(any_record, max_size=6), st.data())
def test_a_file_comes_back_and_a_last_line_cut_short_is_passed_over(
    written: list[records.Record], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        writer = records.RecordWriter(path)
        for record in written:
            writer.write(record)
        writer.close()
        back = list(read(path))
        assert [to_line(record) for record in back] == [to_line(record) for record in written]
        if written:
            whole = path.read_bytes()
            start = whole.rindex(b"\n", 0, len(whole) - 1) + 1 if whole.count(b"\n") > 1 else 0
            path.write_bytes(whole[: data.draw(st.integers(start, len(whole) - 1))])
            assert [to_line(record) for record in read(path)] == [to_line(record) for record in written[:-1]]


def test_numbers_that_json_lacks_are_strings_in_the_line() -> None:
    line = '{"kind": "loss", "index": 0, "loss": "nan", "at": "inf"}'
    assert to_line(records.LossRecord(0, math.nan, math.inf)) == line
    back: Any = from_line('{"kind": "loss", "index": 0, "loss": "-inf", "at": 1}')
    assert (back.loss, type(back.at)) == (-math.inf, float)


def test_a_newer_writers_fields_are_passed_over_and_missing_defaults_filled() -> None:
    line = json.loads(to_line(records.UpdateRecord(1, 0, True, False, 1.0, 2.0)))
    line |= {"colour": "red"}
    del line["reason"], line["observed"]
    assert from_line(json.dumps(line)) == records.UpdateRecord(1, 0, True, False, 1.0, 2.0)
    op = records.OpFormats("mm", "lower", "a", "b", 1, 2, "r")
    ops = {"kind": "ops", "ops": [{**asdict(op), "colour": "red"}]}
    assert from_line(json.dumps(ops)) == records.OpsRecord([op])


NO_RECORDS = [
    *("", "{", "[]", "1", "null", "{}"),
    '{"kind": "dance"}',
    '{"kind": "loss"}',
    '{"kind": "loss", "index": 0, "loss": "much", "at": 0}',
    '{"kind": "ops", "ops": 3}',
    '{"kind": "ops", "ops": [3]}',
    '{"kind": ["loss"]}',
]


@pytest.mark.parametrize("line", NO_RECORDS)
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="not a run record"):
        from_line(line)


def test_a_bad_line_inside_a_file_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = (records.LossRecord(i, 1.0, 0.0) for i in range(2))
    path.write_text(f"{to_line(first)}\n{{oops}}\n{to_line(second)}\n")
    reading = read(path)
    assert next(reading) == first
    with pytest.raises(UsageError, match=r"run\.jsonl:2: not a run record: '\{oops\}"):
        next(reading)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    writer = records.RecordWriter(path)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    writer.write(records.MemoryRecord(5, "tensor bytes"))
    monkeypatch.undo()
    writer.write(records.MemoryRecord(6, "tensor bytes"))
    writer.close()
    assert list(read(path)) == [records.MemoryRecord(6, "tensor bytes")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("needed", [False, True])
def test_a_full_disk_ends_the_records_and_only_a_run_that_needs_them(
    needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records.RecordWriter, "needed", False)
    if needed:
        request = tmp_path / "request.json"
        request.write_text(lifecycle.RunRequest("train.py").to_json())
        assert lifecycle.main([str(request)], lambda request: 0, "test") == 0
    writer = records.RecordWriter(Path("/dev/full"))
    lost = "/dev/full: No space left on device. Training goes on"
    with pytest.raises(OSError, match="No space") if needed else pytest.warns(UserWarning, match=lost):
        writer.write(records.MemoryRecord(5, "tensor bytes"))
    writer.write(records.MemoryRecord(6, "tensor bytes"))
    del writer  # its finalizer does not try again
