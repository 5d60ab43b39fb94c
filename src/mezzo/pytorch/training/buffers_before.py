"""Buffers as they were before a step: where each hangs, its copy, and how it is put back.

A module may write into its buffer or put another tensor in its place, and both are undone. One at a time, or as a
group: all of one dtype and device in one flat tensor, in a handful of launches and without a wait.

Graphs that are still to be run backward may have saved a buffer. Values are written back without raising its version
counter. BatchNorm's backward in training mode does not use the saved running statistics. A buffer of another module
may be a factor in the graph, so where a graph holds it, the module gets a new tensor and the graph keeps the old one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from mezzo.pytorch.unseen import unseen

SMALL = 2**16
"""Bytes up to which a buffer that holds still keeps its copy."""


@dataclass(eq=False)
class Place:
    """Where a buffer hangs.

    Args:
        path: its name in the model.
        holder: the module's own dict of buffers.
        name: its key there.
        norm: the normalisation layer whose running statistic it is.
        steps: in which it was compared.
        moved: whether it had changed in one of them.
    """

    path: str
    holder: dict[str, Tensor | None]
    name: str
    norm: weakref.ref[_NormBase] | None
    steps: int = 0
    moved: bool = False

    def now(self) -> Tensor | None:
        """The tensor that hangs there."""
        return self.holder.get(self.name)

    def is_used_by_a_graph(self, tensor: Tensor) -> bool:
        """Whether a graph may hold this tensor of it and use its values in backward."""
        return self.norm is None and tensor._use_count() > 1  # type: ignore[attr-defined]

    def trains(self) -> bool:
        """Whether a forward pass may change it; a normalisation layer says so itself."""
        if self.norm is None:
            return True
        layer = self.norm()
        return layer is not None and layer.training and layer.track_running_stats


@dataclass(eq=False)
class Kept:
    """One buffer before the step.

    Args:
        place: where it hangs.
        tensor: that was there.
        version: of the tensor; -1 where there is no counter.
        copy: its values; None where there were none yet (a lazy buffer), or too many to keep.
    """

    place: Place
    tensor: Tensor | None
    version: int
    copy: Tensor | None

    @classmethod
    def of(cls, place: Place, *, copied: bool = True) -> Kept:
        """The buffer as it is now, with its values if `copied`."""
        tensor = place.now()
        if tensor is None or is_lazy(tensor):
            return cls(place, tensor, -1, None)
        return cls(place, tensor, _version(tensor), tensor.detach().clone() if copied else None)

    def is_touched(self) -> bool:
        """Whether another tensor is there, or a write was counted."""
        now = self.place.now()
        return now is not self.tensor or (now is not None and _version(now) != self.version)

    def moved(self) -> bool:
        """Whether its values are others than in the copy."""
        now = self.place.now()
        if now is None or self.copy is None:
            return now is not self.tensor
        return not _alike(now, self.copy) or bool((_bits(now) != _bits(self.copy)).any())

    def put_back(self) -> None:
        """Make it what it was."""
        layer = None if self.place.norm is None else self.place.norm()
        if self.tensor is not None and self.copy is None and layer is not None:
            if not is_lazy(self.tensor):  # it was, before its first input
                layer.reset_running_stats()
            return
        if self.tensor is not None and self.copy is not None:
            if self.place.is_used_by_a_graph(self.tensor):
                self.place.holder[self.place.name] = self.copy.clone()
                return
            if not overlaps(self.tensor):  # which nothing can have written into
                with unseen((self.tensor,)):
                    self.tensor.copy_(self.copy)
        elif self.tensor is not None and _version(self.tensor) != self.version:
            return  # written into, and too large to have been kept
        if self.place.now() is not self.tensor:
            self.place.holder[self.place.name] = self.tensor


class Group:
    """Buffers of one dtype and device, copied as one flat tensor.

    Args:
        places: where they hang.
        tensors: that are there.
        older: an earlier copy, from which a value is taken that was finite and no longer is: a step that is still to
            come has overflowed. `before` has those values; `found` has the buffers as they are now.
    """

    def __init__(self, places: list[Place], tensors: list[Tensor], older: Group | None = None) -> None:
        self.places = places
        self.tensors = tensors
        self.before = self.found = _flat(tensors)
        if older is not None and older.before.shape == self.before.shape and self.before.is_floating_point():
            lost = older.before.isfinite() & ~self.before.isfinite()
            self.before = torch.where(lost, older.before, self.before)

    @property
    def kind(self) -> tuple[torch.device, torch.dtype]:
        """What the buffers of a group have in common."""
        return self.before.device, self.before.dtype

    def parts(self) -> list[Tensor]:
        """The copies, in their buffers' shapes."""
        return _parts(self.before, self.tensors)

    def put_back(self, found_inf: Tensor | bool) -> None:
        """Undo the step where `found_inf` is not 0."""
        replaced = any(place.now() is not tensor for place, tensor in zip(self.places, self.tensors))
        if replaced or (found_inf is True and any(map(Place.is_used_by_a_graph, self.places, self.tensors))):
            for place, tensor, part in zip(self.places, self.tensors, self.parts()):
                _put_one(place, tensor, part, found_inf)
            return
        before = self.before
        if isinstance(found_inf, Tensor):
            before = torch.where(_flag(found_inf, before), before, _flat(self.tensors))
        with unseen(self.tensors):
            torch._foreach_copy_(self.tensors, _parts(before, self.tensors))

    def mend(self) -> None:
        """Undo it for each buffer that is no longer finite and was."""
        for place, tensor, part in zip(self.places, self.tensors, self.parts()):
            if spoiled_by(part, place.now()):
                _put_one(place, tensor, part, True)

    def moved(self) -> bool:
        """Whether a value is another than it was, or than in the copy if that is older. Waits for the device."""
        now = [place.now() for place in self.places]
        if not all(each is not None and _alike(each, tensor) for each, tensor in zip(now, self.tensors)):
            return True
        values = _flat(now)  # type: ignore[arg-type]
        alike = (values == self.before) | (values == self.found) | (values.isnan() & self.found.isnan())
        return not bool(alike.all())


