"""What a Keras run refuses: a policy that does not fit the model, and a graph rewrite of the script's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import pytest
from keras_launching import Ran, launcher

from conftest import BACKEND
from mezzo.core.errors import ScriptError, UnknownNameError

SCRIPT = """
import keras
import numpy as np

x = np.ones((8, 2), "float32")
layers = [keras.layers.Dense(2, name="body"), keras.layers.Dense(1, name="head")]
"""
BUILT = SCRIPT + "model = keras.Sequential([keras.Input((2,)), *layers])\n"
UNBUILT = SCRIPT + "model = keras.Sequential(layers)\n"
TRAINED = "model.compile('sgd', 'mse')\nmodel.fit(x, x[:, :1], verbose=0)\n"

only_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a script under a policy in this process."""
    return launcher(tmp_path, capsys)


@pytest.mark.parametrize("script", [BUILT, UNBUILT])
def test_a_pattern_that_names_no_layer_is_the_users_mistake(launch: Callable[..., Ran], script: str) -> None:
    with pytest.raises(UnknownNameError, match=r"module\.haed names no layer.*Did you mean 'head'"):
        launch(script + TRAINED, policy="bf16,module.haed=fp32")


def test_a_mistake_of_the_script_in_fp32_is_the_scripts(launch: Callable[..., Ran]) -> None:
    raising = "from mezzo.core.errors import UsageError\ndef loss(y, p): raise UsageError('own')\n"
    ran = launch(BUILT + raising + TRAINED.replace("'mse'", "loss"), policy="fp32")
    assert ran.status == 1
    assert "own" in ran.err


@only_tensorflow
@pytest.mark.parametrize(
    "switch",
    [
        "tf.config.optimizer.set_experimental_options({'auto_mixed_precision_onednn_bfloat16': True})",
        "tf.compat.v1.config.optimizer.set_experimental_options({'auto_mixed_precision': True})",
        "from mezzo.tensorflow import enable_mixed_precision_graph_rewrite as on\n"
        "on(keras.optimizers.SGD(), precision='bf16')",
    ],
)
@pytest.mark.parametrize(
    ("policy", "says"), [("fp32", "not be in FP32"), ("bf16", "not be in bf16 alone|policy")]
)
def test_a_graph_rewrite_of_the_scripts_own_is_refused(
    launch: Callable[..., Ran], switch: str, policy: str, says: str
) -> None:
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options()
    source = f"import tensorflow as tf, keras\n{switch}\n"
    if policy == "bf16" and "mezzo" in switch:  # which refuses a second mixed precision by itself
        assert launch(source, policy=policy).status == 1
    else:
        with pytest.raises(ScriptError, match=rf"script.py:\d.*{says}"):
            launch(source, policy=policy)
    assert tf.config.optimizer.get_experimental_options() == before


@only_tensorflow
def test_what_switches_no_rewrite_on_goes_through(launch: Callable[..., Ran]) -> None:
    import tensorflow as tf

    switch = (
        "tf.config.optimizer.set_experimental_options({'auto_mixed_precision': False, 'remapping': True})"
    )
    assert launch(f"import tensorflow as tf, keras\n{switch}", policy="fp32").status == 0
    assert tf.config.optimizer.get_experimental_options()["remapping"] is True


def test_keras_is_told_where_the_script_made_something_of_it(launch: Callable[..., Ran]) -> None:
    (used,) = launch(BUILT, policy="fp32").of("run")
    (unused,) = launch("import keras", policy="fp32").of("run")
    assert used.machine["keras"] == keras.__version__
    assert "keras" not in unused.machine
    assert ("jax" in used.machine) == (BACKEND == "jax" and "jax" in sys.modules)
