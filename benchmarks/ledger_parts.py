"""The parts of the ledger, as data: the command of each part, and the rows that its result file contains.

A `Row` is one figure. A `Part` has the command that measures it; `{out}` in the command is the file that it writes,
and `read` turns that file into rows. `PARTS` is the table. To add a part, add its line there and a function here.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import run
from typing import Any

from scipy import stats

import outcomes

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("fp32", "amp-bf16", "amp-fp16")
"""Contenders of `make bench` that are not Mezzo's: their figures are not Mezzo's to keep."""

TESTS: Mapping[str, tuple[str, ...]] = {
    "launch equality": ("run_equality*", "no_trace*", "same_sequence*"),
    "skip and restore": (
        *("running_statistics*", "two_networks*", "undefined_gradients*"),
        *("run_gradients*", "training", "grad_scaler*"),
    ),
    "checkpoint resumes": ("training_state*", "optim_state*"),
    "layouts and tensor kinds": ("layouts*", "dispatch*"),
    "verdict": ("verdict*",),
    "durability": ("compare*",),
}
"""Group -> patterns of tests/test_PATTERN.py."""

VARIES = ("skipped steps of clean runs", "policies that remedies name")
"""Counts of faults.json whose total is not a number of cases: it changes with what a run does."""

SUFFIXES = (".py", ".toml", ".css", ".js", ".html", ".md")


@dataclass
class Row:
    """One figure of a part.

    Args:
        name: unique in its part.
        value: None where it was not measured: `note` says why.
        better: "lower" or "higher"; "info" has no verdict.
        interval: of 95 %; None for what has no noise.
        unit: "x" (a ratio), "bytes", "of" (so many of `of`), "%", "lines", "files", "s".
        of: the number of cases, for unit "of".
        failed: the names of the cases that do not pass.
        note: why there is no value: "not run: ..." or "failed: ...".
    """

    name: str
    value: float | None
    better: str = "lower"
    unit: str = "x"
    interval: list[float] | None = None
    of: int | None = None
    failed: list[str] = field(default_factory=list)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without what is not set, except the value; with four decimals."""
        if isinstance(self.value, float):
            self.value = round(self.value, 4)
        if self.interval:
            self.interval = [round(number, 4) for number in self.interval]
        return {
            key: value for key, value in asdict(self).items() if key == "value" or value not in (None, [], "")
        }


@dataclass(frozen=True)
class Part:
    """A part of the ledger.

    Args:
        command: of a benchmark in this folder, with its options; empty where `read` measures by itself.
        result: the name of the file that it writes, in benchmarks/results.
        read: result file, or the root of the measured checkout where there is no command -> rows.
        keeps: whether the result file is one to keep. One of a run with few rounds is not.
        default: whether it runs where no part is named.
    """

    command: tuple[str, ...]
    result: str
    read: Callable[[Path], Iterable[Row]]
    keeps: bool = True
    default: bool = True


def load(path: Path) -> Any:
    """The result file, parsed."""
    return json.loads(path.read_text(encoding="utf-8"))


def _contenders(path: Path, key: str) -> Iterator[tuple[str, str, Any]]:
    """(where, contender with its baseline, figure) of each of Mezzo's contenders in bench.json."""
    results = load(path)
    cells = {
        f"{row}, {mode}": found for row, modes in results["rows"].items() for mode, found in modes.items()
    }
    for classes, kinds in results.get("loss", {}).items():
        if isinstance(kinds, dict):
            cells |= {f"loss of {classes} classes, {kind}": found for kind, found in kinds.items()}
    for where, found in cells.items():
        figures = {**found.get(key, {}), **{name: str(why) for name, why in found.get("raised", {}).items()}}
        yield from ((where, name, figure) for name, figure in figures.items() if name not in PEERS)
        if "error" in found:
            yield where, "all", found["error"]


def _timed(found: Mapping[str, Any], name: str) -> Row:
    return Row(name, found["ratio"], interval=list(found["interval"]))


