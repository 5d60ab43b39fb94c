"""mezzo.explain: a model op by op, printed to fit, and the model as it was."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from faults.models import Net, linear, net
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.policy import Policy
from mezzo.pytorch.weights.stored_parameters import has_master, lower_weights


@net(norm=lambda: nn.LayerNorm(8), up=linear(8, 16), down=linear(16, 8))
def block(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.down(F.gelu(self.up(self.norm(x))))


@net(blocks=lambda: nn.ModuleList([block(), block()]), norm=lambda: nn.BatchNorm1d(8), head=linear(8, 2))
def made(self: Any, x: torch.Tensor, *, flip: bool = False) -> torch.Tensor:
    for each in self.blocks:
        x = each(x)
    x = F.dropout(self.norm(x))
    return torch.sigmoid(self.head(-x if flip else x))


@pytest.mark.parametrize(
    "precision", ["bf16", "fp16", "fp32", Policy("bf16", modules=(("head", "fp32"),))], ids=str
)
def test_every_op_runs_as_planned_and_says_where(precision: Any) -> None:
    result = mezzo.explain(made(), torch.randn(4, 8), precision=precision, flip=True)
    assert "neg" in [row.op for row in result.ops]
    assert result.departed == []
    rows = {(row.op, row.module): row for row in result.ops}
    low = str(precision)[:4]
    assert rows["linear", "blocks.*.up"].observed == f"{low} -> {low}"
    assert rows["linear", "blocks.*.up"].calls == 2
    head = "fp32" if "head" in str(precision) else low
    assert rows["linear", "head"].observed == f"{head} -> {head}"
    assert rows["linear", "head"].rule == ("fp32" if "head" in str(precision) else "lower")
    assert ("linear in head: " in str(result)) == ("head" in str(precision))
    assert rows["sigmoid", ""].observed == "fp32 -> fp32"
    assert all(row.reason for row in result.ops)


def test_the_text_has_each_op_and_fits() -> None:
    result = mezzo.explain(made(), torch.randn(4, 8), precision="fp16")
    for width in (60, 80, 110, 200):
        text = result.as_text(width)
        assert max(map(len, text.splitlines())) <= width
        assert all(word in text for word in ("calls  casts", *(row.op[:8] for row in result.ops)))
    assert str(result) == result.as_text(110)  # piped
    assert str(result).startswith("fp16 on cpu: 7 kinds of ops ran in the forward pass, all as planned.\n")
    assert "\ncasts: conversions to another format" in str(result)
    assert "1 kind of op ran" in str(mezzo.explain(nn.Linear(8, 3), torch.randn(4, 8), precision="fp16"))
    assert "* fp16 is emulated on this device, by the FP32 kernel between casts: linear." in str(result)
    assert "* internal_fp32, by the device's 16-bit kernel: gelu." in str(result)  # FP32 reaches the norms


OWN = "read in 16 bits and computed in FP32, by Mezzo's kernel: "
BETWEEN = "internal_fp32, by the FP32 kernel between casts (the 16-bit kernel may not accumulate in FP32): "
KERNELS = [
    ("layer_norm", lambda x: F.layer_norm(x, (8,)), OWN),
    ("rms_norm", lambda x: F.rms_norm(x, (8,)), OWN),
    ("instance_norm", lambda x: F.instance_norm(x[None]), OWN),
    ("cross_entropy_loss", lambda x: F.cross_entropy(x.repeat(256, 32), torch.arange(1024) % 8), OWN),
    ("upsample_linear1d", lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"), BETWEEN),
    ("gelu", F.gelu, "internal_fp32, by the device's 16-bit kernel: "),
    ("log", torch.log, ""),
    ("layer_norm", lambda x: F.layer_norm(x.float(), (8,)), ""),
]


@pytest.mark.parametrize(("op", "call", "note"), KERNELS)
def test_the_notes_say_whose_kernel_computed(op: str, call: Any, note: str) -> None:
    result = mezzo.explain(Net(lambda self, x: call(x)), torch.rand(4, 8).bfloat16(), precision="bf16")
    assert result.departed == []
    assert result.notes == ([f"{note}{op}."] if note else [])
    assert op in [row.op for row in result.ops]


def test_a_departure_is_said_first() -> None:
    def stubborn(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.mm(x, x)

    result = mezzo.explain(Net(stubborn), torch.randn(2, 2), precision="bf16")
    assert [row.op for row in result.departed] == ["mm"]
    lines = str(result).splitlines()
    assert lines[0].endswith("1 NOT AS PLANNED.")
    assert lines[1].startswith("! mm: planned bf16 -> bf16, observed fp32 -> fp32.")
    data = json.loads(result.to_json())
    assert (data["precision"], data["departed"]) == ("bf16", 1)
    assert [(row["op"], row["as_planned"]) for row in data["ops"]] == [("mm", False)]


def test_the_model_and_the_random_state_are_as_before() -> None:
    model = made()
    x = torch.randn(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    mezzo.explain(model, x, precision="bf16")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "forward" not in model.head.__dict__


def test_auto_says_what_it_is() -> None:
    result = mezzo.explain(nn.Linear(2, 2), torch.ones(1, 2))
    assert result.precision in ("fp32", "bf16", "fp16")
    assert any(note.startswith(f"auto selects {result.precision} here") for note in result.notes)


WRONG = [
    (("bf16", torch.ones(1)), {}, UsageError, "received 'bf16'.*the precision by name"),
    ((nn.Linear, torch.ones(1)), {}, UsageError, "received the class Linear"),
    ((nn.Linear(2, 2),), {}, UsageError, r"no inputs.*explain\(model, x\)"),
    ((nn.Linear(2, 2), torch.ones(1, 2)), {"precision": "bf61"}, UnknownNameError, "Did you mean 'bf16'"),
    ((block(), torch.ones(1, 8)), {"precision": "bf16,module.haed=fp32"}, UnknownNameError, "no module"),
]


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), WRONG)
def test_errors_say_how_to_mend_it(args: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mezzo.explain(*args, **kwargs)


def test_a_model_that_needs_no_inputs_gets_none() -> None:
    class Net(nn.Module):
        def forward(self, *numbers: Any, size: int = 2) -> Any:
            return torch.ones(size, 2) @ torch.ones(2, size)

    assert [row.op for row in mezzo.explain(Net(), precision="bf16").ops] == ["matmul"]


def test_the_storage_of_parameters_is_shown_and_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.ones(1, 4)
    model(x).sum().backward()
    before = [(p.data_ptr(), p.detach().clone(), p.grad) for p in model.parameters()]
    found = mezzo.explain(model, x, precision="bf16,masters=split8,state=int8")
    (told,) = (note for note in found.notes if note.startswith("parameters"))
    for words in ("4 in bf16, 2 in fp32", "masters split8, state int8", "7.06 bytes", "16"):
        assert words in told
    for p, (address, value, grad) in zip(model.parameters(), before):
        assert p.data_ptr() == address
        assert p.grad is grad
        assert torch.equal(p, value)
        assert not has_master(p)
    assert "state int8" in " ".join(mezzo.explain(model, x, precision="fp32,state=int8").notes)
    assert not any("parameters" in note for note in mezzo.explain(model, x, precision="bf16").notes)
    lower_weights(model)
    mezzo.explain(model, x, precision="bf16,params=bf16")
    assert has_master(model[0].weight)
    lazy = mezzo.explain(nn.LazyLinear(2), x, precision="bf16,params=bf16")
    assert "left as they are" in " ".join(lazy.notes)
