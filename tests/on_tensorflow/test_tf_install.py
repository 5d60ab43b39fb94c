"""TF1's names in today's `tf.train`, and a script as the tutorials have it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import mezzo.tensorflow as mt

TUTORIAL = Path(__file__).parent / "children" / "tf1_tutorial.py"


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
    for name in ("AdamOptimizer", "MomentumOptimizer", "Optimizer", "get_or_create_global_step"):
        assert getattr(tf.train, name) is getattr(tf.compat.v1.train, name)
    assert tf.train.FtrlOptimizer == "mine"
    experimental, theirs = tf.train.experimental, tf.compat.v1.mixed_precision
    for name in ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite"):
        assert getattr(experimental, name) is getattr(mt, name)
    for name in ("FixedLossScale", "DynamicLossScale"):
        assert getattr(experimental, name) is getattr(theirs, name)
    mt.uninstall()
    assert (set(vars(tf.train)), set(vars(experimental))) == before
    assert tf.train.FtrlOptimizer == "mine"
    mt.uninstall()


def test_a_removed_name_says_what_serves_instead() -> None:
    with pytest.raises(AttributeError, match="TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH"):
        _ = mt.explain


def test_a_tutorial_of_tf1_with_the_names_installed_before_tensorflow_is_imported() -> None:
    code = (
        "import runpy, sys, mezzo.tensorflow as mt; mt.install(); assert 'tensorflow' not in sys.modules; "
        "assert set(mt.__all__) <= set(dir(mt)); "
        f"runpy.run_path({str(TUTORIAL)!r}, run_name='__main__')"
    )
    environment = os.environ | {"MEZZO_ASSUME_NATIVE": "bf16"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "mezzo: graph rewrite: bf16 (no GPU" in done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert told["steps"] == "60"
    assert float(told["accuracy"]) > 0.8
    assert told["products"] == "['bfloat16']"
