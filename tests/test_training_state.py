"""MixedPrecision: what is saved, loaded, recorded and dropped."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo
from mezzo.core import records
from mezzo.core.errors import (
    UsageError,
)
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    Waits,
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
        assert not run(mp, 0).moved
        assert run(mp, 1).moved
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
