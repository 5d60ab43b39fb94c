"""What is recommended from ranges in FP32, by rows of made histograms; and the ranking of modules, from records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mezzo.core.calibration import MOST_LOST, Sensitivity, conclusions, rank, recommend
from mezzo.core.errors import UsageError
from mezzo.core.formats import named
from mezzo.core.loss_scale import DynamicLossScale
from mezzo.core.policy import policy
from mezzo.core.ranges import Histogram, RangeRow
from mezzo.core.records import ModuleRounding, RangesRecord, SensitivityRecord, from_line, to_line


def of(*values: float) -> Histogram:
    """The histogram of some numbers."""
    magnitudes = [abs(value) for value in values if value and math.isfinite(value)]
    exponents = [math.frexp(value)[1] - 1 for value in magnitudes]
    low = min(exponents, default=0)
    counts = np.bincount([e - low for e in exponents]).tolist() if exponents else []
    return Histogram(
        low,
        counts,
        zeros=sum(value == 0 for value in values),
        infinities=sum(math.isinf(value) for value in values),
        nans=sum(math.isnan(value) for value in values),
        largest=max(magnitudes, default=0.0),
    )


def tensor(what: str, name: str = "") -> Callable[..., RangeRow]:
    """Makes rows from a module and the numbers seen in it."""
    return lambda module, *values: RangeRow(module, what, "fp32", of(*values), name)


activation = tensor("activation")
gradient = tensor("activation gradient")
weight = tensor("weight", "weight")
weight_gradient = tensor("weight gradient", "weight")


def steps(*rows: list[RangeRow]) -> list[RangesRecord]:
    return [RangesRecord(i, 0, float(i), 1.0, list(one)) for i, one in enumerate(rows)]


CHAIN = [activation("a", 1.0), activation("b", 2.0), activation("c", 3.0)]
FINE = [*CHAIN, gradient("c", 0.01), gradient("a", 0.01), weight_gradient("a", 0.25)]

FORMATS: list[tuple[set[str], str | None, str, str]] = [
    # native, asked, format, why
    ({"bf16", "fp16"}, None, "bf16", "native here, has FP32's range, and"),
    ({"fp16"}, None, "fp16", "bf16 is not"),
    (set(), None, "fp32", "neither bf16 nor fp16 is native here"),
    ({"bf16"}, "fp16", "fp16", "as asked"),
]


@pytest.mark.parametrize(("native", "asked", "form", "why"), FORMATS)
def test_the_format(native: set[str], asked: str | None, form: str, why: str) -> None:
    found = recommend(steps(FINE), native=native, format=asked)
    assert found.format == form
    assert why in found.why
    assert policy(found.policy).compute == form


SCALES: list[tuple[list[list[RangeRow]], float, float]] = [
    # steps, constant, start
    ([[gradient("a", 1.0)]], 2.0**14, 2.0**14),
    ([[gradient("a", 2.0**-10)], [gradient("a", 2.0**-8)]], 2.0**22, 2.0**22),  # the largest of all steps
    ([[gradient("a", 0.01), weight_gradient("a", 0.9)]], 2.0**15, 2.0**15),  # the weight's is larger
    ([[gradient("a", 0.9), weight_gradient("a", 0.01)]], 2.0**15, 2.0**15),
    ([[gradient("a", 1e-30)]], 2.0**100, 2.0**24),
    ([[gradient("a", 1e30)]], 2.0**-85, 2.0**-14),
    ([[gradient("a", 0.9)], [gradient("a", 0.0)]], 2.0**15, 2.0**15),  # a step without a gradient
]


@pytest.mark.parametrize(("rows", "constant", "start"), SCALES)
def test_the_scales(rows: list[list[RangeRow]], constant: float, start: float) -> None:
    found = recommend(steps(*rows), native={"fp16"})
    assert (found.constant, found.start) == (constant, start)
    machine = policy(found.policy).make_loss_scale()
    assert isinstance(machine, DynamicLossScale)
    assert machine.scale == start


KEPT: list[tuple[list[RangeRow], dict[str, str]]] = [
    # rows beside those that are fine, module -> words of its reason
    ([], {}),
    ([activation("b", 1e6)], {"b": "up to 1e+06, beyond", "c": "may read the output of b"}),
    ([activation("c", 65520.0)], {"c": "beyond"}),
    ([activation("c", 40000.0)], {"c": "returned numbers up to 4e+04, within 2x of"}),
    ([activation("c", 30000.0)], {}),
    ([weight("a", 1e5)], {"a": "has a weight of up to 1e+05"}),
    ([activation("b", math.inf)], {}),  # a mask
    (
        [gradient("a", *[1e-20] * 9)],
        {"a": "fp16 rounds 90% to zero", "b": "computes the output gradient of a"},
    ),
    ([gradient("a", 1e-20)], {}),  # half of them: not more
]


@pytest.mark.parametrize(("rows", "kept"), KEPT)
def test_the_modules_kept(rows: list[RangeRow], kept: dict[str, str]) -> None:
    assert MOST_LOST == 0.5
    found = recommend(steps(FINE, rows), native={"fp16"})
    assert {one.module for one in found.kept} == set(kept)
    for one in found.kept:
        assert kept[one.module] in one.why
        assert one.evidence.histogram.elements
    assert set(policy(found.policy).modules) == {(path, "fp32") for path in kept}
    assert not recommend(steps(FINE, rows), native={"bf16"}).policy.count("module")


def test_as_a_file_as_json_and_as_text(tmp_path: Path) -> None:
    found = recommend(steps(FINE, [*FINE, activation("b", 1e6)]), native={"fp16"})
    path = tmp_path / "policy.toml"
    path.write_text(found.to_toml())
    assert policy(path) == policy(found.policy)
    assert "b (returned numbers up to 1e+06" in found.to_toml()
    assert "masters" not in found.to_toml()
    data = json.loads(found.to_json())
    assert data["policy"] == found.policy
    assert [one["module"] for one in data["kept"]] == ["b", "c"]
    assert data["kept"][0]["evidence"]["histogram"]["largest"] == 1e6
    for words in ("dynamic from 2^16", "Keep in FP32: b (returned numbers up to 1e+06", found.policy):
        assert words in str(found)


def test_a_module_in_which_fp16_overflows_is_kept() -> None:
    sensitive = [row("block", "fp16", math.inf, "mul"), row("a", "fp16"), row("c", "bf16", math.inf, "mul")]
    found = recommend([*steps(FINE), SensitivityRecord(0, 2.0, sensitive)], native={"fp16"})
    assert [(one.module, one.evidence) for one in found.kept] == [("block", None)]
    assert "mul overflows" in found.kept[0].why
    assert "limit" not in found.kept[0].why
    assert policy(found.policy).modules == (("block", "fp32"),)
    bf16 = recommend([*steps(FINE), SensitivityRecord(0, 2.0, [row("a", "bf16", 0.5)])], native={"bf16"})
    assert "module.a=fp32" in bf16.notes[0]  # which the recommended format changes by more than the limit
    # In no module that a policy can name.
    outside = SensitivityRecord(0, 2.0, [row("", "fp16", math.inf, "mul")])
    assert recommend([*steps(FINE), outside], native={"fp16"}).policy == "fp16,op.mul=fp32"


def test_a_module_with_a_finite_change_over_the_limit_is_kept_in_fp16_and_noted_in_bf16() -> None:
    """An infinity that a division turns into 0 leaves a finite change. Rounding to bf16 may average out."""
    absorbed = [row("a", "fp16", 0.5, "mul"), row("a"), row("b", "fp16", 0.4), row("c", "fp16", 1e-4, "mul")]
    made = [*steps(FINE), SensitivityRecord(0, 2.0, absorbed)]
    for native in ("fp16", "bf16"):
        found = recommend(made, native={native})
        assert [one.module for one in found.kept] == ["a", "b"]
        assert all("the limit" in one.why and one.why in " ".join(found.plain) for one in found.kept)
        assert ["mul overflows" in one.why for one in found.kept] == [True, False]
        assert policy(found.policy).modules == ((("a", "fp32"), ("b", "fp32")) if native == "fp16" else ())
    rounded = [row("", "bf16", 0.5), row("a", "bf16", 0.5), row("b", "bf16")]
    found = recommend([*steps(FINE), SensitivityRecord(0, 2.0, rounded)], native={"bf16"})
    assert (found.policy, found.kept) == ("bf16", [])
    assert "in the model, a." in found.notes[0]
    assert "module.a=fp32 " in found.notes[0]
    alone = recommend([*steps(FINE), SensitivityRecord(0, 2.0, rounded[:1])], native={"bf16"})
    assert "FP32 " not in alone.why.partition("loss scale")[2]  # not that none has to stay in FP32
    assert "=fp32" not in alone.notes[0]


# An embedding has gradients for the rows that occurred, and the bias behind an input of zeros has some.
IN_FP16 = [RangeRow("a", "activation", "fp16", of(1.0))]
SPARSE = [*IN_FP16, weight_gradient("embedding", 0.1, *[0.0] * 999), weight_gradient("a", 0.25)]
SILENT = [weight_gradient("b", *[0.0] * 99), tensor("weight gradient", "bias")("b", 0.1)]
HALF = [weight_gradient("b", *[0.0] * 50), tensor("weight gradient", "bias")("b", *[0.1] * 50)]

WATCHED: list[tuple[list[RangeRow], float | None, list[str]]] = [
    (FINE, None, ["fp16 holds all watched tensors at loss scale 2^16; it rounds none of the gradients"]),
    ([*FINE, weight_gradient("b", 1e-12)], 8.0, ["at loss scale 2^3; it rounds 25% of the gradients to zero"]),
    ([*FINE, activation("e", 1e6)], None, ["for fp16 keep e in FP32: it returned numbers up to 1e+06", "bf16 has"]),
    ([replace(one, format="fp16") for one in FINE] + [activation("e", 1e6)], None, ["outside of the modules in FP32"]),
    ([RangeRow("a", "update ratio", "bf16", of(*[1e-5] * 9, 1.0))], None, ["lose 90% of the updates of a"]),
    (CHAIN, None, []),
    (SPARSE, None, ["fp16 holds all watched tensors"]),
    ([*SPARSE, *HALF], None, ["fp16 holds all watched tensors"]),
    ([*SPARSE, *SILENT], None, ["weight gradients of b are exactly 0"]),
    ([*IN_FP16, weight_gradient("b", 0.0)], None, ["weight gradients of b are exactly 0"]),
    ([*SPARSE[1:], *SILENT], None, ["fp16 holds all watched tensors"]),  # a run in FP32
]  # fmt: skip


@pytest.mark.parametrize(("rows", "scale", "words"), WATCHED)
def test_what_is_concluded_from_watched_tensors(
    rows: list[RangeRow], scale: float | None, words: list[str]
) -> None:
    found = conclusions(rows, scale)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found)), found


@pytest.mark.parametrize("rows", [[], [CHAIN], [[gradient("a", 0.0, math.nan)]]])
def test_without_a_gradient_nothing_is_recommended(rows: list[list[RangeRow]]) -> None:
    with pytest.raises(UsageError, match="no gradient was finite and not 0"):
        recommend(steps(*rows), native={"fp16"})


def row(
    module: str, format: str = "bf16", change: float = 1e-4, cause: str = "", near: bool = False
) -> ModuleRounding:
    return ModuleRounding(module, "Linear", format, 0.0, change**2, cause, near)


def ranked(*rows: ModuleRounding) -> Sensitivity:
    formats = [named(name) for name in dict.fromkeys(one.format for one in rows)]
    found = rank([SensitivityRecord(i, 2.0, list(rows)) for i in (0, 5)], formats, 0.01)
    assert found is not None
    return found


def test_the_most_sensitive_is_first_and_a_module_bears_what_is_within_its_share() -> None:
    found = ranked(
        *(row("calm", name, change) for name, change in [("bf16", 1e-4), ("fp16", 1e-5), ("e4m3fn", 8e-3)]),
        row("wide", "bf16", 1e-3),
        row("wide", "fp16", math.inf, "mul"),
        *(row("eight", name, change) for name, change in [("bf16", 2e-3), ("fp16", 1e-4), ("e4m3fn", 0.05)]),
        *(row("odd", name, change) for name, change in [("bf16", 0.5), ("fp16", 0.05), ("e4m3fn", 1.0)]),
        *(row("fine", name, change) for name, change in [("bf16", 2e-4), ("fp16", 3e-4)]),
    )
    assert found.limit == pytest.approx(0.01 * 2.0 / math.sqrt(5))
    assert [(one.module, one.lowest, one.bears) for one in found.modules] == [
        ("odd", "fp32", []),
        ("wide", "bf16", ["bf16"]),
        ("eight", "fp16", ["fp16", "bf16"]),
        ("fine", "bf16", ["bf16", "fp16"]),
        ("calm", "e4m3fn", ["e4m3fn", "fp16", "bf16"]),
    ]
    assert found.modules[1].causes == {"fp16": "mul"}


def test_an_overflow_is_never_shown_as_a_small_change() -> None:
    """Not where a later operation absorbs it, and not in a module that reads it; a policy keeps the module it is in."""
    record = [row("absorbs", "fp16", 0.0, "mul"), row("reads", "fp16", math.inf, "module reads.inner")]
    record += [row("reads.inner", "fp16", math.inf, "linear"), row("over", "fp16", 0.5, "add")]
    found = ranked(
        *record,
        row("reads", "fp16", math.inf, "sub"),
        row("both", "fp16", 1.0, "module both.a"),
        row("near", "fp16", 1e-4, "mul", near=True),
        row("sometimes", "fp16", 1e-4, "mul", near=True),
        row("sometimes", "fp16", 1e-4, "add"),
    )
    table = {module: cell for module, cell in found.table(["fp16"])[1:]}
    assert table == {
        "reads": "overflows in sub",
        "reads.inner": "overflows in linear",
        "absorbs": "overflows in mul",
        "near": "comes within 2x of overflow in mul",
        "sometimes": "overflows in add",
        "over": "0.5 over",
        "both": "1 over",
    }
    assert "marked over" in found.title(["fp16"])
    assert "marked over" not in ranked(row("near", "fp16", 1e-4, "mul", near=True)).title(["fp16"])
    advice = recommend([*steps(FINE), SensitivityRecord(0, 2.0, record)], native={"fp16"}, ranked=["fp16"])
    assert [(one.module, one.op) for one in advice.kept] == [("reads.inner", "linear"), ("over", "add")]
    (told,) = (line for line in advice.plain if line.startswith("Keep in FP32"))
    assert " Later operations absorb an infinity of mul in absorbs, as tanh does" in told
    assert "largest" not in told  # the cell says it
    assert told.endswith("To avoid it, add module.absorbs=fp32.")
    quiet = recommend([*steps(FINE), SensitivityRecord(0, 2.0, record[1:])], native={"fp16"}, ranked=["fp16"])
    assert "absorb" not in " ".join(quiet.plain)


def test_a_ranking_in_json_and_in_a_record_is_strict() -> None:
    record = SensitivityRecord(3, 2.0, [row("a", "fp16", math.inf, "mul")], ["a note"])
    assert from_line(to_line(record)) == record
    found = recommend([*steps(FINE), record], native={"fp16"}, ranked=["fp16"])
    plain = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))["sensitivity"]
    (module,) = plain["modules"]
    told = {"module": "a", "kind": "Linear", "lowest": "fp32", "bears": []}
    assert module == {**told, "changes": {"fp16": "inf"}, "causes": {"fp16": "mul"}, "near": []}
    assert (plain["formats"], plain["steps"]) == (["fp16"], 1)
