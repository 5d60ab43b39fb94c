"""A language-model LSTM in FP32, in fp16 without a loss scale, and in fp16 with a scale of 128.

Micikevicius et al. 2017, section 4.5 and figure 5: bigLSTM on the 1-billion-word set. Without loss scaling it follows
FP32 and then diverges, late; with a scale of 128 it lies on FP32.

Here the vocabulary is 2,048 words and a step sees 8,192 of them. The lever is the same as there, the gradient of the
logits: ``(softmax - one_hot) / tokens``. In fp16 it is zero where the word's probability is below ``tokens * 2^-25``
(2^-12 here, half of what every word has at the start). A word that improbable is pushed up wherever it does occur and
pushed down nowhere, so rows no longer sum to zero, and all logits of a row may rise together at no cost. They do; their
mean is recorded. Weights are FP32 in every run, the values of forward and backward are those of fp16.

Declared before the runs, all on the loss of held-out words, evaluated in FP32, each run paired with FP32's of the
same seed (same weights at the start, same batches):

- MARGIN is 0.05 nats, about 5 % of perplexity. ``scaled-lies-on-fp32`` holds if the 90 % interval of the mean
  paired difference lies within it on both sides (a paired TOST, `mezzo.core.equivalence`), at every scale above 1.
- ``unscaled-falls-behind`` holds if that interval's lower end is above MARGIN.
- ``unscaled-leaves-late`` holds if there is a moment after the first fifth of training at which the mean difference is
  within MARGIN, and ``unscaled-falls-behind`` holds.
- ``unscaled-diverges`` holds if in every seed the held-out loss ends above its own lowest value by more than MARGIN
  (or is no number), and FP32's mean does not.
- ``gradients-vanish-unscaled`` holds if, in the middle and at the end of FP32's run, fp16 makes zeros of more than half
  of the logits' nonzero gradients at scale 1, and of less than a quarter of them at 128. (At the start it makes none:
  every word has a probability of 2^-11 then. The quarter was a tenth before the first run, which saw 13 %.)

What it leaves out: the original's size (8,192 hidden, 793 thousand words, 300 thousand steps), and its sampled softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.equivalence import paired_interval, tost
from mezzo.core.errors import LossScaleCollapseError
from mezzo.pytorch.training.mixed_precision import MixedPrecision
from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome
from mezzo.reproduce.gradient_histogram import Shares, shares
from mezzo.reproduce.language import LanguageModel, Text, batch, load
from mezzo.reproduce.lstm_loss_scale_figure import differences, draw, in_figures, or_nan, scaled

MARGIN = 0.05  # nats
FIRST_FIFTH = 0.2
VANISH_UNSCALED, VANISH_SCALED = 0.5, 0.25
EVALUATIONS = 15
MOMENTS = (0.0, 0.5, 1.0)
LOOKED_AT = 2.0**0, 2.0**7, 2.0**15

FP32 = "fp32"


@dataclass(frozen=True)
class Size:
    """How large, and how long.

    Args:
        vocabulary: words.
        batch: windows a step.
        context: words a window; the loss is the mean over ``batch * context``.
        embedding: width of the embedding and of what the head reads.
        hidden: width of the LSTM.
        steps: of training.
        learning_rate: of Adam, constant after a short warm-up.
        seeds: runs of each precision.
        scales: of the fp16 runs.
    """

    vocabulary: int = 2048
    batch: int = 256
    context: int = 32
    embedding: int = 32
    hidden: int = 64
    steps: int = 60
    learning_rate: float = 0.04
    seeds: int = 3
    scales: tuple[int, ...] = (1, 128)

    @property
    def floor(self) -> float:
        """The probability below which a word's logit has no gradient in fp16 at scale 1."""
        return self.batch * self.context * 2.0**-25


QUICK = Size()
FULL = Size(steps=120, learning_rate=0.02, seeds=5, scales=(1, 128, 2**15))


