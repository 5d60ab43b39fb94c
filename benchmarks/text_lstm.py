"""A character-level LSTM that learns to write Python from the text of Python's own standard library.

An ordinary FP32 training script, as language models were trained before transformers: the text is cut into
parallel streams that are read from left to right, the hidden state is carried from one window to the next and
detached there (truncated backpropagation through time), gradients are clipped. The text is whatever standard
library the interpreter has, so losses differ a little between Pythons.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Tab, newline and the printable ASCII characters; anything else becomes "?".
ALPHABET = "\t\n" + "".join(map(chr, range(32, 127)))

State = tuple[Tensor, Tensor]  # hidden and cell state, each [layers, N, C]


class CharacterLSTM(nn.Module):
    """[T, N] character indices and the state before them -> [T, N, alphabet] logits of the next ones, new state."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, state = self.lstm(self.token(tokens), state)
        return self.head(self.dropout(x)), state


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


def windows(text: Tensor, streams: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The text as `streams` parallel ones, a window at a time: inputs [T, N] and, one character later, targets."""
    length = (len(text) - 1) // streams
    inputs = text[: length * streams].view(streams, length).t()
    targets = text[1 : length * streams + 1].view(streams, length).t()
    for start in range(0, length - context + 1, context):
        yield inputs[start : start + context], targets[start : start + context]


def detached(state: State) -> State:
    """The same state, where backward stops."""
    return state[0].detach(), state[1].detach()


def main() -> None:
    """Train, print the loss as it goes, and end with the loss on text that was never trained on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--batch", type=int, default=32, help="streams of text")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--width", type=int, default=256, help="channels of every layer")
    parser.add_argument("--layers", type=int, default=2, help="LSTM layers")
    parser.add_argument("--dropout", type=float, default=0.1, help="share of channels dropped")
    parser.add_argument("--lr", type=float, default=8e-3, help="peak learning rate")
    parser.add_argument("--characters", type=int, default=2_000_000, help="length of the text")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and dropout")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    text = load(arguments.characters)
    cut = int(0.95 * len(text))
    training, held_out = text[:cut], text[cut:]
    model = CharacterLSTM(arguments.width, arguments.layers, arguments.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01, betas=(0.9, 0.99))
    warm = max(1, arguments.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(1, arguments.steps)))
        ),
    )
    state: State | None = None
    stream = windows(training, arguments.batch, arguments.context)
    for step in range(arguments.steps):
        window = next(stream, None)
        if window is None:  # the end of the text: start again, without the state
            state, stream = None, windows(training, arguments.batch, arguments.context)
            window = next(stream)
        inputs, targets = window
        logits, state = model(inputs, state)
        state = detached(state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0 or step + 1 == arguments.steps:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        losses, state = [], None
        for inputs, targets in windows(held_out, 64, arguments.context):
            logits, state = model(inputs, state)
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    print(f"validation loss: {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
