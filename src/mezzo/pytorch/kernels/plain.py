"""Which tensors Mezzo's kernels may read directly: plain ones, not a tracer's or transform's; and which are dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # torch.autograd.grad's is_grads_batched


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are plain tensors, or None, outside `torch.func`, forward-mode differentiation and compilers."""
    if torch.compiler.is_compiling():  # first: Dynamo reads no further
        return False
    if torch._C._functorch.get_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    for tensor in tensors:  # noqa: SIM110  # faster than `all` of a generator
        if tensor is not None and (type(tensor) not in PLAIN or _is_batched(tensor)):
            return False
    return True


def differentiable_gradients(
    naive: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients that are needed of naive code: by PyTorch operations, so differentiable again, or batched."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        out = naive(*tensors)
    wanted = [tensor for tensor, needed in zip(tensors, needs) if needed and tensor is not None]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
    return [next(found) if needed else None for needed in needs]


def wide_row(parameter: Tensor | None) -> Tensor | None:
    """A vector of parameters as the kernels take it: FP32 and contiguous."""
    if parameter is None:
        return None
    return (parameter if parameter.dtype is torch.float32 else parameter.float()).contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
