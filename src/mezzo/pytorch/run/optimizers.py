"""Optimizers of a run: each step is recorded, and in fp16 one whose gradients are not finite is not called.

Each optimizer class's `step` is wrapped where PyTorch wraps it for its profiler, when the first instance is made. So a
subclass with its own `step`, and a learning-rate scheduler that wraps the instance's, find what they expect.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale
from mezzo.pytorch.distributed import ALONE, is_distributed
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.kernels.not_traced import breaks_graph, not_traced
from mezzo.pytorch.optim.adopt import Adopted
from mezzo.pytorch.optim.checks import refuse_replaced
from mezzo.pytorch.optim.with_masters import WithMasters
from mezzo.pytorch.run.backward import Attempts, Flags, FoundInf
from mezzo.pytorch.run.ranks import all_without_gradients
from mezzo.pytorch.run.weights import STEPS, LostUpdates, Masters, Storage, lowered
from mezzo.pytorch.step import AbandonedStepError, check_finite, is_finite, parameters, step_with_closure
from mezzo.pytorch.training.checks import needs_closure

if TYPE_CHECKING:
    from mezzo.core.records import Record
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.lifecycle import StepWatch

Step = Callable[..., Any]
_BY_SCRIPT = "the script's own mixed precision found a gradient that was not finite"


class Overflows:
    """Whether an optimizer must skip: one of its gradients is not finite, or was not before the script clipped it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.flags: defaultdict[int, Flags] = defaultdict(list)  # of each leaf's gradient, by the leaf's id
        self.attempts: Attempts | None = None  # of the current backward
        self.latest: dict[int, LossScale] = {}  # `spent` of the latest pass, or call of `autograd.grad`
        self.before: LossScale | None = None  # when another step had used the gradients of the present one
        self.where = ""  # where the last gradient that was not finite was found, if several ranks were asked

    @not_traced
    def owned(self) -> set[int]:
        """The ids of all parameters of all optimizers alive."""
        return {id(p) for optimizer in self._session.optimizers for p in parameters(optimizer)}

    @not_traced
    def remember(self, leaves: Sequence[Tensor], found: FoundInf) -> None:
        """These leaves are about to receive gradients, with flags in `found`."""
        if self.attempts is not None:
            self.attempts.found.append(found)
        if torch._C._current_graph_task_id() == -1:
            self.latest = found.spent
        found.spent = self.latest
        self._session.ranks.backward_begins(leaves)
        for index, (leaf, owner) in enumerate(zip(leaves, self._session.ranks.owners(leaves))):
            key = id(owner)
            # A gathered parameter's gradients may be kept unsharded, where only `fully_shard` sees them.
            earlier = () if leaf.grad is None and leaf is owner else self.flags.get(key, ())
            self.flags[key] = [*(flag for flag in earlier if not flag[0].spent), (found, index)]

    @not_traced
    def lacks_gradients(self, optimizer: Any) -> bool:
        """Whether this rank has no gradients; UsageError if ranks that decide together with it have some."""
        if not is_distributed() or any(p.grad is not None for p in parameters(optimizer)):
            return False
        if (ranks := self._session.ranks.of(list(parameters(optimizer)))) and self._session.store is not None:
            all_without_gradients(self._session, ranks)
        else:
            self._session.journal.note(
                f"on rank {dist.get_rank()} an optimizer's step() was called without gradients, so it changed nothing. "
                "If other ranks had gradients, this rank is a step behind them: call backward() on every rank"
            )
        return True

    @not_traced
    def found_inf(self, optimizer: Any) -> bool:
        """Whether the optimizer must skip its step; waits for the device. All ranks get the same answer."""
        self.before = None
        if self.lacks_gradients(optimizer):
            # No rank is asked: this one's next backward and step meet those that the others run now.
            return False
        params = list(parameters(optimizer))
        flagged = self._flagged(optimizer, params) and not self._session.ranks.averages_only(params)
        return self.agreed(flagged or not check_finite(optimizer), params, began=flagged)

    def agreed(self, bad: bool, params: list[Tensor], *, began: bool = False) -> bool:
        """Whether one of the ranks must skip, which then has all skip; all take the smallest of their loss scales."""
        session, self.where = self._session, ""
        ranks = session.ranks.of(params)
        if not ranks:
            return bad
        place = dist.get_world_size() - dist.get_rank()  # so that the largest is that of the first rank
        scale = session.scale.scale
        found, first, source, smallest = ranks.largest(bad, bad * place, began * place, -scale)
        if found:
            self.where = f" on rank {dist.get_world_size() - int(source or first)}"
        if -smallest != scale and isinstance(session.scale, DynamicLossScale):
            session.scale = replace(session.scale, scale=-smallest)
        return bool(found)

    def _flagged(self, optimizer: Any, params: list[Tensor]) -> bool:
        """Whether a flag says that a gradient was not finite; each is read once per optimizer."""
        key = id(optimizer)
        flags = [flag for p in params if p.grad is not None for flag in self.flags.get(id(p), ())]
        read = {found: found.read() for found in dict(flags) if key not in found.spent}
        passes = [found.spent for found in read]
        # Without new flags the gradients are those of its last step, or the script has put them there.
        if not read and (key not in self.latest or any(found.spent is self.latest for found, _ in flags)):
            passes = [self.latest]
        self.before = next((scale for one in passes for scale in one.values()), None)
        for one in passes:
            one.setdefault(key, self._session.scale)
        return any(found in read and read[found][index] for found, index in flags)


