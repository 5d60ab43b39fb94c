"""OverflowTracer: when a step is skipped, finds the operation that made the first value that is not finite.

The step's model calls are kept until its end, with the gradients at their outputs, and run again if the step was
skipped: the parameters are then as they were. What is outside of the calls is watched as it happens. A backward that
is finite with the scale taken out of it is the scale's doing.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.overflow import OUTSIDE, OverflowReport
from mezzo.core.records import OverflowRecord, Record
from mezzo.pytorch.distributed import is_distributed
from mezzo.pytorch.monitor.backward_trace import BackwardTrace, Found
from mezzo.pytorch.monitor.forward_trace import ForwardTrace
from mezzo.pytorch.monitor.investigation import investigate, remedies_for, told
from mezzo.pytorch.monitor.loss_graph import KnownLines, found_in_loss, seen_forward, watch_loss
from mezzo.pytorch.monitor.module_paths import unwrapped
from mezzo.pytorch.monitor.observer import StepObserver
from mezzo.pytorch.monitor.operations import finite, users_line
from mezzo.pytorch.monitor.replay import (
    Backward,
    SavedCall,
    SideEffects,
    eager,
    running_again,
    within_compiled,
)

_FEW = 8  # kept calls that are looked at before each call
WATCHED = 50
"""Regions that are watched live at most, for one overflow that was not explained."""

_Method = TypeVar("_Method", bound=Callable[..., Any])
_ALL: weakref.WeakSet[OverflowTracer] = weakref.WeakSet()


def _never_raises(method: _Method) -> _Method:
    """An error in watching goes into the finding's note; the step goes on."""

    @functools.wraps(method)
    def guarded(self: OverflowTracer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._trouble.append(f"watching failed: {told(error)}")
            return None

    return cast("_Method", guarded)


def _all_calls() -> list[SavedCall]:
    return [call for tracer in _ALL for call in tracer.calls]


def _sources(calls: Sequence[SavedCall]) -> list[SavedCall]:
    """Calls that no gradient came to, whose results, not finite, these ones were given: a generator's, detached."""
    looked, kept = list(calls), _all_calls()
    for call in looked:  # those that are found are looked at as well
        for other in kept:
            if other.number < call.number and not any(other is one for one in looked) and other.spoilt(call):
                looked.append(other)
    return looked[len(calls) :]


class OverflowTracer(StepObserver):
    """A `StepObserver` that looks into skipped steps.

    Several know of each other: the loss of one model may come through another's call.

    Args:
        enter: makes the region in which a kept call is run again.
        clock: seconds since the run's start, for records.
        waits: look also where the host must wait for the device to learn of a skip.
        model: whose modules' paths are reported, where parts of it are called and never the whole.
        limit: how many findings that alarm are made; later skips are not looked into, and nothing is kept for them.
    """

    _numbers = 0  # of calls, over all tracers

    def __init__(
        self,
        *,
        enter: Callable[[], AbstractContextManager[Any]],
        clock: Callable[[], float] = time.monotonic,
        waits: bool = False,
        limit: int = 20,
        model: nn.Module | None = None,
    ) -> None:
        self._enter, self._model = enter, model
        self._clock, self._waits, self._left = clock, waits, limit
        self.calls: list[SavedCall] = []
        self._pruned = 0  # how many of them there were when it was last seen which may still matter
        self._effects: weakref.WeakKeyDictionary[nn.Module, SideEffects] = weakref.WeakKeyDictionary()
        self._open: SavedCall | None = None
        self._scales: dict[int, Tensor | float] = {}  # number of a backward of this step -> its scale
        self._outside: dict[int, BackwardTrace] = {}
        self._in_loss: Found | None = None
        self._live: ForwardTrace | None = None
        self._watching = False
        self._to_watch = 0
        self._trouble: list[str] = []
        self._group: Any = None
        self._finding: OverflowReport | None = None
        self._last: OverflowReport | None = None
        self._records: list[Record] = []
        self._known = KnownLines()
        _ALL.add(self)

    @property
    def finding(self) -> OverflowReport | None:
        """Of the update that ended last; None where it was not skipped."""
        return self._finding

    def drain(self) -> list[Record]:
        """The records since the last call."""
        records, self._records = self._records, []
        return records

    # ------------------------------------------------------------------------------------------ told

    @_never_raises
    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the call is given."""
        self._open = None
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._group = model.process_group
        if running_again() or self._left <= 0:
            return
        # Many calls in one graph: looked at once each time that their number has doubled, not all of them at each call.
        if len(self.calls) <= _FEW or len(self.calls) >= 2 * self._pruned:
            self._prune()
        inner = unwrapped(model)
        effects = self._effects.get(inner)
        if effects is None:
            effects = self._effects[inner] = SideEffects(inner)
        OverflowTracer._numbers += 1
        self._open = SavedCall(
            model,
            args,
            kwargs,
            effects=effects,
            enter=self._enter,
            line=users_line(),
            number=OverflowTracer._numbers,
        )

    @_never_raises
    def call_ended(self, model: nn.Module, output: Any) -> None:
        """Watch for the gradients of what was returned."""
        call, self._open = self._open, None
        if call is None or call.model is not model:
            return
        effects = self._effects[call.inner]
        effects.learn(call.state)
        effects.writes_arguments |= call.written
        if call.ended(output):
            self.calls.append(call)

    @_never_raises
    def backward_begins(self, loss: Tensor, scale: Tensor | float) -> None:
        """Watch what is outside of the calls."""
        if running_again() or self._left <= 0:
            return
        self._last = None
        Backward.number += 1
        self._scales[Backward.number] = scale
        if not self._waits and loss.device.type != "cpu":
            return
        live, start = self._live, [loss.grad_fn]
        if live is not None:
            live.paused = True
            live.claim(loss, None)
        else:
            sources = [source() for call in _all_calls() for source in call.sources]
            start += [tensor.grad_fn for tensor in sources if tensor is not None]
        if self._in_loss is None and not finite(loss):
            reached = None if live is None else live.reached(loss)
            first = None if reached is None else reached.root()
            if live is not None and first is not None and not first[0].unseen:
                self._in_loss = seen_forward(*first, live.operations)
            else:
                self._in_loss = found_in_loss(loss)
            self._in_loss.start = loss.grad_fn
        self._outside[Backward.number] = watch_loss(start, scale, None if live is None else live.operations)

    def update_ended(
        self,
        optimizer: Optimizer,
        *,
        index: int,
        number: int,
        skipped: Tensor | bool,
        loss_scale: Tensor | float,
    ) -> None:
        """Look into it if it was skipped, and let go of everything that was kept for it."""
        self._finding = None
        if isinstance(skipped, Tensor):
            skipped = bool(skipped) if self._waits or skipped.device.type == "cpu" else False
        try:
            if skipped and self._left > 0:
                # Another optimizer of the same backward: what was found for the first is kept no longer.
                known = None if self._scales else self._last
                finding = known or self._agreed(self._looked_into())
                self._finding = finding
                if known is None:
                    self._left -= finding.alarms
                    unclear = finding.cause == "unknown" or (finding.module == OUTSIDE and finding.alarms)
                    self._to_watch = WATCHED if unclear and not finding.line and self._scales else 0
                    self._last = finding
                self._records.append(OverflowRecord(index, number, self._clock(), float(loss_scale), finding))
        finally:
            self._let_go()

    def step_dropped(self) -> None:
        """Let go of everything."""
        self._finding = None
        self._let_go()

    # ------------------------------------------------------------------------------------------ kept

    def _prune(self) -> None:
        """Let go of calls whose outputs are gone without a backward (an evaluation in training mode, say)."""
        self.calls = [call for call in self.calls if call.grads or call.graph_alive]
        self._pruned = len(self.calls)

    def _let_go(self) -> None:
        mine = set(self._scales)
        self._open = self._live = self._in_loss = None
        self._scales.clear()
        for watch in self._outside.values():
            watch.undo()
        self._outside.clear()
        self._trouble.clear()
        # What another optimizer's backward has come through, or may yet, is kept for that one.
        awaited = {number for tracer in _ALL for number in tracer._scales}
        for tracer in _ALL:
            for call in tracer.calls:
                came = call.grads.keys() & mine
                call.grads = {number: grads for number, grads in call.grads.items() if number in awaited}
                call.done = bool(came) and not call.grads and not call.retained
            tracer.calls = [call for call in tracer.calls if not call.done]
            tracer._prune()

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept now."""
        return sum(call.nbytes for call in self.calls)

    # ------------------------------------------------------------------------------------------ live

    @property
    def watches_live(self) -> bool:
        """Whether the next region is to be watched operation by operation: enter `live` in it."""
        if self._watching or self._left <= 0:
            return False
        if (self._to_watch <= 0) if self._live is None else bool(self._live.trouble):
            return False
        return not running_again() and not within_compiled()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Watch the operations inside, forward: after an overflow that could not be explained by running calls again.

        Compiled parts run eagerly inside. A step's regions are one watch. Its errors go into a finding's note.
        """
        with ExitStack() as stack:
            try:
                trace = self._trace()
                stack.enter_context(eager())
                stack.enter_context(trace.watching())
                trace.paused = False
            except Exception as error:
                self._to_watch, self._live = 0, None
                self._trouble.append(f"watching failed: {told(error)}")
            self._watching = True
            try:
                yield
            finally:
                self._watching = False

    def forget_live(self) -> None:
        """Of what was seen of this step, with the graphs that it holds: it is none."""
        self._live = None

    def _trace(self) -> ForwardTrace:
        if self._live is None:
            self._to_watch -= 1
            models = dict.fromkeys([] if self._model is None else [unwrapped(self._model)])
            models |= dict.fromkeys(model for tracer in (self, *_ALL) for model in tracer._effects)
            self._live = ForwardTrace(models, outer=OUTSIDE)
        return self._live

    # ------------------------------------------------------------------------------------------ looking

    def _looked_into(self) -> OverflowReport:
        began, kept = time.perf_counter(), 0
        try:
            calls = [call for call in _all_calls() if call.grads.keys() & self._scales.keys()]
            for call in calls:
                for tracer in _ALL:
                    if call.written and call.inner in tracer._effects:
                        tracer._effects[call.inner].writes_arguments = True
            kept = sum(call.nbytes for call in calls)
            scales = {number: float(scale) for number, scale in self._scales.items()}
            lines = [*(call.line for call in calls), users_line()]
            for found in (self._in_loss, *(one.found for one in self._outside.values())):
                if found is not None:
                    self._known.tell(found, lines)
            sources = _sources(calls)
            finding, place = investigate(
                sorted([*calls, *sources], key=lambda call: call.number), scales, self._in_loss, self._outside
            )
            finding = replace(finding, remedies=remedies_for(finding, place, scales, self._model))
            if place is not None and any(place is one for one in sources):
                whose = f"it is in an earlier call of {type(place.inner).__name__}, which gave a later one its input"
                finding = replace(finding, note="; ".join(filter(None, (finding.note, whose))))
        except Exception as error:
            finding = OverflowReport("unknown", note=f"looking into it failed: {told(error)}")
        if finding.cause == "unknown" and self._group is None and is_distributed():
            self._trouble.append("it may have been another rank's")
        elif finding.cause == "unknown" and not self._scales:
            self._trouble.append("its backward was not seen")
        if self._live is not None and self._live.trouble:
            self._trouble.append(f"watching failed: {self._live.trouble}")
        note = "; ".join(filter(None, (finding.note, *dict.fromkeys(self._trouble))))
        return replace(finding, note=note, seconds=time.perf_counter() - began, kept_bytes=kept)

    def _agreed(self, finding: OverflowReport) -> OverflowReport:
        """What the ranks of data parallelism found, each in its own part of the batch: the first that alarms."""
        if self._group is None or not is_distributed(self._group):
            return finding
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, finding, group=self._group)
        order = {"loss scale": 1, "unknown": 2}
        rank = min(range(len(found)), key=lambda one: order.get(found[one].cause, 0))
        if rank == dist.get_rank(self._group):
            return finding
        chosen: OverflowReport = found[rank]
        return replace(chosen, note="; ".join(filter(None, (chosen.note, f"found by rank {rank}"))))
