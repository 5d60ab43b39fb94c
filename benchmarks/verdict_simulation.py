"""Measure how often each verdict is wrong, for simulated runs whose truth is known.

    python benchmarks/verdict_simulation.py                 # writes benchmarks/results/verdict_simulation.json
    python benchmarks/verdict_simulation.py --trials 400 --out FILE.json
    PYTHONPATH=OTHER/src python benchmarks/verdict_simulation.py --out FILE.json   # another version's rates

Each trial simulates the runs of a comparison and calls `mezzo.core.verdict.judge`. Differences within pairs are drawn
from six distributions, in units of the margin, with their mean at the margin (then `equivalent` is wrong) or at zero
(then `divergent` is wrong). The loss is judged alone, or with a metric of independent noise.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mezzo.core.comparison import Parity
from mezzo.core.equivalence import paired_interval, tost_power
from mezzo.core.verdict import Margins, RunResult, judge

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]


def _lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Mean 0 and deviation 1, skewed towards harm: most values slightly below zero, few far above."""
    found: Floats = (np.exp(rng.standard_normal(shape)) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)
    return found


def _mixture(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """One value in ten has five times the deviation of the others; deviation 1 over all."""
    found: Floats = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.1, 5.0, 1.0) / np.sqrt(3.4)
    return found


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3),
    "t2": lambda rng, shape: rng.standard_t(2, shape) / 2,  # has no deviation; half its scale is "1"
    "mixture": _mixture,
    "lognormal": _lognormal,
    "-lognormal": lambda rng, shape: -_lognormal(rng, shape),
}
PAIRS = (3, 5, 10)
SDS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Deviations of a pair's difference, in margins."""
POWER_SDS = (0.3, 0.5, 1.0, 2.0)
CUTS = (57, 45, 30, 15)
"""Where a candidate's curve of 60 steps ends."""
RARE = (0.05, 0.1, 0.2)
"""Shares of seeds that fail, each by a harm that makes the mean harm the margin."""

BASE, MARGIN = 1.0, 0.005
HEAD = np.full(5, 100.0)  # where a run starts: far above the end, so that no difference looks like a collapse


def _run(gap: float, metric: float | None = None) -> RunResult:
    return RunResult(np.concatenate([HEAD, np.full(5, BASE + gap)]), metric, 10)


def word(harms: Floats, twin: Floats | None, metric_harms: Floats | None, level: Floats) -> Parity:
    """The word for these differences.

    Args:
        harms: candidate - FP32 of the loss, in margins, one per pair.
        twin: FP32's own difference to its one-ulp twin, of loss and metric, in margins; None without a twin.
        metric_harms: how much worse the metric is, in margins; None to judge by the loss alone.
        level: what each pair's seed adds to both of its losses.
    """
    metrics = np.zeros(len(harms)) if metric_harms is None else metric_harms
    with_metric = metric_harms is not None
    twins = {}
    if twin is not None:
        twins[0] = _run(level[0] + MARGIN * twin[0], 90.0 + 0.2 * twin[1] if with_metric else None)
    return judge(
        {k: _run(one, 90.0 + k if with_metric else None) for k, one in enumerate(level)},
        {
            k: _run(one + MARGIN * harm, 90.0 + k - 0.2 * metrics[k] if with_metric else None)
            for k, (one, harm) in enumerate(zip(level, harms))
        },
        twins,
        Margins(MARGIN),
    ).parity


