"""The step in PyTorch operations, one parameter after another in blocks: the specification of every other form.

Every other form gives the same bits. Optimizers also use the storage of masters and moments as functions of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, form, formulas
from mezzo.pytorch.kernels.optimizer_step.formulas import GROUP, STEP, WEIGHT

BLOCK = 1 << 16  # elements at a time, so that intermediate tensors stay in the cache and out of peak memory


class DeviceStepper:
    """The step on any device. On a GPU the host waits for `found_inf` and every row's `step`."""

    @torch.no_grad()
    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Update every row that has a gradient; see `Stepper`."""
        if found_inf is not None and bool(found_inf != 0):
            return
        for hyper, rows in groups:
            for row in rows:
                if row.grad is not None:
                    _move(hyper, row, flat(row.grad), multiplier, overflow)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order: a ``(numel,)`` view, for any strides."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _move(hyper: Hyper, row: Row, grad: Tensor, multiplier: Tensor | None, overflow: Tensor | None) -> None:
    row.step.add_(1)
    step = int(row.step)
    rule, constants = getattr(formulas, hyper.rule), formulas.constants_of[hyper.rule](hyper.numbers, step)
    keys = [formulas.noise_key(step, row.ordinal, stream) for stream in (STEP, WEIGHT)]
    keys = [formulas.key_from(key, row.offset) for key in keys]
    weight, master = flat(row.weight), None if row.master is None else flat(row.master)
    for start in range(0, grad.numel(), BLOCK):
        elements = slice(start, min(start + BLOCK, grad.numel()))
        groups = slice(start // GROUP, -(-elements.stop // GROUP))
        states = [flat(state)[elements] for state in row.states]
        scales = [None if scale is None else scale[groups] for scale in row.scales]
        part, kept = weight[elements], None if master is None else master[elements]
        w = decode_master(row.masters, part, kept)
        g = grad[elements].to(torch.float32)
        if multiplier is not None:
            g = g * multiplier
        if hyper.maximize:
            g = -g
        if hyper.l2:
            g = formulas.coupled(w, g, hyper.l2)
        old = [
            load_state(state, scale, signed=spec.signed)
            for spec, state, scale in zip(hyper.states, states, scales)
        ]
        w, *new = rule(w, g, *old, *[None] * (2 - len(old)), constants)
        at = torch.arange(elements.start, elements.stop, device=grad.device)
        word: Any = 0
        noise: Any = 0
        if row.state != "fp32" or row.masters == "split8":
            word = formulas.noise(keys[STEP], formulas.place(at))
            noise = formulas.remainder_noise(word)
        for spec, value, draw, state, scale in zip(hyper.states, new, _DRAWS, states, scales):
            store_state(value, state, scale, draw(word), signed=spec.signed)
        if row.masters == "none":
            noise = formulas.weight_noise(formulas.noise(keys[WEIGHT], formulas.place(at)))
        stored, low = encode_master(row.masters, w, part.dtype, noise)
        part.copy_(stored)
        if kept is not None:
            kept.copy_(low)
        if overflow is not None and row.masters != "own":
            overflow.masked_fill_(stored.isinf().any(), 1.0)


_DRAWS = (formulas.first_noise, formulas.second_noise)


def decode_master(masters: str, weight: Tensor, kept: Tensor | None) -> Tensor:
    """The FP32 values of weights and what is kept with them; for an edited weight, a value within one ulp of it."""
    decode = getattr(formulas, f"decode_{form(masters, weight.dtype)}")
    value: Tensor = decode(weight if masters == "own" else weight.view(torch.int16), kept)
    return value


def encode_master(
    masters: str, value: Tensor, dtype: torch.dtype = torch.bfloat16, noise: Tensor | int = 0
) -> tuple[Tensor, Tensor]:
    """The weights of FP32 values, and what is kept with them; `noise` (``"split8"``, ``"none"``) of 0 truncates."""
    weight, kept = getattr(formulas, f"encode_{form(masters, dtype)}")(value, noise)
    if masters != "own":
        weight = weight.to(torch.int16).view(dtype)
    kept_type = formulas.kept_types[form(masters, dtype)]
    return weight, kept.to(getattr(torch, kept_type)) if kept_type else kept


def load_state(stored: Tensor, scales: Tensor | None, *, signed: bool) -> Tensor:
    """The ``(n,)`` FP32 values of a state in one of `state_formats`, with ``(groups(n),)`` bf16 scales or None."""
    codec, codes = _codes(stored, signed)
    scale = None if scales is None else _per_element(scales.to(torch.float32), stored.numel())
    value: Tensor = getattr(formulas, f"value_{codec}")(codes, scale)
    return value


def store_state(
    value: Tensor, stored: Tensor, scales: Tensor | None, noise: Tensor | int, *, signed: bool
) -> None:
    """Write ``(n,)`` FP32 values into a state in one of `state_formats`, with ``(groups(n),)`` bf16 scales or None."""
    codec, codes = _codes(stored, signed)
    inverse = None
    if scales is not None:
        largest = formulas.magnitude(value)
        largest = torch.nn.functional.pad(largest, (0, -value.numel() % GROUP)).view(-1, GROUP).amax(1)
        inverse = _per_element(formulas.group_inverse(largest), value.numel())
        value = formulas.cut(value if signed else value.abs(), _per_element(largest, value.numel()))
        scales.copy_(formulas.group_scale(largest).to(torch.int16).view(torch.bfloat16))
    codes.copy_(getattr(formulas, f"code_{codec}")(value, inverse, noise))


def _codes(stored: Tensor, signed: bool) -> tuple[str, Tensor]:
    """The codec of a state, and the state as codes, in its memory."""
    how = next(each for each in formulas.state_formats.values() if each.dtype is stored.dtype)
    codec = how.signed if signed else how.unsigned
    return codec, stored.view(getattr(torch, formulas.codecs[codec]))


def groups(numel: int) -> int:
    """How many scales a state of that many elements has; the last group may be short."""
    return -(-numel // GROUP)


def _per_element(by_group: Tensor, numel: int) -> Tensor:
    return by_group.repeat_interleave(GROUP)[:numel]
