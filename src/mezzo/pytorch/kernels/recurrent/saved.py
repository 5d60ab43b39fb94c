"""What one recurrent layer's forward hands to its backward, and how autograd holds it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.recurrent import reference
from mezzo.pytorch.kernels.unseen import unseen


@dataclass(frozen=True, slots=True)
class Settings:
    """What a layer is apart from its tensors.

    Args:
        kind: of layer.
        compute: the 16-bit format.
        hidden_fp32: whether states are carried in FP32.
        reverse: from the last step to the first.
        sizes: rows of each step, none more than the one before has.
        is_packed: whether the caller gave them.
    """

    kind: str
    compute: torch.dtype
    hidden_fp32: bool
    reverse: bool
    sizes: tuple[int, ...]
    is_packed: bool

    @property
    def carried(self) -> torch.dtype:
        """The dtype of states between steps."""
        return torch.float32 if self.hidden_fp32 else self.compute

    @property
    def offsets(self) -> tuple[int, ...]:
        """Each step's first row, and at last the number of all rows."""
        return (0, *accumulate(self.sizes))


class Kept(NamedTuple):
    """What `cpu.forward` returns; the last two are for backward."""

    out: Tensor
    h_n: Tensor
    c_n: Tensor | None
    sums: Tensor | None
    cells: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are."""

    input: bool
    h0: bool
    c0: bool
    w_ih: bool
    w_hh: bool
    biases: tuple[bool, bool]


class Gradients(NamedTuple):
    """In the order of `Layer.forward`'s tensors."""

    input: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    w_ih: Tensor | None
    w_hh: Tensor | None
    b_ih: Tensor | None
    b_hh: Tensor | None


class Layer(torch.autograd.Function):
    """One layer whose backward is compiled; a second derivative is that of `reference.layer`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, ...]:
        """The output [rows, H] and the last states."""
        from mezzo.pytorch.kernels.recurrent import cpu

        made = cpu.forward(settings, x, h0, c0, (w_ih, w_hh, b_ih, b_hh), keeps=True)
        ctx.save_for_backward(x, h0, c0, w_ih, w_hh, b_ih, b_hh, made.out, made.sums, made.cells)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        states = (made.h_n,) if made.c_n is None else (made.h_n, made.c_n)
        return (made.out, *states)

    @staticmethod
    @unseen
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of what needs one, in each one's own dtype."""
        from mezzo.pytorch.kernels.recurrent import cpu

        *given, out, sums, cells = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(*grads, *given):
            return (*_twice(ctx.settings, grads, given, ctx.needs_input_grad), None)
        x, h0, c0, w_ih, w_hh, _, _ = given
        of_x, of_h0, of_c0, of_w_ih, of_w_hh, of_b_ih, of_b_hh = ctx.needs_input_grad[:7]
        wanted = Wanted(of_x, of_h0, of_c0, of_w_ih, of_w_hh, (of_b_ih, of_b_hh))
        all_grads = (grads[0], grads[1], grads[2] if len(grads) > 2 else None)
        found = cpu.backward(ctx.settings, all_grads, x, h0, c0, (w_ih, w_hh), (out, sums, cells), wanted)
        return (*(None if g is None else g.to(t.dtype) for g, t in zip(found, given)), None)


def _twice(
    settings: Settings, grads: tuple[Tensor | None, ...], given: list[Any], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, and those of a batch of gradients."""
    again = torch.is_grad_enabled()
    wanted: list[Tensor] = [t for t, needed in zip(given, needs) if needed]
    with torch.enable_grad():
        x, h0, c0, *weights = given
        outputs = reference.layer(
            settings.kind,
            x,
            h0,
            c0,
            (*weights, None),
            compute=settings.compute,
            hidden_fp32=settings.hidden_fp32,
            reverse=settings.reverse,
            batch_sizes=torch.tensor(settings.sizes),
        )
    pairs = [(o, grad) for o, grad in zip(outputs, grads) if o is not None and grad is not None]
    if not pairs:
        return [None] * len(given)
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=again,
            allow_unused=True,
        )
    )
    return [next(found) if needed else None for needed in needs[: len(given)]]
