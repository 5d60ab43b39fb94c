"""Ops computed as 16-bit hardware computes them, on hardware that lacks the format.

    def emulated(*inputs, compute):
        return op(*[x.to(compute).float() for x in inputs]).to(compute)

That is a tensor core's contract: 16 bits in, FP32 products and sums, 16 bits out. It is made of
differentiable casts around the FP32 op, so everything that PyTorch knows of that op stays true: first and
second derivatives, ``torch.func``, vmap, compilation, memory format, FP32 speed. Gradients obey the
contract too: the one that arrives is in 16 bits, backward computes in FP32, and each input's gradient is
rounded to 16 bits before it becomes that input's own dtype. What casts alone would cost is memory, and
`mezzo.pytorch.kernels.packing` gives that back.
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
"""Elements up to which an input's FP32 copy is kept for backward: hooks that keep 16 bits would cost more than the op.

Values and gradients are the same. An in-place change of such an input before backward is not refused, and backward uses
the values from before it, as it does where `torch.autocast` has cast an input.
"""


class _Nesting(threading.local):
    inside = False


_nesting = _Nesting()


class Emulated:
    """An aten op, callable with its own arguments and ``compute=torch.float16 | torch.bfloat16``.

    Floating tensors among the arguments, in lists too, are rounded to ``compute`` (ties to even; beyond
    the largest value to inf; NaN, inf, signed zeros and subnormals kept) and widened to FP32, the op runs
    in FP32, and its floating results are rounded to ``compute``. Integer, bool and complex tensors pass
    as they are; a call without a floating tensor is the op itself. A call within an emulated call (under
    ``torch.func`` a dispatcher meets the op again on its way down) is the op itself.

    Args:
        op: the aten op.
        keep_rank: see `Packing`; what is lossy about the memory that this op keeps for backward.
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
        small = _small(args, compute) if self.keep_rank is None and not kwargs else None
        if small is not None:
            _nesting.inside = True
            try:
                return _narrow(self._fast(*small), compute)
            finally:
                _nesting.inside = False
        inputs: list[Rounded] = []

        _nesting.inside = True
        try:
            wide_args = [_widen(value, compute, inputs) for value in args]
            wide_kwargs = {name: _widen(value, compute, inputs) for name, value in kwargs.items()}
            if not inputs:
                return self.op(*args, **kwargs)
            if not may_pack(inputs):
                return _narrow(self.op(*wide_args, **wide_kwargs), compute)
            outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
            packing = Packing(inputs, compute, self.keep_rank, outer)
            try:
                with torch.autograd.graph.saved_tensors_hooks(packing.pack, Packing.unpack):
                    wide_out = self.op(*wide_args, **wide_kwargs)
                out = _narrow(wide_out, compute)
                packing.settle(wide_out, out)
            finally:
                packing.forget()
            return out
        finally:
            _nesting.inside = False


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

    Not a closure: one that calls itself is a cycle, and would keep the FP32 copies alive until the collector
    comes by.
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


# The lowest rank from which a saved tensor that is no input is rounded too (`Packing`). What a product of broadcast
# inputs saves is a copy of them and loses nothing; an attention's probabilities and output and a recurrent step's gates
# are rounded. The LSTM of the FP32 kernel keeps its gates in one opaque workspace, which stays as it is.
_KEEP_RANK = {
    **dict.fromkeys(("matmul", "einsum", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), 1),
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot", "lstm", "gru", "rnn_tanh", "rnn_relu"), 2),
    "scaled_dot_product_attention": 3,
}

# Besides these, the ops of PyTorch's two lists of lower-precision ops, and those which reach the same arithmetic past
# the lists: transposed convolutions and string padding, whole recurrent layers and cells, ``bilinear``.
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
