"""`set_policy` on this backend: which layer computes in what, what `compile` does, and what is reported."""

from __future__ import annotations

import inspect
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from conftest import BACKEND
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.keras import LossScaleOptimizer, PolicyWarning, SixteenBitOutputWarning, layer_policies, set_policy

X = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
Y = np.arange(8) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
KerasScaled = keras.optimizers.LossScaleOptimizer


def body() -> Any:
    return layers.Dense(5, name="body")


def last(**arguments: Any) -> Any:
    return layers.Dense(3, name="head", **arguments)


def sequential(**arguments: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), body(), last(**arguments)], name="net")


def late() -> keras.Model:
    return keras.Sequential([body(), last()], name="net")


def functional(finish: Callable[[Any], Any] | None = None) -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, (finish or last())(body()(inputs)), name="net")


def nested() -> keras.Model:
    inputs = keras.Input((4,))
    parts = [body(), layers.LayerNormalization(name="norm")]
    encoder = keras.Sequential([keras.Input((4,)), *parts], name="encoder")
    return keras.Model(inputs, last()(encoder(inputs)), name="net")


class Subclassed(keras.Model):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.body, self.head = body(), last(**arguments)
        self.activation = layers.Activation("relu", name="bend")

    def call(self, x: Any) -> Any:
        return self.head(self.activation(self.body(x)))


def wrapped() -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Reshape((2, 2), name="fold")(inputs)
    x = layers.TimeDistributed(layers.Dense(4, name="each"), name="times")(x)
    x = layers.Bidirectional(layers.LSTM(2, name="lstm", return_sequences=True), name="both")(x)
    x = layers.RNN([layers.LSTMCell(2, name="one"), layers.GRUCell(2, name="two")], name="rnn")(x)
    return keras.Model(inputs, last()(x), name="net")


def scoped() -> keras.Model:
    """A layer without a build, to which Keras gives no path, as well."""
    inputs = keras.Input((4,))
    with keras.name_scope("outer"):
        x = layers.Activation("relu", name="bend")(layers.Dense(3, name="body")(inputs))
    return keras.Model(inputs, x)


CELLS = {"both/backward_lstm/lstm_cell", "both/forward_lstm/lstm_cell"}
# How a model is made, the patterns that get float32, and the ends of the paths of the layers that have it then.
CASES: list[tuple[Callable[[], keras.Model], str, set[str]]] = [
    (sequential, "head", {"net/head"}),
    (late, "b*", {"net/body"}),
    (functional, "/head", {"head"}),
    (nested, "encoder", {"encoder", "encoder/body", "encoder/norm"}),
    (Subclassed, "bend", {"subclassed/bend"}),
    (wrapped, "each lstm_cell rnn/*/two", {"times/each", *CELLS, "rnn/stacked_rnn_cells/two"}),
    (scoped, "outer", {"outer/body", "outer/bend"}),
]


@pytest.mark.parametrize(("make", "patterns", "expected"), CASES)
def test_each_layer_has_the_policy_of_its_path(make: Any, patterns: str, expected: set[str]) -> None:
    modules = {f"module.{pattern}" for pattern in patterns.split()}
    set_policy(",".join(["bf16", *(f"{module}=fp32" for module in sorted(modules))]))
    model = make()
    if not model.built:
        model(X)
    rows = {row.path: row for row in layer_policies(model)}
    assert {path for path, row in rows.items() if row.compute == "float32"} == expected
    assert {row.why for path, row in rows.items() if path in expected} == modules
    assert {row.why for path, row in rows.items() if path not in expected} <= {"plan"}
    assert {row.variables for row in rows.values()} == {"float32"}


