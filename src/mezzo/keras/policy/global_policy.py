"""`mezzo.keras.set_policy`: one line puts a Keras script under a precision, before its model is made.

The naive code it equals, for a precision without patterns::

    keras.config.set_dtype_policy("mixed_float16")
    ...
    model.compile(mezzo.keras.LossScaleOptimizer(keras.optimizers.get(optimizer)), ...)

With patterns each layer is given its policy at its first build or call (`mezzo.keras.policy.layers`).
"""

from __future__ import annotations

from typing import Any

import keras

from mezzo.core.loss_scale import LossScale
from mezzo.keras.policy import compiling, layers, torch_modules
from mezzo.keras.policy.plan import KerasPlan, plan
from mezzo.keras.policy.planned_name import PlannedName
from mezzo.scripts.patches import Patches

_PATCHES = Patches()


def set_policy(precision: Any, *, loss_scale: LossScale | float | str | None = None) -> KerasPlan:
    """Set what every layer that is made from here on computes in, and the loss scale of what `compile` is given.

    It holds for layers made after it, in this thread, until it is called again; `set_policy("fp32")` undoes all of it.
    `model.compile` then wraps its optimizer in `mezzo.keras.LossScaleOptimizer` where the plan has a loss scale (not
    with ``auto_scale_loss=False``), and says where the plan does not hold: a pattern that names no layer, a model made
    before the plan, an output that hands its loss 16 bits.

    Args:
        precision: ``bf16``, ``fp16``, ``fp32``, each with patterns (``fp16,module.head=fp32``), a `mezzo.Policy`, the
            path of a TOML file, or Keras's ``mixed_float16``, ``mixed_bfloat16``, ``float32``.
        loss_scale: in place of the precision's own: ``"dynamic"``, ``"none"``, a number, a loss scale's value.

    Returns:
        The plan; printed, it says which layers compute in what.

    Raises:
        UsageError: what Keras cannot do, or a name that does not exist, with the nearest one.
    """
    made = plan(precision, loss_scale)
    _PATCHES.undo()
    compiling.leave()
    if made.is_fp32:
        keras.config.set_dtype_policy("float32")
        return made
    keras.config.set_dtype_policy(keras.DTypePolicy(PlannedName(made.default, made)))
    if made.paths:
        layers.watch(_PATCHES)
    torch_modules.watch(_PATCHES)
    compiling.watch(_PATCHES, made)
    return made
