"""A language-model LSTM in FP32, in fp16 without a loss scale, and in fp16 with a scale of 128.

Micikevicius et al. 2017, section 4.5 and figure 5: bigLSTM on the 1-billion-word set. Without loss scaling it follows
FP32 and then diverges, late; with a scale of 128 it matches FP32.

Here the text is the source of Python's own standard library (so losses differ a little between Pythons), the
vocabulary is 2,048 words and a step sees 8,192 of them. The lever is the same as there, the gradient of the logits:
``(softmax - one_hot) / tokens``. In fp16 it is zero where the word's probability is below ``tokens * 2^-25`` (2^-12
here, half of what every word has at the start). A word that improbable is pushed up wherever it does occur and pushed
down nowhere, so rows no longer sum to zero, and all logits of a row may rise together at no cost. They do; their mean
is recorded. Weights are FP32 in every run, the values of forward and backward are those of fp16.

Declared before the runs, all on the loss of held-out words, evaluated in FP32, each run paired with FP32's of the
same seed (same weights at the start, same batches):

- MARGIN is 0.05 nats, about 5 % of perplexity. ``scaled-lies-on-fp32`` holds if the 90 % interval of the mean paired
  difference lies within it on both sides (a paired TOST, `mezzo.core.equivalence`), at every scale above 1.
- ``unscaled-falls-behind`` holds if that interval's lower end is above MARGIN.
- ``unscaled-leaves-late`` holds if there is a moment after the first fifth of training at which the mean difference is
  within MARGIN, and ``unscaled-falls-behind`` holds.
- ``unscaled-diverges`` holds if in every seed the held-out loss ends above its own lowest value by more than MARGIN
  (or is NaN), and FP32's mean does not.
- ``gradients-vanish-unscaled`` holds if, in the middle and at the end of FP32's run, fp16 makes zeros of more than
  half of the logits' nonzero gradients at scale 1, and of less than a quarter of them at 128. (At the start it makes
  none: every word has a probability of 2^-11 then. The quarter was a tenth before the first run, which saw 13 %.)

What it leaves out: the size of the original (8,192 hidden, 793 thousand words, 300 thousand steps), and its sampled
softmax.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import figures
import mezzo
from common import Finding, Numbers, gap, in_words, main, power, progress, scaled
from gradient_histogram import shares

MARGIN = 0.05  # nats
FIRST_FIFTH = 0.2
VANISH_UNSCALED, VANISH_SCALED = 0.5, 0.25
EVALUATIONS = 15
MOMENTS = (0.0, 0.5, 1.0)
LOOKED_AT = (1.0, 128.0, 2.0**15)
VOCABULARY, BATCH, CONTEXT, EMBEDDING, HIDDEN = 2048, 256, 32, 32, 64
BLOCK, HELD_OUT = 4096, 20  # one block of words in so many is never trained on
WORD = re.compile(r"[^\W\d]\w*|\d+|\n|[^\w\s]")
LINES = {
    "fp32": (figures.FP32, "-"),
    scaled(1): (figures.FP16, "-"),
    scaled(128): (figures.FP16_SAFE, "--"),
    scaled(2**15): (figures.BF16_SAFE, ":"),
}


class Size(NamedTuple):
    """Steps, Adam's learning rate (constant after a short warm-up), runs per precision, scales of the fp16 runs."""

    steps: int
    learning_rate: float
    seeds: int
    scales: tuple[int, ...]


QUICK = Size(60, 0.04, 3, (1, 128))
FULL = Size(120, 0.02, 5, (1, 128, 2**15))


def indices(words: list[str], vocabulary: int) -> Tensor:
    """Words as indices: 1 for the most frequent, up to ``vocabulary - 1``; 0 for all others."""
    most = Counter(words).most_common(vocabulary - 1)
    index = {word: place for place, (word, _) in enumerate(most, 1)}
    return torch.tensor([index.get(word, 0) for word in words])


