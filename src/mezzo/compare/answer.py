"""The answer to "may I use it?" for each candidate: a plain line; and what to do next, as a command to paste."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mezzo.compare.measure import FEWEST_FOR_SPEED
from mezzo.compare.request import Request, own_masters
from mezzo.core.calibration import FORMATS
from mezzo.core.commands import command, compare_command, run_command
from mezzo.core.comparison import FEWEST_FOR_TOST, ORDER, READING, WIDE
from mezzo.core.equivalence import MOST_PAIRS
from mezzo.core.policy import policy
from mezzo.core.records import HAD_TF32, NOTHING_RAN, file_name
from mezzo.core.verdict import CONSTANT, TAKES_OVER

MOST_RUNS = 30  # where more would be needed, other ways are suggested, too
SAME = 1.05  # speeds that differ by less than this factor are called the same
LITTLE = 0.95  # less memory than this share of FP32's is worth a step that is not faster
STARTS_DIFFER = "Two FP32 runs with the same seed had the losses "
DIGITS = 5  # of a loss or a metric

Candidate = Mapping[str, Any]


def answer(name: str, one: Candidate, request: Request, folder: Path) -> dict[str, str]:
    """The keys of `verdict.json` that answer in plain words: `plain`, what to do next, and the command of a proof."""
    advice, use = _next_step(name, one, request, folder)
    plain = f"{_judged(one, request)}."
    if one["departed"]:
        plain += f" {one['departed']}."
    if one.get("overflow"):
        plain += f" First overflow: {one['overflow']}."
    if one["pairs"]:
        saved = f"{_memory(one['peak_memory_ratio'])}, {_speed(one, request)}."
        plain += f" {saved[0].upper()}{saved[1:]}"
    proof = _proof(name, one, request, folder)
    return {"plain": plain, "advice": advice, "command": use, "proof": proof, "unproven": _unproven(one)}


def in_no_layer(name: str) -> str:
    """Why runs tell nothing about a quantized format that no layer has."""
    return f"No layer of this model ran in {name}, so its runs are those of bf16"


def tf32_off(notes: Iterable[str], request: Request, folder: Path) -> list[str]:
    """What the notes of FP32's runs mean for the speeds if the script switches TF32 on; empty if it does not."""
    if not any(note.startswith(HAD_TF32) for note in notes):
        return []
    why = "The script switches TF32 on and FP32 runs switch it off: on a GPU with TF32 they are slower than the script."
    if "tf32" in request.precisions:
        return [f"{why} There compare with the speed of tf32."]
    more = {**request.asked(), "precisions": ["tf32", *request.precisions]}
    return [f"{why} To compare with TF32: {compare_command(more, f'{folder}-tf32')}"]


def next_steps(candidates: Mapping[str, Candidate]) -> list[str]:
    """What to do next with each candidate, as lines: usable ones first, then fast and small ones; equal steps once."""

    def rank(item: tuple[str, Candidate]) -> tuple[float, ...]:
        one, word = item[1], ORDER.index(item[1]["parity"])
        speed = one["speedup"] if one["speed_word"] in ("faster", "slower") else 1.0  # else it may be noise
        return max(word, 1), -round(speed, 1), round(one["peak_memory_ratio"] or 1.0, 2), word

    steps: dict[tuple[str, ...], list[str]] = {}
    for name, one in sorted(candidates.items(), key=rank):
        steps.setdefault((one["advice"], one["command"], one["proof"]), []).append(name)
    lines = []
    for (advice, use, proof), names in steps.items():
        whose = f" for {' and '.join(names)}" if len(steps) > 1 else ""
        what, _, why = advice.partition(". ")
        lines += [f"Next{whose}: {what}:", f"  {use}"] if use else [f"Next{whose}: {advice}."]
        lines += [f"{why}."] * bool(use and why)
        if proof:
            lines += [f"Or prove that {names[0]} is as good as FP32, in a new folder:", f"  {proof}"]
    return lines


def metric_name(pattern: str | None) -> str:
    """What the metric is called: the words with which its pattern begins."""
    named = re.match(r"\W*(\w[\w @-]*\w)", re.sub(r"\\[A-Za-z]", " ", pattern or ""))
    return named[1] if named else "metric"


def written(one: Candidate, quantity: str) -> tuple[str, str] | None:
    """A candidate's final loss or metric, and FP32's, with the same digits: no more than the script prints."""
    values = one[f"final_{quantity}"], one[f"fp32_{quantity}"]
    if None in values:
        return None
    largest, unit = max(map(abs, values)), ""
    places = max(0, DIGITS - 1 - math.floor(math.log10(largest))) if largest else DIGITS
    if quantity == "metric":
        places, unit = min(places, one["metric_decimals"]), one["metric_unit"] and f" {one['metric_unit']}"
    ours, fp32 = (f"{value:.{places}f}{unit}" if largest < 1e6 else f"{value:.{DIGITS}g}" for value in values)
    return ours, fp32


