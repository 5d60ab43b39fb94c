"""Measure one loss, forward and backward, at growing vocabularies: time, and peak bytes above those allocated before.

    python benchmarks/bench_loss.py                # prints a table; bench.py writes it into its results

There are two scopes. `logits`: `F.cross_entropy` over 16-bit logits (FP32 for `fp32`), including the logits. `head`:
from hidden states through a linear layer with FP32 weights, and back to both gradients. Contenders are `fp32`,
torch.autocast, mezzo.autocast, and `fused-loss`, which is mezzo.nn.linear_cross_entropy and has no logits.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mezzo
from clocks import seconds
from live import alive
from mezzo.pytorch.memory import PeakTensorBytes
from pairs import ratio_of_medians

WIDTH = 384
TOKENS = {256: 2048, 2**15: 2048, 2**17: 1024}
ROUNDS = 7
AMP = "amp-bf16"

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def _linear_then_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def _fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = importlib.import_module("mezzo.nn").linear_cross_entropy(hidden, weight, target)
    return loss


REGIONS: dict[str, Callable[[str], Any]] = {
    "fp32": lambda device: nullcontext(),
    AMP: lambda device: torch.autocast(device, torch.bfloat16),
    "mezzo-bf16": lambda device: mezzo.autocast("bf16", device),
    "fused-loss": lambda device: mezzo.autocast("bf16", device),
}


def _logits(name: str, device: str, classes: int) -> Callable[[], object] | None:
    if name == "fused-loss":
        return None
    torch.manual_seed(0)
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    logits = torch.randn(TOKENS[classes], classes, device=device).to(dtype).requires_grad_()
    target = torch.randint(classes, (TOKENS[classes],), device=device)

    def turn() -> None:
        logits.grad = None
        with REGIONS[name](device):
            loss = F.cross_entropy(logits, target)
        loss.backward()

    return turn


def _head(name: str, device: str, classes: int) -> Callable[[], object]:
    torch.manual_seed(0)
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    hidden = torch.randn(TOKENS[classes], WIDTH, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, WIDTH, device=device) / WIDTH**0.5).requires_grad_()
    target = torch.randint(classes, (TOKENS[classes],), device=device)
    loss_of: Head = _fused if name == "fused-loss" else _linear_then_loss

    def turn() -> None:
        hidden.grad = weight.grad = None
        with REGIONS[name](device):
            loss = loss_of(hidden, weight, target)
        loss.backward()

    return turn


SCOPES: dict[str, Callable[[str, str, int], Callable[[], object] | None]] = {
    "logits": _logits,
    "head": _head,
}


def _alive(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else sum(alive().values())


def _peak(name: str, scope: str, classes: int, device: str) -> int | None:
    """Peak bytes of a second run on separate objects; `logits` includes the logits, `head` excludes its inputs."""
    before = _alive(device)
    turn = SCOPES[scope](name, device, classes)
    if turn is None:
        return None
    given = _alive(device) if scope == "head" else before
    turn()
    watch = PeakTensorBytes(device)
    watch.start()
    turn()
    return watch.stop().peak_bytes - given


def measure(classes: int, scope: str, device: str = "cpu", rounds: int = ROUNDS) -> dict[str, Any]:
    """Peak bytes, and times by interleaved rounds, of every contender at one vocabulary."""
    found: dict[str, Any] = {"tokens": TOKENS[classes], "peak_bytes": {}, "raised": {}, "ratios": {}}
    turns: dict[str, Callable[[], object]] = {}
    for name in REGIONS:
        try:
            peak = _peak(name, scope, classes, device)
        except Exception as error:  # a contender that this Mezzo lacks is a result
            found["raised"][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        if peak is not None:
            found["peak_bytes"][name] = peak
    for name in found["peak_bytes"]:
        turn = SCOPES[scope](name, device, classes)
        assert turn is not None
        turn()
        turns[name] = turn
    times: dict[str, list[float]] = {name: [] for name in turns}
    draw, order = random.Random(0), list(turns)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            times[name].append(seconds(turns[name], device))
    for name in turns:
        if name != AMP and AMP in turns:
            ratio = ratio_of_medians(times[name], times[AMP])
            found["ratios"][name] = {
                "ratio": ratio.value,
                "interval": [ratio.low, ratio.high],
                "rounds": rounds,
            }
    found["seconds"] = {name: [float(f"{value:.5g}") for value in series] for name, series in times.items()}
    return found


def table(results: dict[str, Any]) -> Table:
    """Every vocabulary and scope, to be printed in 80 columns."""
    shown = Table(title="one loss, forward and backward", title_justify="left", pad_edge=False)
    for column in ("classes", "scope", "contender"):
        shown.add_column(column, no_wrap=True)
    for column in ("time / amp-bf16", "peak"):
        shown.add_column(column, justify="right", no_wrap=True)
    for classes, scopes in results.items():
        for scope, found in scopes.items():
            for name, peak in found["peak_bytes"].items():
                ratio = found["ratios"].get(name)
                over = (
                    ""
                    if ratio is None
                    else "{:.3f} ({:.3f} to {:.3f})".format(ratio["ratio"], *ratio["interval"])
                )
                shown.add_row(classes, scope, name, over, f"{peak / 1e6:.1f} MB")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--classes", type=int, choices=tuple(TOKENS), action="append")
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.keep_memory:
        mezzo.keep_memory()
    results = {
        str(classes): {scope: measure(classes, scope, arguments.device, arguments.rounds) for scope in SCOPES}
        for classes in arguments.classes or TOKENS
    }
    console = Console(highlight=False)
    console.print(table(results))
    for classes, scopes in results.items():
        for scope, found in scopes.items():
            for name, why in found["raised"].items():
                console.print(f"  {classes}, {scope}, {name}: {why}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
