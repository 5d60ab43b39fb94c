"""Two gloo ranks agree on an overflow and on the norm, however the parameters are spread, and train alike."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.core.overflow import OUTSIDE
from ranks import ranks_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed: case -> result."""
    return ranks_of("two_ranks.py", tmp_path_factory.mktemp("ranks") / "store", seconds=400)


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
    ("an ulp apart", 0.0, 2.0),
    ("overflow on one", 1.0, float("inf")),
    ("NaN on one", 1.0, float("nan")),
    ("NaN beside infinity", 1.0, float("nan")),
    ("nobody looked", None, 8.0),
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


@pytest.mark.parametrize("case", ["alone", "alone, released"])
def test_an_optimizer_of_one_rank_decides_alone(case: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0][case] == {"told": [True] * 3, "steps": 3.0}
    assert ranks[1][case] == {"told": [True, False, True], "steps": 2.0}


def test_parts_of_a_mesh_have_their_own_norms_and_one_flag(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stages"]["found"] for rank in ranks] == [(1.0).hex()] * 2
    assert [float.fromhex(rank["stages"]["total"]) for rank in ranks] == [2.0, 3.0]


def test_the_report_says_which_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["by"] == ranks[1]["by"]
    *known, together, shard = ranks[0]["by"]["said"]
    assert known == ["rank 1", "rank 1", "2 ranks", "rank 0"]
    assert "2 ranks after the reduction" in together
    assert "rank 1 after the reduction" in shard
    assert (ranks[0]["by"]["first"], ranks[0]["by"]["largest"]) == ([5.0], [1.0, 0.0])


AVERAGED = {
    "averaged": [],
    "averaged, accumulated": ["torch.float32"],
    "averaged, nested": ["torch.float32"],
    "averaged, no_sync": ["torch.float32"],
}


@pytest.mark.parametrize(("case", "dtypes"), AVERAGED.items())
def test_ranks_under_ddp_stay_equal_to_the_bit(
    case: str, dtypes: list[str], ranks: list[dict[str, Any]]
) -> None:
    assert ranks[0][case] == ranks[1][case]
    assert ranks[0][case]["dtypes"] == dtypes


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("accumulated", 0.0),
        ("accumulated, no_sync", 2.0**-8),  # ranks add in bf16, once
        ("accumulated, reduced in bf16", 0.0),  # each loss alone, which bf16 holds exactly
        ("accumulated, reduced in bf16 once", 2.0**-8),
    ],
)
def test_small_gradients_of_a_window_are_not_lost_in_16_bits(
    case: str, error: float, ranks: list[dict[str, Any]]
) -> None:
    assert ranks[0][case] == ranks[1][case]
    assert ranks[0][case]["moved"] == pytest.approx((1024 + 63) / 64, rel=error, abs=1e-6)


