"""MixedPrecision with 16-bit weights: the modes beside loops written by hand, and what a skip leaves."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import mezzo
from mezzo.core.errors import UnsupportedPrecisionError, UsageError
from mezzo.pytorch import auto
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.lowering import lower_weights
from training_modes import MODES, made
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_mode_learns_and_stores_what_it_says(mode: str, accumulate: int) -> None:
    mp = made(mode, accumulate=accumulate, clip_norm=1.0)
    weights, precision, _, _ = MODES[mode]
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        "fp32" if weights == "fp32" else precision
    ]
    assert {p.dtype for p in (*mp.model[0].parameters(), *mp.model[3].parameters())} == {stored}
    assert {p.dtype for p in mp.model[1].parameters()} == {torch.float32}
    losses = []
    for _ in range(30):
        for _ in range(accumulate):
            result = run(mp)
        losses.append(result.loss)
        assert result.moved
        assert result.reason == ""
        assert all(p.grad is None for p in mp.model.parameters())
    assert losses[-1] < 0.6 * losses[0]
    assert mp.model[0].weight.dtype is stored


@pytest.mark.parametrize("accumulate", [1, 2])
def test_split_equals_the_loop_written_by_hand_and_separate_masters(accumulate: int) -> None:
    """Same bits in weights and masters: by hand, split, and with separate FP32 masters."""
    model = network()
    lower_weights(model, "bf16")
    optimizer = AdamW(model.parameters(), lr=0.1, masters="split")
    if accumulate > 1:
        for p in model.parameters():
            p.grad_dtype = torch.float32
    for index in range(20):
        x, y = batch(index)
        with mezzo.autocast("bf16", "cpu"):
            loss = nn.functional.cross_entropy(model(x), y)
        (loss / accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    expected = [optimizer.master(p) for p in model.parameters()]
    for weights in ("split", "masters"):
        twin = network()
        mp = mezzo.MixedPrecision(
            twin,
            torch.optim.AdamW(twin.parameters(), lr=0.1),
            "bf16",
            weights=weights,
            accumulate=accumulate,
        )
        for index in range(20):
            run(mp, index)
        assert same([p.detach() for p in twin.parameters()], [p.detach() for p in model.parameters()])
        assert same([mp._fused.master(p) for p in twin.parameters()], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skip_leaves_no_trace_in_any_mode(mode: str, accumulate: int, decides: str) -> None:
    mp = made(mode, accumulate=accumulate, loss_scale=mezzo.DynamicLossScale(init=2.0**8))
    for index in range(2 * accumulate):
        run(mp, index)
    before = everything(mp)
    for index in range(accumulate):
        result = run(mp, index, INF if index == 0 else 1.0)
    assert (result.moved, result.skipped) == (False, True)
    assert "NaN or infinite at loss scale 256" in result.reason
    assert same(everything(mp), before)
    assert mp.loss_scale == 2.0**7
    for index in range(accumulate):
        result = run(mp, index)
    assert result.moved
    assert not same(everything(mp), before)
    assert all(t.isfinite().all() for t in everything(mp) if t.is_floating_point())


@pytest.mark.parametrize("mode", MODES)
def test_scheduler_and_average_follow_moves(mode: str) -> None:
    model = network()
    weights, precision, make, state = MODES[mode]
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen: list[nn.Module] = []
    mp = mezzo.MixedPrecision(
        model,
        optimizer,
        precision,
        weights=weights,
        state=state,
        scheduler=scheduler,
        ema=seen.append,
        loss_scale=256,
    )
    lr = optimizer.param_groups[0]["lr"]
    for factor in (INF, 1.0, INF, 1.0, 1.0):
        run(mp, factor=factor)
    assert scheduler.last_epoch == len(seen) == 3
    assert optimizer.param_groups[0]["lr"] == lr * 0.5**3
    before = everything(mp)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    run(mp)
    left, right = before[:2], everything(mp)[:2]
    assert same(left, right)


@pytest.mark.parametrize("mode", ["split", "masters fp16", "masters bf16 rmsprop", "fp32 int8"])
@pytest.mark.parametrize("kind", ["plain", "foreach", "function"])
def test_an_average_is_of_the_fp32_masters(mode: str, kind: str) -> None:
    weights, precision, make, state = MODES[mode]
    model = network()
    arguments: dict[str, Any] = {
        "plain": {},
        "foreach": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        "function": {"avg_fn": get_ema_avg_fn(0.5)},
    }[kind]
    ema = AveragedModel(model, **arguments)
    mp = mezzo.MixedPrecision(
        model, make(model.parameters()), precision, weights=weights, state=state, ema=ema, loss_scale=256
    )
    own = list(model.parameters())
    twin = AveragedModel(network(), **arguments)
    for index in range(3):
        run(mp, index)
        fp32 = network()
        fp32.load_state_dict(mezzo.master_state_dict(model, mp.optimizer))
        twin.update_parameters(fp32)
    assert same(list(ema.module.parameters()), list(twin.module.parameters()))
    assert {p.dtype for p in ema.module.parameters()} == {torch.float32}
    assert all(a is b for a, b in zip(model.parameters(), own))


def test_an_average_that_fails_leaves_the_model_its_own_weights() -> None:
    def fails(model: nn.Module) -> None:
        assert model[0].weight.dtype is torch.float32
        raise RuntimeError("no room")

    model = network()
    mp = made("split", model, ema=fails)
    with pytest.raises(RuntimeError, match="no room"):
        run(mp)
    assert model[0].weight.dtype is torch.bfloat16


def test_the_user_s_own_optimizer_saves_and_clears() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mp = mezzo.MixedPrecision(model, optimizer, "bf16", weights="split")
    assert mp.optimizer is optimizer
    run(mp)
    entries = optimizer.state_dict()["state"][0]
    assert entries["remainder"].dtype is torch.int16
    assert float(entries["step"]) == 1.0


@pytest.mark.parametrize("mode", ["split", "masters fp16", "masters bf16 rmsprop"])
@pytest.mark.parametrize("after", [4, 5])
def test_a_resumed_run_goes_on_bit_by_bit(mode: str, after: int) -> None:
    mp = made(mode, accumulate=2, clip_norm=0.5)
    for index in range(after):
        run(mp, index)
    file = io.BytesIO()
    torch.save([mp.model.state_dict(), mp.optimizer.state_dict(), mp.state_dict()], file)
    file.seek(0)
    model_state, optimizer_state, state = torch.load(file, weights_only=True)
    twin = made(mode, accumulate=2, clip_norm=0.5)
    twin.model.load_state_dict(model_state)
    twin.optimizer.load_state_dict(optimizer_state)
    twin.load_state_dict(state)
    for index in range(after, after + 6):
        for each in (mp, twin):
            run(each, index)
    assert same(everything(mp), everything(twin))
    assert mp.loss_scale == twin.loss_scale


def test_two_networks_with_split_weights() -> None:
    generator, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mp_g, mp_d = made("split", generator), made("split", judge)
    noise = torch.randn(5, 3)
    for _ in range(3):
        with mp_d.autocast():
            loss = judge(generator(noise)).float().mean()
        before = [p.detach().clone() for p in generator.parameters()]
        assert mp_d.step(loss).moved
        assert same([p.detach() for p in generator.parameters()], before)
        assert all(p.grad is None for p in generator.parameters())
        with mp_g.autocast():
            loss = -judge(generator(noise)).float().mean()
        before = [p.detach().clone() for p in judge.parameters()]
        assert mp_g.step(loss).moved
        assert same([p.detach() for p in judge.parameters()], before)
    assert {p.dtype for p in (*generator.parameters(), *judge.parameters())} == {torch.bfloat16}


def test_another_s_parameters_are_not_lowered() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(body, head)
    plain = mezzo.MixedPrecision(model, torch.optim.RMSprop(head.parameters()), "bf16")
    split = mezzo.MixedPrecision(model, torch.optim.SGD(body.parameters(), lr=0.1), "bf16", weights="split")
    assert (body.weight.dtype, head.weight.dtype) == (torch.bfloat16, torch.float32)
    for mp in (plain, split):
        with mp.autocast():
            loss = model(torch.ones(1, 2)).float().sum()
        assert mp.step(loss).moved


def test_auto_takes_what_the_weights_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), weights="split")
    assert mp.precision == "bf16"
    assert mp.decision is not None
    assert "nothing was timed" in mp.decision.reason
    for hardware, expected in (({"fp16"}, "fp16"), ({"bf16", "fp16"}, "bf16")):
        monkeypatch.setattr(auto.machine, "native_formats", lambda device, found=hardware: found)
        model = network()
        mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), weights="masters")
        assert mp.precision == expected
        assert mp.decision is not None
    monkeypatch.setattr(auto.machine, "native_formats", lambda device: set())
    model = network()
    with pytest.raises(UnsupportedPrecisionError, match="no fast 16-bit"):
        mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), weights="masters")
    assert model[0].weight.dtype is torch.float32


def test_the_policy_s_own_words_do_the_same() -> None:
    for text, remainder in (
        ("bf16,params=bf16", torch.int16),
        ("bf16,masters=split8", torch.int8),
        ("bf16,masters=none", None),
    ):
        model = network()
        mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), text)
        run(mp)
        assert model[0].weight.dtype is torch.bfloat16
        kept = mp.optimizer.state[model[0].weight].get("remainder")
        assert (None if kept is None else kept.dtype) is remainder
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), "fp16,params=fp16,state=int8")
    assert run(mp).moved
    assert mp.optimizer.state[model[0].weight]["exp_avg"].dtype is torch.uint8
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), "bf16,params=bf16,module.3=fp32")
    assert run(mp).moved
    assert [model[i].weight.dtype for i in (0, 3)] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("optimizer", ["fused", "with masters"])
def test_a_model_that_is_in_16_bits_already_keeps_its_optimizer_s_masters(optimizer: str) -> None:
    model = network()
    lower_weights(model, "bf16")
    given = (
        SGD(model.parameters(), lr=0.1, masters="split")
        if optimizer == "fused"
        else with_masters(torch.optim.RMSprop(model.parameters(), lr=0.01))
    )
    mp = mezzo.MixedPrecision(model, given)
    assert mp.precision == "bf16"
    assert mp.decision is not None
    assert "stored in it" in mp.decision.reason
    losses = [run(mp).loss for _ in range(20)]
    assert losses[-1] < losses[0]
    assert mp.optimizer is given


@pytest.mark.parametrize("mode", ["split", "given fp16", "masters bf16 rmsprop"])
def test_the_same_objects_train_on_after_close(mode: str) -> None:
    model = network()
    weights, precision, make, _ = MODES[mode]
    optimizer = make(model.parameters())
    trained = []
    for again in (False, True):
        mp = mezzo.MixedPrecision(model, optimizer, precision, weights=None if again else weights)
        trained += [run(mp).loss for _ in range(10)]
        assert mp.optimizer is optimizer
        mp.close()
    assert trained[-1] < trained[9] < trained[0]
    mp = mezzo.MixedPrecision(model, optimizer, precision, weights=weights)
    assert run(mp).moved


def test_a_weight_that_became_infinite_is_told() -> None:
    model = nn.Linear(1, 1, bias=False)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16", weights="split")
    result = mp.step(model.weight.float().sum() * 2.0)
    assert (result.weight_overflow, result.reason) == (False, "")
    overflowing = mp.step(model.weight.float().sum() * -3.4e38)
    assert overflowing.moved
    assert overflowing.weight_overflow
    assert "infinite in its 16-bit format" in overflowing.reason
    assert not result.weight_overflow  # what one step did is not changed by the next


def test_a_grad_scaler_steps_fp16_weights() -> None:
    model = nn.Linear(4, 2)
    lower_weights(model, "fp16")
    optimizer = AdamW(model.parameters(), lr=0.01)
    scaler = mezzo.GradScaler(init_scale=2.0**10)
    x, y = batch()
    losses = []
    for factor in (1.0, INF, *[1.0] * 20):
        with mezzo.autocast("fp16", "cpu"):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss * factor).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(UsageError, match=r"scaler\.step\(optimizer\) alone"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.was_skipped(optimizer) == (factor == INF)
        assert same([p.detach() for p in model.parameters()], before) == (factor == INF)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