@dataclass(eq=False)
class Copies:
    """A model's moving buffers at one moment.

    Args:
        groups: the plain ones.
        alone: the others, and those that may turn out to hold still.
    """

    groups: list[Group]
    alone: list[Kept]

    def put_back(self, found_inf: Tensor | bool) -> None:
        """Make the buffers what they were, where `found_inf` is not 0."""
        if self.alone and bool(found_inf):
            for kept in changed_of(self.alone):
                kept.put_back()
        for group in self.groups:
            group.put_back(found_inf)

    def moved(self) -> bool:
        """Whether a buffer has another value than it had. Waits for the device."""
        return any(kept.moved() for kept in self.alone) or any(group.moved() for group in self.groups)

    def named(self) -> dict[str, Tensor]:
        """Name of a buffer -> its copy."""
        found = {kept.place.path: kept.copy for kept in self.alone if kept.copy is not None}
        for group in self.groups:
            found.update((place.path, part) for place, part in zip(group.places, group.parts()))
        return found


class Still:
    """Buffers that have held still so far. They are not copied at each step, only looked at."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []
        self._note()

    def __len__(self) -> int:
        return len(self._kept)

    def _note(self) -> None:
        self._where = [(kept.place.holder, kept.place.name) for kept in self._kept]
        self._tensors = [kept.tensor for kept in self._kept]
        self._versions = [kept.version for kept in self._kept]

    def add(self, places: list[Place]) -> None:
        """Look at these, too, as they are now."""
        self._kept += [Kept.of(place, copied=_is_small(place)) for place in places]
        self._note()

    def touched(self) -> list[Kept]:
        """Those that have been written to or replaced since."""
        now = [holder.get(name) for holder, name in self._where]
        if all(map(is_, now, self._tensors)):
            try:
                if [each._version for each in now] == self._versions:  # type: ignore[union-attr]
                    return []
            except (AttributeError, RuntimeError):  # None, and tensors of inference mode, have no counter
                pass
        return [kept for kept in self._kept if kept.is_touched()]

    def refresh(self) -> None:
        """A step begins: what happened between steps (a checkpoint loaded, the model moved) is no move."""
        touched = set(self.touched())
        if touched:
            self._kept = [
                Kept.of(kept.place, copied=_is_small(kept.place)) if kept in touched else kept
                for kept in self._kept
            ]
            self._note()

    def take(self, which: list[Kept] | None = None) -> list[Kept]:
        """Take out some, or all."""
        taken = list(self._kept) if which is None else which
        gone = set(taken)
        self._kept = [kept for kept in self._kept if kept not in gone]
        self._note()
        return taken


def changed_of(kept: list[Kept]) -> set[Kept]:
    """Which were written to or replaced; NaN counts as a change. One wait a device."""
    changed: set[Kept] = set()
    unsure: dict[torch.device, tuple[list[Kept], list[Tensor]]] = {}
    for each in kept:
        now = each.place.now()
        if each.is_touched() or (each.copy is None and now is not None):
            changed.add(each)
        elif each.copy is not None and now is not None:
            if now.layout is not torch.strided:
                changed.add(each)
                continue
            owners, flags = unsure.setdefault(now.device, ([], []))
            owners.append(each)
            flags.append((_bits(now) != _bits(each.copy)).any())
    for owners, flags in unsure.values():
        is_changed = torch.stack(flags).tolist()
        changed.update(owner for owner, moved in zip(owners, is_changed) if moved)
    return changed


def _put_one(place: Place, tensor: Tensor, before: Tensor, found_inf: Tensor | bool) -> None:
    """As for a group, where the forward pass may have put another tensor in the buffer's place."""
    now = place.now()
    if isinstance(found_inf, Tensor):
        alike = now is not None and not now.requires_grad and _alike(now, before)
        if now is not None and alike:
            mended = torch.where(_flag(found_inf, before), before, now)
            if now is tensor:
                with unseen((tensor,)):
                    tensor.copy_(mended)
            else:  # never written into: it may be a view of something of the user's
                place.holder[place.name] = mended
            return
        if not bool(found_inf):
            return
    if place.is_used_by_a_graph(tensor):
        place.holder[place.name] = before.clone()
        return
    with unseen((tensor,)):
        tensor.copy_(before)
    place.holder[place.name] = tensor


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device