def test_it_trains_as_keras_does_with_dtypes_written_by_hand() -> None:
    """The same weights, bit for bit, as under Keras's own policy with the head's dtype at the layer."""

    def trained(model: Any, optimizer: Any) -> Any:
        model.compile(optimizer, LOSS)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    sgd = keras.optimizers.SGD
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    by_hand = trained(sequential(dtype="float32"), LossScaleOptimizer(sgd(0.1)))
    keras.utils.set_random_seed(1)
    set_policy("fp16,module.head=fp32")
    for one, other in zip(trained(sequential(), sgd(0.1)), by_hand, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_saved_model_has_plain_policies_and_no_word_of_mezzo(tmp_path: Path) -> None:
    set_policy("fp16,module.head=fp32")
    model = nested()
    model.compile("sgd", LOSS)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert "mezzo" not in archive.read("config.json").decode()
    set_policy("fp32")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    found = {row.path.rpartition("/")[2]: row.policy for row in layer_policies(loaded)}
    assert (found["body"], found["head"]) == ("mixed_float16", "float32")
    assert np.array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


# What compile is given under which precision, and the machine of the optimizer that it makes; None: not wrapped.
@pytest.mark.parametrize(
    ("precision", "arguments", "machine"),
    [
        ("fp16,module.head=fp32", {}, DynamicLossScale()),
        ("fp32,module.body=fp16", {}, DynamicLossScale()),
        ("bf16,module.head=fp32,loss_scale=128", {}, StaticLossScale(128.0)),
        ("fp16,module.head=fp32,loss_scale=none", {}, None),
        ("fp16,module.head=fp32", {"auto_scale_loss": False}, None),
    ],
)
@pytest.mark.parametrize("make", [sequential, Subclassed])
def test_compile_wraps_the_optimizer(make: Any, precision: str, arguments: Any, machine: Any) -> None:
    set_policy(precision)
    model = make()
    optimizer = keras.optimizers.SGD(0.5)
    for _ in range(2):  # compiling again wraps once
        model.compile(optimizer, LOSS, **arguments)
        if machine is None:
            assert model.optimizer is optimizer
        else:
            assert type(model.optimizer) is LossScaleOptimizer
            assert model.optimizer.inner_optimizer is optimizer
            assert model.optimizer.machine() == machine

    own = LossScaleOptimizer(optimizer, loss_scale=2)
    model.compile(own, LOSS)
    assert model.optimizer is own


def test_compile_leaves_keras_own_loss_scale_with_a_warning() -> None:
    set_policy("fp16,module.head=fp32")
    model, own = sequential(), KerasScaled(keras.optimizers.SGD())
    with pytest.warns(UserWarning, match=r'LossScaleOptimizer\(optimizer, loss_scale="dynamic"\)'):
        model.compile(own, LOSS)
    assert model.optimizer is own


def test_fp32_undoes_everything() -> None:
    def patched() -> list[Any]:
        layer, model = keras.layers.Layer, keras.Model
        return [layer.__call__, layer._open_name_scope, model.__call__, model.compile]

    before = patched()
    for _ in range(2):
        set_policy("fp16,module.head=fp32")
    assert [inspect.signature(each) for each in patched()] == [inspect.signature(each) for each in before]
    assert set_policy("fp32").is_fp32
    assert patched() == before
    assert keras.config.dtype_policy() == keras.DTypePolicy("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = sequential()
    model.compile("sgd", LOSS)
    assert type(model.optimizer) is KerasScaled


@pytest.mark.every_backend
@pytest.mark.parametrize("make", [sequential, functional, late, Subclassed])
def test_a_pattern_that_names_no_layer_is_an_error_at_compile_or_at_the_first_step(make: Any) -> None:
    set_policy("bf16,module.head=fp32,module.boddy=fp32")
    model = make()
    if make in (sequential, functional):
        table = layer_policies(model)
        assert table.unmatched == ("boddy",)
        assert str(table).splitlines()[-1] == "module.boddy matches no layer of this model"

    if make in (late, Subclassed):
        model.compile("sgd", LOSS)
    act = (lambda: model.train_on_batch(X, Y)) if model.compiled else (lambda: model.compile("sgd", LOSS))
    with pytest.raises(UnknownNameError, match=r"module\.boddy matches no layer .*Did you mean 'body'\?"):
        act()
    set_policy("bf16,module.head=fp32,module.critic/out=fp32")
    critic = keras.Sequential([layers.Dense(1, name="out")], name="critic")
    critic(X)  # a pattern for another model that was made
    sequential().compile("sgd", LOSS)


def in_a_thread() -> keras.Model:
    with ThreadPoolExecutor() as pool:
        return pool.submit(sequential).result()


def after_clear_session() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    return sequential()


OWN = "'net/head', which keeps the policy bfloat16"
# How a model is made and under which precision, and what is reported; it is made before set_policy if that is empty.
ODD: list[tuple[Callable[[], keras.Model], str, str]] = [
    (sequential, "fp16", ""),
    (after_clear_session, "fp16", "clear_session"),
    (in_a_thread, "fp16", "clear_session"),
    (lambda: sequential(dtype="bfloat16"), "bf16,module.head=fp32", OWN),
    (lambda: keras.Sequential([layers.Dense(3, dtype="float32")]), "fp16", "no layer"),
]


@pytest.mark.parametrize(("make", "precision", "said"), ODD)
def test_a_model_that_does_not_follow_is_warned_of_once(make: Any, precision: str, said: str) -> None:
    if said:
        set_policy(precision)
    model = make()
    model(X)
    set_policy(precision)
    with pytest.warns(PolicyWarning, match=said):
        model.compile("sgd", LOSS)
    if not said:
        model.fit(X, Y, verbose=0)  # a warning is an error here
    assert not isinstance(model.optimizer, LossScaleOptimizer) or precision == "fp16"


def test_the_loss_scale_of_float16_layers_under_a_plan_without(tmp_path: Path) -> None:
    set_policy("fp16,module.head=fp32,loss_scale=32")
    sequential().save(tmp_path / "model.keras")
    model = late()
    model(X)
    for precision, machine in (("bf16", DynamicLossScale()), ("bf16,loss_scale=64", StaticLossScale(64.0))):
        set_policy(precision)
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        loaded.compile("sgd", LOSS)
        assert loaded.optimizer.machine() == machine
        model.compile("sgd", LOSS)
        assert model.optimizer.machine() == StaticLossScale(32.0)  # of the plan that it was made under


def test_a_refused_policy_changes_nothing() -> None:
    set_policy("bf16,module.head=fp32")
    compiling, policy = keras.Model.compile, keras.config.dtype_policy()
    with pytest.raises(UsageError):
        set_policy("fp8")
    assert keras.Model.compile is compiling
    assert keras.config.dtype_policy() is policy


@pytest.mark.every_backend
def test_what_add_loss_was_given_in_16_bits_is_summed_in_fp32() -> None:
    class Adding(Subclassed):
        def call(self, x: Any) -> Any:
            h = self.body(x)
            assert keras.backend.standardize_dtype(h.dtype) == "float16"
            self.add_loss(keras.ops.mean(h))
            self.add_loss(keras.ops.max(h) * 1e4)  # beyond 65504 together with the loss
            return self.head(h)

    set_policy("fp16,module.head=fp32")
    model = Adding()
    x = np.full((2, 4), 1.5, "float32")
    model(x)
    for layer, value in ((model.body, 1.0), (model.head, 0.0)):
        layer.kernel.assign(keras.ops.full(layer.kernel.shape, value))  # h is 6 everywhere
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = model.fit(x, np.full((2, 3), 100.0, "float32"), verbose=0).history
    assert history["loss"] == [pytest.approx(10000 + 6 + 60000, rel=2**-11)]


class CastsItself(layers.Layer):
    """Computes in its policy's format and gives float32."""

    def call(self, x: Any) -> Any:
        return keras.ops.cast(x[:, :3], "float32")

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 3)


# A model, and the pattern that makes its output FP32; None where the outputs are right.
MODELS: dict[str, tuple[Callable[[], keras.Model], str | None]] = {
    "sequential": (sequential, "head"),
    "unbuilt": (late, "head"),
    "activation": (lambda: functional(layers.Activation("softmax", name="last")), "last"),
    "nested": (lambda: functional(keras.Sequential([layers.Dense(3)], name="part")), "part"),
    "subclassed": (Subclassed, "LAYER"),
    "own dtype": (lambda: sequential(dtype="float32"), None),
    "casts itself": (lambda: functional(CastsItself()), None),
    "subclassed, right": (lambda: Subclassed(dtype="float32"), None),
}


def warned(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SixteenBitOutputWarning)
        act()
    return [str(each.message) for each in found if each.category is SixteenBitOutputWarning]


@pytest.mark.every_backend
@pytest.mark.parametrize("name", MODELS if BACKEND == "torch" else ["nested", "subclassed", "casts itself"])
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
    assert "is float16" in text
    line = f"fp16,loss_scale=64,module.{pattern}=fp32"
    assert f'set_policy("{line}")' in text
    if pattern != "LAYER":
        set_policy(line)
        assert warned(train) == []


def test_a_16_bit_output_of_a_layer_whose_own_dtype_overrides_the_policy() -> None:
    set_policy("bf16,module.head=fp32")
    model = sequential(dtype="mixed_bfloat16")
    with pytest.warns(PolicyWarning, match=r"which keeps the policy .*without dtype="):
        model.compile("sgd", LOSS)
    (text,) = warned(lambda: model(X))
    assert text.endswith('dtype="float32" at the layer.')


def test_only_outputs_that_the_loss_reads_are_reported() -> None:
    def three(x: Any) -> Any:
        a, b, c = (layers.Dense(3, name=name)(x) for name in "abc")
        return {"a": a, "b": b, "c": keras.ops.argmax(c, axis=-1)}

    set_policy("bf16")
    for loss, names in (
        ({"a": LOSS, "b": None, "c": None}, ["a"]),
        ({"a": LOSS, "b": LOSS, "c": None}, ["a", "b"]),
        (None, []),  # a training step of the model's own
    ):
        model = functional(three)
        model.compile("sgd", loss)
        texts = warned(lambda model=model: model(X))
        assert [text.partition(" of ")[0] for text in texts] == [f"output {name!r}" for name in names]
        assert all(f"module.{name}=fp32" in text for name, text in zip(names, texts))
