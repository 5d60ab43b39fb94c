"""The doctor's parts: GPUs as data, timing in turns, the recommendation as a table, and one small real
measurement."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import pytest
import torch

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.doctor import gpus, measure, recommend
from mezzo.doctor.gpus import ARCHITECTURES, MODELS, GpuModel, find, formats_at, parse_capability
from mezzo.doctor.recommend import from_capability, from_rates
from mezzo.doctor.timing import Timing, take_turns
from mezzo.pytorch.machine import cuda_formats

FORMATS_AT = [
    ((6, 0), ()),
    ((7, 0), ("fp16",)),
    ((7, 5), ("fp16",)),
    ((8, 0), ("fp16", "tf32", "bf16")),
    ((8, 6), ("fp16", "tf32", "bf16")),
    ((8, 9), ("fp16", "tf32", "bf16", "fp8")),
    ((9, 0), ("fp16", "tf32", "bf16", "fp8")),
    ((10, 0), ("fp16", "tf32", "bf16", "fp8", "fp4")),
    ((12, 0), ("fp16", "tf32", "bf16", "fp8", "fp4")),
]


@pytest.mark.parametrize(("capability", "formats"), FORMATS_AT)
def test_formats_by_capability(capability: tuple[int, int], formats: tuple[str, ...]) -> None:
    assert formats_at(capability) == formats


def test_the_doctor_and_the_machine_agree_on_16_bits() -> None:
    for capability in ARCHITECTURES:
        assert cuda_formats(capability) == {"bf16", "fp16"} & set(formats_at(capability))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_datasheet_row_is_complete_and_plausible(model: GpuModel) -> None:
    assert model.capability in ARCHITECTURES
    assert set(model.peaks) - {"fp32"} == set(formats_at(model.capability))
    assert model.source.startswith("NVIDIA")
    assert any(str(year) in model.source for year in range(2017, 2027))
    peaks = model.peaks
    assert peaks["fp16"] > peaks["fp32"]
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
        assert peaks["fp32"] <= peaks["tf32"] <= peaks["bf16"] / 2 * 1.02
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["fp16"], rel=0.02)
    assert 8 <= model.memory_gb <= 300
    assert 300 <= model.bandwidth <= 8000


FOUND = [
    ("T4", ["T4"]),
    ("Tesla T4", ["T4"]),
    ("NVIDIA A100-SXM4-80GB", ["A100-SXM4-80GB"]),
    ("a100", ["A100-PCIE-40GB", "A100-SXM4-40GB", "A100 80GB PCIe", "A100-SXM4-80GB"]),
    ("NVIDIA GeForce RTX 4090", ["GeForce RTX 4090"]),
    ("rtx4090", ["GeForce RTX 4090"]),
    ("L4", ["L4"]),
    ("l40", ["L40"]),
    ("H100", ["H100 PCIe", "H100 80GB HBM3"]),
    ("H100 SXM", ["H100 80GB HBM3"]),
    ("v100", ["V100-PCIE", "V100-SXM2"]),
]


@pytest.mark.parametrize(("name", "models"), FOUND)
def test_a_gpu_is_found_as_people_write_it(name: str, models: list[str]) -> None:
    assert [model.name for model in find(name)] == models
    assert len({model.capability for model in find(name)}) == 1


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: find("RTX 4095"), "unknown GPU 'RTX 4095'."),
    (lambda: find("RTX 4095"), "Did you mean 'RTX 4090'?"),
    (lambda: find(""), "unknown GPU ''."),
    (lambda: parse_capability("8.1"), "unknown compute capability '8.1'."),
    (
        lambda: parse_capability("sm_80"),
        "'sm_80' is no compute capability: write major.minor, one of 5.0, 5.2",
    ),
    (lambda: parse_capability("8"), "'8' is no compute capability"),
    (lambda: parse_capability("-8.0"), "'-8.0' is no compute capability"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_name_is_told_how_to_mend_it(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value, UnknownNameError) is ("is no" not in message)


def test_capabilities_are_read() -> None:
    assert parse_capability(" 7.5 ") == (7, 5)
    assert parse_capability("10.0") == (10, 0)


class Clock:
    """A clock that tasks move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def task(self, *lengths: float) -> Callable[[], None]:
        left = list(lengths)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_tasks_take_turns_until_the_budget_is_spent() -> None:
    clock, order = Clock(), []

    def noted(name: str, task: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            task()

        return run

    told: list[float] = []
    short, long = noted("short", clock.task(9.0, 1.0, 2.0, 3.0, 1.0)), noted("long", clock.task(2.0))
    timings = take_turns(
        [short, long], budget=28.0, synchronize=lambda: None, least=2, most=10, tell=told.append, clock=clock
    )
    assert order[:6] == ["short", "long"] + ["short", "long"] * 2
    assert timings[0].seconds[:3] == (1.0, 2.0, 3.0)  # the first run, 9.0, is not among them
    assert set(timings[1].seconds) == {2.0}
    assert len(timings[0].seconds) == len(timings[1].seconds) == 9
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] <= 1


