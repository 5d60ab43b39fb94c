"""A small GAN whose two networks each have a policy and a loss scale.

The paper trained a DCGAN in mixed precision and judged its faces by eye (section 4.6). A GAN is two trainings in one:
two losses, two optimizers, gradients of different size, and therefore two loss scales that suit them. Here a GAN
learns scikit-learn's 8 x 8 digits in six settings with the same seeds:

- ``fp32``;
- ``own``: both networks in fp16, each with a separate `mezzo.MixedPrecision` and dynamic loss scale;
- ``policies``: the generator in fp16 with a loss scale, the discriminator in bf16 without one;
- ``shared``: both in fp16 with one scaler for both losses, as torch.amp's examples do it;
- ``own-summed``, ``shared-summed``: the same two with the discriminator's loss 2^30 times larger, as a sum over 1,024
  images of 1,024 x 1,024 places is than their mean. Adam divides by the size of gradients, so that this changes only
  the range of numbers. The discriminator's scale, and the shared one, start 2^30 lower.

The networks are DCGAN's in small (Radford et al. 2015, arXiv 1511.06434): convolutions, batch normalization in the
generator, leaky ReLU in the discriminator, the generator's loss that does not saturate, Adam with beta1 = 0.5. An
exponential average of the generator's weights is judged, as is usual, since the last weights are a noisy draw.
Quality is the Frechet distance between made and real digits in the features of a fixed classifier, and the number of
classes that are covered.

Declared before the runs:

- own-scales-as-good, own-policies-as-good: `mezzo.core.comparison.compare` over the seeds, with a margin of 10 % of
  FP32's mean distance, says **equivalent** or **consistent** (no harm beyond the margin, the pairs' own spread or
  FP32's spread between seeds), and no run covers two classes less than FP32's worst: the share at which a class
  counts is crossed by chance, in FP32 too, but a GAN that collapses loses several. Few seeds of a GAN prove no
  equivalence, so that `consistent` passes; harm that is established, or a spread too wide to tell, does not pass.
- scales-part: under ``own``, the medians of the two scales over the second half of the run differ by a factor of 4 or
  more, in every run in the same direction.
- shared-scale-follows-one: under ``shared``, 90 % or more of the back-offs come at steps where only one and the same
  network overflowed, and the scale's median is a quarter or less of what the other network has under ``own``: its
  scale is taken down for overflows that it did not have.
- shared-scale-costs-quality: harm of ``shared`` is established (**divergent**). Whether it must be depends on how
  many of the held-back network's gradients the lower scale loses to zero; that share is measured on FP32's gradients.
- summed-loss-own-scales-as-good, summed-loss-shared-scale-costs-quality: the same two rules for the summed loss.

Two things were settled not before but by trials of the quick size, on the same seeds: that one class less is allowed
(one fp16 run covered 9 digits where all of FP32's covered 10), and how much larger the summed loss is (2^26 showed
nothing clear, 2^28 gave worse images, too unequally between three seeds to be established).
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import figures
import mezzo
from common import Finding, Numbers, main, progress
from mezzo.core.comparison import COARSE, Comparison, Parity, compare

LATENT, BATCH, WIDTH = 32, 64, 16
JUDGED, SHOWN = 2000, 4  # images by which a generator is judged; images kept for the figure
PRESENT = 0.02  # a class counts as covered if this share of the images, or more, is taken for it
LOG_SCALES = tuple(range(-24, 25))  # log2 of the loss scales at which lost gradients are counted
NETWORKS = ("discriminator", "generator")
MARGIN = 0.10
APART = 2.0  # in powers of two: a factor of 4
ONE_SIDED = 0.9
FIRST, FLOOR = 2.0**16, 2.0**-24  # the usual first loss scale; a floor that leaves room for the summed loss
SUMMED = 2.0**30
# Steps, good steps after which a loss scale doubles, seeds. 2,000 steps are usual, for runs longer than all of ours.
QUICK, FULL = (400, 40, 3), (1000, 80, 5)
NOT_FAR_APART = (
    "The networks' scales differ by a factor of 8 to 16 only, and at the lower scale fp16 loses none of the "
    "generator's gradients. The task with the summed loss shows the effect."
)

Run = dict[str, Any]


class Setting(NamedTuple):
    """Policies of the two networks, one scale for both losses or not, and the discriminator's loss's factor."""

    generator: str
    discriminator: str
    shared: bool = False
    weight: float = 1.0


SETTINGS = {
    "fp32": Setting("fp32", "fp32"),
    "own": Setting("fp16", "fp16"),
    "policies": Setting("fp16", "bf16"),
    "shared": Setting("fp16", "fp16", shared=True),
    "own-summed": Setting("fp16", "fp16", weight=SUMMED),
    "shared-summed": Setting("fp16", "fp16", shared=True, weight=SUMMED),
}


def generator_network() -> nn.Sequential:
    """[N, LATENT] noise -> [N, 1, 8, 8] images in (-1, 1)."""
    return nn.Sequential(
        nn.Linear(LATENT, 16 * WIDTH),
        nn.Unflatten(1, (WIDTH, 4, 4)),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(WIDTH, WIDTH // 2, 3, padding=1),
        nn.BatchNorm2d(WIDTH // 2),
        nn.ReLU(),
        nn.Conv2d(WIDTH // 2, 1, 3, padding=1),
        nn.Tanh(),
    )


def discriminator_network() -> nn.Sequential:
    """[N, 1, 8, 8] images -> [N, 1] logits, high for real ones."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH // 2, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH // 2, WIDTH, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 1),
    )


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images [N, 1, 8, 8] in [-1, 1], and their labels [N]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    return images, torch.tensor(data.target)


