"""The tables of docs/dev/benchmarks.md and docs/memory.md from `bench.json`: one function per table."""

from __future__ import annotations

from collections import Counter
from typing import Any


def busy(results: dict[str, Any]) -> bool:
    """Whether the load at the start, left by the benchmark before it or by other work, makes times unreliable."""
    return bool(results["load_at_start"] > results["machine"]["threads"] / 2)


SHOWN = {
    "fp32": "FP32",
    "short-bf16": "Mezzo, FP32 weights",
    "split-bf16": "Mezzo, split",
    "lean-bf16": "Mezzo, lean",
    "recompute": "split, GELU recomputed",
    "fused-loss": "split, LinearCrossEntropy",
}
"""The contenders of `bench.json` in the tables, and their column heads."""
AMP = "amp-bf16"


def header(*columns: str) -> list[str]:
    """The two lines that begin a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def machine(results: dict[str, Any]) -> str:
    """Where the times come from: threads, CPU, its fast instructions, torch."""
    found = results["machine"]
    fast = [name for name in found["isa"] if name.startswith(("avx512_bf", "avx512_fp", "amx"))]
    return f"{found['threads']} threads of {found['cpu']} ({', '.join(fast)}), torch {found['torch']}"


def figures(results: dict[str, Any]) -> str:
    """The plot of training steps, and its ratios to torch.amp."""
    lines = [
        f"Training steps on {machine(results)}: `make bench`, one run of {results['minutes']:.0f} minutes"
        f"{_about(results)}.",
        "Ratios below 1 mean faster, or smaller, than torch.amp in bf16.",
        "",
        "![Time and peak bytes of each workload, divided by those of torch.amp](figures/bench.svg)",
        "",
    ]
    for mode in ("eager", "compiled"):
        columns = [
            name for name in SHOWN if any(name in _ratios(row, mode) for row in results["rows"].values())
        ]
        lines += [
            f"Time relative to torch.amp, {mode}:",
            "",
            *header("workload", *(SHOWN[name] for name in columns)),
        ]
        for name, row in results["rows"].items():
            cells = [_ratio(_ratios(row, mode).get(column)) for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    columns = [name for name in SHOWN if any(name in _peaks(row) for row in results["rows"].values())]
    lines += [
        "Peak tensor bytes of a step relative to torch.amp, eager:",
        "",
        *header("workload", "torch.amp", *(SHOWN[name] for name in columns)),
    ]
    for name, row in results["rows"].items():
        peaks = _peaks(row)
        cells = [_over(peaks, column) for column in columns]
        lines.append(f"| {name} | {peaks[AMP] / 1e6:.0f} MB | {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: {_summary(row)}" for name, row in results["rows"].items())]
    return "\n".join(lines)


def _about(results: dict[str, Any]) -> str:
    """Conditions of the run that affect its times."""
    notes = ""
    if results["settings"]["keep_memory"]:
        notes += ", with `mezzo.keep_memory()` for every contender"
    if busy(results):
        notes += f", with a load of {results['load_at_start']:g} at the start: times are unreliable"
    return notes


def _ratios(row: dict[str, Any], mode: str) -> dict[str, Any]:
    ratios: dict[str, Any] = row.get(mode, {}).get("ratios", {})
    return ratios


def _peaks(row: dict[str, Any]) -> dict[str, int]:
    peaks: dict[str, int] = row.get("eager", {}).get("peak_bytes", {})
    return peaks if AMP in peaks else {}


def _over(peaks: dict[str, int], name: str) -> str:
    return f"{peaks[name] / peaks[AMP]:.2f}" if name in peaks else ""


def _summary(row: dict[str, Any]) -> str:
    return next((str(found["summary"]) for found in row.values() if "summary" in found), "did not run")


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})"


def bars(results: dict[str, Any]) -> str:
    """The goals for training steps, and the measured ratios."""
    counts = Counter(line["verdict"] for line in results["bars"])
    lines = [
        f"{counts['met']} met, {counts['missed']} missed, {counts['open']} open (worse than the goal, but the interval"
        f" includes it), {counts['not measured']} not measured.",
        "",
        *header("goal", "workload", "compared", "at most", "measured", "result"),
    ]
    for line in results["bars"]:
        low, high = line.get("interval", (0, 0))
        measured = f"{line['ratio']:.3f}" if "ratio" in line else ""
        if low < high:
            measured += f" ({low:.3f} to {high:.3f})"
        verdict = line["verdict"] if line["verdict"] == "met" else f"**{line['verdict']}**"
        place = (
            f"{line['row']} classes"
            if line["kind"] in ("logits", "head")
            else f"{line['row']}, {line['mode']}"
        )
        pair = f"{line['contender']} / {line['below']}"
        lines.append(f"| {line['bar']} | {place} | {pair} | {line['most']:.3f} | {measured} | {verdict} |")
    return "\n".join(lines)


STEP_COLUMNS = ("workload", "contender", "median step", "time / baseline", "rounds", "peak", "loss")


def training_steps(results: dict[str, Any]) -> str:
    """Seconds, rounds, bytes and losses of every contender: one table per mode."""
    parts = [
        f"{machine(results)}; `make bench`, `benchmarks/results/bench.json`, {results['minutes']:.0f} minutes"
        f"{_about(results)}."
    ]
    for mode in ("eager", "compiled", "fp16"):
        rows = {name: row[mode] for name, row in results["rows"].items() if mode in row}
        if not rows:
            continue
        compiled = mode == "compiled"
        parts += [
            "",
            f"### {mode}",
            "",
            *header(*STEP_COLUMNS, *(("first step", "graphs, breaks") if compiled else ())),
        ]
        for name, found in rows.items():
            parts += _contenders(name, found, compiled)
    return "\n".join(parts)


def _contenders(name: str, found: dict[str, Any], compiled: bool) -> list[str]:
    blank = "| " * (4 + 2 * compiled)
    if "error" in found:
        return [f"| {name} | | {found['error']} {blank}|"]
    lines = []
    for contender, seconds in found["median_seconds"].items():
        ratio = "1" if contender == found["baseline"] else _ratio(found["ratios"].get(contender))
        rounds, loss = len(found["seconds"][contender]), found["losses"][contender]
        cells = (
            f"{1e3 * seconds:.1f} ms | {ratio} | {rounds} | {found['peak_bytes'][contender] / 1e6:.0f} MB"
            f" | {loss[-1]:.4f} after {len(loss)}"
        )
        if compiled:
            graphs = f"{found['graphs'][contender]}, {found['graph_breaks'][contender]}"
            cells += f" | {found['first_step_seconds'][contender]:.1f} s | {graphs}"
        lines.append(f"| {name} | {contender} | {cells} |")
    lines += [f"| {name} | {contender} | {why} {blank}|" for contender, why in found["raised"].items()]
    return lines


def loss_alone(results: dict[str, Any]) -> str:
    """Time and bytes of the loss at growing vocabularies."""
    lines = header("classes", "tokens", "scope", "contender", "time / torch.amp's", "peak")
    for classes, scopes in results["loss"].items():
        for scope, found in scopes.items():
            for name, peak in found["peak_bytes"].items():
                ratio = "1" if name == AMP else _ratio(found["ratios"].get(name))
                lines.append(
                    f"| {classes} | {found['tokens']} | {scope} | {name} | {ratio} | {peak / 1e6:.1f} MB |"
                )
    return "\n".join(lines) if len(lines) > 2 else "Not measured: run `make bench` without options."


def other_machine(results: dict[str, Any]) -> str:
    """Seconds, rounds and bytes on a CPU whose bf16 is slow."""
    parts = [
        f"{machine(results)}; `benchmarks/results/training_step_xeon.json`.",
        "",
        *header("workload", "contender", "median step", "rounds", "peak tensor bytes"),
    ]
    for name, found in results["workloads"].items():
        for contender, seconds in found["median_seconds"].items():
            peak = found["peak_bytes"][contender] / 1e6
            rounds = len(found["seconds"][contender])
            parts.append(f"| {name} | {contender} | {seconds:.3f} s | {rounds} | {peak:.0f} MB |")
        parts += [
            f"| {name} | {contender} | error: {why} | | |" for contender, why in found["raised"].items()
        ]
    return "\n".join(parts)


LOSSES = {
    "amp-bf16": "torch.autocast",
    "mezzo-bf16": "`F.cross_entropy` in a context",
    "fused-loss": "`LinearCrossEntropy`",
}
"""The contenders of the loss benchmark, and their column heads."""


def losses(results: dict[str, Any]) -> str:
    """Time and bytes of a linear layer and its loss, per vocabulary size."""
    lines = [
        f"`python benchmarks/bench_loss.py` on {machine(results)}: a linear layer of width 384 with FP32 weights",
        "and its loss, forward and backward. Peak bytes without hidden states and weights, and time relative to",
        f"torch.autocast{_about(results)}.",
        "",
        *header("classes", "tokens", *LOSSES.values()),
    ]
    for classes, scopes in results["loss"].items():
        found = scopes["head"]
        cells = []
        for name in LOSSES:
            ratio = _ratio(found["ratios"].get(name))
            peak = f"{found['peak_bytes'][name] / 1e6:.1f} MB" if name in found["peak_bytes"] else "not run"
            cells.append(f"{peak}, {ratio}" if ratio else peak)
        lines.append(f"| {int(classes):,} | {found['tokens']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


KEPT = "--only gpt --only fine-tune --only lm-32k --mode eager --rounds 9 --keep-memory"
"""The options that made `training_step_kept.json`."""


def kept(results: dict[str, Any]) -> str:
    """Ratios to torch.amp where all contenders keep their freed memory."""
    rows = {name: found["eager"] for name, found in results["workloads"].items()}
    columns = [name for name in SHOWN if any(name in row["ratios"] for row in rows.values())]
    lines = [
        f"Time relative to torch.amp, eager, all with `mezzo.keep_memory()`, on {machine(results)}",
        f"(`python benchmarks/training_step.py {KEPT}",
        "--out benchmarks/results/training_step_kept.json`):",
        "",
        *header("workload", "torch.amp", *(SHOWN[name] for name in columns)),
    ]
    for name, row in rows.items():
        cells = [_ratio(row["ratios"].get(column)) for column in columns]
        lines.append(f"| {name} | {1e3 * row['median_seconds'][AMP]:.0f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)
