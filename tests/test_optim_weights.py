"""What the optimizers do with weights of every layout, that were edited, lowered, loaded or averaged; their bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.optim import SGD, AdamW
from optimizer_steps import (
    MASTERS,
    STATES,
    bits,
    gradients,
    one,
    parameters,
    run,
)


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize(("order", "shape"), [("channels", (4, 3, 5, 7)), ("transposed", (9, 65))])
def test_layouts_move_as_contiguous_weights_do(order: str, shape: tuple[int, ...], masters: str) -> None:
    def laid(value: Tensor) -> Tensor:
        if order == "channels":
            return value.to(memory_format=torch.channels_last)
        return value.t().contiguous().t()

    plain, other = (parameters(shapes=[shape])[0] for _ in range(2))
    other.data = laid(other.data)
    assert not other.is_contiguous()
    left, right = (AdamW([param], lr=0.1, masters=masters) for param in (plain, other))
    for step in range(3):
        (grad,) = gradients(step, [shape])
        plain.grad = grad
        other.grad = grad if step else laid(grad)
        left.step()
        right.step()
    assert torch.equal(bits(plain), bits(other))
    assert torch.equal(bits(left.master(plain)), bits(right.master(other)))
    assert right.state[other]["exp_avg"].stride() == other.stride()


def test_a_gradient_that_is_expanded_or_strided_is_read_right() -> None:
    optimizer = SGD([param := one(3, 4, dtype=torch.float32)], lr=1.0)
    param.grad = torch.arange(3.0)[:, None].expand(3, 4)
    optimizer.step()
    assert torch.equal(param, 1 - torch.arange(3.0)[:, None].expand(3, 4))
    param.grad = torch.arange(24.0).view(3, 8)[:, ::2]
    optimizer.step()
    assert torch.equal(param[1], 0 - torch.arange(8.0, 16.0, 2.0))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("masters", MASTERS)
def test_a_weight_s_layout_and_format_may_change_on_the_way(masters: str, state: str) -> None:
    param = parameters(shapes=[(4, 3, 5, 7)])[0]
    optimizer = AdamW([param], lr=0.01, masters=masters, state=state)
    run(optimizer, [param], range(2))
    before = optimizer.master(param)
    moment = optimizer.state[param]["exp_avg"].clone()
    param.data = param.data.to(memory_format=torch.channels_last)
    assert torch.equal(optimizer.master(param), before)
    if state != "int8":
        assert torch.equal(optimizer.state[param]["exp_avg"], moment)
    run(optimizer, [param], range(2, 4))
    assert float(optimizer.state[param]["step"]) == 4
    param.data = param.data.float()
    run(optimizer, [param], range(4, 5))
    assert "remainder" not in optimizer.state[param]
    assert "master" not in optimizer.state[param]
    param.data = param.data.bfloat16()
    run(optimizer, [param], range(5, 6))
    assert float(optimizer.state[param]["step"]) == 6
    assert ("remainder" in optimizer.state[param]) is masters.startswith("split")


@pytest.mark.parametrize(
    ("masters", "dtype"), [(m, torch.bfloat16) for m in MASTERS] + [("fp32", torch.float16)]
)
def test_a_master_that_is_set_is_what_is_read(masters: str, dtype: torch.dtype) -> None:
    (param,) = parameters(dtype, [(7, 13)])
    optimizer = AdamW([param], masters=masters)
    value = torch.randn(7, 13)
    optimizer.set_master(param, value)
    kept = {"fp32": 0.0, "split": 0.0, "split8": 2.0**-15, "none": 2.0**-8}[masters]
    assert ((optimizer.master(param) - value).abs() <= value.abs() * kept).all()
    assert ((param.float() - value).abs() <= value.abs() * 2.0**-8).all()
    with pytest.raises(UsageError, match=r"shape \[3\]"):
        optimizer.set_master(param, torch.zeros(3))
    with pytest.raises(UsageError, match="none of its groups"):
        optimizer.master(one(2))


@pytest.mark.parametrize("masters", ["fp32", "split", "split8", "none"])
def test_what_lowering_kept_aside_becomes_the_master(masters: str) -> None:
    model = nn.Linear(33, 7)
    # Of 32 bits, its bf16 is 1; rounded to 24 bits first, it would be the next one.
    model.weight.data[0] = torch.tensor(0x3F807FFF, dtype=torch.int32).view(torch.float32)
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    mezzo.lower_weights(model)
    lowered = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = AdamW(model.parameters(), masters=masters)
    state = optimizer.state_dict()["state"]
    assert len(state) == 2
    for name, param in model.named_parameters():
        assert torch.equal(bits(param), bits(lowered[name]))
        tolerance = {"fp32": 0.0, "split": 0.0, "split8": 2.0**-15, "none": 2.0**-8}[masters]
        assert ((optimizer.master(param) - wanted[name]).abs() <= wanted[name].abs() * tolerance).all()


def test_saved_tensors_notice_that_a_step_moved_the_weight() -> None:
    weight = one(3, dtype=torch.float32)
    optimizer = SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    version = weight._version
    optimizer.step()
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    version = weight._version
    optimizer._steppers = {key: lambda *_, **__: None for key in optimizer._steppers}
    optimizer.step()
    assert weight._version > version  # whatever a kernel writes through


BYTES = [
    ("split", "fp32", 12.0),
    ("split", "bf16", 8.0),
    ("split", "int8", 6.0 + 4 / 64),
    ("split8", "int8", 5.0 + 4 / 64),
    ("fp32", "fp32", 14.0),
    ("none", "fp32", 10.0),
    ("none", "int8", 4.0 + 4 / 64),
]


@pytest.mark.parametrize(("masters", "state", "expected"), BYTES)
def test_bytes_a_parameter_are_what_the_table_says(masters: str, state: str, expected: float) -> None:
    params = parameters(shapes=[(256, 128), (1024,)])
    optimizer = AdamW(params, masters=masters, state=state)
    run(optimizer, params, range(1))
    tensors = [t for p in params for t in (p, *optimizer.state[p].values()) if t.dim()]  # the step has none
    assert sum(tensor.nbytes for tensor in tensors) / sum(param.numel() for param in params) == expected


def test_the_same_memory_may_get_another_format_or_order() -> None:
    optimizer = SGD([param := one(3)], lr=0.5)
    optimizer.step()  # 0.75
    param.grad = None
    param.data = param.data.view(torch.float16)  # 0x3F40 is 1.8125 there
    param.grad = torch.ones(3).half()
    optimizer.step()
    assert param.tolist() == [1.3125] * 3
    optimizer = SGD([param := one(3, 3, dtype=torch.float32)], lr=1.0, momentum=0.5)
    optimizer.step()
    param.data = param.data.t()
    param.grad = torch.arange(9.0).view(3, 3)
    optimizer.step()
    assert torch.equal(param, 0.25 - torch.arange(9.0).view(3, 3))
