"""Fill the marked parts of the pages in `PAGES` from the files of `benchmarks/results/`.

python benchmarks/readme.py            # a test compares the pages with what this writes
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import readme_api as api
import readme_blocks as blocks
import readme_commands as commands
import readme_distributed as distributed
import readme_emulation as emulation
import readme_front as front
import readme_keras as keras
import readme_recipes as recipes
import readme_reproduce as reproduce
import readme_steps as steps
import readme_troubleshooting as troubleshooting
from readme_steps import busy, header

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "dev" / "figures"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def compared() -> str:
    """The line per precision that `mezzo compare` printed about the demo."""
    return front.compared((RESULTS / "demo.txt").read_text(encoding="utf-8"))


def versions() -> str:
    """How the fast tests ended with each release of PyTorch."""
    if not (RESULTS / "versions.json").exists():
        return "Not run yet: `make versions` writes this table."
    return front.versions(_read("versions.json")["rows"])


PARITY = ("speed", "peak memory", "final loss", "loss gap", "margin", "pairs")


def parity() -> str:
    """The table that `mezzo compare` printed for the leanest mode, as one row."""
    text = (RESULTS / "lean_parity.txt").read_text(encoding="utf-8")
    printed = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", text, re.MULTILINE))
    result = text.partition("\n")[0].rpartition(": ")[2]
    return "\n".join(
        (
            "Measured with `mezzo compare --demo text-gpt --seeds 3` (`benchmarks/results/lean_parity.txt`):",
            "",
            *header("result", *PARITY),
            f"| {result} | {' | '.join(printed[name] for name in PARITY)} |",
        )
    )


def harms() -> str:
    """One row per planted harm, with the verdict on each of its sizes."""
    results = _read("harms.json")
    lines = header("harm", "demo", "size is", "verdict by size")
    for name, found in results["harms"].items():
        verdicts = ", ".join(
            f"{size['size']:g}: **{size['parity']}**"
            if size["parity"] == "divergent"
            else f"{size['size']:g}: {size['parity']}"
            for size in found["sizes"]
        )
        lines.append(f"| {name} | {found['demo']} | {found['unit']} | {verdicts} |")
    return "\n".join(lines)


BASELINE = "torch fused, FP32"
NOT_MEASURED = "Not measured in this file: `python benchmarks/optimizers.py` writes it."


def _where(results: dict[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    where = f"{machine['threads']} threads of {machine['cpu']}, torch {machine['torch']}, {packages}"
    if busy(results):
        where += f" (load {results['load_at_start']:g} at the start: times are not shown)"
    return where


def _total(row: dict[str, Any]) -> str:
    return f"{row['bytes_per_parameter']['total']:.2f}"


def _distance(found: dict[str, Any] | None) -> str:
    return f"{found['master']:.1e}" if found and "master" in found else ""


def optimizers() -> str:
    """One row per contender, at the largest size of `optimizers.json`, in both layouts."""
    results = _read("optimizers.json")
    size = results["cells"][-1]["size"]
    cells = [cell for cell in results["cells"] if cell["size"] == size]
    times = " | ".join(
        f"time / torch's, {cell['tensors']} tensor{'s' * (cell['tensors'] > 1)}" for cell in cells
    )
    lines = [
        f"A step of AdamW with {cells[-1]['parameters'] / 1e6:.0f} million parameters, on {_where(results)}",
        "(`python benchmarks/optimizers.py`, `benchmarks/results/optimizers.json`). Times are divided by those of",
        "torch's fused AdamW on FP32 weights: medians of interleaved rounds, with a 95 % interval. Bytes are those of",
        "live tensors: weights, gradients, masters and states. The distance is how far the masters are from AdamW in",
        "FP64 after 20 steps, relative to how far they moved.",
        "",
        f"| AdamW | what it stores | bytes per parameter | {times} | distance |",
        "|---|---|---|" + "---|" * len(cells) + "---|",
    ]
    for name, summary in results["contenders"].items():
        rows = [cell["rows"].get(name) for cell in cells]
        if rows[-1] is not None:
            took = " | ".join("" if busy(results) else _time(name, row) for row in rows)
            far = _distance(results.get("distance", {}).get(name))
            lines.append(f"| {name} | {summary} | {_total(rows[-1])} | {took} | {far} |")
    return "\n".join(lines)


def _time(name: str, row: dict[str, Any] | None) -> str:
    if row is None or name == BASELINE:
        return "" if row is None else "1"
    low, high = row["interval"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def optimizer_times() -> str:
    """Every cell of `optimizers.json`: ratios with their intervals, and what did not run, with the reason."""
    results = _read("optimizers.json")
    cells = results["cells"]
    copies = f"`Tensor.copy_` reads and writes {results['copy_gb_per_s']:.0f} GB/s there."
    lines = [f"On {_where(results)}. {copies}"]
    for cell in cells:
        lines += [
            "",
            f"{cell['size']} parameters ({cell['parameters']}), {cell['tensors']} tensor{'s' * (cell['tensors'] > 1)}:",
            "",
            "| AdamW | median | time / torch's fused FP32 | 95 % interval | rounds | GB/s | bytes per parameter |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in cell["rows"].items():
            low, high = row["interval"]
            times = (
                f"{row['median_ms']:.2f} ms | {row['ratio']:.3f} | {low:.3f} to {high:.3f} | {row['rounds']} |"
                f" {row['gb_per_s']:.1f}"
            )
            lines.append(f"| {name} | {' | | | |' if busy(results) else times} | {_total(row)} |")
        lines += [f"| {name} | {why} | | | | | |" for name, why in cell["raised"].items()]
    return "\n".join(lines)


def optimizer_modes() -> str:
    """Bytes per parameter of each mode of each optimizer."""
    modes = _read("optimizers.json").get("modes")
    if not modes:
        return NOT_MEASURED
    lines = header("weights", "masters", "AdamW, Adam", "SGD, momentum", "SGD")
    for masters in dict.fromkeys(mode.split("/")[0] for mode in modes):
        of = [modes[f"{masters}/{state}"] for state in ("fp32", "bf16", "int8")]
        adam, momentum = (
            ", ".join(_bytes(found[name]["total"]) for found in of) for name in ("AdamW", "SGD, momentum")
        )
        weights = "FP32 | none needed" if "weights" in masters else f"16-bit | `{masters}`"
        lines.append(f"| {weights} | {adam} | {momentum} | {_bytes(of[0]['SGD']['total'])} |")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    return f"{count:.2f}".rstrip("0").rstrip(".")


def optimizer_training() -> str:
    """The bytes of whole training steps, from `optimizers.json`."""
    found = _read("optimizers.json").get("training")
    if not found:
        return NOT_MEASURED
    lines = [
        "| AdamW | weights | gradients | state | other | total | peak of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, way in found.items():
        if "raised" in way:
            lines.append(f"| {name} | {way['raised']} | | | | | |")
            continue
        held = way["bytes_per_parameter"]
        cells = " | ".join(f"{held[key]:.2f}" for key in ("weights", "gradients", "state", "other", "total"))
        lines.append(f"| {name} | {cells} | {way['peak_bytes'] / 1e6:.0f} MB |")
    return "\n".join(lines)


def optimizer_first_steps() -> str:
    """The time of a first step with empty and with full caches, from `optimizers.json`."""
    results = _read("optimizers.json")
    found = results.get("first_step")
    if not found or busy(results):
        return NOT_MEASURED
    lines = [
        "| AdamW, 1 M parameters, one tensor | empty caches | compiling | full caches | loading | later steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, starts in found.items():
        cells = [cell for key in ("empty", "full") for cell in _start(starts[key])]
        later = starts["full"].get("third")
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if later is None else f'{1e3 * later:.1f} ms'} |")
    return "\n".join(lines)


def _start(found: dict[str, Any]) -> tuple[str, str]:
    if "raised" in found:
        return found["raised"], ""
    compiling = found["compiling"]
    return f"{found['first']:.2f} s", "" if compiling is None else f"{compiling:.2f} s"


def _bench(part: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    return lambda: part(_read("bench.json"))


def keep_memory() -> str:
    """One row per workload and contender of `keep_memory.json`."""
    results = _read("keep_memory.json")
    machine = results["machine"]
    lines = [
        f"`python benchmarks/keep_memory.py` on {machine['threads']} threads of {machine['cpu']}, with and without",
        "`keep_memory()` in separate processes: time of a step, page faults per step, and peak resident memory.",
        "",
        "| workload | precision | time with / without | page faults | resident MB | pairs of runs |",
        "|---|---|---|---|---|---|",
    ]
    for workload, rows in results["workloads"].items():
        for contender, row in rows.items():
            low, high = row["interval"]
            faults = f"{row['faults_kept']:,.0f} / {row['faults_system']:,.0f}"
            resident = f"{row['resident_bytes_kept'] / 1e6:.0f} / {row['resident_bytes_system'] / 1e6:.0f}"
            lines.append(
                f"| {workload} | {contender} | {row['ratio']:.3f} ({low:.3f} to {high:.3f}) | {faults} | {resident} |"
                f" {row['pairs']} |"
            )
    return "\n".join(lines)


def block_formats() -> str:
    """A row for each block format, where `block_formats.json` is there."""
    if not (RESULTS / "block_formats.json").exists():
        return "Not measured yet: `python benchmarks/block_formats.py` writes this table."
    return emulation.block_formats(_read("block_formats.json"))


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"gains": _bench(front.gains), "compared": compared},
    "docs/index.md": {"compared": compared, "versions": versions},
    "docs/api.md": {"api": api.table},
    "docs/commands.md": commands.PARTS,
    "docs/dev/benchmarks.md": {
        "figures": _bench(steps.figures),
        "harms": harms,
        "softmax": lambda: recipes.softmax(json.loads((RESULTS / "softmax_ends.json").read_text("utf-8"))),
        "optimizers": optimizers,
        "first-steps": optimizer_first_steps,
        "times": optimizer_times,
        "fp8": lambda: emulation.fp8(_read("fp8.json")),
        "bars": _bench(steps.bars),
        "kept": lambda: steps.kept(_read("training_step_kept.json")),
        "training-steps": _bench(steps.training_steps),
        "loss": _bench(steps.loss_alone),
        "emulation": lambda: emulation.emulation(_read("emulation.json")),
        "block-formats": block_formats,
        "parity": parity,
        "verdicts": lambda: blocks.verdicts(_read("block_verdicts.json")),
        "parts": lambda: blocks.parts(_read("block_verdicts.json")),
        "gradients": lambda: blocks.gradients(_read("block_verdicts.json")),
        "sensitivity": lambda: blocks.sensitivity(_read("nvfp4_sensitivity.json")),
        "advice": lambda: recipes.advice(_read("advice.json")["rows"]),
        "small-models": lambda: recipes.small_models(_read("small_models.json")),
        "watch": lambda: troubleshooting.watch(_read("watch.json")),
        "tracing": lambda: troubleshooting.tracing(_read("watch.json")),
        "faults": lambda: troubleshooting.faults(_read("faults.json")),
        "loss-scales": lambda: troubleshooting.loss_scales(_read("loss_scales.json")),
        "elastic": lambda: distributed.elastic(_read("elastic.json")),
        "collectives": lambda: distributed.collectives(_read("collectives.json")),
        "at-scale": lambda: distributed.at_scale(_read("collectives.json")),
        "keep-memory": keep_memory,
        "losses": _bench(steps.losses),
        "training": optimizer_training,
        "transfer": lambda: keras.table(RESULTS / "transfer.json"),
        "other-machine": lambda: steps.other_machine(_read("training_step_xeon.json")),
    },
    "docs/dev/operations.md": {"op-table": recipes.op_table},
    "docs/dev/reproduce.md": {name: reproduce.experiment(name) for name in reproduce.NAMES},
    "docs/memory.md": {
        "modes": optimizer_modes,
    },
}


def filled(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """The page with each ``<!-- name -->...<!-- /name -->`` holding its part."""
    for name, part in parts.items():
        if not 0 <= text.find(f"<!-- {name} -->\n") < text.find(f"<!-- /{name} -->"):
            raise SystemExit(f"no <!-- {name} --> ... <!-- /{name} --> in the page")
        opening, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{opening}<!-- {name} -->\n{part()}\n<!-- /{name} -->{rest.partition(f'<!-- /{name} -->')[2]}"
    return text


def main() -> None:
    for name in reproduce.NAMES:  # a new run of the experiments leaves its figures there
        if (fresh := RESULTS / "reproduce" / name / "figure.svg").exists():
            shutil.move(fresh, FIGURES / f"{name}.svg")
    for page, parts in PAGES.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
