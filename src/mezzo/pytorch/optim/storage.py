"""How an optimizer stores one weight's master and states: created, converted, read out as FP32, counted.

Entries are ``master`` (FP32) or ``remainder`` (int16, int8), and states such as ``exp_avg``, as codes with
``exp_avg_scale``. They have the weight's strides, and are cut as a `DTensor` is. Conversions round to nearest, because
they happen once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import is_spread, local
from mezzo.pytorch.kernels.optimizer_step import Row, StateSpec, reference
from mezzo.pytorch.kernels.optimizer_step.formulas import GROUP, NEAREST, state_formats
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master, encode_master, flat, groups
from mezzo.pytorch.weights import shards

Entries = dict[str, Any]  # `optimizer.state[param]`

Modes = tuple[str, str, tuple[StateSpec, ...]]  # `masters` and `state` of a group, and the states of its rule

MASTER_ENTRIES = {
    "fp32": ("master", torch.float32),
    "split": ("remainder", torch.int16),
    "split8": ("remainder", torch.int8),
}
BF16 = "bf16_instead_of_int8"  # an entry that 8-bit states lack: `dcp.load` copies no codes into bf16
_DEVICES: dict[torch.device, torch.device] = {}


@dataclass(frozen=True, slots=True)
class Storage:
    """How one weight's master and states are stored."""

    masters: str  # "own" for an FP32 weight, else "fp32", "split", "split8" or "none"
    state: str  # one of formulas.state_formats
    specs: tuple[StateSpec, ...]  # the states, in the update rule's order
    is_other: bool = False  # than the group's state, which shards of this shape can't have

    @property
    def master_key(self) -> str | None:
        """The entry that holds the master or its remainder; None if there is no separate master."""
        return MASTER_ENTRIES[self.masters][0] if self.masters in MASTER_ENTRIES else None

    def dtypes(self) -> dict[str, torch.dtype]:
        """The format of every entry."""
        found = {"step": torch.float32}
        for spec in self.specs:
            found[spec.name] = state_formats[self.state].dtype
            if state_formats[self.state].is_scaled:
                found[spec.name + "_scale"] = torch.bfloat16
        if self.master_key is not None:
            found[self.master_key] = MASTER_ENTRIES[self.masters][1]
        return found


def storage(weight: Tensor, group: Mapping[str, Any], specs: tuple[StateSpec, ...]) -> Storage:
    """The storage of a weight's master and states in a group with these modes."""
    masters = "own" if weight.dtype is torch.float32 else group["masters"]
    state = group["state"]
    # Groups that cross rows would be others on another number of ranks.
    is_other = is_spread(weight) and state_formats[state].is_scaled and not shards.has_whole_groups(weight)
    return Storage(masters, "bf16" if is_other else state, specs, is_other)


def _zeros(weight: Tensor, how: Storage, spec: StateSpec) -> Entries:
    stored = state_formats[how.state]
    made: Entries = {spec.name: torch.zeros_like(weight, dtype=stored.dtype, requires_grad=False)}
    if stored.is_scaled:
        scales = torch.zeros(groups(weight.numel()), dtype=torch.bfloat16, device=weight.device)
        made[spec.name + "_scale"] = scales
    return made


def first_master(weight: Tensor, how: Storage, master: Tensor | None) -> Entries:
    """The entry of a master, FP32 (None: the weight's own value); the weight stays as it is."""
    if how.master_key is None:
        return {}
    own = local(weight.detach())
    value = (
        own.to(torch.float32) if master is None else _like(shards.part(master, weight), own, torch.float32)
    )
    # A 24-bit master is cut, not rounded: rounded up, it could belong to another bf16 weight.
    kept = encode_master(how.masters, value, own.dtype)[1]
    return {how.master_key: shards.joined(kept.clone() if kept is value else kept, weight)}


def read_master(weight: Tensor, entries: Mapping[str, Any], how: Storage) -> Tensor:
    """A weight's FP32 master, a new tensor; for an edited weight, the value that the next step starts from."""
    own = local(weight.detach())
    if how.master_key is None:
        value = own.to(torch.float32, copy=True)
    else:
        value = decode_master(how.masters, own, local(entries[how.master_key]))
    return shards.joined(value, weight)


@torch.no_grad()
def write_master(weight: Tensor, entries: Entries, how: Storage, value: Tensor) -> None:
    """Set a weight and its master, in place, from an FP32 value of the weight's shape."""
    own = local(weight.detach())
    value = _like(shards.part(value, weight), own, torch.float32)
    if how.master_key is not None:
        value, kept = encode_master(how.masters, value, own.dtype)
        local(entries[how.master_key]).copy_(kept)
    weight.copy_(shards.joined(value, weight))


