"""Count the bytes of whole training steps: weights, masters, gradients and state, and the peak with activations.

python benchmarks/training_bytes.py                 # prints JSON; optimizers.py writes it into its results

Each way trains the GPT of `models.py`. Gradients are counted whenever one arrives, so the largest number alive at once
is known even if they are freed during backward. `other` is every live tensor that is not a weight, gradient, state,
data or buffer: for example, the sums of gradient accumulation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from live import alive, bytes_of, storages, tensors_in


@dataclass(frozen=True)
class Way:
    """A way to train: arguments of `mezzo.MixedPrecision`, and of Mezzo's AdamW (None: torch's fused one)."""

    mixed: dict[str, Any]
    optimizer: dict[str, Any] | None
    accumulate: int = 1

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, before MixedPrecision sees it."""
        if self.optimizer is None:
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        from mezzo import optim

        made: torch.optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-4, **self.optimizer)
        return made


SPLIT: dict[str, Any] = {"masters": "split"}
LEAN: dict[str, Any] = {"masters": "split8", "state": "int8"}
WAYS: dict[str, Way] = {
    "torch AdamW, FP32 weights": Way({}, None),
    "torch AdamW, FP32 weights, accumulate=4": Way({}, None, 4),
    "exact: split": Way({"masters": "split"}, SPLIT),
    "exact: split, accumulate=4": Way({"masters": "split"}, SPLIT, 4),
    "lean: split8/int8": Way({"masters": "split8"}, LEAN),
    "lean: split8/int8, accumulate=4": Way({"masters": "split8"}, LEAN, 4),
    "lean: split8/int8, gradient release": Way({"masters": "split8", "release_gradients": True}, LEAN),
}


class Gradients:
    """The most bytes of gradients alive at once, seen from a hook on every parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._params = list(model.parameters())
        for param in self._params:
            param.register_post_accumulate_grad_hook(self.look)

    def look(self, _: object = None) -> None:
        """Count now."""
        alive = [param.grad for param in self._params if param.grad is not None]
        self.most = max(self.most, bytes_of(alive))


def measure(way: Way, device: str) -> dict[str, Any]:
    """Bytes of one way, in total and per parameter."""
    import mezzo
    from mezzo.pytorch.memory import PeakTensorBytes
    from models import WORKLOADS

    work = WORKLOADS["gpt"]().to(device)
    gradients = Gradients(work.model)
    mp = mezzo.MixedPrecision(
        work.model, way.optimizer_of(work.model), precision="bf16", accumulate=way.accumulate, **way.mixed
    )

    def turn() -> float:
        with mp.autocast():
            loss = work.loss()
        return mp.step(loss).loss or 0.0

    for _ in range(way.accumulate):
        turn()
    gradients.most = 0
    watch = PeakTensorBytes(device)
    watch.start()
    for _ in range(way.accumulate):
        loss = turn()
    peak = watch.stop().peak_bytes
    for _ in range(way.accumulate - 1):  # into a window: what it carries from loss to loss is alive
        turn()
    params = list(work.model.parameters())
    weights, state = [param.data for param in params], list(mp.optimizer.state.values())
    grads = [param.grad for param in params if param.grad is not None]
    named = storages(
        tensors_in([weights, state, grads, work.inputs, work.targets, list(work.model.buffers())])
    )
    held = {
        "weights": bytes_of(weights),
        "gradients": gradients.most,
        "state": bytes_of(state),
        "other": sum(count for storage, count in alive().items() if storage not in named),
    }
    numel = sum(param.numel() for param in params)
    largest = max(param.numel() * param.element_size() for param in params)
    return {
        "parameters": numel,
        "bytes": held,
        "bytes_per_parameter": {
            **{key: round(count / numel, 4) for key, count in held.items()},
            "total": round(sum(held.values()) / numel, 4),
            "largest_gradient": round(largest / numel, 4),
        },
        "peak_bytes": peak,
        "loss_after_2_steps": loss,
    }


def measure_in_a_process(device: str, console: Console) -> dict[str, Any]:
    """Every way in a separate process, so that none counts what another left in memory or compiled."""
    found: dict[str, Any] = {}
    for name in WAYS:
        console.print(f"bytes of training: {name}")
        command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--way", name]
        done = subprocess.run(command, capture_output=True, text=True)
        found[name] = (
            {"raised": (done.stderr.strip().splitlines() or ["no message"])[-1]}
            if done.returncode
            else json.loads(done.stdout.strip().splitlines()[-1])
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--way",
        choices=tuple(WAYS),
        help="measure this one, in this process (default: all, in separate processes)",
    )
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(WAYS[arguments.way], arguments.device)))
    else:
        print(json.dumps(measure_in_a_process(arguments.device, Console(stderr=True)), indent=1))


if __name__ == "__main__":
    main()
