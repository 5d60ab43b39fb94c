"""The buffers that a training forward pass changes, as they were before a step: copied at its start, put back if the
step is skipped.

An overflow in the forward pass makes running means infinite or NaN for good, though the step itself is skipped
(PyTorch issue 90342). What is true of BatchNorm is true of every module that keeps averages of what it saw: the `u`
and `v` of a spectral norm, the codebook of a VQ layer, a module's own counter. A module may write into its buffer or
put another tensor there, and both are undone.

Which buffers move is learned. Those of BatchNorm and InstanceNorm are known. All others are copied in the first two
steps and compared after them: version counters alone would not do, since native kernels and writes through `.data`
do not move them. From then on those that moved are copied: all of one dtype and device in one flat tensor, in a handful
of launches and without a wait. Those that held still (masks, rotary tables) are not copied: their version counters are
checked, and one that moves after all is copied from then on; where it is small, its copy of the learning steps is
still there to put back.

Graphs that are still to be run backward may have saved a buffer. Values are written back without raising its version
counter. BatchNorm's backward in training mode does not use the saved running statistics. A buffer of another module
may be a factor in the graph, so where a graph holds it, the module gets a new tensor and the graph keeps the old one.

What it leaves out: state that is no buffer (a Python counter, a plain tensor attribute); a buffer that a skipped step
registers anew; and one that is large, or written through `.data`, and changes for the first time in a skipped step
after the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from mezzo.pytorch.unseen import unseen

SMALL = 2**16
"""Bytes up to which a buffer that holds still keeps its copy."""

LEARNED_AFTER = 2
"""Steps in which every buffer is copied, and compared afterwards."""

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


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

    def trains(self) -> bool:
        """Whether a forward pass may change it; a normalisation layer says so itself."""
        if self.norm is None:
            return True
        layer = self.norm()
        return layer is not None and layer.training and layer.track_running_stats


class Saved:
    """One buffer at one moment.

    Args:
        place: where it hangs.
        tensor: that was there.
        copy: its values; None where there were none yet (a lazy buffer), or too many to keep.
    """

    def __init__(self, place: Place, tensor: Tensor | None, copy: Tensor | None) -> None:
        self.place, self.tensor, self.copy = place, tensor, copy
        self._version = -1 if tensor is None or is_lazy(tensor) else _version(tensor)

    @classmethod
    def now(cls, place: Place, *, keep: bool = True) -> Saved:
        """The buffer as it is now, with a copy of its values if `keep`."""
        tensor = place.now()
        copied = keep and tensor is not None and not is_lazy(tensor)
        return cls(place, tensor, tensor.detach().clone() if copied and tensor is not None else None)

    def is_touched(self) -> bool:
        """Whether another tensor is there, or a write was counted."""
        now = self.place.now()
        return now is not self.tensor or (now is not None and _version(now) != self._version)

    def moved(self) -> bool:
        """Whether its values differ from the copy. NaN counts as a change; waits for the device."""
        now = self.place.now()
        if now is None or self.copy is None:
            return now is not self.tensor
        if now.layout is not torch.strided or not _alike(now, self.copy):
            return True
        return bool((_bits(now) != _bits(self.copy)).any())

    def put_back(self, found_inf: Tensor | bool = True) -> None:
        """Make it what it was, where `found_inf` is not 0."""
        place, tensor, now = self.place, self.tensor, self.place.now()
        if isinstance(found_inf, Tensor):
            if now is not None and self.copy is not None and not now.requires_grad and _alike(now, self.copy):
                restored = torch.where(_flag(found_inf, now), self.copy, now)
                if now is tensor:
                    _write(tensor, restored)
                else:  # never written into: it may be a view of something of the user's
                    place.holder[place.name] = restored
                return
            if not bool(found_inf):
                return
        if tensor is not None and self.copy is not None:
            if place.norm is None and tensor._use_count() > 1:  # type: ignore[attr-defined]  # a graph may hold it
                place.holder[place.name] = self.copy.clone()
                return
            if not overlaps(tensor):  # which nothing can have written into
                _write(tensor, self.copy)
        elif tensor is not None and place.norm is not None:
            layer = place.norm()
            if layer is not None and not is_lazy(tensor):  # it was, before its first input
                layer.reset_running_stats()
            return
        elif tensor is not None and _version(tensor) != self._version:
            return  # written into, and too large to have been kept
        if now is not tensor:
            place.holder[place.name] = tensor

    def restore_lost(self) -> None:
        """Put it back if something is no longer finite that was; judged as a whole where shapes differ."""
        before, now = self.copy, self.place.now()
        if before is None or now is None or not now.dtype.is_floating_point or now.dtype.itemsize == 1:
            return
        was, still = before.isfinite(), now.isfinite()
        lost = was.all() & ~still.all() if now.shape != before.shape else (was & ~still).any()
        if lost:
            self.put_back()


class _Group(NamedTuple):
    """Buffers of one dtype and device, copied as one flat tensor; `found` is as they were, `flat` as they should be."""

    flat: Tensor
    found: Tensor
    places: list[Place]
    tensors: list[Tensor]

    def saved(self) -> list[Saved]:
        """Each by itself."""
        return list(map(Saved, self.places, self.tensors, _parts(self.flat, self.tensors)))


class Copies:
    """A model's moving buffers at one moment.

    Args:
        places: where they hang.
        learning: those among them that may turn out to hold still.
        older: earlier copies, from which a value is taken that was finite and no longer is: a step that is still to
            come has overflowed.
    """

    def __init__(self, places: list[Place], learning: list[Place], older: Copies | None) -> None:
        self.alone = [Saved.now(place) for place in learning]
        self._groups: list[_Group] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[Place]] = {}
        for place in places:
            tensor = place.now()
            if not place.trains():
                continue
            if tensor is None or not _is_plain(tensor) or (place.norm is None and overlaps(tensor)):
                self.alone.append(Saved.now(place))
            else:
                kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
        earlier = (
            {} if older is None else {(one.flat.device, one.flat.dtype): one.flat for one in older._groups}
        )
        for kind, some in kinds.items():
            tensors: list[Tensor] = [place.holder[place.name] for place in some]  # type: ignore[misc]
            flat = found = _flat(tensors)
            before = earlier.get(kind)
            if before is not None and before.shape == flat.shape and flat.is_floating_point():
                flat = torch.where(before.isfinite() & ~flat.isfinite(), before, flat)
            self._groups.append(_Group(flat, found, some, tensors))

    def __iter__(self) -> Iterator[Saved]:
        yield from self.alone
        for group in self._groups:
            yield from group.saved()

    def put_back(self, found_inf: Tensor | bool) -> None:
        """Make the buffers what they were, where `found_inf` is not 0."""
        if self.alone and bool(found_inf):
            for each in self.alone:
                if each.is_touched() or each.moved():
                    each.put_back()
        for group in self._groups:
            flat, tensors = group.flat, group.tensors
            replaced = any(place.now() is not tensor for place, tensor in zip(group.places, tensors))
            if isinstance(found_inf, Tensor) and not replaced:
                restored = torch.where(_flag(found_inf, flat), flat, _flat(tensors))
                with unseen(tensors):
                    torch._foreach_copy_(tensors, _parts(restored, tensors))
            else:
                for each in group.saved():
                    each.put_back(found_inf)

    def moved(self) -> bool:
        """Whether a buffer has another value than it had. Waits for the device."""
        for flat, found, places, tensors in self._groups:
            now = [place.now() for place in places]
            if not all(each is not None and _alike(each, tensor) for each, tensor in zip(now, tensors)):
                return True
            values = _flat(now)  # type: ignore[arg-type]
            alike = (values == flat) | (values == found) | (values.isnan() & found.isnan())
            if not bool(alike.all()):
                return True
        return any(each.moved() for each in self.alone)

    def named(self) -> dict[str, Tensor]:
        """Name of a buffer -> its copy."""
        return {each.place.path: each.copy for each in self if each.copy is not None}


class MovingBuffers:
    """The buffers of a model that its forward pass changes in training.

    Naive code::

        before = [buffer.clone() for buffer in model.buffers()]     # remember()
        for buffer, old in zip(model.buffers(), before):            # restore(found_inf)
            buffer.copy_(torch.where(found_inf != 0, old, buffer))

    `Networks` decides when each is called where several networks are trained.

    Args:
        model: held weakly. Its buffers are looked for at the first `remember`, in the learning steps, and after each
            skip.

    Attributes:
        parameters: the ids of the model's parameters.
        turn: of `Networks`, in which the newest copies were taken.
        order: of the oldest copies among those of all networks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._moving: list[Place] = []
        self._learning: list[Place] = []
        self._still: list[Saved] = []
        self._known: set[tuple[int, str]] = set()
        self._first: Copies | None = None  # of the first forward pass of the step
        self._last: Copies | None = None  # of the newest turn; may outlive the step
        self._undone: tuple[Copies, Copies] | None = None
        self._look = True
        self.parameters: frozenset[int] = frozenset()
        self.turn = -1
        self.order = 0
        # Plain bools, for a compiler may read `watches`.
        self._has_norm = any(isinstance(module, _NormBase) for module in model.modules())
        self._has_buffers = self._has_norm or any(module._buffers for module in model.modules())

    @property
    def watches(self) -> bool:
        """Whether the model has buffers that may move.

        While a compiler traces: whether there are normalisation layers. Nothing of ours runs inside a compiled
        region, so each model with a mask would be cut in two.
        """
        return self._has_norm if torch.compiler.is_dynamo_compiling() else self._has_buffers

    @property
    def remembers(self) -> bool:
        """Whether a step has begun, whose buffers can be put back."""
        return self._first is not None

    @property
    def holds_copies(self) -> bool:
        """Whether there is anything to put back, of this step or of an older one."""
        return not (self._first is None and self._last is None and self._undone is None)

    @property
    def spans_turns(self) -> bool:
        """Whether other steps have ended since this one began, and the model was called again."""
        return self._first is not self._last and self._first is not None

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of the model requires a gradient."""
        model = self._model()
        return model is not None and not any(p.requires_grad for p in model.parameters())

    def remember(self) -> None:
        """Copy what a step may change. Called again before `restore`, a step of another network has ended."""
        if self._look:
            self._find()
        if not self.watches:
            return
        if (
            self._first is None
        ):  # what happened between steps (a checkpoint loaded, the model moved) is no move
            self._still = [_still(each.place) if each.is_touched() else each for each in self._still]
        self._last = self._copied()
        self._first = self._first or self._last

    @torch.no_grad()
    def _copied(self) -> Copies:
        return Copies(self._moving, self._learning, self._last)

    def begin_anew(self) -> None:
        """What was called before the newest copies is no part of the step, unless nothing was called since."""
        if self._first is not self._last and self.spans_turns and self._last is not None:
            with torch.no_grad():
                if self._last.moved():
                    self._first = self._last

    def restore(self, found_inf: Tensor | bool, *, keep: bool = False) -> None:
        """The step is over: put the copies back where `found_inf` is not 0, and drop them.

        Args:
            found_inf: known on the host (bool: nothing is launched for False), or a 0-dim tensor. That is waited for in
                the learning steps, and where a buffer that held still has moved.
            keep: keep the newest copies for `restore_lost`.
        """
        if not self.holds_copies:
            self._look |= found_inf is not False
            return
        with torch.no_grad():
            first, self._first = self._first, None
            undone, self._undone = self._undone, None
            if undone is not None and not bool(found_inf) and not undone[1].moved():
                undone[0].put_back(True)
            if first is not None:
                self._end(first, found_inf)
            elif self._last is not None and bool(found_inf):
                self.restore_lost()
            if not keep:
                self._last = None

    def _end(self, first: Copies, found_inf: Tensor | bool) -> None:
        late = self._touched()
        if isinstance(found_inf, Tensor) and (first.alone or late):
            found_inf = bool(found_inf)
        if first.alone:
            self._learn(first.alone)
        if late:
            self._moving.extend(each.place for each in late)
            self._still = [each for each in self._still if each not in late]
        if found_inf is False:
            return
        for each in late:
            each.put_back()
        first.put_back(found_inf)
        self._look = True

    def _touched(self) -> list[Saved]:
        return [each for each in self._still if each.is_touched()]

    @torch.no_grad()
    def undo(self) -> None:
        """Put the newest copies back, for the skipped step of another network.

        The step of this one is not over. If it is taken, and nothing has moved since, this is taken back.
        """
        if self._last is not None:
            self._undone = self._copied(), self._last
            self._last.put_back(True)
            self.restore_lost()

    @torch.no_grad()
    def restore_lost(self) -> None:
        """Put the copies of those buffers back that are no longer finite and were, and keep the copies.

        For the step of another network: its overflow may have spoiled the statistics of this one.
        """
        if self._last is not None:
            for each in (*self._last, *self._touched()):
                each.restore_lost()

    def forget(self) -> None:
        """Drop the copies."""
        self._first = self._last = self._undone = None

    def state(self) -> dict[str, Tensor]:
        """The copies: name of a buffer -> its values before the step."""
        named = {} if self._first is None else self._first.named()
        return {name: copy.clone() for name, copy in named.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor] | list[Tensor]) -> None:
        """Take the copies that `state` gave. Those of other buffers are dropped, and so is an older Mezzo's list."""
        self._look = True
        self._learning += [each.place for each in self._still]
        self._still = []
        self.forget()
        self.remember()
        copies = {} if self._first is None else self._first.named()
        if not isinstance(state, dict) or any(
            path not in copies or copies[path].shape != saved.shape for path, saved in state.items()
        ):
            self.forget()
            return
        for path, saved in state.items():
            copies[path].copy_(saved)

    def _find(self) -> None:
        """Look for buffers that are not known yet."""
        self._look = False
        model = self._model()
        if model is None:
            return
        self.parameters = frozenset(map(id, model.parameters()))
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if (id(module._buffers), name) in self._known or (buffer is not None and buffer.is_meta):
                    continue
                self._known.add((id(module._buffers), name))
                is_norm = isinstance(module, _NormBase) and name in _NORM_BUFFERS
                path = f"{prefix}.{name}" if prefix else name
                place = Place(path, module._buffers, name, weakref.ref(module) if is_norm else None)
                (self._moving if is_norm else self._learning).append(place)
        self._has_buffers = bool(self._known)

    def _learn(self, compared: list[Saved]) -> None:
        """Settle which buffers move, once they have been compared often enough."""
        for each in compared:
            each.place.steps += 1
            each.place.moved |= each.is_touched() or each.moved()
        settled = [place for place in self._learning if place.steps >= LEARNED_AFTER]
        self._learning = [place for place in self._learning if place.steps < LEARNED_AFTER]
        self._moving += [place for place in settled if place.moved]
        self._still += [_still(place) for place in settled if not place.moved]
        self._look = True


def _still(place: Place) -> Saved:
    """A buffer that holds still; copied if that is small enough to be kept for good."""
    tensor = place.now()
    small = tensor is not None and tensor.layout is torch.strided and tensor.nbytes <= SMALL
    return Saved.now(place, keep=small)


def _write(tensor: Tensor | None, values: Tensor) -> None:
    assert tensor is not None
    with unseen((tensor,)):
        tensor.copy_(values)


def _alike(left: Tensor, right: Tensor | None) -> bool:
    return (
        right is not None
        and left.shape == right.shape
        and left.dtype == right.dtype
        and left.device == right.device
    )


def _flag(found_inf: Tensor, like: Tensor) -> Tensor:
    return found_inf.to(like.device, non_blocking=True) != 0


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_plain(tensor: Tensor) -> bool:
    """Whether it can lie in a flat tensor with others."""
    if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.dtype.itemsize > 1 or not tensor.dtype.is_floating_point


def overlaps(tensor: Tensor) -> bool:
    """Whether several of its elements are one number in memory, as in an expanded tensor: PyTorch refuses writes."""
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1


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
