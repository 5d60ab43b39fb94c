"""An investigation: the calls of a step that was skipped are replayed, what went wrong first is told, and what mends.

A remedy that names a policy is tried: the call that went wrong is replayed once more under it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.core.finding import OUTSIDE, SUM, Finding
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.remedies import remedies
from mezzo.pytorch.monitor.again import nothing_left
from mezzo.pytorch.monitor.backward_trace import at, replay_backward
from mezzo.pytorch.monitor.forward_trace import ForwardTrace, Place, absorbed, finding_of, root
from mezzo.pytorch.monitor.loss_graph import LossEvent
from mezzo.pytorch.monitor.module_paths import path_of
from mezzo.pytorch.monitor.operations import facts, finite, only_minus_infinity, over, tensors
from mezzo.pytorch.monitor.saved_call import SavedCall, summed
from mezzo.pytorch.region.autocast import autocast
from mezzo.pytorch.region.modules import apply_module_overrides, fitting

_PASSED = 8  # propagators that are told


def investigate(
    calls: Sequence[SavedCall],
    scales: Mapping[int, float],
    loss_event: LossEvent | None,
    gradient_events: Sequence[LossEvent],
) -> tuple[Finding, SavedCall | None]:
    """Where the first value that isn't finite came from, and the call in which it was, if in one.

    Args:
        calls: those that a gradient of the step came to, in order.
        scales: number of a backward -> how many times its gradients are too large.
        loss_event: of a loss that isn't finite.
        gradient_events: of gradients that ceased to be finite outside of the calls.
    """
    notes: list[str] = []
    backwards: list[tuple[Finding, SavedCall | None]] = []
    missed = False
    for call in calls:
        why_not = _cannot(call)
        if not why_not:
            if call.inner is not call.model and hasattr(call.model, "_orig_mod"):
                notes.append("a compiled model: run again as it was written, not as it was compiled")
            try:
                found, forward = _replayed(call, scales)
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
    if loss_event is not None and missed and not loss_event.sure:
        return Finding("unknown", note="; ".join(notes)), None
    if loss_event is not None:
        return _noted(loss_event.finding, notes), None
    # What alarms is told first: a loss scale that is too large does not explain it.
    all_found: list[tuple[Finding, SavedCall | None]] = [(event.finding, None) for event in gradient_events]
    all_found += backwards[::-1]
    if all_found:
        finding, place = next((pair for pair in all_found if pair[0].alarms), all_found[0])
        return _noted(finding, notes), place
    return Finding("unknown", note="; ".join(notes) or "run again, every call of the step was finite"), None


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _noted(finding: Finding, notes: Sequence[str]) -> Finding:
    note = "; ".join(dict.fromkeys((*notes, *filter(None, [finding.note]))))
    return replace(finding, note=note, propagators=list(dict.fromkeys(finding.propagators))[:_PASSED])


def _cannot(call: SavedCall) -> str:
    if call.written and not call.copies:
        return "the model's inputs were changed in place after they were used"
    if any(isinstance(module, nn.SyncBatchNorm) for module in call.inner.modules()):
        return "the model has SyncBatchNorm, whose ranks would wait for each other"
    return ""


def _replayed(call: SavedCall, scales: Mapping[int, float]) -> tuple[Finding | None, bool]:
    """What its forward produced, or else what its backward did; and whether it was forward that showed it."""
    with nothing_left(call.inner), torch.enable_grad():
        call.put_back()
        args, kwargs = call.arguments()
        named = [(f"input {n}", tensor) for n, tensor in enumerate(tensors((args, kwargs), objects=True))]
        trace = ForwardTrace([call.inner], named, stop=_forward.__code__, called=call.line)
        outputs = list(tensors(_forward(call, trace, args, kwargs)))
        if trace.trouble:
            raise RuntimeError(trace.trouble)
        reached = [event for tensor in outputs if (event := trace.reached(tensor)) is not None]
        if reached:
            return finding_of(*min((root(event) for event in reached), key=lambda pair: pair[0].number)), True
        for number, grads in call.grads.items():
            scale = scales.get(number)
            if scale is None:
                continue
            if all(finite(grad) for grad in grads.values()):
                found = _backward(trace, _on_graph(outputs, grads), scale)
            else:
                found = _came_so(call, number, scale, trace, outputs)
            if found is not None:
                return found, False
    return None, False


def _came_so(
    call: SavedCall, number: int, scale: float, trace: ForwardTrace, outputs: Sequence[Tensor]
) -> Finding | None:
    """Of gradients at a call's outputs that aren't finite.

    An operation outside may have made them so, which is told by who watched that. What would come without the loss
    scale shows whether the model has a fault as well. Or each of several uses sent a finite one, and not their sum.
    """
    grads = call.grads[number]
    sent = {place: uses for place, uses in call.uses.get(number, {}).items() if place in grads}
    unscaled = {place: summed(uses, grads[place]) for place, uses in sent.items()}
    found = _backward(trace, _on_graph(outputs, unscaled), 1.0)
    if found is not None:
        return found
    as_sent = {place: summed(uses, grads[place], scale) for place, uses in sent.items()}
    for place, total in as_sent.items():
        if total is not None and not finite(total):
            alone = unscaled[place]
            cause = "loss scale" if scale > 1.0 and alone is not None and finite(alone) else "overflow"
            parts = [facts(part, "gradient of a use") for part, _ in sent[place]][:3]
            return at(Place(OUTSIDE, SUM), cause, parts, [facts(total, SUM)], how="live")
    return _backward(trace, _on_graph(outputs, as_sent), scale)  # one of the uses is within the model


def _on_graph(outputs: Sequence[Tensor], grads: Mapping[int, Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The outputs that are on the graph, each with its gradient where that is finite."""
    pairs = [
        (outputs[place], grad) for place, grad in grads.items() if place < len(outputs) and grad is not None
    ]
    return [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad and finite(grad)]


