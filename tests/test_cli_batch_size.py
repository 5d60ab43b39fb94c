"""`mezzo batch-size`: how the script is told its size, what becomes of each way a run can end, what is printed."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import mezzo.cli.batch_size as verb
from commands import Command, in_the_folder  # noqa: F401
from mezzo.cli.batch_size import argv_with
from mezzo.compare.progress import Watcher
from mezzo.core.errors import UsageError

pytestmark = pytest.mark.usefixtures("forked")

# Stands in for the launcher. The script is a JSON object:
#   bytes {precision: [fixed, each]}   steps 12   device "cpu"   linger: from this size on it sleeps in the end
#   overhead: seconds of a step apart from 1 ms for each sample
#   ends {size: how}, for this size and all larger: text (its output) and status, or a signal; `run` for the smaller
FAKE = """
import json, os, sys, time
from pathlib import Path
from mezzo.core import records

request = json.loads(Path(sys.argv[1]).read_text())
does = json.loads(Path(request["target"]).read_text())
size = int("".join(c for c in request["argv"][-1] if c.isdigit()))
with Path("calls").open("a") as calls:
    print(request["policy"], *request["argv"], file=calls)
ends = {int(key): how for key, how in does.get("ends", {}).items()}
end = next((ends[key] for key in sorted(ends, reverse=True) if size >= key), {})
if "text" in end:
    print(end["text"], flush=True)
    sys.exit(end["status"])
if "signal" in end:
    os.kill(os.getpid(), end["signal"])
writer = records.RecordWriter(Path(request["records"]))
machine = {"device_type": does.get("device", "cpu")}
writer.write(records.RunStarted("s", request["argv"], request["policy"], 0, False, machine, "now"))
fixed, each = does.get("bytes", {}).get(request["policy"], [0, 1000])
for i in range(end.get("steps", does.get("steps", 12))):
    at = i * (does.get("overhead", 0.01) + size / 1000)
    writer.write(records.LossRecord(i, 1.0, at))
    writer.write(records.UpdateRecord(i, 0, True, False, 1.0, at, observed=i == 2))
    if i == request["stop_after"] - 1:
        break
    if i == 2:
        writer.write(records.MemoryRecord(fixed + each * size, "tensor bytes"))
if size >= does.get("linger", size + 1):
    time.sleep(60)
