"""MixedPrecision: a model, its optimizer and a policy; `step(loss)` does everything between one loss and the next.

The order is fixed: backward of the scaled loss, the optimizer step (`pytorch/step.py`: unscale, look for NaN and
infinity, clip, step or skip), scheduler and average only if it stepped, next scale, clear the gradients.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError, checks_keywords
from mezzo.core.loss_scale import LossScale
from mezzo.core.overflow import OverflowReport
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import as_loss_scale
from mezzo.core.ranges import RangeRow
from mezzo.core.records import RecordWriter, writer_of
from mezzo.pytorch import distributed, loss_scaler
from mezzo.pytorch.auto import TrialDecision
from mezzo.pytorch.autocast.context import Context, forget_entries
from mezzo.pytorch.kernels.not_traced import breaks_graph
from mezzo.pytorch.monitor.operations import users_line
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.state_dicts import FirstStates
from mezzo.pytorch.optim.with_masters import WithMasters
from mezzo.pytorch.reduction import average_in, to_average
from mezzo.pytorch.same_options import follow, reported
from mezzo.pytorch.step import StepOutcome, parameters, step_fused, step_in_place
from mezzo.pytorch.training import backward, cast_parameters, checks
from mezzo.pytorch.training import state as training_state
from mezzo.pytorch.training.backward import Accumulation, Gradients, OptimizerBackward, in_transform
from mezzo.pytorch.training.networks import Networks
from mezzo.pytorch.training.observers import Observers, observers_for
from mezzo.pytorch.training.release import GradientRelease
from mezzo.pytorch.training.resolved_precision import ResolvedPrecision
from mezzo.pytorch.training.result import Journal, StepResult, short
from mezzo.pytorch.weights.master_state import showing_masters

# The open ones. No two own the same parameter: they would unscale, clip and clear each other's gradients.
_ALIVE: WeakSet[Any] = WeakSet()
_NETWORKS = Networks()

_UNSCALED = (
    "MixedPrecision: torch.func computes gradients without the loss scale, which only step(loss) applies. Small fp16 "
    "gradients become 0. Use precision='bf16', or compute the loss with torch.func.functional_call and call step(loss)."
)
_OWN_STEP = (
    "MixedPrecision: the loop called optimizer.step() itself, without MixedPrecision's {}. Replace loss.backward(), "
    "optimizer.step() and optimizer.zero_grad() by mp.step(loss)."
)
_CHANGED = (
    "MixedPrecision: gradients were changed in place, as by clip_grad_norm_, between the losses of a window. There "
    "they are multiplied by the loss scale and not divided yet. Remove that line. To clip, pass clip_norm=."
)
_CALLED = (
    "MixedPrecision: the loop called {}() itself, so it runs more than once per update. Remove that line: with {}=, "
    "MixedPrecision calls it after each step of the optimizer."
)


class MixedPrecision:
    """Trains a model in mixed precision: autocast, loss scale, accumulation, clipping and optimizer step in two calls.

    Example::

        mp = mezzo.MixedPrecision(model, optimizer, "bf16", clip_norm=1.0, accumulate=4)
        for x, y in loader:
            with mp.autocast():
                loss = loss_fn(model(x), y)
            result = mp.step(loss)
        mp.flush()  # the last window may have fewer than 4 losses

    The same without Mezzo, for fp16 with `accumulate=1`::

        scale = DynamicLossScale()
        with mezzo.autocast("fp16"):
            loss = loss_fn(model(x), y)
        (loss.float() * scale.scale).backward(inputs=params_of(optimizer))
        grads = [p.grad.div_(scale.scale) for p in params_of(optimizer) if p.grad is not None]
        found_inf = not all(g.isfinite().all() for g in grads)
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), clip_norm)
        if not found_inf:
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
        scale = scale.next(Observation(found_inf))
        optimizer.zero_grad()

    Without a loss scale (bf16, fp32) gradients are not checked for NaN, and no step is skipped.

    Args:
        model: holds the trained parameters, in FP32, or in 16 bits with a `mezzo.optim` optimizer.
        optimizer: over parameters of the model. Create one MixedPrecision per optimizer; each has its own loss scale.
            For an optimizer that needs a closure (LBFGS) use `mezzo.GradScaler`.
        precision: `"bf16"`, `"fp16"`, `"fp32"`, `"auto"`, a torch dtype, or any policy. `auto` chooses a format that
            the hardware has, times the first steps in it and in FP32, and keeps the faster one; see `decision`.
        clip_norm: largest total 2-norm of the unscaled gradients; `math.inf` only measures the norm.
        clip_value: largest magnitude of an element of the unscaled gradients; applied before `clip_norm`.
        accumulate: losses per optimizer step. Each is divided by this number, so that four quarters of a batch update
            the model as the whole batch would.
        scheduler: stepped after each optimizer step that was taken (not once per epoch).
        ema: updated after each step that was taken, with the FP32 masters of 16-bit weights: an object with
            `update_parameters(model)`, such as `torch.optim.swa_utils.AveragedModel`, or a function of the model.
        params: storage format of the parameters: `"fp32"`, `"bf16"`, `"fp16"`. Parameters of normalizations, and of
            modules that the policy keeps in FP32, stay FP32. The model is changed in place, and torch's AdamW, Adam,
            SGD and Muon become Mezzo's in the same object. `params`, `masters` and `state` are also keys of policies.
        masters: how the optimizer keeps the FP32 value of a 16-bit parameter: `"fp32"`, a separate copy; `"split"`,
            the 16 bits that bf16 lacks; `"split8"`, 8 of them; `"none"`. With `masters` alone, parameters are stored
            in the compute format; with `params="bf16"` alone, masters are split.
        state: storage format of the optimizer's moments: `"fp32"`, `"bf16"`, `"int8"`.
        release_gradients: step each parameter inside backward, and free its gradient at once.
        loss_scale: replaces the policy's: `"dynamic"`, `"dynamic(init=1024)"`, `"none"`, a number, or a
            `DynamicLossScale` or `StaticLossScale`.
        device_type: of the autocast context, such as `"cuda"`; by default that of the model's first parameter.
        watch: count the exponents of weights, activations, gradients and updates, by module: True, or an interval in
            updates. The counts are in `ranges`.
        trace: when a step is skipped, replay its model calls and find the origin of the value that is not finite:
            `result.finding`, `findings`; the first one that a loss scale of 1 does not prevent is a warning, too. None:
            only where the host learns of the skip without waiting for it.
        records: a file (``"run.jsonl"``) for `mezzo report`, written anew, or a `mezzo.TensorBoardWriter`. It gets
            losses and updates, every 16 updates, at `close()` and on an exception. Rank 1 writes `run-rank1.jsonl`.
        weights: deprecated; use `params` and `masters`.

    A second one for the same model, such as a notebook's cell that is run again, closes the first with a warning.

    Raises:
        UsageError: a model without parameters, an optimizer of another model, parameters of another model's
            MixedPrecision, 16-bit parameters without masters, storage that precision or optimizer do not support, a
            number out of range. Model and optimizer are then unchanged.
        UnknownNameError: an unknown precision, keyword argument, format of parameters or state, or kind of masters.
        UnsupportedPrecisionError: 16-bit weights under `auto` on hardware without such a format.
    """

    @checks_keywords
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: str | os.PathLike[str] | Policy | torch.dtype = "auto",
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        scheduler: Any = None,
        ema: Any = None,
        params: str | None = None,
        masters: str | None = None,
        state: str | None = None,
        release_gradients: bool = False,
        loss_scale: LossScale | float | str | None = None,
        device_type: str | None = None,
        watch: bool | int = False,
        trace: bool | None = None,
        records: RecordWriter | str | os.PathLike[str] | None = None,
        weights: str | None = None,
    ) -> None:
        given = locals()
        follow()
        replaced = checks.model_and_optimizer(model, optimizer, _ALIVE)
        checks.arguments(given)
        scale = as_loss_scale(loss_scale, "MixedPrecision")
        if release_gradients and accumulate == 1:
            GradientRelease.check_model(model)
        device_type = device_type or next(model.parameters()).device.type
        if weights is not None:
            params, masters = cast_parameters.former(weights, params, masters)
        stored = cast_parameters.stored(policy_of(precision), params, masters, state, device_type)
        asked, why = cast_parameters.with_stored_format(*stored, optimizer)
        self.model = model
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.accumulate = accumulate
        self.scheduler = scheduler
        low = asked.params != "fp32" or cast_parameters.stored_as(optimizer)[0] != "fp32"
        self._average = checks.averager(ema, low=low)
        self._averaged: tuple[int, ...] = ()  # what the count is if the loop updates the average, too
        wrappers = to_average(model, asked)
        with ExitStack() as undo:
            for other in replaced:
                other._journal.flush()
                other._resolved.end()  # it would take off overrides of this one
                undo.callback(other._go_on)
            _ALIVE.difference_update(replaced)
            self._resolved = ResolvedPrecision(model, asked, device_type, scale, why)
            undo.callback(self._resolved.end)
            own = distributed.own_path(records)
            self._journal = Journal(writer_of(own, "MixedPrecision: records", "a"))
            self._findings: deque[OverflowReport] = deque(maxlen=100)
            self._told: set[str] = set()  # warnings that come once
            self._steps = False  # whether the optimizer's step that runs is this object's
            self._doubled: tuple[int, ...] = ()  # the scheduler's `last_epoch` if the loop steps it as well
            self._window = Accumulation(accumulate)
            self._buffers = _NETWORKS.of(model)
            self._compared = False  # with the arguments of other ranks
            self._given_scale = scale
            self._losses: list[Tensor] = []  # of the window, where other networks are trained as well
            self._train(optimizer, self._resolved.policy, release_gradients)
            for other in replaced:
                other._make_way()
            undo.pop_all()
        for wrapper in wrappers:
            average_in(wrapper, asked.reduce)
        loss_scaler.follow_joins(model, self._resolved)
        self._observing = Observers(
            model, observers_for(self._resolved, model, optimizer, watch, trace, self._journal.now)
        )
        self._journal.also(self._observing.drain)
        self._stop_observing = finalize(self, self._observing.undo)
        self._stop_observing.atexit = False
        if isinstance(own, (str, os.PathLike)):  # last: an error above leaves an earlier run's records
            open(own, "w").close()
        if not any(mp._looks for mp in _ALIVE):  # else one of these may have begun its first forward pass
            forget_entries()
        _ALIVE.add(self)
        checks.doubtful(model, optimizer, self.policy)

    def _train(self, optimizer: Optimizer, policy: Policy, release: bool) -> None:
        """Put weights and optimizer into the policy's formats, and choose the kinds of step and of gradients."""
        stepping = cast_parameters.apply(self.model, optimizer, policy, self._others(), fused=release)
        self.optimizer = optimizer
        self._fused = stepping if isinstance(stepping, FusedOptimizer) else None
        self._stored_as = cast_parameters.stored_as(stepping)
        self._looks = True  # at the first loss, unless `autocast` is called before
        self._release: GradientRelease | None = None
        self._optimizer_step: Callable[..., StepOutcome]
        if self._fused is None or self.clip_value is not None:
            self._optimizer_step = partial(step_in_place, stepping, clip_value=self.clip_value)
        else:
            self._optimizer_step = partial(step_fused, stepping)
            if release and self.accumulate == 1:
                self._release = GradientRelease(self._fused)
        self._backward = OptimizerBackward(stepping, self.model)
        self._began: Tensor | None = None  # of `Ranks.agreed`, whether a loss of this window is not finite
        # torch's zero_grad also opens a profiler range, which takes longer than the rest of it.
        own = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
        self._clears_itself = not own
        # Separate masters and clipping by value rewrite gradients, which must be FP32 for it.
        rewrites = self.clip_value is not None or isinstance(stepping, WithMasters)
        reduced = bool(distributed.wrappers(self.model)) or distributed.is_sharded(self.model)
        self._gradients = Gradients(fp32=self.accumulate > 1 or rewrites, reduced=reduced)
        undo = ExitStack()
        undo.callback(self._gradients.clear)
        clips = None if self.clip_norm is None and self.clip_value is None else True
        more = (self._resolved.scaler, clips, self.scheduler, self._average)
        names = ("loss scale", "clipping", "scheduler", "average")
        # Than the optimizer's own step.
        self._does_more = [name for name, one in zip(names, more) if one is not None]
        if self.accumulate > 1 or self._does_more:
            undo.callback(optimizer.register_step_pre_hook(partial(_step_begins, ref(self))).remove)
        if not isinstance(stepping, (FusedOptimizer, WithMasters)):  # these do it themselves
            for hook in FirstStates(stepping).hooks:
                undo.callback(hook.remove)
        self._let_go = finalize(self, undo.close)
        self._let_go.atexit = False

    def _others(self) -> Iterator[Tensor]:
        for mp in _ALIVE:
            if mp is not self:
                yield from parameters(mp.optimizer)

    def __repr__(self) -> str:
        journal, scaled = self._journal, self._resolved.active_scaler is not None
        parts = [
            str(self.policy) if self._resolved.trial is None else f"auto, now {self.precision}",
            self._stored_as[0] != "fp32" and self.policy.params == "fp32" and f"masters={self._stored_as[1]}",
            self.accumulate > 1 and f"accumulate={self.accumulate}",
            self.clip_norm is not None and f"clip_norm={self.clip_norm}",
            self.clip_value is not None and f"clip_value={self.clip_value}",
            scaled and f"loss_scale={short(self.loss_scale)}",
            f"{journal.updates} update{'s' * (journal.updates != 1)}",
            scaled and f"{journal.skipped} skipped",
            self._window.seen > 0 and f"{self._window.seen} of {self.accumulate} losses accumulated",
            self not in _ALIVE and "closed",
        ]
        return f"MixedPrecision({', '.join(part for part in parts if part)})"

    @property
    def policy(self) -> Policy:
        """The policy, with `auto` replaced by the format that is being timed or was chosen."""
        return self._resolved.policy

    @property
    def precision(self) -> str:
        """The compute format of the next step."""
        return self._resolved.precision

    @property
    def decision(self) -> TrialDecision | None:
        """The chosen precision and the reason; None while `auto` still times the first steps."""
        return self._resolved.decision

    @property
    def findings(self) -> list[OverflowReport]:
        """The last hundred diagnoses of skipped steps; see `trace`."""
        return list(self._findings)

    @property
    def updates(self) -> int:
        """Optimizer steps so far, taken or skipped."""
        return self._journal.updates

    @property
    def skipped(self) -> int:
        """How many of them were skipped. Waits for the device."""
        return self._journal.skipped

    @property
    def ranges(self) -> list[RangeRow]:
        """The exponent histograms of the last watched update; none without `watch`. Waits for the device."""
        return self._observing.ranges

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step, 1.0 without one. Waits for the device."""
        scaler = self._resolved.active_scaler
        return 1.0 if scaler is None else float(scaler.scale)

    def reset_loss_scale(self) -> None:
        """Restart the loss scale, after a `LossScaleCollapseError` whose cause is fixed.

        A dynamic scale restarts at its `init`; a constant one resets its skips. An open window keeps its scale.

        Raises:
            UsageError: this training has no loss scale.
        """
        scaler = self._resolved.scaler
        if scaler is None:
            raise UsageError(
                f"reset_loss_scale(): precision '{self.policy}' has no loss scale, so there is nothing to reset. A "
                "loss scale comes with precision='fp16', or with loss_scale='dynamic'."
            )
        scaler.reset()

    def autocast(self) -> AbstractContextManager[Context]:
        """The autocast context of this training, for the forward pass and the loss. May be entered repeatedly."""
        resolved, self._looks = self._resolved, False
        copies = resolved.scaler is not None and self._buffers.watches
        if resolved.scaler is not None and not torch.compiler.is_dynamo_compiling():
            if in_transform("Grad"):
                warnings.warn(_UNSCALED, stacklevel=2)
            copies = copies or any(mp._buffers.watches for mp in _ALIVE)
        if resolved.trial is not None or copies or self._observing.watches_live:
            return self._watched_context()
        return resolved.context()

    @contextmanager
    def _watched_context(self) -> Iterator[Context]:
        """The context; entering it starts a trial's clock, and copies buffers."""
        training = self.model.training and torch.is_grad_enabled()
        if training and self._resolved.trial is not None:
            self._resolved.trial.start()
        if training and self._resolved.active_scaler is not None:
            for model in {mp.model for mp in _ALIVE}:  # calls of the other networks may be part of this step
                _NETWORKS.call(model)
        with self._resolved.context() as context, self._observing.live():
            yield context

    @breaks_graph
    @reported
    def step(self, loss: Tensor, *, retain_graph: bool = False) -> StepResult:
        """Run backward, and after `accumulate` losses the optimizer step, unless a gradient is NaN or infinite.

        Gradients go to this optimizer's parameters only, and are cleared after the step, taken or skipped. Between the
        losses of a window `.grad` holds scaled gradients, in FP32; it is None for 16-bit weights whose gradients ranks
        reduce. The host waits for the device only with a loss scale and an optimizer that isn't fused, a `scheduler`,
        an `ema`, or another network in training. If backward raises, the window is dropped with its gradients.

        Args:
            loss: a tensor of one element that requires a gradient; not scaled, not divided by `accumulate`.
            retain_graph: keep the graph for the step of another MixedPrecision (its backward runs again).

        Returns:
            The outcome: `result.stepped`, `result.skipped`, `result.loss`, `result.grad_norm`. Reading may wait for the
            device.

        Raises:
            UsageError: a loss that is not a scalar, needs no gradient, or depends on no parameter of this optimizer.
            CallOrderError: a loss that was given to a step before; cleared gradients of an open window; after `close`.
                In an open window `optimizer.step()` raises it, too.
            LossScaleCollapseError: `patience` steps in a row were skipped at the smallest loss scale. Raised at once on
                a CPU and where the host sees the skip, else within `patience` more steps.
        """
        if self not in _ALIVE:
            raise CallOrderError("step(): this MixedPrecision is closed. Create a new one.")
        window, observing = self._window, self._observing
        is_first, self._compared = not self._compared, True
        if is_first and distributed.is_distributed():  # before this rank may refuse its loss
            checks.same_arguments(self, self._given_scale, self._ranks())
        checks.loss(loss)
        if is_first and window.seen == 0:
            checks.first_loss(loss, self.accumulate, self.optimizer)
        if (setting := self._resolved.to_change) and distributed.is_distributed():
            checks.not_joined(self.model, setting)
        if self._looks:
            self._looks = False
            checks.outside_autocast(loss, self.policy, self.model, self._stored_as[0])
        scaler = self._resolved.active_scaler
        if window.seen == 0:
            self._losses.clear()
            self._buffers.begin_anew()
        if scaler is not None:
            window.begin(loss, scaler.scale)
            if len(_ALIVE) > 1:
                self._losses.append(loss)
        outcome: StepOutcome | None = None
        if observing.listening:
            observing.backward_begins(loss, window.scale_over(window.accumulate))
        if window.scale is not None and distributed.is_distributed():
            bad = ~distributed.local(loss.detach()).isfinite().all()
            began = torch.stack([bad.to(window.scale), window.scale])
            self._began = began if self._began is None else self._began.maximum(began)
        try:
            if window.check(self.optimizer) and not self._backward.wrappers:  # DDP may write its buckets
                self._warn_once(_CHANGED)
            if self._release is not None:
                if retain_graph:
                    raise UsageError(
                        "step(retain_graph=True): release_gradients=True changes the weights during backward, so the "
                        "graph cannot run again. Step the other MixedPrecision first, with retain_graph=True there."
                    )
                with self._resolved.outside(), backward.set_aside(self._others()):
                    outcome = self._release.backward(
                        loss,
                        window.seed(loss),
                        self._backward.params(),
                        scale=window.scale,
                        clip_norm=self.clip_norm,
                        began=self._began,
                    )
                self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for it
            else:
                if window.seen == 0:
                    self._gradients.cover(self.optimizer)
                elif self._backward.reduces:
                    self._gradients.hand_over()
                with self._resolved.outside():
                    self._backward(loss, window.seed(loss), self._others(), retain_graph=retain_graph)
                self._gradients.take(self.optimizer, reduced=self._backward.reduces)
        except BaseException as error:
            # Out of memory halfway: what was accumulated must not reach the next step.
            self._drop_step()
            if "backward through the graph a second time" in str(error):
                raise CallOrderError(
                    "step(loss): this loss's graph was freed by an earlier backward. Give each loss to one step(), and "
                    "remove loss.backward(): mp.step(loss) runs backward itself. If two MixedPrecision share a graph, "
                    "call mp.step(loss, retain_graph=True) first."
                ) from error
            raise
        window.seen += 1
        value = window.loss = distributed.local(loss.detach())
        self._journal.loss(value)
        if window.seen < self.accumulate:
            window.note(self.optimizer)
            if self._resolved.trial is not None:
                self._resolved.trial.pause()
            note = f"{window.seen} of {self.accumulate} losses accumulated"
            return StepResult(False, loss_tensor=value, scale_tensor=window.scale, note=note)
        return self._end_window(outcome)

    @breaks_graph
    @reported
    def flush(self) -> StepResult:
        """Step with fewer than `accumulate` losses, at the end of an epoch.

        The gradients are rescaled by `accumulate / seen`, so that the update follows the mean of the losses, as in a
        full window. With no loss since the last step it does nothing.

        Returns:
            The outcome, as from `step`; its `loss` is the last of the window, None if there was none.

        Raises:
            CallOrderError: `step` was never called, or the window's gradients were cleared.
        """
        if self._window.seen == 0:
            if self._journal.losses == 0:
                raise CallOrderError("flush(): no loss was given yet. Call mp.step(loss) first.")
            return StepResult(False, note="nothing accumulated since the last step")
        return self._end_window()

    def _end_window(self, outcome: StepOutcome | None = None) -> StepResult:
        window, self._window = self._window, Accumulation(self.accumulate)
        observing = self._observing
        if _NETWORKS.hold_copies and len(_NETWORKS) > len(_ALIVE):
            _NETWORKS.keep({mp.model for mp in _ALIVE})
        memories = distributed.hook_memories(self._backward.wrappers)
        must_know = (
            self.scheduler is not None or self._average is not None or bool(memories) or _NETWORKS.several
        )
        if outcome is None:
            try:
                window.check(self.optimizer)  # of `flush`
                distributed.check_averaged(self._backward.wrappers)
                self._gradients.give()
                ranks = self._ranks()
                if observing.listening:
                    observing.update_begins(self.optimizer, window.scale_over(window.rescale))
                self._steps = True
                with self._resolved.outside():
                    outcome = self._optimizer_step(
                        window.scale,
                        window.rescale,
                        clip_norm=self.clip_norm,
                        host_must_know=must_know,
                        ranks=ranks,
                        began=self._began,
                    )
            except BaseException:
                self._drop_step()
                raise
            finally:
                self._steps = False
        found, skipped = outcome.found_inf, outcome.skipped
        if isinstance(skipped, Tensor) and (must_know or loss_scaler.reading_is_free(skipped)):
            skipped = bool(skipped)
        finding = None
        if observing.listening:
            used = 1.0 if window.scale is None else window.scale
            finding = observing.update_ended(
                self.optimizer, index=self._journal.updates, skipped=skipped, loss_scale=used
            )
            if finding is not None:
                self._findings.append(finding)
        self._clear_gradients()
        if _NETWORKS.hold_copies:
            _NETWORKS.step_ended(
                parameters(self.optimizer),
                skipped,
                lambda: {id(p) for mp in _ALIVE for p in parameters(mp.optimizer)},
                passes=lambda: list(map(self._reached, self._losses)),
                alone=len(_ALIVE) == 1,
            )
        self._losses.clear()
        if skipped is True:
            distributed.forget_errors(memories)
        if skipped is False:
            if self._average is not None:
                if checks.averaged(self._average) in self._averaged:
                    self._warn_once(_CALLED.format("update_parameters", "ema"))
                with showing_masters(self.model, [mp.optimizer for mp in _ALIVE]):
                    self._average(self.model)
                count = checks.averaged(self._average)
                self._averaged = () if count is None else (count + 1, count + self.accumulate)
            if self.scheduler is not None:
                if getattr(self.scheduler, "last_epoch", None) in self._doubled:
                    self._warn_once(_CALLED.format("scheduler.step", "scheduler"))
                self.scheduler.step()
                last = getattr(self.scheduler, "last_epoch", None)
                self._doubled = (last + 1, last + self.accumulate) if isinstance(last, int) else ()
        low = None if self._stored_as[0] == "fp32" else self._fused  # later steps change its flag
        result = StepResult(
            updated=True,
            found_inf=None if found is None else skipped,
            loss_tensor=window.loss,
            grad_norm_tensor=outcome.grad_norm,
            scale_tensor=window.scale,
            weight_overflow_tensor=None if low is None else low.weight_overflow.clone(),
            finding=finding,
            by_tensor=outcome.by,
        )
        self._began = None
        scaler = self._resolved.active_scaler
        if scaler is not None and found is not None:
            scaler.update(found)
        self._journal.update(result)
        self._resolved.counted(self._journal.updates)
        if self._resolved.trial is not None:  # `stepped` may wait
            self._resolved.step_ended(counts=result.stepped, ranks=self._ranks())
        if scaler is not None:
            try:
                scaler.check(skipped)
            except LossScaleCollapseError as collapse:
                self._journal.flush()
                explained = collapse.named(self._findings[-1]) if self._findings else collapse
                raise explained.going_on(scaler.how_to_go_on) from collapse
        told = observing.warning(finding, "mp.findings")
        if told and self._ranks().is_first:  # the others have found the same
            what = "was skipped" if skipped is True else "stepped from a loss that is NaN or infinite"
            warnings.warn(f"MixedPrecision: update {self._journal.updates - 1} {what}: {told}", stacklevel=4)
        return result

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn_explicit(message, UserWarning, *(users_line() or ("<stdin>", 1)))

    def _reached(self, loss: Tensor) -> frozenset[int]:
        """The leaves that a loss's backward reaches, with shards for gathered parameters."""
        shards = distributed.shards([self.model])
        return frozenset(id(shards.get(id(leaf), leaf)) for leaf in backward.leaves_of([loss]))

    def _ranks(self) -> distributed.Ranks:
        """The ranks that decide with this one about the optimizer's step."""
        if not distributed.is_distributed():
            return distributed.ALONE
        return distributed.ranks_of(parameters(self.optimizer), distributed.replica_groups(self.model))

    def _drop_step(self) -> None:
        self._window = Accumulation(self.accumulate)
        self._journal.flush()
        self._clear_gradients()
        self._began = None
        distributed.drop_unsharded([self.model])
        self._observing.step_dropped()

    def _clear_gradients(self) -> None:
        if self._clears_itself:
            for param in parameters(self.optimizer):
                param.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=True)
        self._gradients.clear()

    def state_dict(self, *, fixed_keys: bool = False) -> dict[str, Any]:
        """The state of this object; save those of model, optimizer, scheduler and average too.

        It holds plain values and tensors: policy, decision of `auto`, loss scale, and the accumulated gradients.
        Training continues from it bit for bit. An unfinished trial of `auto` starts again.

        Args:
            fixed_keys: have the same keys at any time, for `torch.distributed.checkpoint`, which loads into the keys of
                another state. Gradients are then part of every state: zeros where nothing is accumulated.

        Raises:
            UsageError: gradients of an open window that `fully_shard` has not reduced yet.
        """
        return training_state.save(self, fixed_keys=fixed_keys)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` saved, or the state of a `torch.amp.GradScaler` or `mezzo.GradScaler`.

        The precision stays, except that `auto` takes the saved decision. A loss scale is loaded if both sides have one
        of the same kind.

        Raises:
            UsageError: a state of another kind, or accumulated gradients with another `accumulate` or parameter count.
        """
        training_state.load(self, state)

    def _make_way(self) -> None:
        """Close this one for a new one of the same model: in a notebook, a cell that is run again."""
        name, seen = type(self.model).__name__, self._window.seen
        lost = f" The gradients of its {seen} accumulated losses were dropped." if seen else ""
        warnings.warn(
            f"MixedPrecision: this replaces the MixedPrecision that was made for this {name} before, which is closed "
            f"now.{lost} To avoid this warning, call close() on it first.",
            stacklevel=4,
        )
        if seen:
            self._drop_step()
        self.close()

    def _go_on(self) -> None:
        """Be open as before: the one that would have replaced this one could not be made."""
        self._resolved.enter(self.policy)
        _ALIVE.add(self)

    def close(self) -> None:
        """Release the parameters and the model's overrides, so that another MixedPrecision may have them.

        16-bit weights stay as they are; the optimizer holds their masters, so give both to the next MixedPrecision.
        `mezzo.master_state_dict` gives the weights in FP32. Call `flush()` first: an open window is dropped.
        """
        if seen := self._window.seen:
            if sys.exc_info()[0] is None:  # else an error has ended the loop
                warnings.warn(
                    f"close(): {seen} of {self.accumulate} losses were accumulated and are dropped. To step with them, "
                    "call mp.flush() first.",
                    stacklevel=2,
                )
            self._drop_step()
        _ALIVE.discard(self)
        self.__dict__["autocast"] = checks.closed
        self._buffers.forget()
        self._journal.flush()
        self._stop_observing()
        self._resolved.end()
        self._let_go()


def _step_begins(owner: ref[MixedPrecision], optimizer: Any, args: Any, kwargs: Any) -> None:
    """The hook of an optimizer; no method, because the optimizer must not keep its MixedPrecision alive."""
    mp = owner()
    if mp is None or mp._steps:
        return
    begun = not mp._looks or mp._stored_as[0] != "fp32"  # else the step may be one before this training
    if mp._window.seen:
        mp._window.refuse_step(optimizer)
    elif begun and mp._does_more:
        told = _OWN_STEP.format(", ".join(mp._does_more))
        if told not in mp._told and backward.has_gradient(optimizer):
            mp._warn_once(told)


def drop_windows(models: Collection[nn.Module]) -> None:
    """Drop the losses that are accumulated for any of these models, as an error in `step` does."""
    for mp in _ALIVE:
        if mp.model in models and mp._window.seen:
            mp._drop_step()
