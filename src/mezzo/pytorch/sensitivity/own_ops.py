"""OwnOps: the numbers that a unit's own operations make on their way, which none of its outputs need show.

A product that is divided again leaves a module as small as it came. In 16 bits it may have been close to the largest
number in between, and a step later beyond it. So in the lowered run each of the unit's own operations is seen as the
user called it; those of the modules that it calls are those modules'.

Only numbers that the loss depends on count, as at a module's ends: what a mask hides has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mezzo.core.range_rules import HEADROOM
from mezzo.core.rules import Rule
from mezzo.pytorch.monitor.op_names import of_function
from mezzo.pytorch.sensitivity.flow import COPIES, floats_in, rule_of


class OwnOps(TorchFunctionMode):
    """Watches the operations of one call between `watching` and its end, and the gradients of the backward after it.

    Args:
        format: the lower one.
        dtype: the same.
        inner: the modules that the unit calls.

    `largest`: the largest magnitude, infinity apart, of those too close to the format's largest number; 0 where none
    is. `op`: who made it, or ``what linear takes``: a number in FP32 that an operation rounds. `first`: the operation
    that made the first number that is not finite; ``""``.
    """

    def __init__(self, format: str, dtype: torch.dtype, inner: Iterable[nn.Module]) -> None:
        super().__init__()
        self._format, self._dtype, self._inner = format, dtype, list(inner)
        self._close = torch.finfo(dtype).max / HEADROOM
        self._depth = 0
        self.largest, self.op, self.first = 0.0, "", ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In force inside."""
        hooks: list[Any] = []
        for module in self._inner:
            hooks += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and look at what it made, and at what it takes in FP32 and rounds."""
        kwargs = kwargs or {}
        if self._depth or (name := of_function(func)) in COPIES:
            return func(*args, **kwargs)
        # Inside of a vmap no number can be read: what is not seen is judged by what leaves the unit.
        if rule_of(name, self._format) is Rule.LOWER:
            with suppress(RuntimeError):
                for tensor in [*floats_in(args), *floats_in(kwargs)]:
                    if tensor.dtype is torch.float32 and not isinstance(tensor, nn.Parameter):
                        self._look(f"what {name} takes", tensor)
        out = func(*args, **kwargs)
        with suppress(RuntimeError):
            for tensor in floats_in(out):
                if tensor.dtype is self._dtype:
                    self._look(name, tensor)
        return out

    def _look(self, name: str, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            return
        size = tensor.detach().abs()
        # NaN is not below: written so that it counts.
        if not size.numel() or bool(size.amax() <= self._close):
            return
        if not self.first and not bool(torch.isfinite(size.to(self._dtype)).all()):
            self.first = name.removeprefix("what ").removesuffix(" takes")

        def seen(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            close = size[torch.isfinite(size) & (gradient != 0.0)]
            number = float(close.amax()) if close.numel() else 0.0
            if number > max(self._close, self.largest):
                self.largest, self.op = number, name

        tensor.register_hook(seen)
