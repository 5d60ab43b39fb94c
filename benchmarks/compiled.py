"""Compare the graphs that torch.compile optimizes: those of torch.amp's and of Mezzo's training loss.

    python benchmarks/compiled.py                    # writes benchmarks/results/compiled.json

Nothing is timed: graphs are the same on every machine, and show why one contender can be faster than another under
Inductor (`training_step.py --mode compiled` measures the time). The table counts the operations that remain after
Inductor's decompositions, including casts between FP32 and bf16, and the bytes that Inductor keeps for backward. The
loss is inside the region. Models whose layers break the graph (LSTM) are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mezzo
from graphs import Graphs, graphs_of
from mezzo.pytorch.hardware import describe
from models import WORKLOADS, Workload

ROWS = ("gpt", "cnn")
Region = Callable[[], AbstractContextManager[Any]]


def _mezzo(masters: str) -> Callable[[Workload], Region]:
    def prepare(work: Workload) -> Region:
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=work.lr)
        mezzo.MixedPrecision(work.model, optimizer, precision="bf16", masters=masters).close()
        return lambda: mezzo.autocast("bf16", "cpu")

    return prepare


CONTENDERS: Mapping[str, Callable[[Workload], Region]] = {
    "fp32": lambda work: nullcontext,
    "amp-bf16": lambda work: lambda: torch.autocast("cpu", torch.bfloat16),
    "mezzo-bf16": lambda work: lambda: mezzo.autocast("bf16", "cpu"),
    "split-bf16": _mezzo("split"),
}


def _casts(nodes: list[torch.fx.Node]) -> int:
    return sum(getattr(node.target, "__name__", "").startswith("convert_element_type") for node in nodes)


def counted(graphs: Graphs) -> dict[str, int]:
    """Operations, casts and bytes of one contender's graphs."""
    return {
        "forward_operations": len(graphs.forward),
        "backward_operations": len(graphs.backward),
        "casts": _casts(graphs.forward) + _casts(graphs.backward),
        "saved_bytes": graphs.bytes_saved(),
        "saved_fp32_bytes": graphs.bytes_saved(torch.float32),
    }


def measure(row: str, contender: str) -> dict[str, int]:
    """What is counted of one contender on one workload."""
    work = WORKLOADS[row]()
    region = CONTENDERS[contender](work)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with region():
            return work.loss_of(work.model, inputs, targets)

    return counted(graphs_of(loss_of, work.inputs, work.targets))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "results" / "compiled.json"
    parser.add_argument("--only", choices=ROWS, nargs="+", default=ROWS, help="rows (default: all)")
    parser.add_argument("--out", type=Path, default=default, help="output file (default %(default)s)")
    arguments = parser.parse_args()
    console = Console()
    found: dict[str, Any] = {}
    for row in arguments.only:
        found[row] = {contender: measure(row, contender) for contender in CONTENDERS}
        table = Table(title=row, title_justify="left")
        for column in ("contender", "forward", "backward", "casts", "saved", "of it FP32"):
            table.add_column(column, justify="left" if column == "contender" else "right")
        for contender, counts in found[row].items():
            numbers = [str(counts[f"{side}_operations"]) for side in ("forward", "backward")]
            sizes = [f"{counts[key] / 1e6:.1f} MB" for key in ("saved_bytes", "saved_fp32_bytes")]
            table.add_row(contender, *numbers, str(counts["casts"]), *sizes)
        console.print(table)
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
