"""Transformers: blocks written out, with a causal mask of -inf, and PyTorch's encoder layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.models.trainee import Batch, Make, Place, Trainee, adamw, drawn, one_loss, place


class Attention(nn.Module):
    """Causal attention of one head, written out, with a mask of -inf."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scores = nn.Identity()

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scores(scores.masked_fill(future, float("-inf")))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        weights = torch.softmax(scores, -1)
        return self.out(weights @ v)


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int, middle: Place) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.middle = place(middle)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and an MLP on a residual stream."""

    def __init__(self, width: int, dropout: float, middle: Place) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = MLP(width, middle)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.ln1(x), padding))
        return x + self.dropout(self.mlp(self.ln2(x)))


class Transformer(nn.Module):
    """Two blocks over 17 tokens; `how` is the checkpoint's: None, `reentrant` or `not reentrant`."""

    def __init__(self, middle: Place, tail: Place, dropout: float, how: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList([Block(16, dropout, None), Block(16, dropout, middle)])
        self.norm = nn.LayerNorm(16)
        self.tail = place(tail)
        self.head = nn.Linear(16, 17)
        self.how = how

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.how is None:
                x = block(x, padding)
            else:
                x = checkpoint(block, x, padding, use_reentrant=self.how == "reentrant")
        return self.head(self.tail(self.norm(x)))


def transformer(
    middle: Place = None,
    tail: Place = None,
    dropout: float = 0.0,
    how: str | None = None,
    padded: bool = False,
    optimizer: Make = adamw,
) -> Trainee:
    torch.manual_seed(1)
    model = Transformer(middle, tail, dropout, how)

    def make(g: torch.Generator) -> Batch:
        tokens = torch.randint(17, (4, 9), generator=g)
        padding = torch.zeros(4, 8, dtype=torch.bool)
        padding[:, 6:] = padded
        return tokens, padding if padded else None

    def loss(model: nn.Module, tokens: Tensor, padding: Tensor | None) -> Tensor:
        out = model(tokens[:, :-1]) if padding is None else model(tokens[:, :-1], padding=padding)
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())

    return Trainee({"main": model}, {"main": optimizer(model.parameters())}, drawn(make), one_loss(loss))


class Encoder(nn.Module):
    """PyTorch's own encoder layers, with a mask of padding, and the mean over the tokens as what is classified."""

    def __init__(self, tail: Place, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tail = place(tail)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return self.head(self.tail(x.mean(1)))


def encoder(tail: Place = None, optimizer: Make = adamw, **options: Any) -> Trainee:
    torch.manual_seed(7)
    model = Encoder(tail, **options)

    def make(g: torch.Generator) -> Batch:
        padding = torch.zeros(4, 8, dtype=torch.bool)
        padding[:2, 5:] = True
        return torch.randint(17, (4, 8), generator=g), padding, torch.randint(3, (4,), generator=g)

    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(make),
        one_loss(lambda m, tokens, padding, y: F.cross_entropy(m(tokens, padding), y)),
    )
