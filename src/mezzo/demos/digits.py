"""A convolutional network that reads scikit-learn's handwritten digits: 1,797 real images of 8 x 8.

An ordinary FP32 training script. The images are shown at 16 x 16 so that three stages have something to
pool; random shifts stretch a small training set; label smoothing keeps the loss from reaching zero, where a
relative difference of two losses would mean nothing.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Stage(nn.Sequential):
    """Two 3 x 3 convolutions, each with batch normalisation and ReLU, then a 2 x 2 max-pool."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )


class Network(nn.Module):
    """[N, 1, 16, 16] images -> [N, 10] logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(1, width), Stage(width, 2 * width), Stage(2 * width, 4 * width))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(images).mean(dim=(2, 3)))


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [997, 1, 16, 16] and labels [997], then the 800 test ones; standardised."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    images = F.interpolate(images, size=16, mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-800], order[-800:]
    return images[train], labels[train], images[test], labels[test]


def shifted(images: Tensor, pixels: int) -> Tensor:
    """The batch moved by a random whole number of pixels, up to `pixels` each way."""
    down, right = torch.randint(-pixels, pixels + 1, (2,)).tolist()
    return images.roll((down, right), dims=(2, 3))


def main() -> None:
    """Train, print the loss as it goes, and end with the accuracy on images that were never trained on."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=64, help="images a step")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    images, labels, test_images, test_labels = load()
    model = Network(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.05)
    batches = len(labels) // arguments.batch
    steps = arguments.epochs * batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=arguments.lr, total_steps=steps)
    for epoch in range(arguments.epochs):
        model.train()
        total = 0.0
        for chosen in torch.randperm(len(labels))[: batches * arguments.batch].view(batches, -1):
            logits = model(shifted(images[chosen], pixels=1))
            loss = F.cross_entropy(logits, labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / batches:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        right = int((model(test_images).argmax(1) == test_labels).sum())
    print(f"test accuracy: {100 * right / len(test_labels):.2f} %")


if __name__ == "__main__":
    main()