@functools.cache
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
    """The Frechet distance between normal distributions with the means m and covariances C of samples [N, F], [M, F]::

    |m1 - m2|^2 + trace(C1 + C2 - 2 sqrt(C1 C2))
    """
    a, b = one.double().numpy(), other.double().numpy()
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # C1 C2 is similar to a positive semidefinite matrix: its eigenvalues are real and >= 0 but for rounding.
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real.clip(min=0.0))
    means = float(((a.mean(0) - b.mean(0)) ** 2).sum())
    return means + float(np.trace(cov_a) + np.trace(cov_b)) - 2.0 * float(roots.sum())


@torch.no_grad()
def quality(images: Tensor) -> dict[str, float]:
    """Frechet distance of images to the real digits in the classifier's features, and how many classes they cover."""
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


Networks = tuple[nn.Sequential, nn.Sequential]
Update = Callable[
    [Tensor], tuple[float, bool]
]  # a step from a loss: the loss scale, and whether it was skipped


def adam(network: nn.Module) -> torch.optim.Adam:
    """DCGAN's optimizer."""
    return torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.999))


def own_scale(
    network: nn.Module, policy: str, first: float, interval: int, average: AveragedModel | None
) -> tuple[Callable[[], Any], Update]:
    """The context of a network's forward pass, and its step: a `mezzo.MixedPrecision` with a separate loss scale."""
    scale = mezzo.DynamicLossScale(first, growth_interval=interval, floor=FLOOR) if policy == "fp16" else None
    mp = mezzo.MixedPrecision(network, adam(network), policy, loss_scale=scale, ema=average)

    def update(loss: Tensor) -> tuple[float, bool]:
        result = mp.step(loss)
        return result.loss_scale, result.skipped

    return mp.autocast, update


def shared_scale(
    network: nn.Module, policy: str, scaler: mezzo.GradScaler, average: AveragedModel | None
) -> tuple[Callable[[], Any], Update]:
    """The same with a scaler that another network shares, and that the caller updates, as in torch.amp's examples."""
    optimizer = adam(network)

    def update(loss: Tensor) -> tuple[float, bool]:
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        skipped = bool(scaler.was_skipped(optimizer))
        if average is not None and not skipped:
            average.update_parameters(network)
        return scale, skipped

    return lambda: mezzo.autocast(policy), update


