"""The reference of the whole step: against scalar arithmetic, against PyTorch's optimizers, and what it must not do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import patterns
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, reference
from mezzo.pytorch.kernels.optimizer_step.formulas import STEP, WEIGHT, noise_key
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master, groups, load_state
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.optim.optimizers import adam_hyper, lion_hyper, sgd_hyper

MAKE: dict[str, Callable[..., Hyper]] = {"adam": adam_hyper, "sgd": sgd_hyper, "lion": lion_hyper}
ADAM = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "decoupled": True}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adam", ADAM),
    "adam": ("adam", {**ADAM, "beta1": 0.8, "weight_decay": 0.1, "decoupled": False, "maximize": True}),
    "adam without decay": ("adam", {**ADAM, "beta1": 0.0, "weight_decay": 0.0, "decoupled": False}),
    "sgd": ("sgd", SGD),
    "sgd with momentum": ("sgd", {**SGD, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": ("sgd", {**SGD, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
    "lion": ("lion", LION),
    "lion, maximized": ("lion", {**LION, "beta1": 0.95, "weight_decay": 0.0, "maximize": True}),
}
HYPERS = {name: MAKE[family](**settings) for name, (family, settings) in SETTINGS.items()}
RULES = pytest.mark.parametrize("rule", sorted(HYPERS))
WEIGHTS = {"own": torch.float32, "fp32": torch.bfloat16, "split": torch.bfloat16}
WEIGHTS |= {"split8": torch.bfloat16, "none": torch.bfloat16, "fp16": torch.float16}
MASTERS = pytest.mark.parametrize("masters", sorted(WEIGHTS))
STATES = pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
STORED_AS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def row(values: Tensor, hyper: Hyper, masters: str = "own", state: str = "fp32", ordinal: int = 0) -> Row:
    """A row of a parameter with these values (those that its weight's format has), which never moved."""
    weight = values.detach().to(WEIGHTS[masters], copy=True, memory_format=torch.preserve_format)
    kept = {"fp32": torch.float32, "fp16": torch.float32, "split": torch.int16, "split8": torch.int8}.get(
        masters
    )
    master = None if kept is None else torch.zeros_like(weight, dtype=kept)
    if kept is torch.float32:
        master = weight.float()
    specs = hyper.states
    return Row(
        weight=weight,
        grad=None,
        masters="fp32" if masters == "fp16" else masters,
        master=master,
        state=state,
        states=tuple(torch.zeros_like(weight, dtype=STORED_AS[state]) for _ in specs),
        scales=tuple(
            torch.zeros(groups(weight.numel()), dtype=torch.bfloat16) if state == "int8" else None
            for _ in specs
        ),
        step=torch.zeros(()),
        ordinal=ordinal,
    )


def master(of: Row) -> Tensor:
    """The FP32 numbers that a row stands for."""
    return decode_master(of.masters, of.weight, of.master)


def move(hyper: Hyper, *rows: Row, **tensors: Tensor) -> None:
    given = {"multiplier": None, "found_inf": None, "overflow": None, **tensors}
    reference.DeviceStepper()([(hyper, rows)], **given)


def bytes_of(*rows: Row) -> list[Any]:
    """Every byte of the rows' tensors."""
    tensors = [t for r in rows for t in (r.weight, r.master, *r.states, *r.scales, r.step) if t is not None]
    return [t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in tensors]


def gradients(count: int, steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-6, 1, count)
    return [torch.randn(count, generator=generator) * scale for _ in range(steps)]


def start(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(99)) * 0.3


# --- scalar arithmetic: Python's, rounded to FP32 after every operation --------------------------------------------


def f(x: float) -> float:
    """To FP32. One FP64 operation and this is one FP32 operation: 53 bits are more than twice 24 and 2."""
    return patterns.to_fp32(x)


def scalar_adam(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    lr, beta1, beta2, decay = h["lr"], h["beta1"], h["beta2"], h["weight_decay"]
    if h["decoupled"]:
        w = f(w * f(1 - lr * decay))
    elif decay:
        g = patterns.fma(f(decay), w, g)
    m = f(s[0] + f(f(1 - beta1) * f(g - s[0])))
    v = f(f(f(beta2) * s[1]) + f(f(f(1 - beta2) * g) * g))
    down = f(f(f(math.sqrt(v)) * f(1 / math.sqrt(1 - beta2**t))) + f(h["eps"]))
    return f(w - f(f(f(lr / (1 - beta1**t)) * m) / down)), [m, v]


def scalar_sgd(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    if h["weight_decay"]:
        g = patterns.fma(f(h["weight_decay"]), w, g)
    if h["momentum"]:
        b = g if t == 1 else patterns.fma(f(1 - h["dampening"]), g, f(f(h["momentum"]) * s[0]))
        g = patterns.fma(f(h["momentum"]), b, g) if h["nesterov"] else b
        s = [b]
    return patterns.fma(-f(h["lr"]), g, w), s


def scalar_lion(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    w = f(w * f(1 - h["lr"] * h["weight_decay"]))
    u = f(f(f(h["beta1"]) * s[0]) + f(f(1 - h["beta1"]) * g))
    w = f(w - f(f(h["lr"]) * ((u > 0) - (u < 0))))
    return w, [f(f(f(h["beta2"]) * s[0]) + f(f(1 - h["beta2"]) * g))]


SCALAR: dict[str, Callable[..., tuple[float, list[float]]]] = {
    "adam": scalar_adam,
    "sgd": scalar_sgd,
    "lion": scalar_lion,
}


@RULES
@pytest.mark.parametrize("scaled", [False, True])
def test_every_bit_is_that_of_scalar_arithmetic(rule: str, scaled: bool) -> None:
    hyper, count = HYPERS[rule], 40
    family, settings = SETTINGS[rule]
    values = start(count)
    values[:3] = torch.tensor([0.0, 1e-40, 1e30])
    ours = row(values, hyper)
    multiplier = torch.tensor(0.37) if scaled else None
    ws, states = values.tolist(), [[0.0] * len(hyper.states)] * count
    for t, grad in enumerate(gradients(count, 4), start=1):
        grad[5] = 0.0
        ours.grad = grad
        move(hyper, ours, **({} if multiplier is None else {"multiplier": multiplier}))
        for i, g in enumerate(grad.tolist()):
            g = f(g * float(multiplier)) if multiplier is not None else g
            g = -g if hyper.maximize else g
            ws[i], states[i] = SCALAR[family](ws[i], g, states[i], t, settings)
        assert ours.weight.tolist() == ws
        assert [s.tolist() for s in ours.states] == [list(column) for column in zip(*states)]
    assert float(ours.step) == 4


# --- masters ---------------------------------------------------------------------------------------------------


@MASTERS
def test_small_steps_are_not_lost(masters: str) -> None:
    hyper = sgd_hyper(1e-3)
    ours = row(torch.ones(20_000), hyper, masters)
    ours.grad = torch.full_like(ours.weight, 1.0)
    for _ in range(20):
        move(hyper, ours)
    assert float(ours.weight.float().mean()) == pytest.approx(0.98, abs=2e-3 if masters != "none" else 1e-3)
    assert float(master(ours).mean()) == pytest.approx(0.98, abs=3e-4 if masters == "none" else 1e-5)


EDITS: dict[str, Callable[[Tensor], object]] = {
    "to zero": lambda w: w.zero_(),
    "to minus zero": lambda w: w.fill_(-0.0),
    "clamped": lambda w: w.clamp_(-0.1, 0.1),
    "copied into": lambda w: w.copy_(torch.linspace(-3, 3, w.numel())),
    "doubled": lambda w: w.mul_(2),
    "to infinity": lambda w: w[:50].fill_(math.inf),
    "to the largest": lambda w: w.fill_(torch.finfo(w.dtype).max),
    "to NaN": lambda w: w[:50].fill_(math.nan),
}


@MASTERS
@pytest.mark.parametrize("edit", sorted(EDITS))
def test_an_edited_weight_is_where_the_next_step_starts_within_an_ulp(masters: str, edit: str) -> None:
    hyper = sgd_hyper(0.1)
    ours = row(start(300), hyper, masters)
    for grad in gradients(300, 3):
        ours.grad = grad
        move(hyper, ours)
    before = ours.weight.clone()
    EDITS[edit](ours.weight)
    edited = ours.weight.clone()
    ours.grad = torch.zeros(300)
    move(hyper, ours)
    assert torch.equal(ours.weight.isnan(), edited.isnan())
    far = 2.0**128
    real = ~edited.isnan()
    exact = edited.double().clamp(-far, far)[real]
    moved = (master(ours).double().clamp(-far, far)[real] - exact).abs()
    ulp = 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert (moved <= (ulp if masters != "fp16" else ulp.clamp(min=2.0**-24))).all()
    if masters in ("own", "fp32", "fp16", "none"):
        assert (moved[(edited != before)[real]] == 0).all()
    if edit.endswith("zero"):
        assert (ours.weight == 0).all()


@MASTERS
def test_a_weight_written_as_infinity_raises_the_flag_which_stays(masters: str) -> None:
    hyper = sgd_hyper(1.0)
    overflow = torch.zeros(())
    ours = row(torch.tensor([1.0, 2.0]), hyper, masters)
    ours.grad = torch.tensor([0.5, 0.5])
    move(hyper, ours, overflow=overflow)
    assert overflow == 0
    ours.grad = torch.tensor([-3.4e38, 0.0])
    move(hyper, ours, overflow=overflow)
    assert bool(ours.weight[0].isinf()) == (masters != "own")
    assert float(overflow) == (masters != "own")
    ours.grad = torch.tensor([3.4e38, 0.0])
    move(hyper, ours, overflow=overflow)
    assert float(overflow) == (masters != "own")


# --- what is skipped, and what is in which order -------------------------------------------------------------------


@MASTERS
@STATES
def test_on_overflow_no_byte_changes(masters: str, state: str) -> None:
    number = sorted(WEIGHTS).index(masters) + len(state)
    hyper, found = HYPERS[sorted(HYPERS)[number % len(HYPERS)]], (1.0, math.inf, math.nan)[number % 3]
    ours = row(start(130), hyper, masters, state)
    ours.grad = gradients(130, 1)[0]
    move(hyper, ours)
    before, overflow = bytes_of(ours), torch.zeros(())
    ours.grad = torch.full((130,), math.inf)
    move(hyper, ours, found_inf=torch.tensor(found), overflow=overflow)
    assert bytes_of(ours) == before
    assert overflow == 0
    ours.grad = gradients(130, 1)[0]
    move(hyper, ours, found_inf=torch.tensor(0.0))
    assert bytes_of(ours) != before


@MASTERS
@STATES
def test_elements_are_taken_in_memorys_order_whatever_the_strides(masters: str, state: str) -> None:
    hyper = HYPERS["adamw"]
    image = start(2 * 3 * 5 * 7).view(2, 3, 5, 7).to(memory_format=torch.channels_last)
    grads = [g.view(2, 5, 7, 3).permute(0, 3, 1, 2) for g in gradients(2 * 3 * 5 * 7, 3)]
    strided, plain = row(image, hyper, masters, state), row(image.permute(0, 2, 3, 1), hyper, masters, state)
    for grad in grads:
        strided.grad, plain.grad = grad, grad.permute(0, 2, 3, 1)
        assert strided.grad.stride() == strided.weight.stride()
        move(hyper, strided, plain)
    assert torch.equal(strided.weight.permute(0, 2, 3, 1), plain.weight)
    for one, other in zip(strided.states, plain.states):
        assert torch.equal(one.permute(0, 2, 3, 1), other)


@MASTERS
@STATES
def test_blocks_make_no_difference(masters: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hyper, count = HYPERS["adamw"], 1000
    rows = []
    for block in (1 << 16, 192):
        monkeypatch.setattr(reference, "BLOCK", block)
        ours = row(start(count), hyper, masters, state)
        for grad in gradients(count, 3):
            ours.grad = grad
            move(hyper, ours)
        rows.append(ours)
    assert bytes_of(rows[0]) == bytes_of(rows[1])


def test_rows_differ_by_their_ordinal_and_moves_by_their_number() -> None:
    hyper = sgd_hyper(1e-3)
    rows = [row(torch.ones(1000), hyper, "none", ordinal=i) for i in (0, 0, 1)]
    for each in rows:
        each.grad = torch.ones(1000)
    move(hyper, *rows)
    assert torch.equal(rows[0].weight, rows[1].weight)
    assert not torch.equal(rows[0].weight, rows[2].weight)
    first = rows[0].weight.clone()
    rows[0].weight.fill_(1)
    move(hyper, rows[0])
    assert not torch.equal(rows[0].weight, first)


def test_the_first_state_takes_the_low_20_bits_of_its_noise_and_the_second_the_high_20() -> None:
    hyper, count = HYPERS["adamw"], 300
    exact, small = row(start(count), hyper, ordinal=3), row(start(count), hyper, "own", "bf16", ordinal=3)
    exact.grad = small.grad = gradients(count, 1)[0]
    move(hyper, exact, small)
    for shift, whole, stored in zip((4, 16), exact.states, small.states):  # bf16 uses the upper 16 of the 20
        for i, (word, got) in enumerate(zip(patterns.words(whole), patterns.words(stored))):
            bits = patterns.noise_word(i, noise_key(1, 3, STEP))
            assert got == (word + (bits >> shift & 0xFFFF)) >> 16


@pytest.mark.parametrize(("masters", "width"), [("none", 16), ("split8", 8)])
def test_the_weight_takes_the_states_word_or_where_it_has_no_remainder_its_own(
    masters: str, width: int
) -> None:
    hyper = sgd_hyper(0.1)
    exact, small = row(start(300).bfloat16().float(), hyper), row(start(300), hyper, masters, ordinal=2)
    exact.grad = small.grad = gradients(300, 1)[0]
    move(hyper, exact, small)
    for i, (word, got) in enumerate(zip(patterns.words(exact.weight), patterns.words(master(small)))):
        bits = patterns.noise_word(i, noise_key(1, 2, WEIGHT if masters == "none" else STEP))
        bits = bits >> 16 if masters == "none" else (bits ^ bits >> 12) & 0xFF
        assert got >> width == (word + bits) >> width


def test_a_row_without_a_gradient_stays_and_an_empty_one_counts_its_moves() -> None:
    hyper = HYPERS["adamw"]
    still, empty = row(start(10), hyper, "split", "int8"), row(start(0), hyper, "split", "int8")
    before = bytes_of(still)
    empty.grad = torch.empty(0)
    move(hyper, still, empty)
    assert bytes_of(still) == before
    assert float(empty.step) == 1


@RULES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_its_own_element_or_group_alone(rule: str, bad: float) -> None:
    hyper = HYPERS[rule]
    ours = row(start(200), hyper, "split")
    ours.grad = gradients(200, 1)[0]
    ours.grad[70] = bad
    move(hyper, ours)
    assert ours.weight.isfinite().sum() >= 199
    if not math.isinf(bad):
        assert bool(ours.weight[70].isnan())


# --- small states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adamw", "sgd with momentum", "lion"])
@pytest.mark.parametrize(("state", "bound"), [("bf16", 2.0**-6), ("int8", 2.0**-2)])
def test_small_states_follow_the_fp32_ones(rule: str, state: str, bound: float) -> None:
    hyper, count = HYPERS[rule], 4096
    exact, small = row(start(count), hyper), row(start(count), hyper, "own", state)
    generator = torch.Generator().manual_seed(3)
    drift = torch.randn(count, generator=generator)
    for _ in range(60):
        grad = drift + torch.randn(count, generator=generator)
        exact.grad = small.grad = grad
        move(hyper, exact, small)
    for spec, whole, stored, scales in zip(hyper.states, exact.states, small.states, small.scales):
        got = load_state(stored, scales, signed=spec.signed)
        assert float((got - whole).norm() / whole.norm()) < bound
        assert abs(float((got - whole).mean())) < bound * float(whole.abs().mean()) / 10


@pytest.mark.heavy
def test_a_step_makes_blocks_and_no_copy_of_a_parameter() -> None:
    hyper = HYPERS["adamw"]
    ours = row(torch.ones(1 << 22), hyper, "split8", "int8")
    ours.grad = torch.ones(1 << 22)
    counter = PeakTensorBytes()
    counter.start()
    held = counter.stop().peak_bytes
    counter.start()
    move(hyper, ours)
    assert counter.stop().peak_bytes - held < 40 * 4 * reference.BLOCK < ours.grad.nbytes
