"""A GAN: two models, two optimizers, two loss scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.models.trainee import Batch, Make, Place, Trainee, adamw, drawn, place


class Player(nn.Module):
    """Generator or critic: two layers."""

    def __init__(self, wide: int, out: int, middle: Place) -> None:
        super().__init__()
        self.first = nn.Linear(wide, 12)
        self.middle = place(middle)
        self.last = nn.Linear(12, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(F.leaky_relu(self.first(x), 0.2)))


def gan(
    generator_middle: Place = None,
    critic_middle: Place = None,
    penalty: bool = False,
    optimizer: Make = adamw,
) -> Trainee:
    """The critic's step, then the generator's: two optimizers and two loss scales. `penalty`: on the critic's slope."""
    torch.manual_seed(3)
    generator, critic = Player(4, 5, generator_middle), Player(5, 1, critic_middle)

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        real, noise = batch

        def of_critic() -> Tensor:
            fake = generator(noise).detach()
            told, missed = critic(real).float(), critic(fake).float()
            loss = F.softplus(-told).mean() + F.softplus(missed).mean()
            if penalty:
                between = (real + fake.float()).div(2).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                loss = loss + (slope.float().square().sum(1).sqrt() - 1).square().mean()
            return loss

        def of_generator() -> Tensor:
            return F.softplus(-critic(generator(noise)).float()).mean()

        yield "critic", of_critic
        yield "generator", of_generator

    return Trainee(
        {"generator": generator, "critic": critic},
        {"generator": optimizer(generator.parameters()), "critic": optimizer(critic.parameters())},
        drawn(lambda g: (torch.randn(6, 5, generator=g), torch.randn(6, 4, generator=g))),
        losses,
    )
