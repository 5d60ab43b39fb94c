"""Show how a 16-bit softmax affects the loss after it, and why the op table keeps softmax in FP32 even for bf16.

A two-layer classifier with a tenth of its labels wrong trains for 400 steps; its softmax is in bf16, or in FP32 on
the same bf16 logits. Prints the accuracy and the largest gradient norm for each loss and seed.

    python benchmarks/softmax_ends.py [--seeds 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS, ROWS, FEATURES, BATCH = 400, 2048, 32, 128

LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "log, nll_loss": lambda p, labels, _: F.nll_loss(torch.log(p), labels),
    "binary_cross_entropy": lambda p, labels, classes: F.binary_cross_entropy(
        p, F.one_hot(labels, classes).float()
    ),
}


def train(classes: int, loss: str, how: str, seed: int) -> tuple[float, float]:
    """The final accuracy, and the largest norm of a gradient."""
    torch.manual_seed(seed)
    inputs = torch.randn(ROWS, FEATURES)
    labels = (torch.relu(inputs @ torch.randn(FEATURES, 64)) @ torch.randn(64, classes)).argmax(1)
    labels = torch.where(torch.rand(ROWS) < 0.1, torch.randint(0, classes, (ROWS,)), labels)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, classes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    largest = 0.0
    for _ in range(STEPS):
        rows = torch.randint(0, ROWS, (BATCH,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs[rows])
        dtype = torch.float32 if how == "fp32" else torch.bfloat16
        probability = torch.softmax(logits, -1, dtype=dtype).float()
        optimizer.zero_grad()
        LOSSES[loss](probability, labels[rows], classes).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        largest = max(largest, norm.item())
        optimizer.step()
    return (model(inputs).argmax(1) == labels).float().mean().item(), largest


def main() -> None:
    """Run every loss, number of classes and seed; print the results, and write JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for classes in (2, 10):
        for loss in LOSSES:
            for how in ("fp32", "bf16"):
                found = [train(classes, loss, how, seed) for seed in range(options.seeds)]
                right, norms = zip(*found, strict=True)
                rows.append(
                    {"classes": classes, "loss": loss, "softmax": how, "right": right, "largest_norm": norms}
                )
                shares = " ".join(f"{share:.3f}" for share in right)
                print(
                    f"{classes:>2} classes  {loss:<21} softmax {how}: {shares}  largest norm {max(norms):.1e}"
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
