"""The steps of Keras's own trainers, recorded: `fit` and `train_on_batch` go through a model's `train_function`.

| patched                       | for                                                                     |
|-------------------------------|-------------------------------------------------------------------------|
| `Trainer.compile`             | a loss tracker that keeps each batch's own loss                         |
| `Trainer.make_train_function` | what it makes is called by ours, which reads the loss and what came of it |

Reading the loss waits for the step, so that its time is its own: JAX gives control back long before a step is done.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from mezzo.core.loss_scale import start
from mezzo.keras.dtypes import SIXTEEN_BITS
from mezzo.keras.launch.nudge import nudge
from mezzo.keras.monitor.recent_losses import RecentLosses
from mezzo.keras.policy.outputs import SixteenBitOutputWarning
from mezzo.keras.policy.plan_check import PolicyWarning
from mezzo.keras.scaling.loss_scale_optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from mezzo.keras.launch.own_policy import OwnPolicy
    from mezzo.keras.launch.session import Session
    from mezzo.scripts.patches import Patches

_TOLD = (SixteenBitOutputWarning, PolicyWarning)
_MARK = "_mezzo_records"


class Steps:
    """Records the training steps of every model that the script fits."""

    def __init__(self, session: Session, own: OwnPolicy) -> None:
        self._session = session
        self._own = own
        self._nudged: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self, patches: Patches) -> None:
        """From now on."""
        from keras.src.trainers.trainer import Trainer

        patches.set(Trainer, "compile", self._make_compile(Trainer.compile))
        # JAX's trainer calls this before the first step.
        patches.set(Trainer, "_symbolic_build", self._make_heeding(Trainer._symbolic_build))
        trainer = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))
        patches.set(trainer, "make_train_function", self._make_make(vars(trainer)["make_train_function"]))

    def _make_compile(self, original: Any) -> Any:
        @functools.wraps(original)
        def compile(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._told(), self._session.heeding():
                made = original(model, *args, **kwargs)
            old = getattr(model, "_loss_tracker", None)
            if (
                old is not None
                and type(old) is keras.metrics.Mean
                and getattr(model, "_distribute_strategy", None) is None
            ):
                size = max(1, int(getattr(model, "steps_per_execution", 1)))
                # Past Keras's tracking of attributes, as Keras itself sets it.
                object.__setattr__(model, "_loss_tracker", RecentLosses(size, name=old.name, dtype=old.dtype))
            return made

        return compile

    def _make_heeding(self, original: Any) -> Any:
        @functools.wraps(original)
        def heeding(*args: Any, **kwargs: Any) -> Any:
            with self._session.heeding():
                return original(*args, **kwargs)

        return heeding

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What `set_policy` warns of is a note of the run: the script has no line in which it could be mended."""
        with warnings.catch_warnings(record=True) as caught:
            for kind in _TOLD:
                warnings.simplefilter("always", kind)
            yield
        for one in caught:
            if issubclass(one.category, _TOLD):
                self._session.journal.note(str(one.message))
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def _make_make(self, original: Any) -> Any:
        @functools.wraps(original)
        def make_train_function(model: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(model, *args, **kwargs)
            function = model.train_function
            if function is not None and not hasattr(function, _MARK):
                model.train_function = self._watched(model, function)
            self._nudge(model)
            return made

        return make_train_function

    def _nudge(self, model: Any) -> None:
        if self._session.request.nudge and model not in self._nudged and model.trainable_variables:
            self._nudged.add(model)
            nudge(model.trainable_variables)

    def _first(self, model: Any) -> None:
        """Before a model's first step: look whether it is what the plan says, and what a reader of a pair must know."""
        if model in self._known:
            return
        self._known.add(model)
        self._own.check(model)
        if self._session.backend != "tensorflow" or self._session.request.seed_offset is None:
            return
        drawn = [
            layer.path
            for layer in model._flatten_layers()
            if getattr(layer, "seed_generator", None) is not None and layer.compute_dtype in SIXTEEN_BITS
        ]
        if drawn:
            self._session.journal.note(
                f"{', '.join(drawn[:3])}{' and others' if drawn[3:] else ''}: TensorFlow draws random masks in the "
                "compute format, so they are not FP32's of the same seed. One pair can't tell that from the precision: "
                "give --seeds 3 or more"
            )

    def _watched(self, model: Any, function: Any) -> Any:
        session, reader = self._session, _Reader(session=self._session)

        @functools.wraps(function)
        def train_function(*args: Any, **kwargs: Any) -> Any:
            if session.inside:  # a train_step that trains another model by its own fit
                return function(*args, **kwargs)
            self._first(model)
            session.inside = True
            try:
                with session.heeding():  # a model that is built by its first step is looked at in it
                    made = function(*args, **kwargs)
            finally:
                session.inside = False
            self._nudge(model)  # TensorFlow makes some models' weights in their first step
            reader.after(model, made)
            return made

        setattr(train_function, _MARK, True)
        return train_function


class _Reader:
    """What a model's variables hold right after a step, before JAX's trainer has put it where anyone finds it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._places: dict[int, tuple[int, int]] = {}
        self._seen = 0
        self._scale = math.nan

    def after(self, model: Any, made: Any) -> None:
        """Record the step that gave `made`: logs, and on JAX the new state with them."""
        logs, state = made if self._session.backend == "jax" else (made, None)
        losses = self._losses(model, logs, state)
        optimizer = getattr(model, "optimizer", None)
        scale, skipped = self._scale_of(model, optimizer, state)
        for loss in losses[:-1]:
            self._session.journal.loss(loss)
        try:
            self._session.stepped(
                model if optimizer is None else optimizer,
                loss=losses[-1] if losses else None,
                skipped=skipped,
                scale=scale,
            )
        except SystemExit:
            if (
                state is not None
            ):  # what the trainer holds has been given away to the step: it puts this back instead
                names = ("trainable", "non_trainable", "optimizer", "metrics")
                model._jax_state = {f"{name}_variables": part for name, part in zip(names, state)}
            raise

    def _losses(self, model: Any, logs: Any, state: Any) -> list[float]:
        tracker = getattr(model, "_loss_tracker", None)
        if isinstance(tracker, RecentLosses):
            seen, recent = self._read(model, [tracker.seen, tracker.recent], state)
            new = int(seen) - (self._seen if int(seen) > self._seen else 0)
            self._seen = int(seen)
            if new:
                if new > 1:
                    self._session.journal.note(
                        "several batches run in one call (steps_per_execution): they count as one step, and its time "
                        "is theirs"
                    )
                places = range(self._seen - min(new, tracker.size), self._seen)
                return [float(recent[place % tracker.size]) for place in places]
        loss = logs.get("loss") if isinstance(logs, dict) else None
        if loss is None:
            self._session.journal.note(
                "train_step neither tells Keras's loss tracker of its loss nor returns one called 'loss'"
            )
            return []
        self._session.journal.note(
            "a loss is what train_step returns as 'loss', which may be a mean over the epoch so far"
        )
        return [float(np.mean(keras.ops.convert_to_numpy(loss)))]

    def _scale_of(self, model: Any, optimizer: Any, state: Any) -> tuple[float, bool]:
        """The loss scale that the step used, and whether it was skipped."""
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return 1.0, False
        if isinstance(optimizer, LossScaleOptimizer):  # its `scale` would take the reader for the script
            wanted, first = [optimizer._scale, optimizer.last_step_skipped], start(optimizer._machine).scale
        else:
            wanted, first = [optimizer.dynamic_scale], optimizer.initial_scale
        found = [float(one) for one in self._read(model, wanted, state)]
        used, self._scale = float(first) if math.isnan(self._scale) else self._scale, found[0]
        return used, bool(found[1]) if len(found) > 1 else found[0] < used

    def _read(self, model: Any, variables: list[Any], state: Any) -> list[Any]:
        if state is None:
            return [keras.ops.convert_to_numpy(one) for one in variables]
        return [np.asarray(self._held(model, one, state)) for one in variables]

    def _held(self, model: Any, variable: Any, state: Any) -> Any:
        if id(variable) not in self._places:
            groups = ((2, model.optimizer.variables if model.optimizer else ()), (3, model.metrics_variables))
            for group, known in groups:
                for place, one in enumerate(known):
                    self._places[id(one)] = group, place
        if id(variable) not in self._places:
            return variable.value
        group, place = self._places[id(variable)]
        return state[group][place]
