"""Check everything that Mezzo promises about GPUs on your GPU: tests, doctor, optimizers, steps, fp8, GPT-2.

    make gpu-check                        # or: python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --parts tests optimizers

Writes one JSON file, benchmarks/results/gpu_check_<gpu>.json, after every part, and prints a table. Each part runs in
a separate process: if one fails or exceeds its time limit, it is recorded and the next one runs. Exit status: 0
everything passed, 1 something did not, 2 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OF_COPY = 0.85  # of the measured copy bandwidth, that an optimizer step must reach
JUDGED_AT = "128M"  # parameters: smaller steps are over before memory is busy


@dataclass(frozen=True)
class Part:
    """A command whose words may hold ``{out}``, the file that it writes; JSON, or JUnit's XML.

    Args:
        command: after the Python interpreter.
        minutes: after which it is ended.
        printed: its result is what it prints, not a file.
    """

    command: tuple[str, ...]
    minutes: float
    printed: bool = False


PARTS: dict[str, Part] = {
    "tests": Part(("-m", "pytest", "-m", "gpu", "-q", "--junitxml={out}"), 20),
    "doctor": Part(("-m", "mezzo", "doctor", "--json"), 5, printed=True),
    "optimizers": Part(("benchmarks/optimizers.py", "--device", "cuda", "--out", "{out}"), 20),
    "bench": Part(
        ("benchmarks/bench.py", "--device", "cuda", "--large", "--budget", "15", "--out", "{out}"), 45
    ),
    "fp8": Part(("benchmarks/fp8.py", "--device", "cuda", "--out", "{out}"), 15),
    "gpt2": Part(("benchmarks/gpt2.py", "--device", "cuda", "--out", "{out}"), 20),
}


def missing() -> str:
    """Why nothing can be checked here, and how to fix that; "" if there is a CUDA device."""
    import torch

    if torch.cuda.is_available():
        return ""
    build = (
        f"it was built for CUDA {torch.version.cuda}, so look at the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        if torch.version.cuda
        else "it was built without CUDA: install one from pytorch.org that was built with it, into this environment"
    )
    return (
        f"gpu-check needs a CUDA device, and torch {torch.__version__} sees none; {build}. Then run it again.\n"
        "It needs Mezzo with its tests' tools (pip install -e '.[test]') and about 40 GB of free GPU memory, and takes "
        "about an hour. On a CPU, `make test`, `make bench` and `python benchmarks/optimizers.py` are the same checks."
    )


def environment() -> dict[str, Any]:
    """The GPU, its driver, and the versions of what runs on it."""
    import torch

    from mezzo.pytorch.hardware import describe
    from optimizers import versions

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.mem,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"unknown: {error}"
    return {
        "machine": describe(),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver, memory clock, power limit": driver,
        "versions": versions(),
    }


def junit(path: Path) -> dict[str, Any]:
    """Counts of a JUnit file, and the first line of each failure and each skip."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    found: dict[str, Any] = {"tests": len(cases), "failed": {}, "skipped": {}}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for outcome, key in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            for mark in case.iter(outcome):
                found[key][name] = (mark.get("message") or mark.text or "").strip().split("\n")[0]
    return found


def run(part: Part, folder: Path) -> dict[str, Any]:
    """What a part found. ``error`` says why it did not end well; ``result`` is what it had written by then."""
    out = folder / "out"
    command = [sys.executable, *(word.replace("{out}", str(out)) for word in part.command)]
    found: dict[str, Any] = {"command": " ".join(["python", *part.command])}
    begun = time.perf_counter()
    printed = ""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * part.minutes)
        printed = done.stdout
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            found["error"] = f"exit status {done.returncode}: " + " / ".join(lines[-3:])
    except subprocess.TimeoutExpired:
        found["error"] = f"not finished after {part.minutes:g} minutes"
    except OSError as error:
        found["error"] = str(error)
    found["seconds"] = round(time.perf_counter() - begun, 1)
    try:
        if part.printed:
            found["result"] = json.loads(printed)
        elif part.command[-1].startswith("--junitxml"):
            found["result"] = junit(out)
        else:
            found["result"] = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError, ElementTree.ParseError) as error:
        found.setdefault("error", f"wrote nothing that can be read: {error}")
    return found


