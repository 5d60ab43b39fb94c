"""Zero-code precision gives, to the last bit, what the same script gives with Mezzo's calls written into it.

Each training of `scripts/trainings.py` runs twice in processes of its own: unchanged under `mezzo run`, watched at
every step, and with `mezzo.autocast` around the model, its output cast to FP32, and `mezzo.GradScaler`. Losses, norms
and every bit of the weights are compared. So those who look at the steps change nothing either.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mezzo
from mezzo.core.records import read

pytestmark = pytest.mark.usefixtures("forked")

SCRIPT = Path(__file__).parent / "scripts" / "trainings.py"
NAMES = (
    *("clipping", "accumulation", "gradient_penalty", "two_optimizers", "shared_and_checkpointed", "lbfgs"),
    "several_losses",
)
# LBFGS and RMSprop can't be adopted
ADOPTED = tuple(name for name in NAMES if name not in ("lbfgs", "gradient_penalty"))

Trained = tuple[dict[str, Any], str]


def trained(words: list[str], names: tuple[str, ...]) -> Trained:
    """What each training printed, and the errors, of `python WORDS trainings.py`."""
    words = [sys.executable, *words, "--only", ",".join(names)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["training"] for line in lines] == list(names)
    return {line.pop("training"): line for line in lines}, done.stderr


@functools.cache
def by_hand(policy: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The script with Mezzo's calls written into it."""
    return trained(["-W", "ignore", str(SCRIPT), "--by-hand", policy], names)[0]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The script itself, under Python."""
    return trained([str(SCRIPT)], NAMES)[0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("policy", "names"),
    [
        pytest.param("bf16", NAMES, marks=pytest.mark.nightly),
        ("fp16", NAMES),
        ("bf16,masters=split8,state=int8", ADOPTED),
    ],
)
def test_zero_code_equals_the_calls_written_by_hand(
    policy: str, names: tuple[str, ...], plain: dict[str, Any], tmp_path: Path
) -> None:
    words = f"-m mezzo run --precision {policy} --watch=1 --out".split()
    ours, errors = trained([*words, str(tmp_path / "run"), str(SCRIPT)], names)
    for name in names:
        assert ours[name] == by_hand(policy, names)[name], name
        assert ours[name]["values"] != plain[name]["values"], name  # it did run in 16 bits
    assert f"mezzo: policy {mezzo.policy(policy)}" in errors
    assert all(words not in errors for words in ("left alone", "stay FP32:", "after an error"))
    found = list(read(tmp_path / "run" / "runs" / "run.jsonl"))
    assert any(r.kind == "ranges" for r in found)
    if policy == "fp16":  # some of them overflow, and those steps count too
        assert " 7 skipped" in errors
        assert "mezzo: 7 steps were skipped while the loss scale adjusted" in errors
        assert sum(r.kind == "overflow" for r in found) == 7


@pytest.mark.heavy
def test_fp32_is_the_script_itself_and_observers_change_nothing(plain: dict[str, Any]) -> None:
    run = ["-m", "mezzo", "run", "--no-trace", "--precision"]
    assert trained([*run, "fp32", str(SCRIPT)], NAMES)[0] == plain
    assert trained([*run, "fp16", str(SCRIPT)], NAMES)[0] == by_hand("fp16", NAMES)
