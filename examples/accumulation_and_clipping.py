"""Batches larger than memory: accumulated in FP32, clipped after unscaling, a short last window that is not shrunken.

python examples/accumulation_and_clipping.py --precision fp16
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--precision", default="fp16", help="any policy (default %(default)s)")
parser.add_argument("--steps", type=int, default=60, help="batches, four to an update (default %(default)s)")
arguments = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
truth = torch.randn(32, 8)

# Each loss is divided by 4, each window's sum is FP32 and unscaled with the scale that it was made with, and clip_norm
# is a norm of true gradients: the order is MixedPrecision's, so it can't be got wrong.
mp = mezzo.MixedPrecision(model, optimizer, arguments.precision, accumulate=4, clip_norm=0.5)
updates = 0
for batch in range(arguments.steps + 2):  # two more than windows hold
    x = torch.randn(16, 32)
    with mp.autocast():
        loss = F.mse_loss(model(x), x @ truth)
    result = mp.step(loss)
    if result.stepped:
        updates += 1
        if updates % 5 == 0:
            print(
                f"update {updates}: loss {loss.item():.3f}, gradient norm before clipping {float(result.grad_norm):.3f}"
            )
    elif result.skipped:
        print(f"batch {batch + 1}: {result.reason}")
result = mp.flush()  # the last window, of two: its mean is taken over two
updates += bool(result.stepped)
print(f"{mp.policy}: {updates} updates from {arguments.steps + 2} batches, last loss {loss.item():.3f}")
