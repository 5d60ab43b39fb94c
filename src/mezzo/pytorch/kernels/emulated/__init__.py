"""The ops that are computed in FP32 between casts where hardware lacks the 16-bit format, by aten name.

`EMULATED` has each op twice: by its name without overload (``"lstm"``: the overload is found by the
arguments, as from Python) and by its full name (``"lstm.input"``), which is the faster. Beside the ops of
PyTorch's two lists of lower-precision ops stand those which reach the same arithmetic past the lists:
transposed convolutions and string padding, whole recurrent layers and cells, ``bilinear``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from mezzo.pytorch.kernels.emulated.call import Emulated

__all__ = ["EMULATED", "NATIVE_ONLY", "Emulated"]

# Per row: the lowest rank from which a saved tensor that is no input is rounded too (`packing.Packing`), or
# None. What a product of broadcast inputs saves is a copy of them and loses nothing; an attention's
# probabilities and output and a recurrent step's gates are rounded. The LSTM of the FP32 kernel keeps its
# gates in one opaque workspace, which stays as it is.
_ROWS: dict[str, int | None] = {
    "linear": None,
    "bilinear": None,
    "matmul": 1,
    "linalg_matmul": None,
    "mm": None,
    "bmm": None,
    "mv": None,
    "addmm": None,
    "_addmm_activation": None,
    "addmv": None,
    "addr": None,
    "addbmm": None,
    "baddbmm": None,
    "chain_matmul": 2,
    "linalg_multi_dot": 2,
    "linalg_vecdot": None,
    "einsum": 1,
    "conv1d": None,
    "conv2d": None,
    "conv3d": None,
    "conv_tbc": None,
    "conv_transpose1d": None,
    "conv_transpose2d": None,
    "conv_transpose3d": None,
    "convolution": None,
    "_convolution": None,
    "cudnn_convolution": None,
    "cudnn_convolution_transpose": None,
    "prelu": None,
    "scaled_dot_product_attention": 3,
    "_native_multi_head_attention": None,
    "mkldnn_rnn_layer": None,
    "lstm": 2,
    "gru": 2,
    "rnn_tanh": 2,
    "rnn_relu": 2,
    "lstm_cell": 1,
    "gru_cell": 1,
    "rnn_tanh_cell": 1,
    "rnn_relu_cell": 1,
}

#: The other ops of the table's rule `lower`, and why they need no row above.
_INNER = "has statistics and random state among its results, in formats of their own"
NATIVE_ONLY: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "_scaled_dot_product_flash_attention",
                "_scaled_dot_product_efficient_attention",
                "_scaled_dot_product_cudnn_attention",
            ),
            f"a CUDA kernel that {_INNER}; scaled_dot_product_attention, which calls it, is emulated whole",
        ),
        **dict.fromkeys(
            ("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
            "a CUDA kernel with FP32 arithmetic for 16-bit gates; lstm_cell and gru_cell, which call it, are "
            "emulated whole",
        ),
        "_cudnn_rnn": f"a CUDA kernel that {_INNER}; lstm, gru and rnn, which call it, are emulated whole",
        "_mps_convolution": "a kernel of Apple's GPUs; conv1d to conv3d, which call it, are emulated whole",
    }
)

# Overloads that are another op: into a given tensor, with an output dtype of the caller's, or
# TorchScript's alone.
_OTHER = frozenset({"out", "dtype", "dtype_out", "sublist"})


def _table() -> dict[str, Emulated]:
    table: dict[str, Emulated] = {}
    for name, keep_rank in _ROWS.items():
        packet = getattr(torch.ops.aten, name)
        overloads = [overload for overload in packet.overloads() if overload not in _OTHER]
        for overload in overloads:
            op = getattr(packet, overload)
            table[str(op).removeprefix("aten.").removesuffix(".default")] = Emulated(op, keep_rank)
        if overloads != ["default"]:
            table[name] = Emulated(packet, keep_rank)
    return table


EMULATED: Mapping[str, Emulated] = MappingProxyType(_table())
