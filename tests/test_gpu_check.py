"""benchmarks/gpu_check.py: says what it needs where there is no GPU, and loses nothing when a part fails."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


def _row(launches: int | None, of_copy: float) -> dict[str, Any]:
    copies = ["Memcpy HtoD (Pinned -> Device)"]
    names = {} if launches is None else {"launches": ["kernel"] * launches + copies}
    return {"of_copy": of_copy, "gb_per_s": 1000 * of_copy, **names}


# What a GPU could have answered.
OPTIMIZERS = {
    "cells": [
        {
            "size": "128M",
            "layout": "many",
            "rows": {
                "torch fused, FP32": _row(9, 0.9),
                "mezzo split/fp32": _row(1, 0.91),
                "mezzo split8/int8": _row(2, 0.62),
                "mezzo none/int8": _row(None, 0.85),
                "mezzo split/fp32, fallback": _row(400, 0.1),
            },
            "raised": {
                "mezzo split/bf16": "RuntimeError: out of registers",
                "mezzo none/bf16": "not run on cuda",
            },
        }
    ]
}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="holds"/>
<testcase classname="tests.a" name="breaks"><failure message="assert 1 == 2&#10;more">long</failure></testcase>
<testcase classname="tests.a" name="waits"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def _writes(check: ModuleType, text: str, *last: str) -> Any:
    program = f"import pathlib, sys; pathlib.Path(sys.argv[-1].split('=')[-1]).write_text({text!r})"
    return check.Part(("-c", program, *(last or ("{out}",))), 1)


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
        "tests": _writes(check, JUNIT, "--junitxml={out}"),
        "optimizers": _writes(check, json.dumps(OPTIMIZERS)),
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


def test_verdicts_on_a_fake_gpus_result(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = check.verdicts({"optimizers": {"result": OPTIMIZERS}})
    assert {claim: value["held"] for claim, value in verdicts.items()} == {
        "optimizers: ran to its end": True,
        "mezzo split/fp32, 128M, many: one launch": True,
        "mezzo split/fp32, 128M, many: 85% of copy bandwidth": True,
        "mezzo split8/int8, 128M, many: one launch": False,
        "mezzo split8/int8, 128M, many: 85% of copy bandwidth": False,
        "mezzo none/int8, 128M, many: one launch": None,
        "mezzo none/int8, 128M, many: 85% of copy bandwidth": True,
        "mezzo split/bf16, 128M, many: runs": False,
    }
    check.show({"environment": {"gpu": "Some GPU"}, "verdicts": verdicts}, Console(width=150))
    printed = capsys.readouterr().out
    assert "Some GPU" in printed
    assert printed.count("DID NOT HOLD") == 3
    only_skips = {"tests": 1, "failed": {}, "skipped": {"a": "no device"}}  # no test that ran is not a pass
    assert check.verdicts({"tests": {"result": only_skips}})["tests marked gpu pass"]["held"] is False


def test_every_part_is_a_command_that_this_repository_has(check: ModuleType) -> None:
    for part in check.PARTS.values():
        for word in part.command:
            if word.endswith(".py"):
                assert (BENCHMARKS.parent / word).is_file()
