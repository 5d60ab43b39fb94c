"""Closures under a loss scale: run the closure again at a smaller scale until its gradients are finite.

An optimizer that takes a closure (LBFGS) evaluates it many times within one step and moves the parameters
between. So a step can't be vetoed once, before it begins: each evaluation must come back finite, and where
one can't, the whole step is undone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AbandonedStepError(BaseException):
    """Leaves `optimizer.step` from within its closure. Never seen by a user; no `except Exception` may
    swallow it.
    """


class ClosureRunner:
    """The closure that the optimizer is given: finite gradients, or `AbandonedStepError`.

    Args:
        optimizer: the one that will call this object.
        evaluate: runs the user's closure and unscales; returns its loss, and whether all gradients are
            finite.
        back_off: lowers the scale after an overflow; False if it is at its floor.
        copies: whether parameters and state are copied, for an optimizer that moves them between two evaluations.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        evaluate: Callable[..., tuple[Any, bool]],
        back_off: Callable[[], bool],
        *,
        copies: bool = True,
    ) -> None:
        self._optimizer = optimizer
        self._evaluate = evaluate
        self._back_off = back_off
        self._copies = copies
        self._params: list[tuple[Tensor, Tensor, int]] | None = None
        self._state: dict[Tensor, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One evaluation, repeated while a smaller scale can help."""
        if self._copies and self._params is None:
            self._remember()
        while True:
            loss, finite = self._evaluate(*args, **kwargs)
            if finite:
                return loss
            if not _is_finite(loss) or not self._back_off():
                raise AbandonedStepError

    def restore(self) -> None:
        """Put parameters and optimizer state back to what they were before the step."""
        if self._params is None:
            return
        with torch.no_grad():
            for param, saved, version in self._params:
                param.copy_(saved)
                # Other graphs that saved it before the step may still run backward.
                torch._C._autograd._unsafe_set_version_counter((param,), (version,))
        state = self._optimizer.state
        state.clear()
        state.update(self._state)

    def _remember(self) -> None:
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        self._params = [(param, param.detach().clone(), param._version) for param in params]
        # Tensors at the top are updated in place, those in LBFGS's history are only appended and dropped.
        self._state = {
            param: {name: _copied(value) for name, value in entries.items()}
            for param, entries in self._optimizer.state.items()
        }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _is_finite(loss: Any) -> bool:
    try:
        return bool(torch.as_tensor(loss).isfinite().all())
    except (TypeError, ValueError, RuntimeError):  # no number
        return True
