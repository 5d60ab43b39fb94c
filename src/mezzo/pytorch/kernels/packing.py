"""What an emulated op keeps for its backward: 16-bit values instead of the FP32 copies that it computed with.

Saved-tensor hooks keep inputs as their 16-bit form or the caller's own tensor, parameters as themselves, and other
tensors rounded where the op's row says so. Hooks around the op (checkpointing, offload) still see every tensor kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Rounded:
    """A floating input of an emulated op: the caller's `source`, its 16-bit form `low`, and that in FP32, `wide`."""

    __slots__ = ("low", "reuse", "source", "wide")

    def __init__(self, source: Tensor, compute: torch.dtype) -> None:
        self.reuse = Reuse(lambda low: low.to(compute).to(torch.float32))
        self.source = source
        self.low = source.to(compute)
        self.wide = self.low.to(torch.float32)


class Packing:
    """The saved-tensor hooks of one emulated call; `outer` are those around it. Other saved FP32 tensors
    are rounded from `keep_rank` dimensions on, but for statistics of rows (a log-sum-exp); with None they stay FP32.
    """

    def __init__(
        self, inputs: Sequence[Rounded], compute: torch.dtype, keep_rank: int | None, outer: _Hooks | None
    ) -> None:
        self._compute = compute
        self._keep_rank = keep_rank
        self._outer = outer
        self._inputs = {item.wide.untyped_storage().data_ptr(): item for item in inputs if item.wide.numel()}
        self._statistics = {item.wide.shape[:-1] for item in inputs}
        self._waiting: list[tuple[_Kept, Tensor]] = []

    def pack(self, saved: Tensor) -> Any:
        """The hook for saving: a recipe from which `unpack` restores ``saved``."""
        if saved.dtype != torch.float32:
            return _Kept(self._through(saved), self._outer)
        item = self._inputs.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
        if item is None:
            if self._keep_rank is None or saved.dim() < self._keep_rank or saved.shape in self._statistics:
                return _Kept(self._through(saved), self._outer)
            later = _Kept(None, self._outer, widen=True)
            self._waiting.append((later, saved))
            return later
        source = item.source
        if source.is_leaf and source.requires_grad and source.dtype == torch.float32:
            if source.is_contiguous() and item.wide.is_contiguous():
                return _View(self._through(source.detach()), self._outer, item.reuse, saved)
        elif item.low.stride() == item.wide.stride() and item.low.dtype == self._compute:
            return _View(self._through(item.low.detach()), self._outer, item.reuse, saved)
        return _Kept(self._through(saved.to(self._compute)), self._outer, widen=True)

    def settle(self, wide: Any, low: Any) -> None:
        """Keep what is lossy in 16 bits; a saved result of `wide` as the tensor of `low` that the caller gets."""
        if not self._waiting:
            return
        pairs = [(wide, low)] if isinstance(wide, Tensor) else zip(wide, low)
        results = {_place(result): given for result, given in pairs if isinstance(result, Tensor)}
        with torch.no_grad():
            for kept, saved in self._waiting:
                given = results.get(_place(saved))
                if given is None or given.stride() != saved.stride():
                    given = saved.to(self._compute)
                kept.handle = self._through(given.detach())

    def forget(self) -> None:
        """Release the FP32 tensors after the op, since the graph may hold on to these hooks."""
        self._inputs.clear()
        self._waiting.clear()

    def _through(self, kept: Tensor) -> Any:
        return Versioned(kept) if self._outer is None else self._outer[0](kept)

    @staticmethod
    def unpack(packed: _Kept) -> Tensor:
        """The hook for use in backward: the saved tensor, in FP32 where it was FP32."""
        return packed.restore()


def with_hooks(
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
    op: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``op(*args, **kwargs)`` under saved-tensor hooks; without them where they are disabled, as in `torch.func`."""
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    try:
        hooks.__enter__()
    except RuntimeError:
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    finally:
        hooks.__exit__()


def may_pack(inputs: Sequence[Rounded]) -> bool:
    """Whether this call saves for a backward that runs here: not in inference, ``torch.func``, tracing, subclasses."""
    return (
        torch.is_grad_enabled()
        and any(item.wide.requires_grad for item in inputs)
        and is_plain(*(item.source for item in inputs))
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two living tensors if they have the same elements in the same order."""
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype


class Versioned:
    """A kept tensor that may be the user's own; an in-place change is refused in backward, as autograd refuses it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def get(self) -> Tensor:
        """The tensor; RuntimeError if it was changed in place."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(self.tensor.shape)} and dtype {self.tensor.dtype}, an input of "
                f"an op with Mezzo's backward, is at version {self.tensor._version}; expected version "
                f"{self.version}. Use the out-of-place form."
            )
        return self.tensor


class _Kept:
    """A saved tensor as it is, or rounded to 16 bits and widened again in backward."""

    __slots__ = ("_unpack", "_widen", "handle")

    def __init__(self, handle: Any, outer: _Hooks | None, widen: bool = False) -> None:
        self.handle = handle
        self._unpack = outer[1] if outer is not None else Versioned.get
        self._widen = widen

    def restore(self) -> Tensor:
        kept = self._unpack(self.handle)
        return kept.to(torch.float32) if self._widen else kept


@dataclass(slots=True, eq=False)
class Reuse:
    """The FP32 form of an input that a call saved many times, from the first use in backward to the last."""

    again: Callable[[Tensor], Tensor]
    saved: int = 0
    left: int = 0
    wide: Tensor | None = None

    def of(self, low: Tensor) -> Tensor:
        """The FP32 form of what was kept."""
        wide = self.wide
        if wide is None:
            wide = self.again(low)
            self.left = self.saved
        self.left -= 1
        self.wide = wide if self.left > 0 else None
        return wide


class _View(_Kept):
    """A view of an input's FP32 form, kept as the 16-bit form (or the parameter) and the view's geometry."""

    __slots__ = ("_offset", "_reuse", "_size", "_stride")

    def __init__(self, handle: Any, outer: _Hooks | None, reuse: Reuse, saved: Tensor) -> None:
        super().__init__(handle, outer)
        self._reuse = reuse
        reuse.saved += 1
        self._size, self._stride, self._offset = saved.size(), saved.stride(), saved.storage_offset()

    def restore(self) -> Tensor:
        wide = self._reuse.of(self._unpack(self.handle))
        # A fresh FP32 tensor has the strides of the one that the op saw, so the view's geometry fits it.
        return wide.as_strided(self._size, self._stride, self._offset)
