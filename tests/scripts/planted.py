"""An ordinary script with a planted fragile layer: a small difference of large numbers (`offset`), or a square whose
values pass fp16's largest number (`square`).
"""

import sys

import torch
from torch import nn

KIND = sys.argv[1] if len(sys.argv) > 1 else "offset"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 30
WIDTH = int(sys.argv[3]) if len(sys.argv) > 3 else 64


class Offset(nn.Module):
    """Adds a large number and takes it away again: exact in FP32 to 2^-12, in bf16 to 16."""

    def forward(self, x):
        return (x + 4096.0) - 4096.0


class Square(nn.Module):
    """A norm that squares before it scales."""

    def forward(self, x):
        large = 300.0 * x
        return (large * large).mean(-1, keepdim=True).sqrt() / 300.0 * x


class Block(nn.Module):
    """A residual branch."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Model(nn.Module):
    """Two blocks and what is planted between them."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(32, width)
        self.before = Block(width)
        self.planted = {"offset": Offset, "square": Square, "none": nn.Identity}[KIND]()
        self.after = Block(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.after(self.planted(self.before(self.first(x)))))


torch.manual_seed(0)
model = Model(WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
teacher = torch.randn(32, 10)
for _ in range(STEPS):
    x = torch.randn(128, 32)
    loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss: {loss.item():.4f}")
