"""Op lists also reach functions that have run; told by their values, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from tf_switched import a_fresh_switch

import mezzo.tensorflow as mt

enable = mt.enable_mixed_precision_graph_rewrite
INPUT = tf.ones([8, 32])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with a_fresh_switch():
        yield


def adam() -> Any:
    return tf.compat.v1.train.AdamOptimizer()


def layers() -> Any:
    weight = tf.Variable(tf.random.stateless_normal([32, 32], [1, 2]))

    @tf.function
    def three(x: Any) -> Any:
        for _ in range(3):
            x = tf.tanh(tf.matmul(x, weight))
        return tf.reduce_sum(x)

    return three


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
