"""Recurrent layers and cells with an FP32 state, for ``hidden=fp32``: PyTorch's FP32 operation on 16-bit values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.pytorch.kernels.emulated import emulated

__all__ = ["with_fp32_state"]

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def with_fp32_state(overload: Any, compute: torch.dtype) -> Callable[..., Any]:
    """A recurrent aten operation whose hidden and cell state are FP32 on the way in, between steps and on the way out.

    Naive code, where ``q(x) = x.to(compute).float()``; a cell returns its FP32 state, as it has no other output::

        output, *states = op(q(input), hx.float(), [q(weight) for weight in params], ...)
        return output.to(compute), *states

    Factors of products between steps are FP32. With an FP64 or complex tensor it is the operation itself.
    """
    place = [argument.name for argument in overload._schema.arguments].index("hx")
    outputs = 0 if "_cell" in overload.name() else 1  # results before the final states

    def run(*args: Any) -> Any:
        hx = args[place]
        read = (args[0], *args[place:])  # not `batch_sizes` of a packed sequence, which is integers
        if any(isinstance(leaf, Tensor) and leaf.dtype not in _FORMATS for leaf in tree_leaves(read)):
            return overload(*args)
        wide_hx = hx.float() if isinstance(hx, Tensor) else [state.float() for state in hx]
        ends: list[Tensor] = []

        def without_states(*rest: Any) -> tuple[Tensor, ...]:
            found = overload(*rest[:place], wide_hx, *rest[place:])
            found = (found,) if isinstance(found, Tensor) else tuple(found)
            ends.extend(found[outputs:])
            return found[:outputs]

        with warnings.catch_warnings() if args[0].is_cuda else contextlib.nullcontext():
            if args[0].is_cuda:  # cuDNN asks for contiguous weights; these are new copies at each call
                warnings.filterwarnings("ignore", message="RNN module weights are not part of single contig")
            out = emulated(without_states, compute)(*args[:place], *args[place + 1 :])
        results = (*out, *ends)
        return results if len(results) > 1 else results[0]

    return run
