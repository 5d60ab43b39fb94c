"""PyTorch's own ops, called so that they compute in FP32, keep an FP32 state, or keep fewer bytes for backward."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.dtypes import FLOATS
from mezzo.pytorch.kernels.emulated import emulated
from mezzo.pytorch.kernels.packing import Versioned, with_hooks
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.nested import tensors

_aten = torch.ops.aten
_WORTH_IT = 1 << 14  # elements from which short indices are worth hooks of some 10 us per call
_SPATIAL = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}  # trailing dimensions that indices span


def instance_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    """``aten.instance_norm(input.float(), weight.float(), bias.float(), *rest).to(input.dtype)``.

    PyTorch's kernel for 16-bit inputs [N, C, ...] reads only FP32 parameters [C] correctly.
    """
    wide = [None if t is None else t.float() for t in (weight, bias)]
    out: Tensor = _aten.instance_norm(input, *wide, *rest)
    return out


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``aten.softmax(input.float(), dim).to(input.dtype)``; backward keeps the rounded output.

    PyTorch's 16-bit kernel rounds its exponentials along every dimension but the last, so `dim` becomes the last one.
    """
    if dtype is not None or input.dim() == 0 or dim % input.dim() == input.dim() - 1:
        out: Tensor = _aten.softmax(input, dim, dtype)
    else:
        out = _aten.softmax(input.transpose(dim, -1).contiguous(), -1).transpose(dim, -1).contiguous()
    return out


def keeping_short_indices(op: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's max-pooling op `call` that keeps its indices for backward in 16 or 32 bits, not in 64."""
    spatial = _SPATIAL[op]

    def pooled(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        is_large = x.requires_grad and x.numel() >= _WORTH_IT and torch.is_grad_enabled()
        if not is_large or not is_plain(x):
            return call(x, *args, **kwargs)
        elements = math.prod(x.shape[-spatial:])
        if elements > 1 << 31:
            return call(x, *args, **kwargs)
        short = torch.int16 if elements <= 1 << 15 else torch.int32
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        hold, give = (Versioned, Versioned.get) if outer is None else outer

        def pack(saved: Tensor) -> tuple[Any, bool]:
            is_index = saved.dtype is torch.int64
            return hold(saved.to(short) if is_index else saved), is_index

        def unpack(packed: tuple[Any, bool]) -> Tensor:
            saved: Tensor = give(packed[0])
            return saved.to(torch.int64) if packed[1] else saved

        return with_hooks(pack, unpack, call, x, *args, **kwargs)

    return pooled


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
        if any(tensor.dtype not in FLOATS for tensor in tensors(read)):
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
