"""What an optimizer keeps beside one weight, in which form: made, converted, read out as FP32, and counted.

A `Slot` is what it remembers of one parameter from step to step, and how it sees that it is no longer true.

A weight of 16 bits has a master: ``entries["master"]`` (FP32), ``entries["remainder"]`` (int16 or int8, beside a
bf16 weight), or none. A state such as `exp_avg` is FP32, bf16, or 8-bit codes with ``entries["exp_avg_scale"]``.
Every tensor of the weight's shape also has its strides: the kernels go through all of them in memory order. What
is converted here is rounded to nearest, and not stochastically as in a step: a conversion happens once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.optimizer_step import Row, StateSpec
from mezzo.pytorch.kernels.optimizer_step.formulas import NEAREST
from mezzo.pytorch.kernels.optimizer_step.reference import (
    decode_master,
    encode_master,
    flat,
    groups,
    load_state,
    store_state,
)

Entries = dict[str, Any]
"""What `optimizer.state[param]` holds."""

_MASTER = {
    "fp32": ("master", torch.float32),
    "split": ("remainder", torch.int16),
    "split8": ("remainder", torch.int8),
}
_STATE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Storage:
    """How one weight's master and states are stored.

    Args:
        masters: ``"own"`` for an FP32 weight, else ``"fp32"``, ``"split"``, ``"split8"`` or ``"none"``.
        state: ``"fp32"``, ``"bf16"`` or ``"int8"``.
        specs: the states, in the update rule's order.
    """

    masters: str
    state: str
    specs: tuple[StateSpec, ...]

    @property
    def keeps_master(self) -> bool:
        """Whether there is a master beside the weight."""
        return self.masters in _MASTER

    @property
    def master_key(self) -> str | None:
        """The entry that holds the master or its remainder."""
        return _MASTER[self.masters][0] if self.keeps_master else None

    def dtypes(self) -> dict[str, torch.dtype]:
        """Every entry's format, in the order in which they are kept."""
        found = {"step": torch.float32}
        for spec in self.specs:
            found[spec.name] = _STATE[self.state]
            if self.state == "int8":
                found[spec.name + "_scale"] = torch.bfloat16
        if self.keeps_master:
            key, dtype = _MASTER[self.masters]
            found[key] = dtype
        return found


def storage(weight: Tensor, group: Mapping[str, Any], specs: tuple[StateSpec, ...]) -> Storage:
    """How a group's modes store this weight's master and states."""
    masters = "own" if weight.dtype is torch.float32 else group["masters"]
    return Storage(masters, group["state"], specs)


def fresh(weight: Tensor, how: Storage, master: Tensor | None = None) -> Entries:
    """The entries of a weight that has not moved yet: states of zero, and its master.

    Args:
        weight: dense.
        how: how they are stored.
        master: FP32; None: the weight's own value.
    """
    entries: Entries = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
    for spec in how.specs:
        entries |= _zeros(weight, how, spec)
    return entries | first_master(weight, how, master)


def _zeros(weight: Tensor, how: Storage, spec: StateSpec) -> Entries:
    made: Entries = {spec.name: torch.zeros_like(weight, dtype=_STATE[how.state], requires_grad=False)}
    if how.state == "int8":
        scales = torch.zeros(groups(weight.numel()), dtype=torch.bfloat16, device=weight.device)
        made[spec.name + "_scale"] = scales
    return made


def first_master(weight: Tensor, how: Storage, master: Tensor | None) -> Entries:
    """The entry of a master that belongs to the weight as it is: none of them moves the weight."""
    if not how.keeps_master:
        return {}
    value = weight.detach().to(torch.float32) if master is None else _like(master, weight, torch.float32)
    # A 24-bit master is cut, not rounded: rounded up, it could have another bf16 weight.
    kept = encode_master(how.masters, value, weight.dtype)[1]
    return {_MASTER[how.masters][0]: kept.clone() if kept is value else kept}


def read_master(weight: Tensor, entries: Mapping[str, Any], how: Storage) -> Tensor:
    """A weight's FP32 master, a new tensor; of an edited weight, what the next step would start from."""
    weight = weight.detach()
    if how.master_key is None:
        return weight.to(torch.float32, copy=True)
    return decode_master(how.masters, weight, entries[how.master_key])


@torch.no_grad()
def write_master(weight: Tensor, entries: Entries, how: Storage, value: Tensor) -> None:
    """Set a weight and its master, in place, from an FP32 value of the weight's shape."""
    value = _like(value, weight, torch.float32)
    if how.master_key is not None:
        value, kept = encode_master(how.masters, value, weight.dtype)
        entries[how.master_key].copy_(kept)
    weight.copy_(value)


