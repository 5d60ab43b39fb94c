"""Bytes of tensors that a test did not make: what other tests' modules and fixtures keep alive in this process."""

from __future__ import annotations

import gc

from mezzo.pytorch.memory import PeakTensorBytes


def bytes_alive() -> int:
    """Bytes of the CPU tensors that are alive now; taken before a test builds its own, to be subtracted."""
    gc.collect()
    others = PeakTensorBytes()
    others.start()
    return others.stop().peak_bytes
