"""Batches, and a model, that faults are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from faults import plants
from faults.models import Batch, Trainee, cnn


def padded_row(old: Batch) -> Batch:
    tokens, _ = old
    padding = torch.zeros(len(tokens), 8, dtype=torch.bool)
    padding[1] = True
    return tokens, padding


def poisoned_offset(old: Batch) -> Batch:
    x, y = old
    offset = torch.zeros_like(x)
    offset[0, 0] = float("nan")
    return x, y, offset


def all_padding(old: Batch) -> Batch:
    tokens, padding, y = old
    return tokens, torch.ones_like(padding), y


def masked(tail: Callable[[], nn.Module]) -> Trainee:
    """A CNN that forbids its last class with -inf, and is never given it as a label."""
    trainee = cnn(tail=tail, end=plants.MasksLogits)
    trainee.loss = lambda m, x, y: F.cross_entropy(m(x), y.clamp(max=2))
    return trainee


def gain(trainee: Trainee) -> None:
    trainee.model.rnn.gain = 1e3


def certain_of_it(trainee: Trainee) -> None:
    trainee.model.sure = 1e6
