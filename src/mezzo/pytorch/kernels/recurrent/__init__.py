"""Recurrent layers and cells with 16-bit factors, FP32 sums, and a state in the format that is asked for.

PyTorch's own kernels on a CPU round the state to 16 bits at every step, and what a step adds to a sum that is 256
times larger (bf16) is lost. Here only the factors of the products are 16 bits: gates, sums and, with
``hidden_fp32``, what goes from step to step are FP32. `lstm`, `gru`, `rnn_tanh` and `rnn_relu` take the arguments of
both overloads of their aten op, a padded batch (``.input``) or a packed sequence (``.data``); each has its cell.

Naive code of `gru` on one layer (the others alike; all of a packed sequence's rows that live at a step)::

    for t in range(len(input)):
        product = h.to(compute).float() @ w_hh.to(compute).float().T + b_hh
        h = gates(input[t].to(compute).float() @ w_ih.to(compute).float().T + b_ih, product, h)  # FP32
        h = h if hidden_fp32 else h.to(compute).float()
        output[t] = h.to(compute)

- ``compute``: ``torch.bfloat16`` or ``torch.float16``, the format of products' factors and of the output.
- ``hidden_fp32``: hidden and cell state stay FP32 between steps and are returned in FP32, so that they lose nothing
  when they are handed in again; else they are rounded to ``compute`` at each step and returned in it.

Input, states and parameters may each be FP32, fp16 or bf16; the gradients are in their dtypes. Dropout draws
the random numbers that PyTorch's op draws for the same output (its mask has that shape and dtype). NaN and infinities
pass as in the naive code. Calls with any FP64, complex or integer tensor are PyTorch's own op, which also raises what
there is to raise about shapes, devices and empty sequences. In graphs of `torch.compile` and on GPUs the state is FP32
within a call in any case: PyTorch's FP32 op on rounded input and weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.recurrent import ops
from mezzo.pytorch.kernels.recurrent.cells import cell

__all__ = ["gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell"]


def lstm(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.lstm`, of either overload: (output, h_n, c_n)."""
    found: tuple[Tensor, Tensor, Tensor] = ops.call("lstm", args, named, compute, hidden_fp32)
    return found


def gru(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> tuple[Tensor, Tensor]:
    """`aten.gru`, of either overload: (output, h_n)."""
    found: tuple[Tensor, Tensor] = ops.call("gru", args, named, compute, hidden_fp32)
    return found


def rnn_tanh(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> tuple[Tensor, Tensor]:
    """`aten.rnn_tanh`, of either overload: (output, h_n)."""
    found: tuple[Tensor, Tensor] = ops.call("rnn_tanh", args, named, compute, hidden_fp32)
    return found


def rnn_relu(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> tuple[Tensor, Tensor]:
    """`aten.rnn_relu`, of either overload: (output, h_n)."""
    found: tuple[Tensor, Tensor] = ops.call("rnn_relu", args, named, compute, hidden_fp32)
    return found


def lstm_cell(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> tuple[Tensor, Tensor]:
    """`aten.lstm_cell`: (h, c), each [N, H], in FP32 or `compute`: the output of a cell is its state."""
    found: tuple[Tensor, Tensor] = cell("lstm", *args, compute=compute, hidden_fp32=hidden_fp32, **named)
    return found


def gru_cell(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> Tensor:
    """`aten.gru_cell`: h, [N, H], in FP32 or `compute`."""
    found: Tensor = cell("gru", *args, compute=compute, hidden_fp32=hidden_fp32, **named)
    return found


def rnn_tanh_cell(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> Tensor:
    """`aten.rnn_tanh_cell`: h, [N, H], in FP32 or `compute`."""
    found: Tensor = cell("rnn_tanh", *args, compute=compute, hidden_fp32=hidden_fp32, **named)
    return found


def rnn_relu_cell(*args: Any, compute: torch.dtype, hidden_fp32: bool, **named: Any) -> Tensor:
    """`aten.rnn_relu_cell`: h, [N, H], in FP32 or `compute`."""
    found: Tensor = cell("rnn_relu", *args, compute=compute, hidden_fp32=hidden_fp32, **named)
    return found
