"""Two networks, an optimizer each: a skipped step of one leaves the run that does not have it, in every order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bad_steps import is_finite, same
from launching import Ran, launcher
from moving_buffers import NORMS, OWN
from training_steps import nobody_owns_anything, who_decides  # noqa: F401
from two_networks import LAST, OF_A_SCRIPT, ORDERS, train

OVERFLOWS = ("", "a", "b", "ab")
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