writer.write(records.RunEnded(0, 1.0, end.get("notes", [])))
"""


@pytest.fixture
def here(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands, in which runs are pretended."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(verb, "LAUNCH", (sys.executable, str(tmp_path / "fake.py")))
    return tmp_path


def script(place: Path, **behaviour: Any) -> str:
    (place / "train.py").write_text(json.dumps(behaviour))
    return "train.py"


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


def test_two_precisions_are_searched(here: Path, command: Command) -> None:
    name = script(here, bytes={"fp32": [0, 1000], "bf16": [0, 500]})
    words = f"batch-size {name} --vary=--batch --limit=20kB --precision fp32,bf16"
    ran = command(f"{words} -- --lr 1")
    assert ran.status == 0
    sizes = {"fp32": (8, 16, 20), "bf16": (8, 16, 32, 40)}
    assert calls(here) == [f"{name} --lr 1 --batch {size}" for name in sizes for size in sizes[name]]
    assert ran.err.splitlines()[0].startswith("[1] fp32  size 8: 12 steps, ")
    lines = ran.out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["fp32"],
        ["size", "peak", "samples/s", "fits"],
        ["8", "8", "kB", "444", "yes"],
    ]
    assert lines[5] == (
        "batch size 20 is the largest tried that fits into 20 kB; 20 is the fastest, with 667 samples per second."
    )
    assert lines[7] == "bf16"
    assert lines[-1].startswith(
        "batch size 40 is the largest tried that fits into 20 kB; 40 is the fastest, "
    )
    ran = command(f"{words} --json --precision=bf16")
    assert (ran.status, ran.err) == (0, "")
    one = json.loads(ran.out)["precisions"]["fp32"]
    assert (one["largest"], one["fastest"], one["limit_bytes"], one["device"]) == (20, 20, 20_000, "cpu")
    assert [trial["size"] for trial in one["trials"]] == [8, 16, 20]
    assert [path.name for path in here.iterdir() if path.name not in ("calls", "fake.py")] == ["train.py"]


OOM = {"text": "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.", "status": 1}
ERROR = {"text": 'Traceback (most recent call last):\n  File "train.py"\nValueError: bad rows', "status": 1}
# the script, more words -> the sizes tried, the largest (0: none), and what is said of it
ENDS: list[tuple[dict[str, Any], list[str], list[int], int, str]] = [
    ({"ends": {20: OOM}, "device": "cuda"}, [], [8, 16, 32, 24, 20, 18], 18, "no: out of memory"),
    ({"device": "cuda"}, ["--max=40"], [8, 16, 32, 40], 40, "40     40 kB"),
    ({"device": "cuda"}, ["--limit=20kB"], [8, 16, 20], 20, "fits into 20 kB"),
    ({"device": "cuda"}, ["--limit=20KiB"], [8, 16, 20], 20, "fits into 20KiB (20.5 kB)"),
    ({"bytes": {"bf16": [5000, 1]}}, ["--start=1", "--limit=4KiB"], [1], 0, "over the limit of 4KiB (4.1 kB)"),
    ({}, [], [8, 4, 10], 10, "fits into 10 kB"),  # what the machine has left
    ({"ends": {12: {"signal": 9}}}, ["--limit=1GB"], [8, 16, 12, 10, 11], 11, "by the system, probably out of memory"),
    ({"overhead": 0}, ["--limit=1GB"], [8, 16, 32], 32, "note: samples/s no longer rise. For larger sizes: --max 512"),
    ({"overhead": 0}, ["--limit=1GB", "--max=64"], [8, 16, 32, 64], 64, "64 is the largest tried that fits"),
    ({"ends": {20: ERROR}}, ["--limit=1GB"], [8, 16, 32], 16, "ValueError: bad rows"),
    ({"ends": {20: {"steps": 2}}}, ["--limit=1GB"], [8, 16, 32], 16, "ended after 2 steps, too few"),
    ({"ends": {20: {"signal": 15}}}, ["--limit=1GB"], [8, 16, 32], 16, "--batch 32 ended with exit status -15"),
    ({"bytes": {"bf16": [5000, 1]}}, ["--start=2", "--limit=4kB"], [2, 1], 0, "batch size 1: over the limit of 4 kB"),
    ({"bytes": {"bf16": [5000, 1]}, "ends": {1: ERROR, 2: {}}}, ["--start=2", "--limit=4kB"], [2, 1], 0,
     "note: no further size was tried: train.py --batch 1 ended with exit status 1"),
]  # fmt: skip


@pytest.mark.parametrize("row", ENDS)
def test_the_ways_in_which_a_search_ends(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch, row: Any
) -> None:
    behaviour, more, sizes, largest, says = row
    monkeypatch.setattr(verb, "spendable_bytes", lambda: 10_000)  # bounds a CPU, not a GPU
    ran = command(f"batch-size {script(here, **behaviour)} --vary=--batch --precision=bf16", *more)
    assert ran.status == (not largest)
    assert [int(line.split()[-1]) for line in calls(here)] == sizes
    assert (
        f"batch size {largest} is the largest" if largest else "no size that was tried fits"
    ) in ran.out.splitlines()[-1]
    assert says in ran.out


# the script -> what says why it fails at the first size
FAILURES: list[tuple[dict[str, Any], str]] = [
    ({"ends": {1: ERROR}}, "train.py --bs 8 ended with exit status 1. Is --vary its batch size option?"),
    ({"ends": {1: {"text": "mezzo: no bf16 here", "status": 2}}}, "mezzo: no bf16 here"),
    ({"steps": 2, "ends": {1: {"notes": ["left alone: it uses autocast"]}}},
     "ended after 2 steps, too few to measure (left alone: it uses autocast). Let it train longer"),
    ({"steps": 6}, "ended after 6 steps, too few to measure. Let it train longer"),
    ({"bytes": {"bf16": [500, 0]}}, "sizes from 8 to 512 take the same bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("behaviour", "says"), FAILURES)
def test_a_script_that_fails_at_the_first_size(
    here: Path, command: Command, behaviour: dict[str, Any], says: str
) -> None:
    ran = command(f"batch-size {script(here, **behaviour)} --precision=bf16 --limit=1MB --vary=--bs")
    assert ran.status == 2
    assert says in ran.err
    assert ran.err.count("mezzo batch-size: ") == 1


@pytest.mark.parametrize("by", ["a signal", "the time"])
def test_what_ends_a_search_ends_the_child_and_leaves_the_table(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """In the second run: the first size is in the table."""
    now = [0.0]

    def stop(self: Watcher, done: int) -> None:
        if self._name.endswith(" 16") and by == "a signal":
            signal.raise_signal(signal.SIGTERM)
        now[0] += 61.0 * self._name.endswith(" 16")

    monkeypatch.setattr(Watcher, "steps", stop)
    monkeypatch.setattr(verb.time, "monotonic", lambda: now[0])
    words = f"batch-size {script(here, linger=16)} --vary=--batch --limit=1GB --precision=bf16"
    ran = command(f"{words} --minutes=1")
    assert ran.status == (130 if by == "a signal" else 0)
    assert ": stopped, " in ran.err
    assert [line.split()[0] for line in ran.out.splitlines()[:3]] == ["bf16", "size", "8"]
    assert ("--minutes 3" in ran.out) == (by == "the time")
    assert ran.out.splitlines()[-1].startswith(
        "batch size 8 is the largest tried that fits into 1 GB; 8 is the fastest"
    )
    assert ("note: interrupted before the search ended" in ran.out) == (by == "a signal")


# how it is spelled, the script's arguments -> the arguments with size 32
SPELLINGS = [
    ("--batch", "", "--batch 32"),
    ("--batch", "--batch 8 --lr 1", "--batch 8 --lr 1 --batch 32"),  # the last one counts
    ("--batch=", "x", "x --batch=32"),
    ("data.batch=", "data.batch=8 model=big", "data.batch=8 model=big data.batch=32"),
    ("++data.batch=", "", "++data.batch=32"),
    ("{}", "a {} x{}y", "a 32 x32y"),
]


@pytest.mark.parametrize(("spelling", "given", "argv"), SPELLINGS)
def test_how_a_script_is_given_its_size(spelling: str, given: str, argv: str) -> None:
    assert argv_with(given.split(), spelling, 32) == tuple(argv.split())


@pytest.mark.parametrize("spelling", ["", "-", "--", "=", "--=", "batch", "a {}", "--a=b", "x=y"])
def test_spellings_that_are_none(spelling: str) -> None:
    with pytest.raises(UsageError, match="as the script spells it"):
        argv_with((), spelling, 32)


TRAINING = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    batch_size = parser.parse_args().batch_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while True:
        loss = nn.functional.cross_entropy(model(torch.randn(batch_size, 64)), torch.ones(batch_size).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_the_limit_of_the_first_precision_is_that_of_all(here: Path, command: Command) -> None:
    found = json.loads(command(f"batch-size {script(here)} --vary=--batch --max 8 --json").out)["precisions"]
    assert found["fp32"]["limit_bytes"] == found["bf16"]["limit_bytes"]


def test_an_error_of_the_second_precision_leaves_the_first_table(here: Path, command: Command) -> None:
    name = script(here, bytes={"fp32": [0, 1000], "bf16": [500, 0]})
    ran = command(f"batch-size {name} --vary=--batch --limit 20kB")
    assert ran.status == 2
    assert "batch size 20 is the largest tried that fits" in ran.out
    assert "take the same bytes" in ran.err


@pytest.mark.heavy
def test_the_real_thing(tmp_path: Path, command: Command) -> None:
    """A script that would train for ever, in real child processes."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    words = "batch-size train.py --vary=--batch-size --precision=bf16"
    ran = command(f"{words} --limit=800kB --start=384 --json")
    assert ran.status == 0, ran.err
    one = json.loads(ran.out)["precisions"]["bf16"]
    (_, too_large), *_, (size, peak) = ((trial["size"], trial["peak_bytes"]) for trial in one["trials"])
    assert 650_000 < peak <= 800_000 < too_large
    assert one["largest"] == size
    assert one["trials"][-1]["samples_per_second"] > 0


def test_a_run_is_ended_after_its_steps(here: Path, command: Command) -> None:
    words = f"batch-size {script(here, steps=10**6)} --vary=--batch --limit=1MB --max=8 --precision=bf16"
    ran = command(f"{words} --steps=9")
    assert ran.status == 0
    assert ran.err.startswith("[1] bf16  size 8: 9 steps, ")
