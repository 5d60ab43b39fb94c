"""What each training step of `fit` and `train_on_batch` did: its loss, its loss scale, whether it was skipped."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer
from mezzo.runner.journal import Journal

_MODULO = 2**20  # FP32 is exact up to 2^24


class RecentLosses(keras.metrics.Mean):
    """`keras.metrics.Mean` that also keeps the last `size` values: one infinite loss makes the mean infinite."""

    def __init__(self, size: int, name: str = "loss", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.size = size
        # Value number i since `reset_state` is at ``i % size``.
        self.recent = self.add_variable((size,), "zeros", dtype="float32", name="recent")
        self.seen = self.add_variable((), "zeros", dtype="int32", name="seen")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add a value; a tensor of several counts as their mean."""
        super().update_state(values, sample_weight=sample_weight)
        value = keras.ops.mean(keras.ops.cast(values, "float32"))
        place = keras.ops.equal(keras.ops.arange(self.size, dtype="int32"), self.seen.value % self.size)
        self.recent.assign(keras.ops.where(place, value, self.recent.value))
        self.seen.assign(self.seen.value + 1)

    def reset_state(self) -> None:
        """Forget all values."""
        super().reset_state()
        self.seen.assign(0)

    def save_own_variables(self, store: Any) -> None:
        """Save a plain mean, so that a model saved in a monitored training loads in any other."""
        store["0"], store["1"] = self.total, self.count

    def load_own_variables(self, store: Any) -> None:
        """Load a plain mean."""
        self.total.assign(store["0"])
        self.count.assign(store["1"])


def keep_losses(model: Any) -> bool:
    """Replace a compiled model's loss tracker by `RecentLosses`; whether a traced step must be made anew."""
    old, size = model._loss_tracker, model.steps_per_execution
    if isinstance(old, RecentLosses):
        if old.size >= size:
            return False
    elif type(old) is not keras.metrics.Mean or getattr(model, "_distribute_strategy", None) is not None:
        return False  # a strategy wants variables made in its scope
    if not any(one is old for one in model.metrics):  # of the model's own
        return False
    # Past Keras's tracking of attributes, as Keras itself sets it.
    object.__setattr__(model, "_loss_tracker", RecentLosses(size, name=old.name, dtype=old.dtype))
    return True


