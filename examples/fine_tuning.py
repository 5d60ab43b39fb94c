"""Fine-tuning: a frozen layer, masters for small updates, 8-bit optimizer states, FP32 weights to publish.

python examples/fine_tuning.py --precision bf16,masters=split8,state=int8
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import mezzo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--precision", default="bf16,masters=split", help="any policy (default %(default)s)")
parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
arguments = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU())


def train(model: nn.Module, chosen: torch.Tensor, lr: float, precision: str) -> mezzo.MixedPrecision:
    """Train the parameters that are not frozen on some of the images; the caller closes the result."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    mp = mezzo.MixedPrecision(model, optimizer, precision, clip_norm=1.0)
    for _ in range(arguments.steps):
        batch = chosen[torch.randint(0, len(chosen), (64,))]
        with mp.autocast():
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        mp.step(loss)
    print(
        f"{mp.policy}, {sum(p.numel() for p in model.parameters() if p.requires_grad):,} weights: {loss.item():.4f}"
    )
    return mp


# The pretrained model: it knows the digits 0 to 4.
known = nn.Sequential(body, nn.Linear(256, 10))
train(known, (labels[:1500] < 5).nonzero().flatten(), 1e-3, "fp32").close()

# The new task: 5 to 9. The first layer is frozen, the head is new.
model = nn.Sequential(body, nn.Linear(256, 10))
body[0].requires_grad_(False)
# Updates in fine-tuning are smaller than the last digit of a 16-bit weight. Masters keep them.
mp = train(model, (labels[:1500] >= 5).nonzero().flatten(), 2e-4, arguments.precision)

weights = mezzo.master_state_dict(model, mp.optimizer)  # FP32, not rounded: save these
mp.close()
print(
    {str(weight.dtype) for weight in weights.values()},
    "to save; the model has",
    {str(p.dtype) for p in model.parameters()},
)
