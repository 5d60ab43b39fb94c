"""The answer to "may I use it?" for one candidate: a plain line, and the next thing to do as a command to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezzo.compare.request import Request
from mezzo.core.commands import command, compare_command, run_command
from mezzo.core.comparison import FEWEST_FOR_TOST, READING
from mezzo.core.policy import policy

MOST_RUNS = 30
"""More runs than this are not suggested."""
SAME = 1.05
"""Speeds that differ by less than this factor are called the same."""

Candidate = Mapping[str, Any]


def answer(name: str, one: Candidate, request: Request, folder: Path) -> dict[str, str]:
    """The keys of `verdict.json` that answer in plain words: `plain`, and the next step as `advice` and `command`."""
    advice, words = _next_step(name, one, request, folder)
    plain = f"{_judged(one, request)}."
    if one["pairs"]:
        saved = f"{_memory(one['peak_memory_ratio'])}, {_speed(one, request)}."
        plain += f" {saved[0].upper()}{saved[1:]}"
    return {"plain": plain, "advice": advice, "command": shlex.join(words)}


def line(one: Candidate) -> str:
    """A candidate's plain words, and the next step.

    >>> line({"plain": "no harm found.", "advice": "Use it", "command": "mezzo run train.py"})
    'no harm found. Use it: mezzo run train.py'
    """
    return f"{one['plain']} {one['advice']}{': ' if one['command'] else '.'}{one['command']}"


def _judged(one: Candidate, request: Request) -> str:
    word, runs = one["parity"], one["seeds"]
    count, found = f"{runs} run{'s' * (runs != 1)}", READING[word]
    if word == "equivalent":
        found += f" within ±{100 * one['margin_relative']:.3g} % of the loss"
        if one["metric_margin"] is not None:
            found += f" and ±{one['metric_margin']:.3g} of the {_label(request)}"
        found += f" ({count})"
    elif word == "consistent":
        found += f" ({count}, not proof)"
    elif one["cause"]:
        found = "failed" if one["failed"] else "can't tell" if word == "inconclusive" else found
        found += f": {one['cause'][:1].lower()}{one['cause'][1:].rstrip('.')}"
    elif word == "inconclusive":
        found += f" ({count})"
    if request.seeds < FEWEST_FOR_TOST and word != "divergent":
        found = f"quick look, {found}"
    numbers = [
        f"{label} {one[ours]:.5g} (FP32 {one[fp32]:.5g})"
        for label, ours, fp32, shown in (
            (_label(request), "final_metric", "fp32_metric", True),
            ("loss", "final_loss", "fp32_loss", word == "divergent" and not one["cause"]),
        )
        if shown and one[ours] is not None and one[fp32] is not None
    ]
    return ", ".join([found, *numbers])


def _label(request: Request) -> str:
    """The metric's name: the words with which its pattern begins."""
    found = re.match(r"\W*(\w[\w @-]*\w)", request.metric or "")
    return found[1] if found else "metric"


def _memory(ratio: float | None) -> str:
    if ratio is None:
        return "memory not measured"
    percent = round(100 * abs(1 - ratio))
    if not percent:
        return "same memory"
    return f"{percent} % {'less' if ratio < 1 else 'more'} memory"


def _speed(one: Candidate, request: Request) -> str:
    speed, interval = one["speedup"], one["speedup_interval"]
    if speed is None:
        return "speed not measured"
    if interval[0] > 1 / SAME and interval[1] < SAME:
        return "same speed"
    if one["speed_word"] not in ("faster", "slower"):
        return "speed unclear"
    factor = max(speed, 1 / speed)
    about = "about " * (request.seeds < FEWEST_FOR_TOST)
    return f"{about}{factor:.{1 + (factor < 1.2)}f}x {one['speed_word']}"


def _next_step(name: str, one: Candidate, request: Request, folder: Path) -> tuple[str, list[str]]:
    """What to do next, and the words of its command (none if there is no command)."""
    asked, word, keras = request.asked(), one["parity"], request.framework == "keras"
    if word == "divergent":
        if keras:
            return "Train in FP32, or compare another precision", []
        if one["failed"]:
            return "For the whole traceback", run_command(asked, "--precision", name)
        if one["loss_gap"] is None and policy(name).compute == "fp16":
            return "Find the overflow", run_command(asked, "--watch", "--precision", name)
        return "Find the modules that need FP32", command("calibrate", asked)
    if request.seeds < FEWEST_FOR_TOST:
        more = {**asked, "seeds": FEWEST_FOR_TOST}
        return "For 3 runs (finished runs are kept)", compare_command(more, str(folder))
    if word == "inconclusive":
        if one["cause"]:
            return "Let the script train for a fixed number of steps", []
        found = [needed for key in ("pairs_needed", "metric_pairs_needed") if (needed := one[key])]
        seeds = max([request.seeds + 1, *(found or [2 * request.seeds])])
        if seeds > MOST_RUNS:
            return "Accept a larger --margin, or judge by a metric (--metric)", []
        more = {**asked, "precisions": [name], "seeds": seeds}
        return "More runs", compare_command(more, f"{folder}-{seeds}-seeds")
    saves = one["peak_memory_ratio"] is not None and one["peak_memory_ratio"] < 0.995
    if one["speed_word"] != "faster" and not saves:
        return "It saves nothing here. To see which precision does", ["mezzo", "doctor"]
    if request.demo:
        return "Now your script", ["mezzo", "compare", "--precision", name, "train.py"]
    if keras:
        return f"Use it: call mezzo.keras.set_policy({name!r}) before the model is built", []
    return "Use it", run_command(asked, "--precision", name)
