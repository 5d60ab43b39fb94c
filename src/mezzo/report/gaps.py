"""The gaps that a verdict rests on, of the loss and the metric: each with margin, interval, noise, power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.report.numbers import finite, number, pair


@dataclass(frozen=True)
class Gap:
    """One quantity, candidate minus FP32, in the quantity's own unit; None for what was not measured.

    ``share`` and ``margin_share`` are the gap and the margin as parts of FP32's value; ``better`` is
    "higher" or "lower" for a metric.
    """

    quantity: str
    value: float | None
    margin: float | None
    interval: tuple[float, float] | None
    candidate: float | None
    baseline: float | None
    share: float | None
    margin_share: float | None
    noise: float | None
    seed_noise: float | None
    power: float | None
    better: str


def gaps(values: Mapping[str, Any]) -> list[Gap]:
    """The loss's gap, and the metric's where there is one, from a candidate of `verdict.json`."""
    found = [_gap(values, "loss", "")]
    if number(values.get("metric_gap")) is not None:
        found.append(_gap(values, "metric", "metric_"))
    return found


def _gap(values: Mapping[str, Any], quantity: str, prefix: str) -> Gap:
    better = values.get("metric_better") if prefix else None
    return Gap(
        quantity=quantity,
        value=number(values.get(f"{quantity}_gap")),
        margin=finite(values.get(f"{prefix}margin")),
        interval=pair(values.get(f"{quantity}_gap_interval")),
        candidate=number(values.get(f"final_{quantity}")),
        baseline=finite(values.get(f"fp32_{quantity}")),
        share=finite(values.get(f"{quantity}_gap_relative")),
        margin_share=finite(values.get(f"{prefix}margin_relative")),
        noise=finite(values.get(f"{prefix}noise_floor")),
        seed_noise=finite(values.get(f"{prefix}seed_noise")),
        power=finite(values.get(f"{prefix}power")),
        better=better if better in ("higher", "lower") else "",
    )
