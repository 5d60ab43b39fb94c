"""Convolutional nets: a classifier with BatchNorm, and an autoencoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.models.trainee import Make, Place, Trainee, adamw, drawn, one_loss, place, sgd


class CNN(nn.Module):
    """Two convolutions, one BatchNorm, one head: 1 x 8 x 8 pictures of 4 classes."""

    def __init__(self, front: Place, middle: Place, tail: Place, end: Place) -> None:
        super().__init__()
        self.front = place(front)
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.middle = place(middle)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.tail = place(tail)
        self.head = nn.Linear(8, 4)
        self.end = place(end)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(self.front(x))))
        x = torch.relu(self.conv2(self.middle(x)))
        x = self.tail(x.mean((2, 3)))
        return self.end(self.head(x))


def cnn(
    front: Place = None,
    middle: Place = None,
    tail: Place = None,
    end: Place = None,
    optimizer: Make = sgd,
) -> Trainee:
    torch.manual_seed(0)
    model = CNN(front, middle, tail, end)
    draw = drawn(lambda g: (torch.randn(6, 1, 8, 8, generator=g), torch.randint(4, (6,), generator=g)))
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        draw,
        one_loss(lambda m, x, y: F.cross_entropy(m(x), y)),
    )


class Autoencoder(nn.Module):
    """Down and up again: a convolution, two numbers a picture as mean and spread, a transposed convolution."""

    def __init__(self, middle: Place) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 4, stride=4)
        self.middle = place(middle)
        self.up = nn.ConvTranspose2d(4, 1, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.middle(torch.tanh(self.down(x))))


def autoencoder(middle: Place = None, optimizer: Make = adamw) -> Trainee:
    torch.manual_seed(6)
    model = Autoencoder(middle)
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(6, 1, 8, 8, generator=g),)),
        one_loss(lambda m, x: F.mse_loss(m(x).float(), x)),
    )
