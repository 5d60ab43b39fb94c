"""Gradient accumulation and clipping: FP32 sums, a clip after unscaling, and a short last window.

python examples/accumulation_and_clipping.py --precision fp16
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--precision", default="fp16", help="any policy (default %(default)s)")
parser.add_argument("--steps", type=int, default=60, help="batches, four per update (default %(default)s)")
arguments = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
truth = torch.randn(32, 8)

# Each loss is divided by 4, and the sum of a window is FP32. The gradients are unscaled before clip_norm clips them.
mp = mezzo.MixedPrecision(model, optimizer, arguments.precision, accumulate=4, clip_norm=0.5)
updates = 0
for batch in range(arguments.steps + 2):  # two more than the full windows
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
result = mp.flush()  # the last window has two losses; the update follows their mean
updates += bool(result.stepped)
print(f"{mp.policy}: {updates} updates from {arguments.steps + 2} batches, last loss {loss.item():.3f}")
