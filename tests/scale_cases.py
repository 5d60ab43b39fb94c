"""The loss-scale machine's cases, one set for every framework: settings, events, and the state that follows.

`.` is a good step, `x` an overflow. The pure machine, PyTorch's, Keras's on each backend and TensorFlow's are all held
to these rows, and to the scale after every event of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mezzo.core.loss_scale import DynamicLossScale, ScaleArrays

TABLE: list[tuple[dict[str, Any], str, float, int, int, int]] = [
    # settings, events, scale, good_steps, overflows, stuck
    ({}, "", 2.0**16, 0, 0, 0),
    ({}, "...", 2.0**16, 3, 0, 0),
    ({}, "x", 2.0**15, 0, 1, 0),
    ({}, "..x.", 2.0**15, 1, 0, 0),
    ({}, "xxx", 2.0**13, 0, 3, 0),
    ({"growth_interval": 3}, "..", 2.0**16, 2, 0, 0),
    ({"growth_interval": 3}, "...", 2.0**17, 0, 0, 0),
    ({"growth_interval": 3}, "......", 2.0**18, 0, 0, 0),
    ({"growth_interval": 3}, "..x...", 2.0**16, 0, 0, 0),
    ({"growth_interval": 1, "ceiling": 2.0**17}, "....", 2.0**17, 0, 0, 0),
    ({"growth_interval": 1, "init": 3.0, "ceiling": 4.0}, ".", 4.0, 0, 0, 0),
    ({"hysteresis": 2}, "x", 2.0**16, 0, 1, 0),
    ({"hysteresis": 2}, "x.x.x.", 2.0**16, 1, 0, 0),
    ({"hysteresis": 2}, "xx", 2.0**15, 0, 2, 0),
    ({"hysteresis": 2}, "xxx", 2.0**14, 0, 3, 0),
    ({"hysteresis": 2, "growth_interval": 2}, ".x.", 2.0**16, 1, 0, 0),
    ({"init": 2.0, "floor": 1.0}, "x", 1.0, 0, 1, 0),
    ({"init": 2.0, "floor": 1.0}, "xxx", 1.0, 0, 3, 2),
    ({"init": 2.0, "floor": 1.0}, "xxx.", 1.0, 1, 0, 0),
    ({"init": 3.0, "floor": 2.0}, "x", 2.0, 0, 1, 0),
    ({"init": 1.0, "growth_factor": 1.5, "growth_interval": 1}, "..", 2.25, 0, 0, 0),
    ({"init": 1.0, "backoff_factor": 0.25}, "x", 0.25, 0, 1, 0),
]


@dataclass(frozen=True)
class RememberingArrays(ScaleArrays):
    failed: Any


@dataclass(frozen=True)
class Remembering(DynamicLossScale):
    """A kind with a field more: three fourths of the last scale that overflowed. Every framework holds and saves it."""

    kind: ClassVar[str] = "remembering"
    failed: float = 0.0

    def arrays(self) -> RememberingArrays:
        return RememberingArrays(**vars(super().arrays()), failed=self.failed)

    def advance(self, state: Any, found_inf: Any, xp: Any) -> RememberingArrays:
        after = super().advance(state, found_inf, xp)
        return RememberingArrays(**vars(after), failed=xp.where(found_inf, state.scale * 0.75, state.failed))
