"""What `mezzo run` changes in Keras: it records the steps of Keras's trainers, and notices what the script sets."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.dtype_policies.dtype_policy import set_dtype_policy

import mezzo.keras
from mezzo.core.errors import ScriptError, UsageError
from mezzo.core.records import OpFormats
from mezzo.keras import policy as keras_policy
from mezzo.keras.layers import walk
from mezzo.keras.plan import NAMES, NARROW, SIXTEEN_BITS, WORDS, KerasPlan
from mezzo.keras.steps import StepRecorder, Update, keep_losses

if TYPE_CHECKING:
    from mezzo.keras.run import Session
    from mezzo.runner.patches import Patches

_SEED = 0x6E75646765  # of the coins that decide where each weight is moved


def patch(session: Session, patches: Patches) -> None:
    """From now on the steps of every model that the script fits are recorded."""
    _script_policy(session, patches)
    check_plan = keras_policy.check_plan

    @functools.wraps(check_plan)
    def checked(model: Any, plan: Any) -> None:
        try:
            check_plan(model, plan)
        except UsageError as error:
            session.stop(error)

    patches.set(keras_policy, "check_plan", checked)
    # No line of the script could fix what is warned of.
    patches.set(keras_policy, "warn", lambda text, kind: session.journal.note(text))

    new: Any = keras.layers.Layer.__new__

    @functools.wraps(new)
    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        session.used = True  # TensorFlow imports Keras for itself
        return new(cls, *args, **kwargs)

    patches.set(keras.layers.Layer, "__new__", staticmethod(made))

    trainer = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))
    original = vars(trainer)["make_train_function"]

    @functools.wraps(original)
    def make_train_function(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.train_function is None:  # not in compile: a model's own metrics may be made after it
            _check_model(session, model)
            keep_losses(model)
        made = original(model, *args, **kwargs)
        if not isinstance(getattr(model.train_function, "__self__", None), StepRecorder):
            _RunRecorder(model, session)
        return made

    patches.set(trainer, "make_train_function", make_train_function)


class _RunRecorder(StepRecorder):
    """Records the steps of one model in the run's journal; a call with several steps is one update, timed as one."""

    def __init__(self, model: Any, session: Session) -> None:
        super().__init__(model, session.journal, every=1)
        self._session = session
        self._last: list[Update] = []
        self._nudge()

    def write(self, at: float, loss: float | None, updates: list[Update]) -> None:
        if loss is not None:
            self.journal.loss(loss)
        self._last = updates

    def after(self, logs: Any, state: Any) -> None:
        self._nudge()  # TensorFlow makes some models' weights in their first step
        super().after(logs, state)
        if self.each > 1:
            self.journal.note("several batches run in one call (steps_per_execution): they count as one step")
        for update in self._last:
            self._session.stepped(self.model, update)

    def _nudge(self) -> None:
        """Once, move each element of each FP32 variable to the next FP32 number up or down, by coins of our own."""
        variables, nudged = self.model.trainable_variables, self._session.nudged
        if not self._session.request.nudge or self.model in nudged or not variables:
            return
        nudged.add(self.model)
        coins = np.random.Generator(np.random.PCG64(np.random.SeedSequence(_SEED)))
        for variable in variables:
            if variable.dtype == "float32":
                value = np.asarray(keras.ops.convert_to_numpy(variable), dtype=np.float32)
                towards = np.where(coins.random(value.shape) < 0.5, np.float32(np.inf), np.float32(-np.inf))
                variable.assign(np.nextafter(value, towards, dtype=np.float32))


def _own_policy(what: str) -> ScriptError:
    return ScriptError(
        f"the script {what}, so this run would not have the requested precision. Remove that line: Mezzo sets the "
        "policy of each run"
    )


def _check_model(session: Session, model: Any) -> None:
    """Before a model's first step: refuse narrow layers in an FP32 run, and note masks that depend on the format."""
    layers = model._flatten_layers()
    narrow = [layer for layer in layers if session.plan.is_fp32 and layer.compute_dtype in NARROW]
    if narrow:
        path, name = narrow[0].path or narrow[0].name, narrow[0].dtype_policy.name
        session.stop(_own_policy(f"gives the layer {path} the dtype policy {name!r} itself"))
    if session.backend != "tensorflow" or session.request.seed_offset is None:
        return
    drawing = [layer for layer in layers if getattr(layer, "seed_generator", None) is not None]
    drawn = [layer.path for layer in drawing if layer.compute_dtype in SIXTEEN_BITS]
    if drawn:
        session.journal.note(
            f"{', '.join(drawn[:3])}{' and others' if drawn[3:] else ''}: TensorFlow draws random masks in the "
            "compute format, so they differ from those of FP32 with the same seed. Use --seeds 3 or more: one pair "
            "cannot tell the effect of the masks from that of the precision"
        )


def _script_policy(session: Session, patches: Patches) -> None:
    """Refuse a policy that the script sets; `float32`, as of every script that sets none, is passed over."""

    def seen(*given: Any, **named: Any) -> KerasPlan:
        policy = [*given, named.get("policy", named.get("precision"))][0]  # of Keras's functions, or of ours
        frame: FrameType = sys._getframe(1)
        name = str(getattr(policy, "name", policy))
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        if name not in ("float32", "fp32"):
            session.stop(_own_policy(f"sets the dtype policy {name!r} itself ({place})"))
        session.journal.note(
            f"{place} sets the dtype policy float32, which is ignored: this run uses {session.plan.precision}"
        )
        return session.plan

    patches.set(mezzo.keras, "set_policy", seen)
    patches.set(keras_policy, "set_policy", seen)
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", ""))
        if name.startswith("keras.") and not name.startswith("keras.src."):
            for attribute in ("set_dtype_policy", "set_global_policy"):
                if vars(module).get(attribute) is set_dtype_policy:
                    patches.set(module, attribute, seen)


def formats(model: Any, plan: KerasPlan) -> list[OpFormats]:
    """The planned and the actual compute format of each layer of a model, without layers that only hold others."""
    rows = []
    for path, layer in walk(model):
        if getattr(layer, "_layers", None) or not layer.built:
            continue
        low = WORDS[plan.policy_for(path)]
        computed = NAMES.get(str(layer.compute_dtype), str(layer.compute_dtype))
        row = OpFormats(
            op=type(layer).__name__,
            rule="lower" if low != "fp32" else "fp32",
            planned=f"{low} -> {low}",
            observed=f"{computed} -> {computed}",
            calls=1,
            casts=0,
            reason=f"dtype policy {layer.dtype_policy.name}",
            module=path,
        )
        rows.append(row)
    return rows
