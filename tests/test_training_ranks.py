"""MixedPrecision on two gloo ranks: one skip, one norm, one set of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
]

CHILD = Path(__file__).parent / "children" / "training_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed: case -> result."""
    meeting = tmp_path_factory.mktemp("ranks") / "store"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(CHILD), str(rank), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [child.communicate(timeout=400) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, err) in zip(children, outputs):
        assert child.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("case", ["alone", "alone, released"])
def test_an_overflow_of_one_rank_is_skipped_by_both_and_norms_agree(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    assert ranks[0][case] == ranks[1][case]
    assert [moved for moved, _ in ranks[0][case]["told"]] == [True, False, True]
    assert ranks[0][case]["steps"] == 2.0


@pytest.mark.parametrize("case", ["averaged", "averaged, accumulated"])
def test_ranks_under_ddp_stay_equal_to_the_bit(case: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0][case] == ranks[1][case]
    assert ranks[0][case]["dtypes"] == (["torch.float32"] if "accumulated" in case else [])


def test_what_ddp_can_not_have_is_refused(ranks: list[dict[str, Any]]) -> None:
    lowering, release = ranks[0]["refused"]["told"]
    assert "mezzo.lower_weights(model, 'bf16')" in lowering
    assert "DistributedDataParallel" in release
    assert ranks[0]["refused"]["same"]
    assert ranks[0]["refused"]["dtype"] == "torch.float32"
