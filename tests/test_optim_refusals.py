"""What the optimizers refuse: each with its reason and the mend, and nothing moved."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.optim import SGD, Adam, AdamW, Lion
from optimizer_steps import (
    assert_same,
    everything,
    one,
)


def test_two_optimizers_cannot_both_hold_a_master() -> None:
    param = one(5)
    first, second = AdamW([param], masters="split"), AdamW([param], masters="fp32")
    first.step()
    before = everything(first)
    with pytest.raises(
        UsageError, match=r"two optimizers hold a master for one torch.bfloat16 weight of shape \[5\]"
    ):
        second.step()
    assert_same(before, everything(first))
    assert not second.state
    AdamW([param], masters="none").step()
    first.state.clear()
    second.step()
    del second
    gc.collect()
    third = AdamW([param], masters="split")
    third.step()
    own = one(5, dtype=torch.float32)
    AdamW([own]).step()
    AdamW([own]).step()


REFUSED = [
    (
        lambda p: AdamW(p, masters="spilt"),
        r"AdamW\(masters='spilt'\): unknown masters 'spilt'.*Did you mean 'split'",
    ),
    (lambda p: AdamW(p, state="int4"), r"AdamW\(state='int4'\): unknown state 'int4'"),
    (lambda p: AdamW(p, lr=-1.0), r"AdamW: lr=-1.0 is out of range: it must be finite and not negative"),
    (lambda p: AdamW(p, lr=math.nan), "lr=nan is out of range"),
    (lambda p: AdamW(p, lr=torch.ones(2)), r"lr is a tensor of shape \[2\]"),
    (
        lambda p: AdamW(p, betas=(0.9, 1.0)),
        r"betas\[1\]=1.0 is out of range: it must be from 0 to 1, 1 excluded",
    ),
    (lambda p: AdamW(p, betas=0.9), "betas=0.9 must be two numbers"),
    (lambda p: Adam(p, eps=-1e-8), "Adam: eps=-1e-08"),
    (lambda p: Adam(p, weight_decay=math.inf), "weight_decay=inf"),
    (lambda p: SGD(p, momentum=-0.9), "SGD: momentum=-0.9"),
    (lambda p: SGD(p, nesterov=True), "nesterov=True with momentum=0.0"),
    (lambda p: SGD(p, momentum=0.9, dampening=0.1, nesterov=True), "dampening=0.1"),
    (lambda p: Lion(p, betas=(-0.1, 0.9)), r"Lion: betas\[0\]=-0.1"),
    (
        lambda p: AdamW([torch.zeros(3, dtype=torch.int32)]),
        "is torch.int32.*those that are integers.*requires_grad",
    ),
    (lambda p: AdamW([torch.zeros(3, dtype=torch.complex64)]), "torch.complex64.*that are complex"),
    (lambda p: AdamW([torch.zeros(3, dtype=torch.float64)]), "torch.float64.*of another width"),
    (lambda p: AdamW([torch.zeros(3).half()], masters="split"), 'float16.*Use masters="fp32"'),
    (lambda p: AdamW([torch.zeros(3).half()], masters="none"), 'float16.*Use masters="fp32"'),
    (
        lambda p: AdamW([torch.zeros(3, 4)[:, ::2]]),
        r"has strides \[4, 2\]: its elements overlap or have gaps",
    ),
    (lambda p: AdamW([torch.zeros(3, 1).expand(3, 4)]), r"has strides \[1, 0\]"),
    (lambda p: AdamW([torch.zeros(3, 3).to_sparse()]), "stored as torch.sparse_coo"),
    (lambda p: AdamW([TwoTensor(torch.zeros(3), torch.zeros(3))]), "is a TwoTensor.*with_masters"),
]


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=lambda row: REFUSED[row][1][:40])
def test_what_makes_no_sense_is_refused(row: int) -> None:
    make, message = REFUSED[row]
    with pytest.raises(UsageError, match=message):
        make([one(3)])


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    optimizer = AdamW([one(3)])
    for group in ({"params": [one(2)], "masters": "fp8"}, {"params": [one(2)], "lr": -1.0}):
        with pytest.raises(UsageError):
            optimizer.add_param_group(group)
    with pytest.raises(UnknownNameError):
        optimizer.add_param_group({"params": [one(2)], "state": "fp8"})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    dense = one(3, dtype=torch.float32)
    optimizer = AdamW([dense, table.weight], lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"is sparse.*sparse=False.*SparseAdam"):
            optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    table.weight.grad = table.weight.grad.to_dense()
    optimizer.step()
    assert (dense < 1).all()


def test_fp64_gradients_are_refused() -> None:
    param = one(3, dtype=torch.float32)
    param.grad = None
    param.grad_dtype = None
    param.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"the gradient .* is torch.float64"):
        AdamW([param]).step()


@pytest.mark.parametrize("keyword", ["foreach", "fused", "capturable", "differentiable", "amsgrad"])
def test_torch_s_choices_of_an_implementation_are_not_taken(keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        AdamW([one(3)], **{keyword: True})  # type: ignore[arg-type]
