"""An error on one of two ranks ends both, and each says what happened on which rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import processes

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]

# The words of a case of `children/ending.py` -> what the error of rank 1 has.
CASES = {
    "detached": "UsageError: step(loss): the loss does not require a gradient. Compute it from the model's output",
    "detached first": "UsageError: step(loss): the loss does not require a gradient",
    "detached caught": "UsageError: step(loss): the loss does not require a gradient",
    "apart sharded": "UsageError: step(): on rank 1, no parameter of this optimizer got a gradient",
    "apart": "UsageError: step(): on rank 1, no parameter of this optimizer got a gradient",
    "data": "ValueError: planted in the data",
    "data sharded": "ValueError: planted in the data",
    "detached scaler": "CallOrderError: step(optimizer): scale() was not called",
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_of_one_rank_is_in_that_of_the_other(case: str, tmp_path: Path) -> None:
    """Previously rank 0 said that its connection was closed, or waited for rank 1 until the timeout."""
    child = str(Path(__file__).parent / "children" / "ending.py")
    words = [child, "{rank}", str(tmp_path / "store"), case]
    said = [err.strip().splitlines()[-1] for _, err in processes(words, tmp_path, seconds=60, status=1)]
    assert CASES[case] in said[1]
    assert (
        said[0]
        .partition("RuntimeError: ")[2]
        .endswith(f"rank 1 raised {said[1][said[1].index(CASES[case]) :]}")
    )
