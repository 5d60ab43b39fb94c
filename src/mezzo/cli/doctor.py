"""Measure what this machine can do in each number format, and say which precision to use on it.

Examples:
  mezzo doctor                      measure this machine (about 8 seconds, at most about 20)
  mezzo doctor --quick              the same in 1 to 4 seconds, less accurately
  mezzo doctor --gpu A100           the datasheet of a GPU, which need not be in this machine
  mezzo doctor train.py             where a script makes 16-bit weights, or mixed precision; it is read, not run

Exit status: 0; 1 if the script makes 16-bit weights without masters; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mezzo.core.commands import say
from mezzo.core.errors import UsageError
from mezzo.doctor.gpus import GpuModel, Recommendation, architecture, find, formats_at, from_capability
from mezzo.runner.script import locate
from mezzo.runner.script_text import NEXT, WEIGHTS, findings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("script", nargs="?", metavar="SCRIPT", help="a script to read, instead of the machine")
    add("--gpu", metavar="NAME", help="a GPU by name or compute capability: A100, 'RTX 3060', 8.6")
    parser.add_argument("--capability", dest="gpu", help=argparse.SUPPRESS)  # of 0.1.0
    parser.add_argument("--quick", action="store_true", help="smaller matrices and fewer repeats")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Report on this machine, on a GPU that is named, or on a script."""
    if arguments.script is not None:
        return _read(arguments.script, arguments.json)
    if arguments.gpu is not None:
        models = find(arguments.gpu)
        found = from_capability(models[0].capability, models[0].tensor_cores)
        data: dict[str, Any] = {"gpus": [_gpu_json(model) for model in models]}
        lines = [line for model in models for line in _gpu_lines(model)]
    else:
        data, found = _measured(arguments.quick)
        lines = list(_machine_lines(data))
    if arguments.json:
        advice = {"precision": found.precision, "reasons": list(found.reasons)}
        print(json.dumps({"schema": 1, **data, "recommendation": advice}, indent=2, allow_nan=False))
        return 0
    lines += ["", f"Use {found.precision}", *(f"  {one}" for one in found.reasons)]
    if found.precision != "fp32":
        why = "Try it" if arguments.gpu is None else "Measure your model's gain on that GPU"
        lines += ["", f"{why}: mezzo compare --precision {found.precision} train.py"]
    elif arguments.gpu is None:
        lines += ["", "Test memory and numerics of 16 bits: mezzo compare --precision bf16,fp16 train.py"]
    say("\n".join(lines), out=True)
    return 0


def _read(script: str, as_json: bool) -> int:
    """What the script makes by its text, and the commands that measure or change it."""
    quoted = shlex.quote(script)
    if not Path(script).exists() and not script.endswith(".py"):
        raise UsageError(f"no script {script!r}. For a GPU of this name: mezzo doctor --gpu {quoted}")
    found = findings(Path(locate(script, is_module=False).file).read_text(errors="replace"), script)
    kinds = dict.fromkeys(kind for _, kind, _ in found)
    commands = {f"mezzo {words} {quoted}": why for kind in kinds for words, why in NEXT[kind].items()}
    if as_json:
        rows = [dict(zip(("line", "kind", "code"), one)) for one in found]
        print(json.dumps({"schema": 1, "findings": rows, "commands": [*commands]}, indent=2))
    else:
        lines = [f"{script}:{line}: {kind}: {code}" for line, kind, code in found]
        lines += [f"{why}: {one}" for one, why in commands.items()]
        say("\n".join(lines or [f"{script}: no 16-bit weights, and no mixed precision of its own"]), out=True)
    return int(WEIGHTS in kinds)