def speed(path: Path) -> Iterator[Row]:
    """Step times of `make bench`, as ratios to torch.amp."""
    for where, contender, found in _contenders(path, "ratios"):
        name = f"{where}, {contender}: time"
        yield Row(name, None, note=f"failed: {found}") if isinstance(found, str) else _timed(found, name)


def peaks(path: Path) -> Iterator[Row]:
    """Peak bytes of `make bench`."""
    for where, contender, found in _contenders(path, "peak_bytes"):
        note = f"failed: {found}" if isinstance(found, str) else ""
        yield Row(f"{where}, {contender}: peak", None if note else found, unit="bytes", note=note)


def optimizers(path: Path) -> Iterator[Row]:
    """Mezzo's AdamW in each mode: its step as a ratio to torch's fused one, and bytes per parameter."""
    for cell in load(path)["cells"]:
        for contender, found in cell["rows"].items():
            if contender.startswith("mezzo"):
                name = f"{cell['size']} {cell['layout']}, {contender}"
                yield _timed(found, f"{name}: time")
                total = found["bytes_per_parameter"]["total"]
                yield Row(f"{name}: bytes per parameter", total, unit="bytes")


def emulation(path: Path) -> Iterator[Row]:
    """A training step under each policy, as a ratio to FP32's; and the bytes that it keeps for backward."""
    for demo, natives in load(path)["demos"].items():
        for native, found in natives.items():
            for policy, row in found["policies"].items():
                if policy != "fp32":
                    name = f"{demo}, {policy}, native {native}"
                    value, *interval = row["time"]
                    yield Row(f"{name}: time", value, interval=interval)
                    yield Row(f"{name}: kept", row["kept_bytes"], unit="bytes")


def block_formats(path: Path) -> Iterator[Row]:
    """A training step in each block format, as a ratio to bf16's; and the bytes that its layers keep as stored."""
    for policy, row in load(path)["rows"].items():
        if policy != "bf16":
            value, *interval = row["time"]
            yield Row(f"{policy}: time", value, interval=interval)
            yield Row(f"{policy}: kept", row["kept_bytes"], unit="bytes")


def ratios(path: Path) -> Iterator[Row]:
    """A file of rows, each a ratio with its interval: overhead.json, small_models.json."""
    for name, found in load(path)["rows"].items():
        if not name.startswith(
            ("plain ", "autocast ", "least ")
        ):  # small_models.py's contenders that are not Mezzo's
            yield _timed(found, name)


def faults(path: Path) -> Iterator[Row]:
    """The fault corpus: planted faults that were named, and clean runs without a false alarm."""
    found = load(path)
    for name, (right, total) in found["counts"].items():
        if name.startswith(VARIES):
            yield Row(f"not so: {name}", total - right, unit="count")
        else:
            yield Row(name, right, "higher", "of", of=total)
    runs = [*found["clean"], *found["clean_scripts"]]
    yield Row("false alarms", sum(run["alarms"] for run in runs), unit="count")