def _judged(one: Candidate, request: Request) -> str:
    word, cause = one["parity"], one["cause"]
    found = f"{READING[word]} ({one['seeds']} pair{'s' * (one['seeds'] != 1)}"
    label = metric_name(request.metric)
    if word == "equivalent":
        within = f"±{100 * one['margin_relative']:.3g} %"
        if one["metric_margin"] is not None:
            points = " points" * (one["metric_unit"] == "%")
            within = f"±{one['metric_margin']:.3g}{points} in {label} and {within} in loss"
        found = found.replace(" (", f" within {within} (")
    elif cause:
        found = "failed" if one["failed"] else "can't tell" if word == "inconclusive" else READING[word]
        short = cause.partition(". ")[0] if one["failed"] else cause  # `reason` has all of a long error
        found += f": {short[0].lower()}{short[1:].rstrip('.')}"
    if not cause:
        found += ", not proof)" if word == "consistent" else ")"
    if request.seeds < FEWEST_FOR_TOST and word != "divergent":
        found = f"quick look, {found}"
    metric, loss = written(one, "metric"), written(one, "loss")
    if metric is not None:
        found += f", {label} {metric[0]} (FP32 {metric[1]})"
    if loss is not None and (metric is None or (word == "divergent" and not cause)):
        found += f"{'. Mean final' if cause else ','} loss {loss[0]} (FP32 {loss[1]})"
    return found


def _memory(ratio: float | None) -> str:
    if ratio is None:
        return "memory not measured"
    percent = round(100 * abs(1 - ratio))
    return f"{percent} % {'less' if ratio < 1 else 'more'} memory" if percent else "same memory"


def _speed(one: Candidate, request: Request) -> str:
    speed, interval = one["speedup"], one["speedup_interval"]
    if speed is None:
        steps = f"{one['steps']} step{'s' * (one['steps'] != 1)}"
        short = f" ({steps}; {FEWEST_FOR_SPEED} needed)" * (one["steps"] < FEWEST_FOR_SPEED)
        return f"speed not measured{short}"
    if unclear := unclear_speed(one):
        return f"speed {unclear}"
    if interval[0] > 1 / SAME and interval[1] < SAME:
        return "same speed"
    if one["speed_word"] not in ("faster", "slower"):
        return f"speed unclear ({interval[0]:.2f}x to {interval[1]:.2f}x)"
    factor = max(speed, 1 / speed)
    if request.seeds < FEWEST_FOR_TOST:
        return f"about {factor:.2g}x {one['speed_word']}"
    return f"{factor:.{1 + (factor < 1.2)}f}x {one['speed_word']}"


def unclear_speed(one: Candidate) -> str:
    """What is printed where the speed's interval says nothing, or one pair made it; empty otherwise."""
    low, high = one["speedup_interval"] or (1.0, 1.0)
    return "unclear (1 pair)" if len(one["pairs"]) == 1 else "unclear" * (high > WIDE * low)


def _unproven(one: Candidate) -> str:
    """Why equality is not proven: intervals that exceed their margin, or none, or an earlier harm; else empty."""
    if one["departed"]:
        return str(one["departed"])
    if one["seeds"] == 1 < len(one["pairs"]):
        how = "Draw the initial weights or the data's order from the generators of torch, NumPy or random"
        return f"Every seed gave the same FP32 run, so more pairs prove nothing. {how}"
    if one["seeds"] == 1:
        return "One pair of runs shows no spread"
    wide = []
    for what, margin in (("metric", one["metric_margin"]), ("loss", one["margin"])):
        end = max(map(abs, one[f"{what}_gap_interval"] or [0.0]))
        if end > (margin or 0.0):
            wide.append(f"The interval of the {what} reaches {end:.2g}, beyond its margin of {margin:.2g}")
    return ". ".join(wide)


def _starts_differ(one: Candidate) -> bool:
    return any(note.startswith(STARTS_DIFFER) for note in one["notes"])


def _needed(one: Candidate) -> float:
    """The pairs of runs that would probably prove equality: infinite above 10,000, 0 if the spread is unknown."""
    known = [
        one[f"{what}pairs_needed"] or math.inf for what in ("", "metric_") if one[f"{what}power"] is not None
    ]
    return max([one["seeds"] + 1, *known]) if known else 0


def _pairs(count: float) -> str:
    return f"{'about' if count <= MOST_PAIRS else 'more than'} {min(count, MOST_PAIRS):,} pairs of runs"


def _proof(name: str, one: Candidate, request: Request, folder: Path) -> str:
    """The command that would probably prove the candidate equal; empty if no number of pairs is known for it."""
    needed = _needed(one)
    if (
        one["parity"] != "consistent"
        or one["departed"]
        or _starts_differ(one)
        or request.demo
        or not 0 < needed <= MOST_PAIRS
    ):
        return ""
    seeds = max(request.seeds + 1, needed)
    more = {**request.asked(), "precisions": [name], "seeds": seeds}
    return compare_command(more, f"{folder}-{file_name(name)}-{seeds}-seeds")


