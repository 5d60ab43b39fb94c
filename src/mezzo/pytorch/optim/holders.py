"""Which optimizer holds the master of a 16-bit weight: one, for two would pull the weight to and fro."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.core.errors import UsageError

_holders: Any = WeakTensorKeyDictionary()


def claim(optimizer: Optimizer, param: Tensor) -> None:
    """Note that this optimizer holds a weight's master.

    Raises:
        UsageError: another one does, and still has its state.
    """
    if _other(optimizer, param) is not None:
        gc.collect()  # an optimizer that was dropped may live on in a cycle
        other = _other(optimizer, param)
        if other is not None:
            raise UsageError(
                f"two optimizers hold a master for one {param.dtype} weight of shape {list(param.shape)}: the "
                f"{type(other).__name__} before, and now this {type(optimizer).__name__}. Each would undo what the "
                "other has added to it. Give the weight to one of them; or, if the first has done its part, drop "
                "what it holds: optimizer.state.clear()."
            )
    _holders[param] = weakref.ref(optimizer)


def _other(optimizer: Optimizer, param: Tensor) -> Optimizer | None:
    holder = _holders.get(param)
    other: Optimizer | None = None if holder is None else holder()
    if other is None or other is optimizer or not other.state.get(param):
        return None
    return other
