"""TensorFlow's tests, in processes of their own (`make frameworks`), each in a process as if no other had run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def pytest_configure(config: pytest.Config) -> None:
    """Keras 3 reads its variables in a way that NumPy 2 has deprecated."""
    ignored = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    config.addinivalue_line("filterwarnings", ignored)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rewrite is on, no Session was made, no mixed policy is set; and a CPU with BF16, whatever this one has.

    With `monkeypatch`, which is undone after it: what the switch puts back was set by a test.
    """
    import keras
    import tf_keras
    from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

    from mezzo.keras import set_policy
    from mezzo.tensorflow import disable_mixed_precision_graph_rewrite

    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16")
    global_state.set_non_mixed_precision_session_created(False)
    yield
    disable_mixed_precision_graph_rewrite()
    global_state.set_non_mixed_precision_session_created(False)
    set_policy("fp32")
    keras.config.set_dtype_policy("float32")
    tf_keras.mixed_precision.set_global_policy("float32")
