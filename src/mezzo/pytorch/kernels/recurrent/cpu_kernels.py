"""Which compiled kernel a step on a CPU has: by the kind of layer, the formats of factors, and what is carried."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import torch

from mezzo.pytorch.kernels import specialise
from mezzo.pytorch.kernels.recurrent import (
    cpu_gru,
    cpu_gru_backward,
    cpu_lstm,
    cpu_lstm_backward,
    cpu_rnn,
    cpu_rnn_backward,
)

_KERNELS = "mezzo.pytorch.kernels"
_OURS = f"{_KERNELS}.recurrent.cpu_elements"

_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
)
_FORWARD: Mapping[str, ModuleType] = MappingProxyType(
    {"lstm": cpu_lstm, "gru": cpu_gru, "rnn_tanh": cpu_rnn, "rnn_relu": cpu_rnn}
)
_BACKWARD: Mapping[str, ModuleType] = MappingProxyType(
    {
        "lstm": cpu_lstm_backward,
        "gru": cpu_gru_backward,
        "rnn_tanh": cpu_rnn_backward,
        "rnn_relu": cpu_rnn_backward,
    }
)


@functools.cache
def forward_kernel(kind: str, compute: torch.dtype, factors: torch.dtype, hidden_fp32: bool) -> int:
    """The address of one step's kernel.

    Args:
        kind: of layer.
        compute: the 16-bit format.
        factors: `compute`, or FP32 where it is emulated: the dtype of factors and products.
        hidden_fp32: whether states are not rounded.
    """
    name = _NAMES[compute]
    bindings = {
        "store_half": _store(compute),
        "carry": f"{_OURS}:{'keep' if hidden_fp32 else f'round_{name}'}",
        **_factors(compute, factors),
    }
    if kind == "lstm":
        bindings |= {
            "store_cell": _store(torch.float32 if hidden_fp32 else compute),
            **_cells(compute, hidden_fp32),
        }
    elif kind == "rnn_relu":
        bindings["nonlinearity"] = f"{_KERNELS}.recurrent.cpu_functions:relu"
    return specialise.kernel(_FORWARD[kind], bindings).address


@functools.cache
def backward_kernel(kind: str, compute: torch.dtype, factors: torch.dtype, hidden_fp32: bool) -> int:
    """The address of one step's kernel in backward; see `forward_kernel`."""
    bindings = {"load_half": _load(compute), **_factors(compute, factors)}
    if kind == "lstm":
        bindings |= {
            "load_cell": _load(torch.float32 if hidden_fp32 else compute),
            **_cells(compute, hidden_fp32),
        }
    elif kind == "rnn_relu":
        bindings["slope"] = f"{_OURS}:relu_slope"
    return specialise.kernel(_BACKWARD[kind], bindings).address


def _factors(compute: torch.dtype, factors: torch.dtype) -> dict[str, str]:
    is_emulated = factors is torch.float32
    return {
        "load_sum": _load(factors),
        "store_factor": f"{_OURS}:store_round_{_NAMES[compute]}" if is_emulated else _store(factors),
        "factor_at": _pointer(factors),
        "factor_bytes": _bytes(factors),
    }


def _cells(compute: torch.dtype, hidden_fp32: bool) -> dict[str, str]:
    dtype = torch.float32 if hidden_fp32 else compute
    return {"cell_at": _pointer(dtype), "cell_bytes": _bytes(dtype)}


def _load(dtype: torch.dtype) -> str:
    return f"{_KERNELS}.optimizer_step.cpu_grads:load_{_NAMES[dtype]}"


def _store(dtype: torch.dtype) -> str:
    return f"{_KERNELS}.layer_norm.cpu_elements:store_{_NAMES[dtype]}"


def _pointer(dtype: torch.dtype) -> str:
    return f"{_KERNELS}.native:{'float32_at' if dtype is torch.float32 else 'int16_at'}"


def _bytes(dtype: torch.dtype) -> str:
    return f"{_OURS}:{'four' if dtype is torch.float32 else 'two'}"
