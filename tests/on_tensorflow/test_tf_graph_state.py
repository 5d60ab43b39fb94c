"""The loss scale's state in graphs of TF1: read without a new op, where it is."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale
from mezzo.tensorflow.v1_optimizer import LossScaleOptimizer

v1 = tf.compat.v1
READS = ["loss_scale", "skipped_steps", "last_step_skipped", "machine", "check"]


def read(optimizer: Any, what: str) -> Any:
    found = getattr(optimizer, what)
    return found() if callable(found) and what in ("machine", "check") else found


def trained() -> tuple[Any, Any, Any]:
    with tf.Graph().as_default() as graph:
        optimizer = LossScaleOptimizer(v1.train.AdamOptimizer(), DynamicLossScale(init=8.0))
        step = optimizer.minimize(v1.get_variable("weight", initializer=1.0) ** 2)
    return graph, optimizer, step


def test_reading_adds_no_op() -> None:
    graph, optimizer, step = trained()
    graph.finalize()
    with graph.as_default(), v1.Session() as session:
        assert optimizer.loss_scale is optimizer.loss_scale
        session.run(initializers(graph))
        session.run(step)
        assert session.run([optimizer.loss_scale, optimizer.skipped_steps]) == [8.0, 0]


def initializers(graph: Any) -> list[Any]:
    return [variable.initializer for variable in graph.get_collection("variables")]


@pytest.mark.parametrize("what", READS)
def test_reading_outside_of_the_graph(what: str) -> None:
    graph, optimizer, _ = trained()
    before = len(graph.get_operations())
    with pytest.raises(UsageError, match=rf"{what}.* in <tensorflow.*Graph.*session.run"):
        read(optimizer, what)
    with tf.Graph().as_default() as other:
        with pytest.raises(UsageError, match="has its loss scale in <tensorflow"):
            read(optimizer, what)
        assert not other.get_operations()
    assert len(graph.get_operations()) == before


@pytest.mark.parametrize("what", READS)
def test_reading_eagerly_what_a_graph_trained(what: str) -> None:
    optimizer = LossScaleOptimizer(v1.train.AdamOptimizer(), DynamicLossScale(init=8.0))
    read(optimizer, what)  # before the first step there is the one that was made with it
    read_in_graph = "skipped_steps" if what in ("machine", "check") else what
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=1.0)
        gradients = optimizer.compute_gradients(weight**2)
        read(optimizer, read_in_graph)  # to write it down, before the step is there
        optimizer.apply_gradients(gradients)
        read(optimizer, read_in_graph)
    with pytest.raises(UsageError, match=rf"{what}.* in <tensorflow.*Graph.*session.run"):
        read(optimizer, what)
    with tf.Graph().as_default():
        optimizer.compute_gradients(v1.get_variable("weight", initializer=1.0) ** 2)
        read(optimizer, read_in_graph)  # a second run begins
    optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])  # an eager step is another run
    read(optimizer, what)
