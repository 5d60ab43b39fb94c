"""What the tests need of this machine's CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

CPUINFO = Path("/proc/cpuinfo")


def needs_avx512(reason: str) -> None:
    """Skip the rest of a test on a CPU without AVX-512, where the library that Mezzo is compared with can't do this."""
    if not CPUINFO.exists() or "avx512bw" not in CPUINFO.read_text(encoding="utf-8"):
        pytest.skip(f"a CPU without AVX-512: {reason}")
