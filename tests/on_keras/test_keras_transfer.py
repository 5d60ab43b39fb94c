"""The transfer-learning demo, its page and its example, on this backend."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import mezzo.keras
from mezzo.demos import find, transfer

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "transfer.md"


@pytest.fixture(autouse=True)
def _policy_undone() -> Any:
    yield
    mezzo.keras.set_policy("fp32")


def test_no_image_is_both_trained_on_and_tested() -> None:
    old, old_test, new, new_test = transfer.load(16, shots=3)
    assert [len(images) for images, _ in (old, old_test, new, new_test)] == [720, 180, 3 * 5 * 9, 720]
    known = {image.tobytes() for images, _ in (old, new) for image in images}
    assert not any(image.tobytes() in known for images, _ in (old_test, new_test) for image in images)
    assert new[1].sum(axis=0).tolist() == [27] * 5
    for images, labels in (old, old_test, new, new_test):
        assert images.shape[1:] == (16, 16, 1)
        assert images.dtype == labels.dtype == np.float32
        assert (labels.sum(axis=1) == 1).all()


def held(body: Any, ends: tuple[str, ...]) -> dict[str, bytes]:
    return {
        weight.path: keras.ops.convert_to_numpy(weight).tobytes()
        for layer in body.layers
        for weight in layer.weights
        if weight.path.endswith(ends)
    }


def test_what_is_frozen_stays_to_the_bit_and_statistics_do_when_it_is_thawed() -> None:
    mezzo.keras.set_policy("fp16,loss_scale=1024")
    _, _, new, _ = transfer.load(8, shots=1)
    body = transfer.base(8, width=2)
    body.trainable = False
    model = transfer.headed(body, "transfer")
    everything = ("kernel", "gamma", "beta", "moving_mean", "moving_variance")
    before, head = held(body, everything), keras.ops.convert_to_numpy(model.layers[-1].kernel)
    transfer.train(model, new, "head", 1, 45, 1e-2)
    assert len(before) == 6 * 5
    assert held(body, everything) == before
    assert not np.array_equal(keras.ops.convert_to_numpy(model.layers[-1].kernel), head)

    transfer.thaw(body)
    transfer.train(model, new, "fine-tuning", 1, 45, 1e-2)
    after = held(body, everything)
    moved = {path for path in after if after[path] != before[path]}
    assert {re.sub("^.*(?=stage)", "", path) for path in moved} == {
        "stage3_1_conv/kernel",
        "stage3_2_conv/kernel",
    }

    assert {layer.compute_dtype for layer in body.layers} == {"float16"}
    assert model.output.dtype == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_the_script_prints_each_stage_and_ends_with_its_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--width 2 --image-size 8 --pretrain-epochs 1 --epochs 1 --batch-size 90"
    monkeypatch.setattr(sys, "argv", ["transfer.py", *words.split()])
    transfer.main()
    lines = capsys.readouterr().out.strip().splitlines()
    stages = [line.partition(",")[0] for line in lines if ", epoch " in line]
    assert stages == ["pretraining", "head", "fine-tuning"]
    assert [bool(re.search(find("transfer").metric, line)) for line in lines] == [
        *[False] * (len(lines) - 1),
        True,
    ]


def test_the_pages_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})


def test_a_model_that_is_loaded_whole_keeps_the_policies_it_was_saved_with(tmp_path: Path) -> None:
    """As the page says: a set policy reaches layers that are made under it, not those that come from a file."""
    saved = transfer.base(8, width=2)
    saved.save(tmp_path / "base.keras")
    saved.save_weights(tmp_path / "base.weights.h5")
    mezzo.keras.set_policy("bf16")
    loaded = keras.models.load_model(tmp_path / "base.keras")
    assert {layer.compute_dtype for layer in loaded.layers if layer.weights} == {"float32"}
    made = transfer.base(8, width=2)
    made.load_weights(tmp_path / "base.weights.h5")
    assert {layer.compute_dtype for layer in made.layers} == {"bfloat16"}
    kernels = [list(held(model, ("kernel",)).values()) for model in (made, saved)]
    assert len(kernels[0]) == 6
    assert kernels[0] == kernels[1]


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["x", "--epochs", "1", "--precision", "bf16", "--records", str(tmp_path / "records")]
    )
    runpy.run_path(str(ROOT / "examples" / "keras_transfer.py"), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.fullmatch("bfloat16: [0-9.]+% right, weights float32", last)
    assert len(list((tmp_path / "records" / "runs").glob("*.jsonl"))) == 3  # one a fit


def test_every_keras_example_is_told_of() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for path in (ROOT / "examples").glob("keras_*.py"):
        assert f"`examples/{path.name}`" in pages