@dataclass(frozen=True)
class Update:
    """What one step did with one optimizer of the model."""

    of: StepOptimizer
    scale: float
    skipped: bool
    bad: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why it was skipped; empty where it was not."""
        if not self.skipped:
            return ""
        more = f" and {len(self.bad) - 1} more" if len(self.bad) > 1 else ""
        return f"gradients{f' of {self.bad[-1]}{more}' if self.bad else ''} not finite"


class StepOptimizer:
    """One optimizer of a model, whose state is a row: iterations; a dynamic scale, its counter; `bad_gradients`."""

    def __init__(self, optimizer: Any, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self.is_mezzos = isinstance(optimizer, LossScaleOptimizer)
        self.has_dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.iterations = getattr(_innermost(optimizer), "_iterations", None)
        self.first_scale = float(getattr(optimizer, "loss_scale_factor", None) or 1.0)
        if self.has_dynamic:
            first = optimizer._loss_scale.arrays().scale if self.is_mezzos else optimizer.initial_scale
            self.first_scale = float(first)

    @property
    def scales(self) -> bool:
        """Whether it has a loss scale."""
        return self.has_dynamic or self.first_scale != 1.0

    def variables(self) -> list[Any]:
        """The variables of a row; `_scale`, because reading `scale` counts as scaling the loss."""
        one = self.optimizer
        if self.iterations is None:
            return []
        if self.is_mezzos:
            marks = [] if one.bad_gradients is None else [one.bad_gradients]
            return [self.iterations, one._scale, one.skipped_steps, *marks]
        own = [one.dynamic_scale, one.step_counter] if self.has_dynamic and one.built else []
        return [self.iterations, *own]

    def scale(self, row: Sequence[float]) -> float:
        """The loss scale in a row."""
        return row[1] if len(row) > 1 else self.first_scale

    def updates(self, before: Sequence[float], after: Sequence[float], steps: int) -> list[Update]:
        """Its updates in so many steps between two rows; a skipped step is not an iteration."""
        # A skipped step changes nothing of Keras's optimizer once its scale is 0 or infinite.
        lost = not self.is_mezzos and (self.scale(after) == 0 or math.isinf(self.scale(after)))
        if not lost and self.iterations is not None and list(before[:3]) == list(after[:3]):
            return []
        kept = steps
        if self.has_dynamic and before:
            kept = min(steps, int(after[0] - before[0]) % _MODULO)
        variables = getattr(self.optimizer, "_trainable_variables", ())
        bad = tuple(one.path for one, is_bad in zip(variables, after[3:]) if is_bad)
        scale = self.scale(before)
        return [Update(self, scale, False)] * kept + [Update(self, scale, True, bad)] * (steps - kept)


class StepRecorder:
    """Wraps a model's train function, and calls `write` for each step, some calls late.

    The journal gets notes about how the steps could be read.
    """

    def __init__(self, model: Any, journal: Journal, every: int) -> None:
        self.model, self.journal, self.every = model, journal, every
        self.optimizers = _optimizers_of(model)
        self.each: int = model.steps_per_execution
        self.ended = False
        self._tracker = model._loss_tracker if isinstance(model._loss_tracker, RecentLosses) else None
        self._places: dict[int, tuple[int, int] | None] = {}
        self._rows: list[list[float]] | None = None  # after the last step that was read
        self._waiting: list[tuple[float, list[int], Any]] = []
        self._seen = 0
        self._inner = model.train_function
        model.train_function = self._train

    def write(self, at: float, loss: float | None, updates: list[Update]) -> None:
        """Record a step; `at` is when its execution ended (`time.perf_counter`)."""
        raise NotImplementedError

    def after(self, logs: Any, state: Any) -> None:
        """A call is over: copy the state (on JAX what the trainer holds), and read it if enough calls wait."""
        loss = logs.get("loss") if isinstance(logs, dict) else None
        tracked = [] if self._tracker is None else [self._tracker.seen, self._tracker.recent]
        groups = [self._values(held, state) for held in (tracked, *(o.variables() for o in self.optimizers))]
        sizes = [0 if loss is None else 1, *(sum(math.prod(v.shape) for v in values) for values in groups)]
        vector = _packed()(loss, [value for values in groups for value in values]) if any(sizes) else None
        self._waiting.append((time.perf_counter(), sizes, vector))
        if len(self._waiting) * self.each >= self.every:
            self.read(state)

    def read(self, state: Any = None) -> None:
        """Write the steps since the last reading, which waits for the device."""
        waiting, self._waiting = self._waiting, []
        for at, sizes, vector in waiting:
            # Without an op: a finalizer may call this while TensorFlow traces a function, where an op would deadlock.
            numbers = iter([] if vector is None else _numbers(vector))
            logged, tracked, *rows = (list(itertools.islice(numbers, size)) for size in sizes)
            self._record(at, logged, tracked, rows)

    def epoch_begins(self) -> None:
        """Read the optimizers' state again before the next call: a callback may have changed it."""
        self.read()
        self._rows = None

    def restore(self) -> None:
        """Take the wrapper away."""
        self.ended = True
        if self.model.train_function == self._train:
            self.model.train_function = self._inner

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        if self.ended:
            return self._inner(*args, **kwargs)
        on_jax = keras.backend.backend() == "jax"
        if self._rows is None:
            rows = [self._values(one.variables(), args[0] if on_jax else None) for one in self.optimizers]
            self._rows = [[number for value in row for number in _numbers(value)] for row in rows]
        made = self._inner(*args, **kwargs)
        logs, state = made if on_jax else (made, None)
        try:
            self.after(logs, state)
        except BaseException:
            if state is not None:
                # The trainer's state has been donated to the step; it restores the model from this one.
                names = ("trainable", "non_trainable", "optimizer", "metrics")
                self.model._jax_state = {f"{name}_variables": part for name, part in zip(names, state)}
            raise
        return made

    def _record(self, at: float, logged: list[float], tracked: list[float], rows: list[list[float]]) -> None:
        pairs = list(zip(self.optimizers, self._rows or rows, rows))
        self._rows = rows
        losses: list[float | None] = [*self._losses(tracked)]
        if not losses:
            # The last call of an epoch may take fewer steps than the others: Mezzo's optimizers count them.
            own = [(before, after) for one, before, after in pairs if one.is_mezzos]
            taken = [int(after[0] - before[0] + after[2] - before[2]) % _MODULO for before, after in own]
            number = min(max([0, *taken]) or self.each, self.each)
            losses = [*[None] * (number - 1), logged[0] if logged else None]
            self.journal.note(
                "the losses are what the model's own training step reports, perhaps means over the epoch so far"
            )
        of_each = [one.updates(before, after, len(losses)) for one, before, after in pairs]
        if len(losses) > 1 and any(update.skipped for updates in of_each for update in updates):
            self.journal.note(
                "several steps run in one execution (steps_per_execution): it is not known which of them were skipped; "
                "the last ones are marked"
            )
        for place, loss in enumerate(losses):
            self.write(at, loss, [updates[place] for updates in of_each if updates])

    def _losses(self, tracked: list[float]) -> list[float]:
        """The tracker's values of this call; empty where the model's own step does not use it as Keras's does."""
        if not tracked:
            return []
        seen, *recent = tracked
        now = int(seen)
        first = self._seen if now > self._seen else 0
        self._seen = now
        if not 0 < now - first <= self.each:
            return []
        return [recent[place % len(recent)] for place in range(first, now)]

    def _values(self, variables: Sequence[Any], state: Any) -> list[Any]:
        """The variables' values: on JAX those in the trainer's state, if they are there."""
        if state is None:
            return [one.value for one in variables]
        if any(id(one) not in self._places for one in variables):
            optimizer = self.model.optimizer
            groups = ((2, optimizer.variables if optimizer else ()), (3, self.model.metrics_variables))
            self._places.update((id(v), (group, at)) for group, known in groups for at, v in enumerate(known))
        places = [self._places.setdefault(id(one), None) for one in variables]
        return [one.value if at is None else state[at[0]][at[1]] for one, at in zip(variables, places)]


