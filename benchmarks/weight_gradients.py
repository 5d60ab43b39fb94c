"""Measure the error of a 16-bit weight's gradient compared with FP64, layer by layer: which layers may be lowered.

    python benchmarks/weight_gradients.py                 # writes benchmarks/results/weight_gradients.json

Each layer runs forward and backward once in FP64 on weights that bf16 represents exactly, and then in bf16 regions on
the same numbers. The error is |grad - truth| / |truth| over the whole gradient. `ratio` divides it by the error of
rounding the truth to bf16 once, the smallest possible error of a bf16 gradient: 1 is perfect, 2 is a rounded input, and
a ratio that grows with the batch is a sum in 16 bits. Contenders: `fp32`, FP32 weights in a region, as with autocast;
`bf16`, bf16 weights under `torch.autocast`; `mezzo`, bf16 weights in a `mezzo.autocast` region.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mezzo
from mezzo.demos.text_gpt import ALPHABET, batch, load
from mezzo.pytorch.hardware import describe

RESULTS = Path(__file__).parent / "results" / "weight_gradients.json"


class Rows(nn.Module):
    """A table that is indexed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(ALPHABET), 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Scaled(nn.Module):
    """A gain per channel, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(256))
        self.shift = nn.Parameter(torch.randn(256))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


class Shared(nn.Module):
    """One layer that is used 32 times in a row: its gradients meet one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(32):
            x = x + self.layer(x) / 32
        return x


def layers() -> list[tuple[str, Callable[[], nn.Module], list[Tensor]]]:
    tokens = batch(load(200_000), 16, 128)[0]
    x, images = torch.randn(16, 128, 256), torch.randn(16, 16, 32, 32)
    return [
        ("embedding, text", lambda: nn.Embedding(len(ALPHABET), 256), [tokens]),
        ("embedding, 4 rows", lambda: nn.Embedding(4, 256), [tokens % 4]),
        ("embedding_bag, text", lambda: nn.EmbeddingBag(len(ALPHABET), 256, mode="sum"), [tokens]),
        ("rows by index, text", Rows, [tokens]),
        ("linear", lambda: nn.Linear(256, 768), [x]),
        ("linear, 65536 rows", lambda: nn.Linear(64, 64), [torch.randn(65536, 64)]),
        ("linear, used 32 times", Shared, [torch.randn(2048, 64)]),
        ("conv2d", lambda: nn.Conv2d(16, 32, 3, padding=1), [images]),
        ("conv2d, depthwise", lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), [images]),
        ("conv_transpose2d", lambda: nn.ConvTranspose2d(16, 32, 3), [images]),
        ("lstm", lambda: nn.LSTM(64, 128, batch_first=True), [torch.randn(16, 128, 64)]),
        ("gru", lambda: nn.GRU(64, 128, batch_first=True), [torch.randn(16, 128, 64)]),
        ("prelu", lambda: nn.PReLU(16), [images]),
        ("bilinear", lambda: nn.Bilinear(32, 32, 16), [torch.randn(2048, 32), torch.randn(2048, 32)]),
        ("gain and shift", Scaled, [x]),
        ("layer_norm", lambda: nn.LayerNorm(256), [x]),
        ("rms_norm", lambda: nn.RMSNorm(256), [x]),
        ("group_norm", lambda: nn.GroupNorm(4, 16), [images]),
        ("batch_norm", lambda: nn.BatchNorm2d(16), [images]),
    ]


def gradients(module: nn.Module, inputs: list[Tensor], region: Any) -> dict[str, Tensor]:
    with region:
        out = module(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(5)
    seed = torch.randn(out.shape, generator=generator) * 0.5 + 0.3  # gradients of a loss seldom cancel
    out.backward(seed.to(out.dtype))
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def error(grad: Tensor, truth: Tensor) -> float:
    return float((grad.double() - truth).norm() / truth.norm())


def main() -> None:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    rows = []
    table = Table(
        "layer", "gradient", "fp32 weight", "bf16, torch", "bf16, mezzo", title="error / one rounding"
    )
    for name, build, inputs in layers():
        state = {key: value.bfloat16() for key, value in build().state_dict().items()}
        regions: dict[str, tuple[torch.dtype, Any]] = {
            "truth": (torch.float64, torch.autocast("cpu", enabled=False)),
            "fp32": (torch.float32, mezzo.autocast("bf16", "cpu")),
            "bf16": (torch.bfloat16, torch.autocast("cpu", torch.bfloat16)),
            "mezzo": (torch.bfloat16, mezzo.autocast("bf16", "cpu")),
        }
        found: dict[str, dict[str, Tensor] | str] = {}
        for contender, (dtype, region) in regions.items():
            module = build().to(dtype)
            module.load_state_dict(state)
            wide = torch.float64 if contender == "truth" else torch.float32
            moved = [x.to(wide) if x.is_floating_point() else x for x in inputs]
            try:
                found[contender] = gradients(module, moved, region)
            except RuntimeError as failure:
                found[contender] = str(failure).partition("\n")[0]
        truths = found["truth"]
        assert isinstance(truths, dict)
        for param, truth in truths.items():
            once = error(truth.bfloat16(), truth)
            row: dict[str, Any] = {"layer": name, "param": param, "rounded_once": once}
            for contender in ("fp32", "bf16", "mezzo"):
                got = found[contender]
                row[contender] = got if isinstance(got, str) else error(got[param], truth)
            rows.append(row)
            cells = [
                f"{v / once:.1f}" if isinstance(v := row[c], float) else "raises"
                for c in ("fp32", "bf16", "mezzo")
            ]
            table.add_row(name, param, *cells)
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"schema": 1, "machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
