"""Keras scripts that know nothing of Mezzo, run by `mezzo.keras.run`: what is recorded of their training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from keras_launching import Ran, launcher

from conftest import BACKEND
from mezzo.core.errors import ScriptError, UsageError

HEAD = """
import keras
import numpy as np
keras.utils.set_random_seed(3)
rng = np.random.Generator(np.random.PCG64(0))
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ rng.normal(size=(4, 1))).astype("float32")
"""
LINEAR = (
    HEAD
    + """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(keras.optimizers.SGD(0.05), "mse")
"""
)
MANY_SEEDS = (
    HEAD
    + """
model = keras.Sequential([
    keras.Input((4,)),
    keras.layers.Dense(8, activation="relu"),
    keras.layers.Dropout(0.3),
    keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=5)),
])
model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=8, epochs=1, verbose=0)
print([float(v) for w in model.get_weights() for v in w.ravel()])
"""
)


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a script under a policy in this process."""
    return launcher(tmp_path, capsys)


def naive_losses(steps: int) -> list[float]:
    """The losses of LINEAR's batches of 10, in FP64."""
    rng = np.random.Generator(np.random.PCG64(0))
    x = rng.normal(size=(40, 4)).astype("float32").astype("float64")
    y = (x @ rng.normal(size=(4, 1))).astype("float32").astype("float64")
    w, b, losses = np.ones((4, 1)), 0.0, []
    for step in range(steps):
        place = slice(10 * (step % 4), 10 * (step % 4) + 10)
        wrong = x[place] @ w + b - y[place]
        losses.append(float((wrong**2).mean()))
        w, b = w - 0.05 * 2 * x[place].T @ wrong / 10, b - 0.05 * 2 * wrong.mean()
    return losses


@pytest.mark.every_backend
def test_every_batch_of_fit_has_its_own_loss_and_an_update(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR
        + """
model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
print(f"{model.evaluate(x, y, verbose=0):.6f}", keras.config.dtype_policy().name)
""",
        policy="fp32",
    )
    assert ran.status == 0, ran.out
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(8), rtol=1e-5)
    updates = ran.of("update")
    assert [(one.optimizer, one.moved, one.skipped, one.loss_scale) for one in updates] == [
        (0, True, False, 1.0)
    ] * 8
    times = [one.at for one in updates]
    assert times == sorted(times)
    started = ran.of("run")[0]
    assert started.policy == "fp32"
    assert started.machine["backend"] == BACKEND
    assert ran.out.split()[1] == "float32"
    assert ran.of("end")[0].status == 0


def test_train_on_batch_is_recorded(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR + "for k in range(4): model.train_on_batch(x[10*k:10*k+10], y[10*k:10*k+10])", policy="fp32"
    )
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(4), rtol=1e-5)
    assert len(ran.of("update")) == 4


def test_an_optimizer_that_is_gone_gives_its_number_to_nobody(launch: Callable[..., Ran]) -> None:
    """A fine-tuning compiles again for each stage; counting the optimizers that are left would give a number twice."""
    ran = launch(
        LINEAR + "import gc\n"
        "for stage in range(3):\n"
        "    model.compile(keras.optimizers.SGD(0.01), 'mse')\n"
        "    gc.collect()\n"
        "    model.train_on_batch(x[:10], y[:10])\n"
        "    gc.collect()\n",
        policy="fp32",
    )
    assert [update.optimizer for update in ran.of("update")] == [0, 1, 2]


def test_a_model_that_makes_its_metrics_after_compile_is_recorded(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR
        + """
class Own(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def compile(self, *args):
        super().compile(*args)
        self.own = keras.metrics.Mean(name="own")
    def call(self, x):
        return self.inner(x)
    @property
    def metrics(self):
        return [self.own]
model = Own(model)
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(x, y, batch_size=10, epochs=1, verbose=0)
""",
        policy="fp32",
    )
    assert ran.status == 0, ran.err
    assert len(ran.of("update")) == 4


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on its torch backend")
def test_several_batches_in_one_call_are_one_step_with_all_their_losses(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR
        + """
model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=2)
model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
""",
        policy="fp32",
    )
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(8), rtol=1e-5)
    assert len(ran.of("update")) == 4
    assert "steps_per_execution" in ran.notes


@pytest.mark.every_backend
def test_fp16_is_scaled_and_a_skipped_step_is_told(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR
        + """
model.fit(x, y, batch_size=10, epochs=1, shuffle=False, verbose=0)
print(type(model.optimizer).__module__, model.layers[0].compute_dtype)
""",
        policy="fp16,loss_scale=dynamic(init=2**18)",
        observe=True,
    )
    assert ran.lines[-1:] == ["mezzo.keras.loss_scale_optimizer float16"], ran.err
    updates = ran.of("update")
    scales = [one.loss_scale for one in updates]
    assert scales[0] == 2.0**18
    assert updates[0].skipped
    assert not updates[0].moved
    for one, following in pairwise(updates):
        assert following.loss_scale == (one.loss_scale / 2 if one.skipped else one.loss_scale)
    # A skipped step leaves the weights as they were.
    first, second = (one.loss for one in ran.of("loss")[:2])
    np.testing.assert_allclose(first, naive_losses(1)[0], rtol=5e-3)
    assert second != first
    assert ran.of("run")[0].policy.startswith("fp16")


