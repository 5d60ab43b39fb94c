"""Recurrent layers and cells with an FP32 state: PyTorch's FP32 operation on inputs and weights of 16-bit values.

Used for ``hidden=fp32``. Otherwise a recurrent operation is PyTorch's own 16-bit kernel or, where hardware lacks the
format, emulated like every matrix product (`mezzo.pytorch.kernels.emulated`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.emulated import Emulated

__all__ = ["with_fp32_state"]

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def with_fp32_state(overload: torch._ops.OpOverload, compute: torch.dtype) -> Callable[..., Any]:
    """A recurrent aten operation whose hidden and cell state come in and go out in FP32, and stay FP32 between steps.

    Naive code, where ``q(x) = x.to(compute).float()``::

        output, *states = op(q(input), hx.float(), [q(weight) for weight in params], ...)
        return output.to(compute), *states

    A cell returns its FP32 state, as it has no other output. Inside the operation the factors of products between
    steps are FP32. For backward PyTorch keeps FP32 tensors, except inputs and weights, which are kept in 16 bits.
    NaN and infinities propagate as in the FP32 operation.

    Args:
        overload: ``aten.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` (``.input`` or ``.data``), or one of their cells.
        compute: ``torch.bfloat16`` or ``torch.float16``: the format of inputs, weights and output.

    Returns:
        a function of the overload's positional arguments. Tensors may be FP32, bf16 or fp16; with a tensor of another
        floating format, or a complex one, it is the overload itself.
    """
    place = [argument.name for argument in overload._schema.arguments].index("hx")
    outputs = 0 if "_cell" in overload.name() else 1  # results before the final states

    def run(*args: Any) -> Any:
        hx = args[place]
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        tensors = [args[0], *states, *_tensors(args[place + 1 :])]
        if any(tensor.dtype not in _FORMATS for tensor in tensors):
            return overload(*args)
        wide = [state.float() for state in states]
        wide_hx = wide[0] if isinstance(hx, Tensor) else wide
        ends: list[Tensor] = []

        def without_states(*rest: Any) -> tuple[Tensor, ...]:
            found = overload(*rest[:place], wide_hx, *rest[place:])
            found = (found,) if isinstance(found, Tensor) else tuple(found)
            ends.extend(found[outputs:])
            return found[:outputs]

        op = Emulated(without_states)
        rest = (*args[:place], *args[place + 1 :])
        if args[0].device.type == "cpu":
            out = op(*rest, compute=compute)
        else:
            with (
                warnings.catch_warnings()
            ):  # cuDNN asks for contiguous weights; these are new copies at each call
                warnings.filterwarnings(
                    "ignore", message="RNN module weights are not part of single contiguous"
                )
                out = op(*rest, compute=compute)
        results = (*out, *ends)
        return results if len(results) > 1 else results[0]

    return run


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                found.append(item)
    return found
