"""Range rules: which modules must stay in FP32, for how large their numbers are or because 16 bits break them."""

from __future__ import annotations

import math
from statistics import median

from mezzo.core.formats import named
from mezzo.core.sensitivity import Sensitivities, UnitFacts, expected_square

HEADROOM = 2.0
"""An output stays under the format's largest number by this factor, since later steps are not seen."""
WRONG_GRADIENTS = 0.1
"""Gradients further from FP32's than this share of their norm are another's gradients."""


def range_rule(unit: UnitFacts, format: str) -> str:
    """Why a module must stay in FP32 for its numbers' range; ``""`` if it need not.

    >>> range_rule(UnitFacts("square", "Square", largest=40000.0), "fp16")
    'its largest output, 4e+04, is within a factor of 2 of the largest fp16 number, 65504'
    """
    limit = float(named(format).max)
    if unit.failed:
        return f"it fails in {format}: {unit.failed}"
    if unit.overflow == "input":
        return f"an input of it is not finite in {format}, and is in FP32"
    if unit.overflow == "output":
        first = f": {unit.inside_op} inside it makes the first such number" if unit.inside_op else ""
        return f"its output is not finite in {format}, and is in FP32{first}"
    if unit.overflow:
        return f"its gradients are not finite in {format} at any loss scale, and are in FP32"
    if unit.largest * HEADROOM > limit:
        return (
            f"its largest output, {unit.largest:.4g}, is within a factor of {HEADROOM:g} of the largest {format} "
            f"number, {limit:g}"
        )
    if unit.inside * HEADROOM > limit:
        return (
            f"a number inside it, {unit.inside:.4g} of {unit.inside_op}, is "
            f"{'beyond' if unit.inside > limit else f'within a factor of {HEADROOM:g} of'} the largest {format} "
            f"number, {limit:g}"
        )
    if not math.isfinite(expected_square(unit.roundings)):
        return f"what it does to the loss in {format} is not finite"
    # What is no number is far off: a median must not pass it over.
    errors = [error if math.isfinite(error) else math.inf for error in unit.gradient_errors]
    error = median(errors) if errors else 0.0
    if math.isinf(error):
        return f"its gradients in {format} are not finite"
    if error > WRONG_GRADIENTS:
        return f"its gradients in {format} are {error:.0%} off FP32's"
    return ""


def edge_rules(measured: Sensitivities) -> dict[str, str]:
    """Why modules must stay in FP32 for the numbers that they hand on or take: path -> reason."""
    limit = float(named(measured.format).max)
    rules: dict[str, str] = {}
    for edge in measured.edges:
        maker, taker = (path or "the model itself" for path in (edge.producer, edge.consumer))
        large = (
            f"of {edge.largest:.4g}, within a factor of {HEADROOM:g} of the largest {measured.format} number"
        )
        if edge.largest > limit:
            large = f"of {edge.largest:.4g}, beyond the largest {measured.format} number"
        if edge.largest * HEADROOM > limit:
            rules.setdefault(edge.producer, f"it hands {taker} a number {large}, {limit:g}")
            if edge.casts:
                rules.setdefault(edge.consumer, f"it takes a number {large}, {limit:g}, from {maker}")
        elif not math.isfinite(expected_square(edge.roundings)):
            rules.setdefault(edge.consumer, f"what it takes from {maker} is not finite in {measured.format}")
    return rules


def broken(measured: Sensitivities) -> set[str]:
    """The modules that would do to the loss what no number says."""
    units = {
        u.path for u in measured.units if u.overflow or u.failed or math.isinf(expected_square(u.roundings))
    }
    return units | {e.consumer for e in measured.edges if math.isinf(expected_square(e.roundings))}
