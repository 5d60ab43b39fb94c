"""Zero-code precision gives, to the last bit, what the same script gives with Mezzo's calls written into it.

Each training of `scripts/trainings.py` runs twice in processes of its own: unchanged under `mezzo run`, and with
`mezzo.autocast` around the model, its output cast to FP32, and `mezzo.GradScaler`. Losses, norms and every bit of
the weights are compared.
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

SCRIPT = Path(__file__).parent / "scripts" / "trainings.py"
COMPILED = ["compiled_model", "compiled_step"]
EAGER = [
    *("fused_adamw", "clipping", "overflowing", "accumulation", "gradient_penalty", "two_optimizers"),
    *(
        "shared_parameters",
        "checkpointing",
        "reentrant_checkpointing",
        "lbfgs",
        "several_losses",
        "batch_norm",
    ),
]


def trained(words: list[str], folder: Path) -> tuple[dict[str, Any], str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("training"): line for line in lines}, done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("policy", "backend", "names"),
    [
        ("bf16", "none", EAGER),
        ("fp16", "none", EAGER),
        ("bf16", "aot_eager", COMPILED),
        ("fp16", "aot_eager", COMPILED),
        pytest.param("bf16", "inductor", COMPILED, marks=pytest.mark.compiler),
    ],
)
def test_zero_code_equals_the_calls_written_by_hand(
    policy: str, backend: str, names: list[str], tmp_path: Path
) -> None:
    if backend == "inductor" and not (shutil.which("g++") or os.environ.get("CXX")):
        pytest.skip("Inductor needs a C++ compiler, and there is no g++")
    chosen = ["--only", ",".join(names), "--backend", backend]
    run = ["-m", "mezzo", "run", "--precision", policy, str(SCRIPT), *chosen]
    ours, told = trained(run, tmp_path)
    by_hand, _ = trained(["-W", "ignore", str(SCRIPT), "--by-hand", policy, *chosen], tmp_path)
    assert list(ours) == list(by_hand) == names
    for name in names:
        assert ours[name] == by_hand[name], name
    assert "left alone" not in told
    if backend == "none":
        plain, _ = trained([str(SCRIPT), *chosen], tmp_path)
        assert all(ours[name]["values"] != plain[name]["values"] for name in names)  # it did run in 16 bits
    if policy == "fp16" and backend == "none":
        assert " 7 skipped" in told  # some of them overflow, and those steps count too


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["bf16,masters=split", "bf16,masters=split8,state=int8"])
def test_stored_weights_equal_the_calls_written_by_hand(policy: str, tmp_path: Path) -> None:
    adopted = [
        name for name in EAGER if name not in ("lbfgs", "gradient_penalty")
    ]  # LBFGS, RMSprop: not taken over
    chosen = ["--only", ",".join(adopted)]
    run = ["-m", "mezzo", "run", "--precision", policy, str(SCRIPT), *chosen]
    ours, told = trained(run, tmp_path)
    by_hand, _ = trained(["-W", "ignore", str(SCRIPT), "--by-hand", policy, *chosen], tmp_path)
    plain, _ = trained(["-m", "mezzo", "run", "--precision", "bf16", str(SCRIPT), *chosen], tmp_path)
    assert list(ours) == list(by_hand) == adopted
    for name in adopted:
        assert ours[name] == by_hand[name], name
        assert ours[name]["weights"] != plain[name]["weights"], name
    assert f"mezzo: policy {mezzo.policy(policy)}" in told
    assert "stay FP32" not in told


@pytest.mark.heavy
def test_fp32_is_the_script_itself(tmp_path: Path) -> None:
    chosen = ["--only", ",".join(EAGER)]
    ours, _ = trained(["-m", "mezzo", "run", "--precision", "fp32", str(SCRIPT), *chosen], tmp_path)
    plain, _ = trained([str(SCRIPT), *chosen], tmp_path)
    assert ours == plain