def _levels(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    found: Floats = 1e-4 * rng.standard_normal(shape)  # small, so that the margin stays 0.005
    return found


def _possible(harms: Floats, wanted: Parity) -> NDArray[np.bool_]:
    """Which trials can earn that word at all: their 80 % interval, narrower than the verdict's, allows it.

    Only these are judged: the others cost most of the time and cannot count.
    """
    low, high = paired_interval(harms, 0.80)
    return (low > 0.0) if wanted is Parity.DIVERGENT else (low > -1.0) & (high < 1.0)


def _share(
    rng: np.random.Generator,
    wanted: Parity,
    harms: Floats,
    twins: Floats | None = None,
    metric_harms: Floats | None = None,
) -> float:
    """The share of trials that get this word.

    Args:
        rng: draws the seeds' levels.
        wanted: the word.
        harms: of the loss, in margins, `[trials, pairs]`.
        twins: FP32's differences to its twin, `[trials, 2]`.
        metric_harms: of the metric, `[trials, pairs]`.
    """
    levels = 1e-4 * rng.standard_normal(harms.shape)  # small, so that the margin stays 0.005
    possible = _possible(harms, wanted)
    if metric_harms is not None:
        possible |= _possible(metric_harms, wanted)
    found = 0
    for i in np.flatnonzero(possible):
        twin = None if twins is None else twins[i]
        metrics = None if metric_harms is None else metric_harms[i]
        found += word(harms[i], twin, metrics, levels[i]) is wanted
    return found / len(harms)


def _twins(rng: np.random.Generator, name: str, sd: float, trials: int) -> Floats:
    """FP32 against itself: noise of the same size, but symmetric, since either run may be the worse one."""
    found: Floats = sd * DISTRIBUTIONS[name](rng, (trials, 2)) * rng.choice([-1.0, 1.0], (trials, 2))
    return found


def _power_error(sd: float, pairs: int, trials: int, rng: np.random.Generator) -> dict[str, float]:
    harms = sd * rng.standard_normal((trials, pairs))
    levels = 1e-4 * rng.standard_normal((trials, pairs))
    printed = []
    for i in range(trials):
        found = judge(
            {k: _run(one) for k, one in enumerate(levels[i])},
            {k: _run(one + MARGIN * harms[i, k]) for k, one in enumerate(levels[i])},
            None,
            Margins(MARGIN),
        ).loss
        assert found is not None
        assert found.power is not None
        printed.append(found.power)
    true = tost_power(sd, pairs, 1.0)
    return {"printed": float(np.mean(printed)), "true": true, "error": float(np.mean(printed)) - true}


def _cut_curves(cut: int, trials: int, rng: np.random.Generator) -> float:
    """The share of candidates called equivalent or consistent whose run ends at `cut` of 60 steps."""
    steps = np.arange(60)
    clean = 1.0 + 1.5 * np.exp(-steps / 4)
    called = 0
    for _ in range(trials):
        levels = 0.02 * rng.standard_normal(3)
        noise = 1e-4 * rng.standard_normal((7, 60))
        fp32 = {k: RunResult(clean + level + noise[k], None, 60) for k, level in enumerate(levels)}
        ours = {
            k: RunResult((clean + level + noise[3 + k])[:cut], None, cut) for k, level in enumerate(levels)
        }
        twin = {0: RunResult(clean + levels[0] + noise[6], None, 60)}
        called += judge(fp32, ours, twin).parity in (Parity.EQUIVALENT, Parity.CONSISTENT)
    return called / trials


def simulate(trials: int = 2000, seed: int = 0) -> dict[str, Any]:
    """All rates, as JSON.

    Args:
        trials: comparisons per cell; the standard error of a rate r is ``sqrt(r * (1 - r) / trials)``.
        seed: of the random numbers; the same seed gives the same rates.

    Returns:
        `false_equivalent` (true harm: one margin) and `false_divergent` (true harm: zero): distribution ->
        deviation in margins -> pairs -> share of trials. `false_divergent_no_twin` is the latter without an FP32
        twin, `false_divergent_with_metric` that of a loss and a metric with independent noise. `rare_failure`:
        share of failing seeds -> pairs -> share called equivalent. `power_error`: pairs -> deviation -> mean
        printed power, true power and error. `early_end`: steps recorded of 60 -> share called equivalent or
        consistent.
    """
    rng = np.random.default_rng(seed)

    def grid(
        cell: Callable[[str, float, int], float], names: tuple[str, ...] = tuple(DISTRIBUTIONS)
    ) -> dict[str, dict[str, dict[str, float]]]:
        return {name: {f"{sd:g}": {str(n): cell(name, sd, n) for n in PAIRS} for sd in SDS} for name in names}

    def equivalent(name: str, sd: float, n: int) -> float:
        harms = 1.0 + sd * DISTRIBUTIONS[name](rng, (trials, n))
        return _share(rng, Parity.EQUIVALENT, harms, _twins(rng, name, sd, trials))

    def divergent(name: str, sd: float, n: int) -> float:
        harms = sd * DISTRIBUTIONS[name](rng, (trials, n))
        return _share(rng, Parity.DIVERGENT, harms, _twins(rng, name, sd, trials))

    def without_twin(name: str, sd: float, n: int) -> float:
        return _share(rng, Parity.DIVERGENT, sd * DISTRIBUTIONS[name](rng, (trials, n)))

    def with_metric(name: str, sd: float, n: int) -> float:
        draw = DISTRIBUTIONS[name]
        harms, metrics = sd * draw(rng, (trials, n)), sd * draw(rng, (trials, n))
        return _share(rng, Parity.DIVERGENT, harms, _twins(rng, name, sd, trials), metrics)

    def rare(share: float, n: int) -> float:
        harms = 0.2 * rng.standard_normal((trials, n)) + (rng.random((trials, n)) < share) / share
        return _share(rng, Parity.EQUIVALENT, harms)

    return {
        "trials": trials,
        "seed": seed,
        "false_equivalent": grid(equivalent),
        "false_divergent": grid(divergent),
        "false_divergent_no_twin": grid(without_twin, ("normal", "-lognormal")),
        "false_divergent_with_metric": grid(with_metric, ("normal",)),
        "rare_failure": {f"{share:g}": {str(n): rare(share, n) for n in (*PAIRS, 20)} for share in RARE},
        "power_error": {
            str(n): {f"{sd:g}": _power_error(sd, n, max(1, trials // 3), rng) for sd in POWER_SDS}
            for n in PAIRS
        },
        "early_end": {str(cut): _cut_curves(cut, max(1, trials // 10), rng) for cut in CUTS},
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Print one table per quantity, in percent."""
    for quantity in [key for key in found if key.startswith("false_")]:
        table = Table(title=f"{quantity}, % of {found['trials']} trials by pairs and deviation in margins")
        table.add_column("pairs")
        for sd in SDS:
            table.add_column(f"{sd:g}", justify="right")
        for name, by_sd in found[quantity].items():
            for n in PAIRS:
                table.add_row(f"{name}, {n}", *(f"{100 * by_sd[f'{sd:g}'][str(n)]:.1f}" for sd in SDS))
        console.print(table)
    table = Table(title="rare_failure: % called equivalent, by pairs and the share of seeds that fail")
    for name in ("pairs", *found["rare_failure"]):
        table.add_column(name, justify="right")
    for n in (*PAIRS, 20):
        table.add_row(str(n), *(f"{100 * rates[str(n)]:.1f}" for rates in found["rare_failure"].values()))
    console.print(table)
    table = Table(title="power_error: mean printed (true) power in %, by pairs and deviation in margins")
    for name in ("pairs", *(f"{sd:g}" for sd in POWER_SDS)):
        table.add_column(name, justify="right")
    for n in PAIRS:
        cells = found["power_error"][str(n)].values()
        table.add_row(str(n), *(f"{100 * one['printed']:.1f} ({100 * one['true']:.1f})" for one in cells))
    console.print(table)
    early = ", ".join(f"{cut} steps {100 * rate:.0f} %" for cut, rate in found["early_end"].items())
    console.print(f"early_end, called equivalent or consistent, of 60 steps: {early}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000, help="trials per cell (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "verdict_simulation.json"
    )
    arguments = parser.parse_args()
    console = Console()
    start = time.perf_counter()
    found = simulate(arguments.trials, arguments.seed)
    show(console, found)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {arguments.out} ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
