"""A model that hands its loss 16 bits is warned of, whatever its kind; nothing that is right is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from conftest import BACKEND
from mezzo.keras import SixteenBitOutputWarning, set_policy

X = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
Y = np.arange(8) % 3
LOSS = "sparse_categorical_crossentropy"


def dense(name: str = "head", **arguments: Any) -> Any:
    return layers.Dense(3, activation="softmax", name=name, **arguments)


def sequential(*last: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, name="body"), *last], name="net")


def graph(finish: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, finish(layers.Dense(5, name="body")(inputs)), name="net")


class Subclassed(keras.Model):
    def __init__(self, finish: Any) -> None:
        super().__init__(name="net")
        self.body = layers.Dense(5, name="body")
        self.finish = finish

    def call(self, x: Any) -> Any:
        return self.finish(self.body(x))


class CastsItself(layers.Layer):
    """Computes in its policy's format and gives float32."""

    def call(self, x: Any) -> Any:
        return keras.ops.cast(keras.ops.softmax(x[:, :3]), "float32")

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 3)


# A model, and the pattern that makes its output FP32; None where the outputs are right.
MODELS: dict[str, tuple[Callable[[], keras.Model], str | None]] = {
    "sequential": (lambda: sequential(dense()), "head"),
    "unbuilt": (lambda: keras.Sequential([dense()], name="net"), "head"),
    "activation": (lambda: sequential(layers.Dense(3), layers.Activation("softmax", name="last")), "last"),
    "functional": (lambda: graph(dense()), "head"),
    "nested": (lambda: graph(keras.Sequential([keras.Input((5,)), dense()], name="part")), "part"),
    "subclassed": (lambda: Subclassed(dense()), "LAYER"),
    "own dtype": (lambda: sequential(dense(dtype="float32")), None),
    "cast in the graph": (lambda: graph(lambda x: keras.ops.cast(dense()(x), "float32")), None),
    "casts itself": (lambda: graph(CastsItself()), None),
    "subclassed, right": (lambda: Subclassed(dense(dtype="float32")), None),
}


def warned(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SixteenBitOutputWarning)
        act()
    return [str(each.message) for each in found if each.category is SixteenBitOutputWarning]


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "name", MODELS if BACKEND == "torch" else ["functional", "subclassed", "casts itself"]
)
def test_a_16_bit_output_is_reported_once_before_anything_is_learnt(name: str) -> None:
    make, pattern = MODELS[name]

    def train() -> None:
        model = make()
        assert not warned(lambda: model.compile("sgd", LOSS))
        for _ in range(2):
            model.train_on_batch(X, Y)

    set_policy("fp16,loss_scale=64")
    if pattern is None:
        assert warned(train) == []
        return
    (text,) = warned(train)
    assert "'net' is float16" in text
    line = f"fp16,loss_scale=64,module.{pattern}=fp32"
    assert f'set_policy("{line}")' in text
    if pattern != "LAYER":
        set_policy(line)
        assert warned(train) == []


def test_only_outputs_that_the_loss_reads_are_reported() -> None:
    def three(x: Any) -> Any:
        return {"a": dense("a")(x), "b": dense("b")(x), "c": keras.ops.argmax(dense("c")(x), axis=-1)}

    set_policy("bf16")
    for loss, names in (
        ({"a": LOSS, "b": None, "c": None}, ["a"]),
        ({"a": LOSS, "b": LOSS, "c": None}, ["a", "b"]),
        (None, []),  # a training step of the model's own
    ):
        model = graph(three)
        model.compile("sgd", loss)
        texts = warned(lambda model=model: model(X))
        assert [text.partition(" of ")[0] for text in texts] == [f"output {name!r}" for name in names]
        assert all(f"module.{name}=fp32" in text for name, text in zip(names, texts))
