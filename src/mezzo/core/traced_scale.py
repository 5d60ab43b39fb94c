"""The loss-scale machine on arrays: one step of it without a branch, for any framework that has `where`.

`core.loss_scale` is the specification. Inside a compiled training step (a `tf.function`, `jax.jit`) nobody can ask
whether a gradient overflowed, so the state is four arrays of no dimension, and every branch is a `where`. The
namespace of the framework is an argument; nothing is imported. Of numbers it uses what all of them have:
``+ * >= <=`` on FP32 and int32, `where`, `minimum` and `maximum`.

Nothing here raises. Whoever holds the arrays reads them now and then, and calls `on_host(...)` and `check(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, Observation, StaticLossScale

TraceableLossScale = DynamicLossScale | StaticLossScale | NoLossScale


@dataclass(frozen=True)
class ScaleArrays:
    """The moving parts of a loss scale, each of shape ().

    Args:
        scale: FP32, S for the next step.
        good_steps: int32, good steps since the last growth or overflow.
        overflows: int32, overflows in a row.
        stuck: int32, overflows in a row at the floor; of a constant scale, at its one value.
    """

    scale: Any
    good_steps: Any
    overflows: Any
    stuck: Any


def traceable(pure: LossScale) -> TraceableLossScale:
    """The same loss scale, if it has a form on arrays.

    Raises:
        UsageError: it has none.
    """
    if isinstance(pure, (DynamicLossScale, StaticLossScale, NoLossScale)):
        return pure
    raise UsageError(
        f"{type(pure).__name__} is for PyTorch's training loops, which hand it the largest gradient. "
        "Use 'dynamic', DynamicLossScale(...), StaticLossScale(...) or a number."
    )


def start(pure: TraceableLossScale) -> ScaleArrays:
    """The state as plain numbers: what the arrays begin with."""
    if isinstance(pure, DynamicLossScale):
        return ScaleArrays(pure.scale, pure.good_steps, pure.overflows, pure.stuck)
    skips = pure.skips if isinstance(pure, StaticLossScale) else 0
    return ScaleArrays(pure.scale, 0, skips, skips)


def advance(pure: TraceableLossScale, state: ScaleArrays, found_inf: Any, xp: Any) -> ScaleArrays:
    """The state after one step, equal to `pure.next(Observation(found_inf))` event by event.

    The naive code it equals is in `DynamicLossScale`'s docstring.

    Args:
        pure: the fixed numbers (factors, interval, floor, ceiling, hysteresis, patience); its moving parts are stale.
        state: before the step.
        found_inf: boolean, shape (): whether any gradient was NaN or infinite.
        xp: the framework's namespace: `numpy`, `jax.numpy`, `tensorflow`, `torch`, `keras.ops`.
    """
    overflows = xp.where(found_inf, state.overflows + 1, xp.zeros_like(state.overflows))
    good_steps = xp.where(found_inf, xp.zeros_like(state.good_steps), state.good_steps + 1)
    if not isinstance(pure, DynamicLossScale):
        return ScaleArrays(state.scale, good_steps, overflows, overflows)
    at_floor = state.scale <= pure.floor
    stuck = xp.where(found_inf & at_floor, state.stuck + 1, xp.zeros_like(state.stuck))
    grows = good_steps >= pure.growth_interval
    backs_off = overflows >= pure.hysteresis
    floor, ceiling = (xp.ones_like(state.scale) * bound for bound in (pure.floor, pure.ceiling))
    grown = xp.minimum(state.scale * pure.growth_factor, ceiling)
    backed_off = xp.maximum(state.scale * pure.backoff_factor, floor)
    return ScaleArrays(
        xp.where(backs_off, backed_off, xp.where(grows, grown, state.scale)),
        xp.where(grows, xp.zeros_like(good_steps), good_steps),
        overflows,
        stuck,
    )


def on_host(pure: TraceableLossScale, state: ScaleArrays) -> TraceableLossScale:
    """The pure state that the arrays hold; waits for the device.

    Raises:
        UsageError: the arrays hold what no loss scale can: someone wrote to them.
    """
    scale, *counts = (float(getattr(state, field.name)) for field in fields(state))
    good_steps, overflows, stuck = map(int, counts)
    if isinstance(pure, DynamicLossScale):
        return replace(pure, scale=scale, good_steps=good_steps, overflows=overflows, stuck=stuck)
    return replace(pure, scale=scale, skips=overflows) if isinstance(pure, StaticLossScale) else pure


def check(pure: TraceableLossScale, state: ScaleArrays) -> None:
    """Raise what the pure machine raised if the patience ran out; waits for the device.

    Raises:
        LossScaleCollapseError: `patience` steps in a row were skipped at the floor, or under a constant scale.
    """
    if isinstance(pure, NoLossScale):
        return
    stuck = int(state.stuck)
    if stuck < pure.patience:
        return
    if isinstance(pure, DynamicLossScale):
        last = replace(pure, scale=pure.floor, stuck=stuck - 1, overflows=stuck - 1)
        last.next(Observation(found_inf=True))
    else:
        replace(pure, skips=stuck - 1).next(Observation(found_inf=True))