def _forward(call: SavedCall, trace: ForwardTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with call.enter(), trace.watching():
        return call.inner(*args, **kwargs)


def _backward(trace: ForwardTrace, pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> Finding | None:
    if not pairs:
        return None
    outputs = [tensor for tensor, _ in pairs]
    found = replay_backward(trace, outputs, [grad for _, grad in pairs])
    if found is not None and scale > 1.0:
        unscaled = replay_backward(trace, outputs, [over(grad, scale) for _, grad in pairs])
        if unscaled is None:
            return replace(found[1], cause="loss scale")
        found = unscaled
    if found is None:
        return None
    place, finding = found
    before = absorbed(place)
    return finding if before is None else finding_of(*before)


# ---------------------------------------------------------------------------------------------- remedies

_POLICY = re.compile(r"`((?:fp16|bf16|fp32)[^`]*)`")
_NAMES_MODULES = re.compile(r"`[^`]*\bmodule\.[^`]*`")


def remedies_for(
    finding: Finding, call: SavedCall | None, scales: Mapping[int, float], model: nn.Module | None
) -> list[str]:
    """What to try, without policies that were tried and do not mend, or ask for more than one that does.

    They are tried with the loss scale taken out: where gradients may yet overflow with it, that is said. A policy is
    that of the call's own model, which is said if it names modules and that model isn't `model`.

    Args:
        finding: what they are for.
        call: the one in which it happened; None: nothing can be tried, and no policy is told.
        scales: number of a backward -> its scale.
        model: who is told of it has this one; None: one policy is for all models (`mezzo run`).
    """
    kept: list[str] = []
    mending: list[str] = []
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
            if call is None or any(_asks_more(text, less) for less in mending):
                continue
            mends, scaled = _mends(text, call, scales)
            if not mends:
                continue
            mending.append(text)
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


def _mends(text: str, call: SavedCall, scales: Mapping[int, float]) -> tuple[bool, bool]:
    """Whether all is finite under a policy, with the loss scale taken out and, in fp16, with it."""
    device = next((p.device.type for p in call.inner.parameters()), "cpu")
    policy = fitting(policy_of(text), call.inner)  # under `mezzo run` it names other models' modules too
    try:
        with nothing_left(call.inner), torch.enable_grad():
            call.put_back()
            args, kwargs = call.arguments()
            overrides = apply_module_overrides(call.inner, policy, device) if policy.modules else None
            try:
                with autocast(policy, device):
                    outputs = list(tensors(call.inner(*args, **kwargs)))
                # Before the overrides go: a checkpoint runs its modules again in backward.
                mends = _all_finite(call, outputs, scales, scaled=False)
                needs = mends and policy.compute == "fp16" and max(scales.values(), default=1.0) > 1.0
                return mends, not needs or _all_finite(call, outputs, scales, scaled=True)
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
