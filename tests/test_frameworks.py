"""Frameworks that are not imported: a precision as Keras understands it, its hardware, and whose script a run was."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mezzo.cli.compare as verb
from mezzo.cli.main import main
from mezzo.compare.request import FRAMEWORKS, Request, candidates
from mezzo.compare.runs import FinishedRun
from mezzo.core import records
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mezzo.core.policy import policy
from mezzo.demos import DEMOS
from mezzo.keras import hardware
from mezzo.keras.plan import KerasPlan, names, plan


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


@pytest.mark.usefixtures("forked")
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


# A precision as Keras understands it.


HEAD = (("head", "float32"),)


NONE, DYNAMIC = NoLossScale(), DynamicLossScale()
# given, loss_scale= -> default, paths, loss scale, precision
PLANS: list[tuple[Any, Any, str, Any, Any, str]] = [
    ("fp32", None, "float32", (), NONE, "fp32"),
    ("bf16", None, "mixed_bfloat16", (), NONE, "bf16"),
    ("compute=mixed_float16", None, "mixed_float16", (), DYNAMIC, "fp16"),
    ("mixed_float16, module.head = float32", None, "mixed_float16", HEAD, DYNAMIC, "fp16,module.head=fp32"),
    # An FP32 model with one part in float16 needs the loss scale too.
    ("fp32,module.a=fp16", None, "float32", (("a", "mixed_float16"),), DYNAMIC, "fp32,module.a=fp16"),
    (policy("fp16"), None, "mixed_float16", (), DYNAMIC, "fp16"),
    ("fp16,loss_scale=2", "none", "mixed_float16", (), NONE, "fp16,loss_scale=none"),
    ("fp16,loss_scale=2", 2**10, "mixed_float16", (), StaticLossScale(1024.0), "fp16,loss_scale=1024"),
]


@pytest.mark.parametrize(("given", "asked", "default", "paths", "scale", "precision"), PLANS)
def test_what_a_precision_means(given: Any, asked: Any, default: Any, paths: Any, scale: Any, precision: str):
    made = plan(given, asked)
    assert made == KerasPlan(default, paths, scale, precision)
    assert plan(made.precision) == made
    assert made.is_fp32 == (precision == "fp32")


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('compute = "fp16"\nloss_scale = 16\n[modules]\n"encoder/*" = "fp32"\n', encoding="utf-8")
    made = plan(file)
    assert made == plan(str(file)) == plan("fp16,loss_scale=16,module.encoder/*=fp32")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("bf61", ["unknown precision 'bf61'", "Did you mean 'bf16'?"]),
        ("fp8", ["compute=fp8", 'model.quantize("float8")', "fp32, bf16, fp16"]),
        ("bf16,op.softmax=fp32", ["op.softmax", "module.PATTERN=fp32"]),
        ("bf16,params=bf16", ["params=bf16,masters=split", "FP32 variables"]),
        ("float16", ["float16", "mixed_float16"]),
        ("fp16,module.a//b=fp32", ["'a//b'"]),
        ("nowhere.toml", ["nowhere.toml", "No such file"]),
        (3, ["precision is 3", "'mixed_float16'"]),
        (SimpleNamespace(compute_dtype="float16", default_policy=1), ["DTypePolicyMap"]),
    ],
)
def test_what_keras_cannot_do_is_an_error_that_says_what_to_use(given: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        plan(given)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("pattern", "named", "not_named"),
    [
        ("head", ["head", "net/head"], ["head/inner", "heads", "net/head_1", "ahead"]),
        ("dense*", ["dense", "net/dense_1"], ["dense/norm", "net/my_dense"]),
        ("encoder/*/norm", ["encoder/0/norm", "net/encoder/b1/norm"], ["encoder/norm", "encoder/0/1/norm"]),
        ("encoder.*.norm", ["encoder/0/norm"], ["encoder/norm"]),
        ("encoder/**/norm", ["encoder/norm", "net/encoder/0/1/norm"], ["norm"]),
        ("/dense", ["dense"], ["net/dense"]),
        # Keras takes dots in names.
        ("block.0/dense", ["block.0/dense", "net/block.0/dense"], ["block/dense"]),
    ],
)
def test_which_paths_a_pattern_names(pattern: str, named: list[str], not_named: list[str]) -> None:
    assert all(names(pattern, path) for path in named)
    assert not any(names(pattern, path) for path in not_named)


def test_a_printed_plan_says_that_its_patterns_are_not_checked_yet() -> None:
    assert [one for one in ("bf16", "bf16,module.haed=fp32") if "not checked yet" in str(plan(one))] == [
        "bf16,module.haed=fp32"
    ]


def test_of_patterns_that_name_a_layer_the_last_decides_and_inner_layers_follow() -> None:
    made = plan("fp16,module.mha=fp32,module.mha/query=bf16,module.enc/**=bf16,module.enc/norm*=fp32")
    for path, policy_name, pattern in (
        ("net/mha/key", "float32", "mha"),
        ("net/mha/query", "mixed_bfloat16", "mha/query"),
        ("net/mha/query/inside", "mixed_bfloat16", "mha/query"),
        ("enc/dense", "mixed_bfloat16", "enc/**"),
        ("enc/norm_1", "float32", "enc/norm*"),
        ("other", "mixed_float16", None),
    ):
        assert made.policy_for(path) == policy_name, path
        assert made.decision(path) == (pattern, policy_name)
    backwards = plan("fp16,module.enc/norm*=fp32,module.enc/**=bf16")
    assert backwards.policy_for("enc/norm_1") == "mixed_bfloat16"


# The hardware as Keras's backends describe it: versions by use, GPUs by backend, formats by device; and peak memory.


NAMES = {"keras", "tensorflow", "jax", "torch", "tf_keras"}


def framework(**parts: Any) -> Any:
    return SimpleNamespace(__version__="9.9", **parts)


def only(monkeypatch: pytest.MonkeyPatch, **present: Any) -> None:
    """Of the frameworks, these alone are imported."""
    for name in NAMES:
        if name in present:
            monkeypatch.setitem(sys.modules, name, present[name])
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)


def torch_with(capability: tuple[int, int] | None) -> Any:
    cuda = SimpleNamespace(
        is_available=lambda: capability is not None,
        is_initialized=lambda: True,
        get_device_name=lambda: "NVIDIA T4",
        get_device_capability=lambda: capability,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: 5,
    )
    return framework(cuda=cuda)


def jax_with(platform: str, **told: Any) -> Any:
    stats = {"peak_bytes_in_use": 5}
    device = SimpleNamespace(platform=platform, device_kind="NVIDIA A100", memory_stats=lambda: stats, **told)
    return framework(local_devices=lambda: [device])


def tensorflow_with(*details: dict[str, Any]) -> Any:
    config = SimpleNamespace(
        list_physical_devices=lambda kind: list(range(len(details))) if kind == "GPU" else ["CPU"],
        list_logical_devices=lambda kind: [SimpleNamespace(name="GPU:0")] * len(details),
        get_device_details=lambda device: details[device],
        reset_memory_stats=lambda name: None,
        get_memory_info=lambda name: {"peak": 5},
    )
    config.experimental = config
    return framework(config=config)


BOTH = ["bf16", "fp16"]
GPUS = [
    ("torch", torch_with(None), None, None),
    ("torch", torch_with((7, 0)), "NVIDIA T4", ["fp16"]),
    ("torch", torch_with((6, 1)), "NVIDIA T4", []),
    ("jax", jax_with("cpu"), None, None),
    ("jax", jax_with("gpu", compute_capability="7.5"), "NVIDIA A100", ["fp16"]),
    ("jax", jax_with("gpu", compute_capability="gfx90a"), "NVIDIA A100", BOTH),
    ("tensorflow", tensorflow_with({"device_name": "L4", "compute_capability": (8, 9)}), "L4", BOTH),
    ("tensorflow", tensorflow_with({"compute_capability": (7, 5)}), "GPU", ["fp16"]),
    ("", tensorflow_with({"compute_capability": (8, 9)}), None, None),  # Keras was not imported
]


@pytest.mark.parametrize(("backend", "module", "gpu", "formats"), GPUS)
def test_the_gpu_and_its_memory(backend: str, module: Any, gpu: Any, formats: Any, monkeypatch: Any) -> None:
    for place in ("mezzo.core.hardware.cpu", "mezzo.keras.hardware.cpu"):
        monkeypatch.setattr(place, lambda: ("a CPU", frozenset({"fma", "amx_bf16"})))
    only(monkeypatch, **{backend or "tensorflow": module})
    told = hardware.describe(backend)
    assert json.loads(json.dumps(told)) == told
    assert told["gpu"] == gpu
    assert told["device_type"] == ("cpu" if gpu is None else "gpu")
    assert told["native_formats"] == (["bf16"] if formats is None else formats)
    assert (told["cpu"], told["backend"]) == ("a CPU", backend)
    if gpu is not None:
        record: Any = hardware.peak_memory(backend, 0)()
        assert record.peak_bytes == 5
        assert "allocator" in record.how


def test_versions_of_what_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dict.fromkeys(("keras", "tensorflow", "tf_keras"), framework())
    only(monkeypatch, jax=jax_with("cpu"), torch=torch_with(None), **parts)
    for backend, used, unused in (("jax", True, set()), ("torch", False, {"keras", "jax"})):
        told = hardware.describe(backend, used=used)
        assert {name: told[name] for name in NAMES & told.keys()} == dict.fromkeys(NAMES - unused, "9.9")
