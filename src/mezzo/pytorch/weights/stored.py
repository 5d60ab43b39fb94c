"""A model as a policy stores it, for as long as one looks: its weights in 16 bits, and then as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mezzo.core.errors import UsageError
from mezzo.core.masters import bytes_per_parameter
from mezzo.core.policy import Policy
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.weights.lowering import lower_weights, take_master


@contextmanager
def stored(model: torch.nn.Module, policy: Policy) -> Iterator[list[str]]:
    """While this lasts, weights are stored as the policy says; yields what a reader should know of it.

    Naive code::

        saved = [(p, p.data, p.grad) for p in model.parameters()]
        lower_weights(model, policy)
        yield
        for p, p.data, p.grad in saved: pass

    The tensors that were there come back themselves, not copies. A model whose weights can't be lowered stays as
    it is, and the sentence says why.
    """
    if policy.params == "fp32":
        yield [] if policy.state == "fp32" else [_sentence(model, policy)]
        return
    before = [(p, p.data, p.grad) for p in model.parameters()]
    for p, _, _ in before:
        p.grad = None
    try:
        try:
            lower_weights(model, policy)
            note = _sentence(model, policy)
        except UsageError as error:
            note = f"weights were left as they are. {error}"
        yield [note]
    finally:
        for p, data, grad in before:
            if p.dtype is not data.dtype:
                take_master(p)  # what was kept aside for it; that of a model lowered earlier stays
                p.data = data
            p.grad = grad


def _sentence(model: torch.nn.Module, policy: Policy) -> str:
    counts = Counter(name_of(p.dtype) for p in model.parameters())
    weights = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    masters = "" if policy.params == "fp32" else f"masters {policy.masters}, "
    each = bytes_per_parameter(policy.params, policy.masters, policy.state)
    return (
        f"parameters: {weights}; {masters}state {policy.state}: under AdamW {round(each, 2):g} bytes a "
        f"{policy.params} parameter, where FP32 takes 16."
    )
