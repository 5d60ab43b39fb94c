"""LSTM, GRU and RNN of two layers, forward and backward: Mezzo's beside PyTorch's in FP32 and under torch.amp.

    python benchmarks/recurrent.py                 # writes benchmarks/results/recurrent.json

`fp32` is PyTorch's module; `amp bf16` is the same under `torch.autocast("cpu", torch.bfloat16)` (whose LSTM raises in
fp16). Mezzo's carry the states in FP32. The CPU decides which formats are `emulated`: with FP32 factors of 16-bit
values, where it does not multiply the format itself. The contenders alternate within each round, in an order that
turns with the rounds; a ratio is of medians, with a bootstrap interval over paired rounds. Above 1 Mezzo's is faster.
`kept` are the bytes that autograd holds between forward and backward, but for parameters and the caller's input.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from mezzo.pytorch.kernels.recurrent.layer import layer
from mezzo.pytorch.kernels.recurrent.products import factor_dtype
from mezzo.pytorch.machine import describe
from pairs import ratio_of_medians

RESULTS = Path(__file__).parent / "results" / "recurrent.json"
SHAPES = ((512, 32, 64), (256, 32, 128))  # hidden width, sequences, steps
KINDS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
LAYERS = 2
Forward = Callable[[], Tensor]


def contenders(kind: str, shape: tuple[int, int, int]) -> dict[str, tuple[Forward, list[Tensor]]]:
    """Each one's forward, and what its gradients are asked for."""
    torch.manual_seed(0)
    width, batch, steps = shape
    module = KINDS[kind](width, width, LAYERS)
    parameters = list(module.parameters())
    x = torch.randn(steps, batch, width).bfloat16().float().requires_grad_()

    def amp() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = module(x)[0]
        return out

    def mezzo(compute: torch.dtype) -> Forward:
        def forward() -> Tensor:
            out, h0 = x, torch.zeros(batch, width)
            c0 = torch.zeros(batch, width) if kind == "lstm" else None
            for index in range(LAYERS):
                w_ih, w_hh, b_ih, b_hh = parameters[4 * index : 4 * index + 4]
                weights = (w_ih, w_hh, b_ih, b_hh, None)
                out = layer(kind, out, h0, c0, weights, compute=compute, hidden_fp32=True)[0]
            return out

        return forward

    made: dict[str, Forward] = {"fp32": lambda: module(x)[0], "amp bf16": amp}
    made |= {"mezzo bf16": mezzo(torch.bfloat16), "mezzo fp16": mezzo(torch.float16)}
    return {name: (forward, [x, *parameters]) for name, forward in made.items()}


def kept_bytes(forward: Forward, inputs: list[Tensor]) -> int:
    """Bytes of the storages that autograd holds between forward and backward, but for `inputs`."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    for tensor in inputs:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(held.values())


def measured(kind: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """One row: seconds, bytes, and ratios to Mezzo's."""
    runs = contenders(kind, shape)
    names = list(runs)
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for number in range(rounds + 2):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            forward, inputs = runs[name]
            start = time.perf_counter()
            out = forward()
            middle = time.perf_counter()
            seed = torch.ones_like(out)
            again = time.perf_counter()
            torch.autograd.grad(out, inputs, seed)
            end = time.perf_counter()
            if number >= 2:  # kernels are loaded, and memory has been asked for
                seconds[name][0].append(middle - start)
                seconds[name][1].append(end - again)
    total = {name: [a + b for a, b in zip(*pair)] for name, pair in seconds.items()}
    row: dict[str, Any] = {"kind": kind, "shape": list(shape), "layers": LAYERS}
    for name in names:
        row[name] = {
            "forward_ms": 1e3 * statistics.median(seconds[name][0]),
            "backward_ms": 1e3 * statistics.median(seconds[name][1]),
            "kept_bytes": kept_bytes(*runs[name]),
        }
    for name in names[2:]:
        for other in names[:2]:
            found = ratio_of_medians(total[other], total[name])
            row[name][f"{other} over it"] = [found.value, found.low, found.high]
        row[name]["kept_of_fp32"] = row[name]["kept_bytes"] / row["fp32"]["kept_bytes"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=tuple(KINDS), action="append", help="one kind (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("layer", "shape", "", "ms", "fp32 / it", "amp bf16 / it", "kept / fp32's")
    rows = []
    for kind in options.only or KINDS:
        for shape in SHAPES:
            row = measured(kind, shape, options.rounds)
            rows.append(row)
            for name in ("fp32", "amp bf16", "mezzo bf16", "mezzo fp16"):
                cell = row[name]
                ratios = [cell.get(f"{other} over it") for other in ("fp32", "amp bf16")]
                table.add_row(
                    kind,
                    str(list(shape)),
                    name,
                    f"{cell['forward_ms']:.0f} + {cell['backward_ms']:.0f}",
                    *("" if r is None else "{:.2f} ({:.2f} to {:.2f})".format(*r) for r in ratios),
                    f"{cell['kept_bytes'] / row['fp32']['kept_bytes']:.2f}",
                )
    Console(width=130).print(table)
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    result = {
        "schema": 1,
        "machine": describe(),
        "threads": options.threads,
        "rounds": options.rounds,
        "emulated": [name for name, dtype in formats.items() if factor_dtype(dtype) is torch.float32],
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
