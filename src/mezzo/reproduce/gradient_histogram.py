"""How large activation gradients are, what of them fp16 loses, and whether that matters.

Micikevicius et al. 2017, section 3.2 and figure 3: in Multibox SSD 67 % of the activation gradients are zero, and much
of the rest lies below fp16's range, while most of that range is not used. A loss scale of 8, a shift by three powers
of two, is enough to match FP32: values in [2^-27, 2^-24) matter, those below 2^-27 don't.

Here a small multibox detector, without normalisation as SSD's VGG, finds a square, a disk or a cross in a noisy image:
two feature maps, 1,920 anchors an image, nearly all of them background; the hardest negatives, three for each
positive, count in the loss, which is a mean over all anchors. Gradients are those of the convolutions' outputs, in
FP32.

Declared before the runs:

- ``mostly-zeros`` holds if, of all gradients looked at together, more than half are zero.
- ``lost-unscaled`` holds if fp16 makes zeros of more than 5 % of the nonzero ones, at every moment.
- ``shift-3-recovers-most`` and ``shift-15-recovers-all`` hold if a loss scale of 2^3 recovers more than half of what
  is lost unscaled, and one of 2^15 more than 99 % with nothing past 65504, over all moments together.
- ``unscaled-falls-behind``: training in fp16 without a loss scale ends behind FP32: the lower end of the 90 % interval
  of the mean paired difference of the held-out loss is above the margin: 1 % of FP32's mean; 5 % in full, where longer
  runs part further by chance (two seeds, before: by about 2.5 %).
- ``scaled-lies-on-fp32``: at every scale above 1, that interval lies within it on both sides (a paired TOST).
- ``small-gradients-matter-later``: a loss scale below 1 stands for a loss that is so much smaller, as with more anchors
  or a larger batch. It holds if at the smallest scale tried fp16 falls behind by the rule above.

What it leaves out: real images, and the original's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.core.equivalence import paired_interval, tost
from mezzo.core.errors import LossScaleCollapseError
from mezzo.pytorch.training.mixed_precision import MixedPrecision
from mezzo.reproduce.detector import Detector, loss_of, pictures
from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome
from mezzo.reproduce.gradient_histogram_figure import draw, in_figures, scaled, together

LOWEST, HIGHEST = -60, 20
"""Exponents of the histogram's first and last bin; what is smaller or larger is counted there."""


@dataclass(frozen=True)
class Shares:
    """What of a tensor fp16 keeps, as shares of all its elements.

    Args:
        elements: how many there are.
        zero: exactly zero.
        lost: by loss scale (as text): not zero, but zero as fp16 (2^-25 and below, ties to even).
        subnormal: by loss scale: among fp16's subnormal numbers, nonzero and below 2^-14.
        overflow: by loss scale: infinite or NaN as fp16.
        between: in [2^-27, 2^-24).
        below: nonzero and below 2^-27.
    """

    elements: int
    zero: float
    lost: dict[str, float]
    subnormal: dict[str, float]
    overflow: dict[str, float]
    between: float
    below: float


def shares(gradient: Tensor, scales: Sequence[float]) -> Shares:
    """Count what fp16 makes of a gradient times each of these loss scales.

    Args:
        gradient: floating, any shape, at least one element.
        scales: powers of two; products that FP32 can't hold count as overflow.
    """
    flat = gradient.detach().flatten().float()
    size, zero = flat.abs(), flat == 0
    lost, subnormal, overflow = {}, {}, {}
    for scale in scales:
        half, key = (size * scale).half(), f"{scale:g}"
        lost[key] = _share((half == 0) & ~zero)
        subnormal[key] = _share((half > 0) & (half < 2.0**-14))
        overflow[key] = _share(~half.isfinite())
    return Shares(
        flat.numel(), _share(zero), lost, subnormal, overflow,
        _share((size >= 2.0**-27) & (size < 2.0**-24)), _share((size < 2.0**-27) & ~zero),
    )  # fmt: skip


def _share(chosen: Tensor) -> float:
    return chosen.sum().item() / chosen.numel()


def histogram(gradient: Tensor) -> list[int]:
    """How many elements have each exponent, ``floor(log2(|g|))``, from `LOWEST` to `HIGHEST`; zeros are left out.

    Smaller ones are in the first bin, larger, infinite and NaN ones in the last.

    >>> sum(histogram(torch.tensor([0.0, 1.0, 1.5, 2.0]))), histogram(torch.tensor([1.0, 1.5]))[-LOWEST]
    (3, 2)
    """
    flat = gradient.detach().flatten().double()
    flat = flat[flat != 0].nan_to_num(math.inf, math.inf, -math.inf).clamp(-(2.0**99), 2.0**99)
    exponents = (torch.frexp(flat).exponent - 1).clamp(LOWEST, HIGHEST)
    counts: list[int] = torch.bincount(exponents - LOWEST, minlength=HIGHEST - LOWEST + 1).tolist()
    return counts


