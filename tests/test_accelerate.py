"""Accelerate's own loops under `mezzo.accelerate`, compared with its mixed precision and with FP32."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import AdamW

import mezzo
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from trainers import OVERFLOW, batches, network, refused, same

X, Y = map(torch.stack, zip(*batches(12)))


def plain(**options: Any) -> accelerate.Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


def attached(policy: str, **options: Any) -> Any:
    return mezzo.accelerate.attach(plain(), policy, **options)


class Run:
    """A training in Accelerate's documented loop: twelve steps, or those that are given, some of which overflow."""

    def __init__(self, accelerator: Any, steps: Any = range(12), make: Any = AdamW, **options: Any):
        self.accelerator = accelerator
        model = network()
        optimizer = make(model.parameters(), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.losses: list[float] = []
        for index in steps:
            self.step(index)

    def step(self, index: int, factor: float = 1.0) -> bool:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(X[index] * factor), Y[index])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())
        skipped: bool = accelerator.optimizer_step_was_skipped
        return skipped

    def state(self) -> list[Tensor]:
        saved = self.optimizer.state_dict()["state"]
        moments = [saved[key][name] for key in sorted(saved) for name in sorted(saved[key])]
        tensors = [*self.model.state_dict().values(), *moments]
        return [tensor.clone() for tensor in tensors if isinstance(tensor, Tensor)]


def test_bf16_is_accelerates_and_fp16_trains_where_it_does_nothing() -> None:
    full, own = Run(plain()).losses, Run(plain(mixed_precision="bf16")).losses
    ours, fp16 = Run(attached("bf16")), Run(attached("fp16"))
    assert [f"{loss:.2f}" for loss in ours.losses] == [f"{loss:.2f}" for loss in own]
    assert 0 < math.dist(ours.losses, full) <= 1.5 * math.dist(own, full)
    assert Run(plain(mixed_precision="fp16")).losses == full
    assert 0 < math.dist(fp16.losses, full) < 0.01
    seen: list[torch.dtype] = []
    inner: Any = fp16.model[0]
    inner.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert (fp16.model(X[0]).dtype, seen) == (torch.float32, [torch.float16])


ADAMW = [(AdamW, {"fused": True}), (AdamW, {}), (mezzo.optim.AdamW, {})]


@pytest.mark.parametrize(("optimizer", "options"), ADAMW)
def test_an_overflow_skips_the_step_and_the_schedule(optimizer: Any, options: dict[str, Any]) -> None:
    run = Run(attached("fp16"), range(3), optimizer, **options)
    before, rate = run.state(), run.scheduler.get_last_lr()
    assert run.step(3, factor=OVERFLOW)
    same(run.state(), before)  # also BatchNorm's running statistics
    assert run.scheduler.get_last_lr() == rate
    precision = run.accelerator.mezzo
    assert (precision.skipped_steps, precision.loss_scale) == (1, 2.0**15)
    (found,) = precision.findings[:2]
    assert (found.cause, found.op, found.module) == ("overflow", "linear", "0")
    assert not run.step(4)
    assert run.scheduler.get_last_lr() != rate
    precision.findings *= 100
    assert run.step(5, factor=OVERFLOW)
    assert len(precision.findings) == 100
    assert precision.findings[-1] is not found

    # accelerate#4242: with its own scaler a fused optimizer's skip goes unnoticed.
    theirs = plain()
    theirs.scaler = torch.amp.GradScaler("cpu")
    if optimizer is AdamW:
        assert Run(theirs, [], optimizer, **options).step(3, factor=math.inf) is not bool(options)


@pytest.mark.parametrize(
    ("call", "scale"),
    [
        ("attach(plain(), 'fp16', state='bf16', loss_scale=512)", 512),
        ("Accelerator('fp16', cpu=True, loss_scale=512, project_dir='runs')", 512),
        ("Accelerator('fp16,loss_scale=64', cpu=True, trace=True)", 64),
    ],
)
def test_the_fix_of_an_overflow_is_the_call_with_the_users_arguments(call: str, scale: float) -> None:
    names = {"mezzo": mezzo, "plain": plain}
    run = Run(eval(f"mezzo.accelerate.{call}", names), [])
    run.step(0, factor=OVERFLOW)
    given = run.accelerator.mezzo
    (finding,) = given.findings
    fix = re.search(r"`(mezzo\.[^`]*module[^`]*)`", finding.advice)
    assert fix is not None, finding.advice
    fixed = eval(fix[1], names | {"accelerator": plain()}).mezzo
    assert dict(fixed.policy.modules) == {"0": "fp32"}
    assert (fixed.loss_scale, fixed.policy.state, fixed._trace) == (scale, given.policy.state, given._trace)
    assert fixed._accelerator.project_dir == given._accelerator.project_dir


