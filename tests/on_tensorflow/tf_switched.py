"""A process in which no rewrite is on and no Session was made, before a test and after it; and what to rewrite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

from mezzo.tensorflow import disable_mixed_precision_graph_rewrite

INPUT = tf.ones([8, 32])


@contextmanager
def a_fresh_switch() -> Iterator[None]:
    """Also a CPU with BF16, whatever this one has."""
    global_state.set_non_mixed_precision_session_created(False)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEZZO_ASSUME_NATIVE", "bf16")
            yield
            disable_mixed_precision_graph_rewrite()
    finally:
        global_state.set_non_mixed_precision_session_created(False)


def adam() -> Any:
    return tf.compat.v1.train.AdamOptimizer()


def made_of(function: Any, *args: Any) -> list[Any]:
    """The graphs that TensorFlow made of `function` in one call; none where it had made them before.

    `disable_run_metadata()` would not end the collection of graphs, and what others run between two calls would be
    found by the second.
    """
    context.context().enable_graph_collection()
    function(*args)
    metadata = context.export_run_metadata()
    context.context().disable_graph_collection()
    return [graph.post_optimization_graph for graph in metadata.function_graphs]


def layers() -> Any:
    """A function of INPUT with three products in a row."""
    weight = tf.Variable(tf.random.stateless_normal([32, 32], [1, 2]))

    @tf.function
    def three(x: Any) -> Any:
        for _ in range(3):
            x = tf.tanh(tf.matmul(x, weight))
        return tf.reduce_sum(x)

    return three
