"""The reference of the whole step: against scalar arithmetic, against PyTorch's optimizers, and what it must not do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import patterns
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, reference, storage
from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper, LionHyper, SgdHyper
from mezzo.pytorch.kernels.optimizer_step.storage import decode_split, decode_split8, groups, load_state
from mezzo.pytorch.memory import PeakTensorBytes

HYPERS: dict[str, Hyper] = {
    "adamw": AdamHyper(3e-3, 0.9, 0.999, 1e-8, 1e-2, decoupled=True),
    "adam": AdamHyper(1e-2, 0.8, 0.99, 1e-6, 0.1, decoupled=False, maximize=True),
    "adam without decay": AdamHyper(1e-3, 0.0, 0.9, 1e-8, 0.0, decoupled=False),
    "sgd": SgdHyper(0.1),
    "sgd with momentum": SgdHyper(0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": SgdHyper(0.05, momentum=0.8, weight_decay=0.1, nesterov=True, maximize=True),
    "lion": LionHyper(1e-3, 0.9, 0.99, 0.1),
    "lion, maximized": LionHyper(1e-2, 0.95, 0.98, maximize=True),
}
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
    if of.master is None:
        return of.weight.float()
    if of.masters == "fp32":
        return of.master
    return (decode_split if of.masters == "split" else decode_split8)(of.weight, of.master)


def move(hyper: Hyper, *rows: Row, **tensors: Tensor) -> None:
    given = {"multiplier": None, "found_inf": None, "overflow": None, **tensors}
    reference.DeviceStepper()([(hyper, rows)], **given)  # type: ignore[arg-type]


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


def scalar_adam(w: float, g: float, s: list[float], h: AdamHyper, t: int) -> tuple[float, list[float]]:
    if h.maximize:
        g = -g
    if h.decoupled:
        w = f(w * f(1 - h.lr * h.weight_decay))
    elif h.weight_decay:
        g = patterns.fma(f(h.weight_decay), w, g)
    m = f(s[0] + f(f(1 - h.beta1) * f(g - s[0])))
    v = f(f(f(h.beta2) * s[1]) + f(f(f(1 - h.beta2) * g) * g))
    inv_bc2 = f(1 / math.sqrt(1 - h.beta2**t))
    down = f(f(f(math.sqrt(v)) * inv_bc2) + f(h.eps))
    return f(w - f(f(f(h.lr / (1 - h.beta1**t)) * m) / down)), [m, v]


def scalar_sgd(w: float, g: float, s: list[float], h: SgdHyper, t: int) -> tuple[float, list[float]]:
    if h.maximize:
        g = -g
    if h.weight_decay:
        g = patterns.fma(f(h.weight_decay), w, g)
    if h.momentum:
        b = g if t == 1 else patterns.fma(f(1 - h.dampening), g, f(f(h.momentum) * s[0]))
        g = patterns.fma(f(h.momentum), b, g) if h.nesterov else b
        s = [b]
    return patterns.fma(-f(h.lr), g, w), s


def scalar_lion(w: float, g: float, s: list[float], h: LionHyper, t: int) -> tuple[float, list[float]]:
    if h.maximize:
        g = -g
    w = f(w * f(1 - h.lr * h.weight_decay))
    u = f(f(f(h.beta1) * s[0]) + f(f(1 - h.beta1) * g))
    w = f(w - f(f(h.lr) * ((u > 0) - (u < 0))))
    return w, [f(f(f(h.beta2) * s[0]) + f(f(1 - h.beta2) * g))]


SCALAR: dict[type, Callable[..., tuple[float, list[float]]]] = {
    AdamHyper: scalar_adam,
    SgdHyper: scalar_sgd,
    LionHyper: scalar_lion,
}


@RULES
@pytest.mark.parametrize("scaled", [False, True])
def test_every_bit_is_that_of_scalar_arithmetic(rule: str, scaled: bool) -> None:
    hyper, count = HYPERS[rule], 40
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
            ws[i], states[i] = SCALAR[type(hyper)](ws[i], g, states[i], hyper, t)
        assert ours.weight.tolist() == ws
        assert [s.tolist() for s in ours.states] == [list(column) for column in zip(*states)]
    assert float(ours.step) == 4


# --- PyTorch's own -------------------------------------------------------------------------------------------------


def torch_optimizer(params: list[Tensor], hyper: Hyper, foreach: bool = False) -> torch.optim.Optimizer:
    if isinstance(hyper, SgdHyper):
        return torch.optim.SGD(
            params,
            hyper.lr,
            hyper.momentum,
            hyper.dampening,
            hyper.weight_decay,
            hyper.nesterov,
            maximize=hyper.maximize,
            foreach=foreach,
        )
    assert isinstance(hyper, AdamHyper)
    make = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    return make(
        params,
        hyper.lr,
        (hyper.beta1, hyper.beta2),
        hyper.eps,
        hyper.weight_decay,
        maximize=hyper.maximize,
        foreach=foreach,
    )


def torch_trained(values: Tensor, hyper: Hyper, grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    param = torch.nn.Parameter(values.to(dtype, copy=True))
    optimizer = torch_optimizer([param], hyper)
    for grad in grads:
        param.grad = grad.to(dtype)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("rule", [name for name in sorted(HYPERS) if not name.startswith("lion")])
def test_it_is_as_near_to_fp64_as_torchs_loop_in_fp32(rule: str) -> None:
    hyper, values, grads = HYPERS[rule], start(3000), gradients(3000, 20)
    ours = row(values, hyper)
    for grad in grads:
        ours.grad = grad
        move(hyper, ours)
    truth = torch_trained(values, hyper, grads, torch.float64)
    naive = torch_trained(values, hyper, grads, torch.float32)
    moved = float((truth - values).abs().mean())
    assert moved > 1e-3
    error, of_torch = ((w - truth).abs().max() for w in (ours.weight, naive))
    assert float(error) <= 2 * float(of_torch) + 1e-7


# --- masters -------------------------------------------------------------------------------------------------------


@RULES
def test_split_masters_are_those_of_a_separate_copy_to_the_bit(rule: str) -> None:
    hyper, values = HYPERS[rule], start(500)
    rows = {masters: row(values, hyper, masters) for masters in ("fp32", "split")}
    for grad in gradients(500, 200):
        for each in rows.values():
            each.grad = grad.bfloat16()
            move(hyper, each)
    assert torch.equal(rows["fp32"].weight, rows["split"].weight)
    assert torch.equal(master(rows["fp32"]), master(rows["split"]))
    assert not torch.equal(master(rows["split"]), rows["split"].weight.float())
    for one, other in zip(rows["fp32"].states, rows["split"].states):
        assert torch.equal(one, other)


@MASTERS
def test_small_steps_are_not_lost(masters: str) -> None:
    hyper = SgdHyper(1e-3)
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
    hyper = SgdHyper(0.1)
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
    hyper = SgdHyper(1.0)
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


@RULES
@MASTERS
@STATES
@pytest.mark.parametrize("found", [1.0, math.inf, math.nan])
def test_on_overflow_no_byte_changes(rule: str, masters: str, state: str, found: float) -> None:
    hyper = HYPERS[rule]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradients_format_is_its_own_affair(dtype: torch.dtype) -> None:
    hyper = HYPERS["adamw"]
    grad = gradients(100, 1)[0].to(dtype)
    rows = [row(start(100), hyper, "split") for _ in range(2)]
    rows[0].grad, rows[1].grad = grad, grad.float()
    move(hyper, *rows)
    assert bytes_of(rows[0]) == bytes_of(rows[1])


def test_rows_differ_by_their_ordinal_and_moves_by_their_number() -> None:
    hyper = SgdHyper(1e-3)
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
            bits = storage.noise_word((i * 0x9E3779B1 + storage.noise_key(1, 3, storage.STEP)) & 0xFFFFFFFF)
            assert got == (word + (bits >> shift & 0xFFFF)) >> 16


@pytest.mark.parametrize(("masters", "width"), [("none", 16), ("split8", 8)])
def test_the_weight_takes_the_states_word_or_where_it_has_no_remainder_its_own(
    masters: str, width: int
) -> None:
    hyper = SgdHyper(0.1)
    exact, small = row(start(300).bfloat16().float(), hyper), row(start(300), hyper, masters, ordinal=2)
    exact.grad = small.grad = gradients(300, 1)[0]
    move(hyper, exact, small)
    for i, (word, got) in enumerate(zip(patterns.words(exact.weight), patterns.words(master(small)))):
        stream = storage.WEIGHT if masters == "none" else storage.STEP
        bits = storage.noise_word((i * 0x9E3779B1 + storage.noise_key(1, 2, stream)) & 0xFFFFFFFF)
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