@pytest.mark.parametrize("accumulated", [True, False])
def test_an_overflow_outside_the_model_is_traced_when_it_comes_again(accumulated: bool) -> None:
    """Inside `accelerator.accumulate`; elsewhere the operations after the model's call are not seen."""
    run = Run(attached("fp16"), [])
    for index in range(6):
        with run.accelerator.accumulate(run.model) if accumulated else contextlib.nullcontext():
            out = run.model(X[index])
            if index in (1, 4):
                out = torch.log(out.sum() * 0)
            run.accelerator.backward(out.square().mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
    first, second = run.accelerator.mezzo.findings
    assert (first.cause, first.op, "accelerator.accumulate(model)" in first.note) == ("loss", "", True)
    assert (second.cause, second.op) == (("invalid", "log") if accumulated else ("loss", ""))


def test_a_report_has_the_scale_of_an_accumulated_loss() -> None:
    """The gradient of the bias, 1.6e5, overflows in fp16 without a loss scale, too; a quarter of it would not."""
    for times in (1, 4):
        given = plain(gradient_accumulation_steps=times)
        accelerator = mezzo.accelerate.attach(given, "fp16", loss_scale=256.0)
        run = Run(accelerator, [])
        for _ in range(times):
            with accelerator.accumulate(run.model):
                accelerator.backward(run.model(X[0]).sum() * 1e4)
                run.optimizer.step()
        assert [one.cause for one in accelerator.mezzo.findings] == ["overflow"]


def _recomputed(call: Callable[[], None]) -> None:
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: [call(), x * 2][1], x, use_reentrant=True).backward()


@pytest.mark.parametrize(
    ("how", "copies"),
    [
        (lambda model, call: call(), 1),
        (lambda model, call: model.eval() and call(), 0),
        (lambda model, call: torch.no_grad()(call)(), 0),
        (lambda model, call: _recomputed(call), 0),
    ],
)
def test_buffers_are_copied_before_calls_in_training(how: Any, copies: int) -> None:
    precision, model = attached("fp16").mezzo, network()
    how(model, lambda: precision.networks.called(model))
    assert len(precision.networks) == copies


def test_a_skipped_step_leaves_split_masters() -> None:
    run = Run(attached("bf16", masters="split", loss_scale=1024.0), range(3))
    before = run.state()
    assert run.step(3, factor=math.inf)
    same(run.state(), before)


@pytest.mark.parametrize(("policy", "masters"), [("fp16", None), ("bf16", "split")])
def test_accumulated_gradients_are_those_of_the_whole_batch(policy: str, masters: str | None) -> None:
    def trained(steps: list[int], times: int) -> list[Tensor]:
        accelerator = plain(gradient_accumulation_steps=times)
        run = Run(mezzo.accelerate.attach(accelerator, policy, masters=masters), steps, torch.optim.SGD)
        state = mezzo.master_state_dict(run.model, run.optimizer.optimizer)
        weights = [tensor.clone() for name, tensor in state.items() if name[0] in "03"]
        run.step(1)  # the sum of several is FP32
        sums = {param.grad.dtype for param in run.model.parameters() if param.grad is not None}
        assert sums == ({torch.float32} if times > 1 else set())
        return weights

    whole, halves = trained([0], 1), trained([0, 0], 2)  # BatchNorm sees the same
    assert all(torch.allclose(one, other, rtol=0.01, atol=1e-3) for one, other in zip(whole, halves))


