"""A GAN: two networks, each with its own policy and loss scale.

python examples/gan.py --generator fp16 --discriminator fp16
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo


def network(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def ring(count: int) -> Tensor:
    """Points [count, 2] in eight clusters on a circle."""
    angle = torch.randint(0, 8, (count,)) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--generator", default="fp16", help="the generator's policy (default %(default)s)")
parser.add_argument(
    "--discriminator", default="fp16", help="the discriminator's policy (default %(default)s)"
)
parser.add_argument("--steps", type=int, default=500, help="default %(default)s")
arguments = parser.parse_args()

torch.manual_seed(0)
generator, discriminator = network(8, 2), network(2, 1)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True)
# The two losses overflow at different scales. With a shared scale, one network's overflow skips the other's step too.
making = mezzo.MixedPrecision(generator, of_generator, arguments.generator)
judging = mezzo.MixedPrecision(discriminator, of_discriminator, arguments.discriminator)

for step in range(arguments.steps):
    with making.autocast():
        made = generator(torch.randn(128, 8)).float()  # FP32 between two policies
    with judging.autocast():
        # Logits, not probabilities: a 16-bit sigmoid rounds to exactly 1.
        on_real, on_made = discriminator(ring(128)), discriminator(made.detach())
        loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        loss = loss + F.binary_cross_entropy_with_logits(on_made, torch.zeros_like(on_made))
    judging.step(loss)

    with judging.autocast():
        verdict = discriminator(made)
        fooled = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
    making.step(fooled)  # computes gradients of the generator's parameters only

    if (step + 1) % 100 == 0:
        scales = f"{making.loss_scale:g} and {judging.loss_scale:g}"
        print(
            f"step {step + 1}: discriminator {loss.item():.3f}, generator {fooled.item():.3f}, loss scales {scales}"
        )

with torch.no_grad(), making.autocast():
    points = generator(torch.randn(1000, 8)).float()
centres = torch.tensor([[math.cos(i * math.pi / 4), math.sin(i * math.pi / 4)] for i in range(8)])
distance, nearest = torch.cdist(points, centres).min(1)
close = distance < 0.2
print(f"{len(nearest[close].unique())} of 8 clusters reached, {close.float().mean():.0%} of points in one")
