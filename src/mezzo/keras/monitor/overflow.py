"""What is to be said of a step that a loss scale skipped, from what can be known of it in Keras: a `Finding`.

The step itself is over when it is looked at, and its batch is gone: nobody can run it again. Known are the loss, the
loss scale, and (with Mezzo's optimizer) which variables' gradients were not finite; and later, what followed. Backward
goes from the last layer to the first, and what is not finite in one stays so in those before it: so the last layer with
such a gradient is the nearest to where it began.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.core.finding import Finding
from mezzo.core.records import OverflowRecord
from mezzo.core.remedies import remedies as remedies_of

NAMED = 12
"""Variables that a finding names at most."""

_HOW = "Concluded from what followed; the step was not run again"


@dataclass(frozen=True)
class Skipped:
    """A skipped update of which nobody knows yet why.

    Args:
        update: its index.
        at: seconds since the run began.
        loss_scale: that it used.
        loss: its loss, unscaled; None where nobody knows.
        bad: paths of the variables whose gradients were not finite, in the model's order.
        optimizer: its number.
    """

    update: int
    at: float
    loss_scale: float
    loss: float | None
    bad: Sequence[str] = ()
    optimizer: int = 0

    def explained(self, kept_at: float | None) -> OverflowRecord:
        """With a cause.

        Args:
            kept_at: the loss scale of the first update after it that was not skipped; None where there was none.
        """
        backward = list(reversed(self.bad))
        module = backward[0].rpartition("/")[0] if backward else ""
        named = [
            f"{path.rpartition('/')[0]}: gradient of {path.rpartition('/')[2]}" for path in backward[:NAMED]
        ]
        if len(backward) > NAMED:
            named.append(f"and {len(backward) - NAMED} more")
        remedies: tuple[str, ...]
        if self.loss is not None and not math.isfinite(self.loss):
            cause, module, note = "loss", "", f"the loss was {self.loss}"
            remedies = (*remedies_of(Finding(cause)), *_OF_LOSS)
        elif kept_at is None:
            cause, note, remedies = "unknown", "no update after it was kept", _OF_NOBODY_KNOWS
        else:
            note = f"the loss was finite, and the next update that was kept had loss scale {kept_at:.6g}"
            cause, remedies = "loss scale", _OF_SCALE
        where = module or "LAYER"
        finding = Finding(
            cause=cause,
            module=module,
            direction="forward" if cause == "loss" else "backward",
            propagators=named,
            how=_HOW,
            remedies=[text.replace("LAYER", where) for text in remedies],
            note=note,
        )
        return OverflowRecord(self.update, self.optimizer, self.at, self.loss_scale, finding)


_OF_SCALE = (
    "nothing, if the loss scale is dynamic and it is rare: the next step has a smaller one",
    "if it happens often, let the scale grow less often: `fp16,loss_scale=dynamic(growth_interval=10000)` in "
    "`mezzo.keras.set_policy`, or `dynamic_growth_steps=10000` of the optimizer",
    "`mixed_bfloat16` where the device has bf16: it has FP32's range and needs no loss scale",
)
_OF_LOSS = (
    "look at the model before it, if every later loss is like this: a weight, or a moving statistic of a "
    "BatchNormalization, that is NaN or infinite stays so",
    "a loss that takes logits (`from_logits=True`), and no softmax or sigmoid before it",
    'the last layer in FP32: `dtype="float32"` for it, or `fp16,module.LAYER=fp32` with its name in '
    "`mezzo.keras.set_policy`",
    "`PrecisionMonitor(..., watch=1, probe=(x, y))` with such a batch: the ranges show the first layer that overflows",
)
_OF_NOBODY_KNOWS = (
    "a lower learning rate, or `global_clipnorm=1.0` of the inner optimizer, if the loss was growing",
    "this layer in FP32: `fp16,module.LAYER=fp32` in `mezzo.keras.set_policy`",
    "a layer whose slope has no finite value for some inputs (a root or a logarithm of 0, 0 / 0): clamp what goes in",
    "`PrecisionMonitor(..., watch=1, probe=(x, y))`: the ranges show in which layer the gradients overflow",
)
