"""Two networks, an optimizer each: a skipped step of one leaves the run that does not have it, in every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bad_steps import is_finite, same
from run_scripts import Ran
from two_networks import LAST, OF_A_SCRIPT, ORDERS, train

OVERFLOWS = ("a", "b", "ab")


SCRIPT = """
import sys, torch
from two_networks import train
name, bad, left_out = sys.argv[1:]
train(name, bad, separate=False, left_out=left_out == "left out")
"""

Launch = Callable[..., Ran]


def differing(ours: dict[str, Any], left_out: dict[str, Any]) -> list[str]:
    assert ours.keys() == left_out.keys()
    return [name for name in ours if not same(ours[name], left_out[name])]


@pytest.mark.parametrize("bad", OVERFLOWS)
@pytest.mark.parametrize("order", [*ORDERS, *OF_A_SCRIPT])
def test_under_mezzo_run(order: str, bad: str, launch: Launch) -> None:
    def ended(*arguments: str) -> tuple[Ran, dict[str, Any]]:
        ran = launch(SCRIPT, order, bad, *arguments, policy="fp16,loss_scale=128", trace=False).ok
        return ran, dict(LAST)

    ran, ours = ended("with them")
    assert [update.moved for update in ran.of("update")] == ours["expected"]
    assert is_finite(ours["state"])
    assert differing(ours["state"], ended("left out")[1]["state"]) == []


@pytest.mark.parametrize("bad", OVERFLOWS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_mixed_precision_each(order: str, bad: str, decides: str) -> None:
    ours = train(order, bad, separate=True, left_out=False)
    assert ours.moved == ours.expected
    assert is_finite(ours.state())
    left_out = train(order, bad, separate=True, left_out=True)
    assert differing(ours.state(), left_out.state()) == []


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
    ran = launch(SPOILED, between, policy="fp16,loss_scale=128", trace=False).ok
    assert [update.moved for update in ran.of("update")].count(False) == 1
    assert is_finite(LAST["state"])
