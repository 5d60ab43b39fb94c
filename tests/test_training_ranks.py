"""MixedPrecision on two gloo ranks: one skip, one norm, one set of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ranks import two_ranks

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed: case -> result."""
    return two_ranks("training_ranks.py", tmp_path_factory.mktemp("ranks") / "store", seconds=400)


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