def _numbers(tensor: Any) -> list[float]:
    numbers: list[float] = np.asarray(keras.ops.convert_to_numpy(tensor), np.float64).ravel().tolist()
    return numbers


@functools.cache
def _packed() -> Callable[[Any, list[Any]], Any]:
    """`_pack`, on JAX compiled: one operation rather than a dozen."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(_pack)
    if keras.backend.backend() == "torch":
        import torch

        return torch.no_grad()(_pack)
    return _pack


def _pack(loss: Any, values: list[Any]) -> Any:
    """A loss's mean and variables' values as one FP32 vector; counts modulo `_MODULO`."""
    ops = keras.ops
    flat = [] if loss is None else [ops.mean(ops.cast(ops.convert_to_tensor(loss), "float32"))]
    for value in values:
        is_count = "int" in keras.backend.standardize_dtype(value.dtype)
        flat.append(ops.cast(value % _MODULO if is_count else value, "float32"))
    return ops.concatenate([ops.reshape(one, (-1,)) for one in flat])


def _optimizers_of(model: Any) -> list[StepOptimizer]:
    """The optimizer of `compile`, and the others that are attributes of the model."""
    attributes = ((name, one) for name, one in vars(model).items() if not name.startswith("_self_"))
    held = {name: one for name, one in attributes if isinstance(one, keras.optimizers.Optimizer)}
    known = {id(_innermost(one)) for one in held.values() if one is not _innermost(one)}
    known |= {id(model.optimizer), id(_innermost(model.optimizer))}
    others = {id(one): StepOptimizer(one, name) for name, one in held.items() if id(one) not in known}
    return [StepOptimizer(model.optimizer, "optimizer"), *others.values()]


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer
