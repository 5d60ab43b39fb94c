"""Accelerate's own loops under `mezzo.accelerate`, compared with its mixed precision and with FP32."""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from ranks import two_ranks

STEPS = 12
Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    """Accelerate keeps its settings in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def batches(planted: int | None = None) -> Batches:
    drawn = torch.Generator().manual_seed(1)
    found = [
        (torch.randn(16, 8, generator=drawn), torch.randint(3, (16,), generator=drawn)) for _ in range(STEPS)
    ]
    if planted is not None:
        found[planted][0].mul_(1e30)
    return found


def plain(**options: Any) -> accelerate.Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


class Run:
    """A training in Accelerate's documented loop."""

    def __init__(
        self, accelerator: Any, data: Batches, optimizer: Any = torch.optim.AdamW, **options: Any
    ) -> None:
        self.accelerator = accelerator
        model = network()
        optimizer = optimizer(model.parameters(), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.losses: list[float] = []
        self.skips: list[bool] = []
        for x, y in data:
            self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.skips.append(accelerator.optimizer_step_was_skipped)

    def state(self) -> list[Tensor]:
        saved = self.optimizer.state_dict()["state"]
        entries = [saved[key] for key in sorted(saved)]
        moments = [entry[name] for entry in entries for name in sorted(entry)]
        moments = [value for value in moments if isinstance(value, Tensor)]
        return [tensor.clone() for tensor in (*self.model.state_dict().values(), *moments)]


def distance(one: list[float], other: list[float]) -> float:
    return math.dist(one, other)


def test_bf16_is_accelerates_to_the_printed_digits() -> None:
    own = Run(plain(mixed_precision="bf16"), batches()).losses
    ours = Run(mezzo.accelerate.attach(plain(), "bf16"), batches()).losses
    assert [f"{loss:.2f}" for loss in ours] == [f"{loss:.2f}" for loss in own]
    full = Run(plain(), batches()).losses
    assert full != ours
    assert distance(ours, full) <= 1.5 * distance(own, full)


def test_fp16_trains_on_a_cpu_where_accelerate_does_nothing() -> None:
    full = Run(plain(), batches()).losses
    assert Run(plain(mixed_precision="fp16"), batches()).losses == full
    ours = Run(mezzo.accelerate.attach(plain(), "fp16"), batches())
    assert ours.losses != full
    assert distance(ours.losses, full) < 0.02
    seen: list[torch.dtype] = []
    inner: Any = ours.model[0]
    inner.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert ours.model(batches()[0][0]).dtype is torch.float32
    assert seen == [torch.float16]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),  # accelerate#4242
        (torch.optim.AdamW, {"foreach": True}),
        (mezzo.optim.AdamW, {}),
    ],
)
def test_an_overflow_skips_the_step_and_the_schedule(optimizer: Any, options: dict[str, Any]) -> None:
    run = Run(mezzo.accelerate.attach(plain(), "fp16"), batches()[:3], optimizer, **options)
    before, rate = run.state(), run.scheduler.get_last_lr()
    run.step(*batches(planted=3)[3])
    assert run.accelerator.optimizer_step_was_skipped
    assert all(map(torch.equal, run.state(), before))  # also BatchNorm's running statistics
    assert run.scheduler.get_last_lr() == rate
    precision = run.accelerator.mezzo
    assert (precision.skipped_steps, precision.loss_scale) == (1, 2.0**15)
    assert [(one.cause, one.op, one.module) for one in precision.findings] == [("overflow", "linear", "0")]
    run.step(*batches()[4])
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.scheduler.get_last_lr() != rate
    assert not all(map(torch.equal, run.state(), before))


@pytest.mark.parametrize("masters", [None, "split"])
def test_accumulated_gradients_are_those_of_the_whole_batch(masters: str | None) -> None:
    def trained(accelerator: Any, data: Batches) -> list[Tensor]:
        run = Run(accelerator, data, torch.optim.SGD, momentum=0.9)
        state = mezzo.master_state_dict(run.model, run.optimizer.optimizer)
        return [tensor for name, tensor in state.items() if name.startswith(("0", "3"))]

    data = [batches()[0]] * 4  # BatchNorm sees the same
    policy = "bf16" if masters else "fp16"
    whole = trained(mezzo.accelerate.attach(plain(), policy, masters=masters), data[:2])
    halves = trained(
        mezzo.accelerate.attach(plain(gradient_accumulation_steps=2), policy, masters=masters), data
    )
    assert all(torch.allclose(one, other, rtol=0.01, atol=1e-3) for one, other in zip(whole, halves))


def test_accumulation_adds_gradients_of_16_bit_weights_in_fp32() -> None:
    accelerator = mezzo.accelerate.attach(plain(gradient_accumulation_steps=2), "bf16", masters="split")
    run = Run(accelerator, [])
    with accelerator.accumulate(run.model):
        accelerator.backward(F.cross_entropy(run.model(batches()[0][0]), batches()[0][1]))
    weight: Any = run.model[0].weight
    assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_are_unscaled_once_and_only_where_they_are_clipped() -> None:
    accelerator = mezzo.accelerate.attach(plain(), "fp16")
    first, second, one, two = accelerator.prepare(
        *(nets := [nn.Linear(4, 4), nn.Linear(4, 4)]),
        *(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets),
    )
    x = torch.randn(8, 4)
    first(x).mean().backward()
    expected = first.weight.grad.clone()
    one.zero_grad()
    accelerator.backward(first(x).mean() + second(x).mean())
    accelerator.unscale_gradients(one)
    accelerator.unscale_gradients([one])
    norm = accelerator.clip_grad_norm_(first.parameters(), math.inf)
    assert torch.allclose(first.weight.grad, expected, rtol=1e-3)
    assert norm < 1e3
    assert second.weight.grad.abs().max() > 1e3
    accelerator.clip_grad_value_(second.parameters(), 0.5)
    assert second.weight.grad.abs().max() <= 0.5
    for optimizer in (one, two):  # the second's gradients stay unscaled when the first steps
        optimizer.step()
    assert second.weight.grad.abs().max() <= 0.5
    assert not accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize(("policy", "masters"), [("fp16", None), ("bf16", "split"), ("bf16", "fp32")])
def test_saved_and_loaded_it_continues_to_the_bit(policy: str, masters: str | None, tmp_path: Path) -> None:
    def start() -> Run:
        accelerator = mezzo.accelerate.Accelerator(policy, masters=masters, cpu=True)
        return Run(accelerator, batches(planted=2)[: 4 if policy == "fp16" else 2])

    straight = start()
    straight.accelerator.save_state(str(tmp_path))
    other = start()
    for run in (straight, other):
        if run is other:
            run.step(*batches()[0])
            run.accelerator.load_state(str(tmp_path))
        for x, y in batches()[5:]:
            run.step(x, y)
    assert all(map(torch.equal, straight.state(), other.state()))
    assert straight.losses[-3:] == other.losses[-3:]
    assert straight.accelerator.mezzo.loss_scale == other.accelerator.mezzo.loss_scale


def test_split_masters_are_exact() -> None:
    """From the same 16-bit weights, masters follow FP32 and weights without masters do not."""
    lr = {"lr": 1e-5}

    def trained(accelerator: Any, low: bool) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).bfloat16()
        model = model if low else model.float()
        optimizer = torch.optim.AdamW(model.parameters(), **lr)
        model, optimizer = accelerator.prepare(model, optimizer)
        for x, y in batches() * 2:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return model, list(mezzo.master_state_dict(model, optimizer.optimizer).values())

    def apart(found: list[Tensor]) -> float:
        return sum(float((one.float() - other).pow(2).sum()) for one, other in zip(found, full)) ** 0.5

    full = trained(plain(), low=False)[1]
    model, masters = trained(mezzo.accelerate.attach(plain(), "bf16", masters="split"), low=True)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    own = trained(plain(mixed_precision="bf16"), low=True)[1]
    assert apart(masters) < apart(own) / 5


