"""Sent: what operations outside of a call sent to one of its outputs in backward, one gradient for each use of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Sent:
    """The gradients of one output of a call, in order: each finite, with how many times it is too large."""

    parts: list[tuple[Tensor, float]] = field(default_factory=list)

    def total(self, like: Tensor, scale: float | None = None) -> Tensor | None:
        """The sum as backward makes it, in the format and shape of `like`; None where it can't be made.

        Args:
            like: the gradient that came.
            scale: how many times too large, none of the parts being otherwise; None: the loss scale taken out.
        """
        if not self.parts or any(scale not in (None, own) for _, own in self.parts):
            return None
        whole: Tensor | None = None
        for part, own in self.parts:
            one = part if scale is not None or own == 1.0 else part.double() / own
            if one.shape != like.shape:
                return None
            one = one.to(like.dtype)
            whole = one if whole is None else whole + one
        return whole