def load() -> tuple[Tensor, Tensor]:
    """The words of the standard library's modules (about a million): those trained on, and those held out.

    Every twentieth block of 4,096 words is held out, so that both hold parts of all modules.
    """
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words += WORD.findall(path.read_text("utf-8", errors="replace"))
    found = indices(words, VOCABULARY)
    blocks = found[: len(found) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % HELD_OUT == HELD_OUT // 2
    return blocks[~held].reshape(-1), blocks[held].reshape(-1)


def windows(text: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: inputs [CONTEXT, size] and, one word later, targets [CONTEXT * size]."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=generator)
    found = text[starts + torch.arange(CONTEXT + 1)[:, None]]
    return found[:-1], found[1:].flatten()


class LanguageModel(nn.Module):
    """[T, N] words -> [T * N, VOCABULARY] logits of the next word, and every activation whose gradient is of interest.

    Like the original's: an LSTM that is projected down before a vocabulary much wider than itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN)
        self.projection = nn.Linear(HIDDEN, EMBEDDING, bias=False)
        self.head = nn.Linear(EMBEDDING, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        embedded = self.embedding(inputs)
        hidden, _ = self.lstm(embedded)
        projected = self.projection(hidden)
        logits = self.head(projected.flatten(0, 1))
        return logits, {"embedding": embedded, "lstm": hidden, "projection": projected, "logits": logits}


def train(size: Size, precision: str, seed: int, text: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """One run: the training loss of every step, held-out loss and mean logit at `EVALUATIONS` moments.

    The first FP32 run also notes the shares of activation gradients at `MOMENTS`.
    """
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.99))
    warm = max(1, size.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    generator = torch.Generator().manual_seed(seed)
    mp = mezzo.MixedPrecision(model, optimizer, precision, clip_norm=1.0, scheduler=schedule)
    evaluate_at = {round(size.steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    moments = (
        {round(share * (size.steps - 1)) for share in MOMENTS} if (precision, seed) == ("fp32", 0) else set()
    )
    run: dict[str, Any] = {
        "losses": [],
        "at": [],
        "held_out": [],
        "mean_logit": [],
        "skipped": 0,
        "shares": [],
    }
    for step in range(size.steps):
        inputs, targets = windows(text[0], BATCH, generator)
        with mp.autocast():
            logits, activations = model(inputs)
            loss = F.cross_entropy(logits, targets)
        if step in moments:
            run["shares"].append({"step": step})
            for name, activation in activations.items():
                activation.register_hook(lambda gradient, name=name: _note(run["shares"][-1], name, gradient))
        run["losses"].append(loss.item())
        run["skipped"] += mp.step(loss).skipped
        del logits, activations, loss
        if step + 1 in evaluate_at:
            held_out, mean_logit = evaluate(model, text[1])
            run["at"].append(step + 1)
            run["held_out"].append(held_out)
            run["mean_logit"].append(mean_logit)
    return run


def _note(into: dict[str, Any], name: str, gradient: Tensor) -> None:
    into[name] = shares(gradient[::8] if name == "logits" else gradient, LOOKED_AT)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> tuple[float, float]:
    """Loss in nats per word, and the mean of all logits, both in FP32 and on the same words every time."""
    inputs, targets = windows(held_out, 128, torch.Generator().manual_seed(1234))
    logits, _ = model(inputs)
    return F.cross_entropy(logits, targets).item(), logits.mean().item()


def run(full: bool) -> tuple[list[Finding], Numbers]:
    """Train every precision with every seed."""
    size = FULL if full else QUICK
    text = load()
    runs: dict[str, list[dict[str, Any]]] = {}
    for precision in ("fp32", *map(scaled, size.scales)):
        progress(f"training, {precision}, {size.seeds} seeds")
        runs[precision] = [train(size, precision, seed, text) for seed in range(size.seeds)]
    numbers = {"size": size._asdict(), "runs": runs}
    return findings(numbers), numbers


def differences(numbers: Numbers, precision: str) -> Any:
    """Held-out loss minus FP32's of the same seed, [seeds, evaluations]."""
    ours, theirs = (
        np.array([run["held_out"] for run in numbers["runs"][name]]) for name in (precision, "fp32")
    )
    return ours - theirs


def findings(numbers: Numbers) -> list[Finding]:
    """The rules of the module's docstring, applied to the runs."""
    size = Size(**numbers["size"])
    fp32, unscaled = numbers["runs"]["fp32"], numbers["runs"][scaled(1)]
    fp32_end = float(np.mean([run["held_out"][-1] for run in fp32]))
    gaps = differences(numbers, scaled(1))
    judged = {scale: gap(differences(numbers, scaled(scale))[:, -1], MARGIN) for scale in size.scales}
    end = judged[1]
    done = np.array(fp32[0]["at"]) / size.steps
    near = np.flatnonzero((done >= FIRST_FIFTH) & (np.abs(gaps.mean(axis=0)) <= MARGIN))
    left = (
        f"The mean difference was last within {MARGIN:g} nats when {done[near[-1]]:.0%} of the steps were done, and "
        f"ended at {end.mean:+.3f}."
        if near.size
        else f"After the first fifth of the steps the mean difference was never within {MARGIN:g} nats."
    )
    rises = [run["held_out"][-1] - min(run["held_out"]) for run in unscaled]
    fp32_mean = np.mean([run["held_out"] for run in fp32], axis=0)
    fp32_rise = float(fp32_mean[-1] - fp32_mean.min())
    logits, fp32_logits = (np.mean([run["mean_logit"][-1] for run in runs]) for runs in (unscaled, fp32))
    rows = [
        f"with scale {power(scale)} {judged[scale].mean:+.4f} nats (90 % interval {judged[scale].low:+.4f} to "
        f"{judged[scale].high:+.4f}; {sum(run['skipped'] for run in numbers['runs'][scaled(scale)])} steps skipped)"
        for scale in size.scales
        if scale > 1
    ]
    return [
        Finding(
            "unscaled-falls-behind",
            "Without loss scaling, fp16 ends with a higher loss than FP32.",
            f"Held-out loss ends {end.mean:+.3f} nats from FP32's {fp32_end:.3f} (90 % interval {end.low:+.3f} to "
            f"{end.high:+.3f}, {size.seeds} seeds; margin {MARGIN:g}); the mean logit went to {logits:.1f}, "
            f"FP32's to {fp32_logits:.1f}.",
            end.behind,
        ),
        Finding(
            "unscaled-leaves-late",
            "Without loss scaling, fp16 follows FP32 at first and diverges from it later.",
            left,
            end.behind and near.size > 0,
        ),
        Finding(
            "unscaled-diverges",
            "Without loss scaling, the loss rises again at the end.",
            f"Held-out loss ends above its own lowest value by {', '.join(f'{rise:.3f}' for rise in rises)} nats "
            f"(seed by seed; margin {MARGIN:g}), FP32's mean by {fp32_rise:.3f}.",
            all(not rise <= MARGIN for rise in rises)
            and fp32_rise <= MARGIN,  # `not <=`: NaN has diverged too
        ),
        Finding(
            "scaled-lies-on-fp32",
            "With a loss scale of 128, or a larger one that does not overflow, fp16 matches FP32.",
            f"Difference from FP32's held-out loss of {fp32_end:.3f}: {', '.join(rows)} (margin {MARGIN:g}, "
            f"{size.seeds} seeds).",
            all(judged[scale].equivalent for scale in size.scales if scale > 1),
        ),
        vanish(fp32[0]["shares"]),
    ]


def vanish(moments: list[dict[str, Any]]) -> Finding:
    """How many of the logits' nonzero gradients become zero in fp16."""
    start, *later = (moment["logits"] for moment in moments)
    parts = {
        scale: [moment["lost"][scale] / max(1 - moment["zero"], 1e-30) for moment in later]
        for scale in ("1", "128")
    }
    middle_end = {
        scale: " and ".join(f"{100 * part:.1f} %" for part in found) for scale, found in parts.items()
    }
    return Finding(
        "gradients-vanish-unscaled",
        "Without a loss scale, fp16 rounds many activation gradients to zero; with a scale of 128, few.",
        f"fp16 rounds {middle_end['1']} of the logits' nonzero gradients to zero in the middle and at the end of "
        f"FP32's run; with a scale of 128, {middle_end['128']}; at the start, "
        f"{100 * start['lost']['1']:.1f} %, since no word is improbable yet.",
        all(part > VANISH_UNSCALED for part in parts["1"])
        and all(part < VANISH_SCALED for part in parts["128"]),
    )


def draw(numbers: Numbers, figure: Figure) -> None:
    """Held-out loss by step, its difference from FP32's, and the mean of all logits."""
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    runs = numbers["runs"]
    held_out = {name: [run["held_out"] for run in rows] for name, rows in runs.items()}
    from_fp32 = {name: differences(numbers, name) for name in runs if name != "fp32"}
    logits = {name: [run["mean_logit"] for run in rows] for name, rows in runs.items()}
    at = runs["fp32"][0]["at"]
    for place, title, curves in (
        (grid[0, :], "A language-model LSTM: held-out loss, nats per word", held_out),
        (grid[1, 0], f"Difference from FP32 (band: margin {MARGIN:g})", from_fp32),
        (grid[1, 1], "Mean of all logits", logits),
    ):
        axes = figure.add_subplot(place)
        axes.set(title=title, xlabel="step")
        if curves is from_fp32:
            axes.axhspan(-MARGIN, MARGIN, color=figures.FP32, alpha=0.12, linewidth=0)
        for name, rows in curves.items():
            colour, line = LINES[name]
            figures.plot_seeds(axes, at, rows, colour, line, in_words(name))
        axes.legend()


if __name__ == "__main__":
    TITLE = "A language-model LSTM without a loss scale, and with one"
    sys.exit(main("lstm-loss-scale", TITLE, "Micikevicius et al. 2017, section 4.5, figure 5", run, draw))
