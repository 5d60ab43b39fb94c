"""What an experiment leaves behind: ``numbers.json`` and its figures, and for all of them one page and one summary.

    DIR/NAME/numbers.json, figure.svg, figure.png
    DIR/summary.json        every NAME in the folder, without its numbers
    DIR/index.html          the figures and sentences on one page, which needs no other file

The page and the summary are made from what lies in the folder, so that experiments may be run one at a time.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.core.whole_file import write_whole
from mezzo.reproduce import NAMES
from mezzo.reproduce.expected import WORDS, Expected
from mezzo.reproduce.experiment import Experiment, Outcome
from mezzo.reproduce.page import render
from mezzo.verify.folder import strict

SCHEMA = 1
NUMBERS, SUMMARY, PAGE = "numbers.json", "summary.json", "index.html"
FIGURES = ("figure.svg", "figure.png")
VERSIONS = ("torch", "numpy", "scikit-learn", "matplotlib", "mezzo")


def make_folder(folder: Path) -> None:
    """Make the output folder, and see to it that it can be written before anything is run.

    Raises:
        UsageError: it is a file, or can't be made or written.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder}: is a file. Name a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}. Name a folder that can be written.") from error


def record_of(
    experiment: Experiment, outcome: Outcome, effort: str, expected: Expected, *, seconds: float
) -> dict[str, Any]:
    """What ``numbers.json`` holds.

    ``experiment``, ``title``, ``source``, ``effort``; ``findings``, each with ``name``, ``expected``, ``seen``,
    ``holds``, ``fate`` (a key of `mezzo.reproduce.expected.WORDS`) and ``why`` (of a known negative); ``missing``,
    the findings that should be shown and are not there; ``numbers``; ``seconds``, ``finished``, ``machine``
    and ``versions``.

    Raises:
        TypeError: the numbers are no plain JSON.
    """
    from mezzo.pytorch import machine

    record = {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "effort": effort,
        "findings": [
            {
                "name": finding.name,
                "expected": finding.expected,
                "seen": finding.seen,
                "holds": bool(finding.holds),
                "fate": expected.fate(finding),
                "why": expected.not_shown.get(finding.name, ""),
            }
            for finding in outcome.findings
        ],
        "missing": list(expected.missing(outcome.findings)),
        "numbers": outcome.numbers,
        "seconds": round(seconds, 1),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": {name: _version(name) for name in VERSIONS},
    }
    plain: dict[str, Any] = json.loads(json.dumps(strict(record), allow_nan=False))
    return plain


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_experiment(folder: Path, record: dict[str, Any], drawn: dict[str, bytes]) -> None:
    """Write one experiment's files, and none of an earlier run's stay. The numbers come last: where they are, all is.

    Raises:
        UsageError: a file can't be written.
    """
    try:
        folder.mkdir(exist_ok=True)
        for old in (NUMBERS, *FIGURES):
            (folder / old).unlink(missing_ok=True)
        for name, content in drawn.items():
            (folder / name).write_bytes(content)
        write_whole(folder / NUMBERS, json.dumps(record, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}. Make room, or name another --out.") from error


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> record of every experiment whose numbers lie in the folder, in the order of `NAMES`."""
    found = {}
    for path in sorted(folder.glob(f"*/{NUMBERS}")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # half a file of another program's is no experiment of ours
        if isinstance(record, dict) and record.get("schema") == SCHEMA:
            found[path.parent.name] = record
    order = {name: place for place, name in enumerate(NAMES)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def summary_of(records: dict[str, dict[str, Any]], crashed: dict[str, str]) -> dict[str, Any]:
    """What ``summary.json`` holds: each record without its numbers, and why others have none."""
    return {
        "schema": SCHEMA,
        "words": WORDS,
        "experiments": {
            name: {key: value for key, value in record.items() if key not in ("numbers", "schema")}
            for name, record in records.items()
        },
        "crashed": crashed,
    }


def write_index(folder: Path, crashed: dict[str, str]) -> Path:
    """Write the summary and the page of all that lies in the folder, and return the page's path.

    Args:
        folder: of all experiments.
        crashed: name -> reason of those that have no result of this run; what an earlier one left is not shown.

    Raises:
        UsageError: a file can't be written.
    """
    records = {name: record for name, record in read_all(folder).items() if name not in crashed}
    figures = {name: _bytes(folder / name / "figure.svg") for name in records}
    try:
        write_whole(folder / SUMMARY, json.dumps(summary_of(records, crashed), indent=1) + "\n")
        write_whole(
            folder / PAGE,
            render(records, {name: drawn for name, drawn in figures.items() if drawn is not None}, crashed),
        )
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}. Make room, or name another --out.") from error
    return folder / PAGE


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
