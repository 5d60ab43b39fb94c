"""Checks of an optimizer's settings, modes, parameters and gradients, and that no two hold one weight's master."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.masters import MASTERS, STATE_FORMATS
from mezzo.pytorch.distributed import is_spread, local
from mezzo.pytorch.dtypes import FLOATS
from mezzo.pytorch.kernels.plain import is_dense
from mezzo.pytorch.weights.stored_parameters import master_holder, set_master_holder


def modes(owner: str, masters: Any, state: Any) -> None:
    """Raise an UnknownNameError for unknown modes."""
    for kind, given, allowed in (("masters", masters, MASTERS), ("state", state, STATE_FORMATS)):
        if given not in allowed:
            raise unknown_name(kind, str(given), allowed, where=f"{owner}({kind}={given!r}): ")


def group(owner: str, values: dict[str, Any]) -> None:
    """Check the modes and the parameters of a group; `owner` is the name for messages."""
    modes(owner, values["masters"], values["state"])
    for index, param in enumerate(values["params"]):
        what = f"{owner}: parameter {index} of the group, of shape {list(param.shape)},"
        weight(param, values["masters"], what)


def weight(param: Tensor, masters: str, what: str) -> None:
    """Raise a UsageError for a weight whose class, format or layout these masters do not support."""
    param = local(param.detach())
    if hasattr(param, "__tensor_flatten__"):
        problem = (
            f"is a {type(param).__name__}, which the fused kernels cannot read. Use an optimizer of torch.optim, in "
            "MixedPrecision with masters='fp32', or mezzo.optim.with_masters(optimizer) around one."
        )
    elif param.dtype not in FLOATS:
        problem = (
            f"is {param.dtype}. Use torch.float32, torch.bfloat16 or torch.float16. Give other parameters to an "
            "optimizer of torch.optim, or leave out those that are not trained: "
            "(p for p in model.parameters() if p.requires_grad)."
        )
    elif param.layout is not torch.strided:
        problem = f"has the layout {param.layout}. Only dense tensors are supported. Use param.to_dense()."
    elif param.dtype is torch.float16 and masters != "fp32":
        problem = (
            f"is torch.float16, and masters={masters!r} needs bf16 weights, which have FP32's range. Use "
            'masters="fp32".'
        )
    elif not is_dense(param):
        problem = (
            f"has strides {list(param.stride())}: its elements overlap or have gaps, as in a slice or an expanded "
            "tensor. Use nn.Parameter(param.detach().contiguous())."
        )
    else:
        return
    raise UsageError(f"{what} {problem}")


def gradient(grad: Tensor, param: Tensor, owner: str) -> None:
    """Raise a UsageError for a gradient that is sparse or has another format."""
    where = f"{owner}: the gradient of a parameter of shape {list(param.shape)} is"
    if grad.layout is not torch.strided:
        raise UsageError(
            f"{where} sparse ({grad.layout}). Use nn.Embedding(..., sparse=False), or give this parameter to "
            "torch.optim.SparseAdam."
        )
    raise UsageError(f"{where} {grad.dtype}. Use torch.float32, torch.bfloat16 or torch.float16.")


def number(owner: str, name: str, value: Any, *, below: float = math.inf) -> None:
    """Raise a UsageError unless a setting is one number in [0, below)."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(f"{owner}: {name} is a tensor of shape {list(value.shape)}. Use one number.")
    if not isinstance(value, (int, float, Tensor)) or not 0 <= float(value) < below:
        allowed = "finite and not negative" if below == math.inf else f"at least 0 and below {below:g}"
        raise UsageError(f"{owner}: {name}={value!r} is out of range: it must be {allowed}.")


def betas(owner: str, values: Any) -> None:
    """Raise a UsageError unless these are two decays in [0, 1)."""
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise UsageError(f"{owner}: betas={values!r} must be two numbers, such as (0.9, 0.999).")
    for index, beta in enumerate(values):
        number(owner, f"betas[{index}]", beta, below=1.0)


def claim(optimizer: Optimizer, param: Tensor) -> None:
    """Record that this optimizer holds a weight's master; a UsageError if another one does and has its state."""
    other = master_holder(param, optimizer)
    if other is not None:
        raise UsageError(
            f"a {param.dtype} weight of shape {list(param.shape)} is in two optimizers that keep its master, "
            f"{type(other).__name__} and {type(optimizer).__name__}. Each would undo the other's updates. Give the "
            "weight to one of them, or clear the state of the first: optimizer.state.clear()."
        )
    set_master_holder(param, optimizer)


def refuse_replaced(optimizer: Optimizer) -> None:
    """Raise a UsageError for an optimizer with parameters that `fully_shard` has replaced by others in their model."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, "_fsdp_orig_uid") and not is_spread(param):
                raise UsageError(
                    f"{type(optimizer).__name__}: this optimizer was created before fully_shard, which replaced a "
                    f"parameter of shape {list(param.shape)} by a DTensor, which would not be trained. Create it "
                    f"afterwards: fully_shard(model); optimizer = {type(optimizer).__name__}(model.parameters(), ...)."
                )
