"""Op lists: what runs in 16 bits is what they say, beside the user's own variables, and the user's come back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tf_switched import INPUT, adam, made_of

import mezzo.tensorflow as mt
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.tensorflow.switch import VARIABLES

enable = mt.enable_mixed_precision_graph_rewrite
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
LEVEL = PREFIX + "LEVEL"


def between() -> Any:
    """A function of INPUT: a Tanh and a Sigmoid, each between two products."""
    weight = tf.Variable(tf.random.stateless_normal([32, 32], [1, 2]))

    @tf.function
    def function(x: Any) -> Any:
        return tf.sigmoid(tf.tanh(x @ weight) @ weight) @ weight

    return function


def run_in_16_bits(function: Any) -> set[str]:
    """The names of the nodes that TensorFlow runs in BF16."""
    nodes = [node for graph in made_of(function, INPUT) for node in graph.node]
    assert any(node.name == "Tanh" for node in nodes)
    bf16 = tf.bfloat16.as_datatype_enum
    return {node.name for node in nodes if node.op != "Cast" and node.attr["T"].type == bf16}


def in_environment() -> dict[str, str]:
    names = (*VARIABLES, LEVEL)
    return {name[len(PREFIX) :]: value for name, value in os.environ.items() if name in names}


def test_the_variables_are_all_that_there_are() -> None:
    header = Path(
        tf.sysconfig.get_include(), "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
    ).read_text()
    lists = ("ALLOW", "INFER", "DENY", "CLEAR", "WHITE", "GRAY", "BLACK")
    assert all(f'list_name == "{name}LIST"' in header for name in lists)
    assert header.count("list_name == ") == len(lists)
    names = [f"{PREFIX}{name}LIST_{verb}" for name in lists for verb in ("ADD", "REMOVE")]
    assert sorted(VARIABLES) == sorted(names)


PRODUCTS = {"matmul", "matmul_1", "matmul_2"}
# What a user has set -> which nodes that are no products are then in 16 bits; and the list that Tanh is then moved to.
ROWS: list[tuple[dict[str, str], set[str], str]] = [
    ({}, {"Tanh", "Sigmoid"}, "allow"),
    ({}, {"Tanh", "Sigmoid"}, "clear"),
    ({}, {"Tanh", "Sigmoid"}, "deny"),
    ({}, {"Tanh", "Sigmoid"}, "other"),
    ({"DENYLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"}, {"Sigmoid"}, "infer"),
    ({"BLACKLIST_ADD": "Tanh", "GRAYLIST_REMOVE": "Tanh"}, {"Sigmoid"}, "infer"),
    ({"ALLOWLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"}, {"Tanh", "Sigmoid"}, "deny"),
    ({"LEVEL": "treat_infer_as_deny"}, set(), "infer"),
    (
        {"LEVEL": "TREAT_INFER_AS_DENY", "CLEARLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"},
        {"Tanh"},
        "other",
    ),
]


# No ids from the sets: their order differs between processes, and pytest-xdist then refuses to run.
@pytest.mark.parametrize(("users", "alone", "wanted"), ROWS)
def test_what_runs_is_what_the_lists_say(
    users: dict[str, str], alone: set[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in users.items():
        monkeypatch.setenv(PREFIX + name, value)
    alone = alone | PRODUCTS
    enable(adam())
    assert run_in_16_bits(between()) == alone
    assert in_environment() == users
    optimizer = enable(adam(), op_lists={wanted: ["Tanh"]})
    infer_is_deny = users.get("LEVEL", "").upper() == "TREAT_INFER_AS_DENY"
    narrow = wanted in ("allow", "clear") or (wanted == "infer" and not infer_is_deny)
    assert run_in_16_bits(between()) == (alone | {"Tanh"} if narrow else alone - {"Tanh"})
    level = {name: value for name, value in users.items() if name == "LEVEL"}
    assert in_environment() == level | {
        name[len(PREFIX) :]: value for name, value in optimizer.rewrite.environment
    }
    enable(adam())  # the user's again
    assert run_in_16_bits(between()) == alone
    enable(adam(), op_lists={wanted: ["Tanh"]})
    mt.disable_mixed_precision_graph_rewrite()
    assert in_environment() == users


def test_op_lists_one_after_another_each_begin_at_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "DENYLIST_ADD", "Tanh")
    monkeypatch.setenv(PREFIX + "INFERLIST_REMOVE", "Tanh")
    for lists, narrow in (
        ({"infer": ["Tanh"]}, {"Tanh", "Sigmoid"}),
        ({"deny": ["Sigmoid"]}, set()),
        ({"clear": ["Tanh"], "other": ["Sigmoid"]}, {"Tanh"}),
    ):
        enable(adam(), op_lists=lists)
        assert run_in_16_bits(between()) == narrow | PRODUCTS


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"deni": []}, UnknownNameError, "unknown list 'deni'.*Did you mean 'deny'"),
    ({"deny": ["Tanhh"]}, UnknownNameError, "unknown op 'Tanhh'.*mean 'Tanh'"),
    ({"deny": "Tanh"}, UsageError, "give a mapping of lists"),
    (["Tanh"], UsageError, "give a mapping of lists"),
    ({"deny": ["Tanh"], "clear": ["Tanh"]}, UsageError, "'Tanh' is under both 'deny' and 'clear'"),
]


@pytest.mark.parametrize(("given", "kind", "said"), BAD, ids=[row[2] for row in BAD])
def test_bad_lists_leave_the_rewrite_as_it_is(given: Any, kind: Any, said: str) -> None:
    enable(adam(), op_lists={"deny": ["Sigmoid"]})
    in_force = in_environment()
    with pytest.raises(kind, match=f"(?i){said}"):
        enable(adam(), op_lists=given)
    assert in_environment() == in_force
