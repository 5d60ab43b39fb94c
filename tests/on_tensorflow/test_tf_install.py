"""TF1's names in today's `tf.train`, a script as the tutorials have it, and the Python of docs/keras.md."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import mezzo.tensorflow as mt
from page_blocks import blocks, run


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    mt.uninstall()


def test_the_names_come_and_go_and_replace_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.train, "FtrlOptimizer", "mine", raising=False)
    before = set(vars(tf.train)), set(vars(tf.train.experimental))
    assert not {"AdamOptimizer", "get_or_create_global_step"} & before[0]
    mt.install()
    mt.install()  # again is as once
    for name in ("AdamOptimizer", "Optimizer", "get_or_create_global_step"):
        assert getattr(tf.train, name) is getattr(tf.compat.v1.train, name)
    assert tf.train.FtrlOptimizer == "mine"
    experimental, theirs = tf.train.experimental, tf.compat.v1.mixed_precision
    enable = experimental.enable_mixed_precision_graph_rewrite
    assert enable is mt.enable_mixed_precision_graph_rewrite
    assert experimental.FixedLossScale is theirs.FixedLossScale
    with pytest.raises(AttributeError, match="GRAPH_REWRITE_LOG_PATH"):
        _ = mt.explain  # a removed name says what serves instead
    mt.uninstall()
    assert (set(vars(tf.train)), set(vars(experimental))) == before
    assert tf.train.FtrlOptimizer == "mine"
    mt.uninstall()


TUTORIAL = """
import sys
import mezzo.tensorflow as mt
mt.install()
assert "tensorflow" not in sys.modules
assert set(mt.__all__) <= set(dir(mt))

import tensorflow as tf
v1 = tf.compat.v1
v1.disable_v2_behavior()
x = v1.placeholder(tf.float32, [None])
weight = tf.Variable(1.0)
opt = tf.train.AdamOptimizer(0.1)
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale=128)
step = opt.minimize(tf.reduce_mean(weight * x), global_step=tf.train.get_or_create_global_step())
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    for _ in range(5):
        session.run(step, {x: [1.0, 1.0]})
    print(session.run(tf.train.get_global_step()), round(float(session.run(weight)), 4))
"""


def test_a_tutorial_of_tf1_with_the_names_installed_before_tensorflow_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", TUTORIAL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mezzo: graph rewrite: bf16 (no GPU" in done.stderr
    assert done.stdout == "5 0.5\n"


@pytest.mark.parametrize("block", blocks("tensorflow"))
def test_a_block_runs_alone_and_prints_what_the_page_shows(block: Any, tmp_path: Path, capsys: Any) -> None:
    run(block, tmp_path, capsys)