def verdicts(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was claimed, what was measured, and whether it ``held``: True, False, or None where it wasn't measured."""
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        found[f"{name}: ran to its end"] = {"held": "error" not in part, "measured": part.get("error", "yes")}
    tests = parts.get("tests", {}).get("result")
    if tests is not None:
        passed = tests["tests"] - len(tests["failed"]) - len(tests["skipped"])
        found["tests marked gpu pass"] = {
            "held": not tests["failed"] and passed > 0,
            "measured": f"{passed} passed, {len(tests['failed'])} failed, {len(tests['skipped'])} skipped",
        }
    for cell in (parts.get("optimizers", {}).get("result") or {}).get("cells", ()):
        for name, value in cell["rows"].items():
            if not name.startswith("mezzo") or "fallback" in name:
                continue
            where = f"{name}, {cell['size']}, {cell['layout']}"
            launched = value.get("launches")
            copies = [each for each in launched or () if each.startswith(("Memcpy", "Memset"))]
            kernels = len(launched or ()) - len(copies)
            found[f"{where}: one launch"] = {
                "held": None if launched is None else kernels == 1,
                "measured": "not measured"
                if launched is None
                else f"{kernels}, and {len(copies)} copies or fills",
            }
            if cell["size"] == JUDGED_AT:
                found[f"{where}: {OF_COPY:.0%} of copy bandwidth"] = {
                    "held": value["of_copy"] >= OF_COPY,
                    "measured": f"{value['of_copy']:.0%}, {value['gb_per_s']:.0f} GB/s",
                }
        for name, why in cell["raised"].items():
            if name.startswith("mezzo") and not why.startswith("not run"):
                found[f"{name}, {cell['size']}, {cell['layout']}: runs"] = {"held": False, "measured": why}
    found.update(_bars(parts.get("bench", {}).get("result") or {}))
    found.update(_gpt2(parts.get("gpt2", {}).get("result") or {}))
    return found


def _bars(bench: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The bars of `make bench`, which are a CPU's but for "never slower": the others are shown, and not judged."""
    found: dict[str, dict[str, Any]] = {}
    for line in bench.get("bars", ()):
        claim = f"{line['bar']}: {line['row']} {line['mode']}, {line['contender']} / {line['below']}"
        judged = line["bar"].startswith("never slower") and line["verdict"] in ("met", "missed")
        ratio = f"{line['ratio']:.3f}, at most {line['most']:.3f}" if "ratio" in line else ""
        found[claim] = {
            "held": line["verdict"] == "met" if judged else None,
            "measured": f"{line['verdict']}: {ratio}" if ratio else line["verdict"],
        }
    return found


def _gpt2(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Whether Mezzo's fastest loop trains GPT-2 no slower than torch.amp's, with torch.compile and fused AdamW."""
    found: dict[str, dict[str, Any]] = {}
    for size, each in result.get("sizes", {}).items():
        claim = f"GPT-2 {size}: tokens a second, at least torch.amp's"
        others = [name for name in each["ratios"] if name in each["rates"]]
        if "amp-bf16" not in each["rates"] or not others:
            found[claim] = {"held": False, "measured": "; ".join(each["raised"].values()) or "nothing"}
            continue
        best = min(others, key=lambda name: each["ratios"][name]["ratio"])
        measured = ", ".join(
            f"{name} {each['rates'][name]['tokens_per_second']:,.0f}{_utilised(each['rates'][name])}"
            for name in (best, "amp-bf16")
        )
        found[claim] = {"held": each["ratios"][best]["interval"][0] <= 1, "measured": measured}
    return found


def _utilised(rate: Mapping[str, Any]) -> str:
    return "" if rate["utilisation"] is None else f" ({rate['utilisation']:.1%} of the GPU's peak)"


def show(report: Mapping[str, Any], console: Console) -> None:
    """The verdicts as a table, what did not hold at its end."""
    table = Table(title=f"{report['environment'].get('gpu')}: promised and measured")
    for column in ("claim", "", "measured"):
        table.add_column(column, overflow="fold")
    words = {True: "held", False: "DID NOT HOLD", None: "not measured"}
    for claim, value in sorted(report["verdicts"].items(), key=lambda item: item[1]["held"] is False):
        table.add_row(claim, words[value["held"]], value["measured"])
    console.print(table)


def assemble(gpu: str, chosen: Mapping[str, Part], out: Path, console: Console) -> dict[str, Any]:
    """Run the parts, one after another, into one report, written to `out` after each of them."""
    report: dict[str, Any] = {"schema": 1, "environment": {"gpu": gpu}, "parts": {}, "verdicts": {}}
    try:
        report["environment"] |= environment()
    except Exception as error:  # the parts may run all the same
        report["environment"]["error"] = f"{type(error).__name__}: {error}"
    for name, part in chosen.items():
        console.print(f"{name}: running (at most {part.minutes:g} minutes)")
        with tempfile.TemporaryDirectory() as folder:
            report["parts"][name] = found = run(part, Path(folder))
        console.print(f"{name}: {found.get('error', 'done')} ({found['seconds']} s)")
        report["verdicts"] = verdicts(report["parts"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_check_<gpu>.json")
    arguments = parser.parse_args()
    why = missing()
    if why:
        print(why, file=sys.stderr)
        return 2
    import torch

    gpu = torch.cuda.get_device_name()
    slug = re.sub(r"\W+", "_", gpu.lower()).strip("_")
    out = arguments.out or RESULTS / f"gpu_check_{slug}.json"
    console = Console() if sys.stdout.isatty() else Console(width=120)
    report = assemble(gpu, {name: PARTS[name] for name in arguments.parts}, out, console)
    show(report, console)
    console.print(f"written: {out}")
    return int(any(value["held"] is False for value in report["verdicts"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