@dataclass(frozen=True)
class Size:
    """How large, and how long.

    Args:
        width: channels of the first convolution.
        batch: images a step.
        steps: of SGD with momentum 0.9.
        learning_rate: at the start; it falls to zero along a cosine. Large, since the loss is a mean over anchors.
        seeds: runs of each precision.
        scales: loss scales of the fp16 runs, the smallest of them first.
        margin: of the end's loss, as a share of FP32's.
    """

    width: int = 8
    batch: int = 32
    steps: int = 60
    learning_rate: float = 10.0
    seeds: int = 3
    scales: tuple[float, ...] = (2.0**-9, 1.0, 8.0, 2.0**15)
    margin: float = 0.01


QUICK = Size()
FULL = Size(steps=200, seeds=8, margin=0.05, scales=(2.0**-9, 2.0**-6, 2.0**-3, 1.0, 8.0, 2.0**15))
FP32 = "fp32"
SHIFTS = (1.0, 8.0, 2.0**15)
MOMENTS = {"start": 0.0, "middle": 0.5, "end": 1.0}


def train(size: Size, precision: str, seed: int, *, look: bool = False) -> dict[str, Any]:
    """One run: losses a positive anchor of every step, and at the end, in FP32, of 512 images held out.

    Returns:
        ``losses``, ``held_out``, ``skipped`` (steps), ``stopped`` (why it ended early, or ""), and if looked at,
        ``moments``: for each of `MOMENTS` the `histogram` and `Shares` of all convolutions' outputs together.
    """
    torch.manual_seed(seed)
    model = Detector(size.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=size.learning_rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / size.steps))
    )
    generator = torch.Generator().manual_seed(seed)
    mp = MixedPrecision(model, optimizer, precision, clip_norm=1.0, scheduler=schedule)
    moments = {round(share * (size.steps - 1)): name for name, share in MOMENTS.items()} if look else {}
    run: dict[str, Any] = {"losses": [], "skipped": 0, "stopped": "", "moments": {}}
    for step in range(size.steps):
        images, boxes, kinds = pictures(size.batch, generator)
        caught: list[Tensor] = []
        with mp.autocast():
            outputs, activations = model(images)
            loss, shown = loss_of(outputs.float(), boxes, kinds)
        if step in moments:
            for activation in activations.values():
                activation.register_hook(
                    lambda gradient, into=caught: into.append(gradient.detach().flatten())
                )
        run["losses"].append(shown.item())
        try:
            run["skipped"] += mp.step(loss).skipped
        except LossScaleCollapseError as error:
            run["stopped"] = str(error)
            break
        if caught:
            every = torch.cat(caught)
            run["moments"][moments[step]] = {
                "step": step, "counts": histogram(every), **asdict(shares(every, SHIFTS))
            }  # fmt: skip
    with torch.no_grad():
        images, boxes, kinds = pictures(512, torch.Generator().manual_seed(4321))
        run["held_out"] = loss_of(model(images)[0], boxes, kinds)[1].item()
    return run


def run(effort: Effort, size: Size | None = None) -> Outcome:
    """Train every precision with every seed, precisions in turn; look at the gradients of FP32's first run."""
    size = size or (QUICK if effort.quick else FULL)
    precisions = (FP32, *map(scaled, size.scales))
    runs: dict[str, list[dict[str, Any]]] = {precision: [] for precision in precisions}
    done, count = 0, size.seeds * len(precisions)
    for seed in range(size.seeds):
        for precision in precisions:
            effort.report(f"training, {in_words(precision)}, seed {seed + 1} of {size.seeds}", done / count)
            runs[precision].append(train(size, precision, seed, look=precision == FP32 and seed == 0))
            done += 1
    numbers = {
        "size": asdict(size), "margin": size.margin, "lowest": LOWEST, "moments": runs[FP32][0].pop("moments"),
        "runs": {precision: [{**one, "moments": None} for one in rows] for precision, rows in runs.items()},
    }  # fmt: skip
    return Outcome(findings(numbers), numbers)


def in_words(precision: str) -> str:
    """A policy as a reader is told of it.

    >>> [in_words(precision) for precision in ("fp32", "fp16,loss_scale=1.0", "fp16,loss_scale=0.125")]
    ['FP32', 'fp16 without a loss scale', 'fp16 with scale 2^-3']
    """
    if precision == FP32:
        return "FP32"
    scale = float(precision.rpartition("=")[2])
    return "fp16 without a loss scale" if scale == 1 else f"fp16 with scale {in_figures(scale)}"


