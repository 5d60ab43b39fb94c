"""A small multibox detector, without normalization as SSD's VGG: its network, its images and its loss.

Images of 32 by 32 pixels with one square, disk or cross in noise; two feature maps with six anchors per cell, 1,920 in
all. After Liu et al. 2016 (arXiv 1512.02325), sections 2.1 and 2.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Stride of a feature map, and the half sides of the six anchors at each of its cells, in pixels.
_MAPS = ((2, (2.5, 3.0, 3.5, 4.0, 4.25, 4.5)), (4, (4.0, 4.5, 5.0, 5.5, 6.0, 6.5)))
_SIDE = 32
_KINDS = 3
_OUTPUTS = _KINDS + 1 + 3  # background and kinds; x, y and size
_OVERLAP = 0.6
_NEGATIVES = 3


class Detector(nn.Module):
    """[N, 1, 32, 32] images -> [N, anchors, 7] outputs, and each convolution's output.

    Without normalization between the layers, as in SSD, so that gradients shrink on their way down.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        shapes = ((1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1))
        self.layers = nn.ModuleList(
            nn.Conv2d(1 if place == 0 else i * width, o * width, 3, stride, padding=1)
            for place, (i, o, stride) in enumerate(shapes)
        )
        self.fine = nn.Conv2d(2 * width, 6 * _OUTPUTS, 3, padding=1)
        self.coarse = nn.Conv2d(4 * width, 6 * _OUTPUTS, 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, seen = images, []
        for number, layer in enumerate(self.layers, 1):
            seen.append(layer(x))
            x = F.relu(seen[-1])
            if number == 3:
                fine = self.fine(x)
        maps = [fine, self.coarse(x)]
        rows = [one.permute(0, 2, 3, 1).reshape(len(one), -1, _OUTPUTS) for one in maps]
        return torch.cat(rows, 1), [*seen, *maps]


def anchors() -> Tensor:
    """Center and half side of each anchor, [anchors, 3], as shares of the image."""
    rows = []
    for stride, sizes in _MAPS:
        centre = (torch.arange(_SIDE // stride) + 0.5) * stride
        y, x = torch.meshgrid(centre, centre, indexing="ij")
        boxes = [torch.stack([x, y, torch.full_like(x, size)], -1) for size in sizes]
        rows.append(torch.stack(boxes, 2).reshape(-1, 3))
    return torch.cat(rows) / _SIDE


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images of one object each: images, boxes [N, 3] as `anchors`, kinds [N] from 1 (square, disk, cross)."""

    def draw_from(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    x, y, size = draw_from(6, _SIDE - 6), draw_from(6, _SIDE - 6), draw_from(3, 6)
    kinds = torch.randint(_KINDS, (count,), generator=generator)
    pixel = torch.arange(_SIDE) + 0.5
    across, down = (pixel - x).abs() / size, (pixel[:, None] - y).abs() / size
    square = (across < 1) & (down < 1)
    shapes = torch.stack([square, across**2 + down**2 < 1, square & ((across < 0.35) | (down < 0.35))], 1)
    images = shapes[torch.arange(count), kinds] * draw_from(0.5, 1.5)
    images = images + 0.3 * torch.randn(images.shape, generator=generator)
    return images[:, None], torch.cat([x, y, size], 1)[..., 0] / _SIDE, kinds + 1


def loss_of(outputs: Tensor, boxes: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """SSD's loss: cross entropy of positives and hardest negatives, smooth L1 of the positives' boxes.

    Returns:
        The sum over the batch divided by the number of all anchors; and divided by that of the positives, detached,
        which is what a reader is shown.
    """
    places = anchors()
    overlaps = _overlap(places, boxes)
    positive = overlaps > _OVERLAP
    positive[torch.arange(len(boxes)), overlaps.argmax(1)] = True
    labels = torch.where(positive, kinds[:, None], 0)
    logits = outputs[..., : _KINDS + 1].flatten(0, 1)
    entropy = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    rank = entropy.detach().masked_fill(positive, -1.0).argsort(1, descending=True).argsort(1)
    counts = positive | (rank < _NEGATIVES * positive.sum(1, keepdim=True))
    offsets = (boxes[:, None, :2] - places[:, :2]) / places[:, 2:]
    wanted = torch.cat([offsets, (boxes[:, None, 2:] / places[:, 2:]).log()], -1)
    box = F.smooth_l1_loss(outputs[..., _KINDS + 1 :], wanted, reduction="none").sum(-1)
    total = (entropy * counts).sum() + (box * positive).sum()
    return total / positive.numel(), total.detach() / positive.sum()


def _overlap(places: Tensor, boxes: Tensor) -> Tensor:
    """Intersection over union of each box with each anchor, [N, anchors]."""
    low = torch.maximum(places[:, :2] - places[:, 2:], boxes[:, None, :2] - boxes[:, None, 2:])
    high = torch.minimum(places[:, :2] + places[:, 2:], boxes[:, None, :2] + boxes[:, None, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    return both / (4 * places[:, 2] ** 2 + 4 * boxes[:, None, 2] ** 2 - both)
