"""Precisions and formats as users write them: names, aliases, torch dtypes, and what is none of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzo
from mezzo.core.errors import UsageError
from mezzo.pytorch.dtypes import DTYPES


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4)


def trained(precision: Any, **more: Any) -> str:
    model = linear()
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **more)
    return str(mp.policy)


def computed_in(precision: Any) -> str:
    with mezzo.autocast(precision, "cpu"):
        return str(linear()(torch.ones(2, 4)).dtype)


# Where a precision is given -> what it does there, as a text to compare.
TAKES: dict[str, Callable[[Any], str]] = {
    "policy": lambda p: str(mezzo.policy(p)),
    "Policy": lambda p: str(mezzo.Policy(p)),
    "Policy(params=)": lambda p: str(mezzo.Policy("fp32" if "32" in str(p) else p, params=p)),
    "Policy(modules=)": lambda p: str(mezzo.Policy("fp32", modules=(("head", p),))),
    "autocast": computed_in,
    "autocast as decorator": lambda p: str(
        mezzo.autocast(p, "cpu")(lambda: linear()(torch.ones(2, 4)))().dtype
    ),
    "MixedPrecision": trained,
    "explain": lambda p: str(mezzo.explain(linear(), torch.ones(2, 4), precision=p)),
}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", TAKES)
def test_a_torch_dtype_is_a_precision(where: str, name: str) -> None:
    assert TAKES[where](DTYPES[name]) == TAKES[where](name)


def test_a_torch_dtype_is_a_format_of_state_and_of_weights() -> None:
    assert trained("bf16", masters="split", state=torch.bfloat16) == trained(
        "bf16", masters="split", state="bf16"
    )
    optimizer = mezzo.optim.AdamW(linear().parameters(), state=torch.bfloat16)
    assert optimizer.param_groups[0]["state"] == "bf16"
    model = linear()
    mezzo.lower_weights(model, torch.bfloat16)
    assert model.weight.dtype is torch.bfloat16


def test_one_region_for_a_dtype_and_its_compiled_form() -> None:
    assert mezzo.autocast(torch.bfloat16, "cpu") is mezzo.autocast(torch.bfloat16, "cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        with mezzo.autocast(torch.bfloat16, "cpu"):
            return x @ x

    assert product(torch.ones(2, 2)).dtype is torch.bfloat16


WRONG = [torch.int8, torch.float64, torch.float8_e4m3fn, None, 16, b"bf16", float]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("where", ["policy", "autocast", "MixedPrecision", "explain"])
def test_what_is_no_precision(where: str, wrong: Any) -> None:
    with pytest.raises(UsageError) as told:
        TAKES[where](wrong)
    for word in (repr(wrong), "bf16", "fp8", "torch.bfloat16", ".toml"):
        assert word in str(told.value)
