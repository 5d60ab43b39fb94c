"""Remedies, tried: each policy that a finding's remedies name is put into force, and the step taken again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import mezzo
from faults.rows import Fault
from faults.runs import of_fault
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.finding import Finding
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale

_FLOOR = DynamicLossScale().floor
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
    """Whether a fault's steps are taken under another policy, at the row's loss scale or at the smallest there is.

    The smallest because forward may be mended, and its gradients then be what a dynamic loss scale has to come down to.

    Args:
        row: the fault.
        part: whose steps.
        policy: in place of the row's.
    """
    precision = defaultdict(lambda: row.precision, {part: policy})
    constant = isinstance(mezzo.policy(policy).make_loss_scale(), StaticLossScale)
    scales = [None] if constant else [row.scale, _FLOOR]
    return any(_taken(row, part, precision, scale) for scale in scales)


def _taken(row: Fault, part: str, precision: Mapping[str, str], scale: float | None) -> bool:
    turns = of_fault(row, precision=precision, scale=scale, trace=False)
    try:
        return not any(turn.result.skipped for turn in turns if turn.part == part)
    except UsageError:  # a policy that this model refuses
        return False
