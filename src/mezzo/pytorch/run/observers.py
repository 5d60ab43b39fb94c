"""The observers of a run's training steps, called at the moments at which `MixedPrecision` calls them.

Not observed: calls inside a compiled function, the step whose memory and formats are measured, threads other than the
first, a script without optimizer. Of a step with a closure, only overflows are.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mezzo.pytorch.kernels.not_traced import not_traced
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


def tracer_for(session: Session) -> OverflowTracer:
    """Investigates skipped steps. The host knows of each at once, so this adds no wait."""
    from mezzo.pytorch.autocast.context import context_of
    from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer

    return OverflowTracer(
        enter=lambda: context_of(session.policy_now, session.device_type),
        clock=session.journal.now,
        waits=True,
        written=session.command,
        group_of=lambda optimizer: session.ranks.group(parameters(optimizer)),
    )


def observed_step(session: Session) -> Callable[[bool], None]:
    """Begin to measure a step's peak memory and the formats of its ops; returns a function that ends it."""
    from mezzo.pytorch.memory import PeakTensorBytes
    from mezzo.pytorch.monitor.formats import OpObserver

    device = session.device_type or "cpu"
    session.observers.pause()  # what they compute is not part of the step
    formats, memory = OpObserver(session.applied, device), PeakTensorBytes(device)
    recording = ExitStack()
    recording.enter_context(formats)
    memory.start()

    def stop(keep: bool) -> None:
        peak = memory.stop()
        recording.close()
        session.observers.resume()
        if keep:
            if formats.note:
                session.journal.note(formats.note)
            session.journal.observed(peak, formats.table())

    return stop


class _Inside(threading.local):
    """Whether this thread is inside an observer's method."""

    busy = False


class Observers:
    """The observers of a run, made at its first call, when the device is known; while `busy`, they run the model."""

    def __init__(self, session: Session) -> None:
        request = session.request
        self._session = session
        self._traces = request.trace
        self._wanted = bool(request.watch) or request.sensitivity
        self._watchers: list[StepObserver] = []
        self._tracer: OverflowTracer | None = None
        self._thread = 0
        self._pauses = 0
        self._closures = 0
        self._calls = 0
        self._watch: ExitStack | None = None
        self._watched: Counter[int] = Counter()  # id of a module -> its calls since the last backward
        self._trains = False  # whether one of these calls is trained
        self._frames = _compiled_frames()
        self._inside = _Inside()

    @property
    def busy(self) -> bool:
        """Whether an observer runs in this thread; calls in other threads are the script's."""
        return self._inside.busy

    @property
    def listening(self) -> bool:
        """Whether there is an observer of what happens now, in this thread."""
        session = self._session
        if not (self._wanted or (session.scaling and self._traces)):
            return False
        if self._pauses or session.left_alone is not None:
            return False
        return self._thread in (0, threading.get_ident())

    def _sees(self, model: nn.Module) -> bool:
        if not (self.listening and model.training and torch.is_grad_enabled() and self._session.optimizers):
            return False
        return _graph_task() == -1  # else a checkpoint's recomputation

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
        if not self._sees(model):
            return False
        if not self._thread:
            self._thread = threading.get_ident()
            self._watchers = watchers_for(self._session)
        if self._traces and self._tracer is None and self._session.scaling:
            self._tracer = tracer_for(self._session)
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
    def backward_begins(self, losses: Sequence[Any], scale: float) -> None:
        """Backward is about to run from these. Called only while `listening`."""
        for loss in losses:
            if isinstance(loss, Tensor):
                self.tell("backward_begins", loss, scale)

    @not_traced
    def backward_again(self) -> None:
        """The backward that has just run overflowed and is run again at a smaller scale, with the same hooks."""
        if self.listening:
            for one in list(self._watchers):  # which would count its gradients twice
                self._tell_one(one, "step_dropped")

    @not_traced
    def closure_begins(self) -> None:
        """A step with a closure begins: only the tracer observes it, one evaluation at a time."""
        if self._wanted and self.listening:
            self._session.journal.note("optimizer steps with a closure (LBFGS) are not watched")
        self.tell("step_dropped")
        self._closures += 1

    @not_traced
    def closure_ended(self) -> None:
        """It has ended."""
        self.tell("step_dropped")
        self._closures -= 1

    @not_traced
    def pause(self) -> None:
        """Observe nothing until `resume`; what was begun is dropped."""
        if not self._pauses:
            self.tell("step_dropped")
        self._pauses += 1

    def resume(self) -> None:
        """End one `pause`."""
        self._pauses -= 1

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
