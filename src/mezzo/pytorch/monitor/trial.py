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
from mezzo.pytorch.region.modules import apply_module_overrides

_POLICY = re.compile(r"`((?:fp16|bf16|fp32)[^`]*)`")


def that_mend(
    remedies: Sequence[str], finding: Finding, call: KeptCall | None, scales: Mapping[int, float]
) -> list[str]:
    """The remedies without those whose policy was tried and does not mend, or is more than one that does.

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
        if call is not None and not more_than_needed and _mends(text, call, scales):
            mending.append(text)
            kept.append(sentence)
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


def _mends(text: str, call: KeptCall, scales: Mapping[int, float]) -> bool:
    device = next((p.device.type for p in call.inner.parameters()), "cpu")
    policy = policy_of(text)
    try:
        with nothing_left(call.inner), torch.enable_grad():
            call.put_back()
            args, kwargs = call.arguments()
            overrides = apply_module_overrides(call.inner, policy, device) if policy.modules else None
            try:
                with autocast(policy, device):
                    outputs = list(tensors(call.inner(*args, **kwargs)))
                return _all_finite(call, outputs, scales)  # a checkpoint runs its modules again in backward
            finally:
                if overrides is not None:
                    overrides.remove()
    except Exception:  # a policy that this model can't have
        return False


def _all_finite(call: KeptCall, outputs: Sequence[Tensor], scales: Mapping[int, float]) -> bool:
    if not all(finite(tensor) or only_minus_infinity(tensor) for tensor in outputs):
        return False
    leaves = [param for param in call.inner.parameters() if param.requires_grad]
    for number, grads in call.grads.items():
        pairs = [
            (outputs[place], _unscaled(grad, outputs[place], scales.get(number, 1.0)))
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


def _unscaled(grad: Tensor, output: Tensor, scale: float) -> Tensor:
    """What came to an output, without the loss scale; a small number where that wasn't finite."""
    if not finite(grad):
        return torch.full_like(output, 1.0 / max(1, output.numel()))
    return (grad.double() / scale).to(output.dtype)
