"""MixedPrecision with 16-bit weights: the modes beside loops written by hand, FP32 accumulation, what is
refused, what a skip and a failed constructor leave.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.core.errors import UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.pytorch import auto
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.optim.adamw import AdamW
from mezzo.pytorch.optim.sgd import SGD
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights import lower_weights
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

Make = Callable[[Any], torch.optim.Optimizer]

ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=0.05)  # noqa: E731

# weights=, precision, the optimizer, state=
MODES: dict[str, tuple[str, str, Make, str | None]] = {
    "split": ("split", "bf16", ADAMW, None),
    "split8 int8": ("split8", "bf16", ADAMW, "int8"),
    "split sgd": ("split", "bf16", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "bf16"),
    "masters bf16": ("masters", "bf16", ADAMW, None),
    "masters fp16": ("masters", "fp16", lambda p: torch.optim.Adam(p, lr=0.05), None),
    "masters fp16 rmsprop": ("masters", "fp16", lambda p: torch.optim.RMSprop(p, lr=0.01), None),
    "masters bf16 rmsprop": ("masters", "bf16", lambda p: torch.optim.RMSprop(p, lr=0.01), None),
    "given split": ("split", "bf16", lambda p: AdamW(p, lr=0.05, masters="split"), None),
    "given fp16": ("masters", "fp16", lambda p: AdamW(p, lr=0.05), None),
    "fp32 int8": ("fp32", "bf16", ADAMW, "int8"),
}


def made(mode: str, model: nn.Module | None = None, **arguments: Any) -> Any:
    weights, precision, optimizer, state = MODES[mode]
    model = network() if model is None else model
    return mezzo.MixedPrecision(
        model, optimizer(model.parameters()), precision, weights=weights, state=state, **arguments
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


def test_an_average_in_16_bits_is_refused() -> None:
    model = network()
    lower_weights(model, "bf16")
    with pytest.raises(UsageError, match=r"ema\.float\(\)"):
        made("given split", model, ema=AveragedModel(model))
    assert run(made("given split", model, ema=AveragedModel(model).float())).moved


def test_the_user_s_own_optimizer_saves_and_clears() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mp = mezzo.MixedPrecision(model, optimizer, "bf16", weights="split")
    assert mp.optimizer is optimizer
    run(mp)
    entries = optimizer.state_dict()["state"][0]
    assert entries["remainder"].dtype is torch.int16
    assert float(entries["step"]) == 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accumulated_gradients_are_fp32_and_lose_nothing(precision: str) -> None:
    """300 equal gradients of 1: a bf16 sum stops at 256; fp16's would be scaled past its largest number."""
    model = nn.Linear(1, 1, bias=False)
    mp = mezzo.MixedPrecision(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        precision,
        weights="masters",
        accumulate=300,
        loss_scale=2.0**16,
    )
    mp._fused.set_master(model.weight, torch.zeros(1, 1))
    for _ in range(299):
        mp.step((model.weight * torch.ones(1, 1, dtype=model.weight.dtype)).float().sum())
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    result = mp.step(model.weight.float().sum())
    assert result.moved
    # 2**16 / 300 is rounded where a 16-bit gradient begins.
    assert result.grad_norm == pytest.approx(1.0, rel=2**-8)
    assert float(mp._fused.master(model.weight)) == pytest.approx(-1.0, rel=2**-8)
    mp.close()
    assert model.weight.grad_dtype is model.weight.dtype


def test_close_and_deletion_put_the_gradients_format_back() -> None:
    model = network()
    mp = made("split", model, accumulate=2)
    run(mp)
    assert model[0].weight.grad.dtype is torch.float32
    mp.close()
    assert model[0].weight.grad.dtype is torch.bfloat16
    assert model[0].weight.grad_dtype is torch.bfloat16
    model.zero_grad()
    second = mezzo.MixedPrecision(model, mp._fused, "bf16", accumulate=2)
    assert model[0].weight.grad_dtype is torch.float32
    del second
    assert model[0].weight.grad_dtype is torch.bfloat16
    assert model[0].weight.dtype is torch.bfloat16


class Tied(nn.Module):
    """Eight layers of 256 x 256, of which the last four are the first four again where tied."""

    def __init__(self, *, tied: bool, checkpointed: bool) -> None:
        super().__init__()
        layers = [nn.Linear(256, 256, bias=False) for _ in range(4 if tied else 8)]
        self.layers = nn.ModuleList(layers)
        self._twice = 2 if tied else 1
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._twice):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self._checkpointed else layer(x)
                x = torch.tanh(x)
        return x


