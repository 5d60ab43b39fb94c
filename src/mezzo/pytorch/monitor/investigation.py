"""An investigation: the calls of a step that was skipped are run again, and what went wrong first is told."""

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
from mezzo.pytorch.monitor.again import nothing_left
from mezzo.pytorch.monitor.backward_trace import Backward, run_backward
from mezzo.pytorch.monitor.forward_trace import Event, ForwardTrace, Place, root
from mezzo.pytorch.monitor.loss_graph import OutsideEvent
from mezzo.pytorch.monitor.module_paths import path_of
from mezzo.pytorch.monitor.operations import facts, finite, line_text, only_minus_infinity, tensors
from mezzo.pytorch.monitor.saved_call import KeptCall
from mezzo.pytorch.region.autocast import autocast
from mezzo.pytorch.region.modules import apply_module_overrides, fitting

_PASSED = 8  # propagators that are told


def investigate(
    calls: Sequence[KeptCall],
    scales: Mapping[int, float],
    loss_event: OutsideEvent | None,
    gradient_events: Sequence[OutsideEvent],
) -> tuple[Finding, KeptCall | None]:
    """Where the first value that isn't finite came from, and the call in which it was, if in one.

    Args:
        calls: those that a gradient of the step came to, in order.
        scales: number of a backward -> how many times its gradients are too large.
        loss_event: of a loss that isn't finite.
        gradient_events: of gradients that ceased to be finite outside of the calls.
    """
    notes: list[str] = []
    backwards: list[tuple[Finding, KeptCall | None]] = []
    missed = False
    for call in calls:
        why_not = _cannot(call)
        missed |= bool(why_not)
        if why_not:
            notes.append(why_not)
            continue
        if call.inner is not call.model and hasattr(call.model, "_orig_mod"):
            notes.append("a compiled model: run again as it was written, not as it was compiled")
        try:
            forward, backward = _run_again(call, scales)
        except Exception as error:  # the user's code runs again here, and may not expect that
            missed = True
            notes.append(f"a call could not be run again: {told(error)}")
            continue
        if forward is not None:
            return _noted(forward, notes), call
        if backward is not None:
            backwards.append((backward, call))
    if loss_event is not None and missed and not loss_event.sure:
        return Finding("unknown", note="; ".join(notes)), None
    if loss_event is not None:
        return _noted(_outside(loss_event, "forward"), notes), None
    # What alarms is told first: a loss scale that is too large does not explain it.
    outside: list[tuple[Finding, KeptCall | None]] = [
        (_outside(event, "backward"), None) for event in gradient_events
    ]
    found = outside + backwards[::-1]
    if found:
        finding, place = next((pair for pair in found if pair[0].alarms), found[0])
        return _noted(finding, notes), place
    return Finding("unknown", note="; ".join(notes) or "run again, every call of the step was finite"), None


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _noted(finding: Finding, notes: Sequence[str]) -> Finding:
    return replace(finding, note="; ".join(dict.fromkeys((*notes, *filter(None, [finding.note])))))


def _cannot(call: KeptCall) -> str:
    if call.written and not call.copies:
        return "the model's inputs were changed in place after they were used"
    if any(isinstance(module, nn.SyncBatchNorm) for module in call.inner.modules()):
        return "the model has SyncBatchNorm, whose ranks would wait for each other"
    return ""


def _outside(event: OutsideEvent, direction: str) -> Finding:
    return Finding(
        event.cause,
        event.module,
        event.op,
        direction,
        inputs=event.inputs,
        outputs=event.outputs,
        propagators=list(dict.fromkeys(event.passed))[:_PASSED],
        line=line_text(event.line),
        how="live",
        maker=event.maker,
        note="; ".join(
            text
            for text, is_so in (
                ("the operation is what is left over, not what was seen", not event.sure),
                (
                    "the line is that of an earlier overflow at the same place of the same graph",
                    event.recalled,
                ),
            )
            if is_so
        ),
    )


def _run_again(call: KeptCall, scales: Mapping[int, float]) -> tuple[Finding | None, Finding | None]:
    """What its forward produced, or else what its backward did."""
    with nothing_left(call.inner):
        call.put_back()
        args, kwargs = call.arguments()
        named = [(f"input {n}", tensor) for n, tensor in enumerate(tensors((args, kwargs), objects=True))]
        trace = ForwardTrace([call.inner], named, stop=_forward.__code__, called=call.line)
        with torch.enable_grad():
            output = _forward(call, trace, args, kwargs)
        places = {place: tensor for place, tensor in enumerate(tensors(output))}
        reached = [event for tensor in places.values() if (event := trace.reached(tensor)) is not None]
        if reached:
            first = min((root(event) for event in reached), key=lambda pair: pair[0].number)
            return _forward_finding(*first), None
        for number, grads in call.grads.items():
            scale = scales.get(number)
            if scale is None:
                continue
            if all(finite(grad) for grad in grads.values()):
                found = _backward(trace, _on_graph(places, grads), scale)
            else:
                found = _came_so(call, number, scale, trace, places)
            if found is not None:
                return None, found
    return None, None


