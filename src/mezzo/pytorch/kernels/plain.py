"""Which tensors a kernel of ours may take whole: plain ones, and no tracer's or transform's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # torch.autograd.grad's is_grads_batched


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are plain tensors outside `torch.func`, forward-mode differentiation and compilers: None counts as
    plain.

    Everything else (subclasses such as DTensor and FakeTensor, wrappers of batches, graphs in the making) must be
    given PyTorch operations, which it knows how to take apart.
    """
    return (
        not torch.compiler.is_compiling()  # first: Dynamo reads no further
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and all(tensor is None or (type(tensor) in _PLAIN and not _is_batched(tensor)) for tensor in tensors)
    )