def findings(numbers: dict[str, Any]) -> tuple[Finding, ...]:
    """The rules of the module's docstring, applied to gradients and runs."""
    moments = numbers["moments"]
    every = together(moments)
    parts = {name: row["lost"]["1"] / max(1 - row["zero"], 1e-30) for name, row in moments.items()}
    return (
        Finding(
            "mostly-zeros",
            "Most activation gradients of a detector are exactly zero (67 % in Multibox SSD).",
            f"{every['zero']:.0%} are zero; {every['between']:.1%} lie in [2^-27, 2^-24), {every['below']:.1%} below.",
            every["zero"] > 0.5,
        ),
        Finding(
            "lost-unscaled",
            "A part of the nonzero ones is too small for fp16.",
            "Of the nonzero ones fp16 makes zeros of "
            + ", ".join(f"{part:.1%} at the {name}" for name, part in parts.items())
            + f"; of all gradients {every['subnormal']['1']:.1%} become subnormal and "
            f"{every['overflow']['1']:.1%} overflow.",
            all(part > 0.05 for part in parts.values()),
        ),
        _recovers(every, 8.0, "shift-3-recovers-most", 0.5),
        _recovers(every, 2.0**15, "shift-15-recovers-all", 0.99),
        *_trained(numbers),
    )


def _recovers(every: dict[str, Any], scale: float, name: str, enough: float) -> Finding:
    lost, still = every["lost"]["1"], every["lost"][f"{scale:g}"]
    over = every["overflow"][f"{scale:g}"]
    part = 1 - still / lost if lost else 0.0
    return Finding(
        name,
        f"A shift by 2^{math.log2(scale):g} recovers {'most' if enough < 0.9 else 'all'} of what fp16 loses.",
        f"It recovers {part:.1%}: of all gradients {still:.2%} are lost in place of {lost:.2%}, {over:.2%} overflow.",
        part > enough and over == 0,
    )


def _trained(numbers: dict[str, Any]) -> tuple[Finding, Finding, Finding]:
    """The findings on the runs: at scales below 1, at 1, and above."""
    scales = sorted(numbers["size"]["scales"])
    judged = {scale: _judged(numbers, scale) for scale in scales}
    below, above = [scale for scale in scales if scale < 1], [scale for scale in scales if scale > 1]
    fp32 = float(np.mean([run["held_out"] for run in numbers["runs"][FP32]]))
    tail = f"(margin {numbers['margin'] * fp32:.3f}, {len(numbers['runs'][FP32])} seeds)."

    def ends(chosen: list[float]) -> str:
        rows = "; ".join(f"at scale {in_figures(scale)} {judged[scale].words}" for scale in chosen)
        return f"From FP32's held-out loss of {fp32:.3f} fp16 ends {rows} {tail}"

    return (
        Finding(
            "unscaled-falls-behind",
            "Without a loss scale fp16 falls behind: what lies below 2^-24 matters.",
            ends([1.0]),
            judged[1.0].behind,
        ),
        Finding(
            "scaled-lies-on-fp32",
            "With a loss scale of 8 fp16 lies on FP32, and with larger ones that do not overflow.",
            ends(above),
            all(judged[scale].equivalent for scale in above),
        ),
        Finding(
            "small-gradients-matter-later",
            f"Were the loss {round(1 / below[0])} times smaller, fp16 would fall behind.",
            ends(below),
            judged[below[0]].behind,
        ),
    )


@dataclass(frozen=True)
class _Judged:
    """Runs at one scale against FP32's: whether harm, or equivalence, is established, and the numbers."""

    behind: bool
    equivalent: bool
    words: str


def _judged(numbers: dict[str, Any], scale: float) -> _Judged:
    fp32 = np.array([run["held_out"] for run in numbers["runs"][FP32]])
    ours = numbers["runs"][scaled(scale)]
    ends = np.array([math.nan if run["held_out"] is None else run["held_out"] for run in ours]) - fp32
    margin = numbers["margin"] * float(fp32.mean())
    low, high = paired_interval(ends) if len(ends) > 1 else (-math.inf, math.inf)
    skipped = sum(run["skipped"] for run in ours)
    return _Judged(
        bool(not np.isfinite(ends).all() or low > margin),
        len(ends) > 1 and bool(tost(ends, margin)),
        f"{ends.mean():+.4f} (90 % interval {low:+.4f} to {high:+.4f}; {skipped} steps skipped)",
    )


EXPERIMENT = Experiment(
    name="gradient-histogram",
    title="Activation gradients against fp16's range, and what a shift recovers",
    source="Micikevicius et al. 2017, section 3.2, figure 3",
    run=run,
    draw=draw,
)
