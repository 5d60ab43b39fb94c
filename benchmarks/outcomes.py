"""Run pytest in a separate process and return the outcome of each test: `run(arguments)`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

WORST_LAST = ("passed", "skipped", "failed")


def run(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Test -> ("passed", "failed" or "skipped", the first line of its reason).

    A file that cannot be imported is one failed test, named as pytest names it. What pytest prints goes to stderr.

    Raises:
        RuntimeError: pytest did not get as far as its report.
    """
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *arguments], cwd=folder, env={**os.environ, **(environment or {})}, stdout=sys.stderr
        )
        if not report.is_file():
            raise RuntimeError(f"pytest ended with status {done.returncode} and wrote no report")
        return read(report)


def read(report: Path) -> dict[str, tuple[str, str]]:
    """The same from a JUnit XML file. A test with an error in teardown too counts once, by the worse outcome."""
    found: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}".lstrip(":")
        outcome, why = "passed", ""
        for kind, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            for element in case.iter(kind):
                outcome, why = word, (element.get("message") or "").strip().partition("\n")[0]
        known = found.get(name, ("passed", ""))
        found[name] = max(known, (outcome, why), key=lambda each: WORST_LAST.index(each[0]))
    return found
