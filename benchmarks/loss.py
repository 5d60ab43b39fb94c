"""A head's product and its loss, forward and backward: torch.amp, Mezzo with the same code, LinearCrossEntropy.

    python benchmarks/loss.py                             # writes benchmarks/results/loss.json
    python benchmarks/loss.py --only 32768 --rounds 10
    python benchmarks/loss.py --keep-memory               # every contender with mezzo.keep_memory()

Hidden states [tokens, 384] in FP32 and bf16 products. Every round runs each contender once, in an order that rotates
from round to round; ratios are of medians, with a 95 % bootstrap interval over rounds. The peak is of tensor bytes in a
call of its own, without what was there before (hidden states, weight and targets) and with the gradients that it
leaves. The loss is compared as well, and the gradient of the weight with an FP32 one. Contenders:

- `amp`: nn.Linear and F.cross_entropy under torch.autocast;
- `amp, outside`: the same with F.cross_entropy outside the region, on bf16 logits made FP32, as many scripts have it;
- `mezzo`: nn.Linear and F.cross_entropy in a mezzo.autocast region;
- `head`: mezzo.nn.LinearCrossEntropy in that region;
- `head, split`: the same with its weight in bf16, as weights="split" stores it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import mezzo
from clocks import seconds
from mezzo.pytorch.machine import describe
from mezzo.pytorch.memory import PeakTensorBytes
from pairs import ratio_of_medians

WIDTH = 384
TOKENS = {256: 2048, 32768: 2048, 131072: 2048}
RESULTS = Path(__file__).parent / "results" / "loss.json"


@dataclass(frozen=True)
class Case:
    """What a loss is computed of.

    Args:
        hidden: [tokens, WIDTH] FP32, wanting a gradient.
        targets: int64 [tokens].
        head: the layer, its weight in the contender's format.
    """

    hidden: Tensor
    targets: Tensor
    head: nn.Linear

    def clear(self) -> None:
        """Forget gradients, as a step's end does."""
        self.hidden.grad = self.head.weight.grad = None


Loss = Callable[[Case], Tensor]


def amp(case: Case) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(case.head(case.hidden), case.targets)


def outside(case: Case) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = case.head(case.hidden)
    return F.cross_entropy(logits.float(), case.targets)


def same_code(case: Case) -> Tensor:
    with mezzo.autocast("bf16", "cpu"):
        return F.cross_entropy(case.head(case.hidden), case.targets)


def whole(case: Case) -> Tensor:
    with mezzo.autocast("bf16", "cpu"):
        loss: Tensor = case.head(case.hidden, case.targets)
        return loss


# Name -> the layer's class, its weight's dtype, the loss.
CONTENDERS: dict[str, tuple[type[nn.Linear], torch.dtype, Loss]] = {
    "amp": (nn.Linear, torch.float32, amp),
    "amp, outside": (nn.Linear, torch.float32, outside),
    "mezzo": (nn.Linear, torch.float32, same_code),
    "head": (mezzo.nn.LinearCrossEntropy, torch.float32, whole),
    "head, split": (mezzo.nn.LinearCrossEntropy, torch.bfloat16, whole),
}
BASELINE = "amp"


def case_of(name: str, vocabulary: int) -> Case:
    """The same numbers for each contender."""
    layer, dtype, _ = CONTENDERS[name]
    torch.manual_seed(0)
    head = layer(WIDTH, vocabulary, bias=False).to(dtype)
    hidden = torch.randn(TOKENS[vocabulary], WIDTH, requires_grad=True)
    return Case(hidden, torch.randint(vocabulary, (TOKENS[vocabulary],)), head)


def call_of(name: str, case: Case) -> Callable[[], float]:
    """One forward and backward."""
    loss_of = CONTENDERS[name][2]

    def call() -> float:
        case.clear()
        loss = loss_of(case)
        loss.backward()
        return loss.item()

    return call


def once(name: str, vocabulary: int, truth: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """The loss, the peak of its bytes and the error of its gradient, in a second call; and the gradient."""
    case = case_of(name, vocabulary)
    call = call_of(name, case)
    call()
    case.clear()
    gc.collect()
    before = PeakTensorBytes()
    before.start()
    alive = before.stop().peak_bytes
    watch = PeakTensorBytes()
    watch.start()
    loss = call()
    peak = watch.stop().peak_bytes - alive
    gradient = case.head.weight.grad
    assert gradient is not None
    off = 0.0 if truth is None else float((gradient.float() - truth).norm() / truth.norm())
    return {"loss": loss, "peak_bytes": peak, "gradient_error": off}, gradient


def truth_of(vocabulary: int) -> Tensor:
    """The weight's gradient in FP32."""
    case = case_of(BASELINE, vocabulary)
    F.cross_entropy(case.head(case.hidden), case.targets).backward()
    assert case.head.weight.grad is not None
    return case.head.weight.grad


def measure(vocabulary: int, rounds: int, console: Console) -> dict[str, Any]:
    truth = truth_of(vocabulary)
    found = {name: once(name, vocabulary, truth)[0] for name in CONTENDERS}
    del truth
    calls = {name: call_of(name, case_of(name, vocabulary)) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in track(range(rounds), description=f"{vocabulary} classes: rounds", console=console):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            times[name].append(seconds(calls[name], "cpu"))
    for name, row in found.items():
        row["median_seconds"] = statistics.median(times[name])
        row["seconds"] = times[name]
        row["peak_over_amp"] = row["peak_bytes"] / found[BASELINE]["peak_bytes"]
        faster = ratio_of_medians(times[BASELINE], times[name])
        row["faster_than_amp"] = {"ratio": faster.value, "interval": [faster.low, faster.high]}
    return {"classes": vocabulary, "tokens": TOKENS[vocabulary], "width": WIDTH, "contenders": found}


def shown(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['classes']} classes, {result['tokens']} tokens, width {result['width']}")
    for column in (
        "contender",
        "median",
        "amp's time over its",
        "peak MB",
        "of amp's",
        "loss",
        "gradient off FP32's by",
    ):
        table.add_column(column)
    for name, row in result["contenders"].items():
        faster = row["faster_than_amp"]
        table.add_row(
            name,
            f"{row['median_seconds'] * 1e3:.1f} ms",
            f"{faster['ratio']:.3f} [{faster['interval'][0]:.3f}, {faster['interval'][1]:.3f}]",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['peak_over_amp']:.3f}",
            f"{row['loss']:.5f}",
            f"{row['gradient_error']:.5f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=int, choices=sorted(TOKENS), action="append", help="this vocabulary (may be repeated)"
    )
    parser.add_argument("--rounds", type=int, default=30, help="of each contender (default %(default)s)")
    parser.add_argument("--keep-memory", action="store_true", help="call mezzo.keep_memory() first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.keep_memory:
        mezzo.keep_memory()
    console = Console()
    results = {"schema": 1, "machine": describe(), "keep_memory": arguments.keep_memory, "vocabularies": []}
    for vocabulary in arguments.only or TOKENS:
        found = measure(vocabulary, arguments.rounds, console)
        results["vocabularies"].append(found)
        console.print(shown(found))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
