"""Remedies: what to try about a finding, in the terms of Mezzo's policies and arguments, the likeliest first."""

from __future__ import annotations

from mezzo.core.finding import Finding


def remedies(finding: Finding) -> list[str]:
    """What to try, the likeliest first; nothing for what needs no remedy."""
    return []
