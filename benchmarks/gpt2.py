"""Train GPT-2 with 124 and 350 million parameters: tokens per second and the share of the GPU's peak, with torch.amp.

    python benchmarks/gpt2.py --device cuda --out gpt2.json
    python benchmarks/gpt2.py --size tiny                    # on a CPU, to see that it runs

All contenders run under torch.compile with torch's fused AdamW, which Mezzo's kernel replaces for 16-bit weights.
Steps are interleaved, as in `training_step.py`. Model FLOPs utilization counts 6 operations per parameter and token
(without position and token tables, with the tied head) and 6 x layers x width x context for the two products of causal
attention, forward and backward, divided by the dense bf16 peak in the GPU's data sheet. Recomputation is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from mezzo.core.errors import UnknownNameError
from mezzo.doctor import gpus
from mezzo.pytorch.hardware import describe
from models import GPT, Workload
from training_step import measure

CONTENDERS = ("amp-bf16", "mezzo-bf16", "short-bf16", "split-bf16", "lean-bf16", "fused-loss")


@dataclass(frozen=True)
class Size:
    """A GPT-2, and how many sequences a step has."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int = 1024
    vocabulary: int = 50304  # 50,257 and what makes it divisible by 64

    def work(self) -> Workload:
        """One step's work: random tokens, head and token table tied."""
        torch.manual_seed(0)
        model = GPT(self.layers, self.width, self.heads, self.context, self.vocabulary)
        nn.init.normal_(model.token.weight, std=0.02)
        model.head.weight = model.token.weight
        tokens = torch.randint(self.vocabulary, (self.batch, self.context + 1))
        summary = f"GPT-2: {self.layers} layers, width {self.width}, {self.batch} x {self.context} tokens"
        return Workload(model, tokens[:, :-1], tokens[:, 1:], summary)

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.context

    def flops(self) -> float:
        """Of a step's matrix products, forward and backward."""
        block = 12 * self.width**2
        products = self.layers * block + self.vocabulary * self.width
        return self.tokens * 6.0 * (products + self.layers * self.width * self.context)


SIZES: Mapping[str, Size] = {
    "tiny": Size(2, 64, 2, 2, 32, 256),
    "124M": Size(12, 768, 12, 32),
    "350M": Size(24, 1024, 16, 16),
}


def peak(gpu: str) -> float | None:
    """Dense bf16 operations a second by the GPU's datasheet; None where the doctor doesn't know which that is."""
    try:
        found = {model.dense_peak_tflop_s.get("bf16") for model in gpus.find(gpu)}
    except UnknownNameError:
        return None
    one = found.pop() if len(found) == 1 else None
    return None if one is None else one * 1e12


def rates(found: Mapping[str, Any], size: Size, top: float | None) -> dict[str, dict[str, float | None]]:
    """Tokens a second and model-FLOPs utilisation of each contender, from its median step."""
    return {
        name: {
            "tokens_per_second": size.tokens / seconds,
            "utilisation": None if top is None else size.flops() / seconds / top,
        }
        for name, seconds in found["median_seconds"].items()
    }


def show(name: str, found: Mapping[str, Any], console: Console) -> None:
    """Print one size."""
    shown = Table(title=f"{name}: {found['summary']}", title_justify="left", pad_edge=False)
    for column in ("compiled", "tokens/s", "MFU", "time / amp-bf16", "peak"):
        shown.add_column(column, no_wrap=True)
    for contender, rate in found["rates"].items():
        ratio = found["ratios"].get(contender)
        over = "" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(ratio["ratio"], *ratio["interval"])
        used = "" if rate["utilisation"] is None else f"{rate['utilisation']:.1%}"
        bytes_ = f"{found['peak_bytes'][contender] / 1e9:.2f} GB"
        shown.add_row(contender, f"{rate['tokens_per_second']:,.0f}", used, over, bytes_)
    console.print(shown)
    for contender, why in found["raised"].items():
        console.print(f"  {contender}: {why}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), action="append", help="default: 124M and 350M")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", choices=("eager", "compiled"), default="compiled")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else ""
    top = peak(gpu) if gpu else None
    console = Console(highlight=False)
    results: dict[str, Any] = {"machine": describe(), "gpu": gpu, "bf16_peak": top, "sizes": {}}
    for name in arguments.size or ("124M", "350M"):
        size = SIZES[name]
        found = measure(
            name,
            arguments.mode,
            size.work,
            arguments.device,
            arguments.rounds,
            only=tuple(arguments.contender or CONTENDERS),
        )
        found["rates"] = rates(found, size, top)
        results["sizes"][name] = found
        show(name, found, console)
        if arguments.out:
            arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
