"""What is told of a tensor, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.core.finding import TensorFacts
from mezzo.pytorch.dtypes import name_of


def bare(tensor: Tensor) -> Tensor:
    """The tensor under the wrappers of `torch.func`'s transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def values(tensor: Tensor) -> Tensor | None:
    """The numbers of a floating or complex tensor, detached; None where there are none to look at."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    tensor = bare(tensor).detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def finite(tensor: Tensor) -> bool:
    """Whether every element is; True of integers. Waits for the device."""
    seen = values(tensor)
    if seen is not None and seen.numel() == 1:
        return math.isfinite(seen.item())
    return seen is None or bool(torch.isfinite(seen).all())


def only_minus_infinity(tensor: Tensor) -> bool:
    """Whether what isn't finite in it is -inf, as in a mask that is added to scores."""
    seen = values(tensor)
    return seen is not None and not bool((torch.isnan(seen) | torch.isposinf(seen)).any())


def facts(tensor: Tensor, name: str) -> TensorFacts:
    """What is told of a tensor under a name. Waits for the device."""
    seen = values(tensor)
    shape, form = list(tensor.shape), name_of(tensor.dtype)
    if seen is None:
        return TensorFacts(name, shape, form, 0.0, 0.0, 0, 0, 0)
    size = seen.abs()
    normal = size[torch.isfinite(size) & (size != 0)].double()
    return TensorFacts(
        name,
        shape,
        form,
        largest=float(normal.max()) if normal.numel() else 0.0,
        smallest=float(normal.min()) if normal.numel() else 0.0,
        zeros=int((size == 0).sum()),
        infinities=int(torch.isinf(size).sum()),
        nans=int(torch.isnan(size).sum()),
    )


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A value whose tensors, in lists, tuples and dicts too, are changed; the containers are new."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(item, change) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[mapped(item, change) for item in value])
    if kind is dict:
        return {name: mapped(item, change) for name, item in value.items()}
    return value


def tensors(value: Any, depth: int = 6, *, objects: bool = False) -> Iterator[Tensor]:
    """The tensors in a value: itself, or in lists, tuples, dicts and dataclasses, in order.

    Args:
        value: anything.
        depth: how far into it.
        objects: look into the attributes of other objects, too.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item, depth - 1, objects=objects)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors(item, depth - 1, objects=objects)
    elif depth and _looked_into(value, objects):
        yield from tensors(vars(value), depth - 1, objects=objects)


def _looked_into(value: Any, objects: bool) -> bool:
    if isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    return objects or hasattr(value, "__dataclass_fields__")
