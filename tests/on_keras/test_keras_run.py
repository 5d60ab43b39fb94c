"""Keras scripts that know nothing of Mezzo, run by `mezzo.keras.run`, and compared: what is recorded and refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import run_scripts
from conftest import BACKEND
from mezzo.cli.main import main
from mezzo.core.errors import ScriptError, UnknownNameError, UsageError
from mezzo.keras.run import run
from run_scripts import Ran

pytestmark = pytest.mark.usefixtures("forked")

HEAD = """
import keras
import numpy as np
keras.utils.set_random_seed(3)
rng = np.random.Generator(np.random.PCG64(0))
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ rng.normal(size=(4, 1))).astype("float32")
"""
LINEAR = f"""{HEAD}
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones", name="head")])
model.compile(keras.optimizers.SGD(0.05), "mse")
"""
FIT = "\nmodel.fit(x, y, batch_size=10, epochs=1, shuffle=False, verbose=0)"
MANY_SEEDS = f"""{HEAD}
last = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=5))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.3), last])
model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=8, epochs=1, verbose=0)
print([w.tolist() for w in model.get_weights()])
"""

Launch = Callable[..., Ran]


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    return run_scripts.launcher(tmp_path, capsys, run)


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


def losses_of(ran: Ran) -> list[float]:
    return [one.loss for one in ran.of("loss")]


@pytest.mark.every_backend
def test_every_batch_of_fit_has_its_own_loss_and_an_update(launch: Launch) -> None:
    fit = "model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))"
    end = 'print(f"{model.evaluate(x, y, verbose=0):.6f}", keras.config.dtype_policy().name)'
    ran = launch(f"{LINEAR}{fit}\n{end}\n", policy="fp32")
    assert ran.status == 0, ran.out
    np.testing.assert_allclose(losses_of(ran), naive_losses(8), rtol=1e-5)
    updates = [(one.optimizer, one.moved, one.skipped, one.loss_scale) for one in ran.of("update")]
    assert updates == [(0, True, False, 1.0)] * 8
    (started,) = ran.of("run")
    assert (started.policy, started.machine["backend"]) == ("fp32", BACKEND)
    assert started.machine["keras"] == keras.__version__
    assert ran.out.split()[1] == "float32"
    assert ran.of("end")[0].status == 0


def test_train_on_batch_is_recorded_and_an_optimizer_that_is_gone_leaves_its_number(launch: Launch) -> None:
    """A fine-tuning compiles again for each stage; counting the optimizers that are left would give a number twice."""
    one_batch = "model.train_on_batch(x[:10], y[:10])\n"
    again = "model.compile(keras.optimizers.SGD(0.01), 'mse')\nimport gc; gc.collect()\n"
    ran = launch(LINEAR + one_batch + again + one_batch, policy="fp32")
    np.testing.assert_allclose(losses_of(ran)[:1], naive_losses(1), rtol=1e-5)
    assert [update.optimizer for update in ran.of("update")] == [0, 1]


@pytest.mark.every_backend
def test_fp16_is_scaled_and_a_skipped_step_is_told(launch: Launch) -> None:
    ran = launch(
        LINEAR + FIT + "\nprint(type(model.optimizer).__module__, model.layers[0].compute_dtype)",
        policy="fp16,loss_scale=dynamic(init=2**18)",
    )
    assert ran.lines[-1:] == ["mezzo.keras.loss_scale_optimizer float16"], ran.err
    updates = ran.of("update")
    assert updates[0].loss_scale == 2.0**18
    assert updates[0].skipped
    for one, following in pairwise(updates):
        assert following.loss_scale == (one.loss_scale / 2 if one.skipped else one.loss_scale)
    # A skipped step leaves the weights as they were.
    np.testing.assert_allclose(losses_of(ran)[0], naive_losses(1)[0], rtol=5e-3)
    assert ran.of("run")[0].policy.startswith("fp16")
    assert "is float16" in ran.notes  # the output, of which a training of one's own is warned


@pytest.mark.every_backend
def test_layers_and_their_formats_are_observed_and_peak_memory(launch: Launch) -> None:
    own = 'keras.layers.Dense(3, name="own", dtype="float32")'
    two_layers = LINEAR.replace("keras.layers.Dense(1", f"{own}, keras.layers.Dense(1")
    source = f"{two_layers}\nkept = np.ones({{}} << 17)\n{FIT}"
    policy = "bf16,module.head=fp32"
    # Twice the limit: the kernel may drop tens of MB of library pages meanwhile, which count as resident, too.
    ran, more = (launch(source.format(megabytes), policy=policy, observe=True) for megabytes in (0, 600))
    assert ran.of("memory")[0].peak_bytes < 300 << 20 <= more.of("memory")[0].peak_bytes
    assert ran.of("memory")[0].how.startswith("resident memory of the process")
    rows = {op.module.rpartition("/")[2]: op for op in ran.of("ops")[0].ops}
    assert {name: (row.op, row.planned, row.observed) for name, row in rows.items()} == {
        "own": ("Dense", "bf16 -> bf16", "fp32 -> fp32"),
        "head": ("Dense", "fp32 -> fp32", "fp32 -> fp32"),
    }
    assert not rows["own"].as_planned
    assert [one.index for one in ran.of("update") if one.observed] == [2]


def test_seeds(launch: Launch) -> None:
    """Run 0 leaves the script's own seeds as they are; another run is another; what is unseeded is seeded."""
    unseeded = MANY_SEEDS.replace("keras.utils.set_random_seed(3)", "").replace("seed=5", "")
    for source, same_as_first in ((MANY_SEEDS, None), (unseeded, 0)):
        offsets = 0, same_as_first, 1
        first, again, other = (launch(source, policy="fp32", seed_offset=k).out for k in offsets)
        assert first == again
        assert first != other


