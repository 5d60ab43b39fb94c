"""`mapped` changes the tensors in every kind of container of calls and state dicts, and leaves those it was given."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mezzo.pytorch.nested import mapped, tensors

ONE = torch.ones(2)
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    value: Any


@pytest.mark.parametrize(
    "value",
    [
        [ONE, 3],
        (ONE, None),
        Pair(ONE, "text"),
        torch.return_types.max([ONE, ONE]),
        {"a": [ONE]},
        OrderedDict(a=ONE, b=1),
        defaultdict(list, a=[ONE]),
        deque([ONE], maxlen=1),
        Frozen([ONE]),
        SimpleNamespace(a=ONE, b="text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_new_and_of_their_type(value: Any) -> None:
    changed = mapped(value, lambda tensor: tensor + 1)
    assert type(changed) is type(value)
    assert getattr(changed, "maxlen", None) == getattr(value, "maxlen", None)
    assert [tensor.tolist() for tensor in tensors(changed)] == [[2.0, 2.0]] * len(list(tensors(value)))
    assert [*tensors(value)]
    assert all(tensor is ONE for tensor in tensors(value))
