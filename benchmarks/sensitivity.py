"""Which sum predicts what lowering some of a model's modules does to its loss: `docs/troubleshooting.md`.

    python benchmarks/sensitivity.py [--small]

For each model a few FP32 batches are measured, as `mezzo calibrate` does it. Then random sets of modules are lowered
and the loss is computed on other batches: the root mean square of its change is set against what each sum predicted.

    squares    sqrt(sum of squares)            signs drawn by chance
    signed     sqrt(sum over modules of the mean squared signed sum)
    expected   `mezzo.core.calibration.expected_square`: the larger of the two, module by module and step by step

A ratio of 1 is a right prediction; the spread is the factor that holds 68 % of the cases around the middle one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.core.calibration import expected_square
from mezzo.core.policy import Policy
from mezzo.core.records import ModuleRounding, SensitivityRecord
from mezzo.pytorch.autocast.context import autocast
from mezzo.pytorch.autocast.modules import apply_module_overrides
from mezzo.pytorch.sensitivity import Sensitivities
from mezzo.pytorch.training.observers import Observers

RESULTS = Path(__file__).parent / "results" / "sensitivity.json"
Batch = tuple[Tensor, Tensor]


class Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return out


class Offset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 64.0) - 64.0


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), *(Branch(64) for _ in range(4)), nn.Linear(64, 10))


def fragile() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), Branch(64), Offset(), Branch(64), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    def stage(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

    image = nn.Unflatten(1, (2, 4, 4))
    return nn.Sequential(
        image, *stage(2, 16), *stage(16, 32), *stage(32, 32), nn.Flatten(), nn.Linear(512, 10)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 48, 2, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x.view(-1, 8, 4))[0][:, -1])
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": residual,
    "fragile": fragile,
    "convolutions": convolutions,
    "recurrent": Recurrent,
}


def batches(count: int, seed: int) -> list[Batch]:
    made = torch.Generator().manual_seed(seed)
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    inputs = [torch.randn(128, 32, generator=made) for _ in range(count)]
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


def trained(make: Callable[[], nn.Module], steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, y in batches(steps, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


Seen = list[ModuleRounding]  # of one module: a row for each step


def measured(model: nn.Module, fmt: str, seen: list[Batch]) -> dict[str, Seen]:
    """Path -> what was measured of each module."""
    probe = Sensitivities([fmt])
    observing = Observers(model, [probe])
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    for index, (x, y) in enumerate(seen):
        loss = nn.functional.cross_entropy(model(x), y)
        observing.backward_begins(loss, 1.0)
        loss.backward()
        observing.update_begins(still, 1.0)
        observing.update_ended(still, index=index, skipped=False, loss_scale=1.0)
        still.zero_grad()
    observing.undo()
    records = [one for one in probe.drain() if isinstance(one, SensitivityRecord)]
    assert len(records) == len(seen)
    found: dict[str, Seen] = {}
    for row in (row for record in records for row in record.rows):
        found.setdefault(row.module, []).append(row)
    return found


def policy_of(lowered: dict[str, bool], fmt: str) -> Policy:
    """The policy under which these modules run in the format and the others in FP32."""
    base = lowered.get("", True)
    lines: dict[str, bool] = {}
    for path in sorted(lowered, key=lambda path: path.count(".")):
        around = [outer for outer in lines if path.startswith(f"{outer}.")]
        if path and lowered[path] != (lines[max(around, key=len)] if around else base):
            lines[path] = lowered[path]
    modules = tuple((path, fmt if low else "fp32") for path, low in lines.items())
    return Policy(fmt if base else "fp32", modules=modules)


@torch.no_grad()
def losses(model: nn.Module, policy: Policy, data: list[Batch]) -> list[float]:
    with apply_module_overrides(model, policy, "cpu"), autocast(policy, "cpu"):
        return [float(nn.functional.cross_entropy(model(x), y)) for x, y in data]


SUMS: dict[str, Callable[[list[Seen]], float]] = {
    "squares": lambda seen: math.sqrt(sum(float(np.mean([r.squares for r in one])) for one in seen)),
    "signed": lambda seen: math.sqrt(sum(float(np.mean([r.signed**2 for r in one])) for one in seen)),
    "expected": lambda seen: math.sqrt(sum(map(expected_square, seen))),
}


def row(name: str, fmt: str, steps: int, sets: int, checks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = trained(MODELS[name], steps)
    units = measured(model, fmt, batches(4, 2))
    others = batches(checks, 3)
    draw = random.Random(0)
    exact = losses(model, Policy("fp32"), others)
    ratios: dict[str, list[float]] = {sum_name: [] for sum_name in SUMS}
    for _ in range(sets):
        lowered = {path: draw.random() < 0.5 for path in units}
        if not any(lowered.values()):
            continue
        changed = losses(model, policy_of(lowered, fmt), others)
        actual = math.sqrt(float(np.mean(np.square(np.subtract(changed, exact)))))
        chosen = [seen for path, seen in units.items() if lowered[path]]
        for sum_name, predict in SUMS.items():
            predicted = predict(chosen)
            if actual > 0.0 and predicted > 0.0:
                ratios[sum_name].append(actual / predicted)
    found: dict[str, Any] = {"model": name, "format": fmt, "units": len(units), "loss": float(np.mean(exact))}
    for sum_name, values in ratios.items():
        logs = np.log(values)
        low, middle, high = np.exp(np.percentile(logs, [16, 50, 84]))
        found[sum_name] = {
            "ratio": float(middle),
            "spread": float(math.sqrt(high / low)),
            "sets": len(values),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few sets, nothing written")
    small = parser.parse_args().small
    rows = []
    sizes = (20, 4, 2) if small else (100, 40, 16)
    spawn = multiprocessing.get_context("spawn")
    for name in MODELS:
        for fmt in ("bf16", "fp16"):
            # A process each: one process can tell only so many policies apart.
            with ProcessPoolExecutor(1, spawn) as pool:
                found = pool.submit(row, name, fmt, *sizes).result()
            rows.append(found)
            sums = "  ".join(f"{s} {found[s]['ratio']:.3g} (x/{found[s]['spread']:.2f})" for s in SUMS)
            print(
                f"{name:13} {fmt}  {found['units']} modules  loss {found['loss']:.3f}  actual / {sums}",
                flush=True,
            )
    if not small:
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
