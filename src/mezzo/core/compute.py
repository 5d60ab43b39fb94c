"""What a policy can compute in: each name, and the number formats of factors, gradients and results behind it.

Factors of 8 and 4 bits have scales (`mezzo.core.recipes`). For ``fp8`` a policy's ``scaling=`` says which elements
share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Compute:
    """The formats of a product's factors in forward, of the gradients multiplied in backward, and of results."""

    name: str
    forward: str
    backward: str
    activations: str


_TABLE = (
    Compute("fp32", "fp32", "fp32", "fp32"),
    Compute("tf32", "tf32", "tf32", "fp32"),
    Compute("bf16", "bf16", "bf16", "bf16"),
    Compute("fp16", "fp16", "fp16", "fp16"),
    Compute("fp8", "e4m3fn", "e5m2", "bf16"),
    Compute("mxfp8", "e4m3fn", "e4m3fn", "bf16"),
    Compute("fp8-block", "e4m3fn", "e4m3fn", "bf16"),
    Compute("nvfp4", "e2m1", "e2m1", "bf16"),
)

COMPUTE: Mapping[str, Compute] = MappingProxyType({each.name: each for each in _TABLE})
"""Every way of computing, by name, the widest first."""

QUANTIZED = frozenset({"fp8", "mxfp8", "fp8-block", "nvfp4"})
"""Those whose factors have scales; `mezzo.core.recipes` says how."""

# Ops whose factors are quantized, as in hardware. Others of the rule `lower` (attention, convolutions, recurrent
# layers, products of activations) stay in bf16.
QUANTIZED_OPS = frozenset({"linear"})


def activations_of(compute: str) -> str:
    """The format of lowered results (``fp8``: bf16, ``tf32``: fp32); ``auto`` stays ``auto``."""
    return COMPUTE[compute].activations if compute in COMPUTE else compute


GRANULARITIES = ("rowwise", "tensorwise")
"""Which elements of an fp8 factor share a scale: those that one sum of a product reads, or the whole tensor."""
