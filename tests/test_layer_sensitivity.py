"""The ranking of linear layers in a block format: what it predicts, what it leaves out, and the policy it makes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from faults import models
from faults.models import linear
from mezzo.core.calibration import recommend
from mezzo.core.errors import UsageError
from mezzo.core.recipes import RECIPES
from mezzo.core.records import ModuleRounding, SensitivityRecord
from mezzo.pytorch.autocast.modules import described, with_heads
from mezzo.pytorch.kernels.quantized_linear import quantized_linear
from mezzo.pytorch.sensitivity import Sensitivities
from mezzo.pytorch.training.observers import Observers
from test_calibration import FINE, steps


class Net(nn.Module):
    """Blocks of one kind, a layer that fits no block, a norm and a head; the second block counts `gain` times."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.odd, self.norm, self.head = nn.Linear(32, 20), nn.LayerNorm(20), nn.Linear(20, 3)
        self.gains = (1.0, gain, 1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        for block, gain in zip(self.blocks, self.gains):
            x = x + torch.tanh(block(x)) * gain
        out: Tensor = self.head(self.norm(self.odd(x)))
        return out


def step(model: nn.Module, rate: float, format: str = "nvfp4") -> tuple[SensitivityRecord, Tensor]:
    """The record of one step of SGD, and its input."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    probe = Sensitivities([format])
    observing = Observers(model, [probe])
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    loss = model(x).square().mean()
    observing.backward_begins(loss, 1.0)
    loss.backward()
    observing.update_begins(optimizer, 1.0)
    optimizer.step()
    observing.update_ended(optimizer, index=0, skipped=False, loss_scale=1.0)
    (record,) = observing.drain()
    observing.undo()
    assert isinstance(record, SensitivityRecord)
    return record, x


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_what_it_predicts_comes_true(format: str) -> None:
    """Forward: the loss with one layer quantized. Update: the quantized gradient along the gradient, times the rate."""
    found = {rate: step(Net(), rate, format)[0].rows for rate in (0.0, 0.1)}
    model, recipe = Net(), RECIPES[format]
    _, x = step(model, 0.0, format)
    grads = [block.weight.grad.clone() for block in model.blocks]
    calls: list[tuple[Tensor, Tensor]] = []
    note = lambda _, args, out: calls.append((args[0], out))  # noqa: E731
    hooks = [block.register_forward_hook(note) for block in model.blocks]
    exact = model(x).square().mean()
    gradients = torch.autograd.grad(exact, [out for _, out in calls])
    for hook in hooks:
        hook.remove()
    for place, (layer, row, moved) in enumerate(zip(model.blocks, found[0.0], found[0.1])):
        assert row.module == moved.module == f"blocks.{place}"
        low_forward = partial(quantized_linear, weight=layer.weight, bias=layer.bias, recipe=recipe)
        layer.forward = lambda x, low_forward=low_forward: low_forward(x).float()
        loss = model(x).square().mean()
        del layer.forward
        size = row.squares**0.5
        assert (loss - exact).item() == pytest.approx(row.signed, abs=0.2 * size)
        assert size > 0

        leaf = layer.weight.detach().clone().requires_grad_()
        y = quantized_linear(calls[place][0].detach(), leaf, layer.bias, recipe=recipe)
        (low,) = torch.autograd.grad(y, leaf, gradients[place].to(y.dtype))
        terms = grads[place] * (low - grads[place])
        assert moved.signed - row.signed == pytest.approx(-0.1 * float(terms.sum()), rel=1e-3)
        assert moved.squares - row.squares == pytest.approx(0.01 * float(terms.square().sum()), rel=1e-3)


def test_layers_that_run_in_bf16_anyway_are_left_out() -> None:
    record, _ = step(Net(), 0.1)
    assert [row.module for row in record.rows] == [f"blocks.{place}" for place in range(4)]
    assert record.notes == ["odd: bf16: 20 outputs are not a multiple of 16, which nvfp4 products need"]
    assert record.wide == ["blocks.3"]
    assert step(Net(), 0.1, "mxfp8")[0].wide == []


def test_attention_that_is_not_measured_is_noted_with_the_setting_that_keeps_it_in_bf16() -> None:
    parts = {"inner": lambda: nn.MultiheadAttention(32, 4), "up": linear(32, 32), "head": linear(32, 3)}
    record, _ = step(models.Net(lambda self, x: self.head(self.up(self.inner(x, x, x)[0])), **parts), 0.1)
    assert [row.module for row in record.rows] == ["up"]
    (note,) = record.notes
    assert note.startswith("inner: ")
    assert "module.inner=bf16" in note


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_the_policy_keeps_the_sensitive_layers_in_bf16_and_no_others() -> None:
    generator = torch.Generator().manual_seed(0)  # of some batches another block is the most sensitive
    batches = [torch.randn(64, 32, generator=generator) for _ in range(2)]
    plain = mezzo.calibrate(Net(), loss_of, batches, format="nvfp4", margin=0.5)
    assert (plain.policy, plain.kept) == ("nvfp4,module.blocks.3=nvfp4", [])
    ranking = mezzo.calibrate(Net(20.0), loss_of, batches, format="nvfp4", margin=1e9).sensitivity
    assert ranking.modules[0].module == "blocks.1"
    margin = 1.2 * math.hypot(*(one.changes["nvfp4"] for one in ranking.modules[1:])) / ranking.loss
    found = mezzo.calibrate(model := Net(20.0), loss_of, batches, format="nvfp4", margin=margin)
    assert [one.module for one in found.kept] == ["blocks.1"]
    assert found.policy == "nvfp4,module.blocks.3=nvfp4,module.blocks.1=bf16"
    layers = described(with_heads(mezzo.policy(found.policy), model), model)
    assert layers[0] == "nvfp4 in 3 linear layers: blocks.0, blocks.2, blocks.3."
    assert "head (bf16 by default: the head)" in layers[1]
    assert mezzo.calibrate(Net(), loss_of, batches, format="mxfp8", margin=0.5).policy == "mxfp8"


def recorded(changes: dict[str, float]) -> list[Any]:
    rows = [ModuleRounding(name, "Linear", "nvfp4", change, 0.0) for name, change in changes.items()]
    return [*steps(FINE), SensitivityRecord(0, 1.0, rows, ["a note"], ["d"])]


def test_the_fewest_layers_are_kept_for_a_margin() -> None:
    changes = {"a": 0.004, "b": 0.003, "c": 0.001, "d.0": 0.0}
    for margin, over in ((0.006, []), (0.005, ["a"]), (0.002, ["a", "b"]), (0.0005, ["a", "b", "c"])):
        found = recommend(recorded(changes), native=(), format="nvfp4", ranked=["nvfp4"], margin=margin)
        assert [one.module for one in found.kept] == over
        words = ["module.d=nvfp4", *(f"module.{name}=bf16" for name in over)]
        assert found.policy == ",".join(["nvfp4", *words])
        assert mezzo.policy(found.policy).format_inside("d.0") == "nvfp4"
    found = recommend(recorded({"a": math.inf}), native=(), format="nvfp4", ranked=["nvfp4"])
    assert [one.module for one in found.kept] == ["a"]
    with pytest.raises(UsageError, match=r"no linear layer .* in nvfp4; a note"):
        recommend(recorded({}), native=(), format="nvfp4", ranked=["nvfp4"])
