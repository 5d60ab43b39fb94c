"""MixedPrecision with 16-bit weights: beside loops written by hand, what a skip leaves, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import mezzo
from mezzo.core.errors import UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.pytorch import auto
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.lowering import lower_weights
from training_modes import ADAMW, MODES, made
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


@pytest.mark.parametrize(("mode", "accumulate"), [(mode, 1 + i % 2) for i, mode in enumerate(MODES)])
def test_every_mode_learns_and_stores_what_it_says(mode: str, accumulate: int) -> None:
    mp = made(mode, accumulate=accumulate, clip_norm=1.0)
    masters, precision, _, _ = MODES[mode]
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        "fp32" if masters == "auto" else precision
    ]
    assert {p.dtype for p in (*mp.model[0].parameters(), *mp.model[3].parameters())} == {stored}
    assert {p.dtype for p in mp.model[1].parameters()} == {torch.float32}
    losses = []
    for _ in range(30):
        for _ in range(accumulate):
            result = run(mp)
        losses.append(result.loss)
        assert result.stepped
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
    for masters in ("split", "fp32"):
        twin = network()
        mp = mezzo.MixedPrecision(
            twin,
            torch.optim.AdamW(twin.parameters(), lr=0.1),
            "bf16",
            masters=masters,
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
    assert (result.stepped, result.skipped) == (False, True)
    assert "NaN or infinite at loss scale 256" in result.reason
    assert same(everything(mp), before)
    assert mp.loss_scale == 2.0**7
    for index in range(accumulate):
        result = run(mp, index)
    assert result.stepped
    assert not same(everything(mp), before)
    assert all(t.isfinite().all() for t in everything(mp) if t.is_floating_point())


@pytest.mark.parametrize("mode", ["split8 int8", "masters fp16 rmsprop"])
def test_scheduler_and_average_follow_moves(mode: str) -> None:
    model = network()
    masters, precision, make, state = MODES[mode]
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen: list[nn.Module] = []
    mp = mezzo.MixedPrecision(
        model,
        optimizer,
        precision,
        masters=masters,
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


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("split", "plain"),
        ("masters fp16", "foreach"),
        ("masters bf16 rmsprop", "function"),
        ("fp32 int8", "plain"),
    ],
)
def test_an_average_is_of_the_fp32_masters(mode: str, kind: str) -> None:
    masters, precision, make, state = MODES[mode]
    model = network()
    arguments: dict[str, Any] = {
        "plain": {},
        "foreach": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        "function": {"avg_fn": get_ema_avg_fn(0.5)},
    }[kind]
    ema = AveragedModel(model, **arguments)
    mp = mezzo.MixedPrecision(
        model, make(model.parameters()), precision, masters=masters, state=state, ema=ema, loss_scale=256
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


@pytest.mark.parametrize(("mode", "after"), [("split", 5), ("masters fp16", 4), ("masters bf16 rmsprop", 5)])
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


def test_another_s_parameters_are_not_lowered() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(body, head)
    plain = mezzo.MixedPrecision(model, torch.optim.RMSprop(head.parameters()), "bf16")
    split = mezzo.MixedPrecision(model, torch.optim.SGD(body.parameters(), lr=0.1), "bf16", masters="split")
    assert (body.weight.dtype, head.weight.dtype) == (torch.bfloat16, torch.float32)
    for mp in (plain, split):
        with mp.autocast():
            loss = model(torch.ones(1, 2)).float().sum()
        assert mp.step(loss).stepped


def test_auto_takes_what_the_weights_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), masters="split")
    assert mp.precision == "bf16"
    assert mp.decision is not None
    assert "nothing was timed" in mp.decision.reason
    for hardware, expected in (({"fp16"}, "fp16"), ({"bf16", "fp16"}, "bf16")):
        monkeypatch.setattr(auto.hardware, "native_formats", lambda device, found=hardware: found)
        model = network()
        mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), masters="fp32")
        assert mp.precision == expected
        assert mp.decision is not None
    monkeypatch.setattr(auto.hardware, "native_formats", lambda device: set())
    model = network()
    with pytest.raises(UnsupportedPrecisionError, match="no fast 16-bit"):
        mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), masters="fp32")
    assert model[0].weight.dtype is torch.float32


# The arguments, and the policy's text that says the same.
WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("bf16", {"masters": "split"}, "bf16,masters=split"),
    ("bf16", {"masters": "split8", "state": "int8"}, "bf16,masters=split8,state=int8"),
    ("bf16", {"masters": "fp32"}, "bf16,masters=fp32"),
    ("bf16", {"masters": "none"}, "bf16,masters=none"),
    ("bf16", {"params": "bf16"}, "bf16,params=bf16"),
    ("bf16", {"params": torch.bfloat16, "masters": "fp32"}, "bf16,params=bf16,masters=fp32"),
    ("bf16", {"params": "fp32"}, "bf16"),
    ("bf16", {"masters": "auto"}, "bf16"),
    ("fp16", {"masters": "fp32"}, "fp16,masters=fp32"),
    ("fp16", {"params": "fp16"}, "fp16,params=fp16"),
    ("fp32", {"masters": "fp32"}, "fp32"),
    ("bf16,masters=split8", {"params": "bf16"}, "bf16,masters=split8"),
    ("bf16,params=bf16", {"masters": "split"}, "bf16,masters=split"),
    ("auto", {"params": "bf16"}, "bf16,params=bf16"),
    ("auto", {"masters": "none"}, "bf16,masters=none"),
]


@pytest.mark.parametrize(("precision", "arguments", "text"), WORDS)
def test_the_arguments_say_what_the_policy_s_text_says(
    precision: str, arguments: dict[str, Any], text: str
) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision, **arguments)
    assert mp.policy == mezzo.policy(text)
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mp.policy.params]
    assert model[0].weight.dtype is stored


@pytest.mark.parametrize(
    ("weights", "now", "text"),
    [
        ("fp32", "params='fp32'", "bf16"),
        ("split", "masters='split'", "bf16,masters=split"),
        ("split8", "masters='split8'", "bf16,masters=split8"),
        ("masters", "masters='fp32'", "bf16,masters=fp32"),
    ],
)
def test_the_former_argument_weights_shows_its_new_words(weights: str, now: str, text: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=now):
        mezzo.MixedPrecision(model, optimizer, "bf16", weights=weights, masters="split")
    with pytest.raises(UnknownNameError, match="Did you mean 'split'"):
        mezzo.MixedPrecision(model, optimizer, "bf16", weights="spilt")
    with pytest.warns(DeprecationWarning, match=now) as warned:
        mp = mezzo.MixedPrecision(model, optimizer, "bf16", weights=weights)
    assert warned[0].filename == __file__
    assert mp.policy == mezzo.policy(text)


def test_the_former_name_of_result_stepped_is_deprecated() -> None:
    result = run(made("split"))
    with pytest.warns(DeprecationWarning, match="stepped"):
        assert result.moved


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
    assert run(mp).stepped
    assert mp.optimizer.state[model[0].weight]["exp_avg"].dtype is torch.uint8
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), "bf16,params=bf16,module.3=fp32")
    assert run(mp).stepped
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


def test_a_weight_that_became_infinite_is_told() -> None:
    model = nn.Linear(1, 1, bias=False)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16", masters="split")
    result = mp.step(model.weight.float().sum() * 2.0)
    assert (result.weight_overflow, result.reason) == (False, "")
    overflowing = mp.step(model.weight.float().sum() * -3.4e38)
    assert overflowing.stepped
    assert overflowing.weight_overflow
    assert "infinite in its 16-bit format" in overflowing.reason
    assert not result.weight_overflow  # what one step did is not changed by the next


# What is refused, and that nothing has changed then.


def test_an_average_in_16_bits_is_refused() -> None:
    model = network()
    lower_weights(model, "bf16")
    with pytest.raises(UsageError, match=r"ema\.float\(\)"):
        made("given split", model, ema=AveragedModel(model))
    assert run(made("given split", model, ema=AveragedModel(model).float())).stepped


def test_states_of_other_weights_are_refused_but_fp32_goes_on_in_16_bits() -> None:
    split, masters, fp32 = made("split"), made("masters bf16"), made("fp32 int8")
    for mp in (split, masters, fp32):
        run(mp)
    with pytest.raises(
        UsageError, match="params=bf16, masters=split; here they are params=bf16, masters=fp32"
    ):
        masters.load_state_dict(split.state_dict())
    with pytest.raises(UsageError, match="here they are params=fp32"):
        fp32.load_state_dict(split.state_dict())
    masters.load_state_dict(fp32.state_dict())
    # Version 0.1.0 saved one word for both.
    for mp, weights in ((fp32, "fp32"), (split, "bf16 with masters=split")):
        state = mp.state_dict() | {"schema": 1, "weights": weights}
        del state["params"], state["masters"]
        mp.load_state_dict(state)
        with pytest.raises(UsageError, match=f"saved with params={weights[:4]}, masters="):
            (split if mp is fp32 else masters).load_state_dict(state | {"window": {"seen": 1}})
    open_window = made("fp32 int8", accumulate=2)
    run(open_window)
    with pytest.raises(UsageError, match="params=fp32, masters=fp32; here"):
        made("split", accumulate=2).load_state_dict(open_window.state_dict())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown masters": ({"masters": "spilt"}, UnknownNameError, "Did you mean 'split'"),
    "unknown params": ({"params": "bf61"}, UnknownNameError, "Did you mean 'bf16'"),
    "unknown state": ({"state": "int4"}, UnknownNameError, "Did you mean 'int8'"),
    "split fp16": ({"precision": "fp16", "masters": "split"}, UsageError, "masters=fp32"),
    "FP32 parameters with masters": ({"params": "fp32", "masters": "split"}, UsageError, "params=bf16"),
    "other format": ({"precision": "fp16", "params": "bf16"}, UsageError, "two 16-bit formats"),
    "split fp32": ({"precision": "fp32", "masters": "split"}, UsageError, "params=bf16"),
    "against the policy": (
        {"precision": "bf16,params=bf16", "masters": "split8"},
        UsageError,
        "Leave one of the two out",
    ),
    "fp32 against the policy": (
        {"precision": "bf16,params=bf16", "params": "fp32"},
        UsageError,
        "Leave one of the two out",
    ),
    "policy computes wider": ({"precision": "fp32,params=bf16"}, UsageError, "compute=bf16"),
    "split rmsprop": (
        {"masters": "split", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "masters",
    ),
    "state rmsprop": (
        {"state": "int8", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "RMSprop",
    ),
    "amsgrad": (
        {"masters": "split", "optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
        UsageError,
        "amsgrad",
    ),
    "other masters": (
        {"masters": "split", "optimizer": lambda p: AdamW(p)},
        UsageError,
        "Make it with masters='split'",
    ),
    "other state": (
        {"masters": "split", "state": "int8", "optimizer": lambda p: AdamW(p, masters="split")},
        UsageError,
        "Make it with state='int8'",
    ),
    "pattern": ({"precision": "bf16,module.head=fp32", "masters": "split"}, UnknownNameError, "matches no"),
    "overrides": (
        {
            "precision": "bf16,module.3=fp32",
            "masters": "split",
            "optimizer": lambda p: torch.optim.RMSprop(p),
        },
        UsageError,
        "with_masters",
    ),
    "release rmsprop": (
        {"release_gradients": True, "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "release_gradients=True steps inside backward",
    ),
    "release rmsprop masters": (
        {"release_gradients": True, "masters": "fp32", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "release_gradients=True steps inside backward",
    ),
    "release clip_value": (
        {"release_gradients": True, "masters": "split", "clip_value": 1.0},
        UsageError,
        "Use clip_norm",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_leaves_model_and_optimizer_as_they_were(row: str) -> None:
    arguments, error, message = REFUSED[row]
    arguments = {"precision": "bf16", "optimizer": ADAMW} | arguments
    model = network()
    optimizer = arguments.pop("optimizer")(model.parameters())
    model(batch()[0]).sum().backward()
    optimizer.step()  # so that there is a state to be left alone
    bits = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    own = dict(vars(optimizer))
    with pytest.raises(error, match=message):
        mezzo.MixedPrecision(model, optimizer, **arguments)
    left = [model.state_dict(), optimizer.state_dict()]
    assert bits[0].keys() == left[0].keys()
    assert all(torch.equal(bits[0][key], left[0][key]) for key in bits[0])
    assert all(left[0][key].dtype is bits[0][key].dtype for key in bits[0])
    for index, entries in bits[1]["state"].items():
        for name, value in entries.items():
            assert torch.equal(left[1]["state"][index][name], value)
    assert {k: v for k, v in vars(optimizer).items() if callable(v)} == {
        k: v for k, v in own.items() if callable(v)
    }
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    optimizer.zero_grad()
    assert run(mezzo.MixedPrecision(model, optimizer, "bf16")).stepped


@pytest.mark.parametrize(
    ("convert", "precision", "message"),
    [
        (nn.Module.half, "fp16", "masters='fp32'"),
        (nn.Module.bfloat16, "bf16", "split"),
    ],
)
def test_16_bit_parameters_without_masters_are_refused(
    convert: Callable[[nn.Module], nn.Module], precision: str, message: str
) -> None:
    model = convert(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=message):
        mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision)
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision, masters="fp32")
    with mp.autocast():
        loss = model(torch.ones(1, 2)).mean()
    assert mp.step(loss).stepped


def test_masters_do_not_hide_that_an_optimizer_needs_a_closure() -> None:
    model = network()
    lower_weights(model, "bf16")
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        mezzo.MixedPrecision(model, with_masters(torch.optim.LBFGS(model.parameters())), "bf16")


def test_16_bit_parameters_of_another_format_are_refused() -> None:
    model = nn.Linear(2, 2).bfloat16()
    for precision in ("fp32", "fp16"):
        with pytest.raises(UsageError, match="precision='bf16'"):
            mezzo.MixedPrecision(model, AdamW(model.parameters()), precision)
