"""Measure fp8 linear layers: a transformer block's training step and, on a GPU, single layers of many sizes.

    python benchmarks/fp8.py                 # writes benchmarks/results/fp8.json

`blocks` is a training step (forward and backward) of one transformer block. Its four linear layers are
`quantized_linear` in the rows `tensorwise` and `rowwise`, and `F.linear` in the rows `fp32` and `bf16`; the rest of the
block (attention, normalizations, GELU, residuals) is bf16 with FP32 normalizations in all rows but `fp32`. Contenders
alternate within each round, in an order that rotates; `over_fp32` is the time relative to FP32, with a bootstrap
interval over paired rounds: below 1 is faster. `saved_bytes` are those of the distinct tensors that autograd keeps
between forward and backward, without parameters, and `saved_over_fp32` their ratio. `gradient_error` is the distance
of all parameters' gradients from those of an FP64 step, relative to their norm.

`layers` is the step of one layer with K inputs and N outputs, fp8 against bf16, eager and compiled, on a GPU that
multiplies fp8: it shows from which size fp8 is faster. Without such a GPU the rows have `measured: false` and the
reason.

If other processes use the machine, rely on the interval instead of the ratio.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from clocks import seconds
from mezzo.core.compute import GRANULARITIES
from mezzo.core.recipes import recipe_of
from mezzo.pytorch.hardware import describe
from mezzo.pytorch.kernels.quantized_linear import gemm_dtype, is_native, quantized_linear
from pairs import ratio_of_medians

RESULTS = Path(__file__).parent / "results" / "fp8.json"
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], object]

# name -> (width, tokens of a sequence, sequences)
BLOCKS = {"small": (256, 128, 8), "medium": (512, 256, 4), "large": (1024, 256, 4)}
# K and N of the layers that are measured, K N / (K + N) from 192 to 2731; M is 8192.
LAYERS = (
    (384, 384),
    (512, 512),
    (768, 768),
    (768, 3072),
    (1024, 1024),
    (1024, 4096),
    (2048, 2048),
    (4096, 8192),
)
ROWS = 8192


def low(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias.to(torch.bfloat16))


def eight(scaling: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return quantized_linear(x, weight, bias, recipe=recipe_of("fp8", scaling))


LINEARS: dict[str, Linear] = {
    "fp32": F.linear,
    "bf16": low,
    **{scaling: partial(eight, scaling) for scaling in sorted(GRANULARITIES, reverse=True)},
}


class Block(nn.Module):
    """A pre-norm transformer block of 64-wide heads, whose linear layers are what it is given."""

    def __init__(self, width: int, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dtype = linear, dtype
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def _apply_linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return self.linear(x, layer.weight, layer.bias)

    def _norm(self, layer: nn.LayerNorm, x: Tensor) -> Tensor:
        normed: Tensor = layer(x.to(layer.weight.dtype))
        return normed.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        qkv = self._apply_linear(self.qkv, self._norm(self.before, x))
        q, k, v = qkv.view(count, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._apply_linear(self.out, heads.transpose(1, 2).reshape(count, length, width))
        hidden = F.gelu(self._apply_linear(self.up, self._norm(self.between, x)))
        return x + self._apply_linear(self.down, hidden)


def block_step(name: str, shape: tuple[int, int, int], device: str) -> tuple[Step, Block]:
    """One forward and backward of a row of the table; its block, whose gradients the step leaves."""
    width, length, count = shape
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(name, torch.bfloat16)
    block = Block(width, LINEARS.get(name, F.linear), dtype).to(device)
    if name == "fp64":
        block = block.double()
    x = torch.randn(count, length, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    seed = (
        torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16).to(dtype)
    )
    x.requires_grad_()

    def step() -> None:
        for parameter in (x, *block.parameters()):
            parameter.grad = None
        block(x).backward(seed)

    return step, block


def saved_bytes(step: Step, block: Block) -> int:
    """Of the distinct storages that autograd holds, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    held: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(held.values())


def interleaved(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each, one a round, after two rounds that warm up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds + 2):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took = seconds(steps[name], device)
            if number >= 2:
                taken[name].append(took)
    return taken


