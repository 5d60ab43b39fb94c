"""Write values back into tensors that living autograd graphs may have saved."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def keeping_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Writes inside raise no version counter of these tensors, so graphs that saved one still run backward."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    return _unsafe_preserve_version_counter(counted)