def train(name: str, seed: int, steps: int, interval: int) -> Run:
    """One run: scales and skipped steps of (discriminator, generator), quality, images, lost gradients of FP32."""
    setting = SETTINGS[name]
    torch.manual_seed(seed)
    networks = discriminator, generator = discriminator_network(), generator_network()
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    first = FIRST / setting.weight
    if setting.shared:
        scaler = mezzo.GradScaler(init_scale=first, growth_interval=interval, floor=FLOOR)
        in_d, update_d = shared_scale(discriminator, setting.discriminator, scaler, None)
        in_g, update_g = shared_scale(generator, setting.generator, scaler, average)
    else:
        in_d, update_d = own_scale(discriminator, setting.discriminator, first, interval, None)
        in_g, update_g = own_scale(generator, setting.generator, FIRST, interval, average)
    images, _ = digits()
    scales: tuple[list[float], list[float]] = ([], [])
    skipped: tuple[list[int], list[int]] = ([], [])
    for step in range(steps):
        real = images[torch.randint(len(images), (BATCH,))]
        noise = torch.randn(BATCH, LATENT)
        with torch.no_grad(), in_g():
            fake = generator(noise)
        with in_d():
            loss = discriminator_loss(discriminator, real, fake) * setting.weight
        of_d = update_d(loss)
        with in_g():
            fake = generator(noise)
        with in_d():
            loss = generator_loss(discriminator, fake)
        of_g = update_g(loss)  # through the discriminator, whose own gradients are not used
        if setting.shared:
            scaler.update()
        for network, (scale, was_skipped) in enumerate((of_d, of_g)):
            scales[network].append(math.log2(scale))
            if was_skipped:
                skipped[network].append(step)
    average.eval()
    with torch.no_grad():
        made = average(torch.randn(JUDGED, LATENT, generator=torch.Generator().manual_seed(1)))
    return {
        "log2_scales": scales,
        "skipped": skipped,
        **quality(made),
        "images": ((made[:SHOWN, 0] + 1.0) * 8.0).round().int().tolist(),
        "lost": lost_gradients(networks, real, noise) if name == "fp32" else None,
    }


def lost_gradients(networks: Networks, real: Tensor, noise: Tensor) -> dict[str, list[float]]:
    """Of each network's nonzero activation gradients in FP32, the share that fp16 would round to zero, by `LOG_SCALES`.

    At a loss scale S fp16 rounds to zero what is under 2^-25 / S, and 2^-25 / S itself: ties go to even.
    """
    discriminator, generator = networks
    found = {}
    for network, name in zip(networks, NETWORKS):
        kept: list[Tensor] = []
        keep = functools.partial(_keep_gradient, kept)
        modules = [
            one for one in network if not isinstance(one, (nn.Flatten, nn.Unflatten))
        ]  # a view counts once
        handles = [module.register_forward_hook(keep) for module in modules]
        fake = generator(noise)
        if name == "generator":
            loss = generator_loss(discriminator, fake)
        else:
            loss = discriminator_loss(discriminator, real, fake.detach())
        for handle in handles:
            handle.remove()
        torch.autograd.grad(loss, list(network.parameters()))  # the hooks see what passes by
        sizes = torch.cat(kept).abs()
        sizes = sizes[sizes > 0]
        found[name] = [float((sizes <= 2.0 ** (-25 - log)).float().mean()) for log in LOG_SCALES]
    return found


def _keep_gradient(kept: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: kept.append(grad.detach().flatten()))


def run(full: bool) -> tuple[list[Finding], Numbers]:
    """Train every setting with every seed."""
    steps, interval, seeds = FULL if full else QUICK
    runs: dict[str, list[Run]] = {}
    for name in SETTINGS:
        progress(f"training, {name}, {seeds} seeds")
        runs[name] = [train(name, seed, steps, interval) for seed in range(seeds)]
    return findings(runs), {"runs": runs}


def judge(baseline: Sequence[Run], candidate: Sequence[Run]) -> Comparison:
    """The candidate's distances against FP32's, paired by seed, as `mezzo compare` judges a metric."""
    theirs = np.array([run["distance"] for run in baseline], dtype=np.float64)
    ours = np.array([run["distance"] for run in candidate], dtype=np.float64)
    margin = MARGIN * float(theirs.mean())
    return compare("Frechet distance", theirs, ours, 1.0, margin, [], COARSE * margin)


def _said(found: Comparison, seeds: int) -> str:
    low, high = found.interval or (found.gap, found.gap)
    return (
        f"{found.parity.value}: Frechet distance {found.candidate:.2f} against FP32's {found.baseline:.2f} over "
        f"{seeds} seeds, difference {found.gap:+.2f} (90 % interval {low:+.2f} to {high:+.2f}), margin "
        f"{found.margin:.2f}"
    )


