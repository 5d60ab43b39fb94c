"""The op lists against the header that TensorFlow installs, and against what TensorFlow makes of its environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.tensorflow.op_lists import COLOURS, OpLists, modes, op_lists

HEADER = Path(tf.sysconfig.get_include(), "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h")
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


def in_header() -> dict[str, dict[str, set[str]]]:
    """Class of lists -> colour -> every op that its code names there, under whatever condition."""
    text = HEADER.read_text()
    start, end = text.index("tensor_list_ops[]"), text.index("LINT.ThenChange")
    lists_of_tensors = set(re.findall(r'"(\w+)"', text[start:end]))
    found: dict[str, dict[str, set[str]]] = {}
    for part in text.split("class AutoMixedPrecisionLists")[2:]:
        name = re.match(r"\w+", part)
        assert name is not None
        found[name[0]] = {}
        for body in part.split("List() override {")[1:]:
            colour = COLOURS[len(found[name[0]])]
            ops = set(re.findall(r'"(\w+)"', body.split("return list;")[0])) - {f"{colour.upper()}LIST"}
            ops -= {"WHITELIST", "GRAYLIST", "BLACKLIST"}
            found[name[0]][colour] = ops | (lists_of_tensors if colour == "clear" else set())
    return found


def test_the_lists_are_those_of_the_installed_tensorflow() -> None:
    header = in_header()
    assert set(header) == {"Fp16", "Mkl"}
    for colour in COLOURS:
        fp16 = set().union(
            *(getattr(op_lists(mode, environ={}), colour) for mode in ("cuda", "cpu", "onednn_float16"))
        )
        assert fp16 == header["Fp16"][colour], colour
        assert getattr(op_lists("onednn_bfloat16", environ={}), colour) == header["Mkl"][colour], colour


def test_the_modes_of_fp16_differ_by_the_ops_of_a_gpu_and_of_onednn() -> None:
    cuda, cpu, onednn = (op_lists(mode, environ={}) for mode in ("cuda", "cpu", "onednn_float16"))
    assert all(getattr(cuda, colour) == getattr(cpu, colour) for colour in COLOURS)
    assert {"CudnnRNNV3", "BlockLSTM"} < cuda.allow - onednn.allow
    assert onednn.allow < cuda.allow
    assert onednn.infer - cuda.infer == {"Rsqrt", "Square", "SquaredDifference"}
    assert cuda.deny - op_lists("onednn_bfloat16", environ={}).deny == {"Mean", "Sum"}


@pytest.mark.parametrize("mode", modes())
def test_no_op_is_on_two_lists(mode: str) -> None:
    lists = op_lists(mode, environ={})
    assert sum(len(getattr(lists, colour)) for colour in COLOURS) == len(
        set().union(*(getattr(lists, c) for c in COLOURS))
    )
    known = [op for op in lists.infer if op_def_registry.get(op) is not None]
    assert len(known) > 30  # names that TensorFlow knows


def test_overrides_move_an_op_from_its_list_to_one_other() -> None:
    lists = op_lists("cuda", {"deny": ["Tanh", "Cos"], "other": ["Relu"]}, environ={})
    assert [lists.colour(op) for op in ("Tanh", "Cos", "Relu", "Exp")] == ["deny", "deny", "other", "deny"]
    assert "Tanh" not in lists.infer


def test_the_environment_that_says_the_same_reads_back_as_the_same() -> None:
    lists = op_lists("onednn_bfloat16", {"deny": ["Tanh"], "clear": ["Cos"], "other": ["MatMul"]}, environ={})
    written = lists.environment()
    assert written == {
        f"{PREFIX}ALLOWLIST_REMOVE": "MatMul", f"{PREFIX}INFERLIST_REMOVE": "Tanh", f"{PREFIX}DENYLIST_ADD": "Tanh",
        f"{PREFIX}CLEARLIST_ADD": "Cos",
    }  # fmt: skip
    assert op_lists("onednn_bfloat16", environ=written) == lists
    assert op_lists("onednn_bfloat16", environ={}).environment() == {}


def test_former_names_of_the_lists_and_the_levels() -> None:
    def of(mode: str = "cuda", **words: str) -> OpLists:
        return op_lists(mode, environ={PREFIX + key: value for key, value in words.items()})

    assert of(BLACKLIST_ADD="Cos").colour("Cos") == "deny"
    assert of(GRAYLIST_REMOVE="Tanh").colour("Tanh") == "other"
    assert of(LEVEL="TREAT_INFER_AS_DENY").colour("Tanh") == "deny"
    assert not of(LEVEL="tensor_cores_only").clear
    assert of("onednn_bfloat16", LEVEL="TENSOR_CORES_ONLY").clear
    assert of(LEVEL="UNSAFE_FORCE_ALL").force_all


@pytest.mark.parametrize(
    ("mode", "overrides", "environ", "error", "says"),
    [
        ("bf17", None, {}, UnknownNameError, "onednn_bfloat16"),
        ("cuda", {"grey": ["Tanh"]}, {}, UnknownNameError, "infer"),
        ("cuda", {"deny": "Tanh"}, {}, UsageError, r"\['Tanh'\]"),
        ("cuda", {"deny": ["Tanh"], "allow": ["Tanh"]}, {}, UsageError, "both 'deny' and 'allow'"),
        ("cuda", None, {f"{PREFIX}ALLOWLIST_ADD": "Tanh"}, UsageError, "REMOVE"),
        ("cuda", None, {f"{PREFIX}LEVEL": "MAXIMUM"}, UnknownNameError, "TREAT_INFER_AS_DENY"),
        ("onednn_bfloat16", None, {f"{PREFIX}LEVEL": "UNSAFE_FORCE_ALL"}, UsageError, "unset"),
        ("onednn_float16", None, {f"{PREFIX}LEVEL": "UNSAFE_FORCE_ALL"}, UsageError, "unset"),
    ],
)
def test_what_is_refused(
    mode: str,
    overrides: dict[str, list[str]] | None,
    environ: dict[str, str],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        op_lists(mode, overrides, environ=environ)
