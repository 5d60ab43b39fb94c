"""MixedPrecision: what is saved, loaded, recorded, dropped and refused; the code of docs/training.md."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core import records
from mezzo.core.errors import (
    CallOrderError,
    UnknownNameError,
    UsageError,
)
from mezzo.pytorch.training import mixed_precision
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


def resumed(mp: Any, **arguments: Any) -> Any:
    """A new process: model and optimizer from their own states, MixedPrecision from its file."""
    file = io.BytesIO()
    torch.save([mp.model.state_dict(), mp.optimizer.state_dict(), mp.state_dict()], file)
    file.seek(0)
    model_state, optimizer_state, state = torch.load(file, weights_only=True)
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    new = mezzo.MixedPrecision(model, optimizer, **arguments)
    new.load_state_dict(state)
    return new


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("after", [4, 5])
@pytest.mark.parametrize("next_factor", [1.0, INF])
def test_a_resumed_run_goes_on_bit_by_bit(
    precision: str, after: int, next_factor: float, decides: str
) -> None:
    if next_factor == INF and precision != "fp16":
        next_factor = 2.0
    arguments: dict[str, Any] = {"precision": precision, "accumulate": 2, "clip_norm": 0.5}
    if precision == "fp16":
        arguments["loss_scale"] = mezzo.DynamicLossScale(growth_interval=3, init=2.0**8)
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw-fused"](model.parameters()), **arguments)
    for index in range(after):
        run(mp, index, INF if index == 2 and precision == "fp16" else 1.0)
    twin = resumed(mp, **arguments)
    for index in range(after, after + 6):
        for each in (mp, twin):
            run(each, index, next_factor if index == after else 1.0)
    assert same(everything(mp), everything(twin))
    assert mp.loss_scale == twin.loss_scale


def test_states_of_grad_scalers_load() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=5)
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16")
    for state in (theirs.state_dict(), mezzo.GradScaler(init_scale=2.0**9, growth_interval=5).state_dict()):
        mp.load_state_dict(state)
        assert mp.loss_scale == 2.0**9
        assert mp.state_dict()["loss_scale"]["growth_interval"] == 5
    mp.load_state_dict({})
    assert mp.loss_scale == 2.0**9
    mp.close()
    bf16 = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "bf16")
    with pytest.warns(UserWarning, match="no dynamic loss scale"):
        bf16.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"a": 1}, "no state of MixedPrecision"),
        (lambda state: state | {"schema": 99}, "schema 99"),
        (lambda state: state | {"accumulate": 5}, "same accumulate"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Callable[[Any], Any], message: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", accumulate=3)
    run(mp)
    with pytest.raises(UsageError, match=message):
        mp.load_state_dict(change(mp.state_dict()))


def test_a_backward_that_raises_drops_its_window() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError("out of memory")

    weights = []
    for fails in (True, False):
        model = network()
        mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", accumulate=2)
        if fails:
            run(mp, 5)
            x = torch.tanh(model[0](batch(6)[0]))
            with pytest.raises(RuntimeError, match="out of memory"):
                mp.step(model[3](x).sum() + model[3](Fails.apply(x)).sum())
        assert not run(mp, 0).stepped
        assert run(mp, 1).stepped
        weights.append([p.detach() for p in model.parameters()])
    assert same(*weights)


def test_records_tell_of_every_loss_and_update(tmp_path: Path) -> None:
    writer = records.RecordWriter(tmp_path / "run.jsonl")
    model = network()
    mp = mezzo.MixedPrecision(
        model, OPTIMIZERS["sgd"](model.parameters()), "fp16", accumulate=2, records=writer
    )
    for factor in (1.0, 1.0, 1.0, INF):
        run(mp, factor=factor)
    mp.close()
    writer.close()
    found = list(records.read(tmp_path / "run.jsonl"))
    losses = [record.index for record in found if isinstance(record, records.LossRecord)]
    updates = [record for record in found if isinstance(record, records.UpdateRecord)]
    assert losses == [0, 1, 2, 3]
    assert [(u.index, u.moved, u.skipped, u.loss_scale) for u in updates] == [
        (0, True, False, 65536.0),
        (1, False, True, 65536.0),
    ]
    assert "NaN or infinite" in updates[1].reason


def refusable(
    model: nn.Module | None = None, optimizer: Any = None, precision: str = "fp16", **arguments: Any
) -> Any:
    model = network() if model is None else model
    optimizer = OPTIMIZERS["sgd"](model.parameters()) if optimizer is None else optimizer(model)
    return mezzo.MixedPrecision(model, optimizer, precision, **arguments)


STRANGER = nn.Linear(2, 2)


def of(optimizer: Any, whose: nn.Module | None = None) -> Any:
    return lambda model: optimizer((whose or model).parameters())


SGD = OPTIMIZERS["sgd"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no parameters": ({"model": nn.Tanh(), "optimizer": of(SGD, STRANGER)}, "no parameters"),
    "no module": ({"model": 3, "optimizer": of(SGD, STRANGER)}, "give a torch.nn.Module"),
    "no optimizer": ({"optimizer": lambda m: [SGD(m.parameters())]}, "give a torch.optim.Optimizer"),
    "another's optimizer": ({"optimizer": of(SGD, STRANGER)}, "belongs to this"),
    "lbfgs": ({"optimizer": of(torch.optim.LBFGS)}, "mezzo.GradScaler"),
    "half model": ({"model": nn.Linear(2, 2).half()}, "keep the model FP32"),
    "unknown precision": ({"precision": "f16"}, "Did you mean"),
    "no such module": ({"precision": "bf16,module.head=fp32"}, "matches no module"),
    "16-bit parameters": ({"precision": "params=bf16,compute=fp32"}, "Use compute=bf16"),
    "clip_norm": ({"clip_norm": 0.0}, "clip_norm is 0.0"),
    "clip_value": ({"clip_value": NAN}, "clip_value is nan"),
    "accumulate": ({"accumulate": 0}, "accumulate is 0"),
    "accumulate float": ({"accumulate": 2.0}, "accumulate is 2.0"),
    "watch": ({"watch": -1, "masters": "split"}, "watch is -1"),
    "watch, in parts": ({"watch": 0.5}, "watch is 0.5"),
    "trace, in words": ({"trace": "yes"}, "trace is 'yes'; give True"),
    "records, a path": ({"records": "run.jsonl"}, "records is 'run.jsonl'; give a RecordWriter"),
    "scheduler": ({"scheduler": 3}, "scheduler is 3"),
    "ema": ({"ema": 3}, "update_parameters"),
    "loss scale": ({"loss_scale": -1.0}, "scale is -1"),
    "loss scale, a word": ({"loss_scale": "dynamc"}, "MixedPrecision: loss_scale: "),
    "loss scale, its class": ({"loss_scale": mezzo.DynamicLossScale}, "loss_scale is <class"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_can_not_be_trained_is_refused_with_its_fix(row: str) -> None:
    arguments, message = REFUSED[row]
    with pytest.raises((UsageError, UnknownNameError), match=message):
        refusable(**arguments)


def test_a_plateau_scheduler_is_refused() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(UsageError, match=r"result\.stepped"):
        mezzo.MixedPrecision(
            model, optimizer, "fp16", scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.0, "is a float"),
        (torch.ones(2, requires_grad=True), "reduce it to one number"),
        (torch.ones(()), "needs no gradient"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "real floating"),
        (torch.ones((), requires_grad=True) * 2, "depends on no parameter"),
    ],
)
def test_losses_that_backward_can_not_start_from(loss: Any, message: str) -> None:
    mp = refusable()
    with pytest.raises(UsageError, match=message):
        mp.step(loss)
    assert run(mp).stepped


def test_shared_parameters_are_refused_until_the_other_is_closed_or_gone() -> None:
    model = network()
    first = refusable(model)
    with pytest.raises(UsageError, match="already has some of these parameters"):
        refusable(model)
    first.close()
    second = refusable(model)
    del second
    refusable(model)


def test_flush_before_any_step_is_an_error() -> None:
    with pytest.raises(CallOrderError, match=r"mp\.step\(loss\)"):
        refusable().flush()


def test_frozen_parameters_are_an_error_and_thawed_ones_train() -> None:
    model = network()
    mp = refusable(model)
    x = torch.ones(2, 4, requires_grad=True)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        mp.step(model(x).sum())
    model[3].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    assert mp.step(model(x).sum()).stepped
    assert not torch.equal(before["3.bias"], model[3].bias)
    assert torch.equal(before["0.bias"], model[0].bias)
    assert x.grad is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamic", mezzo.DynamicLossScale()),
        ("dynamic(init=1024)", mezzo.DynamicLossScale(init=1024.0)),
        ("2**10", mezzo.StaticLossScale(1024.0)),
    ],
)
def test_a_loss_scale_may_be_written_as_a_policy_writes_it(text: str, expected: Any) -> None:
    net = network()
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=text)
    assert mp._resolved.scaler.on_host() == expected
    mp.close()


PAGE = Path(__file__).parent.parent / "docs" / "training.md"


def test_the_code_of_the_page_runs() -> None:
    torch.manual_seed(0)
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == 15
    names: dict[str, object] = {}
    try:
        for block in blocks:
            line = text[: block.start(1)].count("\n")
            exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), names)
    finally:
        for mp in list(mixed_precision._ALIVE):
            mp.close()
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert bool(loss.isfinite())
