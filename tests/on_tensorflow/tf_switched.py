"""A process in which no rewrite is on and no Session was made, before a test and after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

from mezzo.tensorflow import disable_mixed_precision_graph_rewrite


@contextmanager
def a_fresh_switch() -> Iterator[None]:
    """Also a CPU with BF16, whatever this one has."""
    global_state.set_non_mixed_precision_session_created(False)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEZZO_ASSUME_NATIVE", "bf16")
            yield
            disable_mixed_precision_graph_rewrite()
    finally:
        global_state.set_non_mixed_precision_session_created(False)
