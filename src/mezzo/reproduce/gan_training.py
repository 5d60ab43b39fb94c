"""A small GAN on scikit-learn's handwritten digits (8 x 8), and what its images are worth; one run of it.

The networks are DCGAN's in small (Radford et al. 2015, arXiv 1511.06434): convolutions, batch normalisation in the
generator, leaky ReLU in the discriminator, the generator's loss that does not saturate, Adam with beta1 = 0.5. What is
judged is an exponential average of the generator's weights, as is usual, since the last weights are a noisy draw.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo

LATENT = 32
BATCH = 64
JUDGED = 2000
"""Images by which a generator is judged."""
SHOWN = 8
"""Images kept for the figure."""
PRESENT = 0.02
"""A class counts as covered if this share of the images, or more, is taken for it."""
LOG_SCALES = tuple(range(-24, 25))
"""Loss scales 2^-24 to 2^24, from floor to ceiling, at which lost gradients are counted."""


@dataclass(frozen=True)
class Setting:
    """How the two networks are trained.

    Args:
        name: its key.
        generator: policy of the generator.
        discriminator: policy of the discriminator.
        shared: one loss scale for both losses, as with one `torch.amp.GradScaler`; else each has what its policy
            says: a dynamic one of its own for fp16, none for bf16 and FP32.
        weight: what the discriminator's loss is multiplied with. Adam divides by the gradient's own size, so that
            nothing but the range of numbers changes. The discriminator's loss scale, or the shared one, starts that
            much lower: steps that are skipped until a scale has come down are another matter.
    """

    name: str
    generator: str
    discriminator: str
    shared: bool = False
    weight: float = 1.0


FIRST = 2.0**16
"""The usual first loss scale."""
FLOOR = 2.0**-24
"""Lower than is usual, so that the summed loss has room."""
SUMMED = 2.0**30
"""A loss that is the sum over 1,024 images of 1,024 x 1,024 places is so many times their mean."""

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("fp32", "fp32", "fp32"),
        Setting("own", "fp16", "fp16"),
        Setting("policies", "fp16", "bf16"),
        Setting("shared", "fp16", "fp16", shared=True),
        Setting("own-summed", "fp16", "fp16", weight=SUMMED),
        Setting("shared-summed", "fp16", "fp16", shared=True, weight=SUMMED),
    )
}


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Args:
        steps: of each network.
        growth_interval: good steps after which a loss scale doubles. 2,000 is usual, for runs that are longer than all
            of ours; here it must find its place early on.
        width: channels of the wider layer.
        seeds: runs of each setting.
    """

    steps: int
    growth_interval: int
    width: int = 16
    seeds: int = 3


class Generator(nn.Sequential):
    """[N, LATENT] noise -> [N, 1, 8, 8] images in (-1, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(LATENT, 16 * width),
            nn.Unflatten(1, (width, 4, 4)),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, 1, 3, padding=1),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """[N, 1, 8, 8] images -> [N, 1] logits, high for real ones."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width // 2, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width, 1),
        )


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images [N, 1, 8, 8] in [-1, 1], and their labels [N]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    return images, torch.tensor(data.target)


@functools.lru_cache(maxsize=1)
@torch.enable_grad()
def classifier() -> nn.Sequential:
    """The judge: a small network in FP32, trained on the real digits with a fixed seed, the same for every setting."""
    images, labels = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for _ in range(30):
            for chosen in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(network(images[chosen]), labels[chosen]).backward()
                optimizer.step()
    return network.eval()


def frechet(one: Tensor, other: Tensor) -> float:
    """The Frechet distance between two normal distributions with the samples' means and covariances; 0 for equal ones.

    ::

        |m1 - m2|^2 + trace(C1 + C2 - 2 sqrt(C1 C2))

    Args:
        one: [N, F] samples.
        other: [M, F] samples.
    """
    a, b = one.double().numpy(), other.double().numpy()
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # C1 C2 is similar to a positive semidefinite matrix: its eigenvalues are real and >= 0 but for rounding.
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real.clip(min=0.0))
    means = float(((a.mean(0) - b.mean(0)) ** 2).sum())
    return means + float(np.trace(cov_a) + np.trace(cov_b)) - 2.0 * float(roots.sum())


