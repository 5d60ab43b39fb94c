"""A skipped step leaves no trace in buffers: each normalisation, modules that keep averages, a GAN's other network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from bad_steps import INF, RUNS, is_finite, same
from moving_buffers import NORMS, OWN, Averages, in_place
from training_steps import nobody_owns_anything, who_decides  # noqa: F401

RUN = [*RUNS, "ggggbgbbg"]


def network(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2))


def ended(run: str, make: Callable[[], nn.Module], **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model after a run, and everything that it and the optimizer hold. A bad batch is one of large numbers."""
    model = network(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=128, **arguments)
    good, moved = 0, []
    for event in run:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(good))
        with mp.autocast():
            loss = model(x * (INF if event == "b" else 1.0)).float().square().mean()
        moved.append(mp.step(loss).moved)
        good += event == "g"
    assert moved == [event == "g" for event in run]
    mp.close()
    state = {
        "parameters": dict(model.named_parameters()),
        "buffers": {name: b for m, module in model.named_modules() for name, b in _buffers(m, module)},
        "optimizer": optimizer.state_dict(),
    }
    return model, state


def _buffers(prefix: str, module: nn.Module) -> list[tuple[str, Any]]:
    return [(f"{prefix}.{name}", buffer) for name, buffer in module._buffers.items()]


@pytest.mark.parametrize("run", RUN)
@pytest.mark.parametrize("name", [*NORMS, *OWN])
def test_no_trace(name: str, run: str, decides: str) -> None:
    make = {**NORMS, **OWN}[name]
    _, ours = ended(run, make)
    _, clean = ended(run.replace("b", ""), make)
    for part in clean:
        assert same(ours[part], clean[part]), part
    del clean["buffers"]
    assert is_finite(clean)


def adversaries(accumulate: int = 1) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(0)
    maker = nn.Linear(4, 4)
    judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Averages(in_place), nn.Linear(4, 1))
    making, judging = (
        mezzo.MixedPrecision(
            each,
            torch.optim.AdamW(each.parameters(), fused=True),
            "fp16",
            loss_scale=128,
            trace=False,
            accumulate=losses,
        )
        for each, losses in ((maker, accumulate), (judge, 1))
    )
    return maker, judge, making, judging


def judged(judge: nn.Module, region: Any, made: Callable[[], Tensor], factor: float = 1.0) -> Tensor:
    with region.autocast():
        return judge(made() * factor).float().square().mean()


@pytest.mark.parametrize("run", RUNS)
def test_a_generator_s_skipped_step_leaves_no_trace_in_its_discriminator(run: str, decides: str) -> None:
    """The generator's loss comes through the discriminator, in the generator's region alone."""

    def end(run: str) -> dict[str, Any]:
        maker, judge, making, judging = adversaries()
        good = 0
        for event in run:
            noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(good))
            if event == "g":
                assert judging.step(judged(judge, judging, lambda: maker(noise))).moved  # noqa: B023
            factor = INF if event == "b" else 1.0
            result = making.step(judged(judge, making, lambda: maker(noise), factor))  # noqa: B023
            assert result.skipped == (event == "b")
            good += event == "g"
        making.close()
        judging.close()
        return {"judge": judge.state_dict(), "maker": maker.state_dict()}

    assert same(end(run), end(run.replace("b", "")))


def test_what_the_other_network_did_itself_meanwhile_stays() -> None:
    """A window of two losses of the generator, between which the discriminator takes a step of its own."""
    maker, judge, making, judging = adversaries(accumulate=2)
    noise = torch.randn(8, 4)
    for _ in range(4):
        making.step(judged(judge, making, lambda: maker(noise)))
    making.step(judged(judge, making, lambda: maker(noise)))
    assert judging.step(judged(judge, judging, lambda: maker(noise).detach())).moved
    after = {name: buffer.clone() for name, buffer in judge.named_buffers()}
    bad = judged(judge, making, lambda: maker(noise)) * INF
    assert making.step(bad).skipped
    assert same(dict(judge.named_buffers()), after)

    # What is no longer finite goes back as far as it must.
    making.step(judged(judge, making, lambda: maker(noise)))
    assert judging.step(judged(judge, judging, lambda: maker(noise).detach())).moved
    assert making.step(judged(judge, making, lambda: maker(noise), INF)).skipped
    assert is_finite(dict(judge.named_buffers()))
