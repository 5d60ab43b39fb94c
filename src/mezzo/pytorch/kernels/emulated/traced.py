"""What a compiler is told of an emulated op's casts: that backward may make them again.

A compiler decides by itself what forward keeps. Over ATen's own casts (``aot_eager``, and backends like it) min-cut
keeps what backward reads in the form in which it is read: of an emulated op that is FP32, twice the bytes of the
16-bit tensor that it was widened from, since a product needs its factor in memory and making it again counts as work
(``torch/_functorch/partitioners.py``, "materialized in backward"). The same partitioner honours a tag, which activation
checkpointing puts on what it recomputes. Widening has it here, so that the 16-bit tensor is kept, and of a module's
parameter, which counts as free, the parameter. Inductor, whose casts are other ops, was seen to keep the 16 bits
without it too. What an op makes inside and saves (an attention's FP32 output) stays as the op has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import traceback

__all__ = ["is_recorded", "made_again"]

is_recorded = traceback.has_preserved_node_meta
"""Whether ops are being recorded into a graph whose nodes carry notes."""


@contextmanager
def made_again() -> Iterator[None]:
    """Ops recorded meanwhile are tagged for recomputation in backward; outside of a recording nothing happens."""
    if not is_recorded():
        yield
        return
    from torch.utils.checkpoint import CheckpointPolicy

    notes = traceback.current_meta
    before = notes.get("recompute")
    notes["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        if before is None:
            del notes["recompute"]
        else:
            notes["recompute"] = before
