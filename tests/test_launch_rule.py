"""`mezzo run`: where one policy rules the process, ops that it leaves alone cost nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
model(torch.ones(1, 3))
from mezzo.pytorch.region import dispatch
print("then", len(dispatch.passed_through("cpu")))
with torch.autocast("cpu", torch.bfloat16):
    padded = nn.functional.pad(torch.ones(1, 3, 4, dtype=torch.bfloat16), (1, 1), mode="reflect")
print("after", len(dispatch.passed_through("cpu")), padded.dtype)
"""


def told(folder: Path, policy: str) -> list[str]:
    (folder / "s.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", "run", "--precision", policy, "s.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[:2]


@pytest.mark.heavy
def test_ops_pass_through_until_the_script_has_a_region_of_its_own(tmp_path: Path) -> None:
    before, after = told(tmp_path, "bf16")
    assert int(before.split()[1]) > 5
    # In the script's own region its own table rules again: PyTorch's pads in FP32 on a CPU.
    assert after == "after 0 torch.float32"


@pytest.mark.heavy
def test_two_policies_in_a_process_leave_nothing_to_pass(tmp_path: Path) -> None:
    assert told(tmp_path, "bf16,module.0=fp16")[0] == "then 0"
