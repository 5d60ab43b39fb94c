"""The observers of a run's training steps, called at the moments at which `MixedPrecision` calls them.

Not observed: calls inside a compiled function, the step whose memory and formats are measured, threads other than the
first, a script without optimizer. Of a step with a closure, only overflows are.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.pytorch.run.weights import holders
from mezzo.pytorch.step import parameters

if TYPE_CHECKING:
    from mezzo.core.records import Record
    from mezzo.pytorch.monitor.observer import StepObserver
    from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer
    from mezzo.pytorch.run.session import Session

CALLS = 4  # of one model between two backward passes are watched live at most: the watch holds their graphs

_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass


def watchers_for(session: Session) -> list[StepObserver]:
    """The observers that the request asks for, except the tracer, in the order in which they are called."""
    request = session.request
    found: list[StepObserver] = []
    if request.watch:
        from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY, RangeWatch

        every, wide = DEFAULT_EVERY if request.watch < 0 else request.watch, request.watch_all
        clock, note = session.journal.now, session.journal.note
        found.append(RangeWatch(None, None, every=every, clock=clock, note=note, all_modules=wide))
    if request.sensitivity:
        from mezzo.core.calibration import RANKED
        from mezzo.pytorch.sensitivity import STEPS, Sensitivities

        every = (request.stop_after or STEPS) // STEPS
        found.append(Sensitivities(request.ranked or RANKED, every=every))
    return found


def tracer_for(session: Session, model: nn.Module) -> OverflowTracer:
    """Investigates skipped steps. The host knows of each at once, so this adds no wait."""
    from mezzo.pytorch.autocast.context import context_of
    from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer

    return OverflowTracer(
        enter=lambda: context_of(session.policy_now, session.device_type),
        clock=session.journal.now,
        waits=True,
        model=next(iter(holders(model)), None),
        written=session.command,
        group_of=lambda optimizer: session.ranks.group(parameters(optimizer)),
        alone=lambda: len(session.optimizers) == 1,
        scaling=lambda: session.scale,
    )


def observed_step(session: Session) -> Callable[[bool], None]:
    """Begin to measure a step's peak memory and the formats of its ops; returns a function that ends it."""
    from mezzo.pytorch.memory import PeakTensorBytes
    from mezzo.pytorch.monitor.formats import OpObserver

    device = session.device_type or "cpu"
    formats, memory = OpObserver(session.applied, device), PeakTensorBytes(device)
    recording = ExitStack()
    recording.enter_context(session.observers.paused())  # what they compute is not part of the step
    recording.enter_context(formats)
    memory.start()

    def stop(keep: bool) -> None:
        peak = memory.stop()
        recording.close()
        if keep:
            if formats.note:
                session.journal.note(formats.note)
            session.journal.observed(peak, formats.table())

    return stop


