"""A language of words for the experiments: the source text of Python's own standard library, and an LSTM that reads it.

Words are identifiers, numbers, single marks and line ends. The vocabulary is the most frequent of them, and every
other word is word 0. The text is whatever standard library the interpreter has, so losses differ a little between
Pythons.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

_WORD = re.compile(r"[^\W\d]\w*|\d+|\n|[^\w\s]")
_BLOCK = 4096
_HELD_OUT = 20  # one block in so many is never trained on


@dataclass(frozen=True)
class Text:
    """Words as indices (int64), cut into what is trained on and what is held out.

    Blocks of 4,096 words, every twentieth of them held out, so that both hold parts of all modules.
    """

    training: Tensor
    held_out: Tensor


def words(source: str) -> list[str]:
    """The words of a source text, comments and strings included; blanks are dropped.

    >>> words("x_1 = f(10)  # ok")
    ['x_1', '=', 'f', '(', '10', ')', '#', 'ok']
    """
    return _WORD.findall(source)


@functools.cache
def _library() -> tuple[str, ...]:
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += words(path.read_text("utf-8", errors="replace"))
    return tuple(found)


def indices(found: tuple[str, ...], vocabulary: int) -> Tensor:
    """Words as indices: 1 for the most frequent, up to ``vocabulary - 1``; 0 for all others.

    >>> indices(("a", "b", "b", "c"), 2).tolist()
    [0, 1, 1, 0]
    """
    most = Counter(found).most_common(vocabulary - 1)
    index = {word: place for place, (word, _) in enumerate(most, 1)}
    return torch.tensor([index.get(word, 0) for word in found])


def load(vocabulary: int) -> Text:
    """The standard library's modules (about a million words, packages left out) in a vocabulary of this size."""
    found = indices(_library(), vocabulary)
    blocks = found[: len(found) // _BLOCK * _BLOCK].view(-1, _BLOCK)
    held = torch.arange(len(blocks)) % _HELD_OUT == _HELD_OUT // 2
    return Text(blocks[~held].reshape(-1), blocks[held].reshape(-1))


def batch(text: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: inputs [context, size] and, one word later, targets [context * size]."""
    starts = torch.randint(len(text) - context, (size,), generator=generator)
    windows = text[starts + torch.arange(context + 1)[:, None]]
    return windows[:-1], windows[1:].flatten()


class LanguageModel(nn.Module):
    """[T, N] words -> [T * N, vocabulary] logits of the next word.

    As the original's: an LSTM that is projected down before a vocabulary much wider than itself.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden)
        self.projection = nn.Linear(hidden, embedding, bias=False)
        self.head = nn.Linear(embedding, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits; see the class."""
        logits, _ = self.with_activations(inputs)
        return logits

    def with_activations(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits, and by name every activation on the way whose gradient is of interest."""
        embedded = self.embedding(inputs)
        hidden, _ = self.lstm(embedded)
        projected = self.projection(hidden)
        logits: Tensor = self.head(projected.flatten(0, 1))
        return logits, {"embedding": embedded, "lstm": hidden, "projection": projected, "logits": logits}
