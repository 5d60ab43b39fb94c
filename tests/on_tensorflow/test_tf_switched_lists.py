"""Op lists also reach functions that have run; told by their values, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf
from tf_switched import INPUT, a_fresh_switch, adam, layers

import mezzo.tensorflow as mt

enable = mt.enable_mixed_precision_graph_rewrite


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with a_fresh_switch():
        yield


def test_op_lists_reach_functions_that_have_run() -> None:
    function = layers()
    full = float(function(INPUT))
    enable(adam())
    mixed = float(function(INPUT))
    assert mixed != full
    for op_lists, expected in (({"deny": ["MatMul"]}, full), (None, mixed), ({"other": ["MatMul"]}, full)):
        enable(adam(), op_lists=op_lists)
        assert float(function(INPUT)) == expected, op_lists
    assert tf.config.optimizer.get_experimental_options()["min_graph_nodes"] < 0
    mt.disable_mixed_precision_graph_rewrite()
    assert "min_graph_nodes" not in tf.config.optimizer.get_experimental_options()


def test_a_smallest_graph_of_the_users_own_comes_back() -> None:
    tf.config.optimizer.set_experimental_options({"min_graph_nodes": 6})
    try:
        enable(adam(), op_lists={"deny": ["MatMul"]})
        assert tf.config.optimizer.get_experimental_options()["min_graph_nodes"] < 0
        mt.disable_mixed_precision_graph_rewrite()
        assert tf.config.optimizer.get_experimental_options()["min_graph_nodes"] == 6
    finally:
        tf.config.optimizer.set_experimental_options({"min_graph_nodes": 0})
