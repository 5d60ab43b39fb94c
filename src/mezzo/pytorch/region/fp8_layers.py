"""Which linear layers of a model an fp8 policy leaves in bf16, said in the policy's own words.

The last layer of a model makes logits, or a value that a loss reads: factors with 3 bits of mantissa would cost most
there and, in one layer of many, save least. So it stays in bf16, and so does each layer that shares an embedding's
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from mezzo.core.patterns import is_pattern
from mezzo.core.policy import Policy

__all__ = ["heads_of", "with_heads"]


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """The paths of a model's heads: its last `nn.Linear` in the order of definition, and those with tied embeddings.

    A model that is a single linear layer has none, and the projection inside an `nn.MultiheadAttention`, which is not
    called as a module, is none.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = list(_linear_layers(model))
    tied = [path for path, layer in layers if id(layer.weight) in embedded]
    return tuple(dict.fromkeys([*tied, *(path for path, _ in layers[-1:])]))


def with_heads(policy: Policy, model: nn.Module) -> Policy:
    """The policy for this model: under fp8 with a pattern ``module.PATH=bf16`` for each head.

    A head for which the policy has a pattern of its own, or for a module around it, is as that pattern says.
    """
    if policy.compute != "fp8":
        return policy
    heads = [path for path in heads_of(model) if is_pattern(path) and not _is_decided(policy, path)]
    if not heads:
        return policy
    return replace(policy, modules=(*((path, "bf16") for path in heads), *policy.modules))


def _is_decided(policy: Policy, path: str) -> bool:
    parts = path.split(".")
    return any(
        policy.format_for_module(".".join(parts[:length])) is not None for length in range(1, len(parts) + 1)
    )


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    attention = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    for path, module in model.named_modules():
        if path and isinstance(module, nn.Linear) and id(module) not in attention:
            yield path, module
