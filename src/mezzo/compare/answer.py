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

MOST_RUNS = 30  # more are not suggested
SAME = 1.05  # speeds that differ by less than this factor are called the same

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
    """A candidate's plain words, and the next step."""
    return f"{one['plain']} {one['advice']}{': ' if one['command'] else '.'}{one['command']}"


def _judged(one: Candidate, request: Request) -> str:
    word, cause = one["parity"], one["cause"]
    found = f"{READING[word]} ({one['seeds']} run{'s' * (one['seeds'] != 1)}"
    # The metric's name: the words with which its pattern begins.
    named = re.match(r"\W*(\w[\w @-]*\w)", request.metric or "")
    label = named[1] if named else "metric"
    if word == "equivalent":
        within = f"±{100 * one['margin_relative']:.3g} %"
        if one["metric_margin"] is not None:
            within = f"±{one['metric_margin']:.3g} in {label} and {within} in loss"
        found = found.replace(" (", f" within {within} (")
    elif cause:
        found = "failed" if one["failed"] else "can't tell" if word == "inconclusive" else READING[word]
        found += f": {cause[0].lower()}{cause[1:].rstrip('.')}"
    if not cause:
        found += ", not proof)" if word == "consistent" else ")"
    if request.seeds < FEWEST_FOR_TOST and word != "divergent":
        found = f"quick look, {found}"
    if one["final_metric"] is not None and one["fp32_metric"] is not None:
        found += f", {label} {one['final_metric']:.5g} (FP32 {one['fp32_metric']:.5g})"
    if word == "divergent" and not cause:
        found += f", loss {one['final_loss']:.5g} (FP32 {one['fp32_loss']:.5g})"
    return found


def _memory(ratio: float | None) -> str:
    if ratio is None:
        return "memory not measured"
    percent = round(100 * abs(1 - ratio))
    return f"{percent} % {'less' if ratio < 1 else 'more'} memory" if percent else "same memory"


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
            wide = "metric-margin" if one["metric_parity"] == word else "margin"
            other = "" if request.metric else ", or judge by a metric (--metric)"
            return f"Accept a larger --{wide}{other}", []
        more = {**asked, "precisions": [name], "seeds": seeds}
        return "More runs", compare_command(more, f"{folder}-{seeds}-seeds")
    saves = one["peak_memory_ratio"] is not None and one["peak_memory_ratio"] < 0.995
    if one["speed_word"] != "faster" and not saves:
        return "No saving was measured. Which precision is fast here", ["mezzo", "doctor"]
    if request.demo:
        return "Now your script", ["mezzo", "compare", "--precision", name, "train.py"]
    if keras:
        return f"Use it: call mezzo.keras.set_policy({name!r}) before the model is built", []
    return "Use it", run_command(asked, "--precision", name)
