"""What a policy allows but is seldom meant: sentences for `explain` and the command line to show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mezzo.core.loss_scale import NoLossScale, StaticLossScale
from mezzo.core.rules import RULES, Rule

if TYPE_CHECKING:
    from mezzo.core.policy import Policy

_WIDE = (Rule.FP32, Rule.BANNED)


def notes_of(policy: Policy) -> tuple[str, ...]:
    """The notes on one policy, a sentence each; most have none."""
    found = []
    scale = None if policy.loss_scale == "auto" else policy.make_loss_scale()
    if "fp16" in policy.computed and isinstance(scale, NoLossScale):
        found.append(
            "fp16 without a loss scale: gradients under 2^-25 become zero. loss_scale=dynamic keeps them."
        )
    if isinstance(scale, StaticLossScale) and math.frexp(scale.scale)[0] != 0.5:
        found.append(
            f"loss_scale={policy.loss_scale} is no power of two: it rounds every gradient once more than "
            f"2**{math.frexp(scale.scale)[1] - 1} does."
        )
    if policy.masters == "none":
        found.append(
            "masters=none: an update under an ulp of its weight is kept on average, by rounding "
            "stochastically, and adds noise. masters=split8 keeps it for one byte more, split exactly for "
            "two."
        )
    if policy.recomputed and policy.computed == {"fp32"}:
        found.append(
            f"recompute={policy.recompute} does nothing in FP32: only 16-bit outputs are made again."
        )
    if "fp8" not in policy.computed and policy.scaling != "tensorwise":
        found.append(
            f"scaling={policy.scaling} does nothing here: it scales fp8 factors, and nothing is computed in fp8."
        )
    if not policy.is_fp32:
        for op, rule in policy.ops:
            row = RULES.get(op)
            if row and row.rule in _WIDE and Rule(rule) not in _WIDE:
                found.append(f"op.{op}={rule} in place of {row.rule}: {row.reason}.")
    return tuple(found)
