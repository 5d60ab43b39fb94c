"""Numbers that a module's own operations make on the way are seen, though no output of a module shows them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.core.range_rules import range_rule
from mezzo.core.sensitivity import UnitFacts
from test_sensitivity import around, probed, result


class Way(nn.Module):
    """A layer, and something done to what it returns."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(16, 16), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def at_most(size: float) -> Callable[[Tensor], Tensor]:
    """To numbers of at most this size, and of this size."""
    return lambda x: (x.tanh() * 0.0 + 1.0) * size * (x - x.detach() + 1.0)


def grown(x: Tensor) -> Tensor:
    return at_most(40000.0)(x) / 40000.0 * x


def in_place(x: Tensor) -> Tensor:
    return (x * 1.0).mul_(0.0).add_(1.0).mul_(40000.0).div_(40000.0) * x


def small(x: Tensor) -> Tensor:
    return at_most(30000.0)(x) / 30000.0 * x


def masked(x: Tensor) -> Tensor:
    away = torch.zeros_like(x).index_fill_(-1, torch.tensor([3]), -40000.0)
    return (x + away).softmax(-1) * x


def mapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.tanh() * 40000.0 / 40000.0)(x)


def beyond(x: Tensor) -> Tensor:
    return x + (x.tanh() * 0.0 + 1.0) * 3e4 * 4.0 * 1e-5 * x


WAYS = {
    "close to the largest": (grown, 40000.0, "mul"),
    "in place": (in_place, 40000.0, "mul"),
    "at half of it": (small, 0.0, ""),
    "hidden by a mask": (masked, 0.0, ""),
    "where no number can be read": (mapped, 0.0, ""),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_a_modules_own_operations_make_is_seen(name: str) -> None:
    then, number, op = WAYS[name]
    units = probed(around(Way(then)), "fp16")
    one = units["1"]
    assert one.inside == pytest.approx(number, rel=0.01)
    assert one.inside_op == op
    assert not one.overflow
    told = range_rule(one, "fp16")
    assert bool(told) is bool(number)
    if number:
        assert told.startswith(
            "a number inside it, 4e+04 of mul, is within a factor of 2 of the largest fp16"
        )
    # The layer inside judges itself.
    assert {path: unit.inside for path, unit in units.items() if path != "1"} == {
        "0": 0,
        "1.layer": 0,
        "2": 0,
    }


def exponential(x: Tensor) -> Tensor:
    """FP32 by its rule; the product after it rounds."""
    large = (x * 0.0 + math.log(40000.0)).exp()
    return (large @ torch.eye(16)) / 40000.0 * x


def test_a_number_that_an_operation_takes_in_fp32_and_rounds_is_seen() -> None:
    one = probed(around(Way(exponential)), "fp16")["1"]
    assert "of what matmul takes, is within a factor of 2" in range_rule(one, "fp16")
    # Then it is the layer's, and not that of the module that makes it in FP32.
    units = probed(around(Feeds()), "fp16")
    assert units["1"].inside == 0.0
    assert 39000.0 < units["1.layer"].inside < 40000.0
    assert units["1.layer"].inside_op == "what linear takes"


class Feeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer((x * 1e-3 + math.log(39000.0)).exp()) * 1e-5
        return out


def test_in_bf16_none_of_these_is_large() -> None:
    assert {unit.inside for unit in probed(around(Way(grown)), "bf16").values()} == {0.0}


def test_of_an_overflow_the_operation_is_named_that_made_the_first() -> None:
    one = probed(around(Way(beyond)), "fp16")["1"]
    assert one.overflow == "output"
    assert range_rule(one, "fp16") == (
        "its output is not finite in fp16, and is in FP32: mul inside it makes the first such number"
    )


def test_a_module_that_calls_one_from_elsewhere_is_measured() -> None:
    """Its path does not lie inside that of the module that calls it."""

    class Borrows(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.others = [other]  # hidden from `named_modules`

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.others[0](x) * 2.0
            return out

    layer = nn.Linear(16, 16)
    found = result(around(layer, Borrows(layer)), "fp16")
    units = {unit.path: unit for unit in found.units}
    assert not units["2"].failed
    assert units["2"].inside == 0.0
    assert math.isfinite(units["2"].roundings[0].squares)


def test_older_measurements_are_read() -> None:
    assert UnitFacts("a", "Linear").inside == 0.0
