"""The examples of docs/recipes: each runs as it stands, small, with warnings as errors, and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# Example, what it is given beside --steps, steps, what its last line must be.
RUNS = [
    ("cnn.py", ["--precision", "fp16"], 12, r"fp16: [0-9.]+% of unseen digits right"),
    ("cnn.py", ["--precision", "bf16"], 12, r"bf16: [0-9.]+% of unseen digits right"),
    ("transformer.py", [], 6, r"bf16,params=bf16: [0-9,]+ weights, last loss \d\.\d+"),
    ("transformer.py", ["--precision", "fp8"], 6, r"fp8,params=bf16,.*: [0-9,]+ weights, last loss \d\.\d+"),
    (
        "recurrent.py",
        ["--precision", "fp16,hidden=fp32"],
        6,
        r"fp16,hidden=fp32: outputs torch.float16, states torch.float32 and .*",
    ),
    ("gan.py", [], 30, r"\d of 8 heaps reached, \d+% of points in one"),
    ("gan.py", ["--generator", "bf16", "--discriminator", "fp32"], 30, r"\d of 8 heaps reached, .*"),
    ("fine_tuning.py", [], 20, r"\{'torch.float32'\} to save, beside .*'torch.bfloat16'.*"),
    ("accumulation_and_clipping.py", [], 8, r"fp16: 3 updates from 10 batches, last loss .*"),
]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "given", "steps", "last"), RUNS, ids=[f"{row[0]} {' '.join(row[1])}" for row in RUNS]
)
def test_an_example_runs(name: str, given: list[str], steps: int, last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), "--steps", str(steps), *given],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(last, done.stdout.strip().splitlines()[-1]), done.stdout


def test_every_example_is_run_and_has_a_page() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("keras_")}
    assert {row[0] for row in RUNS} == names
    pages = "".join(
        path.read_text(encoding="utf-8") for path in (EXAMPLES.parent / "docs/recipes").glob("*.md")
    )
    for name in names:
        assert f"`examples/{name}`" in pages