def measured_block(size: str, rounds: int, device: str) -> dict[str, Any]:
    shape = BLOCKS[size]
    made = {name: block_step(name, shape, device) for name in LINEARS}
    truth_step, truth = block_step("fp64", shape, "cpu")
    truth_step()
    exact = torch.cat([p.grad.flatten() for p in truth.parameters() if p.grad is not None])
    row: dict[str, Any] = {"block": size, "width": shape[0], "tokens": shape[1] * shape[2], "device": device}
    for name, (step, block) in made.items():
        held = saved_bytes(step, block)
        found = torch.cat([p.grad.flatten().double().cpu() for p in block.parameters() if p.grad is not None])
        row[name] = {"saved_bytes": held, "gradient_error": float((found - exact).norm() / exact.norm())}
    taken = interleaved({name: step for name, (step, _) in made.items()}, rounds, device)
    for name, times in taken.items():
        found_ratio = ratio_of_medians(times, taken["fp32"])
        row[name]["milliseconds"] = sorted(times)[len(times) // 2] * 1e3
        row[name]["over_fp32"] = [found_ratio.value, found_ratio.low, found_ratio.high]
        row[name]["saved_over_fp32"] = row[name]["saved_bytes"] / row["fp32"]["saved_bytes"]
    return row


def layer_step(linear: Linear, K: int, N: int) -> Step:
    torch.manual_seed(0)
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(N, K, device="cuda") / K**0.5).requires_grad_()
    b, g = torch.zeros(N, device="cuda", requires_grad=True), torch.randn(ROWS, N, device="cuda").bfloat16()
    return lambda: torch.autograd.grad(linear(x, w, b), (x, w, b), g)


def layer_rows(rounds: int, why_not: str | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for K, N in LAYERS:
        for granularity in ("tensorwise", "rowwise"):
            for mode in ("eager", "compiled"):
                row: dict[str, Any] = {"K": K, "N": N, "size": K * N / (K + N), "mode": mode}
                row |= {"scaling": granularity}
                rows.append(row)
                if why_not is not None:
                    row |= {"measured": False, "reason": why_not}
                    continue
                wrap: Any = torch.compile if mode == "compiled" else (lambda function: function)
                steps = {"bf16": layer_step(wrap(low), K, N)}
                steps["fp8"] = layer_step(wrap(LINEARS[granularity]), K, N)
                taken = interleaved(steps, rounds, "cuda")
                found = ratio_of_medians(taken["bf16"], taken["fp8"])
                row |= {"measured": True, "bf16_over_fp8": [found.value, found.low, found.high]}
    return rows


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table("block", "width", "tokens", "linear", "ms", "time / fp32", "saved / fp32", "gradient error")
    for row in rows:
        for name in LINEARS:
            cell = row[name]
            table.add_row(
                row["block"],
                str(row["width"]),
                str(row["tokens"]),
                name,
                f"{cell['milliseconds']:.1f}",
                "{:.2f} ({:.2f} to {:.2f})".format(*cell["over_fp32"]),
                f"{cell['saved_over_fp32']:.2f}",
                f"{cell['gradient_error']:.1e}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each row, after two that warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--blocks", nargs="*", choices=BLOCKS, default=list(BLOCKS), help="sizes of the block"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    why_not = None
    if not torch.cuda.is_available():
        why_not = "not measured: this machine has no CUDA device"
    elif not is_native(torch.device("cuda")):
        why_not = "not measured: this machine's GPU has no fp8 products"
    blocks = [measured_block(size, options.rounds, options.device) for size in options.blocks]
    console = Console(width=120)
    console.print(shown(blocks))
    layers = layer_rows(options.rounds, why_not)
    console.print(
        why_not
        if why_not is not None
        else "\n".join(
            f"K={row['K']} N={row['N']} {row['scaling']} {row['mode']}: bf16 / fp8 "
            "{:.2f} ({:.2f} to {:.2f})".format(*row["bf16_over_fp8"])
            for row in layers
        )
    )
    result = {
        "schema": 1,
        "machine": describe(),
        "threads": options.threads,
        "rounds": options.rounds,
        "emulated_in": None
        if is_native(torch.device(options.device))
        else str(gemm_dtype(options.device)).removeprefix("torch."),
        "blocks": blocks,
        "layers": layers,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