@pytest.mark.every_backend
def test_layers_and_their_formats_are_observed(launch: Callable[..., Ran]) -> None:
    ran = launch(
        HEAD
        + """
model = keras.Sequential([
    keras.Input((4,)),
    keras.layers.Dense(3, name="body"),
    keras.layers.Dense(3, name="own", dtype="float32"),
    keras.layers.Dense(1, name="head"),
])
model.compile("sgd", "mse")
model.fit(x, y, batch_size=10, epochs=1, verbose=0)
""",
        policy="bf16,module.head=fp32",
        observe=True,
    )
    rows = {op.module.rpartition("/")[2]: op for op in ran.of("ops")[0].ops}
    assert {name: (row.op, row.planned, row.observed) for name, row in rows.items()} == {
        "body": ("Dense", "bf16 -> bf16", "bf16 -> bf16"),
        "own": ("Dense", "bf16 -> bf16", "fp32 -> fp32"),
        "head": ("Dense", "fp32 -> fp32", "fp32 -> fp32"),
    }
    assert not rows["own"].as_planned
    observed = [one.index for one in ran.of("update") if one.observed]
    assert observed == [2]


def test_peak_memory_holds_what_the_process_came_to_hold(launch: Callable[..., Ran]) -> None:
    peaks = []
    for megabytes in (0, 300):
        ran = launch(
            LINEAR
            + f"kept = np.ones({megabytes} << 17)\n"
            + "model.fit(x, y, batch_size=10, epochs=1, verbose=0); print(kept.sum())",
            policy="fp32",
            observe=True,
        )
        memory = ran.of("memory")[0]
        assert memory.how.startswith("resident memory of the process")
        peaks.append(memory.peak_bytes)
    assert peaks[1] - peaks[0] > 250 << 20


def test_the_same_run_is_the_same_to_the_bit_and_another_seed_is_another_run(
    launch: Callable[..., Ran],
) -> None:
    first, again, plain, other = (
        launch(MANY_SEEDS, policy="fp32", seed_offset=k).out for k in (0, 0, None, 1)
    )
    assert first == again
    assert first == plain  # run 0 leaves the script's own seeds as they are
    assert first != other


def test_a_script_without_seeds_is_seeded(launch: Callable[..., Ran]) -> None:
    script = MANY_SEEDS.replace("keras.utils.set_random_seed(3)", "").replace("seed=5", "")
    first, again, other = (launch(script, policy="fp32", seed_offset=k).out for k in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.every_backend
def test_every_seed_of_keras_is_shifted(launch: Callable[..., Ran]) -> None:
    source = """
import keras
keras.utils.set_random_seed({0})
made = keras.random.SeedGenerator({0})
print(keras.ops.convert_to_numpy(made.state.value).tolist())
print(keras.ops.convert_to_numpy(keras.initializers.RandomNormal(seed={0})((3,))).tolist())
print(keras.ops.convert_to_numpy(keras.random.uniform((3,), seed={0})).tolist())
"""
    shifted = launch(source.format(5), policy="fp32", seed_offset=2).out
    assert shifted == launch(source.format(7), policy="fp32", seed_offset=None).out
    kept = launch(
        "import keras; print(keras.random.SeedGenerator(5).get_config()['seed'])",
        policy="fp32",
        seed_offset=2,
    )
    assert kept.out == "5\n"


@pytest.mark.skipif(BACKEND != "jax", reason="jax.random is the JAX backend's")
def test_jax_keys_are_shifted(launch: Callable[..., Ran]) -> None:
    source = "import keras, jax; print(jax.random.normal(jax.random.key({0})), jax.random.PRNGKey({0}))"
    shifted = launch(source.format(5), policy="fp32", seed_offset=2).out
    assert shifted == launch(source.format(7), policy="fp32").out


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.random is the TensorFlow backend's")
def test_tensorflow_generators_are_shifted(launch: Callable[..., Ran]) -> None:
    source = """
import keras, tensorflow as tf
tf.random.set_seed({0})
print(tf.random.uniform(()).numpy(), tf.random.Generator.from_seed({0}).uniform(()).numpy())
"""
    shifted = launch(source.format(5), policy="fp32", seed_offset=2).out
    assert shifted == launch(source.format(7), policy="fp32").out


def test_the_twin_begins_one_ulp_away(launch: Callable[..., Ran]) -> None:
    script = LINEAR + "model.fit(x, y, batch_size=10, epochs=1, shuffle=False, verbose=0)"
    plain, twin, again = (
        [one.loss for one in launch(script, policy="fp32", seed_offset=0, nudge=nudged).of("loss")]
        for nudged in (False, True, True)
    )
    assert plain != twin
    assert twin == again
    np.testing.assert_allclose(plain, twin, rtol=1e-5)


@pytest.mark.every_backend
def test_the_script_ends_after_as_many_updates_as_were_asked_for(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR
        + """
try:
    model.fit(x, y, batch_size=10, epochs=5, shuffle=False, verbose=0)
finally:
    print("finally")
""",
        policy="fp32",
        stop_after=6,
    )
    assert (ran.status, ran.lines[-1], len(ran.of("update"))) == (0, "finally", 6)
    assert "ended after 6 updates" in ran.notes
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(6), rtol=1e-5)


