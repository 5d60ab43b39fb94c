"""Write values back into tensors that living autograd graphs may have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

set_versions = torch._C._autograd._unsafe_set_version_counter


@contextmanager
def keeping_versions(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Writes inside raise no version counter of these tensors, so graphs that saved one still run backward."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    versions = tuple(tensor._version for tensor in counted)
    try:
        yield
    finally:
        set_versions(counted, versions)
