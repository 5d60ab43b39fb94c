"""A precision as Keras understands it: no framework is needed for any of this."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mezzo.core.policy import policy
from mezzo.keras.plan import KerasPlan, names, plan

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
