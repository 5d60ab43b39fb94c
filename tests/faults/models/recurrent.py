"""Recurrent nets: PyTorch's layers, a loop by hand, and a state that goes from batch to batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.models.trainee import Make, Place, Trainee, adamw, drawn, one_loss, place


class Recurrent(nn.Module):
    """A projection, a recurrent layer, a head: predicts a number a sequence."""

    def __init__(self, kind: Callable[..., nn.Module], front: Place, tail: Place) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.front = place(front)
        self.rnn = kind(8, 8, batch_first=True)
        self.tail = place(tail)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.front(self.inner(x)))
        return self.head(self.tail(out[:, -1]))


class OwnCell(nn.Module):
    """A recurrent layer as people write their own: a loop over time with a ReLU."""

    def __init__(self, features: int, width: int, batch_first: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.again = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state = torch.zeros(x.shape[0], self.again.in_features)
        states = []
        for moment in range(x.shape[1]):
            state = torch.relu(self.enter(x[:, moment]) + self.again(state))
            states.append(state)
        return torch.stack(states, 1), None


class Carried(nn.Module):
    """A layer whose state goes from batch to batch, kept where people keep it: in an attribute, or in a buffer."""

    state: Tensor

    def __init__(self, features: int, width: int, batch_first: bool = True, buffer: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.again = nn.Linear(width, width, bias=False)
        self.gain = 1.0
        if buffer:
            self.register_buffer("state", torch.zeros(1, width))
        else:
            self.state = torch.zeros(1, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state = self.state
        for moment in range(x.shape[1]):
            state = torch.relu(self.enter(x[:, moment]) + self.again(state * self.gain))
        with torch.no_grad():
            if "state" in self._buffers:
                self.state.copy_(state.mean(0, keepdim=True))
            else:
                self.state = state.mean(0, keepdim=True).float()
        return state[:, None], None


def recurrent(
    kind: Callable[..., nn.Module] = nn.LSTM,
    front: Place = None,
    tail: Place = None,
    optimizer: Make = adamw,
) -> Trainee:
    torch.manual_seed(2)
    model = Recurrent(kind, front, tail)
    draw = drawn(lambda g: (torch.randn(4, 6, 3, generator=g), torch.randn(4, 1, generator=g)))
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        draw,
        one_loss(lambda m, x, y: F.mse_loss(m(x).float(), y)),
    )
