"""Ops computed as 16-bit hardware computes them, on hardware that lacks the format.

    def emulated(*inputs, compute):
        return op(*[x.to(compute).float() for x in inputs]).to(compute)

That is a tensor core's contract: 16 bits in, FP32 products and sums, 16 bits out. Differentiable casts around the FP32
op keep everything that PyTorch knows of that op: first and second derivatives, ``torch.func``, vmap, compilation,
memory format, FP32 speed. Gradients follow the contract too: the incoming one has 16 bits, backward computes in FP32,
and each input's gradient is rounded to 16 bits before it gets that input's dtype. `packing` keeps 16 bits for backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.packing import Packing, Rounded, may_pack

__all__ = ["EMULATED", "Emulated"]

_HALVES = (torch.float16, torch.bfloat16)
_NARROWING = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # half the time of `Tensor.to`
_PLAIN = (Tensor, torch.nn.Parameter)
_PASSED = (type(None), bool, int, float)

SMALL = 1 << 12
"""Elements up to which an input's FP32 copy is kept for backward, because hooks would cost more than the op.

An in-place change of such an input before backward is not refused: backward uses the values from before it, as with an
input that `torch.autocast` has cast.
"""


class _Nesting(threading.local):
    inside = False


_nesting = _Nesting()


class Emulated:
    """An aten op, callable with its own arguments and ``compute=torch.float16 | torch.bfloat16``.

    Floating tensors among the arguments, in lists too, are rounded to ``compute`` (ties to even; beyond the largest
    value to inf; NaN, inf, signed zeros and subnormals kept) and widened, the op runs in FP32, and its floating results
    are rounded to ``compute``. Other tensors pass unchanged. A call without a floating tensor, or within an emulated
    call (``torch.func`` dispatches the op again), is the op itself. `keep_rank`: see `Packing`.
    """

    def __init__(self, op: Callable[..., Any], keep_rank: int | None = None) -> None:
        self.op = op
        self._fast: Callable[..., Any] = getattr(op, "_op", op)
        self.keep_rank = keep_rank

    def __repr__(self) -> str:
        return f"Emulated({self.op}, keep_rank={self.keep_rank})"

    def __call__(self, *args: Any, compute: torch.dtype, **kwargs: Any) -> Any:
        """Run the op on 16-bit values with FP32 arithmetic; see the class."""
        if _nesting.inside:
            return self.op(*args, **kwargs)
        if compute not in _HALVES:
            raise ValueError(
                f"compute={compute}: emulation stores results in torch.float16 or torch.bfloat16"
            )
        _nesting.inside = True
        try:
            small = _small(args, compute) if self.keep_rank is None and not kwargs else None
            if small is not None:
                return _narrow(self._fast(*small), compute)
            return self._call(args, kwargs, compute)
        finally:
            _nesting.inside = False

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: torch.dtype) -> Any:
        inputs: list[Rounded] = []
        wide_args = [_widen(value, compute, inputs) for value in args]
        wide_kwargs = {name: _widen(value, compute, inputs) for name, value in kwargs.items()}
        if not inputs:
            return self.op(*args, **kwargs)
        if not may_pack(inputs):
            return _narrow(self.op(*wide_args, **wide_kwargs), compute)
        packing = Packing(
            inputs, compute, self.keep_rank, torch._C._autograd._top_saved_tensors_default_hooks(False)
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(packing.pack, Packing.unpack):
                wide_out = self.op(*wide_args, **wide_kwargs)
            out = _narrow(wide_out, compute)
            packing.settle(wide_out, out)
        finally:
            packing.forget()
        return out


def _small(args: tuple[Any, ...], compute: torch.dtype) -> list[Any] | None:
    """The arguments with their tensors rounded and widened; None unless all are small plain tensors or numbers."""
    narrow = _NARROWING[compute]
    wide: list[Any] = []
    rounded = False
    for value in args:
        kind = type(value)
        if kind in _PLAIN:
            if value.numel() > SMALL:
                return None
            if value.is_floating_point():
                rounded = True
                value = narrow(value).float()
        elif kind not in _PASSED:
            return None
        wide.append(value)
    return wide if rounded else None


def _widen(value: Any, compute: torch.dtype, inputs: list[Rounded]) -> Any:
    """The argument with its floating tensors rounded and widened; each is added to ``inputs``.

    Not a closure: a recursive one is a reference cycle, and would keep the FP32 copies alive until garbage collection.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        inputs.append(Rounded(value, compute))
        return inputs[-1].wide
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_widen(item, compute, inputs) for item in value]
    return value


def _narrow(result: Any, compute: torch.dtype) -> Any:
    if isinstance(result, Tensor):
        return _NARROWING[compute](result) if result.is_floating_point() else result
    if isinstance(result, (list, tuple)):
        return tuple(_narrow(item, compute) for item in result)
    return result


# Op -> `keep_rank` of `Packing`. A product of broadcast inputs saves a copy of them, and rounding it loses nothing; an
# attention's probabilities and output and a recurrent step's gates are rounded. The LSTM's workspace stays.
_KEEP_RANK = {
    **dict.fromkeys(("matmul", "einsum", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), 1),
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot", "lstm", "gru", "rnn_tanh", "rnn_relu"), 2),
    "scaled_dot_product_attention": 3,
}

# The ops of PyTorch's two lists of lower-precision ops, and those that reach the same arithmetic without being listed:
# transposed convolutions and string padding, whole recurrent layers and cells, ``bilinear``.
_OTHERS = """
    linear bilinear linalg_matmul mm bmm mv addmm _addmm_activation addmv addr addbmm baddbmm linalg_vecdot
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    cudnn_convolution cudnn_convolution_transpose prelu _native_multi_head_attention mkldnn_rnn_layer
"""

# Overloads that are another op: into a given tensor, with an output dtype of the caller's, or TorchScript's alone.
_OTHER = frozenset({"out", "dtype", "dtype_out", "sublist"})


def _table() -> dict[str, Emulated]:
    table: dict[str, Emulated] = {}
    for name in (*_KEEP_RANK, *_OTHERS.split()):
        packet, keep_rank = getattr(torch.ops.aten, name), _KEEP_RANK.get(name)
        overloads = [overload for overload in packet.overloads() if overload not in _OTHER]
        for overload in overloads:
            op = getattr(packet, overload)
            table[str(op).removeprefix("aten.").removesuffix(".default")] = Emulated(op, keep_rank)
        if overloads != ["default"]:
            table[name] = Emulated(packet, keep_rank)
    return table


EMULATED: Mapping[str, Emulated] = MappingProxyType(_table())
"""Each op twice: by its name without overload (``"lstm"``: the overload is found by the arguments, as from Python) and
by its full name (``"lstm.input"``), which is the faster."""
