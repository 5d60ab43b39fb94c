"""What each training step of `fit` and `train_on_batch` did: its loss, its loss scale, whether it was skipped.

Both go through a model's `train_function`, which is wrapped. After each call a `StepReader` copies a few numbers on the
device into one FP32 vector; `read` fetches all waiting vectors at once, which waits for the device. On JAX the trainer
holds the state of the model between two calls, so variables are looked up in what the call returned.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from mezzo.core.loss_scale import start
from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer

SKIPS_WITHIN = (
    "several steps run in one execution (steps_per_execution): which of them was skipped is not known, the last "
    "are taken"
)
LOSSES_REPORTED = (
    "the losses are what the model's own training step reports of each batch as loss, if it does: if that is a mean "
    "over its epoch so far, so are they"
)

_MODULO = 2**20  # FP32 is exact up to 2^24


class RecentLosses(keras.metrics.Mean):
    """`keras.metrics.Mean`, and the last `size` values that it was given.

    Keras reports for a batch the mean of all losses of its epoch so far, in which one infinite loss hides all later
    ones. So the tracker writes each loss into one of a few places as well, in the training step, on the device.

    Args:
        size: how many are kept.
        name, dtype: as of the mean.

    Attributes:
        recent: FP32 variable of shape ``(size,)``: value number i (from 0) is at ``i % size``.
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
        """No value was seen, and the mean is of nothing."""
        super().reset_state()
        self.seen.assign(0)

    # What is saved is the mean's, so that a model saved in a watched training loads in any other.

    def save_own_variables(self, store: Any) -> None:
        """Write what `keras.metrics.Mean` writes."""
        store["0"], store["1"] = self.total, self.count

    def load_own_variables(self, store: Any) -> None:
        """Read what `keras.metrics.Mean` wrote."""
        self.total.assign(store["0"])
        self.count.assign(store["1"])


def steps_per_call(model: Any) -> int:
    """How many steps one call of a model's train function takes."""
    return max(1, int(getattr(model, "steps_per_execution", 1) or 1))


def keep_losses(model: Any) -> bool:
    """Let a compiled model's tracker keep the losses of one execution; whether a traced step must be made anew.

    The model keeps the tracker: taking it out would compile the step again. Models with `metrics` of their own, and
    those under a `tf.distribute` strategy (which wants variables made in its scope), keep Keras's.
    """
    old: Any = getattr(model, "_loss_tracker", None)
    size = steps_per_call(model)
    if isinstance(old, RecentLosses):
        if old.size >= size:
            return False
    elif type(old) is not keras.metrics.Mean or getattr(model, "_distribute_strategy", None) is not None:
        return False
    if not any(one is old for one in model.metrics):
        return False
    # Past Keras's tracking of attributes, as Keras itself sets it.
    object.__setattr__(model, "_loss_tracker", RecentLosses(size, name=old.name, dtype=old.dtype))
    return True


