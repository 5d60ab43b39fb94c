"""TF1's names in today's `tf.train`, a script as the tutorials have it, and the Python of docs/tensorflow.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import mezzo.tensorflow as mt

PAGE = Path(__file__).parent.parent.parent / "docs" / "tensorflow.md"


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


TUTORIAL = """
import sys
import mezzo.tensorflow as mt
mt.install()
assert "tensorflow" not in sys.modules
assert set(mt.__all__) <= set(dir(mt))

import tensorflow as tf
v1 = tf.compat.v1
v1.disable_v2_behavior()
x = v1.placeholder(tf.float32, [None, 4])
weight = tf.Variable(tf.ones([4, 1]))
loss = tf.reduce_mean((tf.matmul(x, weight) - 1.0) ** 2)
opt = tf.train.AdamOptimizer(0.1)
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale=128)
global_step = tf.train.get_or_create_global_step()
step = opt.minimize(loss, global_step=global_step)
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    losses = [float(session.run([loss, step], {x: [[1.0] * 4]})[0]) for _ in range(20)]
    print(session.run(global_step), losses[-1] < losses[0] / 10)
"""


def test_a_tutorial_of_tf1_with_the_names_installed_before_tensorflow_is_imported() -> None:
    environment = os.environ | {"MEZZO_ASSUME_NATIVE": "bf16"}
    done = subprocess.run(
        [sys.executable, "-c", TUTORIAL], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "mezzo: graph rewrite: bf16 (no GPU" in done.stderr
    assert done.stdout == "20 True\n"


def test_the_code_of_the_page_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r'environ\["(\w+)"\]', text):
        monkeypatch.setenv(name, "")  # what the page sets is taken back
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), names)
    told = capsys.readouterr()
    first = re.search(r"^```\n(mezzo: .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert first is not None
    on_stderr, on_stdout = first.group(1).splitlines()
    assert told.err.splitlines()[0] == on_stderr
    assert told.out.splitlines()[0] == on_stdout
    assert "[20, 1024.0, 0]" in told.out.replace("np.int64(", "").replace("np.float32(", "").replace(")", "")
    assert "Gradients that are not finite: culprit:0." in told.out
    assert len(blocks) == 10