def read_state(entries: Entries, spec: StateSpec) -> Tensor:
    """A state as FP32, in the weight's shape and strides: a new tensor."""
    stored: Tensor = entries[spec.name]
    value = torch.empty_like(stored, dtype=torch.float32)
    flat(value).copy_(load_state(flat(stored), entries.get(spec.name + "_scale"), signed=spec.signed))
    return value


def write_state(weight: Tensor, how: Storage, spec: StateSpec, value: Tensor) -> Entries:
    """The entries of a state with these values, which are of the weight's shape and any format."""
    made = _zeros(weight, how, spec)
    value = flat(_like(value, weight, torch.float32))
    store_state(value, flat(made[spec.name]), made.get(spec.name + "_scale"), NEAREST, signed=spec.signed)
    return made


def _like(value: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in the weight's strides and on its device; the tensor itself where it is so already."""
    if value.dtype is dtype and value.device == weight.device and value.stride() == weight.stride():
        return value.detach()
    return torch.empty_like(weight, dtype=dtype, requires_grad=False).copy_(value.detach())


def held_masters(entries: Mapping[str, Any]) -> str:
    """The mode of the master in entries: ``"own"`` where there is none beside the weight."""
    for masters, (key, dtype) in _MASTER.items():
        if isinstance(entries.get(key), Tensor) and entries[key].dtype is dtype:
            return masters
    return "own"


def wrong(entries: Mapping[str, Any], weight: Tensor, how: Storage) -> str:
    """What is wrong with entries for this weight in these modes, or "" if they fit: names, formats, shapes."""
    for key in ("master", "remainder"):
        if key in entries and key != how.master_key:
            return f"{key!r} belongs to a weight of another format"
    for name, dtype in how.dtypes().items():
        value = entries.get(name)
        if not isinstance(value, Tensor):
            return f"{name!r} is missing"
        if value.dtype is not dtype:
            return f"{name!r} is {value.dtype}, and must be {dtype}"
        shape: Sequence[int] = weight.shape
        if name == "step":
            shape = ()
        elif name.endswith("_scale"):
            shape = (groups(weight.numel()),)
        if value.shape != torch.Size(shape):
            return f"{name!r} has the shape {list(value.shape)}, and must have {list(shape)}"
    return ""


def placed(entries: Mapping[str, Any], weight: Tensor, how: Storage) -> Entries:
    """A copy of fitting entries on the weight's device and in its memory order; other entries are kept.

    To the bit, except 8-bit states that come from another memory order: their groups are made anew.
    """
    made: Entries = {}
    for name, value in entries.items():
        made[name] = value.detach().clone() if isinstance(value, Tensor) else value
    made["step"] = made["step"].to(weight.device)
    for spec in how.specs:
        moved = {
            name: made[name].to(weight.device) for name in (spec.name, spec.name + "_scale") if name in made
        }
        if how.state != "int8" or _same_order(moved[spec.name], weight):
            made |= {
                name: value if "_scale" in name else _like(value, weight, value.dtype)
                for name, value in moved.items()
            }
        else:
            made |= write_state(weight, how, spec, read_state(moved, spec))
    if how.master_key is not None:
        made[how.master_key] = _like(made[how.master_key], weight, made[how.master_key].dtype)
    return made


def adapted(entries: Entries, weight: Tensor, how: Storage, master: Tensor | None) -> Entries:
    """Entries for a weight that has changed since they were made: its format, its memory order, the states.

    States keep their values. A master that doesn't belong to the weight's present format is dropped, one that it
    needs is made from the weight.
    """
    step = torch.as_tensor(entries.get("step", 0.0), dtype=torch.float32, device=weight.device)
    made: Entries = {"step": step.detach().clone().reshape(())}
    known = {"step", "master", "remainder"} | {n for s in how.specs for n in (s.name, s.name + "_scale")}
    for spec in how.specs:
        if isinstance(entries.get(spec.name), Tensor):
            if entries[spec.name].shape != weight.shape:
                raise UsageError(
                    f"the optimizer's {spec.name!r} has the shape {list(entries[spec.name].shape)}, and its parameter "
                    f"{list(weight.shape)}. Drop what belonged to the former parameter: optimizer.state.pop(param)."
                )
            made |= write_state(weight, how, spec, read_state(entries, spec))
        else:
            made |= _zeros(weight, how, spec)
            made["step"].zero_()  # a buffer begins with its first gradient
    made |= first_master(weight, how, _kept_master(entries, weight) if master is None else master)
    return made | {name: value for name, value in entries.items() if name not in known}


def _kept_master(entries: Entries, weight: Tensor) -> Tensor | None:
    """The FP32 master in entries of any mode, if it is one of this 16-bit weight's format."""
    weight = weight.detach()
    for masters, (key, dtype) in _MASTER.items():
        kept = entries.get(key)
        if kept is None or kept.dtype is not dtype or weight.dtype is torch.float32:
            continue
        if masters == "fp32" or weight.dtype is torch.bfloat16:
            return read_master(weight, {key: _like(kept, weight, dtype)}, Storage(masters, "fp32", ()))
    return None


def is_in_place(entries: Entries, weight: Tensor, how: Storage) -> bool:
    """Whether fitting entries lie on the weight's device and in its memory order."""
    return all(
        entries[name].device == weight.device
        and (name == "step" or name.endswith("_scale") or _same_order(entries[name], weight))
        for name in how.dtypes()
    )


def _same_order(tensor: Tensor, weight: Tensor) -> bool:
    return tensor.stride() == weight.stride() or (tensor.is_contiguous() and weight.is_contiguous())


def row(weight: Tensor, entries: Entries, how: Storage, ordinal: int) -> Row:
    """The kernels' description of one parameter."""
    key = how.master_key
    return Row(
        weight=weight.detach(),
        grad=None,
        masters=how.masters,
        master=None if key is None else entries[key],
        state=how.state,
        states=tuple(entries[spec.name] for spec in how.specs),
        scales=tuple(entries.get(spec.name + "_scale") for spec in how.specs),
        step=entries["step"],
        ordinal=ordinal,
    )


Modes = tuple[str, str, tuple[StateSpec, ...]]
_DEVICES: dict[torch.device, torch.device] = {}


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's row for the kernels, and what it was made from.

    Args:
        row: the kernels' description.
        how: the form of its entries.
        entries: `optimizer.state[param]`.
        tensors: the values of `entries`.
        modes: `masters` and `state` of its group, and its states.
        address: of the weight's storage: another one after `param.data = other`.
        dtype: the weight's.
        stride: the weight's.
        contiguous: whether the weight is.
        device: the weight's; one object for all slots of a device.
        empty: there is no element.
    """

    row: Row
    how: Storage
    entries: Entries
    tensors: tuple[Any, ...]
    modes: Modes
    address: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    contiguous: bool
    device: torch.device
    empty: bool

    @classmethod
    def of(cls, param: Tensor, entries: Entries, how: Storage, modes: Modes, ordinal: int) -> Slot:
        """The slot of a parameter with fitting entries."""
        return cls(
            row=row(param, entries, how, ordinal),
            how=how,
            entries=entries,
            tensors=tuple(entries.values()),
            modes=modes,
            address=param.data_ptr(),
            dtype=param.dtype,
            stride=param.stride(),
            contiguous=param.is_contiguous(),
            device=_DEVICES.setdefault(param.device, param.device),
            empty=param.numel() == 0,
        )

    def is_of(self, param: Tensor, entries: Entries | None, modes: Modes) -> bool:
        """Whether weight, entries and modes are those that this was made from."""
        return (
            self.address == param.data_ptr()
            and self.dtype is param.dtype
            and self.stride == param.stride()
            and self.modes == modes
            and entries is self.entries
            and len(self.tensors) == len(self.entries)
            and all(map(is_, self.entries.values(), self.tensors))
        )


def bytes_per_parameter(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What a training's tensors take per parameter at this moment, counted from the live tensors themselves.

    Args:
        optimizer: any of `torch.optim` or of Mezzo's; one that has moved, for its states to exist.

    Returns:
        Bytes a parameter of ``"params"``, ``"gradients"`` (those that are there), ``"masters"`` (or remainders),
        ``"state"``, ``"scales"`` and their ``"total"``. Step counts aren't in it: they don't grow with the weight.
    """
    params = list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
    found = {"params": 0, "gradients": 0, "masters": 0, "state": 0, "scales": 0}
    for param in params:
        found["params"] += param.nbytes
        found["gradients"] += 0 if param.grad is None else param.grad.nbytes
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and name != "step":
                found[_kind(name)] += value.nbytes
    numel = sum(param.numel() for param in params)
    if numel == 0:
        raise UsageError("bytes_per_parameter: the optimizer has no elements.")
    each = {name: count / numel for name, count in found.items()}
    return each | {"total": sum(each.values())}


def _kind(name: str) -> str:
    if name in ("master", "remainder"):
        return "masters"
    return "scales" if name.endswith("_scale") else "state"
