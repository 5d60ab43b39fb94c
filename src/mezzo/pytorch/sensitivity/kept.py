"""KeptCall: one call of a module with what it takes to run it again: inputs, and the gradients at its outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.pytorch.sensitivity.flow import floats_in


@dataclass
class KeptCall:
    """A call of one module.

    Args:
        path: the module's.
        module: itself.
        args, kwargs: what it was called with, by reference.
        low: for each floating tensor among them, in order, whether it would come in the lower format.
        makers: the same: the units that made it.
        versions: of those tensors when the call began.
        inner: the modules that it called directly, by path.
        inner_low: of each of those, in order: whether a floating output would come in the lower format.
        outputs: its floating outputs, detached.
        gradients: of the loss with respect to those; None until backward has reached them.
        with_gradients: whether gradients were on.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    low: list[bool]
    makers: list[frozenset[str]]
    versions: list[int]
    with_gradients: bool
    inner: dict[str, nn.Module] = field(default_factory=dict)
    inner_low: dict[str, list[bool]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        """The floating tensors that it was called with."""
        return [*floats_in(self.args), *floats_in(self.kwargs)]

    @property
    def intact(self) -> bool:
        """Whether no input was written to since."""
        return [t._version for t in self.inputs] == self.versions

    @property
    def largest_gradient(self) -> float:
        """The largest finite magnitude of the gradients at its outputs."""
        return max((largest(g) for g in self.gradients if g is not None), default=0.0)

    def ended(self, output: Any) -> None:
        """The call returned: from now on gradients at its outputs are kept."""
        tensors = list(floats_in(output))
        self.outputs = [t.detach() for t in tensors]
        self.gradients = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(self._keeper(place))

    def _keeper(self, place: int) -> Callable[[Tensor | None], None]:
        def keep(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            before = self.gradients[place]
            now = gradient.detach()
            # Kept as a copy: some backward passes write into the gradient that they were handed.
            self.gradients[place] = now.clone() if before is None else before + now

        return keep

    def prepared(
        self, change: Callable[[Tensor, int], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """The arguments with each floating tensor replaced by ``change(tensor, place)``; and those replacements."""
        made: list[Tensor] = []

        def kept(tensor: Tensor, place: int) -> Tensor:
            made.append(change(tensor, place))
            return made[-1]

        args, kwargs = changed((self.args, self.kwargs), kept)
        return args, kwargs, made


def changed(value: Any, change: Callable[[Tensor, int], Tensor]) -> Any:
    """A value with each floating tensor in it replaced by ``change(tensor, place)``, places counted in order."""
    places = itertools.count()

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value, next(places)) if value.is_floating_point() else value
        if isinstance(value, tuple):
            items = [replaced(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return value

    return replaced(value)


def cloned(value: Any) -> Any:
    """A value with its floating tensors copied, on the same graph: for inputs that are written to later."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_floating_point() else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(cloned(item) for item in value)
    if isinstance(value, list):
        return [cloned(item) for item in value]
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    return value


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude in a tensor; 0 where there is none."""
    if not tensor.numel():
        return 0.0
    return float(torch.nan_to_num(tensor.float(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def finite(tensors: Sequence[Tensor | None]) -> bool:
    """Whether every element of every tensor is."""
    return all(bool(torch.isfinite(t).all()) for t in tensors if t is not None)


def as_finite(tensors: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> bool:
    """Whether every element is finite whose counterpart in `reference` is; of other shapes: every element."""
    for t, r in zip(tensors, reference, strict=True):
        if t is None or r is None or bool(torch.isfinite(t).all()):
            continue
        if t.shape != r.shape or bool((torch.isfinite(r) & ~torch.isfinite(t)).any()):
            return False
    return True
