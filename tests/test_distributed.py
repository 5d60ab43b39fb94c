"""Two gloo ranks agree on an overflow and on the norm, however the parameters are spread, and train alike.

The cases are in tests/children/two_ranks.py: one launch for all of them.
"""

from __future__ import annotations

import pytest

from ranks import Results, assert_right, ranks_of

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]

# What a case's name begins with, and how many there are.
SUBJECTS = {
    "norm": 6,
    "given": 5,
    "said": 1,
    "alone": 2,
    "averaged": 4,
    "accumulated": 4,
    "joined": 5,
    "trunk and head": 1,
    "heads": 1,
    "compressed": 1,
    "refused": 1,
    "states": 10,
    "fault": 4,
    "accelerated": 1,
    "recorded": 1,
    "nudged": 1,
    "fsdp": 10,
    "dropped": 2,
    "adversaries": 2,
    "scaled": 5,
    "loss of parts": 1,
    "decided": 1,
    "without gradients": 1,
    "reduced": 5,
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ranks_of("two_ranks.py", tmp_path_factory.mktemp("ranks") / "store", seconds=400)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_two_ranks(two: Results, subject: str) -> None:
    assert len(two[0]) == sum(SUBJECTS.values())
    assert_right(two, subject, SUBJECTS[subject])