def around(function: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> Any:
    """A model's train function, with what is done before each call (given its arguments) and after (its result)."""

    @functools.wraps(function)
    def train_function(*args: Any, **kwargs: Any) -> Any:
        before(args)
        made = function(*args, **kwargs)
        after(made)
        return made

    return train_function


@dataclass(frozen=True)
class Update:
    """What one step did with one optimizer.

    Args:
        optimizer: which.
        name: of the model's attribute that holds it.
        scale: the loss scale that the step used.
        skipped: whether it was skipped.
        bad: paths of the variables whose gradients were not finite, in the model's order, if that is known.
    """

    optimizer: Any
    name: str
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


@dataclass(frozen=True)
class Step:
    """One training step: when its execution ended (`time.perf_counter`), its loss, the optimizers that stepped."""

    at: float
    loss: float | None
    updates: tuple[Update, ...]


class StepOptimizer:
    """One optimizer of a model: with Mezzo's loss scale, Keras's, a constant `loss_scale_factor`, or none.

    What it holds between two calls is a row of numbers: its iterations, and where the loss scale moves the scale, a
    counter that every step changes (Mezzo's skipped steps, or Keras's good ones), and Mezzo's marks of bad gradients.
    """

    def __init__(self, optimizer: Any, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self.is_mezzos = isinstance(optimizer, LossScaleOptimizer)
        self.has_dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.iterations = getattr(_innermost(optimizer), "_iterations", None)
        self.first_scale = float(getattr(optimizer, "loss_scale_factor", None) or 1.0)
        if self.has_dynamic:
            first = start(optimizer._machine).scale if self.is_mezzos else optimizer.initial_scale
            self.first_scale = float(first)

    @property
    def scales(self) -> bool:
        """Whether it has a loss scale."""
        return self.has_dynamic or self.first_scale != 1.0

    def variables(self) -> list[Any]:
        """What is copied after each call; `_scale` because reading `scale` says that the loss is multiplied by it."""
        one = self.optimizer
        if self.iterations is None:
            return []
        if self.is_mezzos:
            marks = [] if one.bad_gradients is None else [one.bad_gradients]
            return [self.iterations, one._scale, one.skipped_steps, *marks]
        own = [one.dynamic_scale, one.step_counter] if self.has_dynamic and one.built else []
        return [self.iterations, *own]

    def scale(self, row: Sequence[float]) -> float:
        """The loss scale in such a row."""
        return row[1] if len(row) > 1 else self.first_scale

    def stepped(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Whether it took or skipped a step between two rows."""
        lost = not self.is_mezzos and (self.scale(after) == 0 or math.isinf(self.scale(after)))
        # A skipped step changes nothing of Keras's optimizer once its scale is lost.
        return lost or self.iterations is None or list(before[:3]) != list(after[:3])

    def skipped(self, before: Sequence[float], after: Sequence[float], steps: int) -> int:
        """How many of so many steps were skipped: a skipped step is not an iteration."""
        if not self.has_dynamic or not before:
            return 0
        return max(0, steps - int(after[0] - before[0]) % _MODULO)

    def bad(self, after: Sequence[float]) -> tuple[str, ...]:
        """The paths of the variables that are marked."""
        variables = getattr(self.optimizer, "_trainable_variables", ())
        return tuple(one.path for one, is_bad in zip(variables, after[3:]) if is_bad)


class StepReader:
    """Copies what each call of a model's train function left, and reads it later.

    Args:
        model: compiled.

    Attributes:
        notes: what the reader of its steps should know.
        optimizers: the one of `compile` first, then others that attributes of the model hold.
    """

    def __init__(self, model: Any) -> None:
        self.notes: list[str] = []
        self.optimizers = _optimizers_of(model)
        self._model = model
        self._each = steps_per_call(model)
        tracker = getattr(model, "_loss_tracker", None)
        self._tracker = tracker if isinstance(tracker, RecentLosses) else None
        self._places: dict[int, tuple[int, int] | None] = {}
        self._before: list[list[float]] | None = None
        self._waiting: list[tuple[float, list[int], Any]] = []
        self._seen = 0

    @property
    def waiting(self) -> int:
        """Steps that were made and are not read."""
        return len(self._waiting) * self._each

    def begin(self, args: Sequence[Any]) -> None:
        """Before a call: what the optimizers hold, if that is not known from the call before."""
        if self._before is None:
            state = args[0] if keras.backend.backend() == "jax" else None
            rows = [self._values(one.variables(), state) for one in self.optimizers]
            self._before = [[number for value in row for number in _numbers(value)] for row in rows]

    def forget(self) -> None:
        """What was done between two calls (a callback that reset the loss scale) is not a step's doing. Reads first."""
        assert not self._waiting
        self._before = None

    def end(self, made: Any) -> None:
        """After a call: copy what it left."""
        logs, state = made if keras.backend.backend() == "jax" else (made, None)
        loss = logs.get("loss") if isinstance(logs, dict) else None
        tracked = [] if self._tracker is None else [self._tracker.seen, self._tracker.recent]
        groups = [self._values(held, state) for held in (tracked, *(o.variables() for o in self.optimizers))]
        sizes = [0 if loss is None else 1, *(sum(math.prod(v.shape) for v in values) for values in groups)]
        vector = _packed()(loss, [value for values in groups for value in values]) if any(sizes) else None
        self._waiting.append((time.perf_counter(), sizes, vector))

    def read(self) -> list[Step]:
        """The steps since the last reading; waits for the device."""
        waiting, self._waiting = self._waiting, []
        vectors = [vector for _, _, vector in waiting if vector is not None]
        numbers = iter(_numbers(keras.ops.concatenate(vectors)) if vectors else ())
        steps = []
        for at, sizes, _ in waiting:
            logged, tracked, *rows = ([next(numbers) for _ in range(size)] for size in sizes)
            steps += self._steps(at, logged, tracked, rows)
        return steps

    def scales(self) -> list[float]:
        """The next loss scale of each optimizer, as of the last reading."""
        rows = self._before or [[] for _ in self.optimizers]
        return [one.scale(row) for one, row in zip(self.optimizers, rows)]

    def _steps(
        self, at: float, logged: list[float], tracked: list[float], rows: list[list[float]]
    ) -> list[Step]:
        pairs = list(zip(self.optimizers, self._before or rows, rows))
        self._before = rows
        losses: list[float | None] = [*self._losses(tracked)]
        if not losses:
            own = [(before, after) for one, before, after in pairs if one.is_mezzos]
            made = [int(after[0] - before[0] + after[2] - before[2]) % _MODULO for before, after in own]
            number = min(
                max([0, *made]) or self._each, self._each
            )  # the last call of an epoch may make fewer
            losses = [*[None] * (number - 1), logged[0] if logged else None]
            self._note(LOSSES_REPORTED)
        updates: list[list[Update]] = [[] for _ in losses]
        for one, before, after in pairs:
            if not one.stepped(before, after):
                continue
            gone = one.skipped(before, after, len(losses))
            if gone and len(losses) > 1:
                self._note(SKIPS_WITHIN)
            for place, mine in enumerate(updates):
                skipped = place >= len(losses) - gone
                bad = one.bad(after) if skipped else ()
                mine.append(Update(one.optimizer, one.name, one.scale(before), skipped, bad))
        return [Step(at, loss, tuple(mine)) for loss, mine in zip(losses, updates)]

    def _losses(self, tracked: list[float]) -> list[float]:
        """Those that the tracker was given in this call; empty where a step leaves it out, or gives it others."""
        if not tracked:
            return []
        seen, *recent = tracked
        now = int(seen)
        first = self._seen if now > self._seen else 0
        self._seen = now
        if not 0 < now - first <= self._each:
            return []
        return [recent[place % len(recent)] for place in range(first, now)]

    def _values(self, variables: Sequence[Any], state: Any) -> list[Any]:
        """What variables hold now: on JAX in the state, if it is there."""
        if state is None:
            found = [one.value for one in variables]
            return [one.detach() for one in found] if keras.backend.backend() == "torch" else found
        if any(id(one) not in self._places for one in variables):
            optimizer = self._model.optimizer
            groups = ((2, optimizer.variables if optimizer else ()), (3, self._model.metrics_variables))
            self._places.update((id(v), (group, at)) for group, known in groups for at, v in enumerate(known))
        places = [self._places.setdefault(id(one), None) for one in variables]
        return [one.value if at is None else state[at[0]][at[1]] for one, at in zip(variables, places)]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _numbers(tensor: Any) -> list[float]:
    numbers: list[float] = np.asarray(keras.ops.convert_to_numpy(tensor), np.float64).ravel().tolist()
    return numbers


@functools.cache
def _packed() -> Callable[[Any, list[Any]], Any]:
    """`_pack`, on JAX compiled: one operation rather than a dozen."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(_pack)
    if backend == "torch":
        import torch

        return torch.no_grad()(_pack)
    return _pack


def _pack(loss: Any, values: list[Any]) -> Any:
    """A loss's mean and what variables hold as one FP32 vector; of a count its last bits."""
    ops = keras.ops
    flat = [] if loss is None else [ops.mean(ops.cast(ops.convert_to_tensor(loss), "float32"))]
    for value in values:
        is_count = "int" in keras.backend.standardize_dtype(value.dtype)
        flat.append(ops.cast(value % _MODULO if is_count else value, "float32"))
    return ops.concatenate([ops.reshape(one, (-1,)) for one in flat])


def _optimizers_of(model: Any) -> list[StepOptimizer]:
    """The optimizer of `compile`, and each other that an attribute holds, by itself or in a list, tuple or dict."""
    others: list[tuple[str, Any]] = []
    for key, held in vars(model).items():
        if key.startswith("_self_"):  # TensorFlow's own books
            continue
        if isinstance(held, (list, tuple)):
            others += [(f"{key}_{at}", one) for at, one in enumerate(held)]
        elif isinstance(held, dict):
            others += [(f"{key}_{name}", one) for name, one in held.items()]
        else:
            others.append((key, held))
    others = [(name, one) for name, one in others if isinstance(one, keras.optimizers.Optimizer)]
    known = {id(model.optimizer), id(_innermost(model.optimizer))}
    known |= {id(one.inner_optimizer) for _, one in others if hasattr(one, "inner_optimizer")}
    found = [StepOptimizer(model.optimizer, "optimizer")]
    for name, one in others:
        if id(one) not in known:
            known.add(id(one))
            found.append(StepOptimizer(one, name))
    return found


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer
