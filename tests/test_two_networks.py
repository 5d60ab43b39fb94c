"""Two networks, an optimizer each: a skipped step of one leaves the run that does not have it, in every order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bad_steps import is_finite, same
from moving_buffers import NORMS, OWN
from run_scripts import Ran, launcher
from training_steps import nobody_owns_anything, who_decides  # noqa: F401
from two_networks import LAST, OF_A_SCRIPT, ORDERS, train

OVERFLOWS = ("a", "b", "ab")


SCRIPT = """
import sys
from torch import nn
from two_networks import train
name, bad, left_out = sys.argv[1:]
train(name, bad, lambda: nn.BatchNorm1d(4), separate=False, left_out=left_out == "left out")
"""


Launch = Callable[..., Ran]


@pytest.fixture(name="launch")
def launch_fixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    return launcher(tmp_path, capsys)


def differing(ours: dict[str, Any], left_out: dict[str, Any]) -> list[str]:
    assert ours.keys() == left_out.keys()
    return [name for name in ours if not same(ours[name], left_out[name])]


@pytest.mark.parametrize("bad", OVERFLOWS)
@pytest.mark.parametrize("order", [*ORDERS, *OF_A_SCRIPT])
def test_under_mezzo_run(order: str, bad: str, launch: Launch) -> None:
    def ended(*arguments: str) -> tuple[Ran, dict[str, Any]]:
        ran = launch(SCRIPT, order, bad, *arguments, policy="fp16,loss_scale=128", trace=False)
        assert ran.status == 0, ran.err
        return ran, dict(LAST)

    ran, ours = ended("with them")
    assert [update.moved for update in ran.of("update")] == ours["expected"]
    assert is_finite(ours["state"])
    assert differing(ours["state"], ended("left out")[1]["state"]) == []


@pytest.mark.parametrize("bad", OVERFLOWS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_mixed_precision_each(order: str, bad: str, decides: str) -> None:
    make = lambda: nn.BatchNorm1d(4)  # noqa: E731
    ours = train(order, bad, make, separate=True, left_out=False)
    assert ours.moved == ours.expected
    assert is_finite(ours.state())
    left_out = train(order, bad, make, separate=True, left_out=True)
    assert differing(ours.state(), left_out.state()) == []


@pytest.mark.parametrize("name", [*NORMS, *OWN])
@pytest.mark.parametrize("order", ["kept_over_the_step", "retained"])
def test_every_kind_of_buffer(order: str, name: str) -> None:
    make = {**NORMS, **OWN}[name]
    for bad in ("a", "b", "ab"):
        ours = train(order, bad, make, separate=True, left_out=False)
        left_out = train(order, bad, make, separate=True, left_out=True)
        assert differing(ours.state(), left_out.state()) == [], bad


@pytest.mark.parametrize("order", ["penalty", "retained", "unrelated"])
def test_looking_into_the_skips_changes_nothing(order: str, launch: Launch) -> None:
    """The tracer runs calls again and puts buffers back, while the graph of the other network is alive."""
    for traced in (True, False):
        ran = launch(SCRIPT, order, "ab", "with them", policy="fp16,loss_scale=128", trace=traced)
        assert ran.status == 0, ran.err
        assert "after an error" not in ran.notes
        ours = dict(LAST["state"]) if traced else ours  # noqa: F821
    assert differing(ours, LAST["state"]) == []


SPOILED = """
import sys, torch
from torch import nn
from two_networks import LAST
torch.manual_seed(0)
a, b, c = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)
one, other, third = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (a, b, c))
for step in range(3):
    out = a(torch.randn(8, 4)) * (float("inf") if step == 1 else 1.0)
    with torch.no_grad():
        b(out)
    if sys.argv[1] == "a step between":
        third.zero_grad()
        c(torch.randn(8, 4)).square().mean().backward()
        third.step()
    other.zero_grad()
    b(torch.randn(8, 4)).square().mean().backward()
    other.step()
    one.zero_grad()
    out.square().mean().backward()
    one.step()
LAST["state"] = b.state_dict()
"""


@pytest.mark.parametrize("between", ["nothing", "a step between"])
def test_statistics_spoiled_before_a_good_step_of_their_own_network(between: str, launch: Launch) -> None:
    """Another network's infinite output makes them NaN, its own step is taken, and then that other one's is skipped."""
    ran = launch(SPOILED, between, policy="fp16,loss_scale=128", trace=False)
    assert ran.status == 0, ran.err
    assert [update.moved for update in ran.of("update")].count(False) == 1
    assert is_finite(LAST["state"])
