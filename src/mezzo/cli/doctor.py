"""What this machine can do in each format, measured, and which precision to use on it.

mezzo doctor                      this machine: what it has, what each format measures, what to use
mezzo doctor --quick              the same in about a second, more coarsely
mezzo doctor --gpu A100           what a GPU offers by its datasheet, without having it
mezzo doctor --capability 7.5     what any GPU of that compute capability offers
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mezzo.core.errors import UsageError
from mezzo.doctor.gpus import ARCHITECTURES, TENSOR_CORES_FROM, GpuModel, find, formats_at, parse_capability
from mezzo.doctor.recommend import Recommendation, from_capability, from_rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mezzo.doctor.measure import Rate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument(
        "--gpu", metavar="NAME", help="a GPU's datasheet figures, for instance T4, A100, 'RTX 4090'"
    )
    parser.add_argument("--capability", metavar="X.Y", help="a CUDA compute capability, for instance 7.5")
    parser.add_argument("--quick", action="store_true", help="smaller work, fewer repeats")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/doctor.md describes it)")


def run(arguments: argparse.Namespace) -> int:
    """Report on this machine, or on a GPU that is named."""
    console = Console(highlight=False)
    if arguments.gpu is not None and arguments.capability is not None:
        raise UsageError("--gpu and --capability say the same thing twice: give one of them")
    if arguments.gpu is not None:
        models = find(arguments.gpu)
        found = from_capability(models[0].capability)
        _put(arguments, console, _gpu_json(models, found), lambda: _print_models(console, models, found))
    elif arguments.capability is not None:
        capability = parse_capability(arguments.capability)
        found = from_capability(capability)
        _put(
            arguments,
            console,
            {
                "schema": 1,
                "capability": _capability_json(capability),
                "recommendation": _recommendation_json(found),
            },
            lambda: _print_capability(console, capability, found),
        )
    else:
        _this_machine(arguments, console)
    return 0


def _put(
    arguments: argparse.Namespace, console: Console, data: dict[str, Any], show: Callable[[], None]
) -> None:
    if arguments.json:
        print(json.dumps(data, indent=2, allow_nan=False))
    else:
        show()


def _this_machine(arguments: argparse.Namespace, console: Console) -> None:
    from mezzo.doctor import measure
    from mezzo.pytorch import machine

    described = machine.describe()
    device = described["gpu"]["kind"] if described["gpu"] else "cpu"
    native = machine.native_formats(device)
    with _progress("measuring") as tell:
        if arguments.quick:
            sizes = measure.QUICK_CPU_SIZES if device == "cpu" else measure.QUICK_GPU_SIZES
            rates = measure.measure(device, sizes=sizes, budget=0.5, tell=tell)
        else:
            rates = measure.measure(device, tell=tell)
    named = "this CPU" if device == "cpu" else described["gpu"]["name"]
    found = from_rates({(rate.what, rate.format): rate.value for rate in rates}, native, device=named)
    data = {
        "schema": 1,
        "machine": described,
        "device": device,
        "native": sorted(native),
        "unsteady": measure.unsteady(rates),
        "measured": [_rate_json(rate) for rate in rates],
        "recommendation": _recommendation_json(found),
    }
    _put(arguments, console, data, lambda: _print_machine(console, data, rates, found))


@contextmanager
def _progress(words: str) -> Iterator[Callable[[float], object]]:
    """A bar on the error stream, where that is a terminal; nothing where it is piped."""
    console = Console(stderr=True)
    columns = (TextColumn(words), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _print_machine(console: Console, data: dict[str, Any], rates: list[Rate], found: Recommendation) -> None:
    described = data["machine"]
    memory = described["memory_bytes"]
    gpu = described["gpu"]
    lines = {
        "CPU": f"{described['cpu']}, {described['cores']} cores, {described['threads']} threads in use",
        "instructions": " ".join(described["isa"]) or "unknown",
        "memory": f"{memory / 1e9:.0f} GB" if memory else "unknown",
        "GPU": "none that PyTorch can use" if gpu is None else _gpu_line(gpu),
        "software": f"PyTorch {described['torch']}, Python {described['python']}, {described['os']}",
    }
    for name, line in lines.items():
        console.print(f"[bold]{name:<14}[/bold]", end="")
        console.print(line, markup=False, soft_wrap=True)
    where = "on the CPU" if data["device"] == "cpu" else "on the GPU"
    console.print(f"\n[bold]Measured {where}[/bold], GFLOP/s: medians (and the middle half of the repeats)")
    kinds = ["matmul", "conv step"]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for head in ("format", *kinds):
        table.add_column(head, no_wrap=True)
    cells = {(rate.what, rate.format): rate for rate in rates}
    for form in dict.fromkeys(rate.format for rate in rates):
        row = [_cell(cells.get((kind, form))) for kind in kinds]
        if any(cell != "-" for cell in row):
            table.add_row(form, *row)
    console.print(table)
    copy = cells["copy", "fp32"]
    console.print(f"memory bandwidth, by copying: {_cell(copy)} GB/s")
    for reason in dict.fromkeys(rate.timing.reason for rate in rates if rate.timing.reason):
        console.print(f"not measured: {reason}", markup=False, soft_wrap=True)
    if data["unsteady"]:
        console.print(
            "The repeats vary widely: something else is using this machine. Measure again when it is idle."
        )
    _print_recommendation(console, found)


def _gpu_line(gpu: dict[str, Any]) -> str:
    capability = f", compute capability {gpu['capability']}" if gpu["capability"] else ""
    count = f", the first of {gpu['count']}" if gpu["count"] > 1 else ""
    return f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB{capability}{count}"


def _cell(rate: Rate | None) -> str:
    if rate is None or math.isnan(rate.value):
        return "-"
    low, high = rate.spread
    return f"{_short(rate.value)} ({_short(low)} to {_short(high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _print_recommendation(console: Console, found: Recommendation) -> None:
    console.print(f"\n[bold]Use {found.precision}[/bold]")
    for reason in found.reasons:
        console.print(Padding(Text(reason), (0, 0, 0, 2)))
    candidates = "bf16,fp16" if found.precision == "fp32" else found.precision
    console.print(f"\nTry it: mezzo compare --precision {candidates} train.py", markup=False, soft_wrap=True)


def _print_models(console: Console, models: tuple[GpuModel, ...], found: Recommendation) -> None:
    for model in models:
        console.print(f"[bold]{model.name}[/bold]: ", end="")
        console.print(
            f"{ARCHITECTURES[model.capability]}, compute capability {'{}.{}'.format(*model.capability)}, "
            f"{model.memory_gb} GB at {model.bandwidth} GB/s",
            markup=False,
        )
        for form, peak in model.peaks.items():
            how = "" if form == "fp32" else "   tensor cores"
            console.print(f"  {form:<6}{peak:>8g} TFLOP/s{how}")
        console.print(f"  dense peaks by: {model.source}", markup=False)
    _print_recommendation(console, found)


def _print_capability(console: Console, capability: tuple[int, int], found: Recommendation) -> None:
    text = "{}.{}".format(*capability)
    console.print(f"[bold]Compute capability {text}[/bold] ({ARCHITECTURES[capability]})")
    for form, first in TENSOR_CORES_FROM.items():
        since = "{}.{}".format(*first)
        has = "tensor cores" if capability >= first else "no tensor cores"
        console.print(f"  {form:<6}{has}, which have it from {since}")
    _print_recommendation(console, found)


def _gpu_json(models: tuple[GpuModel, ...], found: Recommendation) -> dict[str, Any]:
    return {
        "schema": 1,
        "gpus": [
            {
                "name": model.name,
                "capability": _capability_json(model.capability),
                "memory_gb": model.memory_gb,
                "bandwidth_gb_s": model.bandwidth,
                "dense_peak_tflop_s": dict(model.peaks),
                "source": model.source,
            }
            for model in models
        ],
        "recommendation": _recommendation_json(found),
    }


def _capability_json(capability: tuple[int, int]) -> dict[str, Any]:
    return {
        "capability": "{}.{}".format(*capability),
        "architecture": ARCHITECTURES[capability],
        "tensor_core_formats": list(formats_at(capability)),
    }


def _recommendation_json(found: Recommendation) -> dict[str, Any]:
    return {"precision": found.precision, "reasons": list(found.reasons)}


def _rate_json(rate: Rate) -> dict[str, Any]:
    ran = bool(rate.timing.seconds)
    return {
        "what": rate.what,
        "format": rate.format,
        "unit": rate.unit,
        "median": rate.value if ran else None,
        "low": rate.spread[0] if ran else None,
        "high": rate.spread[1] if ran else None,
        "repeats": len(rate.timing.seconds),
        "seconds": rate.timing.median if ran else None,
        "work": rate.work,
        "reason": rate.timing.reason,
    }