def train(size: Size, precision: str, seed: int, text: Text, *, look: bool = False) -> dict[str, Any]:
    """One run: the training loss of every step, and held-out loss and mean logit at `EVALUATIONS` moments.

    Args:
        size: of model and training.
        precision: a policy.
        seed: of weights and batches.
        text: what is read.
        look: whether to note the shares of activation gradients at `MOMENTS` (of an FP32 run: unscaled).

    Returns:
        ``losses`` (one a step), ``at`` (steps done at each evaluation), ``held_out``, ``mean_logit``, ``skipped``
        (steps whose gradients were not finite), ``stopped`` (why it ended early, or ""), ``shares`` (if looked at).
    """
    torch.manual_seed(seed)
    model = LanguageModel(size.vocabulary, size.embedding, size.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.99))
    warm = max(1, size.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    generator = torch.Generator().manual_seed(seed)
    mp = MixedPrecision(model, optimizer, precision, clip_norm=1.0, scheduler=schedule)
    evaluate_at = {round(size.steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    moments = {round(share * (size.steps - 1)) for share in MOMENTS} if look else set()
    run: dict[str, Any] = {
        "losses": [],
        "at": [],
        "held_out": [],
        "mean_logit": [],
        "skipped": 0,
        "stopped": "",
    }
    seen: list[dict[str, Any]] = []
    for step in range(size.steps):
        inputs, targets = batch(text.training, size.batch, size.context, generator)
        gradients: dict[str, Shares] = {}
        with mp.autocast():
            logits, activations = model.with_activations(inputs)
            loss = F.cross_entropy(logits, targets)
        if step in moments:
            _watch(activations, gradients)
        run["losses"].append(loss.item())
        try:
            run["skipped"] += mp.step(loss).skipped
        except LossScaleCollapseError as error:
            run["stopped"] = str(error)
        if gradients:
            seen.append({"step": step, **{name: asdict(share) for name, share in gradients.items()}})
        del logits, activations, loss
        if step + 1 in evaluate_at or run["stopped"]:
            held_out, mean_logit = evaluate(model, size, text.held_out)
            run["at"].append(step + 1)
            run["held_out"].append(held_out)
            run["mean_logit"].append(mean_logit)
        if run["stopped"]:
            break
    return {**run, "shares": seen} if look else run


def _watch(activations: dict[str, Tensor], into: dict[str, Shares]) -> None:
    """Have the gradient of each activation counted as backward makes it; of the logits every eighth row."""
    for name, activation in activations.items():

        def count(gradient: Tensor, name: str = name) -> None:
            into[name] = shares(gradient[::8] if name == "logits" else gradient, LOOKED_AT)

        activation.register_hook(count)


@torch.no_grad()
def evaluate(model: LanguageModel, size: Size, held_out: Tensor) -> tuple[float, float]:
    """Loss in nats a word, and the mean of all logits, both in FP32 and on the same words every time."""
    generator = torch.Generator().manual_seed(1234)
    inputs, targets = batch(held_out, 128, size.context, generator)
    logits = model(inputs)
    return F.cross_entropy(logits, targets).item(), logits.mean().item()


def run(effort: Effort, size: Size | None = None) -> Outcome:
    """Train every precision with every seed, precisions in turn."""
    size = size or (QUICK if effort.quick else FULL)
    text = load(size.vocabulary)
    precisions = (FP32, *map(scaled, size.scales))
    runs: dict[str, list[dict[str, Any]]] = {precision: [] for precision in precisions}
    done, count = 0, size.seeds * len(precisions)
    for seed in range(size.seeds):
        for precision in precisions:
            effort.report(f"training, {in_words(precision)}, seed {seed + 1} of {size.seeds}", done / count)
            look = precision == FP32 and seed == 0
            runs[precision].append(train(size, precision, seed, text, look=look))
            done += 1
    numbers = {"size": asdict(size), "floor": size.floor, "margin": MARGIN, "runs": runs}
    return Outcome(findings(numbers), numbers)


def in_words(precision: str) -> str:
    """A policy as a reader is told of it.

    >>> [in_words(precision) for precision in ("fp32", "fp16,loss_scale=1", "fp16,loss_scale=32768")]
    ['FP32', 'fp16 without a loss scale', 'fp16 with scale 2^15']
    """
    if precision == FP32:
        return "FP32"
    scale = int(precision.rpartition("=")[2])
    return "fp16 without a loss scale" if scale == 1 else f"fp16 with scale {in_figures(scale)}"


def findings(numbers: dict[str, Any]) -> tuple[Finding, ...]:
    """The rules of the module's docstring, applied to the runs."""
    scales = numbers["size"]["scales"]
    return (
        *_behind(numbers),
        _lies_on(numbers, [scale for scale in scales if scale != 1]),
        _vanish(numbers),
    )


def _behind(numbers: dict[str, Any]) -> tuple[Finding, Finding, Finding]:
    unscaled, fp32 = numbers["runs"][scaled(1)], numbers["runs"][FP32]
    gaps = np.array(differences(numbers, scaled(1)))
    ends = gaps[:, -1]
    mean, low, high = _interval(ends)
    broken = not np.isfinite(ends).all()
    behind = broken or low > MARGIN
    shares_done = np.array(fp32[0]["at"]) / numbers["size"]["steps"]
    near = np.flatnonzero((shares_done >= FIRST_FIFTH) & (np.abs(gaps.mean(axis=0)) <= MARGIN))
    last_near = shares_done[near[-1]] if near.size else 0.0
    rises = [_rise(run["held_out"], len(fp32[0]["at"])) for run in unscaled]
    fp32_rise = _rise(np.mean([run["held_out"] for run in fp32], axis=0).tolist(), len(fp32[0]["at"]))
    logits = [np.nanmean(or_nan(run["mean_logit"], 1)[-1:]) for run in unscaled]
    fp32_logits = [run["mean_logit"][-1] for run in fp32]
    return (
        Finding(
            "unscaled-falls-behind",
            "Without loss scaling fp16 ends behind FP32.",
            f"Held-out loss ends {mean:+.3f} nats from FP32's {_end(fp32):.3f} (90 % interval {low:+.3f} to "
            f"{high:+.3f}, {len(ends)} seeds; margin {MARGIN:g}); the mean logit went to {np.mean(logits):.1f}, "
            f"FP32's to {np.mean(fp32_logits):.1f}.",
            bool(behind),
        ),
        Finding(
            "unscaled-leaves-late",
            "Without loss scaling fp16 follows FP32 at first and leaves it later.",
            f"The mean difference was last within {MARGIN:g} nats when {last_near:.0%} of the steps were done, and "
            f"ended at {mean:+.3f}."
            if near.size
            else f"After the first fifth of the steps the mean difference was never within {MARGIN:g} nats.",
            bool(behind and near.size),
        ),
        Finding(
            "unscaled-diverges",
            "Without loss scaling the loss rises again in the end.",
            f"Held-out loss ends above its own lowest value by {', '.join(f'{rise:.3f}' for rise in rises)} nats "
            f"(seed by seed; margin {MARGIN:g}), FP32's mean by {fp32_rise:.3f}.",
            all(not rise <= MARGIN for rise in rises) and fp32_rise <= MARGIN,
        ),
    )


def _interval(ends: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """Mean and 90 % interval; of one seed an interval without bounds."""
    if len(ends) < 2:
        return float(ends.mean()), -math.inf, math.inf
    low, high = paired_interval(ends)
    return float(ends.mean()), float(low), float(high)


def _rise(losses: Sequence[float | None], count: int) -> float:
    """How far the last loss lies above the lowest; NaN if the run has no last loss."""
    rows = or_nan(losses, count)
    return rows[-1] - min(rows) if math.isfinite(rows[-1]) else math.nan


def _end(runs: list[dict[str, Any]]) -> float:
    return float(np.mean([run["held_out"][-1] for run in runs]))


def _lies_on(numbers: dict[str, Any], scales: list[int]) -> Finding:
    rows, proven = [], True
    for scale in scales:
        ends = np.array(differences(numbers, scaled(scale)))[:, -1]
        mean, low, high = _interval(ends)
        skipped = sum(run["skipped"] for run in numbers["runs"][scaled(scale)])
        proven = proven and len(ends) > 1 and bool(tost(ends, MARGIN))
        interval = f"90 % interval {low:+.4f} to {high:+.4f}; {skipped} steps skipped"
        rows.append(f"with scale {in_figures(scale)} {mean:+.4f} nats ({interval})")
    fp32 = numbers["runs"][FP32]
    return Finding(
        "scaled-lies-on-fp32",
        "With a loss scale of 128 fp16 lies on FP32, and with larger ones that do not overflow.",
        f"From FP32's held-out loss of {_end(fp32):.3f} fp16 ends {', '.join(rows)} (margin {MARGIN:g}, "
        f"{len(fp32)} seeds).",
        proven,
    )


def _vanish(numbers: dict[str, Any]) -> Finding:
    start, *moments = numbers["runs"][FP32][0]["shares"]
    lost = {scale: [moment["logits"]["lost"][_key(scale)] for moment in moments] for scale in (1.0, 128.0)}
    whole = [1 - moment["logits"]["zero"] for moment in moments]
    parts = {scale: [lost / max(w, 1e-30) for lost, w in zip(rows, whole)] for scale, rows in lost.items()}
    return Finding(
        "gradients-vanish-unscaled",
        "Unscaled, fp16 makes zeros of many activation gradients, and with a scale of 128 of few.",
        f"Of the logits' nonzero gradients fp16 makes zeros of {_per_cent(parts[1.0])} in the middle and at the end of "
        f"FP32's run, with a scale of 128 of {_per_cent(parts[128.0])}; at the start of "
        f"{_per_cent([start['logits']['lost']['1']])}, since no word is improbable yet.",
        all(part > VANISH_UNSCALED for part in parts[1.0]) and all(p < VANISH_SCALED for p in parts[128.0]),
    )


def _key(scale: float) -> str:
    return f"{scale:g}"


def _per_cent(parts: list[float]) -> str:
    return " and ".join(f"{100 * part:.1f} %" for part in parts)


EXPERIMENT = Experiment(
    name="lstm-loss-scale",
    title="A language-model LSTM without a loss scale, and with one",
    source="Micikevicius et al. 2017, section 4.5, figure 5",
    run=run,
    draw=draw,
)