def test_a_model_keeps_its_signature_and_can_be_copied() -> None:
    run = Run(mezzo.accelerate.attach(plain(), "fp16,module.3=fp32"), batches()[:1])
    x = batches()[0][0]
    twin = copy.deepcopy(run.model)
    assert torch.equal(twin.eval()(x), run.model.eval()(x))
    assert twin.forward is not run.model.forward
    with run.accelerator.autocast():
        assert (x @ x.T).dtype is torch.float16
        with run.accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
            assert (x @ x.T).dtype is torch.float32
    again = mezzo.accelerate.attach(accelerate.Accelerator(cpu=True), "fp32").prepare(run.model)
    exact = again.eval()(x)
    assert torch.equal(exact, nn.Sequential.forward(again, x))  # no override and no context is left


def test_the_loss_scale_comes_from_the_argument_or_accelerates_handler() -> None:
    handler = accelerate.utils.GradScalerKwargs(init_scale=128.0)
    assert mezzo.accelerate.attach(plain(kwargs_handlers=[handler]), "fp16").mezzo.loss_scale == 128
    run = Run(mezzo.accelerate.attach(plain(), "fp16", loss_scale=2.0**10), batches(planted=1))
    assert run.accelerator.mezzo.loss_scale == 2.0**10
    assert run.skips == [index == 1 for index in range(STEPS)]


def test_a_collapsed_scale_names_the_cause() -> None:
    scale = mezzo.DynamicLossScale(init=4.0, floor=2.0, patience=2)
    with pytest.raises(LossScaleCollapseError, match=r"linear in 0"):
        Run(mezzo.accelerate.attach(plain(), "fp16", loss_scale=scale), [batches(planted=0)[0]] * 5)


def _prepared(policy: str = "bf16") -> Any:
    accelerator = plain()
    accelerator.prepare(network())
    return mezzo.accelerate.attach(accelerator, policy)


def _half(masters: str | None) -> Any:
    accelerator = mezzo.accelerate.attach(plain(), "fp16", masters=masters)
    model = network()
    model = model if masters else model.half()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(batches()[0][0]).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda: mezzo.accelerate.attach(None, "bf16"), UsageError, ["NoneType", "accelerate.Accelerator"]),
        (
            lambda: mezzo.accelerate.attach(plain(mixed_precision="bf16"), "fp16"),
            UsageError,
            ["mixed_precision='bf16'", "Remove", "ACCELERATE_MIXED_PRECISION"],
        ),
        (
            lambda: mezzo.accelerate.attach(mezzo.accelerate.Accelerator("fp16", cpu=True), "bf16"),
            UsageError,
            ["fp16", "once"],
        ),
        (_prepared, CallOrderError, ["attach", "Sequential", "before accelerator.prepare("]),
        (lambda: mezzo.accelerate.attach(plain(), "bf61"), UsageError, ["bf61", "'bf16'"]),
        (lambda: mezzo.accelerate.attach(plain(), "bf16", mask="split"), UsageError, ["mask", "'masters'"]),
        (
            lambda: mezzo.accelerate.attach(plain(), "bf16", masters="split").prepare(
                torch.optim.AdamW(network().parameters())
            ),
            UsageError,
            ["params=bf16", "accelerator.prepare(model, optimizer)"],
        ),
        (lambda: _half(None), UsageError, ["mezzo.accelerate.attach", "fp16", "masters='fp32'"]),
        (lambda: _half("fp32"), UsageError, ["fp16 gradient", "FP32"]),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert [part for part in parts if part not in str(raised.value)] == []


@pytest.mark.parametrize(("name", "needed"), [("accelerate", "1.10"), ("transformers", "5.0")])
def test_an_old_library_is_refused(name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{name}.__version__", "0.34.2")
    monkeypatch.delitem(sys.modules, f"mezzo.{name}", raising=False)
    with pytest.raises(UsageError, match=rf"{name} >= {needed}.*0\.34\.2.*pip install 'mezzo\[{name}\]'"):
        importlib.import_module(f"mezzo.{name}")


@pytest.mark.heavy
def test_two_ranks_skip_together(tmp_path: Path) -> None:
    one, other = two_ranks("accelerate_ddp.py", tmp_path / "meeting", seconds=180)
    assert one["skips"] == other["skips"] == [False, True, False]
    assert one["weights"] == other["weights"]
    assert one["loss_scale"] == other["loss_scale"] == 2.0**15