def test_a_rank_whose_data_ended_early_takes_the_loss_scale_of_the_others(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["joined"] == ranks[1]["joined"]
    assert ranks[0]["joined"]["scales"] == [512.0, 1024.0, 4096.0]
    assert ranks[0]["joined"]["names"]


def test_a_skip_where_another_rank_has_no_more_data_is_explained_without_it(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["joined, skips"]["found"] for rank in ranks] == [[], ["overflow"]]
    assert ranks[0]["joined, skips"]["weights"] == ranks[1]["joined, skips"]["weights"]


def test_a_format_that_ranks_would_choose_alone_is_refused_inside_join(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        auto, later, over = rank["joined, refused"]["told"]
        assert "precision='bf16'" in auto
        assert "bf16_from=2" in later
        assert over == ""


def test_an_optimizer_may_have_a_part_of_what_ddp_averages(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["trunk and head"] for rank in ranks)
    assert first == second
    got, wanted = ([float.fromhex(x) for x in first[which]] for which in ("weights", "expected"))
    assert got == pytest.approx(wanted, rel=0, abs=2e-3)
    assert first["clean"]
    assert "torch.optim.AdamW([{'params'" in first["said"]


def test_no_step_is_taken_before_ddp_has_averaged(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["heads"] for rank in ranks)
    assert first["weights"] == second["weights"]
    assert first["kept"]
    assert second["kept"]
    assert "rank 1" in second["said"]
    assert "mp.step(loss_a + loss_b)" in second["said"]


def test_errors_of_a_skipped_step_are_not_added_to_the_next(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["compressed"] == ranks[1]["compressed"]
    assert ranks[0]["compressed"]["moved"] == [True, True, True, False, True, True]


def test_what_ddp_can_not_have_is_refused(ranks: list[dict[str, Any]]) -> None:
    lowering, release = ranks[0]["refused"]["told"]
    assert "mezzo.lower_weights(model, 'bf16')" in lowering
    assert "DistributedDataParallel" in release
    assert ranks[0]["refused"]["same"]
    assert ranks[0]["refused"]["dtype"] == "torch.float32"


SKIPS_ONE = [
    "fsdp fp16",
    "fsdp fp16, no norm",
    "fsdp accumulated",
    "fsdp no_sync",
    "fsdp policy fp16",
    "fsdp released",
]


@pytest.mark.parametrize(
    "case",
    ["fsdp bf16", "fsdp fp16, clip both", "fsdp policy bf16", "fsdp reduced in fp16", *SKIPS_ONE],
)
def test_shards_train_as_one_process_does(case: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[case] for rank in ranks)
    for same in ("weights", "told", "norms"):
        assert first[same] == second[same]
    assert first["weights"] == pytest.approx(first["expected"], rel=0, abs=5e-3)
    assert first["reductions"] == [1] * 3
    steps = [stepped for stepped, _, _ in first["told"]]
    assert steps == [True, case not in SKIPS_ONE, True]
    for (norm, expected), stepped in zip(first["norms"], steps):
        if stepped and norm != "None":
            assert float(norm) == pytest.approx(float(expected), rel=0.02)
    if case in SKIPS_ONE:
        _, (_, scale, reason), (_, after, _) = first["told"]
        assert "rank 1" in reason
        assert after == scale / 2


def test_a_loss_whose_logits_are_on_several_ranks_trains_as_in_one_process(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (rank["loss of parts"] for rank in ranks)
    assert first == second
    assert first["told"] == [True, False, True] * 2
    assert first["weights"] == pytest.approx(first["expected"], rel=0, abs=1e-3)


@pytest.mark.parametrize("case", ["dropped", "dropped, of two formats"])
def test_a_window_that_raises_takes_its_unreduced_gradients_with_it(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    assert [rank[case] for rank in ranks] == [{"said": "planted", "same": True}] * 2


@pytest.mark.parametrize("case", ["adversaries", "adversaries, released"])
def test_a_loss_through_another_sharded_model_leaves_its_gradients(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    assert [rank[case] for rank in ranks] == [{"kept": True, "clean": True}] * 2


@pytest.mark.parametrize(
    "case", ["scaled shards", "scaled meshes", "scaled before", "scaled after", "scaled closure"]
)
def test_the_scaler_skips_on_both_ranks(case: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0][case] == ranks[1][case]
    assert ranks[0][case]["told"] == [False, True, False]
    assert ranks[0][case]["scales"] == [1024.0, 512.0, 512.0]
    if case in ("scaled shards", "scaled meshes"):  # found_inf and the norm
        assert ranks[0][case]["reductions"] == [1, 1, 1]


def test_auto_is_decided_by_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["decided"] == {"precision": "bf16", "speedup": 2.0, "at": 19}


def test_a_rank_without_gradients_says_which_and_what_to_do(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert f"rank {number}" in rank["without gradients"]["said"]
        assert "0.0 * model(" in rank["without gradients"]["said"]


ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize(
    "case", ["reduced bf16", "reduced bf16, accumulated", "reduced fp16", "reduced fp16, large"]
)
def test_an_average_with_16_bits_on_the_wire(case: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[case] for rank in ranks)
    assert first["bits"] == second["bits"]
    assert first["dtypes"] == ["torch.float32"]
    assert first["finite"]
    bound = 2 * ROUNDING[case[8:12]]
    for error in (first["error"], second["error"]):
        assert 0.0 < error <= bound * (1 + 2.0**-10)
    if "large" in case:
        assert 2.0**15 < first["largest"] < 65504  # the sum of two would overflow


def test_an_average_that_is_not_ddps_is_refused(ranks: list[dict[str, Any]]) -> None:
    no_ddp, no_format, twice, sharded = ranks[0]["reduction refused"]["said"]
    assert "can have only one" in twice
    assert "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)" in sharded
    assert "Sequential" in no_ddp
    assert "MixedPrecisionPolicy" in no_ddp
    assert "fp8" in no_format
    assert "bf16" in no_format


@pytest.mark.parametrize("case", ["forward", "backward", "loss"])
def test_both_ranks_tell_what_one_of_them_found(case: str, ranks: list[dict[str, Any]]) -> None:
    module, op = {"forward": ("1", "mul"), "backward": ("1", "sqrt"), "loss": (OUTSIDE, "")}[case]
    one, other = (rank[f"fault in {case}"] for rank in ranks)
    for told in (one, other):
        assert (told["module"], told["op"], told["skips"]) == (module, op, [False, True, False])
    assert ["found by rank 1" in told["note"] for told in (one, other)] == [True, False]
    assert [len(told["warned"]) for told in (one, other)] == [1, 0]
    assert one["weights"] == other["weights"] == one["untraced"]


def test_accelerates_ranks_skip_together(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["accelerated"] for rank in ranks)
    assert one == other
    assert (one["skips"], one["loss_scale"]) == ([False, True, False], 2.0**15)
    assert one["kind"] == "DistributedDataParallel"


def test_each_rank_writes_its_records_to_a_file_of_its_own(ranks: list[dict[str, Any]]) -> None:
    assert [rank["recorded"] for rank in ranks] == 2 * [{"run-rank1.jsonl": 40, "run.jsonl": 40}]
