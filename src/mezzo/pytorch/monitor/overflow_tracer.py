"""OverflowTracer: finds the operation that made the first value that is not finite in a skipped step.

The step's model calls are kept until its end, with the gradients at their outputs, and replayed if the step was
skipped: the parameters are then as they were. What is outside of the calls is watched as it happens.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.loss_scale import LossScale
from mezzo.core.overflow import ALARMS, OUTSIDE, REPEATS, OverflowReport
from mezzo.core.records import OverflowRecord
from mezzo.core.remedies import training_code
from mezzo.pytorch.distributed import is_distributed, is_sharded, joins
from mezzo.pytorch.module_paths import path_of, unwrapped
from mezzo.pytorch.monitor.backward_trace import BackwardTrace, watch_loss
from mezzo.pytorch.monitor.forward_trace import ForwardTrace
from mezzo.pytorch.monitor.investigation import investigate, remedies_for
from mezzo.pytorch.monitor.observer import Scale, StepObserver
from mezzo.pytorch.monitor.operations import facts, finite, in_one_line, users_line
from mezzo.pytorch.monitor.replay import SavedCall, SideEffects, eager, running_again, within_compiled
from mezzo.pytorch.step import parameters

_FEW = 8  # kept calls that are looked at before each call
WATCHED = 50
"""Contexts that are watched live at most, for one overflow that was not explained."""

NOT_TRACED = (
    "skipped steps of a sharded model (fully_shard, DTensor) are not traced to an operation, because a replay would "
    "gather parameters on one rank alone. To find the operation, run the script on one process without fully_shard"
)

_ALL: weakref.WeakSet[OverflowTracer] = weakref.WeakSet()


def _in_loss(loss: Tensor) -> OverflowReport:
    """The report on a loss that is not finite, where no operation was seen to make it so."""
    return OverflowReport("loss", OUTSIDE, outputs=[facts(loss, "output")])


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """An error of the tracer goes into the report's note; the step goes on."""

    @functools.wraps(method)
    def guarded(self: OverflowTracer, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self._trouble.setdefault(f"tracing failed: {in_one_line(error)}")

    return guarded


class OverflowTracer(StepObserver):
    """A `StepObserver` that looks into skipped steps, also where the host must wait for the device if it `waits`.

    `ALARMS` limits its reports; remedies have policies as `written`: as code, or as a command. `group_of` gives
    the process group of an optimizer whose gradients are averaged (by default that of the last model called): its ranks
    tell each other what they found. A sharded model is not traced. `alone` says that there is no other optimizer.
    `inside`: where in the user's loop `live` is entered, if not around all of a step. `scaling`: the loss scale's kind.
    """

    def __init__(
        self,
        *,
        enter: Callable[[], AbstractContextManager[Any]],
        clock: Callable[[], float] = time.monotonic,
        waits: bool = False,
        model: nn.Module | None = None,
        written: Callable[[str], str] = training_code,
        group_of: Callable[[Optimizer], Any] | None = None,
        alone: Callable[[], bool] = bool,
        inside: str = "",
        scaling: Callable[[], LossScale | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._enter, self._model, self._written = enter, model, written
        self._clock, self._waits, self._limit = clock, waits, ALARMS * REPEATS
        # Repeats left, by process group, whose ranks count alike; None: for optimizers of this rank alone.
        self._left: dict[Any, int] = {None: self._limit}
        self._places: set[tuple[Any, tuple[str, ...]]] = set()
        self.calls: list[SavedCall] = []
        self._pruned = 0  # how many calls the last `_prune` left
        self._effects: weakref.WeakKeyDictionary[nn.Module, SideEffects] = weakref.WeakKeyDictionary()
        self._open: SavedCall | None = None
        self._scales: dict[int, Scale] = {}  # number of a backward of this step -> its scale
        self._outside: dict[int, BackwardTrace] = {}
        self._losses: list[Tensor] = []  # of this step's backwards, looked at if it is skipped
        self._in_loss: OverflowReport | None = None
        self._live: ForwardTrace | None = None
        self._watching = False
        self._to_watch = 0
        self._trouble: dict[str, None] = {}
        self._group_of, self._alone, self._inside, self._scaling = group_of, alone, inside, scaling
        parallel = isinstance(model, nn.parallel.DistributedDataParallel)
        # Weak: a group that outlives its end keeps gloo's threads into the end of Python, which they abort at times.
        self._group = _weak(model.process_group if parallel else None)  # type: ignore[union-attr]
        self.notes: list[str] = []
        self._last: OverflowReport | None = None
        _ALL.add(self)

    @_never_raises
    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments."""
        self._open = None
        if self._group_of is None and isinstance(model, nn.parallel.DistributedDataParallel):
            self._group = _weak(None if joins(model) else model.process_group)
        if running_again() or not self._looks:
            return
        # Many calls in one graph: looked at once each time that their number has doubled, not all of them at each call.
        if len(self.calls) <= _FEW or len(self.calls) >= 2 * self._pruned:
            self._prune()
        inner = unwrapped(model)
        if inner not in self._effects:
            if is_sharded(inner):
                # Replaying a call would gather parameters, and the ranks don't replay the same calls.
                self._limit = 0
                self._left.clear()
                self.notes.append(NOT_TRACED)
                return
            self._effects[inner] = SideEffects(inner)
            if self._model is not None and path_of(inner, self._model):  # a part of it, called by itself
                self._effects[inner].root = weakref.ref(unwrapped(self._model))
        if torch._C._functorch.get_interpreter_stack() is not None:
            self._trouble.setdefault("model calls inside torch.func (vmap, jvp, grad) can't be run again")
            return
        self._open = SavedCall(model, args, kwargs, self._effects[inner], self._enter, users_line())

    @_never_raises
    def call_ended(self, model: nn.Module, output: Any) -> None:
        """Watch for the gradients of what was returned."""
        call, self._open = self._open, None
        if call is not None and call.model is model:
            self._effects[call.inner].learn(call.inner, call.state)
            if call.ended(output):
                self.calls.append(call)

    @_never_raises
    def backward_begins(self, loss: Tensor, scale: Scale) -> None:
        """Watch what is outside of the calls."""
        if running_again() or not self._looks:
            return
        self._last = None
        SavedCall.backward += 1
        self._scales[SavedCall.backward] = scale
        if not self._waits and loss.device.type != "cpu":
            return
        live, starts = self._live, [loss.grad_fn]
        if live is None:
            sources = [source() for tracer in _ALL for call in tracer.calls for source in call.sources]
            starts += [tensor.grad_fn for tensor in sources if tensor is not None]
            self._losses.append(loss.detach())
        else:
            live.paused = True
            live.claim(loss, None)
            if self._in_loss is None and not finite(loss):
                reached = live.reached(loss)
                first, report = (None, None) if reached is None else reached.root()
                self._in_loss = _in_loss(loss) if first is None or first.unseen else report
        self._outside[SavedCall.backward] = watch_loss(starts, scale, live)

    def update_ended(
        self, optimizer: Optimizer, *, index: int, number: int, skipped: Tensor | bool, loss_scale: Scale
    ) -> None:
        """Look into it if it was skipped, or if an operation is known that made its loss not finite; let go of all."""
        self.finding = None
        if isinstance(skipped, Tensor):
            skipped = bool(skipped) if self._waits or skipped.device.type == "cpu" else False
        try:
            if self._group_of is not None:
                self._group = _weak(self._group_of(optimizer))
            left = self._left.setdefault(self._group, self._limit)
            # On several ranks they must agree on what they look into.
            shared = self._scales and self._group is None and not self._alone()
            if left > 0 and (skipped or (shared and self._others_overflowed(optimizer))):
                # Another optimizer of the same backward: what was found for the first is kept no longer.
                known = None if self._scales else self._last
                finding = known or self._agreed(self._looked_into())
                if known is None:
                    if finding.alarms:  # an earlier one may still be unclear
                        self._count(finding)
                        unclear = finding.cause == "unknown" or finding.module == OUTSIDE
                        self._to_watch = WATCHED if unclear and not finding.line and self._scales else 0
                    self._last = finding
                if not skipped:
                    return
                self.finding = finding
                self._records.append(OverflowRecord(index, number, self._clock(), float(loss_scale), finding))
            elif left > 0 and self._in_loss is not None and self._in_loss.line:
                # Traced because of an earlier step; the gradients of this one are finite.
                if self._group is None:  # other ranks don't know of it, and count what all have found
                    self._count(self._in_loss)
                self._to_watch = 0
                offered = remedies_for(self._in_loss, None, {}, self._model, self._written)
                self.finding = replace(self._in_loss, how="live", remedies=offered)
        finally:
            self._let_go()

    def _count(self, finding: OverflowReport) -> None:
        key = self._group, finding.place
        self._left[self._group] -= 1 if key in self._places else REPEATS
        self._places.add(key)

    def _others_overflowed(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer of the same backward will be skipped after this one has stepped."""
        own = {id(param) for param in parameters(optimizer)}
        models = {call.inner for call in self.calls}
        others = {param for model in models for param in model.parameters() if id(param) not in own}
        grads = [param.grad for param in others if param.grad is not None]
        return any(not finite(grad) for grad in grads if self._waits or grad.device.type == "cpu")

    def step_dropped(self) -> None:
        """Let go of everything."""
        self.finding = None
        self._let_go()

    def _prune(self) -> None:
        """Let go of calls whose outputs are gone without a backward (an evaluation in training mode, say)."""
        self.calls = [call for call in self.calls if not call.done and (call.grads or call.graph_alive)]
        self._pruned = len(self.calls)

    def _let_go(self) -> None:
        mine = set(self._scales)
        self._open = self._live = self._in_loss = None
        self._scales.clear()
        self._losses.clear()
        for watch in self._outside.values():
            watch.undo()
        self._outside.clear()
        self._trouble.clear()
        # What another optimizer's backward has come through, or may yet, is kept for that one.
        tracers = list(_ALL)
        awaited = {number for tracer in tracers for number in tracer._scales}
        for tracer in tracers:
            for call in tracer.calls:
                came = call.grads.keys() & mine
                call.grads = {number: grads for number, grads in call.grads.items() if number in awaited}
                call.done = bool(came) and not call.grads and not call.retained
            tracer._prune()

    @property
    def _looks(self) -> bool:
        return max(self._left.values(), default=0) > 0

    @property
    def watches_live(self) -> bool:
        """Whether the next context is to be watched operation by operation: enter `live` in it."""
        if self._watching or not self._looks:
            return False
        if (self._to_watch <= 0) if self._live is None else bool(self._live.trouble):
            return False
        return not running_again() and not within_compiled()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Watch the operations inside, forward; compiled parts run eagerly. A step's contexts are one trace."""
        with ExitStack() as stack:
            try:
                if self._live is None:
                    self._to_watch -= 1
                    models = dict.fromkeys([] if self._model is None else [unwrapped(self._model)])
                    models |= dict.fromkeys(model for tracer in (self, *_ALL) for model in tracer._effects)
                    self._live = ForwardTrace(models, outer=OUTSIDE)
                stack.enter_context(eager())
                stack.enter_context(self._live.watching())
                self._live.paused = False
            except Exception as error:
                self._to_watch, self._live = 0, None
                self._trouble.setdefault(f"tracing failed: {in_one_line(error)}")
            self._watching = True
            stack.callback(setattr, self, "_watching", False)
            yield

    def forget_live(self) -> None:
        """Drop the live trace with its graphs: the calls belong to no step."""
        self._live = None

    def _looked_into(self) -> OverflowReport:
        began, kept = time.perf_counter(), 0
        try:
            every = sorted((call for tracer in _ALL for call in tracer.calls), key=lambda call: call.number)
            calls = [call for call in every if call.grads.keys() & self._scales.keys()]
            kept = sum(call.nbytes for call in calls)
            scales = {number: float(scale) for number, scale in self._scales.items()}
            in_loss = self._in_loss or next((_in_loss(one) for one in self._losses if not finite(one)), None)
            finding, place = investigate(calls, scales, in_loss, self._outside)
            if finding.cause == "input" and place is not None:  # perhaps an earlier call's output, detached
                earlier, made = investigate([one for one in every if one.number < place.number], {}, None, {})
                finding, place = (earlier, None) if made else (finding, place)  # a policy must help on both
            # A gradient by `autograd.grad` inside the step is taken under autocast: a combination for the call is not
            # enough for it.
            begun = {number for tracer in _ALL for number in tracer._scales}
            combines = all(call.grads.keys() <= begun for call in every)
            args: Any = finding, place, scales, self._model, self._written
            offered = remedies_for(*args, combines=combines, scaling=self._scaling())
            finding = replace(finding, remedies=offered)
        except Exception as error:
            finding = OverflowReport("unknown", note=f"the search for the cause failed: {in_one_line(error)}")
        if finding.cause == "unknown" and self._group is None and is_distributed():
            self._trouble.setdefault("the cause may be on another rank")
        elif finding.cause == "unknown" and not self._scales:
            self._trouble.setdefault("no backward pass was seen for this step")
        failed = [one.trouble for one in (self._live, *self._outside.values()) if one is not None]
        self._trouble |= {f"tracing failed: {trouble}": None for trouble in failed if trouble}
        traced = f"the next steps are traced{self._inside} to find the operation that made it so"
        note = "; ".join(filter(None, (finding.note, traced * (finding.cause == "loss"), *self._trouble)))
        return replace(finding, note=note, seconds=time.perf_counter() - began, kept_bytes=kept)

    def _agreed(self, finding: OverflowReport) -> OverflowReport:
        """The ranks of data parallelism look at their own parts of the batch: the first report that alarms."""
        group: Any = None if self._group is None else self._group()
        if group is None or not is_distributed(group):
            return finding
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, finding, group=group)
        order = {"loss scale": 1, "unknown": 2}
        rank = min(range(len(found)), key=lambda one: order.get(found[one].cause, 0))
        if rank == dist.get_rank(group):
            return finding
        chosen: OverflowReport = found[rank]
        return replace(chosen, note="; ".join(filter(None, (chosen.note, f"found by rank {rank}"))))


def _weak(group: Any) -> weakref.ref[Any] | None:
    return None if group is None else weakref.ref(group)
