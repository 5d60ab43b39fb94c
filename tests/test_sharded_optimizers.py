"""Optimizers over DTensors equal those over whole parameters, and their checkpoints load on any number of ranks.

The cases are in tests/children/sharded_optimizers.py: one launch for each number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import ranks_of

pytestmark = pytest.mark.heavy

Results = list[dict[str, Any]]


def launched(folder: Path, count: int) -> Results:
    meeting = folder / f"meeting of {count}"
    words = str(count), str(folder)
    return ranks_of("sharded_optimizers.py", meeting, *words, seconds=400, count=count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    """The results of two ranks, which write the checkpoints."""
    return launched(folder, 2)


def assert_right(results: Results, case: str, at_least: int) -> None:
    found = {name for name in results[0] if name.startswith(case)}
    assert len(found) >= at_least
    wrong = {name: [rank[name] for rank in results] for name in found}
    assert {name: said for name, said in wrong.items() if any(each is not True for each in said)} == {}


@pytest.mark.parametrize(
    ("case", "at_least"),
    [
        ("same bits", 8),
        ("any optimizer", 2),
        ("meshes", 1),
        ("refused", 1),
        ("trained", 4),
        ("released", 2),
        ("initialized", 7),
        ("from whole", 1),
        ("masters", 1),
        ("full disk", 1),
        ("save", 15),
        ("load", 29),
    ],
)
def test_shards_move_as_in_the_whole_parameter(two: Results, case: str, at_least: int) -> None:
    assert_right(two, case, at_least)


@pytest.mark.parametrize(
    ("count", "cases"),
    [(1, 28), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((3, 20), (4, 15)))],
)
def test_checkpoints_of_two_ranks_load_on_others_to_the_bit(
    two: Results, folder: Path, count: int, cases: int
) -> None:
    assert_right(two, "save", 15)
    assert_right(launched(folder, count), "load", cases)


def test_gradients_that_are_not_reduced_yet_are_no_state(two: Results) -> None:
    assert all("result.updated" in rank["unreduced"] for rank in two)


def test_a_trace_of_a_sharded_model_says_what_to_do_instead(two: Results) -> None:
    assert all("on one process without fully_shard" in rank["traced"] for rank in two)


@pytest.mark.parametrize(
    "case",
    ["precision", "accumulate", "clip_norm", "trace", "release_gradients", "optimizer's state", "init=1024"],
)
def test_ranks_with_different_arguments_end_with_the_same_sentence(two: Results, case: str) -> None:
    first, second = (rank[f"differ: {case}"] for rank in two)
    assert first == second
    assert first.startswith("GradScaler: " if case.startswith("init") else "MixedPrecision: ")
    for part in ("rank 0 has", "rank 1 has", case, "the same arguments on every rank"):
        assert part in first


@pytest.mark.parametrize("name", ["AdamW", "with_masters", "MixedPrecision"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_an_optimizer_made_before_fully_shard_says_what_to_do(two: Results, name: str, when: str) -> None:
    for rank in two:
        said = rank[f"made {when}: {name}"]
        assert "before fully_shard" in said
        assert "[4, 4]" in said
        assert "(model.parameters(), ...)" in said
