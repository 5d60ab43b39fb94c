"""`make ledger`: Mezzo's figures against the committed ones; exit status 1 where one is worse beyond its interval.

    python benchmarks/ledger.py                                   # every part but `ci`; about an hour
    python benchmarks/ledger.py --part sizes,cases,conformance    # only these; the file's other parts stay
    python benchmarks/ledger.py --part speed --from-results       # no measurement: reads benchmarks/results/*.json
    python benchmarks/ledger.py --part cases --source ../old --out old.json    # the sources of another checkout

Writes benchmarks/results/ledger.json and prints each figure against that of HEAD's ledger.json (the file on disk
where git has none). ledger_parts.py has the parts. Worse means:

- with intervals: the value is worse and the two 95 % intervals do not overlap;
- bytes: more by over 0.1 %; other figures without an interval: any difference in the wrong direction;
- cases: fewer pass, there are fewer, or one fails that did not fail;
- a figure that the part no longer gives, or a command that fails.

"info" figures (lines, files, seconds) have no verdict. A part that cannot run on this machine says why, keeps its
committed figures and does not change the exit status. Ratios of times need a quiet machine; peak bytes need the
committed number of threads. Figures of another machine are compared too, and a line says so.

Exit status: 0 nothing is worse, 1 something is, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ledger_parts import PARTS, ROOT, Part, Row, load
from mezzo.pytorch.hardware import describe

OUT = ROOT / "benchmarks" / "results" / "ledger.json"
BYTES = 0.001  # of the committed figure: what bytes may grow by
VERDICTS = ("worse", "better", "within", "same", "new", "missing", "info", "not run")
ARROWS = dict(zip(VERDICTS, "▼▲==+▼·?"))
COLORS = {"worse": "red", "missing": "red", "better": "green", "not run": "yellow"}
FAILS = ("worse", "missing")
Ledger = dict[str, dict[str, Any]]
"""Part -> its command, where and how it was measured, and its rows: name -> `Row.to_json()`."""


@dataclass(frozen=True)
class Line:
    """A figure with the committed one."""

    part: str
    name: str
    verdict: str
    before: Mapping[str, Any] | None
    now: Mapping[str, Any] | None
    why: str = ""


def compare(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> tuple[str, str]:
    """The verdict (a key of `ARROWS`) on a row against the committed one, and why."""
    note = str((now or {}).get("note", ""))
    if note:
        known = before is not None and before["value"] is None
        return ("not run" if note.startswith("not run") else "same" if known else "worse"), note
    if before is None or before["value"] is None:
        return ("info" if now and now["better"] == "info" else "new"), ""
    if now is None:
        return ("info", "gone") if before["better"] == "info" else ("missing", "no longer measured")
    if now["better"] == "info":
        return "info", ""
    if now["unit"] == "of":
        return _cases(before, now)
    was, value = before["value"], now["value"]
    sign = 1 if now["better"] == "lower" else -1
    if value == was:
        return "same", ""
    if before.get("interval") or now.get("interval"):
        low, high = before.get("interval") or (was, was)
        lowest, highest = now.get("interval") or (value, value)
        if lowest <= high and low <= highest:
            return "within", ""
    elif now["unit"] == "bytes" and abs(value - was) <= BYTES * abs(was):
        return "within", ""
    return ("worse" if sign * (value - was) > 0 else "better"), ""


def _cases(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    fails = sorted(set(now.get("failed", ())) - set(before.get("failed", ())))
    if fails:
        return "worse", f"{len(fails)} that did not fail: {', '.join(fails[:3])}" + ", ..." * (len(fails) > 3)
    if now["of"] < before["of"]:
        return "worse", f"{before['of'] - now['of']} fewer cases"
    if now["value"] == before["value"]:
        return "same", ""
    return ("worse" if now["value"] < before["value"] else "better"), ""


def lines(committed: Ledger, found: Ledger, parts: list[str]) -> Iterator[Line]:
    """Each row of the parts that were measured, in the order of the table, with its verdict."""
    for part in parts:
        before, now = (ledger.get(part, {}).get("rows", {}) for ledger in (committed, found))
        gone = [name for name, row in before.items() if name not in now and row["value"] is not None]
        for name in (*now, *([] if unmeasured(found[part]) else gone)):
            verdict, why = compare(before.get(name), now.get(name))
            yield Line(part, name, verdict, before.get(name), now.get(name), why)


def unmeasured(part: Mapping[str, Any]) -> bool:
    """Whether the part has no figure at all, since it could not run or failed as a whole."""
    return bool(part["rows"]) and all(row.get("note") for row in part["rows"].values())


def measure(
    name: str, part: Part, arguments: argparse.Namespace, folder: Path, fresh: dict[str, Path]
) -> list[Row]:
    """The rows of a part. A failure is a row with a note.

    Args:
        folder: where a result file goes that isn't kept.
        fresh: result files of this run, by name: parts that read the same one measure once.
    """
    path = fresh.get(part.result) or (arguments.results if part.keeps else folder) / part.result
    try:
        if not part.command:
            return list(part.read(arguments.source or ROOT))
        if arguments.from_results:
            path = arguments.results / part.result
            if not path.is_file():
                return [Row(name, None, note=f"not run: there is no {part.result} to read")]
        elif part.result not in fresh:
            path = folder / part.result
            failure = _run(part, path)
            if failure:
                return [Row(name, None, note=f"failed: {failure}")]
            if part.keeps and "not_run" not in load(path):  # else the figures of another machine stay
                kept = arguments.results / part.result
                if kept != path:  # they are one file with --source
                    arguments.results.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, kept)
                path = fresh[part.result] = kept
        found = load(path)
        if "not_run" in found:
            return [Row(name, None, note=f"not run: {found['not_run']}")]
        return list(part.read(path))
    except Exception as error:  # whatever a benchmark wrote: the other parts go on
        return [Row(name, None, note=f"failed: {type(error).__name__}: {error}")]


def _run(part: Part, path: Path) -> str:
    """Run the benchmark; why there is no new result file, or nothing. A benchmark may exit with 1 for a finding."""
    before = path.stat().st_mtime_ns if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    script, *rest = (word.format(out=path) for word in part.command)
    with tempfile.TemporaryFile("w+") as stderr:
        command = [sys.executable, str(ROOT / "benchmarks" / script), *rest]
        status = subprocess.run(command, stdout=sys.stderr, stderr=stderr, cwd=ROOT).returncode
        stderr.seek(0)
        last = [line.strip() for line in stderr.read().splitlines() if line.strip()][-1:]
    written = path.is_file() and path.stat().st_mtime_ns != before
    return "" if written and status in (0, 1) else f"{script}: exit status {status}: {''.join(last)}"


def entry(name: str, rows: list[Row], arguments: argparse.Namespace, minutes: float) -> dict[str, Any]:
    """A part as the ledger keeps it: how it was measured, and its rows."""
    part, machine = PARTS[name], None
    git = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, cwd=arguments.source or ROOT, capture_output=True, text=True)
    commit = done.stdout.strip() or "a folder without git"
    found = {
        "command": f"python benchmarks/ledger.py --part {name}",
        "source": f"measured on {commit} or later",
    }
    if part.command:
        found["command"] = " ".join(("python", f"benchmarks/{part.command[0]}", *part.command[1:-2]))
    if part.command and arguments.from_results:
        found["source"] = f"read from {part.result} of {commit}, not measured anew"
        path = arguments.results / part.result
        machine = load(path).get("machine") if path.is_file() else None
    kept = {key: (machine or describe()).get(key) for key in ("cpu", "threads", "torch")}
    figures = {row.name: {k: v for k, v in row.to_json().items() if k != "name"} for row in rows}
    return {**found, "machine": kept, "minutes": round(minutes, 1), "rows": figures}


def committed() -> Ledger:
    """The ledger of HEAD; the file on disk where git has none."""
    command = ["git", "show", f"HEAD:{OUT.relative_to(ROOT).as_posix()}"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found: Ledger = json.loads(git.stdout)["parts"] if git.returncode == 0 else on_disk(OUT)
    return found


def on_disk(path: Path) -> Ledger:
    """The parts that a file holds; none where it does not exist."""
    found: Ledger = load(path)["parts"] if path.is_file() else {}
    return found


def replaced(old: Ledger, new: Ledger) -> Ledger:
    """`old` with the parts of `new`, in the order of `PARTS`. A part without any figure does not replace one."""
    merged = {**old, **{name: part for name, part in new.items() if name not in old or not unmeasured(part)}}
    return {name: merged[name] for name in (*PARTS, *(merged.keys() - PARTS)) if name in merged}


def write(path: Path, ledger: Ledger) -> None:
    """As JSON with one row a line, so that a diff shows figures."""
    parts = []
    for name, part in ledger.items():
        head = [f'   "{key}": {json.dumps(value)}' for key, value in part.items() if key != "rows"]
        rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in part["rows"].items())
        parts.append(f'  "{name}": {{\n' + ",\n".join([*head, f'   "rows": {{\n{rows}\n   }}']) + "\n  }")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{\n "schema": 1,\n "parts": {\n' + ",\n".join(parts) + "\n }\n}\n", encoding="utf-8")


def shown(row: Mapping[str, Any] | None) -> str:
    """A figure as a cell."""
    if row is None or row["value"] is None:
        return ""
    value, unit = row["value"], row.get("unit", "x")
    if unit == "of":
        return f"{value} of {row['of']}"
    if unit in ("bytes", "lines", "files", "count") and value == int(value):
        return f"{int(value):,}"
    if row.get("interval"):
        low, high = row["interval"]
        return f"{value:.3f} ({low:.3f} to {high:.3f})"
    return f"{value:.4g}"


def show(all_lines: list[Line], console: Console, everything: bool) -> None:
    """For each part how many figures have which verdict, and a table of those that changed."""
    for part in dict.fromkeys(line.part for line in all_lines):
        of_part = [line for line in all_lines if line.part == part]
        counts = {word: sum(line.verdict == word for line in of_part) for word in ARROWS}
        summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        console.print(f"{part}: {summary}", markup=False)
        table = Table(box=None, pad_edge=False, show_header=False)
        for line in of_part:
            if everything or _changed(line):
                head = (f"  {ARROWS[line.verdict]} {line.verdict}", escape(line.name))
                figures = (shown(line.before), "->", shown(line.now), escape(line.why))
                table.add_row(*head, *figures, style=COLORS.get(line.verdict, ""))
        if table.row_count:
            console.print(table)


def _changed(line: Line) -> bool:
    """Whether there is something to show."""
    if line.verdict == "info" and line.before and line.now:
        return bool(line.before["value"] != line.now["value"])
    return line.verdict not in ("same", "within")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = ", ".join(name for name, part in PARTS.items() if part.default)
    parser.add_argument("--part", help=f"some of: {', '.join(PARTS)} (default: {usual})")
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="measure the src/ of this checkout; needs --out"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="default %(default)s")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with this ledger instead of HEAD's"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder of the result files")
    parser.add_argument("--from-results", action="store_true", help="read the result files, run no benchmark")
    parser.add_argument("--all", action="store_true", help="print unchanged figures too")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")
    return parser


def _checked(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """The chosen parts. Ends with status 2 where the arguments don't fit together."""
    chosen = [word for word in (arguments.part or "").replace(",", " ").split() if word]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--part {unknown[0]}: unknown part. Use some of {', '.join(PARTS)}")
    if arguments.against and not arguments.against.is_file():
        parser.error(f"--against {arguments.against}: there is no such file")
    if arguments.source:
        arguments.source = arguments.source.resolve()
        if arguments.out == OUT:
            parser.error(
                "--source measures other sources: give --out, so that it does not replace this ledger"
            )
        if not (arguments.source / "src" / "mezzo").is_dir():
            parser.error(f"--source {arguments.source}: there is no src/mezzo in it")
        paths = (str(arguments.source / "src"), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if arguments.results is None and arguments.from_results:
        arguments.results = (arguments.source or ROOT) / "benchmarks" / "results"
    return chosen or [name for name, part in PARTS.items() if part.default]


def _machine(of: Mapping[str, Any]) -> str:
    return f"{of['cpu']}, {of['threads']} threads, PyTorch {of['torch']}"


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    chosen = _checked(parser, arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    progress = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    found: Ledger = {}
    against = on_disk(arguments.against) if arguments.against else committed()
    with tempfile.TemporaryDirectory() as temporary:
        folder, fresh = Path(temporary), dict[str, Path]()
        if arguments.results is None:  # this checkout's result files are not of other sources
            arguments.results = folder if arguments.source else OUT.parent
        for number, name in enumerate(chosen, 1):
            since = time.monotonic()
            progress.print(f"[{number}/{len(chosen)}] {name} ({(since - begun) / 60:.1f} min)", markup=False)
            rows = measure(name, PARTS[name], arguments, folder, fresh)
            found[name] = entry(name, rows, arguments, (time.monotonic() - since) / 60)
            write(arguments.out, replaced(on_disk(arguments.out), found))
    judged = list(lines(against, found, chosen))
    worse = [line for line in judged if line.verdict in FAILS]
    if arguments.json:
        print(json.dumps([vars(line) for line in judged]))
    else:
        show(judged, console, arguments.all)
        for name in chosen:
            was, now = against.get(name, {}).get("machine"), found[name]["machine"]
            if was and was != now:
                console.print(
                    f"{name}: compared with figures of {_machine(was)}; this is {_machine(now)}", markup=False
                )
        minutes = (time.monotonic() - begun) / 60
        console.print(f"{len(judged)} figures, {len(worse)} worse; {minutes:.1f} minutes")
        console.print(f"written: {arguments.out}", soft_wrap=True)
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
