"""The last layer gives float32, or it is said: of every kind of model, and of nothing that is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from conftest import BACKEND
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.keras import SixteenBitOutputWarning, check_outputs, set_policy
from mezzo.keras.checks import traced_outputs

X = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
Y = np.arange(8) % 3
LOSS = "sparse_categorical_crossentropy"


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    set_policy("fp32")


def dense(name: str = "head", **arguments: Any) -> Any:
    return layers.Dense(3, activation="softmax", name=name, **arguments)


def sequential(*last: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, name="body"), *last], name="net")


def graph(finish: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, finish(layers.Dense(5, name="body")(inputs)), name="net")


class Subclassed(keras.Model):
    def __init__(self, finish: Any, **arguments: Any) -> None:
        super().__init__(name="net", **arguments)
        self.body = layers.Dense(5, name="body")
        self.finish = finish

    def call(self, x: Any) -> Any:
        return self.finish(self.body(x))


@keras.saving.register_keras_serializable(package="tests")
class CastsItself(layers.Layer):
    """Computes in its policy's format and gives float32; Keras's graph takes its word for its compute dtype."""

    def call(self, x: Any) -> Any:
        return keras.ops.cast(keras.ops.softmax(x[:, :3]), "float32")

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 3)


# A model whose loss is handed 16 bits, and the layer that is told (None: the model's own call).
WRONG: dict[str, tuple[Callable[[], keras.Model], str | None]] = {
    "sequential": (lambda: sequential(dense()), "head"),
    "unbuilt": (lambda: keras.Sequential([dense()], name="net"), "head"),
    "activation": (lambda: sequential(layers.Dense(3), layers.Activation("softmax", name="last")), "last"),
    "functional": (lambda: graph(dense()), "head"),
    "nested": (lambda: graph(keras.Sequential([keras.Input((5,)), dense("inner")], name="part")), "inner"),
    "passed on": (lambda: graph(lambda x: layers.Dropout(0.5, name="drop")(dense()(x))), "head"),
    "subclassed": (lambda: Subclassed(dense()), "head"),
    "own call": (lambda: Subclassed(lambda x: keras.ops.softmax(x[:, :3])), None),
}
RIGHT: dict[str, Callable[[], keras.Model]] = {
    "own dtype": lambda: sequential(dense(dtype="float32")),
    "unbuilt": lambda: keras.Sequential([layers.Dense(4), dense(dtype="float32")]),
    "cast in the graph": lambda: graph(lambda x: keras.ops.cast(dense()(x), "float32")),
    "casts itself": lambda: graph(CastsItself()),
    "subclassed": lambda: Subclassed(dense(dtype="float32")),
    "nested": lambda: graph(keras.Sequential([keras.Input((5,)), dense(dtype="float32")])),
}


@pytest.mark.every_backend
@pytest.mark.parametrize("name", WRONG if BACKEND == "torch" else ["passed on", "subclassed"])
def test_a_16_bit_output_is_told_once_before_anything_is_learnt(name: str) -> None:
    make, layer = WRONG[name]
    set_policy("fp16")
    model = make()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SixteenBitOutputWarning)
        model.compile("sgd", LOSS)
        assert not found
        model.train_on_batch(X, Y)
        model.train_on_batch(X, Y)
    (told,) = (str(each.message) for each in found if each.category is SixteenBitOutputWarning)
    assert "the output of the model 'net' is float16: a loss sees values of 11 significant bits" in told
    if layer is None:
        assert 'keras.ops.cast(y, "float32")' in told
    else:
        assert f'dtype="float32", name="{layer}")' in told


@pytest.mark.parametrize("name", WRONG)
def test_check_outputs_raises(name: str) -> None:
    set_policy("fp16")
    with pytest.raises(UsageError, match="the output of the model 'net' is float16"):
        check_outputs(WRONG[name][0](), X)


def test_check_outputs_tells_of_a_misspelt_pattern_and_hands_it_on_to_nobody() -> None:
    set_policy("fp16,module.hed=fp32")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="head")])
    with pytest.raises(UnknownNameError, match=r"module\.hed names no layer .*Did you mean 'head'"):
        check_outputs(model)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_told(name: str) -> None:
    set_policy("fp16")
    model = RIGHT[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SixteenBitOutputWarning)
        model.compile("sgd", LOSS)
        model.train_on_batch(X, Y)
        check_outputs(model, X)


@pytest.mark.parametrize(
    ("precision", "last", "line"),
    [
        # Keras gives layers without a build no path.
        ("fp16", lambda: layers.Reshape((5, 1), name="last"), "fp16,module.last=fp32"),
        ("fp16", lambda: layers.Activation("relu", name="last"), "fp16,module.last=fp32"),
        # The entry that says otherwise goes.
        ("fp16,module.last=bf16", lambda: layers.Dense(3, name="last"), "fp16,module.last=fp32"),
        (
            "fp16,module.last=bf16,module.l*=bf16,loss_scale=64",
            lambda: layers.Dense(3, name="last"),
            "fp16,loss_scale=64,module.l*=bf16,module.last=fp32",
        ),
    ],
)
@pytest.mark.parametrize("make", [sequential, lambda last: graph(lambda x: last(x))])
def test_the_line_for_the_policy_mends_it(make: Any, precision: str, last: Any, line: str) -> None:
    set_policy(precision)
    with pytest.raises(UsageError) as error:
        check_outputs(make(last()))
    assert str(error.value).endswith(f'or set_policy("{line}") before the model is made.')
    set_policy(line)
    check_outputs(make(last()))


def test_only_outputs_that_the_loss_reads_are_told() -> None:
    def two() -> keras.Model:
        inputs = keras.Input((4,))
        x = layers.Dense(5, name="body")(inputs)
        return keras.Model(
            inputs, {"a": dense("a")(x), "b": dense("b")(x), "c": keras.ops.argmax(dense("c")(x), axis=-1)}
        )

    set_policy("bf16")
    assert [(one.name, one.dtype) for one in traced_outputs(two())][:2] == [
        ("a", "bfloat16"),
        ("b", "bfloat16"),
    ]
    for loss, told in (
        ({"a": LOSS, "b": None, "c": None}, ["a"]),
        ({"a": LOSS, "b": LOSS, "c": None}, ["a", "b"]),
        (None, []),  # a step of one's own, which knows what it does
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", SixteenBitOutputWarning)
            model = two()
            model.compile("sgd", loss)
            model(X)
        assert [str(each.message).partition(" of ")[0] for each in found] == [
            f"output {name!r}" for name in told
        ]


@pytest.mark.parametrize("name", ["unbuilt", "subclassed"])
def test_check_outputs_asks_for_a_batch_where_it_needs_one(name: str) -> None:
    set_policy("fp16")
    with pytest.raises(UsageError, match=r"Give a batch: check_outputs\(model, x\)"):
        check_outputs(WRONG[name][0]())


@pytest.mark.every_backend
def test_looking_changes_nothing_in_the_model() -> None:
    class Counting(layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

        def call(self, x: Any) -> Any:
            self.seen.assign(self.seen + 1)
            return x

    set_policy("fp16")
    model = graph(
        lambda x: layers.BatchNormalization(name="norm")(Counting()(layers.Dropout(0.5, seed=3)(x)))
    )
    call = layers.Layer.__call__
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    assert traced_outputs(model, X)[0].layer.name == "norm"
    assert layers.Layer.__call__ is call
    after = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.every_backend
def test_sizes_that_are_left_open() -> None:
    set_policy("bf16")
    inputs = keras.Input((None, None, 1))
    x = layers.Conv2D(2, 3, strides=2, name="conv")(inputs)
    with pytest.raises(UsageError, match=r"Conv2D\(\.\.\., dtype=\"float32\", name=\"conv\"\)"):
        check_outputs(keras.Model(inputs, x))
