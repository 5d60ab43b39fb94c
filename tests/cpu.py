"""What the tests need of this machine's CPU."""

from __future__ import annotations

import pytest

from mezzo.core.hardware import cpu


def needs_avx512(reason: str) -> None:
    """Skip the rest of a test on a CPU without AVX-512, where the library that Mezzo is compared with can't do this."""
    if "avx512bw" not in cpu()[1]:
        pytest.skip(f"a CPU without AVX-512: {reason}")
