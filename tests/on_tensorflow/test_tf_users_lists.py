"""Op lists beside the user's own variables for TensorFlow's: what runs is what they say, and they come back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from tf_switched import INPUT, a_fresh_switch, adam, made_of

import mezzo.tensorflow as mt
from mezzo.core.errors import UsageError
from mezzo.tensorflow.op_lists import VARIABLES

enable = mt.enable_mixed_precision_graph_rewrite
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # With `monkeypatch`, which is undone after it: what the switch puts back was set by a test.
    with a_fresh_switch():
        yield


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


def lists_in_environment() -> dict[str, str]:
    return {name[len(PREFIX) :]: value for name, value in os.environ.items() if name in VARIABLES}


def test_the_variables_are_all_that_there_are() -> None:
    lists = ("ALLOW", "INFER", "DENY", "CLEAR", "WHITE", "GRAY", "BLACK")
    names = [f"{PREFIX}{name}LIST_{verb}" for name in lists for verb in ("ADD", "REMOVE")]
    assert sorted(VARIABLES) == sorted([*names, PREFIX + "LEVEL"])


PRODUCTS = {"matmul", "matmul_1", "matmul_2"}
USERS: dict[str, dict[str, str]] = {
    "denied": {"DENYLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"},
    "denied by the former names": {"BLACKLIST_ADD": "Tanh", "GRAYLIST_REMOVE": "Tanh"},
    "allowed": {"ALLOWLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"},
    "cleared": {"CLEARLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"},
    "level": {"LEVEL": "treat_infer_as_deny"},
    "level and a list": {"LEVEL": "TREAT_INFER_AS_DENY", "CLEARLIST_ADD": "Tanh", "INFERLIST_REMOVE": "Tanh"},
    "a level that is none on a CPU": {"LEVEL": "TENSOR_CORES_ONLY"},
}
# Of the nodes that are no products: in 16 bits by the user's own variables.
ALONE = {
    "denied": {"Sigmoid"},
    "denied by the former names": {"Sigmoid"},
    "allowed": {"Tanh", "Sigmoid"},
    "cleared": {"Tanh", "Sigmoid"},
    "level": set(),
    "level and a list": {"Tanh"},
    "a level that is none on a CPU": {"Tanh", "Sigmoid"},
}


@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("colour", ["allow", "infer", "clear", "deny", "other"])
def test_what_runs_is_what_the_lists_say(users: str, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in USERS[users].items():
        monkeypatch.setenv(PREFIX + name, value)
    alone = ALONE[users] | PRODUCTS
    enable(adam())
    assert run_in_16_bits(between()) == alone
    assert lists_in_environment() == USERS[users]
    lists = {colour: ["Tanh"]}
    optimizer = enable(adam(), op_lists=lists)
    painted = (alone - {"Tanh"}) | ({"Tanh"} if colour in ("allow", "infer", "clear") else set())
    assert run_in_16_bits(between()) == painted
    of_mezzo = {name[len(PREFIX) :]: value for name, value in optimizer.rewrite.environment}
    assert lists_in_environment() == of_mezzo
    assert "LEVEL" not in of_mezzo
    enable(adam())  # the user's again
    assert run_in_16_bits(between()) == alone
    enable(adam(), op_lists=lists)
    mt.disable_mixed_precision_graph_rewrite()
    assert lists_in_environment() == USERS[users]


def test_op_lists_one_after_another_each_begin_at_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "DENYLIST_ADD", "Tanh")
    monkeypatch.setenv(PREFIX + "INFERLIST_REMOVE", "Tanh")
    for lists, painted in (
        ({"infer": ["Tanh"]}, {"Tanh", "Sigmoid"}),  # TensorFlow's own lists: no variable is set
        ({"deny": ["Sigmoid"]}, set()),
        ({"clear": ["Tanh"], "other": ["Sigmoid"]}, {"Tanh"}),
    ):
        optimizer = enable(adam(), op_lists=lists)
        assert run_in_16_bits(between()) == painted | PRODUCTS
        assert (optimizer.rewrite.environment == ()) == (painted == {"Tanh", "Sigmoid"})


def test_lists_that_tensorflow_would_refuse_leave_the_rewrite_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enable(adam(), op_lists={"deny": ["Sigmoid"]})
    in_force = lists_in_environment()
    mt.disable_mixed_precision_graph_rewrite()
    monkeypatch.setenv(PREFIX + "DENYLIST_ADD", "Tanh")  # and it stays on the infer list
    for lists in (None, {"deny": ["Sigmoid"]}):
        with pytest.raises(UsageError, match="Tanh would be on two lists"):
            enable(adam(), op_lists=lists)
    monkeypatch.delenv(PREFIX + "DENYLIST_ADD")
    enable(adam(), op_lists={"deny": ["Sigmoid"]})
    with pytest.raises(UsageError, match="under both"):
        enable(adam(), op_lists={"deny": ["Tanh"], "clear": ["Tanh"]})
    assert lists_in_environment() == in_force
    assert run_in_16_bits(between()) == PRODUCTS | {"Tanh"}
