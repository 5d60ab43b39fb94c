"""What a run changes in Keras: it records the steps of Keras's trainers, and notices what the script sets itself.

| patched                        | for                                                                       |
|--------------------------------|---------------------------------------------------------------------------|
| `Trainer.make_train_function`  | what it makes is wrapped: the loss and what came of each step is read     |
| `checks.check_plan`            | a policy that does not fit the model is the user's mistake: the run ends  |
| `checks.tell`                  | warnings of the policy become notes: no line of the script could fix them |
| `set_dtype_policy`             | a policy of the script's own                                              |
| `Layer.__new__`                | whether the script makes anything of Keras's                              |
| `Layer.__call__`               | which layer computed in which format, if that is observed                 |

Reading the loss waits for the step, so that its time is its own: JAX returns long before a step is done.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.dtype_policies.dtype_policy import set_dtype_policy

from mezzo.core.errors import ScriptError, UsageError
from mezzo.core.records import OpFormats
from mezzo.keras import checks
from mezzo.keras.plan import NAMES, NARROW, POLICIES, SIXTEEN_BITS
from mezzo.keras.steps import StepReader, around, keep_losses

if TYPE_CHECKING:
    from mezzo.keras.run import Session
    from mezzo.runner.patches import Patches

_MARK = "_mezzo_records"
_SEED = 0x6E75646765  # of the coins that decide where each weight is moved


def patch(session: Session, patches: Patches) -> None:
    """From now on the steps of every model that the script fits are recorded."""
    _script_policy(session, patches)
    _used(session, patches)
    _policy_told(session, patches)
    steps = _Steps(session)
    trainer = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))
    patches.set(trainer, "make_train_function", steps.making(vars(trainer)["make_train_function"]))
    if session.request.observe:
        session.formats = _observe(session, patches)


class _Steps:
    """Records the training steps of every model."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._nudged: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = 0

    def making(self, original: Any) -> Any:
        """`make_train_function`, whose functions are recorded."""

        @functools.wraps(original)
        def make_train_function(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model.train_function is None:  # not in compile: a model's own metrics may be made after it
                keep_losses(model)
            made = original(model, *args, **kwargs)
            function = model.train_function
            if function is not None and not hasattr(function, _MARK):
                model.train_function = self._watched(model, function)
            self._nudge(model)
            return made

        return make_train_function

    def _watched(self, model: Any, function: Any) -> Any:
        reader: StepReader | None = None

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        def before(args: Any) -> None:
            nonlocal reader
            if self._depth:  # a train_step that trains another model by its own fit
                return
            self._first(model)
            reader = reader or StepReader(model)
            reader.begin(args)

        def after(made: Any) -> None:
            if self._depth or reader is None:
                return
            self._nudge(model)  # TensorFlow makes some models' weights in their first step
            reader.end(made)
            try:
                self._record(model, reader)
            except SystemExit:
                if keras.backend.backend() == "jax":
                    # What the trainer holds has been given away to the step: it puts this back instead.
                    names = ("trainable", "non_trainable", "optimizer", "metrics")
                    model._jax_state = {f"{name}_variables": part for name, part in zip(names, made[1])}
                raise

        watched = around(inside, before, after)
        setattr(watched, _MARK, True)
        return watched

    def _record(self, model: Any, reader: StepReader) -> None:
        """Losses of the execution; and of each optimizer one update, whose time is that of all its steps."""
        journal, steps = self._session.journal, reader.read()
        for text in reader.notes:
            journal.note(text)
        if len(steps) > 1:
            journal.note(
                "several batches run in one call (steps_per_execution): they count as one step, and its time is theirs"
            )
        for step in steps:
            if step.loss is not None:
                journal.loss(step.loss)
        updates = {id(update.optimizer): update for step in steps for update in step.updates}
        for update in updates.values():
            optimizer = model if update.optimizer is None else update.optimizer
            self._session.stepped(optimizer, skipped=update.skipped, scale=update.scale)

    def _nudge(self, model: Any) -> None:
        if self._session.request.nudge and model not in self._nudged and model.trainable_variables:
            self._nudged.add(model)
            nudge(model.trainable_variables)

    def _first(self, model: Any) -> None:
        """Before a model's first step: is it in FP32 if that is asked for, and what must a reader of a pair know."""
        if model in self._known:
            return
        self._known.add(model)
        session, layers = self._session, model._flatten_layers()
        narrow = [layer for layer in layers if session.plan.is_fp32 and layer.compute_dtype in NARROW]
        if narrow:
            name = narrow[0].dtype_policy.name
            session.stop(_own_policy(f"gives the layer {narrow[0].path} the dtype policy {name!r} itself"))
        if session.backend != "tensorflow" or session.request.seed_offset is None:
            return
        drawn = [
            layer.path
            for layer in layers
            if getattr(layer, "seed_generator", None) is not None and layer.compute_dtype in SIXTEEN_BITS
        ]
        if drawn:
            session.journal.note(
                f"{', '.join(drawn[:3])}{' and others' if drawn[3:] else ''}: TensorFlow draws random masks in the "
                "compute format, so they are not FP32's of the same seed. One pair can't tell that from the precision: "
                "give --seeds 3 or more"
            )


def nudge(variables: Iterable[Any]) -> int:
    """Move each element of each FP32 variable to the next FP32 number up or down; how many variables were moved.

    Naive code, with a fair coin for each element::

        v.assign(numpy.nextafter(v, inf if coin else -inf))

    The coins come from a generator of our own with a fixed seed, so the script's random streams are untouched and two
    nudged runs are the same run. Zero goes to the smallest subnormal, which some backends flush back to zero in what
    they compute; NaN stays NaN. A variable that is given twice is moved once.
    """
    coins = np.random.Generator(np.random.PCG64(np.random.SeedSequence(_SEED)))
    moved: dict[int, None] = {}
    for variable in variables:
        if variable.dtype != "float32" or id(variable) in moved:
            continue
        value = np.asarray(keras.ops.convert_to_numpy(variable), dtype=np.float32)
        towards = np.where(coins.random(value.shape) < 0.5, np.float32(np.inf), np.float32(-np.inf))
        variable.assign(np.nextafter(value, towards, dtype=np.float32))
        moved[id(variable)] = None
    return len(moved)


def _own_policy(what: str) -> ScriptError:
    return ScriptError(
        f"the script {what}, so this run would not be in the precision that it is to have. Take that out: Mezzo sets "
        "the policy of each run"
    )


def _policy_told(session: Session, patches: Patches) -> None:
    """A policy that does not fit the script's model ends the run; what is only warned of becomes a note."""
    check_plan = checks.check_plan

    @functools.wraps(check_plan)
    def checked(model: Any, plan: Any) -> None:
        try:
            check_plan(model, plan)
        except UsageError as error:
            session.stop(error)

    patches.set(checks, "check_plan", checked)
    patches.set(checks, "tell", lambda text, kind: session.journal.note(text))


def _script_policy(session: Session, patches: Patches) -> None:
    """Refuse a policy that the script sets; `float32`, as of every script that sets none, is passed over."""

    @functools.wraps(set_dtype_policy)
    def seen(policy: Any) -> Any:
        frame: FrameType = sys._getframe(1)
        if str(frame.f_globals.get("__name__", "")).startswith(("mezzo.", "keras.")):
            return set_dtype_policy(policy)
        name = str(getattr(policy, "name", policy))
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        if name != "float32":
            session.stop(_own_policy(f"sets the dtype policy {name!r} itself ({place})"))
        session.journal.note(
            f"{place} sets the dtype policy float32, which is passed over: this run's is {session.plan.precision}"
        )

    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", ""))
        if name.startswith("keras.") and not name.startswith("keras.src."):
            for attribute in ("set_dtype_policy", "set_global_policy"):
                if vars(module).get(attribute) is set_dtype_policy:
                    patches.set(module, attribute, seen)


def _used(session: Session, patches: Patches) -> None:
    """Note the first layer (a model is one) that is made: a script that imports TensorFlow imports Keras too."""
    new: Any = keras.layers.Layer.__new__

    @functools.wraps(new)
    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        session.used = True
        return new(cls, *args, **kwargs)

    patches.set(keras.layers.Layer, "__new__", staticmethod(made))


def _observe(session: Session, patches: Patches) -> Any:
    """Note what each layer returns while it is called (or traced); a function that gives a row for each, and ends it.

    A layer's inputs are cast to its compute dtype before its `call`, so that is what it computes in. Layers that only
    hold others (a model) are left out.
    """
    call: Any = keras.layers.Layer.__call__
    rows: dict[str, OpFormats] = {}
    done = False
    words = {name: word for word, name in POLICIES.items()}

    @functools.wraps(call)
    def seen(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(layer, *args, **kwargs)
        path = getattr(layer, "path", None) or layer.name
        if done or getattr(layer, "_layers", None) or path in rows:
            return outputs
        given = [str(getattr(one, "dtype", "")).rpartition(".")[2] for one in keras.tree.flatten(outputs)]
        floats = list(dict.fromkeys(NAMES[name] for name in given if name in NAMES))
        if floats:
            computed = str(layer.compute_dtype)
            low = words[session.plan.policy_for(path)]
            rows[path] = OpFormats(
                op=type(layer).__name__,
                rule="lower" if low != "fp32" else "fp32",
                planned=f"{low} -> {low}",
                observed=f"{NAMES.get(computed, computed)} -> {', '.join(floats)}",
                calls=1,
                casts=0,
                reason=f"dtype policy {layer.dtype_policy.name}",
                module=path,
            )
        return outputs

    def table() -> list[OpFormats]:
        nonlocal done
        done = True
        return list(rows.values())

    patches.set(keras.layers.Layer, "__call__", seen)
    return table
