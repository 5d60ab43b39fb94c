"""Cross entropy's Triton kernels without a GPU: `test_cross_entropy.py` on Triton's interpreter.

In a child process: Triton decides at its import whether it interprets, and this process's `torch.compile` needs a
Triton that does not.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("which", ["every_option", "not every_option"])
def test_the_interpreted_kernels_pass_the_tests_of_the_others(which: str) -> None:
    file = Path(__file__).parent / "test_cross_entropy.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", which]
    environment = {**os.environ, "PYTHONPATH": str(file.parent), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
