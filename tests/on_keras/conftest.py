"""Keras's tests: all of them on PyTorch, those marked `every_backend` on TensorFlow and JAX too (`make frameworks`).

KERAS_BACKEND names the backend, TensorFlow unless it is set. A test that is skipped on some backends is marked here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

from mezzo.keras import set_policy

BACKEND = keras.backend.backend()


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors here as everywhere, but for those that Keras itself gives rise to."""
    config.addinivalue_line(
        "filterwarnings", "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("skipif") is not None:
            item.add_marker("every_backend")


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Every test begins with FP32, seed 0 and no layer names taken, and leaves the global policy as it found it."""
    before = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    set_policy("fp32")
    keras.config.set_dtype_policy(before)
