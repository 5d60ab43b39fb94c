"""Find the largest batch size with which a training script fits into memory, and the fastest.

The script is not changed and need not know of Mezzo. It runs at one batch size after another, each run a process of its
own that is ended after a few optimizer steps, so files that the script writes are those of an unfinished run. Say
with --vary how the script is told its batch size:

  --vary=--batch-size      an option:           train.py --batch-size 32
  --vary=--batch-size=     the same in a word:  train.py --batch-size=32
  --vary=data.batch=       Hydra and the like:  train.py data.batch=32
  --vary={}                where {} stands:     train.py config.yaml 32   (give: -- config.yaml {})

On a GPU a size fails when an allocation does. A CPU would swap, so there the bytes of all tensors at a step's peak are
counted and held against --limit. A step is one step of the optimizer; samples/s is the size over its time,
data loading included. The batch size of an accumulating script is that of one backward pass.

Exit status: 0 found, 1 nothing fits (not even the smallest size), 2 wrong usage, or a script that fails or never
trains.

Examples:
  mezzo batch-size train.py --vary=--batch-size
  mezzo batch-size train.py --vary=--batch-size --precision bf16 --limit 4GiB -- --epochs 3
  mezzo batch-size train.py --vary=--batch-size --precision bf16,masters=split --multiple-of 8
  mezzo batch-size --demo text-gpt --vary=--batch --limit 1GiB --multiple-of 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.cli.numbers import whole
from mezzo.cli.target import add_target, target_of
from mezzo.core.batch_result import HEADS, BatchSizeResult, columns
from mezzo.core.byte_counts import parse_bytes
from mezzo.core.errors import UsageError
from mezzo.core.whole_file import write_whole
from mezzo.demos import PYTORCH as DEMOS
from mezzo.verify.batch_size.progress import watcher
from mezzo.verify.batch_size.request import BatchSizeRequest, precisions_of
from mezzo.verify.batch_size.search import FILE, search_script
from mezzo.verify.batch_size.vary import Vary
from mezzo.verify.progress import Silent, Watcher

PASSES_ON = True
"""What follows `--` is the script's."""

SCHEMA = 1

SHORTEST_REASON = 16
"""Why a size does not fit is wrapped to no fewer columns than this."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.usage = (
        "mezzo batch-size (SCRIPT | --demo NAME | -m MODULE) --vary=OPTION [options] [-- SCRIPT'S ARGUMENTS]"
    )
    add_target(parser, DEMOS)
    parser.add_argument(
        "--vary",
        metavar="OPTION",
        help="what holds the batch size, as the script spells it (write --vary=...)",
    )
    parser.add_argument(
        "--precision",
        action="append",
        metavar="P",
        help="presets, policy strings or .toml files, with commas or given again (default fp32,bf16)",
    )
    parser.add_argument(
        "--limit",
        metavar="BYTES",
        help="what a step may take, such as 4GiB (default on a CPU: what is available, less 10 %% or 512 MiB; on a "
        "GPU: until an allocation fails)",
    )
    parser.add_argument(
        "--start", type=whole("", 8), default=8, metavar="N", help="the first size (default 8)"
    )
    parser.add_argument("--max", type=whole("", 256), metavar="N", help="try no size above it")
    parser.add_argument(
        "--multiple-of",
        type=whole("", 8),
        default=1,
        metavar="N",
        help="sizes are multiples of it (default 1)",
    )
    parser.add_argument(
        "--steps",
        type=whole("steps", 12),
        default=12,
        metavar="N",
        help="end each run after so many optimizer steps (default 12)",
    )
    parser.add_argument("--out", metavar="DIR", help=f"keep every run's records and output there, and {FILE}")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and return the exit status."""
    errors = Console(stderr=True)
    request = request_of(arguments)
    told: Watcher = Silent() if arguments.json and not errors.is_terminal else watcher(errors)
    folder = Path(arguments.out) if arguments.out else None
    found = search_script(request, folder, watcher=told)
    data = _as_json(request, found)
    text = json.dumps(data, indent=2, allow_nan=False)
    if folder is not None:
        write_whole(folder / FILE, text + "\n")
    if arguments.json:
        print(text)
    else:
        show(Console(), request, found)
    return int(not all(result.fits for result in found.values()))


def request_of(arguments: argparse.Namespace) -> BatchSizeRequest:
    """What the command line asks for.

    Raises:
        UsageError: none or several of script, demo and module; no --vary; an unknown name; a value out of range.
    """
    target = target_of(arguments, DEMOS, "mezzo batch-size train.py --vary=--batch-size")
    if arguments.vary is None:
        raise UsageError(
            "say with --vary how the script is told its batch size, as it spells it: --vary=--batch-size for an "
            "option, --vary=batch_size= for key=value"
        )
    return BatchSizeRequest(
        target=target,
        vary=Vary(arguments.vary),
        argv=tuple(arguments.argv),
        is_module=bool(arguments.module),
        precisions=precisions_of(arguments.precision or ["fp32,bf16"]),
        steps=arguments.steps,
        limit=None if arguments.limit is None else parse_bytes(arguments.limit),
        start=arguments.start,
        multiple_of=arguments.multiple_of,
        max_size=arguments.max,
    )


def show(console: Console, request: BatchSizeRequest, found: Mapping[str, BatchSizeResult]) -> None:
    """Print each precision's table, and then the recommendations: the last lines are what to do."""
    for precision, result in found.items():
        console.print(Text(precision, style="bold"), soft_wrap=True)
        rows = [HEADS, *result.rows()]
        if console.is_terminal and _boxed_width(rows) <= console.width:
            console.print(_table(rows))
        else:
            for text in columns(rows):
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        for note in result.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=not console.is_terminal)
        console.print()
    first = next(iter(found))
    for precision, result in found.items():
        said = sentence(request, result)
        if precision != first and result.fits and found[first].fits:
            said += f" The largest is {result.largest / found[first].largest:.2f} times that of {first}."
        line = Text.assemble((precision, "bold"), f": {said}")
        console.print(line, soft_wrap=not console.is_terminal)


def _boxed_width(rows: list[tuple[str, ...]]) -> int:
    """The least width of a table in which only the last column wraps."""
    numbers = [max(map(len, column)) for column in zip(*rows)][:-1]
    return sum(numbers) + SHORTEST_REASON + 3 * len(rows[0]) + 1


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(*rows[0])
    for column in table.columns[:-1]:
        column.justify, column.no_wrap = "right", True
    for cells in rows[1:]:
        table.add_row(*map(Text, cells))
    return table


def sentence(request: BatchSizeRequest, result: BatchSizeResult) -> str:
    """The recommendation, in the script's own words."""
    spelling = request.vary.spelling
    if spelling.endswith("="):
        return result.sentence(spelling[:-1], join="=")
    return result.sentence("batch size" if spelling == "{}" else spelling)


def _as_json(request: BatchSizeRequest, found: Mapping[str, BatchSizeResult]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "script": request.target,
        "argv": list(request.argv),
        "vary": request.vary.spelling,
        "steps": request.steps,
        "precisions": {precision: result.to_dict() for precision, result in found.items()},
    }
