"""A transformer language model: FP32 residual stream, 16-bit weights with exact masters, clipping, LinearCrossEntropy.

python examples/transformer.py --precision bf16 --masters split
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo


class Block(nn.Module):
    """Pre-norm attention and MLP; `x + ...` keeps the format of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        # Fused attention stores no [T, T] matrix, and computes its softmax in FP32.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Tokens [N, T] and targets [N, T] -> the mean loss; head and loss are one module."""

    def __init__(self, tokens: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.loss = mezzo.nn.LinearCrossEntropy(width, tokens)  # never stores all logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens) + self.place)
        return self.loss(self.norm(x).flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--precision", default="bf16", help="any policy (default %(default)s)")
parser.add_argument("--masters", default="split", help="auto keeps FP32 weights (default %(default)s)")
parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
arguments = parser.parse_args()

torch.manual_seed(0)
source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text("utf-8")
text = torch.tensor([min(ord(character), 127) for character in source])

model = Model(tokens=128)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
mp = mezzo.MixedPrecision(model, optimizer, arguments.precision, masters=arguments.masters, clip_norm=1.0)
for step in range(arguments.steps):
    starts = torch.randint(0, len(text) - 65, (16, 1))
    windows = text[starts + torch.arange(65)]
    with mp.autocast():
        loss = model(windows[:, :-1], windows[:, 1:])
    result = mp.step(loss)
    if (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {float(result.grad_norm):.3f}")

# FP32, also where the weights are stored in 16 bits: publish these.
weights = mezzo.master_state_dict(model, optimizer)
print(
    f"{mp.policy}: {sum(weight.numel() for weight in weights.values()):,} weights, last loss {loss.item():.3f}"
)