def test_a_slow_task_runs_once_more_and_a_quick_one_not_for_ever() -> None:
    clock = Clock()
    quick, slow = take_turns(
        [clock.task(0.001), clock.task(5.0)],
        budget=3.0,
        synchronize=lambda: None,
        least=3,
        most=7,
        clock=clock,
    )
    assert len(slow.seconds) == 1
    assert len(quick.seconds) == 3
    (alone,) = take_turns([clock.task(0.001)], budget=3.0, synchronize=lambda: None, most=7, clock=clock)
    assert len(alone.seconds) == 7


def test_the_device_is_waited_for_inside_the_time() -> None:
    clock = Clock()
    (timing,) = take_turns([lambda: None], budget=1.0, synchronize=clock.task(0.5), clock=clock)
    assert set(timing.seconds) == {0.5}


def test_a_task_that_cannot_run_says_why() -> None:
    def broken() -> None:
        raise RuntimeError("could not create a primitive\nand more")

    def silent() -> None:
        raise NotImplementedError

    first, second, third = take_turns([broken, silent, lambda: None], budget=0.01, synchronize=lambda: None)
    assert first == Timing((), "could not create a primitive")
    assert second == Timing((), "NotImplementedError")
    assert third.seconds
    assert math.isnan(first.median)
    assert all(map(math.isnan, first.spread))


def test_the_spread_is_the_middle_half() -> None:
    assert Timing((5.0, 1.0, 3.0, 2.0, 4.0)).spread == (2.0, 4.0)
    assert Timing((5.0, 1.0, 3.0, 2.0, 4.0)).median == 3.0
    assert Timing((3.0, 1.0, 2.0)).spread == (1.0, 3.0)
    rate = measure.Rate("matmul", "bf16", 6.0, Timing((1.0, 2.0, 3.0)))
    assert rate.value == 3.0
    assert rate.spread == (2.0, 6.0)
    assert rate.unit == "GFLOP/s"
    assert measure.unsteady([rate])
    assert not measure.unsteady([measure.Rate("copy", "fp32", 1.0, Timing((1.0, 1.1)))])
    assert not measure.unsteady([measure.Rate("copy", "fp32", 1.0, Timing((), "no"))])


NAN = float("nan")
# (matmul, conv step) rates of fp32, bf16, fp16; native formats; the precision; what a reason must say
RATES = [
    ((199, 100), (441, 190), (1.5, 1.2), {"bf16"}, "bf16", "matrix products run 2.22 times as fast"),
    ((199, 100), (441, 190), (1.5, 1.2), {"bf16"}, "bf16", "fp16: the CPU does not train in fp16 natively"),
    ((130, 80), (74, 64), (129, 0.5), {"bf16"}, "fp32", "matrix products run 1.76 times as slow"),
    ((130, 80), (74, 64), (129, 0.5), {"bf16"}, "fp32", "a convolution's training step 160 times as slow"),
    ((130, 80), (74, 64), (129, 0.5), {"bf16"}, "fp32", "16 bits would save memory here, but no time"),
    ((8, 4), (3, 2), (60, 20), {"fp16"}, "fp16", "Mezzo scales the loss"),
    ((60, 30), (900, 400), (900, 410), {"bf16", "fp16"}, "bf16", "bf16 comes before fp16"),
    (
        (60, 30),
        (62, 31),
        (900, 410),
        {"bf16", "fp16"},
        "fp16",
        "bf16: the CPU has bf16, but gains too little",
    ),
    (
        (60, 30),
        (900, 3),
        (900, 410),
        {"bf16", "fp16"},
        "fp16",
        "a convolution's training step 10 times as slow",
    ),
    ((60, 30), (NAN, NAN), (NAN, NAN), set(), "fp32", "nor can PyTorch run it there"),
    ((60, 30), (90, NAN), (NAN, NAN), {"bf16"}, "fp32", "training step not at all"),
]


