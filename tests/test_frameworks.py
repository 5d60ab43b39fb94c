"""The table of frameworks that `mezzo compare` knows: how each reads a precision, and whose script a run was."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

import mezzo.cli.compare as verb
from mezzo.cli.main import main
from mezzo.compare.request import FRAMEWORKS, Request, candidates
from mezzo.compare.runs import FinishedRun
from mezzo.core import records
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.demos import DEMOS


def a_run(machine: dict[str, Any], losses: int = 0, updates: int = 0) -> FinishedRun:
    """An FP32 run of a script on a machine that had these packages."""
    return FinishedRun(
        "fp32-0",
        records.RunStarted("train.py", [], "fp32", 0, False, machine, "now"),
        tuple(records.LossRecord(k, 1.0, float(k)) for k in range(losses)),
        tuple(records.UpdateRecord(k, 0, True, False, 1.0, float(k)) for k in range(updates)),
        None,
        records.RunEnded(0, 1.0, []),
        Path("fp32-0.log"),
    )


@pytest.mark.parametrize(
    ("name", "machine", "losses", "updates", "says"),
    [
        ("pytorch", {"torch": "2", "keras": "3"}, 5, 5, None),  # trains with PyTorch, and uses some of Keras
        ("pytorch", {"torch": "2"}, 0, 0, None),  # trains not at all: told elsewhere
        # Keras on torch calls backward:
        ("pytorch", {"torch": "2", "keras": "3"}, 5, 0, "Add --framework keras"),
        ("pytorch", {"keras": "3"}, 0, 0, "Add --framework keras"),
        ("keras", {"keras": "3", "torch": "2"}, 5, 5, None),
        ("keras", {"keras": "3", "torch": "2"}, 0, 0, None),
        ("keras", {"torch": "2"}, 0, 0, "imports torch. Leave --framework keras out"),
        ("keras", {"tf_keras": "2", "tensorflow": "2"}, 0, 0, r"tf_keras.*Use Keras 3"),
        ("keras", {"tensorflow": "2"}, 0, 0, "makes no Keras model. .* TensorFlow alone"),
    ],
)
def test_whose_script_a_run_was(
    name: str, machine: dict[str, Any], losses: int, updates: int, says: str | None
) -> None:
    found = FRAMEWORKS[name].mistaken(a_run(machine, losses, updates))
    assert (found is None) == (says is None)
    assert says is None or re.search(says, str(found))


def test_precisions_of_keras() -> None:
    for word, expected, remarks in (
        ("mixed_float16,fp16", ("mixed_float16",), 1),
        ("float32,bf16", ("bf16",), 1),
        ("fp16,module.head*=fp32,bf16", ("fp16,module.head*=fp32", "bf16"), 0),
    ):
        found, said = candidates([word], "keras")
        assert (found, len(said)) == (expected, remarks)


def test_what_keras_cannot_do_is_refused() -> None:
    for word, error, says in (
        ("bf61", UnknownNameError, "bf16"),
        ("float32", UsageError, "compare with fp32"),
    ):
        with pytest.raises(error, match=says):
            candidates([word], "keras")


def test_the_declaration_holds_the_framework_and_what_decides_its_runs() -> None:
    declared = Request("m", is_module=True, precisions=("mixed_float16",), framework="keras").declared()
    assert declared["framework"] == "keras"
    assert declared["policies"] == {"fp32": "fp32", "mixed_float16": "fp16"}
    assert {"keras", "tensorflow", "jax", "torch", "mezzo"} <= declared.keys()
    assert "keras" not in Request("m", is_module=True).declared()


def _asked(*words: str) -> tuple[Request, list[str]]:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    arguments = parser.parse_args(words)
    arguments.argv = []
    return verb.request_of(arguments)


def test_a_demo_trains_with_pytorch_and_has_its_metric() -> None:
    with pytest.raises(UsageError, match=r"--demo digits trains with pytorch. Leave --framework keras out"):
        _asked("--demo", "digits", "--framework", "keras")
    request, _ = _asked("--demo", "text-gpt")
    assert request.metric == DEMOS["text-gpt"].metric
    assert request.how_metric is not None
    assert not request.how_metric.higher


def test_the_wrong_framework_is_told(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Also by a run that failed. PyTorch's machine is not described there, which would load Triton and LLVM."""
    monkeypatch.chdir(tmp_path)
    for end in ("1 / 0", ""):
        Path("train.py").write_text(
            f"import sys, types, torch\nsys.modules['keras'] = types.ModuleType('keras')\n{end}"
        )
        assert main(["compare", "train.py", "--seeds", "1", "--out", f"there{end[:1]}"]) == 2
        assert "framework keras" in " ".join(capsys.readouterr().err.split())
    (started,) = (one for one in records.read(Path("there/runs/fp32-0.jsonl")) if one.kind == "run")
    assert started.machine == {"keras": ""}