def verdict(path: Path) -> Iterator[Row]:
    """The verdict on simulated runs: the worst rate of wrong words of each group, and the error of printed power.

    Intervals are of the number of trials: Wilson's for a rate. An error of power is a mean of numbers between 0 and 1,
    whose standard error is 0.5 / sqrt(trials) at most.
    """
    found = load(path)
    for quantity, cells in found.items():
        for group, rates in cells.items() if isinstance(cells, dict) else ():
            value, trials = max(_leaves(rates)), max(1, found["trials"] // FEWER_TRIALS.get(quantity, 1))
            if quantity == "power_error":
                reach = 1.96 * 0.5 / math.sqrt(trials)
                interval = [value - reach, value + reach]
            else:
                interval = list(stats.binomtest(round(value * trials), trials).proportion_ci(method="wilson"))
            yield Row(f"{quantity.replace('_', ' ')}, {group}: worst", value, unit="share", interval=interval)


FEWER_TRIALS = {"power_error": 3, "early_end": 10}


def _leaves(cells: Any) -> Iterator[float]:
    if not isinstance(cells, dict):
        yield abs(cells)
    for cell in (
        [cells["error"]] if isinstance(cells, dict) and "error" in cells else getattr(cells, "values", list)()
    ):
        yield from _leaves(cell)


def conformance(path: Path) -> Iterator[Row]:
    """PyTorch's own tests that pass with Mezzo's classes in their place."""
    for name, suite in load(path)["suites"].items():
        failed = sorted(test for test, told in suite["tests"].items() if told["outcome"] != "passed")
        yield Row(f"PyTorch's tests, {name}", suite["passed"], "higher", "of", of=suite["of"], failed=failed)


def groups(folder: Path) -> dict[str, list[Path]]:
    """Group -> the test files that are its."""
    return {
        group: sorted({path for pattern in patterns for path in folder.glob(f"test_{pattern}.py")})
        for group, patterns in TESTS.items()
    }


def cases(_: Path) -> Iterator[Row]:
    """The cases of this checkout's tests, by group, on the sources that are measured."""
    for group, files in groups(ROOT / "tests").items():
        arguments = [str(path.relative_to(ROOT)) for path in files]
        found = outcomes.run(["-n", "2", *arguments], ROOT, {"OMP_NUM_THREADS": "1"}) if files else {}
        ran = {test: outcome for test, (outcome, _) in found.items() if outcome != "skipped"}
        failed = sorted(test for test, outcome in ran.items() if outcome == "failed")
        yield Row(group, len(ran) - len(failed), "higher", "of", of=len(ran), failed=failed)


def sizes(root: Path) -> Iterator[Row]:
    """Lines and files of each folder. They have no verdict."""
    package = root / "src" / "mezzo"
    rooms = [
        path
        for folder in (package, package / "pytorch")
        for path in sorted(folder.iterdir())
        if path.is_dir()
    ]
    for folder in (root / "src", *rooms, root / "tests", root / "benchmarks", root / "docs"):
        files = [p for p in folder.rglob("*") if p.suffix in SUFFIXES and "__pycache__" not in p.parts]
        if files:
            name = folder.relative_to(root).as_posix()
            lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
            yield Row(f"{name}: lines", lines, "info", "lines")
            yield Row(f"{name}: files", len(files), "info", "files")


def ci(root: Path) -> Iterator[Row]:
    """Seconds of `make test` in a fresh clone of HEAD, with its installation: no verdict, no seconds if it fails."""
    with tempfile.TemporaryDirectory() as clone:
        run(["git", "clone", "--quiet", str(root), clone], check=True)
        begun = time.monotonic()
        status = run(["make", "test"], cwd=clone, stdout=sys.stderr).returncode
        seconds = round(time.monotonic() - begun, 1)
    note = f"failed: exit status {status} after {seconds} s" if status else ""
    yield Row("make test", None if status else seconds, "info", "s", note=note)


PARTS: Mapping[str, Part] = {
    "sizes": Part((), "", sizes),
    "cases": Part((), "", cases),
    "conformance": Part(("conformance.py", "--out", "{out}"), "conformance.json", conformance),
    "faults": Part(("faults.py", "--json", "{out}"), "faults.json", faults),
    "verdict": Part(("verdict_simulation.py", "--out", "{out}"), "verdict_simulation.json", verdict),
    "speed": Part(("bench.py", "--out", "{out}"), "bench.json", speed),
    "bytes": Part(("bench.py", "--rounds", "2", "--out", "{out}"), "bench.json", peaks, keeps=False),
    "optimizers": Part(("optimizers.py", "--out", "{out}"), "optimizers.json", optimizers),
    "block-formats": Part(("block_formats.py", "--out", "{out}"), "block_formats.json", block_formats),
    "emulation": Part(("emulation.py", "--out", "{out}"), "emulation.json", emulation),
    "overhead": Part(("overhead.py", "--out", "{out}"), "overhead.json", ratios),
    "small": Part(("small_models.py", "--out", "{out}"), "small_models.json", ratios),
    "ci": Part((), "", ci, default=False),
}
