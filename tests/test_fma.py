"""The fused multiply-add against exact fractions, in each of its forms, where two roundings would go wrong."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import patterns
from mezzo.pytorch.kernels.optimizer_step.formulas import fma

CHILD = Path(__file__).parent / "children" / "compiled_fma.py"
INF, NAN, TINY, LARGEST = math.inf, math.nan, 2.0**-149, (2 - 2**-23) * 2.0**127


def of_like_size() -> Tensor:
    """Sums that cancel in part or altogether, and every distance up to 60 bits between product and addend."""
    rows = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(2))
    rows[:, 2] *= torch.exp2(torch.arange(20_000) % 120 - 60.0)
    rows[::3, 2] = -rows[::3, 0] * rows[::3, 1]
    return rows


def small() -> Tensor:
    """Results around and below the smallest normal number."""
    rows = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(3))
    by = torch.arange(20_000) % 48
    return torch.stack([rows[:, 0] * 2.0**-70, rows[:, 1] * torch.exp2(-40 - by), rows[:, 2] * 2.0**-127], 1)


def beside_ties() -> Tensor:
    """On a tie of FP32 or a hair beside it: what FP64 rounds to the tie."""
    rows = []
    hairs = [(1.0, 1.0), (1 + 2**-23, 1 - 2**-23), (1 + 2**-23, 1 + 2**-23), (1 + 2**-12, 1 - 2**-12)]
    for x, y in hairs:
        for k in range(64):
            # c is k steps above a power of two, and the product is half a step, more or less.
            for power in (-126, -100, 0, 100):
                rows.append((x, y * 2.0 ** (power - 24), (1 + k * 2**-23) * 2.0**power))
            # In the subnormal range a step is the smallest number.
            rows += [(x * 2.0**-75, y * 2.0**-75, c * TINY) for c in (k, 2**22 + k, 2**23 - k, 2**23 + k)]
        rows.append((x * 2.0**52, y * 2.0**51, LARGEST))  # half a step beyond the largest number
    for k in range(1, 256, 2):
        # The product is a tie itself, in 25 bits; what is added is below FP64's last one.
        rows += [(4097.0, 4096.0 + k, hair) for hair in (2.0**-60, -(2.0**-60), TINY, 0.0)]
        rows += [(2.0**12 + 1, (2.0**12 + k) * 2.0**-60, hair * 2.0**-120) for hair in (1.0, -1.0)]
    both = torch.tensor(rows)
    return torch.cat([both, both * torch.tensor([-1.0, 1.0, -1.0]), both * torch.tensor([-1.0, 1.0, 1.0])])


def special() -> Tensor:
    values = torch.tensor([0.0, -0.0, TINY, -TINY, 1.0, -1.0, LARGEST, -LARGEST, INF, -INF, NAN])
    return torch.cartesian_prod(values, values, values)


CASES = {made.__name__: made for made in (of_like_size, small, beside_ties, special)}


@functools.cache
def exact(case: str) -> tuple[Tensor, Tensor]:
    rows = CASES[case]()
    return rows, torch.tensor([patterns.fma(*row) for row in rows.tolist()], dtype=torch.float32)


def assert_exact(rows: Tensor, expected: Tensor, made: Tensor) -> None:
    same = (made.view(torch.int32) == expected.view(torch.int32)) | (made.isnan() & expected.isnan())
    wrong = [(row, one, other) for row, one, other in zip(rows[~same], made[~same], expected[~same])]
    assert not wrong, f"{len(wrong)} of {len(rows)}, first {wrong[0]}"


@pytest.mark.parametrize("case", CASES)
def test_the_reference_rounds_once(case: str) -> None:
    rows, expected = exact(case)
    assert_exact(rows, expected, fma(*rows.unbind(1)))


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize("processor", ["this one", "generic"])
def test_the_compiled_one_rounds_once_on_any_processor(tmp_path: Path, processor: str) -> None:
    rows, expected = map(torch.cat, zip(*map(exact, CASES)))
    given, result = tmp_path / "in.npy", tmp_path / "out.npy"
    np.save(given, rows.numpy())
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    env |= {} if processor == "this one" else {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, CHILD, given, result], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert_exact(rows, expected, torch.from_numpy(np.load(result)))
    if platform.machine() == "x86_64":
        features = importlib.import_module("llvmlite.binding").get_host_cpu_features()
        has_it = processor != "generic" and bool(features.get("fma"))
        assert bool(re.search(r"\bvfmadd\w+ps\b", done.stdout)) == has_it  # and of vectors
