"""Two gloo ranks agree on an overflow and on the norm, however the parameters are spread, and train alike."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import two_ranks

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed: case -> result."""
    return two_ranks("two_ranks.py", tmp_path_factory.mktemp("ranks") / "store", seconds=400)


def both(ranks: list[dict[str, Any]], case: str) -> tuple[float | None, float]:
    """Found and total, which must have the same bits on both ranks."""
    first, second = (rank[case] for rank in ranks)
    assert first["total"] == second["total"]
    assert first["found"] == second["found"]
    found = first["found"]
    return None if found is None else float.fromhex(found), float.fromhex(first["total"])


@pytest.mark.parametrize("case", ["replicated", "sharded", "copies"])
def test_the_norm_is_that_of_the_whole_model(ranks: list[dict[str, Any]], case: str) -> None:
    found, total = both(ranks, case)
    assert total == pytest.approx(ranks[0][case]["whole"], rel=1e-6)
    assert found == (0.0 if case == "replicated" else None)
    if case == "sharded":
        own = [rank[case]["own"] for rank in ranks]
        assert own[0] != own[1]
        assert sum(own) == pytest.approx(total)


GIVEN = [
    ("an ulp apart", 0.0, 1.0 + 2.0**-52),
    ("overflow on one", 1.0, float("inf")),
    ("NaN on one", float("nan"), float("nan")),
    ("NaN beside infinity", 1.0, float("nan")),
    ("nobody looked", None, 4.0),
    ("mesh of one", None, 2.0 + 2.0**-51),
]


@pytest.mark.parametrize(("case", "found", "total"), GIVEN)
def test_what_one_rank_saw_alone_both_know(
    ranks: list[dict[str, Any]], case: str, found: float | None, total: float
) -> None:
    got_found, got_total = both(ranks, case)
    assert got_total == pytest.approx(total, rel=0, abs=0, nan_ok=True)
    if found is None:
        assert got_found is None
    else:
        assert got_found == pytest.approx(found, nan_ok=True)


def test_shards_and_whole_parameters_are_summed_apart_and_parts_added_up_first(
    ranks: list[dict[str, Any]],
) -> None:
    assert both(ranks, "mixed")[1] == 25 + 30
    assert both(ranks, "parts to add")[1] == 27
    assert ranks[1]["parts to add"]["local"] == [3.0] * 3


@pytest.mark.parametrize("case", ["released", "released, clipped"])
def test_shards_are_stepped_within_backward_as_after_it(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["released"] == pytest.approx(rank[case]["after"], rel=1e-6, abs=1e-7)
    assert ranks[0]["released"]["after"] != pytest.approx(ranks[0]["released, clipped"]["after"], rel=1e-3)


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