def peak_bytes(accumulate: int, *, tied: bool = False, checkpointed: bool = False, **arguments: Any) -> float:
    """Bytes a parameter, at the peak of two windows after the first."""
    torch.manual_seed(0)
    model = Tied(tied=tied, checkpointed=checkpointed)
    mp = mezzo.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", accumulate=accumulate, **arguments
    )
    x = torch.randn(2, 256)

    def window() -> None:
        for _ in range(accumulate):
            with mp.autocast():
                loss = model(x).float().square().mean()
            mp.step(loss)

    window()
    gc.collect()
    peak = PeakTensorBytes()
    peak.start()
    window()
    window()
    bytes_ = peak.stop().peak_bytes
    mp.close()
    return bytes_ / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_peak_of_gradient_accumulation(tied: bool, checkpointed: bool) -> None:
    """Split SGD: 2 weight, 2 remainder, 2 gradient; or 4 for FP32 sums and 6 for the layer that arrives."""
    layer = 1 / (4 if tied else 8)
    spare = 0.25  # activations and seeds
    arguments: dict[str, Any] = {"tied": tied, "checkpointed": checkpointed, "weights": "split"}
    # A tied weight's first gradient waits for its second in the engine, which casts it to FP32 first.
    assert 6.0 <= peak_bytes(1, **arguments) <= 6.0 + (4 * layer if tied else 0.0) + spare
    assert 8.0 <= peak_bytes(4, **arguments) <= 8.0 + (4 + 8 * layer if tied else 6 * layer) + spare


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


def test_states_of_other_weights_are_refused_but_fp32_goes_on_in_16_bits() -> None:
    split, masters, fp32 = made("split"), made("masters bf16"), made("fp32 int8")
    for mp in (split, masters, fp32):
        run(mp)
    with pytest.raises(
        UsageError, match="weights bf16 with masters=split; here they are bf16 with masters=fp32"
    ):
        masters.load_state_dict(split.state_dict())
    with pytest.raises(UsageError, match="here they are fp32"):
        fp32.load_state_dict(split.state_dict())
    masters.load_state_dict(fp32.state_dict())
    open_window = made("fp32 int8", accumulate=2)
    run(open_window)
    with pytest.raises(UsageError, match="weights fp32; here"):
        made("split", accumulate=2).load_state_dict(open_window.state_dict())


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


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown weights": ({"weights": "spilt"}, UnknownNameError, "Did you mean 'split'"),
    "unknown state": ({"state": "int4"}, UnknownNameError, "Did you mean 'int8'"),
    "split fp16": ({"precision": "fp16", "weights": "split"}, UsageError, "weights='masters'"),
    "split fp32": ({"precision": "fp32", "weights": "split"}, UsageError, "precision='bf16'"),
    "against the policy": (
        {"precision": "bf16,params=bf16", "weights": "split8"},
        UsageError,
        "Leave one of the two out",
    ),
    "fp32 against the policy": (
        {"precision": "bf16,params=bf16", "weights": "fp32"},
        UsageError,
        "Leave one of the two out",
    ),
    "policy computes wider": ({"precision": "fp32,params=bf16"}, UsageError, "compute=bf16"),
    "split rmsprop": (
        {"weights": "split", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "masters",
    ),
    "state rmsprop": (
        {"state": "int8", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "RMSprop",
    ),
    "amsgrad": (
        {"weights": "split", "optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
        UsageError,
        "amsgrad",
    ),
    "other masters": (
        {"weights": "split", "optimizer": lambda p: AdamW(p)},
        UsageError,
        "Make it with masters='split'",
    ),
    "other state": (
        {"weights": "split", "state": "int8", "optimizer": lambda p: AdamW(p, masters="split")},
        UsageError,
        "Make it with state='int8'",
    ),
    "pattern": ({"precision": "bf16,module.head=fp32", "weights": "split"}, UnknownNameError, "matches no"),
    "release rmsprop": (
        {"release_gradients": True, "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "release_gradients=True steps inside backward",
    ),
    "release rmsprop masters": (
        {"release_gradients": True, "weights": "masters", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "release_gradients=True steps inside backward",
    ),
    "release clip_value": (
        {"release_gradients": True, "weights": "split", "clip_value": 1.0},
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
    optimizer.zero_grad()
    assert run(mezzo.MixedPrecision(model, optimizer, "bf16")).moved


@pytest.mark.parametrize(
    ("convert", "precision", "message"),
    [
        (nn.Module.half, "fp16", "weights='masters'"),
        (nn.Module.bfloat16, "bf16", "split"),
    ],
)
def test_16_bit_parameters_without_masters_are_refused(
    convert: Callable[[nn.Module], nn.Module], precision: str, message: str
) -> None:
    model = convert(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=message):
        mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision)
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision, weights="masters")
    with mp.autocast():
        loss = model(torch.ones(1, 2)).mean()
    assert mp.step(loss).moved


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