def test_gradients_are_unscaled_once_and_only_where_they_are_clipped() -> None:
    accelerator = attached("fp16")
    nets = [nn.Linear(8, 4), nn.Linear(8, 4)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    first, second, one, two = accelerator.prepare(*nets, *optimizers)
    first(X[0]).mean().backward()
    expected = first.weight.grad.clone()
    one.zero_grad()
    accelerator.backward(first(X[0]).mean() + second(X[0]).mean())
    accelerator.unscale_gradients(one)
    accelerator.unscale_gradients([one])
    assert accelerator.clip_grad_norm_(first.parameters(), math.inf) < 10
    assert torch.allclose(first.weight.grad, expected, rtol=1e-2, atol=1e-4)
    assert second.weight.grad.abs().max() > 1e3
    accelerator.clip_grad_value_(second.parameters(), 0.05)
    one.step()
    two.step()  # the first step leaves these gradients unscaled
    assert second.weight.grad.abs().max() == pytest.approx(0.05)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize(("make", "times"), [(torch.optim.SGD, 2), (AdamW, 3), (torch.optim.LBFGS, 1)])
def test_a_backward_pass_after_clipping_adds_gradients_as_in_fp32(clip: str, make: Any, times: int) -> None:
    def trained(accelerator: Any) -> Any:
        model = network()
        model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=0.01))
        for x, y in zip(X[:6], Y[:6]):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                getattr(accelerator, clip)(model.parameters(), 0.01)
                return loss

            with accelerator.accumulate(model):
                if make is torch.optim.LBFGS:  # calls it several times
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    scaled, unscaled = plain(gradient_accumulation_steps=times), plain(gradient_accumulation_steps=times)
    mezzo.accelerate.attach(scaled, "fp32", loss_scale=1024.0)
    same(trained(scaled), trained(unscaled))


def test_clipping_leaves_out_gradients_that_no_optimizer_steps_with() -> None:
    """They stay scaled, and would count as 1,024 times larger."""

    def trained(accelerator: Any, frozen: bool) -> Any:
        model = network()
        model[:3].requires_grad_(not frozen)
        model, optimizer = accelerator.prepare(model, AdamW(model[3].parameters(), lr=0.01))
        for x, y in zip(X[:3], Y[:3]):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    same(trained(attached("fp32", loss_scale=1024.0), frozen=False), trained(plain(), frozen=True))


def test_an_overflow_that_was_clipped_away_skips_the_step_of_later_backward_passes() -> None:
    accelerator = attached("fp32", loss_scale="dynamic(init=1024)")
    model = nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in (1e37, 1.0):
        accelerator.backward(model(X[0]).sum() * factor)
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.mezzo.loss_scale == 512


@pytest.mark.parametrize(
    ("overflowing", "scale", "good"), [([], 1024, 1), ([0], 512, 0), ([1], 512, 0), ([0, 1], 512, 0)]
)
def test_the_steps_after_one_backward_change_the_loss_scale_once(
    overflowing: list[int], scale: float, good: int
) -> None:
    accelerator = attached("fp16", loss_scale="dynamic(init=1024)")
    nets = [nn.Linear(8, 4), nn.Linear(8, 4)]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    *nets, one, two = accelerator.prepare(*nets, *sgds)
    factors = [OVERFLOW if index in overflowing else 1.0 for index in range(2)]
    accelerator.backward(sum(net(X[0] * factor).mean() for net, factor in zip(nets, factors)))
    one.step()
    two.step()
    state = accelerator.scaler.state_dict()
    assert [one.step_was_skipped, two.step_was_skipped] == [index in overflowing for index in range(2)]
    assert (state["scale"], state["_growth_tracker"]) == (scale, good)


@pytest.mark.parametrize(("policy", "masters"), [("fp16", None), ("bf16", "split"), ("bf16", "fp32")])
def test_saved_and_loaded_it_continues_to_the_bit(policy: str, masters: str | None, tmp_path: Path) -> None:
    runs = [Run(mezzo.accelerate.Accelerator(policy, masters=masters, cpu=True), range(3)) for _ in range(2)]
    runs[0].step(3, factor=OVERFLOW if policy == "fp16" else 1.0)
    runs[0].accelerator.save_state(str(tmp_path))
    runs[1].accelerator.load_state(str(tmp_path))
    for run in runs:
        for index in range(5, 9):
            run.step(index)
    same(runs[0].state(), runs[1].state())
    assert runs[0].accelerator.mezzo.loss_scale == runs[1].accelerator.mezzo.loss_scale


