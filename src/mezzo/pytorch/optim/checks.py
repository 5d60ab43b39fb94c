"""What an optimizer refuses: numbers that make no sense, modes that don't exist, parameters that it can't move.

One optimizer holds the master of a 16-bit weight (`claim`): two would pull the weight to and fro.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.masters import MASTERS, STATE_FORMATS
from mezzo.pytorch.kernels.plain import is_dense

GRADIENTS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Formats of gradients, whatever the weight's is."""


_holders: Any = WeakTensorKeyDictionary()


def group(owner: str, values: dict[str, Any]) -> None:
    """Check one parameter group's modes and parameters.

    Args:
        owner: the optimizer's name, for the message.
        values: the group, with `masters`, `state` and `params`.

    Raises:
        UnknownNameError: an unknown mode.
        UsageError: a parameter that can't be moved in this mode.
    """
    modes(owner, values["masters"], values["state"])
    for index, param in enumerate(values["params"]):
        weight(
            param,
            values["masters"],
            f"{owner}: parameter {index} of the group, of shape {list(param.shape)},",
        )


def modes(owner: str, masters: Any, state: Any) -> None:
    """Check that the modes exist.

    Raises:
        UnknownNameError: one doesn't.
    """
    for kind, given, allowed in (("masters", masters, MASTERS), ("state", state, STATE_FORMATS)):
        if given not in allowed:
            raise unknown_name(kind, str(given), allowed, where=f"{owner}({kind}={given!r}): ")


def weight(param: Tensor, masters: str, what: str) -> None:
    """Check that a weight of this format and layout can be moved with these masters."""
    if bool(is_traceable_wrapper_subclass(param)):
        raise UsageError(
            f"{what} is a {type(param).__name__}, whose values are in other tensors. Use an optimizer of "
            "torch.optim, or mezzo.optim.with_masters over one."
        )
    if param.dtype not in GRADIENTS:
        kind = (
            "complex"
            if param.is_complex()
            else "of another width"
            if param.is_floating_point()
            else "integers"
        )
        raise UsageError(
            f"{what} is {param.dtype}. Weights are torch.float32, torch.bfloat16 or torch.float16. Leave out those "
            f"that are {kind}: (p for p in model.parameters() if p.requires_grad) are trained; or give them "
            "to an optimizer of torch.optim."
        )
    if param.layout is not torch.strided:
        raise UsageError(
            f"{what} is stored as {param.layout}. Only dense tensors can be moved: use param.to_dense()."
        )
    if param.dtype is torch.float16 and masters != "fp32":
        raise UsageError(
            f"{what} is torch.float16, for which masters={masters!r} doesn't exist: fp16's range is not that of FP32. "
            'Use masters="fp32".'
        )
    if not is_dense(param):
        raise UsageError(
            f"{what} has strides {list(param.stride())}: its elements overlap or have gaps between them, as a slice or "
            "an expanded tensor has. Make it one of its own: nn.Parameter(param.detach().contiguous())."
        )


def gradient(grad: Tensor, param: Tensor, owner: str) -> None:
    """Raise what is wrong with a gradient that isn't dense and of 16 or 32 bits.

    Raises:
        UsageError: it is sparse, or of another format.
    """
    if grad.layout is not torch.strided:
        raise UsageError(
            f"{owner}: the gradient of a parameter of shape {list(param.shape)} is sparse ({grad.layout}). Use "
            "nn.Embedding(..., sparse=False), or give this parameter to torch.optim.SparseAdam."
        )
    raise UsageError(
        f"{owner}: the gradient of a parameter of shape {list(param.shape)} is {grad.dtype}. Gradients are "
        "torch.float32, torch.bfloat16 or torch.float16."
    )


def number(owner: str, name: str, value: Any, *, below: float = math.inf) -> None:
    """Check that a setting is a number from 0 to `below`, which is excluded.

    Raises:
        UsageError: it isn't.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(f"{owner}: {name} is a tensor of shape {list(value.shape)}, and must be one number.")
    if not isinstance(value, (int, float, Tensor)) or not 0 <= float(value) < below:
        allowed = (
            "finite and not negative" if below == math.inf else f"from 0 to {below:g}, {below:g} excluded"
        )
        raise UsageError(f"{owner}: {name}={value!r} is out of range: it must be {allowed}.")


def betas(owner: str, values: Any) -> None:
    """Check the two decays of a moving average.

    Raises:
        UsageError: they aren't two numbers from 0 to 1.
    """
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise UsageError(f"{owner}: betas={values!r} must be two numbers from 0 to 1.")
    for index, beta in enumerate(values):
        number(owner, f"betas[{index}]", beta, below=1.0)


def claim(optimizer: Optimizer, param: Tensor) -> None:
    """Note that this optimizer holds a weight's master.

    Raises:
        UsageError: another one does, and still has its state.
    """
    if _other(optimizer, param) is not None:
        gc.collect()  # an optimizer that was dropped may live on in a cycle
        other = _other(optimizer, param)
        if other is not None:
            raise UsageError(
                f"two optimizers hold a master for one {param.dtype} weight of shape {list(param.shape)}: the "
                f"{type(other).__name__} before, and now this {type(optimizer).__name__}. Each would undo what the "
                "other has added to it. Give the weight to one of them; or, if the first has done its part, drop "
                "what it holds: optimizer.state.clear()."
            )
    _holders[param] = weakref.ref(optimizer)


def _other(optimizer: Optimizer, param: Tensor) -> Optimizer | None:
    holder = _holders.get(param)
    other: Optimizer | None = None if holder is None else holder()
    if other is None or other is optimizer or not other.state.get(param):
        return None
    return other
