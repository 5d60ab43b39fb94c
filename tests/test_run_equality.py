"""Zero-code precision gives, to the last bit, what the same script gives with Mezzo's calls written into it.

Each training of `scripts/trainings.py` runs twice in processes of its own: unchanged under `mezzo run`, watched at
every step, and with `mezzo.autocast` around the model, its output cast to FP32, and `mezzo.GradScaler`. Losses, norms
and every bit of the weights are compared. So those who look at the steps change nothing either.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mezzo
from mezzo.core.records import read

SCRIPT = Path(__file__).parent / "scripts" / "trainings.py"
COMPILED = ["compiled_model", "compiled_step"]
EAGER = [
    *("clipping", "overflowing", "accumulation", "gradient_penalty", "two_optimizers", "shared_parameters"),
    *("checkpointing", "lbfgs", "several_losses", "batch_norm"),
]
# LBFGS and RMSprop can't be adopted
ADOPTED = [name for name in EAGER if name not in ("lbfgs", "gradient_penalty")]

Trained = tuple[dict[str, Any], str]


def trained(words: list[str], names: list[str], folder: Path, backend: str = "none") -> Trained:
    """What each training printed, and what was told, of `python WORDS trainings.py`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    # Scalar code without precompiled headers compiles in a third of the time.
    env |= {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    if backend == "aot_eager":  # as in a user's process: a compilation asks what the device has
        env.pop("MEZZO_ASSUME_NATIVE", None)
    words = [sys.executable, *words, "--only", ",".join(names), "--backend", backend]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["training"] for line in lines] == names
    return {line.pop("training"): line for line in lines}, done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The script itself, under Python."""
    return trained([str(SCRIPT)], EAGER, tmp_path_factory.mktemp("plain"))[0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("policy", "backend", "names"),
    [
        ("bf16", "none", EAGER),
        ("fp16", "none", EAGER),
        ("bf16,masters=split8,state=int8", "none", ADOPTED),
        ("fp16", "aot_eager", COMPILED),
        pytest.param("bf16", "inductor", COMPILED[1:], marks=pytest.mark.compiler),
    ],
)
def test_zero_code_equals_the_calls_written_by_hand(
    policy: str, backend: str, names: list[str], plain: dict[str, Any], tmp_path: Path
) -> None:
    if backend == "inductor" and not (shutil.which("g++") or os.environ.get("CXX")):
        pytest.skip("Inductor needs a C++ compiler, and there is no g++")
    words = f"-m mezzo run --precision {policy} --watch=1 --out".split()
    ours, told = trained([*words, str(tmp_path / "run"), str(SCRIPT)], names, tmp_path, backend)
    by_hand, _ = trained(["-W", "ignore", str(SCRIPT), "--by-hand", policy], names, tmp_path, backend)
    for name in names:
        assert ours[name] == by_hand[name], name
    assert f"mezzo: policy {mezzo.policy(policy)}" in told
    assert all(words not in told for words in ("left alone", "stay FP32:", "gave up"))
    found = list(read(tmp_path / "run" / "runs" / "run.jsonl"))
    seen = any(r.kind == "ranges" for r in found)
    assert seen == (names != COMPILED[1:])  # what a compiled function calls is not seen
    if backend == "none":  # it did run in 16 bits
        assert all(ours[name]["values"] != plain[name]["values"] for name in names)
    if policy == "fp16" and backend == "none":  # some of them overflow, and those steps count too
        assert " 7 skipped" in told
        assert "mezzo: 7 steps were skipped while the loss scale adjusted" in told
        assert sum(r.kind == "overflow" for r in found) == 7


@pytest.mark.heavy
def test_fp32_is_the_script_itself_and_observers_change_nothing(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    run = ["-m", "mezzo", "run", "--no-trace", "--precision"]
    assert trained([*run, "fp32", str(SCRIPT)], EAGER, tmp_path)[0] == plain
    names = ["overflowing", "accumulation", "two_optimizers"]
    by_hand, _ = trained(["-W", "ignore", str(SCRIPT), "--by-hand", "fp16"], names, tmp_path)
    assert trained([*run, "fp16", str(SCRIPT)], names, tmp_path)[0] == by_hand
