"""docs/keras.md: its Python runs on this backend, prints what the page shows, and is right about Keras itself."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from keras import layers

from conftest import BACKEND
from mezzo.keras import set_policy

PAGE = Path(__file__).parent.parent.parent / "docs" / "keras.md"
TEXT = PAGE.read_text(encoding="utf-8")
# A block's fence may name the one backend that it is for. After a block may come, indented, what it prints.
BLOCK = re.compile(r"^```python ?(\w*)\n(.*?)^```\n(?:\n((?:    [^\n]*\n)+))?", re.MULTILINE | re.DOTALL)
KerasScaled = keras.optimizers.LossScaleOptimizer


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    set_policy("fp32")


@pytest.mark.every_backend
def test_the_pages_python_runs_and_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [match.groups() for match in BLOCK.finditer(TEXT)]
    assert len(blocks) == TEXT.count("```python")
    assert {backend for backend, _, _ in blocks} == {"", "tensorflow", "jax", "torch"}
    names: dict[str, object] = {"__name__": "page"}
    shown = 0
    for backend, code, expected in blocks:
        if backend not in ("", BACKEND):
            continue
        exec(compile(code, str(PAGE), "exec"), names)
        printed = capsys.readouterr().out
        if expected and not expected.strip().startswith("mezzo "):  # a command, not what is printed
            assert printed == re.sub(r"^    ", "", expected, flags=re.MULTILINE)
            shown += 1
        for comment in re.findall(r"print\([^\n]*\)  # ([^\n]+)", code):
            assert comment in printed
    assert shown == 5


def test_the_readmes_python_for_keras_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = PAGE.parent.parent / "README.md"
    blocks = re.findall(
        r"^```python keras\n(.*?)^```", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 1
    exec(compile(blocks[0], str(readme), "exec"), {"__name__": "readme"})
    assert len(list((tmp_path / "mezzo-run").rglob("*.jsonl"))) == 1


def functional(*made: keras.layers.Layer) -> keras.Model:
    x = inputs = keras.Input((4,))
    for layer in made:
        x = layer(x)
    return keras.Model(inputs, x)


def test_what_the_page_says_of_keras_own() -> None:
    fp32 = keras.DTypePolicy("float32")
    maps = keras.dtype_policies.DTypePolicyMap
    # A map can't name layers without weights, and leaves the loss unscaled; so is one float16 layer's.
    keras.config.set_dtype_policy(maps("mixed_float16", {"head": fp32, "bend": fp32, "hed": fp32}))
    model = functional(layers.Dense(3, name="head"), layers.Activation("relu", name="bend"))
    head, bend = model.layers[1:]
    assert (head.compute_dtype, head.path) == ("float32", "head")
    assert (bend.compute_dtype, bend.path) == ("float16", None)
    keras.config.set_dtype_policy("float32")
    for unscaled in (model, functional(layers.Dense(3, dtype="mixed_float16"), layers.Dense(3))):
        unscaled.compile("sgd", "mse")
        assert not isinstance(unscaled.optimizer, KerasScaled)
    with pytest.raises(ValueError, match="matches multiple dtype policy"):
        maps("mixed_float16", {"head.*": fp32, ".*head": fp32})["head"]
    # It forgets the policy in other threads and when its session is cleared.
    keras.config.set_dtype_policy("mixed_float16")
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(layers.Dense(1).compute_dtype))
    thread.start()
    thread.join()
    keras.utils.clear_session(free_memory=False)
    assert [*seen, layers.Dense(1).compute_dtype] == ["float32", "float32"]
