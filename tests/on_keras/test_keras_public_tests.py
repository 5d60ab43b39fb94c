"""Keras's own public tests of its loss-scale optimizer, run as installed, with ours in its place (`stand_in.py`).

Whatever fails is in `DIFFERENCES`, with its reason, and fails for that reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

from conftest import BACKEND

HERE = Path(__file__).parent
KERAS = Path(keras.__file__).parent / "src"

# All that Keras tests with it: every test of the first file, and of the others those that name it.
FILES = (
    "optimizers/loss_scale_optimizer_test.py",
    "optimizers/optimizer_sparse_test.py",
    "optimizers/multi_optimizer_test.py",
    "trainers/trainer_test.py",
    "callbacks/swap_ema_weights_test.py",
)
NAMED = "LossScaleOptimizerTest or loss_scal or blocks_nested_optimizers"

# Test, without the form at its end -> what its error says, and why ours differs.
DIFFERENCES: dict[str, tuple[str, str]] = {
    "test_serialization": ("5 != 4", "get_config has a fifth key for a setting that is not the default"),
    "test_sparse_gradients_loss_scale_optimizer_sgd": (
        "directly on a variable",
        "the test lets nobody but the inner optimizer write to a vector; ours keeps which gradients were bad",
    ),
}

# What Keras's tests skip, by their own conditions on the backend.
SKIPPED = {
    "tensorflow": "stateless_apply is not supported with the TF backend",
    "jax": "must use stateless_apply with JAX",
    "torch": "Backend does not support sparse tensors|half precision unsupported on torch CPU",
}[BACKEND]


def outcomes(folder: Path) -> dict[str, Any]:
    missing = [name for name in FILES if not (KERAS / name).is_file()]
    if missing:
        pytest.skip(f"the installed Keras {keras.__version__} comes without its tests: {', '.join(missing)}")
    ini, written = folder / "pytest.ini", folder / "outcomes.json"
    ini.write_text("[pytest]\n")
    done = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "stand_in", "-p", "no:cacheprovider")]
        + ["-c", str(ini), "--rootdir", str(folder), "-k", NAMED]
        + [str(KERAS / name) for name in FILES],
        cwd=folder,
        env={
            **os.environ,
            "KERAS_BACKEND": BACKEND,
            "MEZZO_OUTCOMES": str(written),
            "PYTHONPATH": str(HERE),
            "TORCHDYNAMO_DISABLE": "1",  # one of them compiles on PyTorch, for half a minute; no part of what is tested
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def test_keras_s_own_tests_pass_with_ours(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    by_outcome: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for name, told in found["tests"].items():
        by_outcome[told["outcome"]][name] = told["why"]
    assert found["made"] >= 28, "the tests did not run with ours"
    assert sum(map(len, by_outcome.values())) >= 37
    assert {why for why in by_outcome["skipped"].values() if not re.search(SKIPPED, why)} == set()
    failed = {name: base(name) for name in by_outcome["failed"]}
    assert {name: by_outcome["failed"][name] for name in failed if failed[name] not in DIFFERENCES} == {}
    for name, of in failed.items():
        assert DIFFERENCES[of][0] in by_outcome["failed"][name]
    # A difference that is none any more, on this backend, goes from the table.
    assert set(DIFFERENCES) - set(failed.values()) <= {base(name) for name in by_outcome["skipped"]}


def base(name: str) -> str:
    """A test's name without its form."""
    return re.sub("_(stateless|stateful)$", "", name)
