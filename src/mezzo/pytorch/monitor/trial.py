"""Trying a remedy: the call that went wrong is run once more under the policy that is suggested."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mezzo.core.finding import Finding
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.pytorch.monitor.again import nothing_left
from mezzo.pytorch.monitor.kept_call import KeptCall
from mezzo.pytorch.monitor.tensor_facts import finite, only_minus_infinity, tensors
from mezzo.pytorch.region.autocast import autocast
from mezzo.pytorch.region.modules import apply_module_overrides, fitting

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
