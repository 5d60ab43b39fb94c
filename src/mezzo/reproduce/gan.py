"""gan: a small GAN whose two networks each have a policy and a loss scale of their own.

The original work trained a DCGAN in mixed precision and judged its faces by eye (section 4.6). A GAN is two trainings
in one: two losses, two optimizers, gradients of different size, and therefore two loss scales that suit them. Here a
GAN learns scikit-learn's 8 x 8 digits (`gan_training`) in six settings with the same seeds:

- ``fp32``;
- ``own``: both networks in fp16, each with a `mezzo.MixedPrecision` and a dynamic loss scale of its own;
- ``policies``: the generator in fp16 with a loss scale, the discriminator in bf16 without one;
- ``shared``: both in fp16 with one scaler for both losses, as torch.amp's examples do it;
- ``own-summed``, ``shared-summed``: the same two with the discriminator's loss 2^30 times larger, as a sum over 1,024
  images of 1,024 x 1,024 places is than their mean. Adam divides by the size of gradients, so that this changes nothing
  but the range of numbers. The discriminator's scale, and the shared one, start 2^30 lower.

Quality is the Frechet distance between made and real digits in the features of a fixed classifier, and the number of
classes that are covered.

Declared before the runs:

- own-scales-as-good, own-policies-as-good: `mezzo.core.comparison.compare` over the seeds, with a margin of 10 % of
  FP32's mean distance, says **equivalent** or **consistent** (no harm beyond the margin, the pairs' own spread or
  FP32's spread between seeds), and no run covers two classes less than FP32's worst: the share at which a class counts
  is crossed by chance, in FP32 too, but a GAN that collapses loses several. Few seeds of a GAN prove no equivalence, so
  that `consistent` is let pass; harm that is established, or a spread too wide to tell, does not pass.
- scales-part: under ``own``, the medians of the two scales over the second half of the run differ by a factor of 4 or
  more, in every run in the same direction.
- shared-scale-follows-one: under ``shared``, 90 % or more of the back-offs come at steps where only one and the same
  network overflowed, and the scale's median is a quarter or less of what the other network has under ``own``: its
  scale is taken down for overflows that it did not have.
- shared-scale-costs-quality: harm of ``shared`` is established (**divergent**). Whether it must be depends on how many
  of the held-back network's gradients the lower scale loses to zero; that share is measured on FP32's gradients.
- summed-loss-own-scales-as-good, summed-loss-shared-scale-costs-quality: the same two rules for the summed loss.

Two things were settled not before but by trials of the quick size, on the same seeds: that one class less is allowed
(one fp16 run covered 9 digits where all of FP32's covered 10), and how much larger the summed loss is (2^26 showed
nothing clear, 2^28 gave worse images, too unequally between three seeds to be established).
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import numpy as np

from mezzo.core.comparison import COARSE, Comparison, Parity, compare
from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mezzo.reproduce.gan_training import Size

NETWORKS = ("discriminator", "generator")
MARGIN = 0.10
APART = 2.0
"""In powers of two: a factor of 4."""
ONE_SIDED = 0.9
WORKERS = 2

Run = dict[str, Any]


def sizes(*, quick: bool) -> Size:
    """How much is trained."""
    from mezzo.reproduce.gan_training import Size

    return Size(steps=400, growth_interval=40) if quick else Size(1000, 80, seeds=5)


def by_setting(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs of each setting, by seed."""
    found: dict[str, list[Run]] = {}
    for one in sorted(runs, key=lambda one: int(one["seed"])):
        found.setdefault(one["setting"], []).append(one)
    return found


def judge(baseline: Sequence[Run], candidate: Sequence[Run]) -> Comparison:
    """The candidate's distances against FP32's, paired by seed, as `mezzo compare` judges a metric."""
    theirs = np.array([run["distance"] for run in baseline], dtype=np.float64)
    ours = np.array([run["distance"] for run in candidate], dtype=np.float64)
    margin = MARGIN * float(theirs.mean())
    return compare("Frechet distance", theirs, ours, 1.0, margin, [], COARSE * margin)


def as_good(name: str, expected: str, baseline: Sequence[Run], candidate: Sequence[Run]) -> Finding:
    """A finding that a setting harms nothing."""
    found = judge(baseline, candidate)
    fewest = min(run["classes"] for run in baseline)
    ours = min(run["classes"] for run in candidate)
    return Finding(
        name,
        expected,
        f"{_said(found, len(candidate))}; FP32's runs cover {fewest} of 10 digits or more, these {ours} or more.",
        found.parity in (Parity.EQUIVALENT, Parity.CONSISTENT) and ours >= fewest - 1,
    )


