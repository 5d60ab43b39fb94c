"""An investigation replays the calls of a skipped step, reports the first value that was not finite, tries remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.core.loss_scale import LossScale
from mezzo.core.overflow import OUTSIDE, SUM, OverflowReport
from mezzo.core.policy import policy as policy_of
from mezzo.core.remedies import MODULES, POLICY, added, remedies, training_code, with_fix
from mezzo.pytorch.autocast.context import context_of
from mezzo.pytorch.autocast.modules import apply_module_overrides, fitting
from mezzo.pytorch.hardware import native_formats
from mezzo.pytorch.module_paths import path_of
from mezzo.pytorch.monitor.backward_trace import BackwardTrace, replay_backward, report_at
from mezzo.pytorch.monitor.forward_trace import ForwardTrace, Operation
from mezzo.pytorch.monitor.operations import facts, finite, in_one_line, over
from mezzo.pytorch.monitor.replay import SavedCall
from mezzo.pytorch.nested import tensors

_PASSED = 8  # propagators that are reported
_CHAIN = 3  # remedies that are combined at most, where each alone only moves the overflow
_TRIALS = 6  # combinations of each length that are tried
_ABSORBED = "; {} still overflows and a later operation absorbs it: try mezzo calibrate next"
# What is not finite under another policy, None if all is; and what still overflows, and is absorbed.
_Left = tuple[OverflowReport | None, Operation | None]
_Pairs = Sequence[tuple[Tensor, Tensor]]  # outputs on the graph, each with its gradient


def investigate(
    calls: Sequence[SavedCall],
    scales: Mapping[int, float],
    in_loss: OverflowReport | None,
    outside: Mapping[int, BackwardTrace],
) -> tuple[OverflowReport, SavedCall | None]:
    """The source of the first value that is not finite, and the call in which it was, if in one. `scales` and `outside`
    have a backward's number as key.
    """
    # In this order, because each explains the later ones: a value that reached a call's output; the loss; a gradient
    # outside of the calls; a gradient within a call.
    notes: list[str] = []
    backwards: list[tuple[OverflowReport, SavedCall | None]] = []
    missed = False
    for call in calls:
        found, forward = None, False
        try:
            found, forward = _replayed(call, scales, outside)
        except Exception as error:  # the user's code runs again here, and may not expect that
            missed = True
            notes.append(f"a model call could not be run again: {in_one_line(error)}")
        if hasattr(call.model, "_orig_mod") and not missed:
            notes.append("the compiled model was run again without compilation")
        if found is not None and forward:
            return _noted(found, notes), call
        if found is not None:
            backwards.append((found, call))
    if in_loss is not None and missed and in_loss.cause == "loss":
        return OverflowReport("unknown", note="; ".join(notes)), None
    live = [replace(one.found, how="live") for one in outside.values() if one.found is not None]
    if in_loss is not None:
        if in_loss.cause == "loss" and (slope := next((one for one in live if one.alarms), None)):
            notes.append(f"in backward, {slope.op} is the first operation whose gradient is not finite")
        return _noted(replace(in_loss, how="live"), notes), None
    # Alarms come first: a loss scale that is too large does not explain them.
    candidates = [*((one, None) for one in live), *backwards[::-1]]
    if candidates:
        found, place = next((pair for pair in candidates if pair[0].alarms), candidates[0])
        return _noted(found, notes), place
    note = "; ".join(notes) or "all model calls of the step were finite when run again" * bool(calls)
    return OverflowReport("unknown", note=note), None


def _noted(report: OverflowReport, notes: Sequence[str]) -> OverflowReport:
    note = "; ".join(dict.fromkeys((*notes, *filter(None, [report.note]))))
    return replace(report, note=note, propagators=list(dict.fromkeys(report.propagators))[:_PASSED])


def _replayed(
    call: SavedCall, scales: Mapping[int, float], outside: Mapping[int, BackwardTrace]
) -> tuple[OverflowReport | None, bool]:
    """What its forward produced, or else its backward; and whether it was forward."""
    if call.written:
        raise RuntimeError("the model's inputs were changed in place after they were used")
    if any(isinstance(module, nn.SyncBatchNorm) for module in call.inner.modules()):
        raise RuntimeError("the model has SyncBatchNorm, whose ranks would wait for each other")
    with call.again() as given:
        trace, outputs, found = _traced(call, given, call.enter)
        if found is not None:
            return found, True
        for number in call.grads.keys() & scales.keys():
            came, scale = call.gradients(number, outputs), scales[number]
            if all(finite(grad) for _, grad in came):
                found = _backward(trace, came, scale)
            else:
                found = _came_so(trace, came, scale, outside.get(number), call)
            if found is not None:
                return found, False
    return None, False


def _traced(
    call: SavedCall, given: tuple[Any, Any], enter: Callable[[], AbstractContextManager[Any]]
) -> tuple[ForwardTrace, list[Tensor], OverflowReport | None]:
    """Run a call's forward in a context: the trace, the outputs, and what produced the first that is not finite."""
    args, kwargs = given
    named = [(f"input {n}", tensor) for n, tensor in enumerate(tensors(given, objects=True))]
    trace = ForwardTrace([call.root], named, stop=_traced.__code__, called=call.line)
    with enter(), trace.watching():
        output = call.inner(*args, **kwargs)
    if trace.trouble:
        raise RuntimeError(trace.trouble)
    outputs = list(tensors(output))
    reached = [operation for tensor in outputs if (operation := trace.reached(tensor)) is not None]
    first = min((operation.root() for operation in reached), key=lambda pair: pair[0].number, default=None)
    return trace, outputs, None if first is None else first[1]


