"""The figure of `lost_updates`: how small updates are, how many are lost, and what becomes of the training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Four panels: how small updates are, how many are lost, the training curves, the learning rates."""
    from mezzo.reproduce.figures import WIDTH

    figure.set_size_inches(WIDTH, 8.0)
    axes = figure.subplots(2, 2)
    _draw_ratios(axes[0, 0], numbers["updates"])
    _draw_lost(axes[0, 1], numbers["updates"], numbers["arms"]["fp32"]["steps"])
    _draw_curves(axes[1, 0], numbers["arms"])
    _draw_sweep(axes[1, 1], numbers["sweep"])


def _draw_ratios(axes: Axes, updates: dict[str, Any]) -> None:
    from mezzo.reproduce.figures import BF16, FP16, FP32

    low, counts = updates["lowest"], updates["counts"]
    percent = [100 * count / sum(counts) for count in counts]
    axes.bar(range(low, 1), percent, width=0.9, align="edge", color=FP32)
    top = max(percent)
    for form, power, place, colour in (("fp16", -11, 1.08, FP16), ("bf16", -8, 1.2, BF16)):
        axes.axvline(power, color=colour, linewidth=1.5)
        axes.axvspan(low, power, color=colour, alpha=0.07, linewidth=0)
        words = f"{form} loses what is under 2{'⁻¹¹' if power == -11 else '⁻⁸'} "
        axes.text(power, top * place, words, color=colour, ha="right", va="center")
    axes.set_xlim(-26, 0)
    axes.set_ylim(0, top * 1.3)
    axes.grid(visible=False, axis="x")
    axes.set(title="Update beside its weight (FP32)", xlabel="log₂ |update / weight|", ylabel="updates, %")


def _draw_lost(axes: Axes, updates: dict[str, Any], steps: int) -> None:
    from mezzo.reproduce.figures import BF16, FP16, label_ends

    axes.set_xlim(0, steps * 1.2)
    axes.set_xticks([0, steps // 2, steps])
    axes.set_ylim(0, 103)
    axes.set(title="Updates that rounding the weight loses", xlabel="step", ylabel="updates, %")
    ends = []
    for form, colour in (("fp16", FP16), ("bf16", BF16)):
        percent = [100 * share for share in updates["lost"][form]]
        axes.plot(updates["steps"], percent, color=colour, marker="o", markersize=3)
        ends.append((updates["steps"][-1], percent[-1], form, colour))
    label_ends(axes, ends)


def _draw_curves(axes: Axes, arms: dict[str, Any]) -> None:
    from mezzo.reproduce.figures import BF16, BF16_SAFE, FP16, FP16_SAFE, FP32, INK, label_ends

    steps = arms["fp32"]["steps"]
    axes.set_xlim(0, steps * 1.75)  # room for names
    axes.set_xticks([0, steps // 2, steps])
    axes.set(title="Training loss", xlabel="step", ylabel="cross entropy, nats")
    rows = (
        ("fp32", "FP32", FP32, "-", 4.0),
        ("fp16", "fp16 weights", FP16, "-", 1.8),
        ("bf16", "bf16 weights", BF16, "-", 1.8),
        ("fp16 with masters", "fp16, FP32 masters", FP16_SAFE, "--", 1.6),
        ("bf16 with split masters", "bf16, split masters", BF16_SAFE, ":", 1.6),
        ("bf16 rounded stochastically", "bf16, stochastic", INK, (0, (1, 4)), 1.6),
    )
    ends = []
    for name, label, colour, line, width in rows:
        curve = arms[name]["curve"]
        at = [steps * (i + 0.5) / len(curve) for i in range(len(curve))]
        pairs = [(x, y) for x, y in zip(at, curve) if y is not None]
        axes.plot(
            *zip(*pairs), color=colour, linestyle=line, linewidth=width, alpha=0.45 if width > 2 else 1.0
        )
        ends.append((*pairs[-1], label, colour))
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)


def _draw_sweep(axes: Axes, sweep: dict[str, list[Any]]) -> None:
    from mezzo.reproduce.figures import BF16, FP16, FP32, label_ends

    rates = [row["learning_rate"] for row in sweep["fp32"]]
    axes.set_xscale("log")
    axes.set_xlim(
        rates[-1] * 1.3, rates[0] / (rates[-1] / rates[0]) ** 0.45
    )  # smaller, and longer, to the right
    axes.set(
        title="Final loss: smaller rate, more steps", xlabel="learning rate (rate × steps is the same)",
        ylabel="cross entropy, nats",
    )  # fmt: skip
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ends = []
    for name, label, colour in (
        ("fp32", "FP32", FP32),
        ("fp16", "fp16 weights", FP16),
        ("bf16", "bf16 weights", BF16),
    ):
        losses = [row["loss"] if row["loss"] is not None else math.nan for row in sweep[name]]
        axes.plot(rates, losses, color=colour, marker="o", markersize=4)
        ends.append((rates[0], losses[0], label, colour))
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)
