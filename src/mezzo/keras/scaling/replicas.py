"""One decision for all replicas of a `tf.distribute` strategy: the TensorFlow backend.

Keras 3 hands `apply` each replica's own gradients; the inner optimizer sums them later. So whether a step is skipped
has to be asked of all replicas: infinity on the second one alone would reach every weight through the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mezzo.core.errors import CallOrderError


def step_on_all(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    examine: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], Any]],
    conclude: Callable[[Callable[[], None], Any], None],
    apply: Callable[[Sequence[Any], Sequence[Any]], None],
) -> None:
    """One step, decided by what all replicas found.

    Args:
        gradients: this replica's.
        variables: those that they are of.
        examine: gradients, variables -> what to apply, and how many of each variable's gradients are bad (int32 [n]).
        conclude: a step to take or to leave, that sum over the replicas -> nothing; it moves the loss scale too.
        apply: unscaled gradients, variables -> nothing: the inner optimizer's step.

    Raises:
        CallOrderError: called outside `strategy.run`.
    """
    if tf.distribute.in_cross_replica_context():
        raise CallOrderError(
            "apply() was called outside the replicas, where there is no gradient of any one of them. "
            "Call it in the function that you hand to strategy.run(...)."
        )
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        replica = tf.distribute.get_replica_context()
        unscaled, bad = examine(gradients, variables)
        if replica.num_replicas_in_sync > 1:
            bad = replica.all_reduce(tf.distribute.ReduceOp.SUM, bad)
        conclude(lambda: apply(unscaled, variables), bad)
        return

    def across(strategy: Any, gradients: Any, variables: Any) -> None:
        each = strategy.extended.call_for_each_replica
        unscaled, bad = each(examine, args=(gradients, variables))
        bad = strategy.reduce(tf.distribute.ReduceOp.SUM, bad, axis=None)
        # The branch is out here since a branch inside a replica may not merge, and the inner step does.
        conclude(lambda: each(apply, args=(unscaled, variables)), bad)

    tf.distribute.get_replica_context().merge_call(across, args=(gradients, variables))
