"""Comparisons whose process is killed, whose folder another process uses, or whose records are damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Command, in_the_folder  # noqa: F401
from mezzo.compare.comparison import compare
from mezzo.compare.folder import locked
from mezzo.compare.progress import Watcher
from mezzo.compare.request import Request
from mezzo.core.errors import UsageError

CHILDREN = Path(__file__).parent / "children"
FAKE = (sys.executable, str(CHILDREN / "fake_launch.py"))
MARK = "MEZZO_TEST_MARK"
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


class Parent:
    """A comparison in a process of its own. All its descendants have its mark in their environment."""

    made = 0

    def __init__(self, place: Path) -> None:
        Parent.made += 1
        self.mark = f"{MARK}={place}-{Parent.made}".encode()
        words = [str(CHILDREN / "comparing.py"), str(place / "train.json"), str(place / "out")]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, MARK: self.mark.partition(b"=")[2].decode()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self) -> tuple[int, str]:
        """Wait; status and output."""
        said = self.process.communicate()[0].decode()
        return self.process.returncode, said

    def end_by(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.end()

    @property
    def alive(self) -> list[int]:
        """Its process and descendants that are neither gone nor zombies."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark in (place / "environ").read_bytes().split(b"\0")
                if marked and (place / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(place.name))
            except OSError:
                continue
        return found

    def no_one_is_left(self) -> None:
        until = time.monotonic() + 10
        while self.alive:
            assert time.monotonic() < until, self.alive
            time.sleep(0.02)


@linux
@pytest.mark.heavy
def test_a_comparison_killed_at_any_moment_and_repeated_ends_as_one_left_alone(tmp_path: Path) -> None:
    """`MEZZO_KILLS=50 pytest tests/test_compare_killed.py -k repeated` kills at 50 moments instead of 2."""
    (tmp_path / "train.json").write_text('{"*": {"pace": 0.01}, "bf16": {"seconds": 0.005}}')
    since = time.monotonic()
    assert Parent(tmp_path).end()[0] == 0
    length = time.monotonic() - since
    verdict = tmp_path / "out" / "verdict.json"
    expected = json.loads(verdict.read_text())
    draw = random.Random(12)
    for number in range(int(os.environ.get("MEZZO_KILLS", 2))):
        if verdict.exists():
            assert json.loads(verdict.read_text()) == expected
            shutil.rmtree(tmp_path / "out")
        parent = Parent(tmp_path)
        time.sleep(draw.uniform(0, 0.9 * length))
        parent.end_by(signal.SIGKILL)
        again = Parent(tmp_path)  # at once: what the killed one left may still run
        if number % 2 == 0:
            status, said = again.end()
            assert status == 0, said
            parent.no_one_is_left()
        else:
            parent.no_one_is_left()
            again.end_by(signal.SIGKILL)
        again.no_one_is_left()
    assert Parent(tmp_path).end()[0] == 0
    assert json.loads(verdict.read_text()) == expected


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_children_and_their_children_end_with_the_comparison(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.json").write_text('{"*": {"hang": true, "child": true}}')
    parent = Parent(tmp_path)
    until = time.monotonic() + 60
    while len(parent.alive) < 4:  # itself, the guard, the child, and its child
        assert time.monotonic() < until
        time.sleep(0.02)
    parent.end_by(number)
    parent.no_one_is_left()


def test_a_child_whose_parent_was_killed_while_it_started_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "r.json").write_text(json.dumps({"target": str(tmp_path / "s.py"), "policy": "fp32"}))
    code = "import runpy; runpy.run_module('mezzo.pytorch.run', run_name='__main__')"
    for parent, ran in (("1", False), (str(os.getpid()), True)):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "r.json")],
            env={**os.environ, "MEZZO_PARENT": parent},
            check=False,
            capture_output=True,
        )
        assert (tmp_path / "ran").exists() is ran


# Two processes and one folder.

VERBS = [
    "compare t.py --precision bf16 --seeds 1",
    "compare t.py --precision bf16 --fresh",
    "calibrate t.py",
    "run --precision fp32",
]


@pytest.mark.parametrize("words", VERBS)
def test_a_folder_in_use_is_left_alone(words: str, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    (tmp_path / "t.py").write_text("raise SystemExit(7)")
    with locked(out):
        before = sorted(out.rglob("*"))
        ran = command(f"{words} --out out", *(["t.py"] if words.startswith("run") else []))
        assert ran.status == 2
        assert sorted(out.rglob("*")) == before
    for word in ("out", f"process {os.getpid()}", Path(sys.argv[0]).name, "--out", "Wait"):
        assert word in ran.err, ran.err


def test_a_folder_is_free_again(tmp_path: Path) -> None:
    """After its process ended, by an error or by SIGKILL; the lock's file is deleted or taken over."""
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    code = (
        "import os; from pathlib import Path; from mezzo.compare.folder import locked\n"
        f"with locked(Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (tmp_path / "runs" / ".attempt-x").mkdir(parents=True)
    with locked(tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "runs"]
        assert list((tmp_path / "runs").iterdir()) == []
    with locked(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_a_lock_deleted_while_it_is_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would each hold a lock: on the old file and on the new."""
    import fcntl

    flock, calls = fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()  # as its holder does at the end
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UsageError, match="in use by"), locked(tmp_path):
            pass


# Records that a run left half written, or that something else damaged.


def _tenth(line: str) -> Callable[[str], str]:
    """Replaces the tenth line."""

    def damage(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join([*lines[:9], line + "\n", *lines[10:]])

    return damage


UPDATE = (
    '{"kind": "update", "index": 3, "optimizer": 0, "moved": null, "skipped": "", "loss_scale": 1, "at": 1}'
)
DAMAGE: dict[str, tuple[Callable[[str], str], bool]] = {  # and whether it is said
    "empty": (lambda text: "", False),
    "no end": (lambda text: "".join(text.splitlines(keepends=True)[:-1]), False),
    "last line cut off": (lambda text: text[:-7], False),
    "line cut off in the middle": (_tenth('{"kind": "lo'), True),
    "null fields": (_tenth('{"kind": "loss", "index": 3, "loss": null, "at": null}'), True),
    "null flags": (_tenth(UPDATE), True),
    "a huge integer": (_tenth('{"kind": "loss", "index": 3, "loss": 1' + "0" * 400 + ', "at": 0}'), True),
    "deeply nested": (_tenth("[" * 100_000), True),
    "not UTF-8": (lambda text: text.replace("loss", "\udcff", 1), True),
}


def test_a_run_with_damaged_records_is_made_again(tmp_path: Path) -> None:
    script = tmp_path / "train.json"
    script.write_text('{"bf16": {"seconds": 0.005}}')
    request = Request(str(script), precisions=("bf16",), seeds=1)
    expected = compare(request, tmp_path / "out", command=FAKE)
    path = tmp_path / "out" / "runs" / "bf16-0.jsonl"
    for what, (damage, is_said) in DAMAGE.items():
        script.with_suffix(".calls").unlink()
        path.write_text(damage(path.read_text()), errors="surrogateescape")
        said: list[str] = []
        watcher = Watcher()
        watcher.say = said.append  # type: ignore[method-assign]
        assert compare(request, tmp_path / "out", command=FAKE, watcher=watcher) == expected, what
        calls = script.with_suffix(".calls").read_text().splitlines()
        assert [line.split()[0] for line in calls] == ["bf16-0"], what
        assert any("bf16-0 is repeated" in line for line in said) is is_said, what