def _measured(quick: bool) -> tuple[dict[str, Any], Recommendation]:
    """What this machine is and measures, and what to use."""
    from mezzo.doctor import measure
    from mezzo.pytorch import hardware

    described = hardware.describe()
    device = described["gpu"]["kind"] if described["gpu"] else "cpu"
    native = hardware.native_formats(device)
    sizes, budget = None, measure.BUDGET
    if quick:
        sizes, budget = measure.QUICK_CPU_SIZES if device == "cpu" else measure.QUICK_GPU_SIZES, 0.5
    say(f"Measuring, for at most about {measure.LIMIT * budget:.0f} s ...")
    rows = measure.measure(device, sizes=sizes, budget=budget)
    named = "this CPU" if device == "cpu" else described["gpu"]["name"]
    data = {
        "machine": described,
        "device": device,
        "native": sorted(native),
        "unsteady": any(row["unsteady"] for row in rows),
        "measured": rows,
    }
    return data, measure.recommend(rows, native, device=named)


def _machine_lines(data: dict[str, Any]) -> Iterable[str]:
    described = data["machine"]
    memory, gpu = described["memory_bytes"], described["gpu"]
    lines = {
        "CPU": f"{described['cpu']}, {described['cores']} cores, threads in use: {described['threads']}",
        "instructions": " ".join(described["isa"]) or "unknown",
        "memory": f"{memory / 1e9:.0f} GB" if memory else "unknown",
        "GPU": "none that this PyTorch can use",
        "software": f"PyTorch {described['torch']}, Python {described['python']}, {described['os']}",
    }
    if gpu:
        capability = f", compute capability {gpu['capability']}" if gpu["capability"] else ""
        lines["GPU"] = f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB{capability}"
    yield from (f"{name:<14}{line}" for name, line in lines.items())
    yield ""
    device = "CPU" if data["device"] == "cpu" else "GPU"
    yield f"Measured on the {device}, in GFLOP/s: median (and the middle half of the repeats)"
    kinds, cells = ["matmul", "conv step"], {}
    for row in data["measured"]:
        figures = (row["median"], row["low"], row["high"]) if row["repeats"] else ()
        texts = [f"{one:.0f}" if one >= 100 else f"{one:.3g}" for one in figures]
        shape = "{} (1 repeat)" if row["repeats"] == 1 else "{} ({} to {})"
        cells[row["what"], row["format"]] = shape.format(*texts) if texts else "-"
    yield "{:<8}{:<24}{}".format("format", *kinds)
    for form in dict.fromkeys(row["format"] for row in data["measured"]):
        found = [cells.get((kind, form), "-") for kind in kinds]
        if found != ["-", "-"]:
            yield "{:<8}{:<24}{}".format(form, *found)
    yield f"memory bandwidth (copy), in GB/s: {cells['copy', 'fp32']}"
    for reason in dict.fromkeys(row["reason"] for row in data["measured"] if row["reason"]):
        yield f"not measured: {reason}"
    if data["unsteady"]:
        yield "The repeats vary by more than 1.5x: something else is using this machine."


def _gpu_lines(model: GpuModel) -> Iterable[str]:
    number, peaks = "{}.{}".format(*model.capability), model.dense_peak_tflop_s
    size = f", {model.memory_gb} GB at {model.bandwidth_gb_s} GB/s" if peaks else ""
    yield f"{model.name}: {architecture(model.capability)}, compute capability {number}{size}"
    for form, peak in peaks.items():
        yield f"  {form:<6}{peak:>8g} TFLOP/s{'' if form == 'fp32' else '   tensor cores'}"
    form = "bf16" if "bf16" in peaks else "fp16"
    gains = [f"{peaks[form] / peaks[one]:.2g}x over {one}" for one in ("fp32", "tf32") if one in peaks]
    if gains:
        yield f"  {form} gains at most {', '.join(gains)}, in matrix products alone: a training gains less"
    else:
        yield "  no data sheet figures are known to Mezzo; on that machine `mezzo doctor` measures it"
    yield f"  {'dense peaks' if peaks else 'compute capability'} from: {model.source}"


def _gpu_json(model: GpuModel) -> dict[str, Any]:
    found = asdict(model)
    formats = formats_at(model.capability) if found.pop("tensor_cores") else ()
    number, named = "{}.{}".format(*model.capability), architecture(model.capability)
    its = {"capability": number, "architecture": named, "tensor_core_formats": list(formats)}
    return found | {"capability": its}
