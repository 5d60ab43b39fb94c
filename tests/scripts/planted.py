"""An ordinary script with a planted fragile layer: a small difference of large numbers."""

import torch
from torch import nn


class Offset(nn.Module):
    """Adds a large number and takes it away again: exact in FP32 to 2^-12, in bf16 to 16."""

    def forward(self, x):
        return (x + 4096.0) - 4096.0


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
        self.planted = Offset()
        self.after = Block(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.after(self.planted(self.before(self.first(x)))))


torch.manual_seed(0)
model = Model(64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
teacher = torch.randn(32, 10)
for _ in range(30):
    x = torch.randn(128, 32)
    loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss: {loss.item():.4f}")