SEEDED = {
    "tensorflow": "tf.random.set_seed({0}); print(tf.random.uniform(()).numpy(), "
    "tf.random.Generator.from_seed({0}).uniform(()).numpy())",
    "jax": "print(jax.random.normal(jax.random.key({0})), jax.random.PRNGKey({0}))",
    "torch": "print(torch.Generator().manual_seed({0}).initial_seed())",
}


@pytest.mark.every_backend
def test_every_seed_is_shifted(launch: Launch) -> None:
    source = f"""
import keras
import {"tensorflow as tf" if BACKEND == "tensorflow" else BACKEND}
keras.utils.set_random_seed({{0}})
made = keras.random.SeedGenerator({{0}})
print(keras.ops.convert_to_numpy(made.state.value).tolist())
print(keras.ops.convert_to_numpy(keras.initializers.RandomNormal(seed={{0}})((3,))).tolist())
print(keras.ops.convert_to_numpy(keras.random.uniform((3,), seed={{0}})).tolist())
{SEEDED[BACKEND]}
"""
    shifted = launch(source.format(5), policy="fp32", seed_offset=2).out
    assert shifted == launch(source.format(7), policy="fp32", seed_offset=None).out
    kept = "import keras; print(keras.random.SeedGenerator(5).get_config()['seed'])"
    assert launch(kept, policy="fp32", seed_offset=2).out == "5\n"


def test_the_twin_begins_one_ulp_away(launch: Launch) -> None:
    plain, twin, again = (
        losses_of(launch(LINEAR + FIT, policy="fp32", seed_offset=0, nudge=nudged))
        for nudged in (False, True, True)
    )
    assert plain != twin
    assert twin == again
    np.testing.assert_allclose(plain, twin, rtol=1e-5)


@pytest.mark.every_backend
def test_the_script_ends_after_as_many_updates_as_were_asked_for(launch: Launch) -> None:
    fit = "model.fit(x, y, batch_size=10, epochs=5, shuffle=False, verbose=0)"
    ran = launch(f"{LINEAR}\ntry:\n    {fit}\nfinally:\n    print('finally')\n", policy="fp32", stop_after=6)
    assert (ran.status, ran.lines[-1], len(ran.of("update"))) == (0, "finally", 6)
    assert "ended after 6 updates" in ran.notes
    np.testing.assert_allclose(losses_of(ran), naive_losses(6), rtol=1e-5)


OWN_LAYER = f"{HEAD}\nmodel = keras.Sequential([keras.layers.Dense(1, name='d', dtype='mixed_bfloat16')])\n"


@pytest.mark.parametrize(
    ("line", "policy", "says"),
    [
        ("keras.config.set_dtype_policy('mixed_bfloat16')", "fp32", r"policy 'mixed_bfloat16' itself"),
        ("keras.mixed_precision.set_global_policy('mixed_float16')", "fp16", r"itself \(script.py:2"),
        ("import mezzo.keras; mezzo.keras.set_policy('bf16')", "fp16", r"'bf16' itself \(script.py:2"),
        (f"{OWN_LAYER}model.compile('sgd', 'mse'){FIT}", "fp32", "gives the layer .*d the dtype policy"),
    ],
)
def test_a_precision_of_the_scripts_own_is_refused(launch: Launch, line: str, policy: str, says: str) -> None:
    with pytest.raises(ScriptError, match=says):
        launch(f"import keras\n{line}\n", policy=policy)


