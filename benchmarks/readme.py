"""Put the figures of `benchmarks/results/` into README.md and docs/verdict.md, between their markers.

python benchmarks/readme.py            # a test holds the pages equal to what this writes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def demo() -> str:
    """What `make demo` printed, as it printed it."""
    text = (RESULTS / "demo.txt").read_text(encoding="utf-8").rstrip()
    return "What `make demo` printed (`benchmarks/results/demo.txt`):\n\n```text\n" + text + "\n```"


def figures() -> str:
    """One row a ratio of `training_step.json`, and the machine it was measured on."""
    results = _read("training_step.json")
    machine = results["machine"]
    lines = [
        f"One training step, {machine['threads']} threads of {machine['cpu']}"
        f" ({', '.join(name for name in machine['isa'] if name.startswith(('avx512_bf', 'avx512_fp', 'amx')))}),"
        f" torch {machine['torch']}; medians of interleaved rounds, ratios with their 95 % interval",
        "(`python benchmarks/training_step.py --rounds 40`, `benchmarks/results/training_step.json`). `amp` is",
        "torch.autocast, `mezzo` is mezzo.autocast in the same loop, `short` is mezzo.MixedPrecision. Compare",
        "medians of the same number of rounds only: the machine drifts, and a ratio uses the rounds that both",
        "sides took part in.",
        "",
        "| workload | contender | median step | rounds | peak tensor bytes |",
        "|---|---|---|---|---|",
    ]
    ratios = [
        "",
        "| workload | time of / time of | ratio | 95 % interval | rounds |",
        "|---|---|---|---|---|",
    ]
    for name, found in results["workloads"].items():
        for contender, seconds in found["median_seconds"].items():
            peak = found["peak_bytes"][contender] / 1e6
            lines.append(
                f"| {name} | {contender} | {seconds:.3f} s | {len(found['seconds'][contender])} | {peak:.0f} MB |"
            )
        lines += [
            f"| {name} | {contender} | raises: {why} | | |" for contender, why in found["raised"].items()
        ]
        for row, ratio in found["ratios"].items():
            low, high = ratio["interval"]
            ratios.append(
                f"| {name} | {row} | {ratio['ratio']:.3f} | {low:.3f} to {high:.3f} | {ratio['rounds']} |"
            )
    sizes = [f"- {name}: {found['summary']}" for name, found in results["workloads"].items()]
    return "\n".join([*lines, *ratios, "", *sizes])


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


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"demo": demo, "figures": figures},
    "docs/verdict.md": {"harms": harms},
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