def as_good(name: str, expected: str, baseline: Sequence[Run], candidate: Sequence[Run]) -> Finding:
    """A finding that a setting does no harm."""
    found = judge(baseline, candidate)
    fewest = min(run["classes"] for run in baseline)
    ours = min(run["classes"] for run in candidate)
    return Finding(
        name,
        expected,
        f"{_said(found, len(candidate))}; FP32's runs cover at least {fewest} of 10 digits, these at least {ours}.",
        found.parity in (Parity.EQUIVALENT, Parity.CONSISTENT) and ours >= fewest - 1,
    )


def settled(run: Run) -> tuple[float, float]:
    """log2 of the discriminator's and of the generator's scale: the medians over the second half of the run."""
    one, other = (statistics.median(log[len(log) // 2 :]) for log in run["log2_scales"])
    return float(one), float(other)


def scales_part(runs: Sequence[Run]) -> Finding:
    """The two scales settle at different values."""
    places = [settled(run) for run in runs]
    apart = [generator - discriminator for discriminator, generator in places]
    mean = [statistics.mean(column) for column in zip(*places)]
    skips = [sum(len(run["skipped"][network]) for run in runs) for network in (0, 1)]
    return Finding(
        "scales-part",
        "Separate loss scales settle at different values, since the gradients of the two networks differ in size.",
        f"the discriminator's scale settles at 2^{mean[0]:.1f}, the generator's at 2^{mean[1]:.1f} (medians of the "
        f"second half, mean of {len(runs)} seeds): a factor of 2^{min(apart, key=abs):.1f} to "
        f"2^{max(apart, key=abs):.1f} between them; {skips[0]} and {skips[1]} steps "
        f"were skipped of {sum(len(run['log2_scales'][0]) for run in runs)} each.",
        min(apart) >= APART or max(apart) <= -APART,
    )


def back_offs(run: Run) -> tuple[int, int, int]:
    """Number of steps with an overflow in the discriminator alone, in the generator alone, in both."""
    one, other = map(set, run["skipped"])
    return len(one - other), len(other - one), len(one & other)


def follows_one(shared: Sequence[Run], own: Sequence[Run]) -> Finding:
    """One network's overflows set the scale of both."""
    counts = [sum(column) for column in zip(*map(back_offs, shared))]
    total = sum(counts)
    driver = 0 if counts[0] >= counts[1] else 1
    held = 1 - driver
    common, alone = (statistics.mean(settled(run)[held] for run in runs) for runs in (shared, own))
    return Finding(
        "shared-scale-follows-one",
        "Overflows of one network lower a shared scale for the other network too.",
        f"of {total} overflows under a shared scale {counts[driver]} were in the {NETWORKS[driver]} alone, "
        f"{counts[held]} in the {NETWORKS[held]} alone and {counts[2]} in both; the {NETWORKS[held]} had a scale of "
        f"2^{common:.1f} instead of its separate 2^{alone:.1f}.",
        total > 0 and counts[driver] >= ONE_SIDED * total and alone - common >= APART,
    )


def costs_quality(
    name: str,
    expected: str,
    baseline: Sequence[Run],
    shared: Sequence[Run],
    own: Sequence[Run],
    known: str = "",
) -> Finding:
    """Whether the shared scale harms, and how much of the held-back network's gradients it loses."""
    found = judge(baseline, shared)
    held = max((0, 1), key=lambda i: sum(settled(a)[i] - settled(b)[i] for a, b in zip(own, shared)))
    common, alone = (round(statistics.mean(settled(run)[held] for run in runs)) for runs in (shared, own))
    network = NETWORKS[held]
    lost = np.mean([run["lost"][network] for run in baseline], axis=0)

    def share(log: int) -> float:
        return float(lost[LOG_SCALES.index(min(max(log, LOG_SCALES[0]), LOG_SCALES[-1]))])

    return Finding(
        name,
        expected,
        f"{_said(found, len(shared))}. fp16 would round {share(0):.2%} of the {network}'s activation gradients to "
        f"zero without a scale, {share(common):.2%} at the shared one (2^{common}) and {share(alone):.2%} at its "
        f"own (2^{alone}).",
        found.parity is Parity.DIVERGENT,
        known,
    )


def findings(runs: dict[str, list[Run]]) -> list[Finding]:
    """The rules of the module's docstring, applied to the runs."""
    fp32, own, shared = runs["fp32"], runs["own"], runs["shared"]
    as_fp32 = "A GAN in fp16, with a loss scale for each network, is as good as one in FP32."
    policies = (
        "So is one whose generator is in fp16 with a loss scale and whose discriminator is in bf16 "
        "without one."
    )
    too_low = "A shared scale that is too low for one network rounds its gradients to zero, and the images get worse."
    summed = (
        "With one loss 2^30 times larger, such as a sum instead of a mean, a GAN with two scales is as good as one in "
        "FP32."
    )
    summed_low = (
        "With that loss, a shared scale follows the larger loss and rounds the other network's gradients to zero, and "
        "the images get worse."
    )
    shared_summed, own_summed = runs["shared-summed"], runs["own-summed"]
    return [
        as_good("own-scales-as-good", as_fp32, fp32, own),
        as_good("own-policies-as-good", policies, fp32, runs["policies"]),
        scales_part(own),
        follows_one(shared, own),
        costs_quality("shared-scale-costs-quality", too_low, fp32, shared, own, known=NOT_FAR_APART),
        as_good("summed-loss-own-scales-as-good", summed, fp32, own_summed),
        costs_quality("summed-loss-shared-scale-costs-quality", summed_low, fp32, shared_summed, own_summed),
    ]


NAMES = {
    "fp32": ("FP32", figures.FP32),
    "own": ("fp16,\nown scales", figures.FP16),
    "policies": ("fp16\nand bf16", figures.BF16),
    "shared": ("fp16,\nshared", figures.FP16_SAFE),
    "own-summed": ("loss × $2^{30}$,\nown scales", figures.FP16),
    "shared-summed": ("loss × $2^{30}$,\nshared", figures.FP16_SAFE),
}


def draw(numbers: Numbers, figure: Figure) -> None:
    """The loss scales of the first seed by step, the distances of every seed, and images of the first seed."""
    figure.set_size_inches(9.0, 9.6)
    above, middle, below = figure.subplots(3, 1, height_ratios=(1.1, 1.1, 0.6))
    runs = numbers["runs"]
    own, shared = runs["own"][0], runs["shared"][0]
    for name, scales, skipped, colour, line in (
        ("generator", own["log2_scales"][1], own["skipped"][1], figures.FP16, "-"),
        ("discriminator", own["log2_scales"][0], own["skipped"][0], figures.BF16, "-"),
        (
            "shared",
            shared["log2_scales"][0],
            sorted({*shared["skipped"][0], *shared["skipped"][1]}),
            figures.INK,
            "--",
        ),
    ):
        above.plot(scales, line, color=colour, drawstyle="steps-post", label=name)
        above.plot(skipped, [scales[step] for step in skipped], "x", color=colour)
    above.set_title("Each network's loss scale, and one shared by both")
    above.set(xlabel="step of both networks; × a skipped step: overflow, the scale is halved")
    above.set_ylabel("log₂ of the loss scale")
    above.legend()

    values = np.array([[run["distance"] for run in runs[name]] for name in NAMES])  # [settings, seeds]
    means = values.mean(axis=1)
    middle.axhspan(means[0] * (1 - MARGIN), means[0] * (1 + MARGIN), color=figures.BAND, zorder=0)
    middle.plot(values, color="#c3cad1", lw=1.2)
    for place, (_, colour) in enumerate(NAMES.values()):
        middle.plot([place] * values.shape[1], values[place], "o", ms=7, color=colour)
        middle.plot([place - 0.25, place + 0.25], [means[place]] * 2, color=colour, lw=2.4)
    middle.set_title(f"Distance from real digits (lower is better; band: FP32's mean ± {MARGIN:.0%})")
    middle.set_xticks(range(len(NAMES)), [text for text, _ in NAMES.values()])
    middle.set(ylim=(0.0, None), ylabel="Fréchet distance")

    images = np.array([runs[name][0]["images"] for name in NAMES], dtype=float)  # [settings, images, 8, 8]
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    below.imshow(padded.transpose(1, 2, 0, 3).reshape(10 * SHOWN, -1), cmap="Greys", aspect="equal")
    below.set_title("Digits that they make, one setting per column")
    below.set_axis_off()


if __name__ == "__main__":
    TITLE = "A GAN with a policy and a loss scale for each of its networks"
    SOURCE = "Micikevicius et al. 2017, section 4.6 (a DCGAN trained in mixed precision)"
    sys.exit(main("gan", TITLE, SOURCE, run, draw))
