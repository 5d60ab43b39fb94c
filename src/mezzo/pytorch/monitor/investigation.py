"""An investigation replays the calls of a skipped step and reports the first value that was not finite, with remedies.

A remedy that names a policy is tried first: the call that failed is replayed once more under it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.core.overflow import OUTSIDE, SUM, OverflowReport
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.remedies import remedies
from mezzo.pytorch.autocast.context import autocast
from mezzo.pytorch.autocast.modules import apply_module_overrides, fitting
from mezzo.pytorch.monitor.backward_trace import BackwardTrace, Found, at, replay_backward
from mezzo.pytorch.monitor.forward_trace import ForwardTrace, Operation, finding_of
from mezzo.pytorch.monitor.module_paths import path_of
from mezzo.pytorch.monitor.operations import facts, finite, only_minus_infinity, over, tensors
from mezzo.pytorch.monitor.replay import SavedCall, nothing_left

_PASSED = 8  # propagators that are reported


def investigate(
    calls: Sequence[SavedCall],
    scales: Mapping[int, float],
    in_loss: Found | None,
    outside: Mapping[int, BackwardTrace],
) -> tuple[OverflowReport, SavedCall | None]:
    """Where the first value that isn't finite came from, and the call in which it was, if in one.

    In this order, because each explains the later ones: a value that reached a call's output; the loss; a gradient
    outside of the calls; a gradient within a call.

    Args:
        calls: those that a gradient of the step came to, in order.
        scales: number of a backward -> how many times its gradients are too large.
        in_loss: of a loss that isn't finite.
        outside: number of a backward -> what was seen of it outside of the calls.
    """
    notes: list[str] = []
    backwards: list[tuple[OverflowReport, SavedCall | None]] = []
    missed = False
    for call in calls:
        why_not = _cannot(call)
        if not why_not:
            if call.inner is not call.model and hasattr(call.model, "_orig_mod"):
                notes.append("a compiled model: run again as it was written, not as it was compiled")
            try:
                found, forward = _replayed(call, scales, outside)
            except Exception as error:  # the user's code runs again here, and may not expect that
                why_not = f"a call could not be run again: {told(error)}"
            else:
                if found is not None and forward:
                    return _noted(found, notes), call
                if found is not None:
                    backwards.append((found, call))
        if why_not:
            missed = True
            notes.append(why_not)
    if in_loss is not None and missed and in_loss.finding.cause == "loss":
        return OverflowReport("unknown", note="; ".join(notes)), None
    if in_loss is not None:
        return _noted(replace(in_loss.finding, how="live"), notes), None
    # Alarms come first: a loss scale that is too large does not explain them.
    live = [replace(one.found.finding, how="live") for one in outside.values() if one.found is not None]
    candidates: list[tuple[OverflowReport, SavedCall | None]] = [
        *((one, None) for one in live),
        *backwards[::-1],
    ]
    if candidates:
        finding, place = next((pair for pair in candidates if pair[0].alarms), candidates[0])
        return _noted(finding, notes), place
    return OverflowReport(
        "unknown", note="; ".join(notes) or "run again, every call of the step was finite"
    ), None


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _noted(finding: OverflowReport, notes: Sequence[str]) -> OverflowReport:
    note = "; ".join(dict.fromkeys((*notes, *filter(None, [finding.note]))))
    return replace(finding, note=note, propagators=list(dict.fromkeys(finding.propagators))[:_PASSED])


def _cannot(call: SavedCall) -> str:
    if call.written and not call.copies:
        return "the model's inputs were changed in place after they were used"
    if any(isinstance(module, nn.SyncBatchNorm) for module in call.inner.modules()):
        return "the model has SyncBatchNorm, whose ranks would wait for each other"
    return ""


def _replayed(
    call: SavedCall, scales: Mapping[int, float], outside: Mapping[int, BackwardTrace]
) -> tuple[OverflowReport | None, bool]:
    """What its forward produced, or else what its backward did; and whether it was forward that showed it."""
    with nothing_left(call.inner), torch.enable_grad():
        call.state.put_back()
        args, kwargs = call.arguments()
        named = [(f"input {n}", tensor) for n, tensor in enumerate(tensors((args, kwargs), objects=True))]
        trace = ForwardTrace([call.inner], named, stop=_forward.__code__, called=call.line)
        outputs = list(tensors(_forward(call, trace, args, kwargs)))
        if trace.trouble:
            raise RuntimeError(trace.trouble)
        reached = [operation for tensor in outputs if (operation := trace.reached(tensor)) is not None]
        if reached:
            first = min((operation.root() for operation in reached), key=lambda pair: pair[0].number)
            return finding_of(*first), True
        for number, grads in call.grads.items():
            scale = scales.get(number)
            if scale is None:
                continue
            came = [(outputs[place], grad) for place, grad in grads.items() if place < len(outputs)]
            came = [(output, grad) for output, grad in came if output.requires_grad]
            if all(finite(grad) for _, grad in came):
                found = _backward(trace, came, scale)
            else:
                found = _came_so(trace, came, scale, outside.get(number), call)
            if found is not None:
                return found, False
    return None, False


def _forward(call: SavedCall, trace: ForwardTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with call.enter(), trace.watching():
        return call.inner(*args, **kwargs)


_Pairs = Sequence[tuple[Tensor, Tensor]]  # outputs on the graph, each with its gradient


def _backward(trace: ForwardTrace, pairs: _Pairs, scale: float) -> OverflowReport | None:
    if not pairs:
        return None
    outputs = [output for output, _ in pairs]
    found = replay_backward(trace, outputs, [grad for _, grad in pairs])
    if found is not None and scale > 1.0:
        unscaled = replay_backward(trace, outputs, [over(grad, scale) for _, grad in pairs])
        return replace(found, cause="loss scale") if unscaled is None else unscaled
    return found


def _came_so(
    trace: ForwardTrace, pairs: _Pairs, scale: float, outside: BackwardTrace | None, call: SavedCall
) -> OverflowReport | None:
    """Of gradients at a call's outputs that aren't finite.

    If an operation outside made them so, its watch reports it. A replay with small gradients shows whether the model
    also has a slope that isn't finite. If each of several uses sent a finite gradient, their sum overflowed.
    """
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
    return at(Operation(module, SUM), cause, (), [facts(grad, SUM)])


# ---------------------------------------------------------------------------------------------- remedies

_POLICY = re.compile(r"`((?:fp16|bf16|fp32)[^`]*)`")
_NAMES_MODULES = re.compile(r"`[^`]*\bmodule\.[^`]*`")


def remedies_for(
    finding: OverflowReport, call: SavedCall | None, scales: Mapping[int, float], model: nn.Module | None
) -> list[str]:
    """What to try, without policies that were tried and do not help, or ask for more than one that does.

    Each policy is tried without the loss scale; where gradients may still overflow with it, the remedy says so. A
    policy belongs to the call's own model; if it names modules and that model isn't `model`, the remedy says so.

    Args:
        finding: what they are for.
        call: in which it happened; None: nothing can be tried, and no policy is offered.
        scales: number of a backward -> its scale.
        model: of the `MixedPrecision` that reports it; None: one policy is for all models (`mezzo run`).
    """
    kept: list[str] = []
    helping: list[str] = []
    whose = ""
    if call is not None and model is not None and path_of(call.inner, model) is None:
        whose = (
            f", as the policy of the MixedPrecision of that module's own model ({type(call.inner).__name__})"
        )
    smaller = f", and a loss scale below {max(scales.values(), default=1.0):.6g} if it is a constant: `"
    for sentence in remedies(finding, _policy_of(call)):
        found = None if finding.cause == "loss scale" else _POLICY.search(sentence)
        if found is not None:
            text = found.group(1)
            if call is None or any(_asks_more(text, less) for less in helping):
                continue
            helps, scaled = _helps(text, call, scales)
            if not helps:
                continue
            helping.append(text)
            if not scaled:
                sentence = sentence.replace(": `", smaller, 1)
        kept.append(f"{sentence}{whose}" if whose and _NAMES_MODULES.search(sentence) else sentence)
    return kept


def _policy_of(call: SavedCall | None) -> Policy | None:
    """The policy in whose region a call was made."""
    if call is None:
        return None
    with call.enter() as region:
        return getattr(region, "policy", None)


def _asks_more(text: str, less: str) -> bool:
    """Whether a policy keeps in FP32 all that another one does, and more."""
    one, other = policy_of(text), policy_of(less)
    same = replace(one, modules=other.modules) == other
    return same and set(one.modules) > set(other.modules)


def _helps(text: str, call: SavedCall, scales: Mapping[int, float]) -> tuple[bool, bool]:
    """Whether all is finite under a policy, with the loss scale taken out and, in fp16, with it."""
    device = next((p.device.type for p in call.inner.parameters()), "cpu")
    policy = fitting(policy_of(text), call.inner)  # under `mezzo run` it names other models' modules too
    try:
        with nothing_left(call.inner), torch.enable_grad():
            call.state.put_back()
            args, kwargs = call.arguments()
            overrides = apply_module_overrides(call.inner, policy, device) if policy.modules else None
            try:
                with autocast(policy, device):
                    outputs = list(tensors(call.inner(*args, **kwargs)))
                # Before the overrides go: a checkpoint runs its modules again in backward.
                helps = _all_finite(call, outputs, scales, scaled=False)
                needs = helps and policy.compute == "fp16" and max(scales.values(), default=1.0) > 1.0
                return helps, not needs or _all_finite(call, outputs, scales, scaled=True)
            finally:
                if overrides is not None:
                    overrides.remove()
    except Exception:  # a policy that this model can't have
        return False, False


def _all_finite(
    call: SavedCall, outputs: Sequence[Tensor], scales: Mapping[int, float], *, scaled: bool
) -> bool:
    if not all(finite(tensor) or only_minus_infinity(tensor) for tensor in outputs):
        return False
    leaves = [param for param in call.inner.parameters() if param.requires_grad]
    for number, grads in call.grads.items():
        pairs = [
            (outputs[place], _as_it_came(grad, outputs[place], scales.get(number, 1.0), scaled=scaled))
            for place, grad in grads.items()
            if place < len(outputs) and outputs[place].requires_grad
        ]
        given = torch.autograd.grad(
            [tensor for tensor, _ in pairs],
            leaves,
            [grad for _, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        if not all(grad is None or finite(grad) for grad in given):
            return False
    return True


def _as_it_came(grad: Tensor, output: Tensor, scale: float, *, scaled: bool) -> Tensor:
    """What came to an output, without the loss scale or with it; a mean's small number where that wasn't finite."""
    if not finite(grad):
        small = (scale if scaled else 1.0) / max(1, output.numel())
        return torch.full_like(output, small, dtype=torch.float32).to(output.dtype)
    return grad.to(output.dtype) if scaled else over(grad, scale, output.dtype)
