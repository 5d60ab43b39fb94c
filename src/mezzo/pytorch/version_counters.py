"""Write values back into tensors that living autograd graphs may have saved."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def keeping_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Writes inside raise no version counter of these tensors, so graphs that saved one still run backward.

    BatchNorm saves its running statistics, but its backward uses them only in evaluation mode.
    """
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    return _unsafe_preserve_version_counter(counted)
