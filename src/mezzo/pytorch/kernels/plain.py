"""Which tensors a kernel of ours may take whole: plain ones, and no tracer's or transform's."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are plain tensors outside `torch.func` and compilers: None counts as plain.

    Everything else (subclasses such as DTensor and FakeTensor, functorch's wrappers, graphs in the making) must be
    given PyTorch operations, which it knows how to take apart.
    """
    return (
        all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
    )
