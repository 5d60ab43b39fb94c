"""Tensors in every kind of container of calls and state dicts are changed in a new one; a given one stays as it is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from mezzo.pytorch.autocast.modules import to_fp32
from mezzo.pytorch.nested import mapped, tensors

LOW = torch.ones(2, dtype=torch.bfloat16)
KEPT = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), None, "text"]
Pair = namedtuple("Pair", "first second")


class Output(OrderedDict):
    """As libraries have it: items are attributes as well."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


@dataclass(frozen=True)
class Frozen:
    value: Any


CONTAINERS: list[Any] = [
    [LOW, 3],
    (LOW, None),
    Pair(LOW, "text"),
    torch.return_types.max([LOW, LOW]),
    {"a": [LOW]},
    OrderedDict(a=LOW, b=1),
    Output(logits=LOW, past=(LOW, [LOW, *KEPT])),
    defaultdict(list, a=[LOW]),
    deque([LOW], maxlen=1),
    Frozen([LOW]),
    SimpleNamespace(a=LOW, b="text"),
    torch.distributions.Normal(LOW, LOW, validate_args=False),
    PackedSequence(LOW, torch.ones(2, dtype=torch.int64)),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_containers_are_new_and_of_their_type(value: Any) -> None:
    def low(value: Any) -> list[bool]:
        return [tensor is LOW for tensor in tensors(value)]

    before, plus_one = low(value), mapped(value, lambda tensor: tensor + 1)
    assert any(before)
    for new, kind, number in ((plus_one, torch.bfloat16, 2.0), (to_fp32(value), torch.float32, 1.0)):
        assert type(new) is type(value)
        assert getattr(new, "maxlen", None) == getattr(value, "maxlen", None)
        changed = [tensor for tensor, was_low in zip(tensors(new), before, strict=True) if was_low]
        assert {tensor.dtype for tensor in changed} == {kind}
        assert {tensor.tolist()[0] for tensor in changed} == {number}
        assert low(value) == before  # the model may keep what it returned
    if isinstance(value, Output):
        assert plus_one.logits is plus_one["logits"]


@pytest.mark.parametrize(
    "same", [*KEPT, KEPT, tuple(KEPT), {"a": KEPT}, Frozen(KEPT), Output(a=KEPT), iter([LOW])]
)
def test_without_a_16_bit_tensor_an_output_is_itself(same: Any) -> None:
    assert to_fp32(same) is same