def read_state(entries: Entries, spec: StateSpec) -> Tensor:
    """A state as FP32, in the weight's shape and strides: a new tensor."""
    stored = local(entries[spec.name])
    scales: Tensor | None = entries.get(spec.name + "_scale")
    scales = None if scales is None else local(scales).reshape(-1)
    value = torch.empty_like(stored, dtype=torch.float32)
    flat(value).copy_(reference.load_state(flat(stored), scales, signed=spec.signed))
    return shards.joined(value, entries[spec.name])


def _like(value: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in the weight's strides and on its device; the tensor itself if it has them already."""
    if value.dtype is dtype and value.device == weight.device and value.stride() == weight.stride():
        return value.detach()
    return torch.empty_like(weight, dtype=dtype, requires_grad=False).copy_(value.detach())


def held_masters(entries: Mapping[str, Any]) -> str:
    """The kind of the master in entries: ``"own"`` if there is no separate one."""
    for masters, (key, dtype) in MASTER_ENTRIES.items():
        if isinstance(entries.get(key), Tensor) and entries[key].dtype is dtype:
            return masters
    return "own"


def wrong(entries: Mapping[str, Any], weight: Tensor, how: Storage, *, may_differ: bool = False) -> str:
    """Why these entries do not fit this weight and storage (names, formats, shapes), or "".

    `may_differ`: states may be 8-bit codes of a whole parameter where shards have bf16, or the reverse.
    """
    first = entries.get(how.specs[0].name) if how.specs else None
    if may_differ and isinstance(first, Tensor) and how.state != "fp32":
        for name, stored in state_formats.items():
            if name != "fp32" and stored.dtype is first.dtype:
                how = replace(how, state=name)
    for key in ("master", "remainder"):
        if key in entries and key != how.master_key:
            return f"{key!r} belongs to a weight of another format"
    for name, dtype in how.dtypes().items():
        value = entries.get(name)
        if not isinstance(value, Tensor):
            return f"{name!r} is missing"
        if value.dtype is not dtype:
            return f"{name!r} is {value.dtype} and must be {dtype}"
        shape: Sequence[int] = () if name == "step" else weight.shape
        if name.endswith("_scale"):
            shape = (groups(weight.numel()),)
            if value.numel() == shape[0]:
                continue  # of a shard, they are in rows
        if value.shape != torch.Size(shape):
            return f"{name!r} has shape {list(value.shape)} and must have {list(shape)}"
    return ""


def fits(entries: Entries, weight: Tensor, how: Storage) -> bool:
    """Whether entries have this storage, on the weight's device and in its memory order."""
    if wrong(entries, weight, how):
        return False
    own = local(weight.detach())
    for name in how.dtypes():
        value: Tensor = entries[name]
        if name != "step" and not shards.are_cut_alike(value, weight):
            return False
        is_scale = name.endswith("_scale")
        if is_scale and not is_spread(value) and value.dim() != 1:
            return False
        value = local(value)
        if value.device != own.device or not (is_scale or name == "step" or _same_order(value, own)):
            return False
    return True


def converted(
    entries: Mapping[str, Any], weight: Tensor, how: Storage, master: Tensor | None = None
) -> Entries:
    """New entries for a dense weight, from those of any other storage, device, memory order, or none.

    Bits are kept where the format stays, except for 8-bit states in another memory order, whose groups change. A
    missing state starts at zero. The master is `master` in FP32, else the entries', else the weight's own value.
    """
    own, cut = local(weight.detach()), dict(entries)
    for spec in how.specs:
        value, scale = entries.get(spec.name), spec.name + "_scale"
        if value is not None and value.shape != weight.shape:
            raise UsageError(
                f"the optimizer's {spec.name!r} has shape {list(value.shape)}, and its parameter {list(weight.shape)}. "
                "If the parameter was replaced, drop the old state: optimizer.state.pop(param)."
            )
        if entries.get(scale) is None:
            continue
        if not is_spread(weight):
            cut[scale] = shards.part(entries[scale], weight).reshape(-1)
        elif shards.has_whole_groups(weight):
            cut[scale] = shards.part(entries[scale], weight, shards.scale_shape(weight)).reshape(-1)
        else:
            cut[spec.name] = read_state(cut, spec)
            del cut[scale]
    for name in (*(spec.name for spec in how.specs), "master", "remainder"):
        if isinstance(cut.get(name), Tensor):
            cut[name] = shards.part(cut[name], weight)
    made = _converted(cut, own, how, None if master is None else shards.part(master, weight))
    if not is_spread(weight):
        return made
    for name in made.keys() & (how.dtypes().keys() - {"step"}):
        if name.endswith("_scale"):
            rows = made[name].view(own.shape[0], own.shape[1:].numel() // GROUP)
            made[name] = shards.joined(rows, weight, shards.scale_shape(weight))
        else:
            made[name] = shards.joined(made[name], weight)
    return made | {BF16: torch.zeros((), device=own.device)} if how.is_other else made


def _converted(entries: Mapping[str, Any], weight: Tensor, how: Storage, master: Tensor | None) -> Entries:
    """`converted` of plain tensors."""
    step = torch.as_tensor(entries.get("step", 0.0), dtype=torch.float32, device=weight.device)
    made: Entries = {"step": step.detach().clone().reshape(())}
    known = {"step", "master", "remainder", BF16}
    for spec in how.specs:
        names = spec.name, spec.name + "_scale"
        known |= {*names}
        old = {name: entries[name].to(weight.device) for name in names if entries.get(name) is not None}
        value = old.get(spec.name)
        if value is None:
            made |= _zeros(weight, how, spec)
            made["step"].zero_()  # a buffer begins with its first gradient
            continue
        stored = state_formats[how.state]
        if value.dtype is stored.dtype and (not stored.is_scaled or _same_order(value, weight)):
            made |= {name: kept.detach().clone() for name, kept in old.items()}
            made[spec.name] = _like(made[spec.name], weight, value.dtype)
        else:
            made |= _zeros(weight, how, spec)
            is_code = names[1] in old or not value.is_floating_point()
            wide = read_state(old, spec) if is_code else value
            values, scales = flat(_like(wide, weight, torch.float32)), made.get(spec.name + "_scale")
            reference.store_state(values, flat(made[spec.name]), scales, NEAREST, signed=spec.signed)
    if master is None and how.master_key is not None and held_masters(entries) == how.masters:
        kept = entries[how.master_key].detach()
        made[how.master_key] = _like(kept.clone(), weight, kept.dtype)
    else:
        made |= first_master(weight, how, _other_master(entries, weight) if master is None else master)
    return made | {name: value for name, value in entries.items() if name not in known}


def _other_master(entries: Mapping[str, Any], weight: Tensor) -> Tensor | None:
    """The FP32 master in entries of any kind, if it belongs to this 16-bit weight's format."""
    masters = held_masters(entries)
    is_fp16 = weight.dtype is torch.float16 and masters == "fp32"
    if masters == "own" or not (is_fp16 or weight.dtype is torch.bfloat16):
        return None
    key, dtype = MASTER_ENTRIES[masters]
    return decode_master(masters, weight.detach(), _like(entries[key], weight, dtype))


def _same_order(tensor: Tensor, weight: Tensor) -> bool:
    return tensor.stride() == weight.stride() or (tensor.is_contiguous() and weight.is_contiguous())


class ParameterState:
    """What an optimizer remembers of one parameter between steps, and how it notices that this became invalid."""

    def __init__(self, param: Tensor, entries: Entries, how: Storage, modes: Modes, ordinal: int) -> None:
        own = local(param.detach())
        scales = [entries.get(spec.name + "_scale") for spec in how.specs]
        self.row = Row(  # of this rank's part
            weight=own,
            grad=None,
            masters=how.masters,
            master=None if how.master_key is None else local(entries[how.master_key]),
            state=how.state,
            states=tuple(local(entries[spec.name]) for spec in how.specs),
            scales=tuple(None if scale is None else local(scale).reshape(-1) for scale in scales),
            step=entries["step"],
            ordinal=ordinal,
            offset=shards.offset(param),
            whole=param if is_spread(param) else None,
        )
        self.how, self.entries, self.modes = how, entries, modes
        self.tensors: tuple[Any, ...] = tuple(entries.values())
        self.address = own.data_ptr()  # which `param.data = other` changes
        self.dtype, self.stride, self.contiguous = own.dtype, own.stride(), own.is_contiguous()
        self.device = _DEVICES.setdefault(own.device, own.device)  # one object for all parameters on a device
        # Without elements; an empty shard moves, because its step count is that of the others.
        self.is_still = own.numel() == 0 and not is_spread(param)

    def is_of(self, own: Tensor, entries: Entries | None, modes: Modes) -> bool:
        """Whether weight, entries and modes are still the same."""
        return (
            self.address == own.data_ptr()
            and self.dtype is own.dtype
            and self.stride == own.stride()
            and self.modes == modes
            and entries is self.entries
            and len(self.tensors) == len(self.entries)
            and all(map(is_, self.entries.values(), self.tensors))
        )
