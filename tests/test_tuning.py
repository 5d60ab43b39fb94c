"""From measurements to a policy: the three rules, the lines, their reasons, and the file."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.core import range_rules, tuning
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.policy import Policy, policy
from mezzo.core.range_rules import range_rule
from mezzo.core.sensitivity import EdgeFacts, Rounding, Sensitivities, UnitFacts
from mezzo.core.tuning import Tuned, tune


def unit(path: str, change: float = 1e-4, fp32: float = 2.0, low: float = 1.0, **more: Any) -> UnitFacts:
    """Times in milliseconds; `change` of the loss, by errors of no common direction."""
    seconds = [[fp32 / 1e3, low / 1e3]] * 6
    return UnitFacts(
        path, "Linear", seconds=seconds, **{"roundings": [Rounding(0.0, change**2, change)], **more}
    )


def edge(
    producer: str, consumer: str, milliseconds: float = 0.01, change: float = 0.0, **more: Any
) -> EdgeFacts:
    facts = {"casts": True, "roundings": [Rounding(0.0, change**2, change)], **more}
    return EdgeFacts(producer, consumer, 100, milliseconds / 1e3, **facts)


def measured(
    *units: UnitFacts, edges: tuple[EdgeFacts, ...] = (), fmt: str = "bf16", **more: Any
) -> Sensitivities:
    return Sensitivities(fmt, "Model", "cpu", [2.0, 2.0], units=list(units), edges=list(edges), **more)


def reason(tuned: Tuned, module: str) -> str:
    return next(choice.reason for choice in tuned.choices if choice.module == module)


def test_nothing_against_it_is_the_preset() -> None:
    tuned = tune(measured(unit("a"), unit("b")))
    assert tuned.policy == Policy("bf16")
    assert tuned.change == pytest.approx(math.sqrt(2) * 1e-4)
    assert (tuned.seconds, tuned.preset_seconds, tuned.fp32_seconds) == pytest.approx((2e-3, 2e-3, 4e-3))
    assert "[modules]" not in tuned.to_toml()
    assert reason(tuned, "a") == "changes the loss by about 0.0001; saves 1 ms a step"


def test_a_fragile_module_stays_in_fp32_and_the_rest_does_not() -> None:
    tuned = tune(measured(unit("a"), unit("fragile", change=0.5), unit("b"), fmt="fp16"))
    assert str(tuned.policy) == "fp16,module.fragile=fp32"
    assert reason(tuned, "fragile") == "would change the loss by about 0.5, more than the margin of 0.01"
    assert tuned.preset_change == pytest.approx(0.5, rel=1e-3)
    assert tune(measured(unit("fragile", change=0.5)), margin=0.3).policy == Policy("bf16")


def test_small_changes_add_up_to_the_margin_and_no_further() -> None:
    """A hundred of 2e-3 are 2e-2 together: a quarter of them fits into 1e-2."""
    tuned = tune(measured(*(unit(f"m{i}", change=2e-3) for i in range(100))))
    lowered = [choice for choice in tuned.choices if choice.format == "bf16"]
    assert len(lowered) == 25
    assert tuned.change <= 0.01 * (1 + 1e-9)
    kept = next(choice for choice in tuned.choices if choice.format == "fp32")
    assert "with what the others take, more than the margin" in kept.reason


RULES = {
    "fails": ({"failed": "RuntimeError: no"}, "fp16", "it fails in fp16: RuntimeError: no"),
    "overflows": ({"overflow": "output"}, "fp16", "its output is not finite in fp16, and is in FP32"),
    "input": ({"overflow": "input"}, "fp16", "an input of it is not finite in fp16, and is in FP32"),
    "no number": ({"roundings": [Rounding(math.nan, 0.0, 0.0)]}, "fp16", "to the loss in fp16 is not finite"),
    "no gradient": ({"gradient_errors": [math.nan] * 3}, "fp16", "its gradients in fp16 are not finite"),
    "mostly none": ({"gradient_errors": [0.0, math.nan, math.nan]}, "bf16", "its gradients in bf16 are not"),
    "backward": ({"overflow": "gradient"}, "fp16", "at any loss scale"),
    "close": (
        {"largest": 33000.0},
        "fp16",
        "3.3e+04, is within a factor of 2 of the largest fp16 number, 65504",
    ),
    "gradients": ({"gradient_errors": [0.0, 0.3, 0.3]}, "fp16", "its gradients in fp16 are 30% off FP32's"),
    "fits": ({"largest": 32000.0}, "fp16", ""),
    "wide": ({"largest": 1e30}, "bf16", ""),
    "one bad step": ({"gradient_errors": [0.001, 0.3, 0.002]}, "bf16", ""),
}


@pytest.mark.parametrize("name", RULES)
def test_range_rules(name: str) -> None:
    facts, fmt, told = RULES[name]
    one = unit("odd", **facts)
    found = range_rule(one, fmt)
    assert told in found
    assert bool(told) == bool(found)
    tuned = tune(measured(unit("a"), one, fmt=fmt))
    assert tuned.policy == Policy(fmt, modules={"odd": "fp32"} if told else ())
    broken = bool({"failed", "overflow", "roundings"} & set(facts))
    assert math.isinf(tuned.preset_change) is broken


def test_both_ends_of_a_number_too_large_stay() -> None:
    units = (unit("a"), unit("b"), unit("c"))
    tuned = tune(measured(*units, edges=(edge("a", "b", largest=1e5), edge("b", "c")), fmt="fp16"))
    assert str(tuned.policy) == "fp16,module.a=fp32,module.b=fp32"
    assert reason(tuned, "a") == "it hands b a number of 1e+05, beyond the largest fp16 number, 65504"
    assert reason(tuned, "b") == "it takes a number of 1e+05, beyond the largest fp16 number, 65504, from a"
    near = tune(measured(*units, edges=(edge("a", "b", largest=4e4, casts=False),), fmt="fp16"))
    assert str(near.policy) == "fp16,module.a=fp32"  # b takes it as it comes
    assert "of 4e+04, within a factor of 2 of the largest" in reason(near, "a")
    endless = [Rounding(math.inf, math.inf, math.inf)]
    cast = tune(measured(*units, edges=(edge("a", "b", roundings=endless),), fmt="fp16"))
    assert str(cast.policy) == "fp16,module.b=fp32"
    assert math.isinf(cast.preset_change)


def test_a_loss_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="the loss is not finite in FP32"):
        tune(Sensitivities("fp16", losses=[1.0, math.nan], units=[unit("a")]))


def test_one_line_says_that_a_module_stays_with_all_inside_it_and_counts_them() -> None:
    paths = ("block.inner", "block.inner.deep", "block.other")
    units = [unit(path, change=1.0) for path in paths]
    block = unit("block", change=1.0, inner=["block.inner", "block.other"])
    tuned = tune(measured(*units, block, unit("c"), unit("alone", change=1.0)))
    assert str(tuned.policy) == "bf16,module.alone=fp32,module.block=fp32"
    assert reason(tuned, "block").endswith(" margin of 0.01; with it 3 modules inside it that stay too")
    assert reason(tuned, "block.inner").endswith(" margin of 0.01")
    assert "inside" not in reason(tuned, "alone")
    assert tuned.to_toml().count('= "fp32"') == 2
    one = tune(measured(unit("block.inner", change=1.0), unit("block", change=1.0), unit("c")))
    assert reason(one, "block").endswith("; with it 1 module inside it that stays too")


TREE = ("a", "a.b", "a.b.c", "a.b.d", "a.e.f", "g", "g.h.i", "g.h.i.j", "")


@given(st.fixed_dictionaries({path: st.booleans() for path in TREE}))
def test_the_lines_give_each_module_the_format_that_was_chosen_for_it(fragile: dict[str, bool]) -> None:
    """What runs inside a module follows it, unless a line of its own says otherwise."""
    tuned = tune(measured(*(unit(path, change=1.0 if fragile[path] else 1e-6) for path in TREE)))
    chosen = {choice.module: choice.format for choice in tuned.choices}
    assert chosen == {path: "fp32" if fragile[path] else "bf16" for path in TREE} or tuned.policy.is_fp32
    for path, format in chosen.items():
        pieces = path.split(".") if path else []
        around = [".".join(pieces[:length]) for length in range(len(pieces), 0, -1)]
        lines = [found for one in around if (found := tuned.policy.format_for_module(one))]
        assert (lines or [tuned.policy.compute])[0] == format, path


def test_a_module_that_16_bits_slow_down_stays_if_that_is_worth_a_line() -> None:
    tuned = tune(measured(unit("a"), unit("slow", fp32=1.0, low=2.0)))
    assert str(tuned.policy) == "bf16,module.slow=fp32"
    assert reason(tuned, "slow") == "takes 1 ms a step longer in bf16"
    assert tune(measured(unit("a", fp32=200.0, low=100.0), unit("slow", fp32=1.0, low=1.5))).policy == Policy(
        "bf16"
    )


def test_casts_that_cost_more_than_a_module_saves_are_not_made() -> None:
    units = (unit("a", change=1.0), unit("b", fp32=2.0, low=1.0), unit("c", change=1.0), unit("d", fp32=9.0))
    apart = (edge("a", "b", 0.6), edge("b", "c", 0.6))
    assert str(tune(measured(*units, edges=apart)).policy) == "bf16,module.a=fp32,module.b=fp32,module.c=fp32"
    assert "casts to and from" in reason(tune(measured(*units, edges=apart)), "b")
    near = (edge("a", "b", 0.4), edge("b", "c", 0.4))
    assert str(tune(measured(*units, edges=near)).policy) == "bf16,module.a=fp32,module.c=fp32"


def test_where_nothing_is_gained_it_is_fp32() -> None:
    tuned = tune(measured(unit("a", fp32=1.0, low=3.0)))
    assert tuned.policy == Policy("fp32")
    assert "nothing is gained" in tuned.to_toml()


def test_for_memory_times_count_for_nothing() -> None:
    slow = measured(unit("a", fp32=1.0, low=3.0), unit("fragile", change=1.0), unit("b", fp32=1.0, low=9.0))
    tuned = tune(slow, goal="memory")
    assert str(tuned.policy) == "bf16,module.fragile=fp32"
    assert tuned.seconds > tuned.fp32_seconds


def test_a_models_own_arithmetic_decides_the_policys_own_format() -> None:
    """No pattern names the model itself: where its own arithmetic stays in FP32, the others have lines."""
    units = (unit("a"), unit("b"), unit("", change=1.0, fp32=5.0, low=4.0, inner=["a", "b"]))
    tuned = tune(measured(*units))
    assert tuned.policy == Policy("fp32", modules={"a": "bf16", "b": "bf16"})
    assert 'compute = "fp32"  # the model itself: would change the loss' in tuned.to_toml()


def test_a_module_inside_one_that_stays_has_a_line_of_its_own() -> None:
    units = (unit("block.inner"), unit("block", change=1.0, fp32=4.0, low=2.0, inner=["block.inner"]))
    assert tune(measured(*units)).policy == Policy("bf16", modules={"block": "fp32", "block.inner": "bf16"})


def test_a_modules_own_time_is_without_that_of_the_modules_inside() -> None:
    units = (unit("block.inner", fp32=5.0, low=3.0), unit("block", fp32=5.0, low=4.0, inner=["block.inner"]))
    tuned = tune(measured(*units))
    assert tuned.preset_seconds == pytest.approx(4e-3)
    assert tuned.fp32_seconds == pytest.approx(7e-3)


def test_a_region_for_a_module_inside_another_takes_time() -> None:
    """A child that must stay in FP32 takes the block around it along if its region costs more than that saves."""
    units = (
        unit("a", fp32=90.0, low=45.0),
        unit("block.inner", change=1.0, calls=1),
        unit("block", fp32=3.0, low=2.9, inner=["block.inner"]),
    )
    free = tune(measured(*units))
    assert str(free.policy) == "bf16,module.block.inner=fp32"
    dear = tune(measured(*units, region_seconds=0.5e-3))
    assert str(dear.policy) == "bf16,module.block=fp32"


@pytest.mark.parametrize("path", ["heads.a b", "heads.x=(1, 'y')[0]", "heads.#1"])
def test_a_name_that_no_pattern_can_hold_is_matched_all_the_same(path: str, tmp_path: Path) -> None:
    tuned = tune(measured(unit("a"), unit(path, change=1.0)))
    assert tuned.policy.format_for_module(path) == "fp32"
    file = tmp_path / "policy.toml"
    file.write_text(tuned.to_toml())
    assert policy(file) == tuned.policy


def test_what_was_unseen_is_said() -> None:
    tuned = tune(measured(unit("a"), replace(unit("frozen"), unseen=True), notes=["a note"]))
    assert tuned.notes[0] == "a note"
    assert "no gradient was seen at frozen" in tuned.notes[1]
    assert "its error could not be weighed" in reason(tuned, "frozen")


CASES = {
    "preset": measured(unit("a")),
    "fp32": measured(unit("a", fp32=1.0, low=3.0)),
    "root": measured(unit("a"), unit("", change=1.0, inner=["a"]), fmt="fp16"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_file_reads_back_as_the_policy(name: str, tmp_path: Path) -> None:
    tuned = tune(CASES[name])
    path = tmp_path / "policy.toml"
    path.write_text(tuned.to_toml())
    assert policy(path) == tuned.policy


def test_every_line_of_the_file_has_its_reason(tmp_path: Path) -> None:
    tuned = tune(measured(unit("a"), unit("blocks.0", change=1.0), unit("b", failed='E: "x"\\ \n# = [y]')))
    path = tmp_path / "policy.toml"
    path.write_text(tuned.to_toml())
    assert policy(path) == tuned.policy == Policy("bf16", modules={"b": "fp32", "blocks.0": "fp32"})
    lines = [line for line in tuned.to_toml().splitlines() if "=" in line and not line.startswith("#")]
    assert len(lines) == 3
    assert all("  # " in line for line in lines)
    assert '"b" = "fp32"  # it fails in bf16: E: "x"\\  # = [y]' in tuned.to_toml()


@pytest.mark.parametrize(
    ("error", "keywords", "told"),
    [
        (UsageError, {"margin": 0.0}, "margin 0: give a share"),
        (UsageError, {"margin": 1.0}, "margin 1: give a share"),
        (UnknownNameError, {"goal": "tme"}, "Did you mean 'time'"),
    ],
)
def test_what_is_out_of_range_is_refused(error: type[Exception], keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(error, match=told):
        tune(measured(unit("a")), **keywords)


def test_no_measurement_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing was measured"):
        tune(measured())


def test_the_examples_hold() -> None:
    assert doctest.testmod(tuning).failed == 0
    assert doctest.testmod(range_rules) == (0, 1)
