"""The gaps that a verdict rests on, of the loss and the metric: each with margin, interval, noise, power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.report.numbers import finite, number, pair


@dataclass(frozen=True)
class Gap:
    """One quantity, candidate minus FP32, in the quantity's own unit; None for what was not measured."""

    quantity: str
    value: float | None
    margin: float | None = None
    interval: tuple[float, float] | None = None
    baseline: float | None = None
    candidate: float | None = None
    noise: float | None = None
    noise_source: str = ""
    power: float | None = None
    pairs_needed: float | None = None


def gaps(values: Mapping[str, Any]) -> list[Gap]:
    """The loss's gap, and the metric's where there is one, from a candidate of `verdict.json`."""
    loss = values.get("loss")
    loss = loss if isinstance(loss, dict) else {}
    found = [
        _gap(
            "loss",
            {
                **values,
                "gap": values.get("loss_gap"),
                "interval": values.get("loss_gap_interval", values.get("interval")),
                "candidate": values.get("final_loss"),
                "baseline": None,
                "noise": values.get("noise_floor"),
                **loss,
            },
        )
    ]
    metric = values.get("metric")
    if isinstance(metric, dict):
        found.append(_gap("metric", metric))
    elif number(values.get("metric_gap")) is not None:
        found.append(
            _gap(
                "metric",
                {
                    "gap": values.get("metric_gap"),
                    "margin": values.get("metric_margin"),
                    "interval": values.get("metric_gap_interval", values.get("metric_interval")),
                    "candidate": values.get("final_metric"),
                },
            )
        )
    return found


def _gap(quantity: str, values: Mapping[str, Any]) -> Gap:
    source = values.get("noise_source")
    return Gap(
        quantity,
        number(values.get("gap")),
        finite(values.get("margin")),
        pair(values.get("interval")),
        finite(values.get("baseline")),
        number(values.get("candidate")),
        finite(values.get("noise")),
        source if isinstance(source, str) else "",
        finite(values.get("power")),
        finite(values.get("pairs_needed")),
    )
