"""Functions to rewrite, and the graphs that TensorFlow makes of them."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

INPUT = tf.ones([8, 32])


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


def types(graphs: Any) -> dict[str, set[str]]:
    """Op -> the types that it has in these graphs."""
    found: dict[str, set[str]] = {}
    for graph in graphs:
        for node in graph.node:
            if node.attr["T"].type:
                name = re.sub("^_(Fused|Mkl)?", "", node.op)
                found.setdefault(name, set()).add(tf.dtypes.as_dtype(node.attr["T"].type).name)
    return found


def layers() -> Any:
    """A function of INPUT with three products in a row."""
    weight = tf.Variable(tf.random.stateless_normal([32, 32], [1, 2]))

    @tf.function
    def three(x: Any) -> Any:
        for _ in range(3):
            x = tf.tanh(tf.matmul(x, weight))
        return tf.reduce_sum(x)

    return three
