"""Remedies, tried: each policy that a finding's remedies name is put into force, and the step taken again."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress

import mezzo
from faults.rows import Fault
from faults.runs import of_fault
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.finding import Finding

_QUOTED = re.compile(r"`([^`]+)`")


def policies(finding: Finding) -> list[str]:
    """The policies that a finding's remedies quote, in order."""
    named = []
    for sentence in finding.remedies:
        for text in _QUOTED.findall(sentence):
            with suppress(UsageError, UnknownNameError):
                mezzo.policy(text)
                named.append(text)
    return list(dict.fromkeys(named))


def mends(row: Fault, part: str, policy: str) -> bool:
    """Whether a fault's steps are taken, and none skipped, under another policy.

    Args:
        row: the fault.
        part: whose steps.
        policy: in place of the row's.
    """
    scale = None if "loss_scale=" in policy else row.scale
    precision = defaultdict(lambda: row.precision, {part: policy})
    turns = of_fault(row, precision=precision, scale=scale, trace=False)
    try:
        return not any(turn.result.skipped for turn in turns if turn.part == part)
    except UsageError:  # a policy that this model refuses
        return False
