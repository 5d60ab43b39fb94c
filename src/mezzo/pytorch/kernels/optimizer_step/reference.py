"""The step as PyTorch operations, one parameter after another in blocks: what every other form must equal.

To the bit: with equal settings, gradients and numbers of moves, weights, masters and states come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, rules, storage
from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper, LionHyper, SgdHyper
from mezzo.pytorch.kernels.optimizer_step.storage import GROUP, STEP, WEIGHT

BLOCK = 1 << 16
"""Elements at a time, so that what is computed on the way stays in the cache and out of peak memory."""

_UPDATES: Mapping[type, Callable[..., tuple[Tensor, tuple[Tensor, ...]]]] = MappingProxyType(
    {AdamHyper: rules.adam_update, SgdHyper: rules.sgd_update, LionHyper: rules.lion_update}
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
            storage.load_state(state, scale, signed=spec.signed)
            for spec, state, scale in zip(hyper.states, stored, scales)
        )
        w, new = _UPDATES[type(hyper)](w, g, old, hyper, step)
        bits = None if row.state == "fp32" else _noise(row, step, STEP, elements)
        for i, spec in enumerate(hyper.states):
            storage.store_state(new[i], stored[i], scales[i], storage.noise_of(i, bits), signed=spec.signed)
        _store_master(row, elements, w, step, overflow)


def _load_master(row: Row, elements: slice) -> Tensor:
    weight = flat(row.weight)[elements]
    if row.masters == "own":
        return weight
    if row.master is None:
        return weight.to(torch.float32)
    master = flat(row.master)[elements]
    if row.masters == "fp32":
        return storage.refreshed(master, weight)
    decode = storage.decode_split if row.masters == "split" else storage.decode_split8
    return decode(weight, master)


def _store_master(row: Row, elements: slice, w: Tensor, step: int, overflow: Tensor | None) -> None:
    weight = flat(row.weight)[elements]
    master = None if row.master is None else flat(row.master)[elements]
    if row.masters == "own":
        weight.copy_(w)
        return
    if row.masters == "none":
        stored = storage.encode_stochastic(w, storage.weight_noise(_noise(row, step, WEIGHT, elements)))
    elif row.masters == "fp32":
        stored, kept = storage.encode_nearest(w, weight.dtype), w
    elif row.masters == "split":
        stored, kept = storage.encode_split(w)
    else:
        stored, kept = storage.encode_split8(w, storage.remainder_noise(_noise(row, step, STEP, elements)))
    weight.copy_(stored)
    if master is not None:
        master.copy_(kept)
    if overflow is not None:
        overflow.masked_fill_(stored.isinf().any(), 1.0)


def _noise(row: Row, step: int, stream: int, elements: slice) -> Tensor:
    return storage.noise_bits(
        storage.noise_key(step, row.ordinal, stream),
        elements.start,
        elements.stop - elements.start,
        row.weight.device,
    )
