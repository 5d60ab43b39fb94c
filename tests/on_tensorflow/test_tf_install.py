"""TF1's names in today's `tf.train`, and scripts as tutorials have them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import mezzo.tensorflow as mt

CHILDREN = Path(__file__).parent / "children"
OPTIMIZERS = (
    *("AdadeltaOptimizer", "AdagradDAOptimizer", "AdagradOptimizer", "AdamOptimizer", "FtrlOptimizer"),
    *("GradientDescentOptimizer", "MomentumOptimizer", "Optimizer", "ProximalAdagradOptimizer"),
    *("ProximalGradientDescentOptimizer", "RMSPropOptimizer", "SyncReplicasOptimizer"),
)


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    mt.uninstall()


def names() -> dict[str, set[str]]:
    return {"train": set(vars(tf.train)), "experimental": set(vars(tf.train.experimental))}


def test_the_names_come_and_go() -> None:
    before = names()
    assert not {"AdamOptimizer", "get_or_create_global_step"} & before["train"]
    mt.install()
    mt.install()  # again is as once
    for name in (*OPTIMIZERS, "get_global_step", "get_or_create_global_step"):
        assert getattr(tf.train, name) is getattr(tf.compat.v1.train, name)
    experimental = tf.train.experimental
    assert experimental.enable_mixed_precision_graph_rewrite is mt.enable_mixed_precision_graph_rewrite
    assert experimental.disable_mixed_precision_graph_rewrite is mt.disable_mixed_precision_graph_rewrite
    assert experimental.FixedLossScale is tf.compat.v1.mixed_precision.FixedLossScale
    assert experimental.DynamicLossScale is tf.compat.v1.mixed_precision.DynamicLossScale
    mt.uninstall()
    assert names() == before
    mt.uninstall()


def test_a_name_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.train, "AdamOptimizer", "mine", raising=False)
    checkpoint = tf.train.Checkpoint
    mt.install()
    assert tf.train.AdamOptimizer == "mine"
    assert tf.train.Checkpoint is checkpoint
    mt.uninstall()
    assert tf.train.AdamOptimizer == "mine"


def test_nothing_is_imported_by_asking_for_the_names() -> None:
    code = (
        "import sys, mezzo.tensorflow as mt; mt.install(); mt.uninstall(); assert 'tensorflow' not in sys.modules; "
        "assert set(mt.__all__) <= set(dir(mt))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_was_removed_says_what_serves_instead() -> None:
    with pytest.raises(AttributeError, match="TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH"):
        _ = mt.explain


def run(code: str) -> dict[str, str]:
    environment = os.environ | {"MEZZO_ASSUME_NATIVE": "bf16"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "mezzo: graph rewrite: bf16 (no GPU" in done.stderr
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {key: value for key, _, value in lines}


def script(name: str) -> str:
    return f"import runpy; runpy.run_path({str(CHILDREN / name)!r}, run_name='__main__')"


def test_a_tutorial_of_tf1_before_tensorflow_is_imported() -> None:
    told = run(
        "import sys, mezzo.tensorflow; mezzo.tensorflow.install(); assert 'tensorflow' not in sys.modules; "
        + script("tf1_tutorial.py")
    )
    assert told["steps"] == "60"
    assert float(told["accuracy"]) > 0.8
    assert told["products"] == "['bfloat16']"
    assert "train/beta1_power" in told["plain"].split()
    assert told["scaled"] == told["plain"]  # a Saver finds TF1's names