def test_float32_set_by_the_script_is_passed_over(launch: Launch) -> None:
    lines = "keras.config.set_dtype_policy('float32')", "mezzo.keras.set_policy(precision='fp32')"
    begin, end = "import keras, mezzo.keras; ", "print(model.layers[0].compute_dtype)"
    ran = launch(f"{begin}{lines[0]}\n{lines[1]}\n{LINEAR}{end}", policy="bf16")
    assert ran.lines[-1] == "bfloat16"
    for number in (1, 2):
        assert f"script.py:{number} sets the dtype policy float32, which is ignored" in ran.notes


def test_a_pattern_that_names_no_layer_is_the_users_mistake(launch: Launch) -> None:
    with pytest.raises(UnknownNameError, match=r"module\.haed matches no layer.*Did you mean 'head'"):
        launch(LINEAR.replace("keras.Input((4,)), ", "") + FIT, policy="bf16,module.haed=fp32")


LOOP = """
import contextlib
optimizer = keras.optimizers.SGD(0.05)
gradients = [keras.ops.ones_like(v.value) for v in model.trainable_variables]
with __import__("torch").no_grad() if keras.backend.backend() == "torch" else contextlib.nullcontext():
    optimizer.apply(gradients, model.trainable_variables)
"""


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_loop_of_the_scripts_own_is_told_what_to_write(launch: Launch, policy: str) -> None:
    ran = launch(LINEAR + LOOP, policy=policy)
    assert (ran.status, ran.of("update")) == (0, [])
    (note,) = (line for line in ran.notes.splitlines() if "never called fit" in line)
    assert "model.fit" in note
    assert ("mezzo.keras.LossScaleOptimizer(optimizer)" in note) == (policy == "fp16")


def test_what_only_pytorch_runs_can_do_is_refused(launch: Launch) -> None:
    for name, value in (("watch", 5), ("watch_all", True), ("sensitivity", True), ("tensorboard", Path("x"))):
        with pytest.raises(UsageError, match=rf"{name}=.* Remove it"):
            launch("import keras", policy="fp32", **{name: value})


@pytest.mark.every_backend
def test_everything_is_given_back(launch: Launch) -> None:
    def found() -> list[object]:
        trainer = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))
        return [
            *(trainer.make_train_function, keras.Model.compile, keras.Model.__call__),
            *(keras.layers.Layer.__call__, keras.layers.Layer.__new__),
            *(keras.config.set_dtype_policy, keras.random.SeedGenerator.__init__),
        ]

    before = found()
    launch(LINEAR + FIT, policy="fp16", observe=True, seed_offset=1)
    assert found() == before
    assert keras.config.dtype_policy().name == "float32"
    (unused,) = launch("import keras", policy="fp32").of("run")
    assert "keras" not in unused.machine  # no layer was made


def test_a_script_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    if BACKEND != "tensorflow":  # Keras imports it too where it is installed, which takes longer than the run
        Path("tensorflow.py").write_text("raise ImportError")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    two_layers = LINEAR.replace("keras.layers.Dense(1", "keras.layers.Dense(4), keras.layers.Dense(1")
    error = "print('error:', model.evaluate(x, y, verbose=0))"
    Path("train.py").write_text(f"{two_layers.replace('0.05', '0.01')}{FIT * 4}\n{error}")
    name = "mixed_bfloat16,module.head=float32"
    words = ["--framework", "keras", "--precision", name, "--seeds", "1", "--metric", "error: ([0-9.]+)"]
    status = main(["compare", "train.py", *words, "--out", "there"])
    out, err = capsys.readouterr()
    assert Path("there/verdict.json").exists(), err  # a run that fails in FP32 leaves none
    verdict = json.loads(Path("there/verdict.json").read_text())
    one = verdict["candidates"][name]
    assert status == int(one["parity"] == "divergent"), out
    assert verdict["framework"] == verdict["request"]["framework"] == "keras"
    assert verdict["machine"]["backend"] == BACKEND
    assert (one["steps"], one["skipped_steps"], one["failed"]) == (16, 0, False)
    assert one["fp32_loss"] == pytest.approx(one["final_loss"], rel=0.1)
    assert one["fp32_loss"] != one["final_loss"]
    assert one["noise_floor"] > 0
    assert json.loads(Path("there/comparison.json").read_text())["policies"][name] == "bf16,module.head=fp32"
    assert "mezzo compare train.py --framework keras --precision" in out
    page = Path("there/report.html").read_text()
    assert "sequential/head" in page
    assert "bf16 -&gt; bf16" in page