@pytest.mark.parametrize(("fp32", "bf16", "fp16", "native", "precision", "words"), RATES)
def test_the_recommendation_follows_from_the_rates(
    fp32: tuple[float, float],
    bf16: tuple[float, float],
    fp16: tuple[float, float],
    native: set[str],
    precision: str,
    words: str,
) -> None:
    rates = {
        (what, form): row[column]
        for form, row in {"fp32": fp32, "bf16": bf16, "fp16": fp16}.items()
        for column, what in enumerate(("matmul", "conv step"))
    }
    found = from_rates(rates, native, device="the CPU")
    assert found.precision == precision
    assert words in " ".join(found.reasons)
    assert {"bf16", "fp16"} <= {reason.split(":")[0] for reason in found.reasons}


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_the_recommendation_by_capability(capability: tuple[int, int]) -> None:
    found = from_capability(capability)
    expected = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    assert found.precision == expected
    assert "{}.{}".format(*capability) in found.reasons[0]


TINY = measure.Sizes(side=32, batch=1, image=4, copy_bytes=4096)


def test_a_cpu_is_measured_in_every_format_and_nothing_is_left_changed() -> None:
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
    told: list[float] = []
    rates = measure.measure("cpu", sizes=TINY, budget=0.01, tell=told.append)
    cells = {(rate.what, rate.format): rate for rate in rates}
    assert len(cells) == len(rates) == 10
    for what in ("matmul", "conv step"):
        for form in ("fp32", "bf16", "fp16"):
            assert cells[what, form].value > 0
            low, high = cells[what, form].spread
            assert low <= cells[what, form].value <= high
        assert "no fast tf32 path" in cells[what, "tf32"].timing.reason
    assert cells["matmul", "fp32"].work == pytest.approx(2 * 32**3 / 1e9)
    assert cells["copy", "fp32"].work == pytest.approx(2 * 4096 / 1e9)
    assert cells["copy", "fp32"].unit == "GB/s"
    assert math.isnan(cells["matmul", "e4m3fn"].value)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before  # type: ignore[attr-defined]
    assert told[-1] == pytest.approx(1.0)


def test_tf32_is_on_only_inside_and_only_when_asked() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision  # type: ignore[attr-defined]
    for precision in ("tf32", "ieee"):
        with measure.fp32_precision(precision):
            assert matmul.fp32_precision == precision  # type: ignore[attr-defined]
        assert matmul.fp32_precision == before  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), measure.fp32_precision("tf32"):
        1 / 0
    assert matmul.fp32_precision == before  # type: ignore[attr-defined]


def test_a_format_without_a_fast_path_is_measured_on_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PROBE", measure.Sizes(side=16, batch=1, image=2, copy_bytes=4096))
    monkeypatch.setattr(measure, "_SLOW_RUN", 0.0)
    cells = {(rate.what, rate.format): rate for rate in measure.measure("cpu", sizes=TINY, budget=0.01)}
    assert cells["matmul", "bf16"].work == pytest.approx(2 * 16**3 / 1e9)


@pytest.mark.parametrize("module", [gpus, recommend], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_are_true(module: object) -> None:
    failed, _ = doctest.testmod(module)  # type: ignore[arg-type]
    assert failed == 0