@torch.no_grad()
def quality(images: Tensor) -> dict[str, float]:
    """What images [N, 1, 8, 8] are worth: Frechet distance to the real digits in the classifier's features, and the
    number of classes that they cover.
    """
    judge, (real, _) = classifier(), digits()
    shares = torch.bincount(judge(images).argmax(1), minlength=10) / len(images)
    return {
        "distance": frechet(judge[:3](images), judge[:3](real)),
        "classes": int((shares >= PRESENT).sum()),
    }


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Cross entropy from logits, with 0.9 for real images (one-sided smoothing) and 0 for made ones."""
    good, bad = discriminator(real), discriminator(fake)
    loss = F.binary_cross_entropy_with_logits
    return loss(good, torch.full_like(good, 0.9)) + loss(bad, torch.zeros_like(bad))


def generator_loss(discriminator: nn.Module, fake: Tensor) -> Tensor:
    """Cross entropy from logits of made images against 1: the form whose gradient does not vanish."""
    logits = discriminator(fake)
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


@dataclass(frozen=True)
class Turn:
    """What one step of both networks did: scales that their losses had, and whether a network's step was skipped."""

    scales: tuple[float, float]
    skipped: tuple[bool, bool]


class OwnScales:
    """Each network has a `mezzo.MixedPrecision`: its own policy, its own loss scale."""

    def __init__(
        self, setting: Setting, size: Size, networks: tuple[nn.Module, nn.Module], average: AveragedModel
    ) -> None:
        self.discriminator, self.generator = networks
        self._weight = setting.weight
        optimizer_d, optimizer_g = map(adam, networks)
        scale = mezzo.DynamicLossScale(growth_interval=size.growth_interval)
        lower = mezzo.DynamicLossScale(
            FIRST / setting.weight, growth_interval=size.growth_interval, floor=FLOOR
        )
        self._d = mezzo.MixedPrecision(
            self.discriminator,
            optimizer_d,
            setting.discriminator,
            loss_scale=lower if setting.discriminator == "fp16" else None,
        )
        self._g = mezzo.MixedPrecision(
            self.generator,
            optimizer_g,
            setting.generator,
            loss_scale=scale if setting.generator == "fp16" else None,
            ema=average,
        )

    def step(self, real: Tensor, noise: Tensor) -> Turn:
        """One step of the discriminator, then one of the generator."""
        with torch.no_grad(), self._g.autocast():
            fake = self.generator(noise)
        with self._d.autocast():
            loss = discriminator_loss(self.discriminator, real, fake) * self._weight
        d = self._d.step(loss)
        with self._g.autocast():
            fake = self.generator(noise)
        with self._d.autocast():
            loss = generator_loss(self.discriminator, fake)
        g = self._g.step(loss)  # through the discriminator, whose own gradients stay empty
        return Turn((d.loss_scale, g.loss_scale), (d.skipped, g.skipped))

    def close(self) -> None:
        """Let go of both networks."""
        self._d.close()
        self._g.close()


class SharedScale:
    """Both networks in fp16 with one scaler, updated once for both, as the examples of torch.amp do."""

    def __init__(
        self, setting: Setting, size: Size, networks: tuple[nn.Module, nn.Module], average: AveragedModel
    ) -> None:
        self.discriminator, self.generator = networks
        self._weight = setting.weight
        self._policies = setting.discriminator, setting.generator
        self._d, self._g = map(adam, networks)
        self._scaler = mezzo.GradScaler(
            init_scale=FIRST / setting.weight, growth_interval=size.growth_interval, floor=FLOOR
        )
        self._average = average

    def step(self, real: Tensor, noise: Tensor) -> Turn:
        """One step of the discriminator, one of the generator, one update of the scale."""
        low_d, low_g = self._policies
        scaler, scale = self._scaler, self._scaler.get_scale()
        with torch.no_grad(), mezzo.autocast(low_g):
            fake = self.generator(noise)
        with mezzo.autocast(low_d):
            loss = discriminator_loss(self.discriminator, real, fake) * self._weight
        self._d.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(self._d)
        with mezzo.autocast(low_g):
            fake = self.generator(noise)
        with mezzo.autocast(low_d):
            loss = generator_loss(self.discriminator, fake)
        self._g.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(self._g)
        skipped = bool(scaler.was_skipped(self._d)), bool(scaler.was_skipped(self._g))
        if not skipped[1]:
            self._average.update_parameters(self.generator)
        scaler.update()
        return Turn((scale, scale), skipped)

    def close(self) -> None:
        """Nothing to let go of."""


