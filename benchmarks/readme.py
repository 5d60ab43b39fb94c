"""Put the figures of `benchmarks/results/` into the pages that `PAGES` names, between their markers.

python benchmarks/readme.py            # a test holds the pages equal to what this writes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import readme_emulation as emulation
import readme_keras as keras
import readme_recipes as recipes
import readme_reproduce as reproduce
import readme_steps as steps
import readme_troubleshooting as troubleshooting
from readme_steps import busy

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def demo() -> str:
    """What `make demo` printed, as it printed it."""
    text = (RESULTS / "demo.txt").read_text(encoding="utf-8").rstrip()
    return "What `make demo` printed (`benchmarks/results/demo.txt`):\n\n```text\n" + text + "\n```"


def parity() -> str:
    """What `mezzo compare` printed of the leanest mode, as it printed it."""
    text = (RESULTS / "lean_parity.txt").read_text(encoding="utf-8").rstrip()
    return "```text\n" + text + "\n```"


def harms() -> str:
    """One row a planted harm, with the verdict on each of its sizes."""
    results = _read("harms.json")
    lines = ["| harm | demo | size is | verdict by size |", "|---|---|---|---|"]
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
    beside = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    where = f"{machine['threads']} threads of {machine['cpu']}, torch {machine['torch']}, {beside}"
    if busy(results):
        where += f" (busy with something else, load {results['load_at_start']:g}, so times are left out)"
    return where


def _busy(results: dict[str, Any]) -> bool:
    return bool(results["load_at_start"] > results["machine"]["threads"] / 2)


def _total(row: dict[str, Any]) -> str:
    return f"{row['bytes_per_parameter']['total']:.2f}"


def _distance(found: dict[str, Any] | None) -> str:
    return f"{found['master']:.1e}" if found and "master" in found else ""


def optimizers() -> str:
    """One row a contender, at the largest size of `optimizers.json` in both layouts: neither may hide the other."""
    results = _read("optimizers.json")
    size = results["cells"][-1]["size"]
    cells = [cell for cell in results["cells"] if cell["size"] == size]
    times = " | ".join(
        f"time / torch's, {cell['tensors']} tensor{'s' * (cell['tensors'] > 1)}" for cell in cells
    )
    lines = [
        f"A step of AdamW over {cells[-1]['parameters'] / 1e6:.0f} million parameters, on {_where(results)};",
        "time is over that of torch's fused AdamW on FP32 weights, medians of interleaved rounds with their 95 %",
        "interval (`python benchmarks/optimizers.py`, `benchmarks/results/optimizers.json`). Bytes are those of live",
        "tensors: weights, gradients, masters, states. The distance is that of the masters from AdamW in FP64 after 20",
        "steps, over how far they moved: 1 would be as wrong as not having moved.",
        "",
        f"| AdamW | what it stores | bytes a parameter | {times} | distance |",
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
            "| AdamW | median | time / torch's fused FP32 | 95 % interval | rounds | GB/s | bytes a parameter |",
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
    """Bytes a parameter of each mode of each optimizer."""
    modes = _read("optimizers.json").get("modes")
    if not modes:
        return NOT_MEASURED
    names = list(next(iter(modes.values())))
    lines = [f"| masters/state | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for mode, found in modes.items():
        lines.append(f"| {mode} | {' | '.join(_bytes(found[name]['total']) for name in names)} |")
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
    """What a first step takes with empty and with full caches, from `optimizers.json`."""
    results = _read("optimizers.json")
    found = results.get("first_step")
    if not found or busy(results):
        return NOT_MEASURED
    lines = [
        "| AdamW, 1 M parameters, one tensor | caches empty | of it compiling | caches full | of it loading | later |",
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
    """One row a workload and contender of `keep_memory.json`."""
    results = _read("keep_memory.json")
    machine = results["machine"]
    lines = [
        f"On {machine['threads']} threads of {machine['cpu']} (`python benchmarks/keep_memory.py`): pairs of whole",
        "processes, the median step of each; page faults of a step and the most resident bytes, kept / system.",
        "",
        "| workload | contender | time, kept / system | faults | resident MB | pairs |",
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


def _advice(part: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    return lambda: part(_read("advice.json")["rows"])


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"demo": demo, "figures": _bench(steps.figures), "optimizers": optimizers},
    "docs/figures.md": {
        "bars": _bench(steps.bars),
        "kept": lambda: steps.kept(_read("training_step_kept.json")),
        "training-steps": _bench(steps.training_steps),
        "loss": _bench(steps.loss_alone),
        "emulation": lambda: emulation.emulation(_read("emulation.json")),
        "other-machine": lambda: steps.other_machine(_read("training_step_xeon.json")),
    },
    **{
        f"docs/recipes/{page}.md": {"example": recipes.example(name)}
        for page, name in recipes.EXAMPLES.items()
    },
    "docs/recipes/common-advice.md": {name: _advice(part) for name, part in recipes.ADVICE.items()},
    "docs/reproduce.md": {name: reproduce.experiment(name) for name in reproduce.NAMES},
    "docs/fp8.md": {"fp8": lambda: emulation.fp8(_read("fp8.json"))},
    "docs/troubleshooting.md": {
        "watch": lambda: troubleshooting.watch(_read("watch.json")),
        "tracing": lambda: troubleshooting.tracing(_read("watch.json")),
        "faults": lambda: troubleshooting.faults(_read("faults.json")),
        "loss-scales": lambda: troubleshooting.loss_scales(_read("loss_scales.json")),
    },
    "docs/keras.md": {"transfer": lambda: keras.table(RESULTS / "transfer.json")},
    "docs/losses.md": {"losses": _bench(steps.losses)},
    "docs/memory.md": {"keep-memory": keep_memory},
    "docs/verdict.md": {"harms": harms},
    "docs/optimizers.md": {
        "modes": optimizer_modes,
        "parity": parity,
        "training": optimizer_training,
        "first-steps": optimizer_first_steps,
        "times": optimizer_times,
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
    for page, parts in PAGES.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