def _backward(trace: ForwardTrace, pairs: _Pairs, scale: float) -> OverflowReport | None:
    found = replay_backward(trace, pairs)
    if found is not None and scale > 1.0:
        unscaled = replay_backward(trace, [(output, over(grad, scale)) for output, grad in pairs])
        return replace(found, cause="loss scale") if unscaled is None else unscaled
    return found


def _came_so(
    trace: ForwardTrace, pairs: _Pairs, scale: float, outside: BackwardTrace | None, call: SavedCall
) -> OverflowReport | None:
    """Of gradients at a call's outputs that are not finite, unless an operation outside made them so."""
    # Whether the model also has a slope that is not finite. Else each of several uses sent a finite gradient.
    small = [(output, torch.full_like(output, 1.0 / max(1, output.numel()))) for output, _ in pairs]
    found = _backward(trace, small, 1.0)
    if found is not None and found.cause == "invalid":
        return found
    if outside is None or outside.found is not None:
        return None
    bad, grad = next((output, grad) for output, grad in pairs if not finite(grad))
    inside = any(bad.grad_fn is one for node in trace.operations for one, _ in node.next_functions)
    if not inside and outside.sent_to(call.number) < 2:
        return None
    module = trace.operations[bad.grad_fn].module if inside else OUTSIDE
    cause = "loss scale" if scale > 1.0 else "overflow"  # so few parts, each finite, and this much smaller
    return report_at(Operation(module, SUM), cause, (), [facts(grad, SUM)])


def remedies_for(
    report: OverflowReport,
    call: SavedCall | None,
    scales: Mapping[int, float],
    model: nn.Module | None,
    written: Callable[[str], str] = training_code,
    *,
    combines: bool = True,
    scaling: LossScale | None = None,
) -> list[str]:
    """What to try, each policy `written` as a command or as code, if it helps on the call and none that helps asks for
    less; up to three are combined if it `combines`. A policy for another model than `model` says so.
    """
    used, owner, has_bf16 = None, "", True
    if call is not None:
        native = native_formats(_device(call))
        has_bf16 = "bf16" in native or "fp16" not in native
        with call.enter() as context:
            used = getattr(context, "policy", None)
        if model is not None and path_of(call.inner, model) is None:
            owner = f", for the MixedPrecision of the model with that module ({type(call.inner).__name__})"
    kept: list[str] = []
    moving: dict[str, OverflowReport] = {}  # policies that help at most in part -> what they leave
    enough = False  # modules in FP32
    for sentence in remedies(report, used, has_bf16=has_bf16, scaling=scaling):
        found = None if report.cause == "loss scale" else POLICY.search(sentence)
        if found is not None:
            modules, whole = sentence.startswith(MODULES), found[1] in ("bf16", "fp32")
            if whole and combines and call is not None and used is not None and moving and not enough:
                combined = _combined(moving, call, scales)
                kept += [f"{added(combined, used)}: `{combined}`{owner}"] if combined is not None else []
            if call is None or (modules and enough):
                continue
            left, absorbed = _left_under(found[1], call, scales)
            if left is not None:
                moving[found[1]] = left
                continue
            enough |= not whole
            sentence += _ABSORBED.format(absorbed) if absorbed else ""
        kept.append(f"{sentence}{owner}" if found is not None and "module." in found[1] else sentence)
    return [with_fix(sentence, written) for sentence in kept]


def _combined(
    moving: Mapping[str, OverflowReport], call: SavedCall, scales: Mapping[int, float]
) -> str | None:
    """The first policy under which the call is finite, of those that add to these what fixes the next overflow."""
    tried = dict(moving)
    for _ in range(_CHAIN - 1):
        longer: dict[str, None] = {}
        for text, left in list(tried.items())[:_TRIALS]:
            quoted = (found[1] for one in remedies(left, policy_of(text)) if (found := POLICY.search(one)))
            longer |= dict.fromkeys(one for one in quoted if one not in ("bf16", "fp32", *moving))
        tried.clear()
        for text in list(longer)[:_TRIALS]:
            following, _ = _left_under(text, call, scales)
            if following is None:
                return text
            tried[text] = following
    return None


def _left_under(text: str, call: SavedCall, scales: Mapping[int, float]) -> _Left:
    """What is not finite in a call and its backward without the loss scale, under another policy."""
    try:
        with call.again() as given, _changed(text, call) as enter:
            trace, outputs, found = _traced(call, given, enter)
            # Before the overrides go: a checkpoint runs its modules again in backward.
            for number in call.grads:
                if found is None:
                    came, scale = call.gradients(number, outputs), scales.get(number, 1.0)
                    found = replay_backward(trace, [(out, _unscaled(grad, out, scale)) for out, grad in came])
            over = (one for one in trace.operations.values() if one.kind == "overflow")
            return found, next((one for one in over if one.outputs[0].format != "fp32"), None)
    except Exception:  # of the user's code, or of a policy that this model can't have
        return OverflowReport("unknown"), None


@contextmanager
def _changed(text: str, call: SavedCall) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """The call's model under another policy: yields what makes its autocast context."""
    device = _device(call)
    policy = fitting(policy_of(text), call.root)  # under `mezzo run` it names other models' modules too
    with apply_module_overrides(call.root, policy, device) if policy.modules else nullcontext():
        yield partial(context_of, policy, device)


def _device(call: SavedCall) -> str:
    return next((p.device.type for p in call.inner.parameters()), "cpu")


def _unscaled(grad: Tensor, output: Tensor, scale: float) -> Tensor:
    """A gradient at an output without the loss scale; as small as a mean's where it is not finite."""
    if not finite(grad):
        return torch.full_like(output, 1.0 / max(1, output.numel()), dtype=torch.float32).to(output.dtype)
    return over(grad, scale, output.dtype)
