"""Optimizers of a run: each step is written down, and in fp16 one whose gradients are not finite is not
taken.

A step is vetoed by not calling it. Gradients are never hidden for that: optimizers that read `p.grad.data`
would crash. What is wrapped is each optimizer class's `step`, at the place where PyTorch itself wraps it
for its profiler (`Optimizer._patch_step_function`, when the first instance is made), so a subclass with its
own `step`, and a learning-rate scheduler that wraps the instance's, find what they expect.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from mezzo.core.errors import LossScaleCollapseError
from mezzo.pytorch.launch.quiet import quiet
from mezzo.pytorch.launch.veto import Veto, holds_finite
from mezzo.pytorch.scaling.closure import AbandonedStepError, ClosureRunner

if TYPE_CHECKING:
    from mezzo.core.records import Record
    from mezzo.pytorch.launch.session import Session
    from mezzo.pytorch.launch.watch import StepWatch

Step = Callable[..., Any]


class Steps:
    """Stands between the script and its optimizers.

    Args:
        session: the run.
        veto: who knows of gradients that are not finite.
        watch: observes one early step.
    """

    def __init__(self, session: Session, veto: Veto, watch: StepWatch) -> None:
        self._session = session
        self._veto = veto
        self._watch = watch
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()  # the dictionary forgets those that are gone
        self._inside: set[int] = set()
        self._wrapped: list[tuple[Any, Any]] = []
        # Modules whose calls are part of a compiled function: nothing of ours runs before their forward pass, so
        # what it starts from is remembered at the end of the step before.
        self.traced: weakref.WeakSet[Any] = weakref.WeakSet()

    def make_patch_step_function(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """The `Optimizer._patch_step_function` of a run."""

        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> None:
            own = [base for base in type(optimizer).__mro__ if "step" in vars(base) and base is not Optimizer]
            for base in own[1:]:
                self._look_within(base)
            original(optimizer)
            self._session.networks.optimizer_made(self._veto.owned())
            self._session.optimizers.add(optimizer)
            self._session.optimizers_made += 1
            kind: Any = type(optimizer)
            if not hasattr(kind.step, "_mezzo_steps"):
                before = kind.__dict__.get("step")
                self._wrapped.append((kind, before))
                kind.step = self._wrap(kind.step)

        return _patch_step_function

    def make_zero_grad(self, original: Callable[..., None]) -> Callable[..., None]:
        """The `Optimizer.zero_grad` of a run that scales."""

        @functools.wraps(original)
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._veto.forget(optimizer)

        return zero_grad

    def undo(self) -> None:
        """Give every optimizer class its own `step` back."""
        for kind, before in reversed(self._wrapped):
            if before is None:
                del kind.step
            else:
                kind.step = before
        self._wrapped.clear()

    def _wrap(self, step: Step) -> Step:
        @functools.wraps(step)
        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._session.left_alone is not None or id(optimizer) in self._inside:
                return step(optimizer, *args, **kwargs)
            if self._session.stand_ins and _was_adopted(optimizer):
                # The script has kept `optimizer.step` (in `torch.compile(optimizer.step)`) from before its work was
                # taken over: torch's own step would move 16-bit weights without their masters.
                return optimizer.step(*args, **kwargs)
            self._inside.add(id(optimizer))
            try:
                return self._step(step, optimizer, args, kwargs)
            finally:
                self._inside.discard(id(optimizer))

        stepping._mezzo_steps = self  # type: ignore[attr-defined]
        stepping._torchdynamo_disable = True  # type: ignore[attr-defined]
        return stepping

    def _look_within(self, kind: Any) -> None:
        """Look again where a subclass calls this class's `step`: it may have changed gradients, by `all_reduce`."""
        step = vars(kind)["step"]
        if hasattr(step, "_mezzo_within"):
            return

        @functools.wraps(step)
        def within(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            closure = args[0] if args else kwargs.get("closure")  # which computes the gradients later
            if closure is None and type(optimizer) is not kind and id(optimizer) in self._inside:
                self._abandon_unless_finite(optimizer)
            return step(optimizer, *args, **kwargs)

        within._mezzo_within = within._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._wrapped.append((kind, step))
        kind.step = within

    def _abandon_unless_finite(self, optimizer: Any, *_: Any) -> None:
        if self._session.scaling and not holds_finite(optimizer):
            raise AbandonedStepError

    def _step(self, step: Step, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        closure = args[0] if args and callable(args[0]) else kwargs.get("closure")
        if closure is not None:
            session.companions.closure_begins()
            try:
                return self._step_with_closure(step, optimizer, closure, args, kwargs)
            finally:
                session.companions.resume()
        if session.companions.listening:
            session.companions.update_begins(self._of_the_script(optimizer))
        scale = session.scale.scale
        last: Any = None
        try:
            if session.scaling:
                if self._veto.forbids(optimizer):
                    raise AbandonedStepError
                hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or _global_optimizer_pre_hooks
                if hooks:  # which may change gradients: look after them
                    last = optimizer.register_step_pre_hook(self._abandon_unless_finite)
            result = step(optimizer, *args, **kwargs)
        except AbandonedStepError:
            self._done(optimizer, moved=False, scale=scale, reason="a gradient was not finite")
            return None
        except BaseException:
            session.companions.step_dropped()
            raise
        finally:
            if last is not None:
                last.remove()
        self._done(optimizer, moved=True, scale=scale)
        return result

    def _step_with_closure(
        self, step: Step, optimizer: Any, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A closure whose gradients are not finite is run again at S/2, within the step, until they are.

        Where no scale helps the step is undone; it returns the closure's loss, as scripts expect of a closure.
        """
        session = self._session
        if not session.scaling:
            result = step(optimizer, *args, **kwargs)
            self._done(optimizer, moved=True, scale=1.0)
            return result
        loss: Any = None
        again = 0

        def evaluate(*inner_args: Any, **inner_kwargs: Any) -> tuple[Any, bool]:
            nonlocal loss
            loss = closure(*inner_args, **inner_kwargs)
            return loss, not self._veto.forbids(optimizer)

        def back_off() -> bool:
            nonlocal again
            if session.scale.scale <= getattr(session.scale, "floor", session.scale.scale):
                return False
            again += 1
            session.reruns += 1
            self._observe(optimizer, found_inf=True)
            return True

        runner = ClosureRunner(optimizer, evaluate, back_off, copies=_evaluates_again(optimizer))
        if args:
            args = (runner, *args[1:])
        else:
            kwargs = {**kwargs, "closure": runner}
        scale = session.scale.scale
        try:
            result = step(optimizer, *args, **kwargs)
        except AbandonedStepError:
            runner.restore()
            self._done(optimizer, moved=False, scale=scale, reason="a gradient of the closure was not finite")
            return loss
        reason = f"closure run again {again} times at a smaller loss scale" if again else ""
        self._done(optimizer, moved=True, scale=session.scale.scale, reason=reason)
        return result

    @quiet
    def _observe(self, optimizer: Any, *, found_inf: bool) -> None:
        number = self._number(optimizer)
        try:
            self._session.observe(found_inf=found_inf, optimizer=number)
        except LossScaleCollapseError as collapse:
            its = [record.finding for record in self._session.journal.findings if record.optimizer == number]
            culprit = next((finding for finding in reversed(its) if finding.alarms), its[-1] if its else None)
            told = collapse if culprit is None else collapse.named(culprit)
            if len(self._numbers) > 1:
                kind = type(self._of_the_script(optimizer)).__name__
                which = f"optimizer {number} ({kind}; counted from 0, in the order of their first steps)"
                told = LossScaleCollapseError(f"{which} does not move: {told}")
            raise told from None

    def _number(self, optimizer: Any) -> int:
        """The optimizer's place in the order of their first steps."""
        whose = self._of_the_script(optimizer)
        number = self._numbers.get(whose)
        if number is None:
            number = self._numbers[whose] = next(self._next)
        return number

    @quiet
    def _done(self, optimizer: Any, *, moved: bool, scale: float, reason: str = "") -> None:
        """A step was taken, or not: all is written down before the scale may collapse, or the script be ended."""
        session, scaled = self._session, self._session.scaling
        if session.trial is not None:
            session.trial.finish(counts=moved)
        number = self._number(optimizer)
        seen: list[Record] = []
        if session.companions.listening:
            seen = session.companions.update_ended(
                self._of_the_script(optimizer),
                index=session.journal.updates,
                number=number,
                skipped=not moved,
                loss_scale=scale,
            )
        if session.networks:
            session.networks.step_ended(
                (p for group in optimizer.param_groups for p in group["params"]),
                not moved,
                self._veto.owned,
                alone=len(session.optimizers) == 1,
            )
        if self.traced and session.scaling:
            for module in self.traced:
                session.networks.call(module)
        # Looking costs time as well: no timing may use such a step.
        observed = self._watch.running or bool(seen)
        session.journal.update(number, moved=moved, loss_scale=scale, reason=reason, observed=observed)
        if seen:
            session.journal.seen(seen)
        self._watch.after_update(number, moved=moved)
        if scaled:
            self._observe(optimizer, found_inf=not moved)
        if session.trial is not None and session.trial.decision is not None:
            session.decide(session.trial.decision)
        if number == 0:
            session.journal.stop_after(session.request.stop_after)

    def _of_the_script(self, optimizer: Any) -> Any:
        stand_ins = self._session.stand_ins
        return stand_ins.get(optimizer, optimizer) if stand_ins else optimizer


def _was_adopted(optimizer: Any) -> bool:
    from mezzo.pytorch.optim.adopt import Adopted

    return isinstance(optimizer, Adopted)


def _evaluates_again(optimizer: Any) -> bool:
    """Whether a step may call its closure once more after it has moved weights: torch's do not, but for LBFGS."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith(("torch.", "mezzo."))
