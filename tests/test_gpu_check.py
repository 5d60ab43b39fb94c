"""benchmarks/gpu_check.py: says what it needs where there is no GPU, and loses nothing when a part fails."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="holds"/>
<testcase classname="tests.a" name="breaks"><failure message="assert 1 == 2&#10;more">long</failure></testcase>
<testcase classname="tests.a" name="waits"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_without_a_gpu_it_exits_with_2_and_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
    assert done.stdout == ""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns where it has CUDA and no driver
def test_each_parts_failure_is_recorded_and_the_rest_runs(check: ModuleType, tmp_path: Path) -> None:
    parts = {
        "breaks": check.Part(("-c", "import sys; print('why', file=sys.stderr); sys.exit(3)", "{out}"), 1),
        "hangs": check.Part(("-c", "import time; time.sleep(60)", "{out}"), 0.01),
        "wrote first": check.Part(
            ("-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('[1]'); sys.exit(1)", "{out}"),
            1,
        ),
        "empty": check.Part(("-c", "", "{out}"), 1),
        "doctor": check.Part(("-c", "print('{\"schema\": 1}')"), 1, printed=True),
        "tests": check.Part(
            (
                "-c",
                f"import pathlib, sys; pathlib.Path(sys.argv[1].split('=')[-1]).write_text({JUNIT!r})",
                "--junitxml={out}",
            ),
            1,
        ),
    }
    out = tmp_path / "deep" / "report.json"
    report = check.assemble("Some GPU", parts, out, Console(quiet=True))
    assert json.loads(out.read_text()) == report
    found = report["parts"]
    assert list(found) == list(parts)
    assert "exit status 3: why" in found["breaks"]["error"]
    assert "not done after" in found["hangs"]["error"]
    assert found["wrote first"]["result"] == [1]
    assert "exit status 1" in found["wrote first"]["error"]
    assert "nothing that can be read" in found["empty"]["error"]
    assert found["doctor"]["result"] == {"schema": 1}
    assert found["tests"]["result"] == {
        "tests": 3,
        "failed": {"tests.a::breaks": "assert 1 == 2"},
        "skipped": {"tests.a::waits": "needs two GPUs"},
    }
    held = {claim: value["held"] for claim, value in report["verdicts"].items()}
    assert held["tests: ran to its end"]
    assert not held["hangs: ran to its end"]
    assert not held["tests marked gpu pass"]


def test_every_part_is_a_command_that_this_repository_has(check: ModuleType) -> None:
    for part in check.PARTS.values():
        for word in part.command:
            if word.endswith(".py"):
                assert (BENCHMARKS.parent / word).is_file()