def _said(found: Comparison, seeds: int) -> str:
    low, high = found.interval or (found.gap, found.gap)
    return (
        f"{found.parity.value}: Frechet distance {found.candidate:.2f} against FP32's {found.baseline:.2f} over "
        f"{seeds} seeds, difference {found.gap:+.2f} (90 % interval {low:+.2f} to {high:+.2f}), margin "
        f"{found.margin:.2f}"
    )


def settled(run: Run) -> tuple[float, float]:
    """log2 of the discriminator's and of the generator's scale: the medians over the second half of the run."""
    one, other = (statistics.median(log[len(log) // 2 :]) for log in run["log2_scales"])
    return float(one), float(other)


def scales_part(runs: Sequence[Run]) -> Finding:
    """The two scales find different places."""
    places = [settled(run) for run in runs]
    apart = [generator - discriminator for discriminator, generator in places]
    holds = min(apart) >= APART or max(apart) <= -APART
    skips = [[len(steps) for steps in run["skipped"]] for run in runs]
    mean = [statistics.mean(column) for column in zip(*places)]
    return Finding(
        "scales-part",
        "Left alone, the two loss scales go to different places, since the two networks' gradients differ in size.",
        f"the discriminator's scale settles at 2^{mean[0]:.1f}, the generator's at 2^{mean[1]:.1f} (medians of the "
        f"second half, mean of {len(runs)} seeds): a factor of 2^{min(apart, key=abs):.1f} to "
        f"2^{max(apart, key=abs):.1f} between them; {sum(s[0] for s in skips)} and {sum(s[1] for s in skips)} steps "
        f"were skipped of {sum(len(run['log2_scales'][0]) for run in runs)} each.",
        bool(holds),
    )


def back_offs(run: Run) -> tuple[int, int, int]:
    """Steps with an overflow in the discriminator alone, in the generator alone, in both."""
    one, other = map(set, run["skipped"])
    return len(one - other), len(other - one), len(one & other)


def follows_one(shared: Sequence[Run], own: Sequence[Run]) -> Finding:
    """One network's overflows set the scale of both."""
    counts = [sum(column) for column in zip(*map(back_offs, shared))]
    total = sum(counts)
    driver = 0 if counts[0] >= counts[1] else 1
    held = 1 - driver
    common = statistics.mean(settled(run)[held] for run in shared)
    alone = statistics.mean(settled(run)[held] for run in own)
    holds = total > 0 and counts[driver] >= ONE_SIDED * total and alone - common >= APART
    return Finding(
        "shared-scale-follows-one",
        "One scale for both losses is taken down by the overflows of one network, for the other one too.",
        f"of {total} overflows under a shared scale {counts[driver]} were in the {NETWORKS[driver]} alone, "
        f"{counts[held]} in the {NETWORKS[held]} alone and {counts[2]} in both; the {NETWORKS[held]} had a scale of "
        f"2^{common:.1f} in place of the 2^{alone:.1f} of its own.",
        bool(holds),
    )


def costs_quality(
    name: str,
    expected: str,
    baseline: Sequence[Run],
    shared: Sequence[Run],
    own: Sequence[Run],
    lost: dict[str, Any],
) -> Finding:
    """Whether the shared scale harms, and how much of the held-back network's gradients it loses."""
    found = judge(baseline, shared)
    held = max((0, 1), key=lambda i: sum(settled(a)[i] - settled(b)[i] for a, b in zip(own, shared)))
    common, alone = (round(statistics.mean(settled(run)[held] for run in runs)) for runs in (shared, own))
    network = NETWORKS[held]

    def share(log: int) -> float:
        nearest = min(lost["log2_scales"], key=lambda one: abs(int(one) - log))
        return float(lost[network]["lost"][lost["log2_scales"].index(nearest)])

    return Finding(
        name,
        expected,
        f"{_said(found, len(shared))}. fp16 would round {share(0):.2%} of the {network}'s activation gradients to "
        f"zero without a scale, {share(common):.2%} at the shared one (2^{common}) and {share(alone):.2%} at its "
        f"own (2^{alone}).",
        found.parity is Parity.DIVERGENT,
    )


def findings(settings: dict[str, list[Run]], lost: dict[str, Any]) -> tuple[Finding, ...]:
    """Every finding, from the runs alone."""
    fp32, own, shared = settings["fp32"], settings["own"], settings["shared"]
    own_summed, shared_summed = settings["own-summed"], settings["shared-summed"]
    return (
        as_good(
            "own-scales-as-good",
            "A GAN in fp16, with a loss scale for each network, ends as good as in FP32.",
            fp32,
            own,
        ),
        as_good(
            "own-policies-as-good",
            "So does one whose generator is in fp16 with a loss scale and whose discriminator is in bf16 without one.",
            fp32,
            settings["policies"],
        ),
        scales_part(own),
        follows_one(shared, own),
        costs_quality(
            "shared-scale-costs-quality",
            "A shared scale that is too low for one network rounds its gradients to zero, and the images get worse.",
            fp32,
            shared,
            own,
            lost,
        ),
        as_good(
            "summed-loss-own-scales-as-good",
            "Where one loss is 2^30 times larger, as a sum is in place of a mean, two scales still make a GAN as good "
            "as FP32's.",
            fp32,
            own_summed,
        ),
        costs_quality(
            "summed-loss-shared-scale-costs-quality",
            "There a shared scale, taken down by the larger loss, rounds the other network's gradients to zero, and "
            "the images get worse.",
            fp32,
            shared_summed,
            own_summed,
            lost,
        ),
    )


def train_all(size: Size, report: Callable[[str, float], None], *, workers: int = WORKERS) -> list[Run]:
    """Every setting with every seed, in worker processes of one thread each; in this process where `workers` is 0."""
    from mezzo.reproduce.gan_training import SETTINGS, train

    # The longest first, so that no worker is left with one of them at the end.
    jobs = [(name, seed) for seed in range(size.seeds) for name in reversed(SETTINGS)]
    runs: list[Run] = []
    report("training, GANs", 0.0)
    if not workers:
        for name, seed in jobs:
            runs.append(train(name, seed, size))
            report(f"training, {name} with seed {seed + 1}", len(runs) / len(jobs))
        return runs
    # Forked children of a process that has used OpenMP hang; these start anew.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(train, name, seed, size): (name, seed) for name, seed in jobs}
        try:
            for future in as_completed(futures):
                runs.append(future.result())
                name, seed = futures[future]
                report(f"training, {name} with seed {seed + 1} is done", len(runs) / len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return runs


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def numbers_of(size: Size, runs: Sequence[Run]) -> dict[str, Any]:
    """All that the figure and the sentences come from; series and images of the first seed alone."""
    from dataclasses import asdict

    from mezzo.reproduce.gan_training import SHOWN, digits

    settings = by_setting(runs)
    images, _ = digits()
    return {
        "size": asdict(size),
        "margin": MARGIN,
        "runs": {
            name: [
                {
                    "seed": run["seed"],
                    "distance": run["distance"],
                    "classes": run["classes"],
                    "untrained": run["untrained"],
                    "settled_log2": settled(run),
                    "skipped": run["skipped"],
                }
                for run in found
            ]
            for name, found in settings.items()
        },
        "log2_scales": {name: settings[name][0]["log2_scales"] for name in ("own", "shared")},
        "images": {
            "real": ((images[:SHOWN, 0] + 1.0) * 8.0).int().tolist(),
            **{name: found[0]["images"] for name, found in settings.items()},
        },
        "lost": mean_lost(settings["fp32"]),
    }


def mean_lost(runs: Sequence[Run]) -> dict[str, Any]:
    """`gan_training.lost_gradients`, its shares averaged over runs and its largest value the largest of all."""
    from mezzo.reproduce.gan_training import LOG_SCALES

    found: dict[str, Any] = {
        network: {
            "largest": max(run["lost"][network]["largest"] for run in runs),
            "lost": [
                statistics.mean(shares) for shares in zip(*(run["lost"][network]["lost"] for run in runs))
            ],
        }
        for network in NETWORKS
    }
    return {"log2_scales": list(LOG_SCALES), **found}


def run(effort: Effort, *, size: Size | None = None, workers: int = WORKERS) -> Outcome:
    """Train every setting, and judge them."""
    size = size or sizes(quick=effort.quick)
    runs = train_all(size, effort.report, workers=workers)
    settings = by_setting(runs)
    return Outcome(findings(settings, mean_lost(settings["fp32"])), numbers_of(size, runs))


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """The scales by step, with skipped steps marked; the distances by seed; and images to look at."""
    from mezzo.reproduce.gan_figure import draw as drawn

    drawn(numbers, figure)


EXPERIMENT = Experiment(
    "gan",
    "A GAN with a policy and a loss scale for each of its networks",
    "Micikevicius et al. 2017, section 4.6 (a DCGAN trained in mixed precision)",
    run,
    draw,
)
