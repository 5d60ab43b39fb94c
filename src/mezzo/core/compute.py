"""What a policy can compute in: each name, and the number formats behind it.

A name such as ``bf16`` says three things at once: the format of the factors in a matrix product, that of the gradients
which meet them in backward, and that in which results are handed on. They are one format for FP32, fp16 and bf16. They
differ for ``fp8``, whose products of 8-bit factors are handed on in bf16, and for ``tf32``, whose factors have 10 bits
of mantissa and whose results are FP32.

An 8-bit format spans few binades (e4m3fn 18, e5m2 32). A tensor is therefore multiplied by a power of two that brings
its largest magnitude just under the format's largest value, and the product is divided by it again. Powers of two round
nothing, so the only error is that of one rounding to 8 bits. A policy's ``scaling=`` says which elements share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mezzo.core.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Compute:
    """One way of computing.

    Args:
        name: what a policy says: ``compute=NAME``.
        forward: number format of the factors of a product in forward.
        backward: number format of the gradients that are multiplied in backward.
        activations: number format in which ops under the rule `lower` hand on what they computed.
        summary: what it is, in a line.
    """

    name: str
    forward: str
    backward: str
    activations: str
    summary: str


_TABLE = (
    Compute("fp32", "fp32", "fp32", "fp32", "single precision throughout"),
    Compute("tf32", "tf32", "tf32", "fp32", "FP32 storage; factors of products with 10 bits of mantissa"),
    Compute("bf16", "bf16", "bf16", "bf16", "bfloat16: FP32's range, 8 significant bits"),
    Compute("fp16", "fp16", "fp16", "fp16", "half precision: 11 significant bits, needs a loss scale"),
    Compute("fp8", "e4m3fn", "e5m2", "bf16", "linear layers multiply scaled 8-bit factors; the rest as bf16"),
)

COMPUTE: Mapping[str, Compute] = MappingProxyType({each.name: each for each in _TABLE})
"""Every way of computing, by name, the widest first."""

# Ops whose factors are 8 bits under fp8: what hardware multiplies so, and libraries call. The others of the rule
# `lower` (attention's two products, convolutions, recurrent layers, products of activations) stay in bf16.
FP8_OPS = frozenset({"linear"})


def activations_of(compute: str) -> str:
    """The format in which lowered results are handed on; ``auto`` stays ``auto``.

    >>> activations_of("fp8"), activations_of("tf32"), activations_of("fp16")
    ('bf16', 'fp32', 'fp16')
    """
    return COMPUTE[compute].activations if compute in COMPUTE else compute


GRANULARITIES = ("rowwise", "tensorwise")
"""Which elements share a scale: those of the whole tensor, or those that one sum of a product reads."""

_REMOVED = {
    "history": "Delayed scales were removed. Each scale now comes from the tensor that is cast: write tensorwise.",
    "margin": "The margin was removed with delayed scales. A tensor's own scale never saturates: leave it out.",
    "pays_from": "The break-even rule was removed. To keep a layer in bf16, write module.NAME=bf16.",
}


def scaling_of(text: str, where: str = "") -> str:
    """``tensorwise`` or ``rowwise``, without surrounding spaces.

    >>> scaling_of(" rowwise ")
    'rowwise'

    Args:
        text: what was written.
        where: how an error begins, for instance ``"policy 'scaling=colwise': "``.

    Raises:
        UnknownNameError: an unknown granularity.
        UsageError: a setting of 0.1.0 that was removed; the error says what to write instead.
    """
    granularity, parenthesis, settings = (part.strip() for part in text.partition("("))
    if granularity not in GRANULARITIES:
        raise unknown_name("fp8 scaling", granularity, GRANULARITIES, where=where)
    if parenthesis:
        removed = [why for name, why in _REMOVED.items() if name in settings]
        raise UsageError(f"{where}scaling={text} takes no settings. {' '.join(removed)}".rstrip())
    return granularity
