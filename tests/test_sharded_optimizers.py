"""Optimizers over DTensors equal those over whole parameters, and their checkpoints load on any number of ranks.

The cases are in tests/children/sharded_optimizers.py: one launch for each number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import Results, assert_right, ranks_of

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]

# What a case's name begins with, and how many two ranks have.
SUBJECTS = {
    "same bits": 10,
    "any optimizer": 2,
    "meshes": 1,
    "torch Muon": 1,
    "trained": 4,
    "released": 3,
    "initialized": 8,
    "from whole": 2,
    "masters": 1,
    "full disk": 1,
    "save": 16,
    "load": 32,
    "made before": 6,
    "unreduced": 1,
    "traced": 1,
    "differ": 9,
}


def launched(folder: Path, count: int) -> Results:
    meeting = folder / f"meeting of {count}"
    return ranks_of("sharded_optimizers.py", meeting, str(folder), seconds=400, count=count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    """The results of two ranks, which write the checkpoints."""
    return launched(folder, 2)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_two_ranks(two: Results, subject: str) -> None:
    assert len(two[0]) == sum(SUBJECTS.values())
    assert_right(two, subject, SUBJECTS[subject])


@pytest.mark.parametrize(
    ("count", "cases"),
    [(1, 31), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((3, 22), (4, 16)))],
)
def test_checkpoints_of_two_ranks_load_on_others_to_the_bit(
    two: Results, folder: Path, count: int, cases: int
) -> None:
    assert_right(two, "save", 16)
    assert_right(launched(folder, count), "load", cases)
