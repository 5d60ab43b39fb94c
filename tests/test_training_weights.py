"""MixedPrecision with 16-bit weights: beside loops written by hand, what a skip leaves, and what is refused."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import bad_steps
import mezzo
from mezzo.core.errors import UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.pytorch import auto
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.stored_parameters import lower_weights
from training_steps import INF, OPTIMIZERS, batch, everything, network, run, same

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

Make = Callable[[Any], torch.optim.Optimizer]
BF16 = torch.bfloat16

ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=0.05)  # noqa: E731

# masters=, precision, the optimizer, state=
MODES: dict[str, tuple[str, str, Make, str | None]] = {
    "split": ("split", "bf16", ADAMW, None),
    "split8 int8": ("split8", "bf16", ADAMW, "int8"),
    "split sgd": ("split", "bf16", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "bf16"),
    "masters bf16": ("fp32", "bf16", ADAMW, None),
    "masters fp16": ("fp32", "fp16", lambda p: torch.optim.Adam(p, lr=0.05), None),
    "masters rmsprop": ("fp32", "bf16", lambda p: torch.optim.RMSprop(p, lr=0.01), None),
    "given split": ("split", "bf16", lambda p: AdamW(p, lr=0.05, masters="split"), None),
    "fp32 int8": ("auto", "bf16", ADAMW, "int8"),
    "plain fp16": ("auto", "fp16", OPTIMIZERS["adamw-fused"], None),
    "plain fp32": ("auto", "fp32", OPTIMIZERS["adamw-fused"], None),
}


def made(mode: str, model: nn.Module | None = None, **more: Any) -> Any:
    masters, fmt, make, state = MODES[mode]
    model = network() if model is None else model
    return mezzo.MixedPrecision(model, make(model.parameters()), fmt, masters=masters, state=state, **more)


@pytest.mark.parametrize(("mode", "accumulate"), [(mode, 1 + i % 2) for i, mode in enumerate(MODES)])
def test_every_mode_learns_and_stores_what_it_says(mode: str, accumulate: int) -> None:
    mp = made(mode, accumulate=accumulate, clip_norm=1.0)
    masters, precision, _, _ = MODES[mode]
    stored = torch.float32 if masters == "auto" else dtype_of(precision)
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


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        ("split", {}),
        ("masters fp16", {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}),
        ("masters rmsprop", {"avg_fn": get_ema_avg_fn(0.5)}),
    ],
)
def test_an_average_is_of_the_fp32_masters(mode: str, arguments: dict[str, Any]) -> None:
    model = network()
    ema, own = AveragedModel(model, **arguments), list(model.parameters())
    mp = made(mode, model, ema=ema, loss_scale=256)
    twin = AveragedModel(network(), **arguments)
    for index in range(3):
        run(mp, index)
        fp32 = network()
        fp32.load_state_dict(mezzo.master_state_dict(model, mp.optimizer))
        twin.update_parameters(fp32)
    assert same(list(ema.module.parameters()), list(twin.module.parameters()))
    assert {p.dtype for p in ema.module.parameters()} == {torch.float32}
    assert all(a is b for a, b in zip(model.parameters(), own))


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


# An entry of a weight's state, and its dtype.
STORED = {
    "split": ("remainder", torch.int16),
    "split8": ("remainder", torch.int8),
    "fp32": ("master", torch.float32),
    "none": ("remainder", None),
    "int8": ("exp_avg", torch.uint8),
}
# The precision, the arguments, the policy's text that says the same, the weight's dtype, and which entry it has.
WORDS: list[tuple[str, dict[str, Any], str, torch.dtype, str]] = [
    ("bf16", {"masters": "split"}, "bf16,masters=split", BF16, "split"),
    ("bf16", {"masters": "split8", "state": "int8"}, "bf16,masters=split8,state=int8", BF16, "split8"),
    ("bf16", {"masters": "fp32"}, "bf16,masters=fp32", BF16, "fp32"),
    ("bf16", {"masters": "none"}, "bf16,masters=none", BF16, "none"),
    ("bf16", {"params": BF16, "masters": "fp32"}, "bf16,params=bf16,masters=fp32", BF16, "fp32"),
    ("fp16", {"masters": "fp32"}, "fp16,masters=fp32", torch.float16, "fp32"),
    ("bf16,params=bf16", {"masters": "split"}, "bf16,masters=split", BF16, "split"),
    ("auto", {"masters": "none"}, "bf16,masters=none", BF16, "none"),
    ("bf16,params=bf16", {}, "bf16,params=bf16", BF16, "split"),
    ("bf16,masters=split8", {}, "bf16,masters=split8", BF16, "split8"),
    ("fp16,params=fp16,state=int8", {}, "fp16,params=fp16,state=int8", torch.float16, "int8"),
    ("bf16,params=bf16,module.0=fp32", {}, "bf16,params=bf16,module.0=fp32", torch.float32, "none"),
]


@pytest.mark.parametrize(("precision", "arguments", "text", "dtype", "stored"), WORDS)
def test_what_arguments_and_the_policy_s_text_store(
    precision: str, arguments: dict[str, Any], text: str, dtype: torch.dtype, stored: str
) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision, **arguments)
    assert mp.policy == mezzo.policy(text)
    assert run(mp).stepped
    assert model[0].weight.dtype is dtype
    name, expected = STORED[stored]
    kept = mp.optimizer.state[model[0].weight].get(name)
    assert (None if kept is None else kept.dtype) is expected


@pytest.mark.parametrize(
    ("weights", "now", "text"),
    [("fp32", "params='fp32'", "bf16"), ("masters", "masters='fp32'", "bf16,masters=fp32")],
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


@pytest.mark.parametrize(
    "make",
    [lambda p: SGD(p, lr=0.1, masters="split"), lambda p: with_masters(torch.optim.RMSprop(p, lr=0.01))],
)
def test_a_model_that_is_in_16_bits_already_keeps_its_optimizer_s_masters(make: Make) -> None:
    model = network()
    lower_weights(model, "bf16")
    given = make(model.parameters())
    mp = mezzo.MixedPrecision(model, given)
    assert mp.precision == "bf16"
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
    with pytest.raises(UsageError, match=r"params=bf16, masters=split, .* params=bf16, masters=fp32"):
        masters.load_state_dict(split.state_dict())
    with pytest.raises(UsageError, match="this training has params=fp32"):
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
    with pytest.raises(UsageError, match="params=fp32, masters=fp32, and this"):
        made("split", accumulate=2).load_state_dict(open_window.state_dict())


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=0.1))


def of_another(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def of_keras(params: Any) -> Any:
    return type("Adam", (type("Optimizer", (), {"__module__": "keras.src.optimizers"}),), {})()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no parameters": ({"model": nn.Tanh(), "optimizer": of_another}, "no parameters"),
    "no module": ({"model": 3, "optimizer": of_another}, "int, not torch.s Module"),
    "no optimizer": ({"optimizer": lambda p: [*p]}, "list, not torch.s Optimizer"),
    "a model of Keras": ({"model": of_keras(None), "optimizer": of_another}, "mezzo.keras.set_policy"),
    "an optimizer of Keras": ({"optimizer": of_keras}, "mezzo.keras.set_policy"),
    "lbfgs with masters": ({"optimizer": lambda p: with_masters(torch.optim.LBFGS(p))}, "LBFGS evaluates"),
    "unknown precision": ({"precision": "f16"}, "Did you mean"),
    "clip_norm": ({"clip_norm": 0.0}, "clip_norm is 0.0"),
    "clip_norm as text": ({"clip_norm": "1"}, "clip_norm is '1'"),
    "clip_value as bool": ({"clip_value": True}, "clip_value is True"),
    "a scheduler's class": ({"scheduler": torch.optim.lr_scheduler.StepLR}, "an object with step"),
    "an average's class": ({"ema": torch.optim.swa_utils.AveragedModel}, "another object with update_parameters"),
    "accumulate": ({"accumulate": 0}, "accumulate is 0"),
    "watch": ({"watch": -1, "masters": "split"}, "watch is -1"),
    "plateau": ({"scheduler": PLATEAU}, "ReduceLROnPlateau"),
    "loss scale": ({"loss_scale": -1.0}, "scale is -1"),
    "torch.autocast's name": ({"dtype": torch.float16}, "Did you mean 'precision'"),
    "torch.autocast's switch": ({"enabled": False}, "Did you mean precision='fp32'"),
    "an argument that none is like": ({"fp16": True}, r"'fp16'.*[a-z]\.$"),
    "unknown masters": ({"masters": "spilt"}, "Did you mean 'split'"),
    "split fp16": ({"precision": "fp16", "masters": "split"}, "masters=fp32"),
    "FP32 parameters with masters": ({"params": "fp32", "masters": "split"}, "params=bf16"),
    "other format": ({"precision": "fp16", "params": "bf16"}, "two 16-bit formats"),
    "split fp32": ({"precision": "fp32", "masters": "split"}, "params=bf16"),
    "against the policy": ({"precision": "bf16,params=bf16", "masters": "split8"}, "Remove one of the two"),
    "amsgrad": ({"masters": "split", "optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)}, "amsgrad"),
    "other masters": ({"masters": "split", "optimizer": AdamW}, "Create it with masters='split'"),
    "pattern": ({"precision": "bf16,module.head=fp32", "masters": "split"}, "matches no"),
    "overrides": ({"precision": "bf16,module.3=fp32", "masters": "split", "optimizer": torch.optim.RMSprop},
     "with_masters"),
    "release rmsprop masters": ({"release_gradients": True, "masters": "fp32", "optimizer": torch.optim.RMSprop},
     "one parameter at a time"),
    "release clip_value": ({"release_gradients": True, "masters": "split", "clip_value": 1.0}, "Use clip_norm"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_leaves_model_and_optimizer_as_they_were(row: str) -> None:
    arguments, message = REFUSED[row]
    arguments = {"precision": "bf16", "optimizer": ADAMW, "model": network()} | arguments
    model, precision = arguments.pop("model"), arguments.pop("precision")
    if not isinstance(model, nn.Sequential):
        with pytest.raises((UsageError, UnknownNameError), match=message):
            mezzo.MixedPrecision(model, arguments["optimizer"](None), precision)
        return
    optimizer = arguments.pop("optimizer")(model.parameters())
    model(batch()[0]).sum().backward()
    if type(optimizer) in (AdamW, torch.optim.AdamW):
        optimizer.step()  # so that there is a state to be left alone
    given = [model.state_dict(), optimizer.state_dict() if hasattr(optimizer, "state_dict") else {}]
    before, attributes = copy.deepcopy(given), dict(vars(optimizer)) if hasattr(optimizer, "state") else {}
    with pytest.raises((UsageError, UnknownNameError), match=message):
        mezzo.MixedPrecision(model, optimizer, precision, **arguments)
    assert bad_steps.same([model.state_dict(), given[1]], before)
    if attributes:
        assert bad_steps.same(optimizer.state_dict(), before[1])
        assert vars(optimizer).keys() == attributes.keys()
        assert all(vars(optimizer)[name] == value for name, value in attributes.items() if callable(value))
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    model.zero_grad()
    assert run(mezzo.MixedPrecision(model, ADAMW(model.parameters()), "bf16")).stepped


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_16_bit_parameters_without_masters_or_of_another_format_are_refused(fmt: str) -> None:
    model = nn.Linear(2, 2).to(torch.float16 if fmt == "fp16" else torch.bfloat16)
    with pytest.raises(UsageError, match="masters='fp32'"):
        mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), fmt)
    for other, kind in itertools.product({"fp32", "fp16", "bf16"} - {fmt}, (AdamW, torch.optim.AdamW)):
        with pytest.raises(UsageError, match=f"'{fmt},masters="):  # at once, not after advice to take masters
            mezzo.MixedPrecision(model, kind(model.parameters()), other)
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), fmt, masters="fp32")
    with mp.autocast():
        loss = model(torch.ones(1, 2)).mean()
    assert mp.step(loss).stepped


@pytest.mark.parametrize("mode", ["split", "masters fp16", "masters rmsprop", "plain fp16", "plain fp32"])
@pytest.mark.parametrize("after", [4, 5])
@pytest.mark.parametrize("next_factor", [1.0, INF])
def test_a_resumed_run_goes_on_bit_by_bit(mode: str, after: int, next_factor: float, decides: str) -> None:
    """Between two windows and inside one, before a good step and before one that is skipped."""
    scale = mezzo.DynamicLossScale(growth_interval=3, init=2.0**8) if "fp16" in mode else None
    if scale is None and next_factor == INF:
        next_factor = 2.0
    mp, twin = (made(mode, accumulate=2, clip_norm=0.5, loss_scale=scale) for _ in range(2))
    for index in range(after):
        run(mp, index, INF if index == 2 and scale is not None else 1.0)
    file = io.BytesIO()
    torch.save([mp.model.state_dict(), mp.optimizer.state_dict(), mp.state_dict()], file)
    file.seek(0)
    for part, state in zip((twin.model, twin.optimizer, twin), torch.load(file, weights_only=True)):
        part.load_state_dict(state)
    for index in range(after, after + 6):
        for each in (mp, twin):
            run(each, index, next_factor if index == after else 1.0)
    assert same(everything(mp), everything(twin))
    assert mp.loss_scale == twin.loss_scale


def test_close_and_deletion_put_the_gradients_format_back() -> None:
    model = network()
    mp = made("split", model, accumulate=2)
    run(mp)
    assert model[0].weight.grad.dtype is torch.float32
    with pytest.warns(UserWarning, match=r"1 of 2 losses"):
        mp.close()
    assert model[0].weight.grad is None
    assert model[0].weight.grad_dtype is torch.bfloat16
    second = mezzo.MixedPrecision(model, mp._fused, "bf16", accumulate=2)
    assert model[0].weight.grad_dtype is torch.bfloat16  # until the window begins
    run(second)
    assert model[0].weight.grad_dtype is torch.float32
    del second
    assert model[0].weight.grad_dtype is torch.bfloat16
    assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("masters", ["split", "fp32"])
def test_ddp_of_one_rank_trains_as_the_model_alone(masters: str, accumulate: int) -> None:
    def trained(wrapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        mezzo.lower_weights(net, "bf16")
        model = nn.parallel.DistributedDataParallel(net) if wrapped else net
        optimizer = mezzo.optim.SGD(net.parameters(), lr=0.1, masters=masters)
        mp = mezzo.MixedPrecision(model, optimizer, f"bf16,masters={masters}", accumulate=accumulate)
        for x in torch.randn(6, 4, 8):
            with mp.autocast():
                loss = model(x).float().square().mean()
            mp.step(loss)
        mp.close()
        return list(net.parameters())

    alone = trained(wrapped=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = trained(wrapped=True)
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, alone, wrapped))
