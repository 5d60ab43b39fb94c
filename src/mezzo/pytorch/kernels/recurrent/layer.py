"""One recurrent layer in one direction, with 16-bit factors, FP32 sums and states that may stay FP32.

PyTorch's own bf16 layers on a CPU round the LSTM's cell and the other layers' hidden state at every step: a counter
that FP32 brings to 3.6 sticks at 0.25, where a step adds less than half a unit in the last place. And it keeps gates
in 16 bits for backward, where a forget gate of 0.998 has become 0.996. Here the states are carried in FP32, and kept
are the sums before the gates.

On a CPU with Numba, `cpu` has the loops. Elsewhere, with projections, under `torch.func`, in compilers and for tensor
subclasses it is PyTorch operations (`reference`), whose numbers are the same to the rounding of products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.core.errors import unknown_name
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.recurrent import reference
from mezzo.pytorch.kernels.recurrent.reference import GATES, Weights
from mezzo.pytorch.kernels.recurrent.saved import Layer, Settings

__all__ = ["Weights", "layer"]


def layer(
    kind: str,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Weights,
    *,
    compute: torch.dtype,
    hidden_fp32: bool,
    reverse: bool = False,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All steps of one layer, as `torch.nn.LSTM`, `GRU` and `RNN` define them.

    Naive code, of a GRU (``q(x) = x.to(compute).float()``; ``c = f * c + i * g`` of an LSTM is carried like ``h``)::

        h = h0.float()
        for t in reversed(range(T)) if reverse else range(T):
            h = gates(q(input[t]) @ q(w_ih).T + b_ih, q(h) @ q(w_hh).T + b_hh, h)   # FP32
            h = h if hidden_fp32 else q(h)
            output[t] = h.to(compute)
        h_n = h if hidden_fp32 else h.to(compute)

    Where the CPU multiplies bf16 itself, a bf16 product is rounded to bf16 before the FP32 sum of both. For backward
    are kept the input and output in 16 bits, for each element of the output 4 16-bit sums (none of a plain
    layer), and the cell state as it is carried. Gradients of gates are factors of products too, and rounded to
    `compute`; gradients of states are carried in FP32. NaN and infinities pass as in the naive code.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        input: [T, N, I], or [sum(batch_sizes), I]; any floating dtype.
        h0: [N, H], with a projection [N, P]; any floating dtype.
        c0: [N, H] of an LSTM, else None.
        weights: w_ih, w_hh, b_ih, b_hh (both may be None) and w_hr (an LSTM's [P, H], or None), in PyTorch's
            layout and order of gates; any floating dtype. Biases are added as they are, unrounded.
        compute: torch.bfloat16 or torch.float16.
        hidden_fp32: whether states are FP32 between steps; else they are rounded at each one.
        reverse: from the last step to the first.
        batch_sizes: of a packed sequence, int64 [T] on the CPU, none larger than the one before.

    Returns:
        the output in `compute`, [T, N, H] or packed; h_n [N, H] and c_n [N, H] (None but for an LSTM), in FP32 where
        `hidden_fp32`, else in `compute`.

    Raises:
        UnknownNameError: another kind.
        RuntimeError: no steps, or shapes that don't fit.
    """
    if kind not in GATES:
        raise unknown_name("kind of recurrent layer", kind, GATES)
    if not len(input):
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    if _is_ours(kind, input, h0, c0, weights, batch_sizes):
        return _compiled(kind, input, h0, c0, weights, compute, hidden_fp32, reverse, batch_sizes)
    return reference.layer(
        kind,
        input,
        h0,
        c0,
        weights,
        compute=compute,
        hidden_fp32=hidden_fp32,
        reverse=reverse,
        batch_sizes=batch_sizes,
    )


def _is_ours(
    kind: str, input: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights, batch_sizes: Tensor | None
) -> bool:
    """Whether the compiled kernels may take these tensors whole. What doesn't fit, PyTorch's operations refuse."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    if (
        w_hr is not None
        or not is_plain(input, h0, c0, *weights, batch_sizes)
        or not (input.numel() and h0.numel())
        or any(t is not None and t.device.type != "cpu" for t in (input, h0, c0, *weights))
        or backend.implementation("cpu") != "numba"
    ):
        return False
    batch, columns = h0.shape
    width = GATES[kind] * columns
    if batch_sizes is None:
        rows_fit = input.dim() == 3 and input.shape[1] == batch
    else:
        sizes = batch_sizes.tolist()
        rows_fit = input.dim() == 2 and sizes[0] == batch and sum(sizes) == len(input) and sizes[-1] > 0
        rows_fit = rows_fit and sizes == sorted(sizes, reverse=True)
    return (
        rows_fit
        and w_ih.shape == (width, input.shape[-1])
        and w_hh.shape == (width, columns)
        and all(b is None or b.shape == (width,) for b in (b_ih, b_hh))
        and (c0 is None) == (kind != "lstm")
        and (c0 is None or c0.shape == h0.shape)
    )


def _compiled(
    kind: str,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Weights,
    compute: torch.dtype,
    hidden_fp32: bool,
    reverse: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    from mezzo.pytorch.kernels.recurrent import cpu

    sizes = input.shape[1:2] * len(input) if batch_sizes is None else batch_sizes.tolist()
    settings = Settings(kind, compute, hidden_fp32, reverse, tuple(sizes), batch_sizes is not None)
    x = input.to(compute).reshape(-1, input.shape[-1]).contiguous()
    tensors = (x, h0, c0, *weights[:4])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out, h_n, *rest = Layer.apply(*tensors, settings)  # type: ignore[no-untyped-call,unused-ignore]
        c_n = rest[0] if rest else None
    else:
        out, h_n, c_n, _, _ = cpu.forward(settings, x, h0, c0, weights[:4], keeps=False)
    return (out if batch_sizes is not None else out.view(*input.shape[:2], -1)), h_n, c_n
