"""How fp8 factors are scaled: the word that a policy's ``scaling=`` takes.

An 8-bit format spans few binades (e4m3fn 18, e5m2 32). A tensor is therefore multiplied by a power of two that brings
its largest magnitude just under the format's largest value, and the product is divided by it again. Powers of two round
nothing, so the only error is that of one rounding to 8 bits.
"""

from __future__ import annotations

from mezzo.core.errors import UsageError, unknown_name

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
