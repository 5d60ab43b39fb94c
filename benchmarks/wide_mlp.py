"""Two wide hidden layers that learn scikit-learn's handwritten digits: 1,797 real images of 8 x 8, as 64 numbers each.

An ordinary FP32 training script. Nearly all of its work is in two linear layers, which every block format quantizes.
Label smoothing keeps the loss from zero, where a relative difference of two losses would mean nothing.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images [N, 64] and labels [N]."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-800], order[-800:]
    return images[train], labels[train], images[test], labels[test]


def main() -> None:
    """Train, print the loss as it goes, and end with the loss and accuracy on images that were never trained on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=64, help="images a step")
    parser.add_argument("--width", type=int, default=1024, help="units of each hidden layer")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    images, labels, test_images, test_labels = load()
    width = arguments.width
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.05)
    batches = len(labels) // arguments.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=arguments.lr, total_steps=arguments.epochs * batches
    )
    for epoch in range(arguments.epochs):
        total = 0.0
        for chosen in torch.randperm(len(labels))[: batches * arguments.batch].view(batches, -1):
            noisy = images[chosen] + 0.5 * torch.randn(arguments.batch, 64)
            loss = F.cross_entropy(model(noisy), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / batches:.4f}", flush=True)

    with torch.no_grad():
        logits = model(test_images)
    print(f"test accuracy: {100 * float((logits.argmax(1) == test_labels).float().mean()):.2f} %")
    print(f"test loss: {F.cross_entropy(logits, test_labels, label_smoothing=0.1):.4f}")


if __name__ == "__main__":
    main()
