"""Count how often each loss scale overflows fp16, and how much of fp16's range it leaves unused, on real gradients.

Two small models are trained in FP32 on a CPU, and the largest gradient of outputs and parameters is recorded in every
step. Then each loss scale runs over these numbers: a step overflows if the scale times the largest gradient is 65520
or more. A constant scale is calibrated on the first 20 steps, as `mezzo calibrate` does.

What this leaves out: a skipped step would change the training that follows.

    python benchmarks/loss_scales.py            # a few minutes; writes benchmarks/results/loss_scales.json
    python benchmarks/loss_scales.py --steps 50 --out /tmp/small.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, Observation, StaticLossScale
from mezzo.pytorch.hardware import describe

OUT = Path(__file__).parent / "results" / "loss_scales.json"
OVERFLOWS_AT = 65520.0


class Classifier(nn.Module):
    """A convolutional network with BatchNorm on noisy stripes; its loss is a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def stripes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    label = torch.randint(0, 4, (64,), generator=generator)
    ramp = torch.arange(8.0)
    x, y = ramp.view(1, 8), ramp.view(8, 1)
    waves = torch.stack([(x + 0 * y), (y + 0 * x), (x + y), (x - y)])[label]
    noise = torch.randn(64, 8, 8, generator=generator)
    return ((waves * 1.5).sin() + noise).unsqueeze(1), label


class Reader(nn.Module):
    """A transformer block that continues counted sequences; its loss is a sum over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.head(self.block(self.embed(x), src_mask=mask, is_causal=True))
        return out


def counted(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, 32, (32, 1), generator=generator)
    stride = torch.randint(1, 5, (32, 1), generator=generator)
    whole = (start + stride * torch.arange(17)) % 32
    return whole[:, :-1], whole[:, 1:]


def mean_loss(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, target)


def sum_loss(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum") / len(out)


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Tensor]]] = {
    "CNN, mean over the batch": (Classifier, stripes, mean_loss),
    "transformer, sum over the sequence": (Reader, counted, sum_loss),
}


def largest_gradients(
    make: Callable[[], nn.Module], data: Callable[..., Any], loss_of: Callable[..., Tensor], steps: int
) -> list[float]:
    """The largest gradient of every step of a training in FP32."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    of_outputs: list[Tensor] = []

    def watch(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for one in output if isinstance(output, tuple) else (output,):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(lambda gradient: of_outputs.append(gradient.abs().max()))

    for module in model.modules():
        module.register_forward_hook(watch)
    found = []
    for _ in range(steps):
        of_outputs.clear()
        x, target = data(generator)
        loss = loss_of(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        of_weights = [param.grad.abs().max() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        found.append(float(torch.stack([*of_outputs, *of_weights]).max()))
    return found


def walked(machine: LossScale, largest: Sequence[float]) -> dict[str, Any]:
    """What a loss scale makes of a training's largest gradients."""
    skips, room = 0, []
    for index, value in enumerate(largest):
        bad = machine.scale * value >= OVERFLOWS_AT
        skips += bad
        if not bad:
            room.append(math.log2(OVERFLOWS_AT / (machine.scale * value)))
        try:
            machine = machine.next(Observation(bad))
        except LossScaleCollapseError:
            return {"collapsed_at": index, "skipped": skips, "steps": len(largest)}
    return {
        "skipped": skips,
        "steps": len(largest),
        "unused_bits_mean": sum(room) / len(room),
        "final_scale": machine.scale,
    }


def machines(largest: Sequence[float]) -> dict[str, LossScale]:
    """The loss scales, the constant calibrated on the first steps."""
    return {
        "constant": StaticLossScale.from_largest(max(largest[:20]), "fp16", 1),
        "dynamic": DynamicLossScale(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, walk, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6000, help="steps per training (default 6000)")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"machine": describe(), "steps": arguments.steps, "trainings": {}}
    for name, (make, data, loss_of) in TRAININGS.items():
        largest = largest_gradients(make, data, loss_of, arguments.steps)
        logs = [math.log2(value) for value in largest]
        print(f"{name}: largest gradient 2^{min(logs):.1f} to 2^{max(logs):.1f}")
        rows = {kind: walked(machine, largest) for kind, machine in machines(largest).items()}
        for kind, row in rows.items():
            end = (
                f"stopped with an error at step {row['collapsed_at']}"
                if "collapsed_at" in row
                else f"{row['unused_bits_mean']:.1f} bits of fp16's range unused on average"
            )
            print(f"  {kind:<12} {row['skipped']} of {row['steps']} skipped, {end}")
        result["trainings"][name] = {"largest_log2": [min(logs), max(logs)], "scales": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
