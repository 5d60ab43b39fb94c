"""Measure the overhead of Mezzo and of torch.amp on tiny work: regions, scaler, steps of a tiny model, kernels.

    python benchmarks/overhead.py                   # writes benchmarks/results/overhead.json
    python benchmarks/overhead.py --rounds 400
    python benchmarks/overhead.py --against ../mezzo-old    # another checkout of Mezzo takes turns with the two

torch.amp runs in a process that never imports Mezzo, because Mezzo registers kernels for the whole process. Both
processes run at once and take turns, a few calls per round. Ratios are of medians over rounds, with 95 % intervals. The
model is two small linear layers with an MSE loss, on one thread. fp16 counts as native in both, so that no row
emulates it. The last table has the ops for which a bf16 region registers kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS: dict[str, tuple[str, str]] = {
    "region: make, enter, leave": ("region", "region"),
    "region: enter and leave one that is kept": ("kept", "kept"),
    "region in a region": ("nested", "nested"),
    "region as decorator": ("decorator", "decorator"),
    "tiny model, forward": ("forward", "forward"),
    "tiny model with in-place ReLU, BatchNorm, Dropout, forward": ("inplace", "inplace"),
    "step, bf16": ("step-bf16", "step-bf16"),
    "step, bf16: MixedPrecision": ("step-bf16", "short-bf16"),
    "step, bf16: MixedPrecision, split weights": ("step-bf16", "split-bf16"),
    "step, bf16, clipped: MixedPrecision": ("clip-bf16", "short-clip-bf16"),
    "step, fp16": ("step-fp16", "step-fp16"),
    "step, fp16: MixedPrecision": ("step-fp16", "short-fp16"),
    "scaler alone": ("scaler", "scaler"),
}
OPS: dict[str, str] = {
    "layer_norm": "F.layer_norm(h, (16,), weight, bias)",
    "rms_norm": "F.rms_norm(h, (16,), weight)",
    "group_norm": "F.group_norm(h, 4, weight, bias)",
    "batch_norm": "F.batch_norm(h, mean, var, weight, bias, True)",
    "softmax": "F.softmax(h, -1)",
    "log_softmax": "F.log_softmax(h, -1)",
    "gelu": "F.gelu(h)",
    "silu": "F.silu(h)",
    "sum": "h.sum(-1)",
    "mean": "h.mean(-1)",
    "cross_entropy": "F.cross_entropy(h, labels)",
    "mse_loss": "F.mse_loss(h, target)",
    "linear": "F.linear(h, square)",
    "matmul": "h @ square",
    "embedding": "F.embedding(labels, square)",
    "add": "h + h",
    "relu_": "scratch.relu_()",
    "dropout": "F.dropout(scratch, 0.1)",
    "detach": "scratch.detach()",
}
# Timed calls a round, by the beginning of a contender's name.
CALLS = {"step": 4, "shor": 4, "spli": 4, "clip": 4, "scal": 4, "op m": 2, "op d": 2}


def _contenders(library: str) -> dict[str, Callable[[], object]]:
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    mezzo: Any = None
    if library == "mezzo":
        import mezzo
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def region(name: str = "bf16") -> Any:
        return mezzo.autocast(name, "cpu") if mezzo else torch.autocast("cpu", formats[name])

    def enter() -> None:
        with region():
            pass

    kept = region()

    def enter_kept() -> None:
        with kept:
            pass

    def nested() -> None:
        with region(), region():
            pass

    def nothing() -> None:
        pass

    decorated: Callable[[], object] = region()(nothing)

    x, y = torch.randn(8, 16), torch.randn(8, 4)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def forward(net: nn.Module) -> Callable[[], object]:
        def call() -> object:
            with region():
                return net(x)

        return call

    def loop(name: str, clip: float | None = None) -> Callable[[], object]:
        net = network()
        moves = optimizer(net)
        scaler: Any = None
        if name == "fp16":
            scaler = mezzo.GradScaler("cpu") if mezzo else torch.amp.GradScaler("cpu")

        def call() -> None:
            with region(name):
                loss = F.mse_loss(net(x), y)
            if scaler is None:
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                moves.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(moves)
                scaler.update()
            moves.zero_grad()

        return call

    def short(name: str, **keywords: Any) -> Callable[[], object]:
        net = network()
        mp = mezzo.MixedPrecision(net, optimizer(net), name, **keywords)

        def call() -> None:
            with mp.autocast():
                loss = F.mse_loss(net(x), y)
            mp.step(loss)

        return call

    def scaler_alone() -> Callable[[], object]:
        net = network()
        moves = optimizer(net)
        scaler: Any = mezzo.GradScaler("cpu") if mezzo else torch.amp.GradScaler("cpu")
        loss = torch.ones(())
        for p in net.parameters():
            p.grad = torch.ones_like(p)

        def call() -> None:
            scaler.scale(loss)
            scaler.step(moves)
            scaler.update()

        return call

    inplace = nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Dropout(0.1), nn.Linear(16, 4)
    )
    found = {
        "region": enter,
        "kept": enter_kept,
        "nested": nested,
        "decorator": decorated,
        "forward": forward(network()),
        "inplace": forward(inplace),
        "step-bf16": loop("bf16"),
        "clip-bf16": loop("bf16", 1.0),
        "step-fp16": loop("fp16"),
        "scaler": scaler_alone(),
    }
    if mezzo:
        found["short-bf16"] = short("bf16")
        found["split-bf16"] = short("bf16", masters="split")
        found["short-clip-bf16"] = short("bf16", clip_norm=1.0)
        found["short-fp16"] = short("fp16")
    names = {
        "F": F,
        "torch": torch,
        "h": torch.randn(8, 16).bfloat16(),
        "scratch": torch.randn(8, 16),
        "square": torch.randn(16, 16).bfloat16(),
        "weight": torch.ones(16),
        "bias": torch.zeros(16),
        "mean": torch.zeros(16),
        "var": torch.ones(16),
        "labels": torch.arange(8),
        "target": torch.randn(8, 16),
    }
    for op, source in OPS.items():
        code = compile(source, op, "eval")

        def call(code: Any = code) -> None:
            for _ in range(10):
                eval(code, names)

        found[f"op {op}"] = call
    entered = region()

    def in_region(call: Callable[[], object]) -> Callable[[], object]:
        def inside() -> object:
            with entered:
                return call()

        return inside

    return {name: in_region(call) if name.startswith("op ") else call for name, call in found.items()}


def serve(library: str) -> None:
    """Time the requests on standard input: JSON lines with the name of a contender and a number of calls."""
    contenders = _contenders(library)
    for call in contenders.values():
        for _ in range(5):
            call()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, calls = json.loads(line)
        call = contenders[name]
        call()  # the caches are the other process's
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        print(json.dumps((time.perf_counter() - begun) / calls), flush=True)


class _Process:
    def __init__(self, library: str, checkout: Path) -> None:
        path = {"PYTHONPATH": str(checkout / "src"), "PYTHONSAFEPATH": "1"}
        script = str(checkout / "benchmarks" / "overhead.py")
        environment = {**os.environ, **path, "MEZZO_ASSUME_NATIVE": "bf16,fp16"}
        self._child = subprocess.Popen(
            [sys.executable, script, "--serve", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def seconds(self, name: str, calls: int) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps((name, calls)) + "\n")
        self._child.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", choices=("torch", "mezzo"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=300, help="rounds per row (default %(default)s)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of Mezzo, measured too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from mezzo.pytorch.hardware import describe
    from pairs import ratio_of_medians

    console = Console()
    rows = {**ROWS, **{f"op: {op}": (f"op {op}", f"op {op}") for op in OPS}}
    here = Path(__file__).resolve().parent.parent
    sides = {"torch": _Process("torch", here), "mezzo": _Process("mezzo", here)}
    if arguments.against is not None:
        sides["against"] = _Process("mezzo", arguments.against.resolve())
    times: dict[str, dict[str, list[float]]] = {row: {side: [] for side in sides} for row in rows}
    for number in track(range(arguments.rounds), description="rounds", console=console):
        for row, (theirs, ours) in rows.items():
            for which in list(sides) if number % 2 else list(sides)[::-1]:
                name = theirs if which == "torch" else ours
                seconds = sides[which].seconds(name, CALLS.get(name[:4], 20 if name[:2] != "op" else 5))
                times[row][which].append(seconds / (10 if name.startswith("op ") else 1))
    for side in sides.values():
        side.close()
    others = ["torch", "against"] if arguments.against else ["torch"]
    table = Table(
        "row", "torch.amp", "Mezzo", "Mezzo / torch.amp", *(["Mezzo / other checkout"] * (len(others) - 1))
    )
    results: dict[str, Any] = {}
    for row, given in times.items():
        ratios = {other: ratio_of_medians(given["mezzo"], given[other]) for other in others}
        medians = {side: statistics.median(values) * 1e6 for side, values in given.items()}
        results[row] = {
            "median_microseconds": medians,
            "ratio": ratios["torch"].value,
            "interval": [ratios["torch"].low, ratios["torch"].high],
            "rounds": arguments.rounds,
        }
        if arguments.against:
            against = ratios["against"]
            results[row]["against"] = {"ratio": against.value, "interval": [against.low, against.high]}
        table.add_row(
            row,
            f"{medians['torch']:.2f} us",
            f"{medians['mezzo']:.2f} us",
            *(f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" for ratio in ratios.values()),
        )
    console.print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": describe(), "rows": results}, indent=1) + "\n")
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
