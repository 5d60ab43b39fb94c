"""`mezzo compare --framework keras` on an ordinary script: children, verdict, table and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import BACKEND
from mezzo.cli.main import main
from mezzo.core import records

SCRIPT = """
import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.Conv2D(8, 3, activation="relu"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(10, name="head"),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
model.fit(images[:1500], labels[:1500], batch_size=100, epochs=2, verbose=0)
print(f"test accuracy: {100 * model.evaluate(images[1500:], labels[1500:], verbose=0)[1]:.2f} %")
"""


def test_a_script_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    Path("train.py").write_text(SCRIPT)
    words = ["--framework", "keras", "--precision", "mixed_bfloat16,module.head=float32", "--seeds", "1"]
    status = main(["compare", "train.py", *words, "--metric", "accuracy: ([0-9.]+)", "--out", "there"])
    out = capsys.readouterr().out
    verdict = json.loads(Path("there/verdict.json").read_text())
    ((name, one),) = verdict["candidates"].items()
    assert name == "mixed_bfloat16,module.head=float32"
    assert status == int(one["parity"] == "divergent"), out
    assert verdict["framework"] == verdict["request"]["framework"] == "keras"
    assert verdict["machine"]["backend"] == BACKEND
    assert (one["steps"], one["skipped_steps"], one["failed"]) == (30, 0, False)
    assert one["fp32_loss"] == pytest.approx(one["final_loss"], rel=0.1)
    assert one["fp32_loss"] != one["final_loss"]
    assert one["noise_floor"] > 0
    assert one["memory_how"].startswith("resident memory of the process")
    assert one["speedup"] > 0
    assert one["steps_timed"] > 20
    assert json.loads(Path("there/comparison.json").read_text())["policies"][name] == "bf16,module.head=fp32"
    assert "mezzo compare train.py --framework keras --precision" in out
    page = Path("there/report.html").read_text()
    for text in ("Conv2D", "sequential/head", "bf16 -&gt; bf16", "resident memory of the process"):
        assert text in page, text
    formats = next(
        one
        for one in records.read(Path("there/runs/mixed-bfloat16-module.head-float32-0.jsonl"))
        if isinstance(one, records.OpsRecord)
    )
    assert all(op.as_planned for op in formats.ops)


def test_a_script_with_a_policy_of_its_own_has_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    Path("train.py").write_text("import keras\nkeras.config.set_dtype_policy('mixed_float16')\n")
    assert main(["compare", "train.py", "--framework", "keras", "--seeds", "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "train.py:2" in said
    assert "would not be in FP32" in said


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch trains there")
def test_a_script_of_keras_run_as_pytorchs_is_told_the_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    Path("train.py").write_text("import keras, torch\nkeras.layers.Dense(1)(keras.ops.ones((1, 2)))\n")
    assert main(["compare", "train.py", "--seeds", "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "trains with Keras: give --framework keras" in said
    assert "signal" not in said
