"""The Triton exponent histogram in Triton's interpreter; `test_exponents.py` runs this, in a process of its own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from mezzo.pytorch.kernels.exponents import WORDS, reference, triton
from test_exponents import DTYPES, awkward

assert os.environ.get("TRITON_INTERPRET") == "1"
np.seterr(all="ignore")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2047, triton.PART, triton.PART + 3])
def test_interpreted_counts_equal_the_reference(dtype: torch.dtype, size: int) -> None:
    elements = awkward(dtype, size)
    ours, expected = torch.ones(WORDS, dtype=torch.int64), torch.ones(WORDS, dtype=torch.int64)
    for _ in range(2):  # counts add up
        triton.count(elements, ours)
        reference.count(elements, expected)
    assert torch.equal(ours, expected)


def test_interpreted_counts_of_elements_that_start_inside_a_vector() -> None:
    elements = awkward(torch.bfloat16, 5_000)[3:]
    ours, expected = torch.zeros(WORDS, dtype=torch.int64), torch.zeros(WORDS, dtype=torch.int64)
    triton.count(elements, ours)
    reference.count(elements, expected)
    assert torch.equal(ours, expected)
