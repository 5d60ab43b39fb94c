"""Count the bytes of live tensors: weights, gradients and optimizer state of a contender, each storage once.

There are two counts: what the optimizer reports (`bytes_of`), and every storage that was created with it (`alive`),
which also finds what is kept elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside lists, tuples and dicts; a wrapper subclass gives the tensors that it wraps."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            for name in flatten()[0]:
                yield from tensors_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Storage -> its bytes, however many tensors share it; tensors without memory (fake, meta) are left out."""
    found: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            if storage.device.type != "meta" and storage.data_ptr():
                found[storage._cdata] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a subclass without a storage
            continue
    return found


def bytes_of(*values: Any) -> int:
    """The bytes of every storage under these values."""
    return sum(storages(tensors_in(list(values))).values())


def alive() -> dict[int, int]:
    """Every storage that Python's collector knows a tensor of, and the gradients of leaves."""
    gc.collect()

    def every() -> Iterator[Tensor]:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                yield thing
                if thing.is_leaf and thing.grad is not None:
                    yield thing.grad

    with torch._C.DisableTorchFunctionSubclass():
        return storages(every())


def parts(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the optimizer's ``weights``, their ``gradients``, and its ``state``, masters included."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        "weights": bytes_of([param.data for param in params]),
        "gradients": bytes_of([param.grad for param in params if param.grad is not None]),
        "state": bytes_of(list(optimizer.state.values())),
    }