@dataclass(slots=True)
class Known:
    """What is known of one optimizer of the script."""

    optimizer: weakref.ref[Any]
    number: int | None = None  # its place in the order of first steps, from its own on
    inside: bool = False  # whether its step runs now
    unmeasured: int | None = None  # steps whose lost updates are still to be measured, from the first on
    is_plain: bool = False  # whether its next steps are only counted, where `session.only_counts`


class Steps:
    """Wraps the steps of the script's optimizers."""

    def __init__(self, session: Session, watch: StepWatch) -> None:
        self._session = session
        self.overflows = Overflows(session)
        self._watch = watch
        self.lost, self.masters, self.storage = LostUpdates(session), Masters(session), Storage(session)
        self.done = 0  # steps taken or skipped
        self.loss_scale = 1.0  # of the script's own GradScaler, during its step
        self._known: dict[int, Known] = {}  # by id: a WeakKeyDictionary is slow
        self._next = itertools.count()
        # Modules that a compiled function calls: their running statistics are saved at the end of the step before.
        self.traced: weakref.WeakSet[Any] = weakref.WeakSet()

    def _of(self, optimizer: Any) -> Known:
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            key = id(optimizer)
            known = Known(weakref.ref(optimizer, lambda _: self._known.pop(key, None)))
            self._known[key] = known
        return known

    def make_patch_step_function(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """The `Optimizer._patch_step_function` of a run."""

        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> None:
            kinds = [one for one in type(optimizer).__mro__ if "step" in vars(one) and one is not Optimizer]
            for base in kinds[1:]:
                self._check_within(base)
            original(optimizer)
            self._session.networks.optimizer_made(self.overflows.owned())
            self._session.optimizers.add(optimizer)
            self._session.optimizers_made += 1
            kind: Any = type(optimizer)
            if not hasattr(kind.step, "_mezzo_steps"):
                own = kind.__dict__.get("step")
                put_back = functools.partial(setattr, kind, "step", own)
                self._session.undo.append(put_back if own else functools.partial(delattr, kind, "step"))
                kind.step = self._wrap(kind.step)

        return _patch_step_function

    def _wrap(self, step: Step) -> Step:
        session, known_of = self._session, self._known.get

        @functools.wraps(step)
        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            known = known_of(id(optimizer))
            if known is None or known.optimizer() is not optimizer:
                known = self._of(optimizer)
            if known.inside:
                return step(optimizer, *args, **kwargs)
            is_own = type(optimizer).step is stepping  # else it has got masters since
            if known.is_plain and is_own and session.only_counts and not args and not kwargs:
                known.inside = True
                try:
                    result = step(optimizer)
                finally:
                    known.inside = False
                session.journal.count(known.number)
                return result
            return anyhow(known, optimizer, args, kwargs)

        def anyhow(known: Known, optimizer: Any, args: Any, kwargs: Any) -> Any:
            if session.left_alone is not None:
                return self._taken(known, step, optimizer, args, kwargs)
            closure = _closure(args, kwargs) if args or kwargs else None
            if closure is not None:  # calls the model, which must find the optimizer adopted
                self.storage.adopt(optimizer)
            is_swapped = isinstance(optimizer, WithMasters) and optimizer._is_swapped
            has_masters = isinstance(optimizer, (Adopted, WithMasters)) and not is_swapped
            # `optimizer.step` from before the optimizer got masters (as in `torch.compile(optimizer.step)`):
            # torch's own step would move 16-bit weights without their masters.
            is_former = has_masters and type(optimizer).step is not stepping
            if is_former or (session.request.masters and self.masters.supply(optimizer)):
                return optimizer.step(*args, **kwargs)
            # Part of a step that its ranks have decided: ZeroRedundancyOptimizer has an inner optimizer on each rank.
            outers = [one.optimizer() for one in self._known.values() if one.inside]
            if any(set(parameters(optimizer)).issubset(parameters(outer)) for outer in outers if outer):
                return self._taken(known, step, optimizer, args, kwargs)
            known.inside = True
            try:
                return self._step(known, step, optimizer, closure, args, kwargs)
            finally:
                known.inside = False

        stepping._mezzo_steps = self  # type: ignore[attr-defined]
        return breaks_graph(stepping, inner="DEFAULT")

    def _check_within(self, kind: Any) -> None:
        """Check again where a subclass calls this class's `step`: it may have changed gradients, by `all_reduce`."""
        step = vars(kind)["step"]
        if hasattr(step, "_mezzo_within"):
            return

        @functools.wraps(step)
        def within(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            is_last = type(optimizer) is kind or not self._of(optimizer).inside
            if not is_last and _closure(args, kwargs) is None:
                self._abandon_unless_finite(optimizer)
            return step(optimizer, *args, **kwargs)

        within._mezzo_within = True  # type: ignore[attr-defined]
        self._session.undo.append(functools.partial(setattr, kind, "step", step))
        kind.step = breaks_graph(within, inner="DEFAULT")

    @not_traced
    def _abandon_unless_finite(self, optimizer: Any, *_: Any, bad: bool = False) -> None:
        """Look again after hooks, or a subclass, that may have changed the gradients."""
        if not self._session.scaling:
            return
        if self.overflows.agreed(bad or not check_finite(optimizer), list(parameters(optimizer)), began=bad):
            raise AbandonedStepError

    def _taken(self, known: Known, step: Step, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Take the step; the first ones are measured if 16-bit weights have no masters."""
        if known.unmeasured is None:
            known.unmeasured = STEPS if any(True for _ in lowered(optimizer)) else 0
        if not known.unmeasured:
            return step(optimizer, *args, **kwargs)
        with self.lost.measured(optimizer, known):
            return step(optimizer, *args, **kwargs)

    def _step(self, known: Known, step: Step, optimizer: Any, closure: Any, args: Any, kwargs: Any) -> Any:
        session, observers = self._session, self._session.observers
        if known.number is None:
            low = next((name_of(param.dtype) for _, param in lowered(optimizer)), None)
            ends = session.request.own in ("off", "refuse") and not self.storage.wanted
            if low and ends and not session.lowered_weights:  # no call of a module with them was seen
                why = f"{type(optimizer).__name__} trains {low} parameters"
                session.stand_back(why, "make them FP32, for example torch.nn.Parameter(tensor.float())")
            try:
                refuse_replaced(optimizer)
            except UsageError as error:
                session.fatal = error
                raise
        if closure is not None:
            with observers.closure():
                return self._step_with_closure(known, step, optimizer, closure, args, kwargs)
        if session.observes and observers.listening:
            observers.tell("update_begins", optimizer, 1.0)  # `.grad` is unscaled
        scale = session.scale.scale
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or _global_optimizer_pre_hooks
        last: Any = None
        try:
            if not session.scaling:
                self.overflows.lacks_gradients(optimizer)
            else:
                bad = self.overflows.found_inf(optimizer)
                # A rank that decides alone runs the hooks, which may reduce gradients by hand.
                in_hooks = hooks and is_distributed() and not session.ranks.of(list(parameters(optimizer)))
                if bad and not in_hooks:
                    raise AbandonedStepError
                if hooks:  # they may change gradients: check after them
                    again = functools.partial(self._abandon_unless_finite, bad=bad)
                    last = optimizer.register_step_pre_hook(again)
            result = self._taken(known, step, optimizer, args, kwargs)
        except AbandonedStepError:
            why = f"a gradient was not finite{self.overflows.where}"
            self._done(optimizer, moved=False, scale=scale, reason=why)
            return None
        except BaseException:
            observers.tell("step_dropped")
            raise
        finally:
            if last is not None:
                last.remove()
        if session.records_own:
            skips = getattr(optimizer, "found_inf", None)  # a fused optimizer's, from the script's GradScaler
            self.ended_by_script(optimizer, moved=skips is None or not bool(skips))
        else:
            self._done(optimizer, moved=True, scale=scale)
            known.is_plain = self._is_plain(known)
        return result

    def _is_plain(self, known: Known) -> bool:
        """Whether the next steps of this optimizer need no more than to be counted, where `session.only_counts`."""
        request = self._session.request
        changes = self._session.policy.bf16_from != "none" or request.masters or self.storage.wanted
        watches = self._watch.wanted or known.unmeasured or request.stop_after is not None
        return not (changes or watches) and self._session.has_settled()

    def ended_by_script(self, optimizer: Any, *, moved: bool) -> None:
        """The script's own mixed precision skipped a step, or took it without calling the optimizer's."""
        self._done(optimizer, moved=moved, scale=self.loss_scale, reason="" if moved else _BY_SCRIPT)

    def _step_with_closure(
        self, known: Known, step: Step, optimizer: Any, closure: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a closure that the step needs again at S/2 until its gradients are finite, or undo the step."""
        session = self._session
        if not session.scaling:
            result = self._taken(known, step, optimizer, args, kwargs)
            self._done(optimizer, moved=True, scale=1.0)
            return result
        again, repeats = 0, needs_closure(optimizer)  # else, as under Lightning, an overflow skips the step
        seen: list[Any] = []  # found before the step is undone, with the weights of its last evaluation

        def evaluate(*inner_args: Any, **inner_kwargs: Any) -> tuple[Any, bool]:
            session.observers.tell("step_dropped")
            session.ranks.of_closure, session.journal.last_loss = {}, None
            loss = closure(*inner_args, **inner_kwargs)
            finite = not self.overflows.found_inf(optimizer)
            if finite:
                seen.clear()
            elif not any(one.finding.alarms for one in seen):  # else that of a larger scale explains this one
                seen[:] = self._explained(optimizer, skipped=True, scale=session.scale.scale)
            return loss, finite

        def back_off(loss: Any) -> bool:
            nonlocal again
            at_floor = session.scale.scale <= getattr(session.scale, "floor", session.scale.scale)
            bad = not (is_finite(loss) and is_finite(session.journal.last_loss))  # perhaps it returns no loss
            if not repeats or at_floor or self.overflows.agreed(bad, list(parameters(optimizer)), began=bad):
                return False
            again += 1
            session.reruns += 1
            self._observe(optimizer, found_inf=True)
            return True

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        scale = session.scale.scale
        # Torch's optimizers do not call a closure once more after they have moved weights, but for LBFGS.
        copies = repeats or not type(optimizer).__module__.startswith(("torch.", "mezzo."))
        result, skipped = step_with_closure(
            optimizer,
            lambda runner: step(optimizer, runner, *args[1:], **rest),
            evaluate,
            back_off,
            copies=copies,
        )
        reason = f"closure run again {again} times at a smaller loss scale" if again else ""
        if skipped:
            reason = f"a gradient of the closure was not finite{self.overflows.where}"
            if again and isinstance(session.scale, DynamicLossScale):  # no smaller scale helped
                session.scale = replace(session.scale, scale=scale)
        scale = scale if skipped else session.scale.scale
        self._done(optimizer, moved=not skipped, scale=scale, reason=reason, seen=seen)
        return result

    @not_traced
    def _observe(self, optimizer: Any, *, found_inf: bool) -> None:
        number = self._number(optimizer)
        try:
            self._session.observe(found_inf=found_inf, optimizer=number, before=self.overflows.before)
        except LossScaleCollapseError as collapse:
            reports = [one.finding for one in self._session.journal.findings if one.optimizer == number]
            culprit = next((one for one in reversed(reports) if one.alarms), reports[-1] if reports else None)
            error = collapse if culprit is None else collapse.named(culprit)
            if sum(known.number is not None for known in self._known.values()) > 1:
                which = f"{type(optimizer).__name__}; counted from 0, in the order of their first steps"
                error = LossScaleCollapseError(f"optimizer {number} ({which}) does not move: {error}")
            raise error from None

    def _number(self, optimizer: Any) -> int:
        """The optimizer's place in the order of their first steps."""
        known = self._of(optimizer)
        if known.number is None:
            known.number = next(self._next)
        return known.number

    def _explained(self, optimizer: Any, *, skipped: bool, scale: float) -> list[Record]:
        """What the observers record about a step, or about an evaluation of its closure."""
        session = self._session
        if not session.observers.listening:
            return []
        how = {"index": session.journal.updates, "number": self._number(optimizer)}
        session.observers.tell("update_ended", optimizer, **how, skipped=skipped, loss_scale=scale)
        return session.observers.drained()

    @not_traced
    def _done(
        self, optimizer: Any, *, moved: bool, scale: float, reason: str = "", seen: list[Record] | None = None
    ) -> None:
        """A step was taken, or skipped: all is recorded before the scale may collapse, or the script be ended."""
        session, trial, ranks = self._session, self._session.trial, ALONE
        self.done += 1
        if trial is not None:
            trial.finish(counts=moved)
            if ranks := session.ranks.of(list(parameters(optimizer))):
                trial.agree(ranks)
        session.ranks.step_ended(list(parameters(optimizer)), skipped=session.scaling and not moved)
        number = self._number(optimizer)
        if seen is None:
            seen = self._explained(optimizer, skipped=not moved, scale=scale) if session.observes else []
        if session.scaling or session.networks.hold_copies:
            alone = len(session.optimizers) == 1
            session.networks.step_ended(parameters(optimizer), not moved, self.overflows.owned, alone=alone)
        for module in self.traced if session.scaling else ():
            session.networks.call(module)
        # Observing costs time: no timing may use such a step.
        observed = self._watch.running or bool(seen)
        session.journal.update(number, moved=moved, loss_scale=scale, reason=reason, observed=observed)
        if seen:
            session.journal.seen(seen)
        self._watch.after_update(number, moved=moved)
        if session.scaling:
            self._observe(optimizer, found_inf=not moved)
        if trial is not None and trial.decision is not None and (ranks or not session.ranks.any):
            session.decide(trial.decision)
        if number == 0:
            session.counted()


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure of a step's arguments, which computes the gradients during the step."""
    return args[0] if args and callable(args[0]) else kwargs.get("closure")