def adam(network: nn.Module) -> torch.optim.Adam:
    """DCGAN's optimizer."""
    return torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.999))


def train(name: str, seed: int, size: Size) -> dict[str, Any]:
    """One run, as plain numbers.

    Returns:
        ``setting``, ``seed``; ``log2_scales``: of discriminator and generator, by step; ``skipped``: the numbers of
        the steps that each skipped; ``distance``, ``classes``: the quality; ``untrained``: the distance before
        training; ``images``: a few, as whole numbers from 0 to 16; ``lost``: see `lost_gradients`, of FP32 runs.
    """
    setting = SETTINGS[name]
    torch.manual_seed(seed)
    networks = Discriminator(size.width), Generator(size.width)
    average = AveragedModel(networks[1], multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    images, _ = digits()
    untrained = quality(_made(average))["distance"]
    kind = SharedScale if setting.shared else OwnScales
    training = kind(setting, size, networks, average)
    scales: tuple[list[float], list[float]] = ([], [])
    skipped: tuple[list[int], list[int]] = ([], [])
    real, noise = images[:BATCH], torch.zeros(BATCH, LATENT)
    for step in range(size.steps):
        real = images[torch.randint(len(images), (BATCH,))]
        noise = torch.randn(BATCH, LATENT)
        turn = training.step(real, noise)
        for one in (0, 1):
            scales[one].append(math.log2(turn.scales[one]))
            if turn.skipped[one]:
                skipped[one].append(step)
    training.close()
    made = _made(average)
    return {
        "setting": name,
        "seed": seed,
        "log2_scales": list(scales),
        "skipped": list(skipped),
        "untrained": untrained,
        **quality(made),
        "images": ((made[:SHOWN, 0] + 1.0) * 8.0).round().int().tolist(),
        "lost": lost_gradients(networks, real, noise) if name == "fp32" else None,
    }


@torch.no_grad()
def _made(average: AveragedModel) -> Tensor:
    """Images of the averaged generator, always from the same noise."""
    average.eval()
    noise = torch.randn(JUDGED, LATENT, generator=torch.Generator().manual_seed(1))
    made: Tensor = average(noise)
    average.train()
    return made


def lost_gradients(networks: tuple[nn.Module, nn.Module], real: Tensor, noise: Tensor) -> dict[str, Any]:
    """Of each network's activation gradients in FP32: the largest, and the share that fp16 would round to zero.

    Values that are zero already don't count. At a loss scale S fp16 rounds to zero what is under 2^-25 / S; ties go to
    even, so that 2^-25 itself does too.

    Returns:
        ``discriminator`` and ``generator``, each with ``counted``, ``largest`` and ``lost``, a share for each of
        `LOG_SCALES`.
    """
    discriminator, generator = networks

    def loss_of(name: str) -> Tensor:
        fake = generator(noise)
        if name == "generator":
            return generator_loss(discriminator, fake)
        return discriminator_loss(discriminator, real, fake.detach())

    found: dict[str, Any] = {}
    for network, name in ((discriminator, "discriminator"), (generator, "generator")):
        kept: list[Tensor] = []
        keep = functools.partial(_keep_gradient, kept)
        handles = [
            module.register_forward_hook(keep)
            for module in network.children()
            if not isinstance(module, (nn.Flatten, nn.Unflatten))  # a view would be counted twice
        ]
        loss = loss_of(name)
        for handle in handles:
            handle.remove()
        torch.autograd.grad(loss, list(network.parameters()))  # the hooks see what passes by
        sizes = torch.cat(kept).abs()
        sizes = sizes[sizes > 0]
        found[name] = {
            "counted": len(sizes),
            "largest": float(sizes.max()),
            "lost": [float((sizes <= 2.0 ** (-25 - log)).float().mean()) for log in LOG_SCALES],
        }
    return found


def _keep_gradient(kept: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: kept.append(grad.detach().flatten()))