def test_a_model_can_be_copied_and_prepared_again_under_another_policy() -> None:
    run = Run(attached("fp16,module.3=fp32"), [0])
    model, twin = run.model.eval(), copy.deepcopy(run.model).eval()
    torch.save(run.model, file := io.BytesIO())
    for one in (twin, torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
        assert torch.equal(one(X[0]), model(X[0]))
    assert twin.forward.handles == []  # of the accelerator's hooks
    with run.accelerator.autocast():
        assert (X[0] @ X[0].T).dtype is torch.float16
        with run.accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
            assert (X[0] @ X[0].T).dtype is torch.float32
    again = mezzo.accelerate.attach(accelerate.Accelerator(cpu=True), "fp32").prepare(model)
    assert torch.equal(again(X[0]), nn.Sequential.forward(again, X[0]))


def test_the_loss_scale_comes_from_the_argument_or_accelerates_handler() -> None:
    handler = accelerate.utils.GradScalerKwargs(init_scale=128.0)
    assert mezzo.accelerate.attach(plain(kwargs_handlers=[handler]), "fp16").mezzo.loss_scale == 128
    run = Run(attached("fp16", loss_scale=2.0**10), [])
    assert (run.step(0), run.step(1, factor=OVERFLOW)) == (False, True)
    assert run.accelerator.mezzo.loss_scale == 1024
    scale = mezzo.DynamicLossScale(init=4.0, floor=2.0, patience=2)
    run = Run(attached("fp16", loss_scale=scale), [])
    with pytest.raises(LossScaleCollapseError, match=r"linear in 0"):
        [run.step(0, factor=OVERFLOW) for _ in range(5)]


def _prepared_before() -> Any:
    accelerator = plain()
    accelerator.prepare(network())
    return mezzo.accelerate.attach(accelerator, "bf16")


def _fp16_weights(masters: str | None) -> Any:
    accelerator, model = attached("fp16", masters=masters), network()
    model = model if masters else model.half()
    accelerator.prepare(model, AdamW(model.parameters()))
    accelerator.backward(model(X[0]).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda: mezzo.accelerate.attach(None, "bf16"), UsageError, ["NoneType", "accelerate.Accelerator"]),
        (
            lambda: mezzo.accelerate.attach(plain(mixed_precision="bf16")),
            UsageError,
            ["Remove mixed_precision='bf16'"],
        ),
        (lambda: mezzo.accelerate.attach(attached("fp16"), "bf16"), UsageError, ["fp16", "once"]),
        (_prepared_before, CallOrderError, ["attach", "Sequential", "before accelerator.prepare("]),
        (
            lambda: attached("bf16", masters="split").prepare(AdamW(network().parameters())),
            UsageError,
            ["masters=split", "accelerator.prepare(model, optimizer)"],
        ),
        (lambda: attached("bf61"), UsageError, ["bf61", "'bf16'"]),
        (lambda: attached("bf16,reduce=bf16"), UsageError, ["reduce=", 'average_in(ddp_model, "bf16")']),
        (lambda: attached("bf16", mask="split"), UsageError, ["mask", "'masters'"]),
        (lambda: Run(attached("bf16,module.head=fp32")), UsageError, ["'head'", "prepared models"]),
        (lambda: _fp16_weights(None), UsageError, ["mezzo.accelerate.attach", "fp16", "masters='fp32'"]),
        (lambda: _fp16_weights("fp32"), UsageError, ["fp16 gradient", "FP32"]),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], parts: list[str]) -> None:
    with refused(error, *parts):
        call()


@pytest.mark.parametrize(("name", "needed"), [("accelerate", "1.10"), ("transformers", "5.0")])
def test_an_old_library_is_refused(name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{name}.__version__", "0.34.2")
    monkeypatch.delitem(sys.modules, f"mezzo.{name}", raising=False)
    with pytest.raises(UsageError, match=rf"{name} >= {needed}.*0\.34\.2.*pip install -U '{name}>={needed}'"):
        importlib.import_module(f"mezzo.{name}")
