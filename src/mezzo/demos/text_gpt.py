"""A character-level transformer that learns to write Python from the text of Python's own standard library.

An ordinary FP32 training script: pre-norm blocks, causal attention, a GELU MLP, tied embeddings, AdamW with warm-up and
cosine decay. The text is whatever standard library the interpreter has, so losses differ a little between Pythons.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Tab, newline and the printable ASCII characters; anything else becomes "?".
ALPHABET = "\t\n" + "".join(map(chr, range(32, 127)))


class Block(nn.Module):
    """One pre-norm transformer block over [N, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """[N, T] character indices -> [N, T, alphabet] logits of the next one."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load(characters: int) -> Tensor:
    """The first `characters` characters of the standard library's modules, as indices."""
    index = {character: position for position, character in enumerate(ALPHABET)}
    unknown = index["?"]
    parts: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts += [index.get(character, unknown) for character in path.read_text("utf-8", errors="replace")]
        if len(parts) >= characters:
            break
    return torch.tensor(parts[:characters])


def batch(
    text: Tensor, size: int, context: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Random windows of the text: inputs [N, T] and, one character later, targets [N, T]."""
    starts = torch.randint(len(text) - context - 1, (size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train, print the loss as it goes, and end with the loss on text that was never trained on."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--context", type=int, default=128, help="characters a window")
    parser.add_argument("--width", type=int, default=256, help="channels of the residual stream")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--characters", type=int, default=2_000_000, help="length of the text")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and windows")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    text = load(arguments.characters)
    cut = int(0.95 * len(text))
    training, held_out = text[:cut], text[cut:]
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1, betas=(0.9, 0.95))
    warm, end = max(1, arguments.steps // 10), max(1, arguments.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / end)))
    )
    for step in range(arguments.steps):
        inputs, targets = batch(training, arguments.batch, arguments.context)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0 or step + 1 == arguments.steps:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1234)
        losses = []
        for _ in range(8):
            inputs, targets = batch(held_out, 32, arguments.context, generator)
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item())
    print(f"validation loss: {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
