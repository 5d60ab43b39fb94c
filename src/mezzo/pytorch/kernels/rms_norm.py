"""`rms_norm` with 16-bit input and output, FP32 inside, and a weight of FP32 or 16 bits.

PyTorch's own on a CPU is made of operations that save FP32 copies of a 16-bit input. Here what is saved for backward is
the input as it came, 16 bits an element, and one FP32 number a row; the weight's gradient is summed in FP32.

Under `torch.func`, in compilers, in forward-mode differentiation, and for tensor subclasses, the same is made of
casts around PyTorch's own op, which all of these know how to take apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.pytorch.kernels.layer_norm import columns_of, normalised, widened

_HALVES = (torch.float16, torch.bfloat16)
_EPSILON = torch.finfo(torch.float32).eps


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Rows with mean square 1, scaled, as `torch.rms_norm` gives them.

    Naive code::

        torch.rms_norm(input.float(), normalized_shape, weight.float(), eps).to(input.dtype)

    The gradients are the naive code's as well, that of the weight in the weight's own dtype; its sum does not
    depend on the number of threads. A row with a NaN is NaN throughout; one with an infinity is 0, but
    NaN where it is infinite. A second derivative is computed by PyTorch operations in FP32.

    Args:
        input: [..., \\*normalized_shape], fp16 or bf16; of FP32 and FP64, PyTorch's own op takes care.
        normalized_shape: the sizes of the last dimensions, over which is normalised.
        weight: of that shape, FP32, fp16 or bf16; None for ones.
        eps: added to the mean square; None for FP32's own, 2^-23, which PyTorch takes for 16-bit input too.

    Returns:
        of the input's shape and dtype, whatever the weight's.

    Raises:
        RuntimeError: PyTorch's own, where the shapes don't fit.
    """
    if input.dtype not in _HALVES:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    columns = columns_of(input, normalized_shape, weight)
    if not columns:
        return torch.rms_norm(input.float(), normalized_shape, widened(weight), eps).to(input.dtype)
    return normalised(input, weight, None, columns, _EPSILON if eps is None else eps, False)
