"""gan: its rules against runs made by hand, its measures against known answers, and tiny runs of the real thing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mezzo.reproduce import figures, gan
from mezzo.reproduce.experiment import Effort
from mezzo.reproduce.gan import EXPERIMENT
from mezzo.reproduce.gan_training import (
    LATENT,
    LOG_SCALES,
    SETTINGS,
    Discriminator,
    Generator,
    Size,
    classifier,
    digits,
    frechet,
    generator_loss,
    lost_gradients,
    quality,
    train,
)

TINY = Size(steps=12, growth_interval=4, width=4, seeds=3)
GOOD = (5.0, 5.4, 5.2)


def made(
    setting: str,
    distances: tuple[float, ...] = GOOD,
    classes: int = 10,
    scales: tuple[float, float] = (0.0, 0.0),
    skipped: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> list[dict[str, Any]]:
    """Runs as `train` gives them, with constant scales of 2 to the powers given."""
    return [
        {
            "setting": setting, "seed": seed, "distance": distance, "classes": classes, "untrained": 60.0,
            "log2_scales": [[scales[0]] * 20, [scales[1]] * 20], "skipped": [list(one) for one in skipped],
        }
        for seed, distance in enumerate(distances)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("distances", "classes", "holds", "word"),
    [
        (GOOD, 10, True, "equivalent"),
        ((5.1, 5.3, 5.3), 10, True, "equivalent"),
        ((5.1, 5.8, 4.9), 10, True, "consistent"),
        ((3.0, 3.4, 3.2), 10, True, "consistent"),  # better is no harm
        ((6.0, 6.5, 6.3), 10, False, "divergent"),
        ((5.0, 60.0, 5.2), 10, False, "inconclusive"),  # one ruined run: too wide to tell
        (GOOD, 9, True, "equivalent"),
        (GOOD, 8, False, "equivalent"),
    ],
)
def test_as_good(distances: tuple[float, ...], classes: int, holds: bool, word: str) -> None:
    found = gan.as_good("own-scales-as-good", "as good", made("fp32"), made("own", distances, classes))
    assert found.holds is holds
    assert found.seen.startswith(f"{word}: Frechet distance ")
    assert f"cover 10 of 10 digits or more, these {classes} or more" in found.seen


def test_the_margin_is_a_tenth_of_fp32s_distance() -> None:
    found = gan.judge(made("fp32"), made("own"))
    assert found.margin == pytest.approx(0.52)
    assert found.interval == (0.0, 0.0)


@pytest.mark.parametrize(
    ("places", "holds"),
    [
        (((17.0, 20.0), (17.0, 19.0)), True),
        (((20.0, 17.0), (19.0, 17.0)), True),
        (((17.0, 20.0), (17.0, 18.9)), False),
        (((17.0, 20.0), (20.0, 17.0)), False),
        (((17.0, 17.0), (17.0, 17.0)), False),
    ],
)
def test_scales_part(places: tuple[tuple[float, float], ...], holds: bool) -> None:
    runs = [made("own", (5.0,), scales=place)[0] for place in places]
    assert gan.scales_part(runs).holds is holds


def test_a_scale_settles_in_the_second_half() -> None:
    run = {"log2_scales": [[16.0] * 6 + [18.0, 18.0, 17.0, 17.0], [16.0] * 5 + [20.0] * 5]}
    assert gan.settled(run) == (17.0, 20.0)


@pytest.mark.parametrize(
    ("skipped", "own", "shared", "holds"),
    [
        (((1, 5, 9), ()), (17.0, 20.0), 17.0, True),
        (((), (1, 5, 9)), (20.0, 17.0), 17.0, True),
        (((1, 5, 9), ()), (17.0, 18.0), 17.0, False),  # the other one is not held back
        (((1, 5, 9), (5,)), (17.0, 20.0), 17.0, False),  # a third of them in both
        (((1, 5), (7,)), (17.0, 20.0), 17.0, False),
        (((), ()), (17.0, 20.0), 17.0, False),  # nothing overflowed
    ],
)
def test_shared_scale_follows_one(
    skipped: tuple[tuple[int, ...], tuple[int, ...]], own: tuple[float, float], shared: float, holds: bool
) -> None:
    found = gan.follows_one(made("shared", scales=(shared, shared), skipped=skipped), made("own", scales=own))
    assert found.holds is holds


def test_back_offs_are_counted_by_network() -> None:
    assert gan.back_offs({"skipped": [[1, 5, 9], [5, 7]]}) == (2, 1, 1)


@pytest.mark.parametrize(
    ("distances", "holds"),
    [(GOOD, False), ((5.1, 5.8, 4.9), False), ((3.0, 3.4, 3.2), False), ((6.0, 6.5, 6.3), True)],
)
def test_shared_scale_costs_quality(distances: tuple[float, ...], holds: bool) -> None:
    shares = [0.01 * k for k in range(25)]
    lost = {"log2_scales": list(range(25)), **{name: {"lost": shares} for name in gan.NETWORKS}}
    own = made("own", scales=(17.0, 20.0))
    found = gan.costs_quality(
        "costs", "worse", made("fp32"), made("shared", distances, scales=(17.0, 17.0)), own, lost
    )
    assert found.holds is holds
    assert found.seen.endswith(
        "0.00% of the generator's activation gradients to zero without a scale, 17.00% at the shared one (2^17) and "
        "20.00% at its own (2^20)."
    )


def test_runs_are_in_the_order_of_their_seeds() -> None:
    runs = [*reversed(made("own")), *made("fp32")]
    assert [run["seed"] for run in gan.by_setting(runs)["own"]] == [0, 1, 2]


def test_frechet_distance_of_normal_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(4000, 3, generator=generator)
    assert frechet(one, one) == pytest.approx(0.0, abs=1e-6)
    shifted = frechet(one, one + torch.tensor([3.0, 0.0, 4.0]))
    assert shifted == pytest.approx(25.0, rel=1e-5)  # the same covariance: the means alone
    variances = one.double().var(dim=0).sum().item()
    assert frechet(one, 3.0 * (one - one.mean(0)) + one.mean(0)) == pytest.approx(4.0 * variances, rel=1e-5)


@pytest.mark.heavy
def test_the_judge_knows_digits_from_noise() -> None:
    images, labels = digits()
    assert (classifier()(images).argmax(1) == labels).float().mean() > 0.98
    halves = frechet(classifier()[:3](images[::2]).detach(), classifier()[:3](images[1::2]).detach())
    assert halves < 1.0
    noise = torch.rand(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert quality(noise)["distance"] > 20.0
    assert quality(images)["classes"] == 10
    assert quality(images[labels < 4])["classes"] == 4


def test_lost_gradients_of_both_networks() -> None:
    torch.manual_seed(0)
    images, _ = digits()
    networks = Discriminator(4), Generator(4)
    found = lost_gradients(networks, images[:8], torch.randn(8, LATENT))
    for network in gan.NETWORKS:
        shares = found[network]["lost"]
        assert len(shares) == len(LOG_SCALES)
        assert shares == sorted(shares, reverse=True)
        assert 0.0 < found[network]["largest"] < 1.0
    assert all(param.grad is None for network in networks for param in network.parameters())


def test_one_layers_lost_gradients_are_fp16s_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    networks = (
        Discriminator(4),
        torch.nn.Sequential(torch.nn.Linear(LATENT, 64), torch.nn.Unflatten(1, (1, 8, 8))),
    )
    noise = 1e-4 * torch.randn(8, LATENT)
    with torch.no_grad():
        for param in networks[0].parameters():
            param.mul_(0.01)  # gradients around the smallest that fp16 has
    found = lost_gradients(networks, digits()[0][:8], noise)["generator"]
    fake = networks[1](noise).detach().requires_grad_()
    generator_loss(networks[0], fake).backward()
    assert fake.grad is not None
    grads = fake.grad[fake.grad != 0]
    for log in (-6, 0, 4, 8, 12):
        zeros = float(((grads * 2.0**log).half() == 0).float().mean())
        assert found["lost"][LOG_SCALES.index(log)] == pytest.approx(zeros, abs=1e-6)
    assert found["lost"][LOG_SCALES.index(0)] > 0.1
    assert found["lost"][-1] < 0.1
    assert found["largest"] == float(grads.abs().max())
    assert found["counted"] == len(grads), "a view's gradient is the same values again"


@pytest.mark.heavy
@pytest.mark.parametrize("name", SETTINGS)
def test_a_tiny_run(name: str) -> None:
    run = train(name, 0, TINY)
    scales = run["log2_scales"]
    assert [len(series) for series in scales] == [12, 12]
    if name == "fp32":
        assert scales == [[0.0] * 12] * 2
        assert run["lost"]["generator"]["largest"] > 0
    elif name == "policies":
        assert scales[0] == [0.0] * 12, "bf16 has no loss scale"
        assert scales[1][4] == 17.0, "and fp16's grew after four good steps"
    else:
        assert (scales[0] == scales[1]) is SETTINGS[name].shared
        assert scales[0][0] == (-14.0 if SETTINGS[name].weight > 1 else 16.0)
    for series, skipped in zip(scales, run["skipped"]):
        for step in skipped[:-1]:
            assert series[step + 1] <= series[step]
    assert run["distance"] > 0
    assert json.loads(json.dumps(run)) == run
    assert len(run["images"][0]) == 8
    assert min(min(line) for image in run["images"] for line in image) >= 0


@pytest.mark.heavy
def test_a_seed_gives_the_same_run_and_the_settings_start_alike() -> None:
    one, again = train("own", 1, TINY), train("own", 1, TINY)
    assert one == again
    other = train("fp32", 1, TINY)
    assert other["untrained"] == one["untrained"]
    assert train("fp32", 2, TINY)["untrained"] != one["untrained"]


@pytest.mark.heavy
@pytest.mark.parametrize("workers", [0, 2])
def test_the_whole_experiment_in_small(workers: int) -> None:
    told: list[float] = []
    size = Size(steps=4, growth_interval=2, width=4, seeds=2)
    outcome = gan.run(Effort(True, lambda _, share: told.append(share)), size=size, workers=workers)
    assert [finding.name for finding in outcome.findings] == [
        "own-scales-as-good",
        "own-policies-as-good",
        "scales-part",
        "shared-scale-follows-one",
        "shared-scale-costs-quality",
        "summed-loss-own-scales-as-good",
        "summed-loss-shared-scale-costs-quality",
    ]
    assert told == [pytest.approx(k / 12) for k in range(13)]
    drawn = figures.draw(EXPERIMENT, json.loads(json.dumps(outcome.numbers, allow_nan=False)))
    assert drawn["figure.png"].startswith(b"\x89PNG")
