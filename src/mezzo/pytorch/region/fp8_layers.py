"""Which linear layers of a model an fp8 policy leaves in bf16, said in the policy's own words.

The last layer of a model makes logits, or a value that a loss reads: factors with 3 bits of mantissa would cost most
there and, in one layer of many, save least. So it stays in bf16, and so does each layer that shares an embedding's
weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from mezzo.core.patterns import is_pattern
from mezzo.core.policy import Policy

__all__ = ["described", "heads_of", "with_heads"]


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
    heads = [path for path in heads_of(model) if is_pattern(path) and _format_at(policy, path) is None]
    if not heads:
        return policy
    return replace(policy, modules=(*((path, "bf16") for path in heads), *policy.modules))


def described(policy: Policy, model: nn.Module) -> list[str]:
    """For `explain`: which linear layers multiply in fp8 and which stay in bf16, and why; empty without fp8."""
    if "fp8" not in policy.computed:
        return []
    from mezzo.pytorch.kernels.fp8.gemm import misfit

    lower: list[str] = []
    apart: list[str] = []
    for path, layer in _linear_layers(model):
        fmt = _format_at(policy, path) or policy.compute
        why = misfit(layer.in_features, layer.out_features) if fmt == "fp8" else f"the policy says {fmt}"
        if why:
            apart.append(f"{path} ({why})")
        else:
            lower.append(path)
    count = f"{len(lower)} linear layer{'s' if len(lower) > 1 else ''}"
    notes = [f"fp8 in {count}: {', '.join(_together(lower))}." if lower else _NOTHING]
    return notes + ([f"Not in fp8: {'; '.join(_together(apart))}."] if apart else [])


def _together(paths: list[str]) -> list[str]:
    """Layers of repeated blocks as one: ``blocks.0.up`` and ``blocks.1.up`` are ``blocks.*.up``."""
    return list(dict.fromkeys(re.sub(r"([^\d.][^.]*)\.\d+(?=\.)", r"\1.*", path) for path in paths))


_NOTHING = (
    "fp8 in no layer of this model: only linear layers multiply in fp8 (not convolutions, recurrent layers or "
    "attention), and not the head; the rest is as under bf16."
)


def _format_at(policy: Policy, path: str) -> str | None:
    """The format that a pattern gives to a module or to the nearest one around it; None where no pattern does."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        own = policy.format_for_module(".".join(parts[:length]))
        if own is not None:
            return own
    return None


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