class Observers:
    """The observers of a run, made at its first call, when the device is known; while `busy`, they run the model."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._traces = session.request.trace
        self._watchers: list[StepObserver] = []
        self._tracer: OverflowTracer | None = None
        self._thread = 0
        self._paused = False
        self._closures = 0
        self._calls = 0
        self._watch: ExitStack | None = None
        self._watched: Counter[int] = Counter()  # id of a module -> its calls since the last backward
        self._trains = False  # whether one of these calls is trained
        self._frames = _compiled_frames()
        self._inside = threading.local()

    @property
    def busy(self) -> bool:
        """Whether an observer runs in this thread; calls in other threads are the script's."""
        return bool(getattr(self._inside, "busy", False))

    @property
    def listening(self) -> bool:
        """Whether there is an observer of what happens now, in this thread."""
        session = self._session
        if not session.observes or self._paused or session.left_alone is not None:
            return False
        return self._thread in (0, threading.get_ident())

    def watch_begins(self, model: nn.Module) -> None:
        """An outermost call is about to begin, before its autocast: what follows may be watched live."""
        tracer = self._tracer
        if tracer is None or (self._watch is None and not tracer.watches_live):
            return
        if self.busy or not self.listening or _graph_task() != -1 or not self._session.optimizers:
            return
        if not self._trains and model.training and torch.is_grad_enabled():
            self._trains = True
            self._watched.clear()  # evaluation is over
        self._watched[id(model)] += 1
        if self._session.compiled or _compiled_frames() != self._frames:
            self._watch_ends()
            self._session.journal.note(
                "the script has compiled functions, so operations outside of model calls are not traced for overflows"
            )
        elif max(self._watched.values()) > (CALLS if self._trains else 1):
            self._watch_ends()
            tracer.forget_live()
        elif self._watch is None and tracer.watches_live:
            self._watch = ExitStack()
            self._watch.enter_context(tracer.live())

    def _watch_ends(self, *, anywhere: bool = False) -> None:
        """Stop watching live, if it was begun in this thread or `anywhere`."""
        watch = self._watch
        if watch is not None and (anywhere or self._thread == threading.get_ident()):
            self._watch = None
            watch.close()

    @not_traced
    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """An outermost call begins; whether `call_ended` must be called at its end."""
        if not (self.listening and model.training and torch.is_grad_enabled() and self._session.optimizers):
            return False
        if _graph_task() != -1:  # a checkpoint's recomputation
            return False
        if not self._thread:
            self._thread = threading.get_ident()
            self._watchers = watchers_for(self._session)
        if self._traces and self._tracer is None and self._session.scaling:
            self._tracer = tracer_for(self._session, model)
        self._calls += 1
        self._tell("call_begins", model, args, kwargs)
        return True

    @not_traced
    def tell(self, what: str, *args: Any, **kwargs: Any) -> None:
        """Call this method of `StepObserver`. Except for `call_ended`, the forward pass is over (or dropped)."""
        if what != "call_ended":
            self._watch_ends()
            self._watched.clear()
            self._trains = False
        self._tell(what, *args, **kwargs)

    @not_traced
    def backward_again(self) -> None:
        """The backward that has just run overflowed and is run again at a smaller scale, with the same hooks."""
        if self.listening:
            for one in list(self._watchers):  # which would count its gradients twice
                self._tell_one(one, "step_dropped")

    @contextmanager
    def closure(self) -> Iterator[None]:
        """A step with a closure runs: only the tracer observes it, one evaluation at a time."""
        session = self._session
        if (session.request.watch or session.request.sensitivity) and self.listening:
            session.journal.note("optimizer steps with a closure (LBFGS) are not watched")
        self.tell("step_dropped")
        self._closures += 1
        try:
            yield
        finally:
            self.tell("step_dropped")
            self._closures -= 1
            session.ranks.of_closure = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing; what was begun is dropped."""
        self.tell("step_dropped")
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def finish(self) -> list[Record]:
        """The script is over: the last records."""
        session = self._session
        self._watch_ends(anywhere=True)
        if session.compiled and not self._calls and self.listening:
            session.journal.note(
                "the model is called inside a compiled function, so it was not watched and no skipped step was traced"
            )
        records = self.drained()
        self._tell("step_dropped")
        for one in self._all():
            if hasattr(one, "finish"):
                self._tell_one(one, "finish")
            for note in getattr(one, "notes", ()):
                session.journal.note(note)
        return records

    @not_traced
    def drained(self) -> list[Record]:
        """The observers' records since the last call."""
        return [record for one in self._all() for record in self._tell_one(one, "drain")]

    def _all(self) -> list[StepObserver]:
        tracer = self._tracer if self._session.scaling else None  # `auto` may have decided for FP32 since
        return [*(() if self._closures else self._watchers), *(() if tracer is None else (tracer,))]

    def _tell(self, what: str, *args: Any, **kwargs: Any) -> None:
        if not self.busy:
            for one in self._all():
                self._tell_one(one, what, *args, **kwargs)

    def _tell_one(self, one: StepObserver, what: str, *args: Any, **kwargs: Any) -> Any:
        """Call an observer. One that raises is removed, and the script goes on."""
        self._inside.busy = True
        try:
            return getattr(one, what)(*args, **kwargs)
        except Exception as error:
            self._session.journal.note(
                f"{type(one).__name__} stopped after an error: {type(error).__name__}: {error}"
            )
            self._watchers = [other for other in self._watchers if other is not one]
            if one is self._tracer:
                self._watch_ends()
                self._tracer, self._traces = None, False
            with suppress(Exception):
                one.step_dropped()
            return []
        finally:
            self._inside.busy = False


def _compiled_frames() -> int:
    """How many frames Dynamo has met in this process."""
    return int(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0))
