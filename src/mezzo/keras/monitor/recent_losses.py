"""RecentLosses: Keras's tracker of the mean loss, which keeps the last losses themselves as well.

Keras tells of a batch the mean of all losses of its epoch so far. A batch's own loss could be told from how far sum and
weight moved, but not exactly (the sum is one FP32 number), and after one loss that is infinite or NaN not at all: then
the sum is NaN until the epoch's end, while training under a loss scale goes on. So the tracker writes each loss into
one of a few places as well, in the training step, on the device.
"""

from __future__ import annotations

from typing import Any

import keras

LEAST = 32
"""Losses that a model's tracker keeps at least: another monitor that reads a little less often need not replace it."""


class RecentLosses(keras.metrics.Mean):
    """`keras.metrics.Mean`, and the last `size` values that it was given.

    Args:
        size: how many are kept.
        name, dtype: as of the mean.

    Attributes:
        recent: FP32 variable of shape ``(size,)``: value number i (from 0) lies at ``i % size``.
        seen: int32 variable of shape ``()``: values since `reset_state`.
    """

    def __init__(self, size: int, name: str = "loss", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.size = size
        self.recent = self.add_variable((size,), "zeros", dtype="float32", name="recent")
        self.seen = self.add_variable((), "zeros", dtype="int32", name="seen")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """One more value; a tensor of several counts as their mean."""
        super().update_state(values, sample_weight=sample_weight)
        value = keras.ops.mean(keras.ops.cast(values, "float32"))
        place = keras.ops.equal(keras.ops.arange(self.size, dtype="int32"), self.seen.value % self.size)
        self.recent.assign(keras.ops.where(place, value, self.recent.value))
        self.seen.assign(self.seen.value + 1)

    def reset_state(self) -> None:
        """The mean is of nothing, and no value was seen."""
        super().reset_state()
        self.seen.assign(0)

    # What is saved is the mean's, so that a model that was saved in a watched training loads in any other.

    def save_own_variables(self, store: Any) -> None:
        """Write what `keras.metrics.Mean` writes."""
        for place, one in enumerate((self.total, self.count)):
            store[str(place)] = one

    def load_own_variables(self, store: Any) -> None:
        """Read what `keras.metrics.Mean` wrote."""
        for place, one in enumerate((self.total, self.count)):
            one.assign(store[str(place)])


def put_into(model: Any, size: int) -> RecentLosses | None:
    """See to it that the model's training keeps its last losses, and return what keeps them; None where it can't be.

    The model keeps it after the training: taking it out would have the next `fit` compile its step again.

    Args:
        model: compiled; `fit` has not run its first batch yet.
        size: how many losses at least.
    """
    old = getattr(model, "_loss_tracker", None)
    if (
        not any(one is old for one in model.metrics)
        or getattr(model, "_distribute_strategy", None) is not None
    ):
        return None  # a model with metrics of its own; a strategy wants variables made under it
    if isinstance(old, RecentLosses) and old.size >= size:
        return old
    if not isinstance(old, keras.metrics.Mean):
        return None
    new = RecentLosses(max(size, LEAST), name=old.name, dtype=old.dtype)
    object.__setattr__(model, "_loss_tracker", new)  # Keras too sets it past its own tracking of attributes
    # Functions that were traced before hold the old one.
    model.train_function = model.test_function = None
    model.make_train_function()
    return new