def _came_so(
    call: KeptCall, number: int, scale: float, trace: ForwardTrace, places: Mapping[int, Tensor]
) -> Finding | None:
    """Of gradients at a call's outputs that aren't finite.

    An operation outside may have made them so, which is told by who watched that. What would come without the loss
    scale shows whether the model has a fault as well. Or each of several uses sent a finite one, and not their sum.
    """
    grads = call.grads[number]
    sent = {place: one for place, one in call.sent.get(number, {}).items() if place in grads}
    unscaled = {place: one.total(grads[place]) for place, one in sent.items()}
    found = _backward(trace, _on_graph(places, unscaled), 1.0)
    if found is not None:
        return found
    as_sent = {place: one.total(grads[place], scale) for place, one in sent.items()}
    for place, total in as_sent.items():
        if total is not None and not finite(total):
            alone = unscaled[place]
            cause = "loss scale" if scale > 1.0 and alone is not None and finite(alone) else "overflow"
            parts = [facts(part, "gradient of a use") for part, _ in sent[place].parts]
            made = [facts(total, SUM)]
            return Finding(cause, OUTSIDE, SUM, "backward", parts[:3], made, how="live")
    return _backward(trace, _on_graph(places, as_sent), scale)  # one of the uses is within the model


def _on_graph(
    places: Mapping[int, Tensor], grads: Mapping[int, Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The outputs that are on the graph, each with its gradient where that is finite."""
    pairs = [(places[place], grad) for place, grad in grads.items() if place in places and grad is not None]
    return [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad and finite(grad)]


def _forward(call: KeptCall, trace: ForwardTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with call.enter(), trace.watching():
        return call.inner(*args, **kwargs)


def _forward_finding(event: Event, passed: Sequence[Event]) -> Finding:
    return Finding(
        "overflow" if event.kind == "passed" else event.kind,
        event.place.module,
        event.place.op,
        "forward",
        event.inputs,
        event.outputs,
        _propagators([one.place for one in passed]),
        line_text(event.place.line),
        maker=event.maker,
    )


def _backward(trace: ForwardTrace, pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> Finding | None:
    if not pairs:
        return None
    outputs = [tensor for tensor, _ in pairs]
    found = run_backward(trace, outputs, [grad for _, grad in pairs])
    if found.finite:
        return None
    if scale > 1.0:
        smaller = [(grad.double() / scale).to(grad.dtype) for _, grad in pairs]
        unscaled = run_backward(trace, outputs, smaller)
        if unscaled.finite:
            return _backward_finding(found, "loss scale")
        found = unscaled
    place = found.produced
    if place is not None and place.event is not None and not place.event.meant:
        first, passed = root(place.event)
        # An infinity that forward absorbed, and backward did not; a pole is one in both directions.
        if first.place is not place or first.kind != "invalid":
            return _forward_finding(first, passed)
    return _backward_finding(found, found.cause)


def _backward_finding(found: Backward, cause: str) -> Finding:
    place = found.produced or Place("", "")
    return Finding(
        cause,
        place.module,
        place.op,
        "backward",
        found.inputs,
        found.outputs,
        _propagators(found.passed),
        line_text(place.line),
        maker=found.maker,
    )


def _propagators(places: Sequence[Place]) -> list[str]:
    return list(dict.fromkeys(str(place) for place in places))[:_PASSED]


_POLICY = re.compile(r"`((?:fp16|bf16|fp32)[^`]*)`")


def that_mend(
    remedies: Sequence[str], finding: Finding, call: KeptCall | None, scales: Mapping[int, float]
) -> list[str]:
    """The remedies without those whose policy was tried and does not mend, or is more than one that does.

    They are tried with the loss scale taken out: where gradients may yet overflow with it, that is said.

    Args:
        remedies: sentences, some with a policy in backquotes.
        finding: what they are for.
        call: the one in which it happened; None: nothing can be tried, and no policy is told.
        scales: number of a backward -> its scale.
    """
    if finding.cause == "loss scale":
        return list(remedies)
    kept: list[str] = []
    mending: list[str] = []
    for sentence in remedies:
        found = _POLICY.search(sentence)
        if found is None:
            kept.append(sentence)
            continue
        text = found.group(1)
        more_than_needed = any(_asks_more(text, less) for less in mending)
        if call is None or more_than_needed:
            continue
        mends, scaled = _mends(text, call, scales)
        if mends:
            mending.append(text)
            smaller = (
                f", and a loss scale below {max(scales.values(), default=1.0):.6g} if it is a constant: `"
            )
            kept.append(sentence if scaled else sentence.replace(": `", smaller, 1))
    return kept


def policy_of_call(call: KeptCall | None) -> Policy | None:
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


def _mends(text: str, call: KeptCall, scales: Mapping[int, float]) -> tuple[bool, bool]:
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
    call: KeptCall, outputs: Sequence[Tensor], scales: Mapping[int, float], *, scaled: bool
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
    return grad.to(output.dtype) if scaled else (grad.double() / scale).to(output.dtype)


_NAMES_MODULES = re.compile(r"`[^`]*\bmodule\.[^`]*`")


def with_model(remedies: Sequence[str], call: KeptCall | None, model: nn.Module | None) -> list[str]:
    """The remedies; those whose policy names modules say of which model it is the policy, if that isn't `model`.

    Args:
        remedies: made of the policy in which the call was kept: that of its own model.
        call: the one in which it happened; None if in none.
        model: who is told of it has this one; None: one policy is for all models (`mezzo run`).
    """
    if call is None or model is None or path_of(call.inner, model) is not None:
        return list(remedies)
    name = type(call.inner).__name__
    words = f", as the policy of the MixedPrecision of that module's own model ({name})"
    return [f"{one}{words}" if _NAMES_MODULES.search(one) else one for one in remedies]