FIT = "\nmodel.fit(x, y, batch_size=10, epochs=1, verbose=0)"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("keras.config.set_dtype_policy('mixed_bfloat16')", r"sets the dtype policy 'mixed_bfloat16' itself"),
        ("keras.mixed_precision.set_global_policy('mixed_float16')", r"'mixed_float16' itself \(script.py:2"),
        (
            "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name='d', dtype='mixed_bfloat16')])\n"
            "model.compile('sgd', 'mse')",
            "gives the layer .*d the dtype policy 'mixed_bfloat16'",
        ),
    ],
)
def test_fp32_is_fp32_or_refused(launch: Callable[..., Ran], line: str, says: str) -> None:
    with pytest.raises(ScriptError, match=says):
        launch(f"import keras\n{line}\n{LINEAR if 'model' not in line else HEAD + line}{FIT}", policy="fp32")


def test_a_script_with_its_own_policy_is_left_alone(launch: Callable[..., Ran]) -> None:
    ran = launch(
        "import keras\nkeras.config.set_dtype_policy('mixed_bfloat16')\n"
        + LINEAR
        + FIT
        + "\nprint(model.dtype_policy.name)",
        policy="fp16",
    )
    assert ran.lines[-1] == "mixed_bfloat16"
    assert "left alone: it sets the dtype policy 'mixed_bfloat16'" in ran.notes


def test_float32_set_by_the_script_is_passed_over(launch: Callable[..., Ran]) -> None:
    ran = launch(
        "import keras\nkeras.config.set_dtype_policy('float32')\n"
        + LINEAR
        + FIT
        + "\nprint(model.layers[0].compute_dtype)",
        policy="bf16",
    )
    assert ran.lines[-1] == "bfloat16"
    assert "script.py:2 sets the dtype policy float32, which is passed over" in ran.notes


def test_a_script_that_never_trains_says_so(launch: Callable[..., Ran]) -> None:
    ran = launch("import keras; print(1)", policy="bf16")
    assert (ran.status, ran.out) == (0, "1\n")
    assert "never called fit" in ran.notes


LOOP = """
import contextlib
optimizer = keras.optimizers.SGD(0.05)
gradients = [keras.ops.ones_like(v.value) for v in model.trainable_variables]
with __import__("torch").no_grad() if keras.backend.backend() == "torch" else contextlib.nullcontext():
    optimizer.apply(gradients, model.trainable_variables)
"""


@pytest.mark.parametrize(("policy", "scaled"), [("bf16", False), ("fp16", True)])
def test_a_loop_of_the_scripts_own_is_told_what_to_write(
    launch: Callable[..., Ran], policy: str, scaled: bool
) -> None:
    ran = launch(LINEAR + LOOP, policy=policy)
    assert (ran.status, ran.of("update")) == (0, [])
    (note,) = (line for line in ran.notes.splitlines() if "never called fit" in line)
    assert "train_step" in note
    assert "model.fit" in note
    assert ("mezzo.keras.LossScaleOptimizer(optimizer)" in note) == scaled


def test_a_script_that_raises_gives_its_traceback_and_status(launch: Callable[..., Ran]) -> None:
    ran = launch("import keras\nraise KeyError('mine')", policy="bf16")
    assert ran.status == 1
    assert "KeyError: 'mine'" in ran.err
    assert "mezzo/keras/run" not in ran.err


@pytest.mark.parametrize(
    "asked", [{"watch": 5}, {"watch_all": True}, {"sensitivity": True}, {"tensorboard": Path("x")}]
)
def test_what_only_pytorch_runs_can_do_is_refused(
    launch: Callable[..., Ran], asked: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match=f"a run of a Keras script can't .*{next(iter(asked))} is"):
        launch("import keras", policy="fp32", **asked)


@pytest.mark.every_backend
def test_everything_is_given_back(launch: Callable[..., Ran]) -> None:
    import keras

    from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer

    def found() -> list[object]:
        trainer = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))
        optimizers = [
            vars(cls).get(name)
            for cls in (
                *keras.optimizers.Optimizer.__mro__,
                keras.optimizers.LossScaleOptimizer,
                LossScaleOptimizer,
            )
            for name in ("apply", "stateless_apply", "scale_loss")
        ]
        return [
            trainer.make_train_function,
            keras.Model.compile,
            keras.layers.Layer.__call__,
            keras.config.set_dtype_policy,
            keras.random.SeedGenerator.__init__,
            *optimizers,
        ]

    before = found()
    launch(LINEAR + FIT, policy="fp16", observe=True, seed_offset=1)
    assert found() == before
    assert keras.config.dtype_policy().name == "float32"
