"""The step as PyTorch operations, one parameter after another in blocks: what every other form must equal.

To the bit: with equal settings, gradients and numbers of moves, weights, masters and states come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mezzo.pytorch.kernels.adam import AdamHyper
from mezzo.pytorch.kernels.adam import reference as adam
from mezzo.pytorch.kernels.lion import LionHyper
from mezzo.pytorch.kernels.lion import reference as lion
from mezzo.pytorch.kernels.noise import STEP, WEIGHT, key
from mezzo.pytorch.kernels.noise import reference as noise
from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row
from mezzo.pytorch.kernels.sgd import SgdHyper
from mezzo.pytorch.kernels.sgd import reference as sgd
from mezzo.pytorch.kernels.split import reference as split
from mezzo.pytorch.kernels.states import GROUP
from mezzo.pytorch.kernels.states import reference as states

BLOCK = 1 << 16
"""Elements at a time, so that what is computed on the way stays in the cache and out of peak memory."""

_UPDATES: Mapping[type, Callable[..., tuple[Tensor, tuple[Tensor, ...]]]] = MappingProxyType(
    {AdamHyper: adam.update, SgdHyper: sgd.update, LionHyper: lion.update}
)


class DeviceStepper:
    """The step on any device. Reads `found_inf` and every row's `step`, so on a GPU the host waits."""

    @torch.no_grad()
    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Move every row that has a gradient; see `Stepper`."""
        if found_inf is not None and bool(found_inf != 0):
            return
        for hyper, rows in groups:
            for row in rows:
                if row.grad is not None:
                    _move(hyper, row, flat(row.grad), multiplier, overflow)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which memory has them: a ``(numel,)`` view, for any strides."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _move(hyper: Hyper, row: Row, grad: Tensor, multiplier: Tensor | None, overflow: Tensor | None) -> None:
    row.step.add_(1)
    step = int(row.step)
    for start in range(0, grad.numel(), BLOCK):
        elements = slice(start, min(start + BLOCK, grad.numel()))
        groups = slice(start // GROUP, -(-elements.stop // GROUP))
        stored = [flat(state)[elements] for state in row.states]
        scales = [None if scale is None else scale[groups] for scale in row.scales]

        w = _load_master(row, elements)
        g = grad[elements].to(torch.float32)
        if multiplier is not None:
            g = g * multiplier
        if hyper.maximize:
            g = -g
        old = tuple(
            states.load(state, scale, signed=spec.signed)
            for spec, state, scale in zip(hyper.states, stored, scales)
        )
        w, new = _UPDATES[type(hyper)](w, g, old, hyper, step)
        bits = None if row.state == "fp32" else _noise(row, step, STEP, elements)
        for i, spec in enumerate(hyper.states):
            states.store(new[i], stored[i], scales[i], states.noise_of(i, bits), signed=spec.signed)
        _store_master(row, elements, w, step, overflow)


def _load_master(row: Row, elements: slice) -> Tensor:
    weight = flat(row.weight)[elements]
    if row.masters == "own":
        return weight
    if row.master is None:
        return weight.to(torch.float32)
    master = flat(row.master)[elements]
    if row.masters == "fp32":
        return split.refreshed(master, weight)
    decode = split.decode_split if row.masters == "split" else split.decode_split8
    return decode(weight, master)


def _store_master(row: Row, elements: slice, w: Tensor, step: int, overflow: Tensor | None) -> None:
    weight = flat(row.weight)[elements]
    master = None if row.master is None else flat(row.master)[elements]
    if row.masters == "own":
        weight.copy_(w)
        return
    if row.masters == "none":
        stored = split.encode_stochastic(w, noise.alone(_noise(row, step, WEIGHT, elements)))
    elif row.masters == "fp32":
        stored, kept = split.encode_nearest(w, weight.dtype), w
    elif row.masters == "split":
        stored, kept = split.encode_split(w)
    else:
        stored, kept = split.encode_split8(w, noise.remainder(_noise(row, step, STEP, elements)))
    weight.copy_(stored)
    if master is not None:
        master.copy_(kept)
    if overflow is not None:
        overflow.masked_fill_(stored.isinf().any(), 1.0)


def _noise(row: Row, step: int, stream: int, elements: slice) -> Tensor:
    return noise.bits(
        key(step, row.ordinal, stream), elements.start, elements.stop - elements.start, row.weight.device
    )