def _flag(found_inf: Tensor, like: Tensor) -> Tensor:
    return found_inf.to(like.device, non_blocking=True) != 0


def spoiled_by(before: Tensor, now: Tensor | None) -> bool:
    """Whether something is no longer finite that was; judged as a whole where shapes differ."""
    if now is None or not now.dtype.is_floating_point or now.dtype.itemsize == 1:
        return False
    if now.shape != before.shape:
        return bool(before.isfinite().all()) and not bool(now.isfinite().all())
    return bool((before.isfinite() & ~now.isfinite()).any())


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def is_plain(tensor: Tensor) -> bool:
    """Whether it can lie in a flat tensor with others."""
    if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.dtype.itemsize > 1 or not tensor.dtype.is_floating_point


def overlaps(tensor: Tensor) -> bool:
    """Whether several of its elements are one number in memory, as in an expanded tensor: PyTorch refuses writes."""
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1


def _is_small(place: Place) -> bool:
    """Whether a copy of it may be kept for good."""
    tensor = place.now()
    return tensor is not None and tensor.layout is torch.strided and tensor.nbytes <= SMALL


def _bits(tensor: Tensor) -> Tensor:
    """The tensor, or for an 8-bit format, which has no comparison, its codes."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.detach().view(torch.uint8)
    return tensor.detach()


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _parts(flat: Tensor, buffers: list[Tensor]) -> list[Tensor]:
    sizes = [buffer.numel() for buffer in buffers]
    return [part.view(buffer.shape) for part, buffer in zip(flat.split(sizes), buffers)]