def _next_step(name: str, one: Candidate, request: Request, folder: Path) -> tuple[str, str]:
    """What to do next, and its command; empty if there is none."""
    asked, word, keras = request.asked(), one["parity"], request.framework == "keras"
    masters = own_masters(name) if not keras else None
    use = ["--own", "off"] * bool(request.own) + ["--precision", name]
    if masters is not None:
        use = ["--masters", masters] * bool(masters)
    if word == "divergent":
        if keras or masters is not None:
            return f"use FP32, or another candidate than {name}", ""
        if one["failed"]:
            return f"see the whole error of {name}", run_command(asked, *use)
        if one["loss_gap"] is None and policy(name).compute == "fp16":
            return f"find the overflow in {name}, and its fix", run_command(asked, *use)
        if request.own:
            return "use FP32, or another candidate", ""  # calibrate needs a script in FP32
        compute = policy(name).compute
        wanted = ["--precision", compute] if compute in FORMATS and compute != "fp32" else []
        return "find the modules that need FP32", command("calibrate", asked, *wanted)
    if one["cause"] == in_no_layer(name):
        why = "'Block formats' in docs/formats.md says which layers can be quantized"
        return f"compare bf16. {why}", compare_command({**asked, "precisions": ["bf16"]}, f"{folder}-bf16")
    if NOTHING_RAN in (one["cause"] or ""):
        where = '"so nothing ran in bf16" in docs/troubleshooting.md'
        return f"train FP32 parameters of an nn.Module that the script calls. See {where}", ""
    if (one["cause"] or "").startswith(TAKES_OVER):
        return "train what each optimizer trains in a script of its own, and compare those", ""
    if one["cause"] == CONSTANT:
        return "judge by a metric (--metric)", ""
    if word != "equivalent" and _starts_differ(one):
        return "make the script reproducible, so that both runs of a pair have the same data and weights", ""
    ignores_seeds = one["seeds"] == 1 < len(one["pairs"])
    if request.seeds < FEWEST_FOR_TOST and not ignores_seeds:
        more = {**asked, "seeds": FEWEST_FOR_TOST}
        its = request.demo or (request.target if request.is_module else Path(request.target).resolve().stem)
        out = "" if str(folder) == f"mezzo-compare-{its}" else str(folder)
        why = ". One pair shows no spread, so nothing tells how many are enough" * (one["seeds"] == 1)
        return f"make 3 pairs of runs. Finished runs are kept{why}", compare_command(more, out)
    if word == "inconclusive":
        if one["cause"]:
            return "let the script train for a fixed number of steps", ""
        if ignores_seeds:
            return f"make the script use its seed. {_unproven(one)}", ""
        seeds = max(request.seeds + 1, _needed(one) or 2 * request.seeds)
        if seeds > MOST_RUNS:
            other = "test on more data" if request.metric else "judge by a metric (--metric)"
            why = f"With this script {_pairs(seeds)} would be needed to tell"
            return f"train longer, or {other}. {why}", ""
        out = f"{folder}-{file_name(name)}-{seeds}-seeds"
        longer = compare_command({**asked, "precisions": [name], "seeds": seeds}, out)
        return f"make {seeds} pairs of runs with {name}, in a new folder", longer
    proven = ""
    if word == "consistent" and (why := _unproven(one)):
        longer = ", or fewer longer ones," * (_needed(one) > MOST_RUNS)
        known = _needed(one) and not one["departed"]
        enough = f". To prove it, {_pairs(_needed(one))}{longer} would probably do" if known else ""
        proven = f", without proof. {why}{enough}"
    saves = (one["peak_memory_ratio"] or 1.0) < LITTLE
    if one["speed_word"] == "slower" and not saves:
        why = "'16 bits is not faster, or slower' in docs/troubleshooting.md says why"
        return f"stay with FP32: nothing is gained here. {why}. No harm was found{proven}", "mezzo doctor"
    if one["speed_word"] != "faster" and not saves:
        return "see which precision is fast here, since little or nothing was saved", "mezzo doctor"
    if one["speed_word"] == "slower":
        emulated = any(" is emulated on " in note for note in one["notes"])
        elsewhere = f", where it is emulated; hardware with {name} may be faster" * emulated
        proven = f" (it saves memory, but is slower here{elsewhere}){proven}"
    if request.demo:
        first = {"target": "train.py", "precisions": request.precisions[:1]}  # one command for all candidates
        return "compare your own script", compare_command(first)
    if keras:
        return f"call mezzo.keras.set_policy({name!r}) before the model is built{proven}", ""
    if masters == "":
        return f"keep the script as it is{proven}", ""
    return f"use {name}{proven}", run_command(asked, *use)
