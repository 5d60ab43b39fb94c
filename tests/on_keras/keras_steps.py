"""What several tests of Keras are made of: variables, and steps with given gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from conftest import BACKEND

START = ([1.0, -2.0, 3.0], [0.5, 0.25])
GRADIENTS = ([0.5, -0.25, 2.0], [1.0, -4.0])


def variables(start: Sequence[Sequence[float]] = START, dtype: str = "float32") -> list[Any]:
    return [keras.Variable(np.array(value, dtype), name=f"weight_{at}") for at, value in enumerate(start)]


def tensor(value: Any, dtype: str = "float32") -> Any:
    return keras.ops.convert_to_tensor(np.asarray(value), dtype)


@contextlib.contextmanager
def no_gradients() -> Iterator[None]:
    if BACKEND != "torch":
        yield
        return
    import torch

    with torch.no_grad():
        yield


def step(
    optimizer: Any, weights: Sequence[Any], gradients: Sequence[Any] = GRADIENTS, *, bad: float | None = None
) -> None:
    """One eager step with these gradients, given unscaled; `bad` (NaN or infinity) is put in the last one's place."""
    scaled = [None if g is None else keras.ops.multiply(tensor(g), optimizer.scale) for g in gradients]
    if bad is not None:
        scaled[-1] = tensor(np.full(np.shape(gradients[-1]), bad))
    with no_gradients():
        optimizer.apply(scaled, weights)


def values(*held: Any) -> list[list[float]]:
    """Of all these variables and optimizers the values, to compare bit by bit."""
    flat = [each for one in held for each in (getattr(one, "variables", None) or [one])]
    return [keras.ops.convert_to_numpy(each.value).ravel().tolist() for each in flat]
