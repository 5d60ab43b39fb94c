"""Running statistics: the buffers that a training forward pass changes, as they were before a step. Copied at its
start, put back if the step is skipped.

An overflow in the forward pass makes running means infinite or NaN for good, though the step itself is skipped
(PyTorch issue 90342). What is true of BatchNorm is true of every module that keeps averages of what it saw: the `u`
and `v` of a spectral norm, the codebook of a VQ layer, a module's own counter.

Which buffers move is learned. Those of BatchNorm and InstanceNorm are known. All others are copied in the first two
steps and compared after them: version counters alone would not do, since native kernels and writes through `.data`
do not move them. From then on those that moved are copied. Those that held still (masks, rotary tables) are not:
their version counters are looked at, and one that moves after all is copied from then on; where it is small, the copy
of the learning steps is still there to put back.

What it leaves out: state that is no buffer (a Python counter, a plain tensor attribute); a buffer that a skipped step
registers anew; and one that is large, or written through `.data`, and changes for the first time in a skipped step
after the second.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.pytorch.training.buffers_before import (
    Group,
    Kept,
    Place,
    Still,
    changed_of,
    is_plain,
    overlaps,
    spoiled_by,
)

if TYPE_CHECKING:
    from mezzo.pytorch.kernels.fp8.history import HistoriesBefore

LEARNED_AFTER = 2
"""Steps in which every buffer is copied, and compared afterwards."""

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """The buffers of a model that its forward pass changes in training, and the histories of its fp8 scales.

    Naive code::

        before = [buffer.clone() for buffer in model.buffers()]     # remember()
        for buffer, old in zip(model.buffers(), before):            # restore(found_inf)
            buffer.copy_(torch.where(found_inf != 0, old, buffer))

    Args:
        model: held weakly. Its buffers are looked for at the first `remember`, in the learning steps, and after each
            skip.
        others: the other networks in training, each with a number that changes with its updates: a generator's loss
            comes through the discriminator, whose statistics are then part of the generator's step.
    """

    def __init__(
        self, model: nn.Module, others: Callable[[], Iterable[tuple[nn.Module, int]]] = tuple
    ) -> None:
        self._model = weakref.ref(model)
        self._others = others
        self._of_others: weakref.WeakKeyDictionary[nn.Module, RunningStatistics] = weakref.WeakKeyDictionary()
        self._lent: list[tuple[RunningStatistics, int]] = []
        self._moving: list[Place] = []
        self._learning: list[Place] = []
        self._still = Still()
        self._known: set[tuple[int, str]] = set()
        self._groups: list[Group] = []
        self._alone: list[Kept] = []
        self._histories: HistoriesBefore | None = None
        self._began = False
        self._look = True
        # Plain bools, for a compiler may read `watches`.
        self._has_norm = any(isinstance(module, _NormBase) for module in model.modules())
        self._has_buffers = self._has_norm or any(module._buffers for module in model.modules())

    @property
    def watches(self) -> bool:
        """Whether the model has buffers that may move.

        While a compiler traces: whether there are normalisation layers. Nothing of ours runs inside a compiled
        region, so each model with a mask would be cut in two.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._has_norm
        if self._has_buffers or "mezzo.pytorch.kernels.fp8.history" in sys.modules:
            return True
        return any(statistics._has_buffers for statistics in self._neighbours())

    @property
    def remembers(self) -> bool:
        """Whether a step has begun, whose buffers can be put back."""
        return self._began

    @torch.no_grad()
    def remember(self) -> None:
        """A step begins: copy what it may change."""
        self._began = True
        if self._look:
            self._find()
        self._alone = [Kept.of(place) for place in self._learning]
        grouped: dict[tuple[torch.device, torch.dtype], tuple[list[Place], list[Tensor]]] = {}
        for place in self._moving:
            if not place.trains():
                continue
            tensor = place.now()
            if tensor is None or not is_plain(tensor) or (place.norm is None and overlaps(tensor)):
                self._alone.append(Kept.of(place))
                continue
            places, tensors = grouped.setdefault((tensor.device, tensor.dtype), ([], []))
            places.append(place)
            tensors.append(tensor)
        self._groups = [Group(places, tensors) for places, tensors in grouped.values()]
        self._still.refresh()
        self._histories = self._histories_now()
        neighbours = self._neighbours()
        for statistics in neighbours:
            statistics.remember()
        self._lent = list(neighbours.items())

    @torch.no_grad()
    def restore(self, found_inf: Tensor | bool) -> None:
        """The step is over: put the copies back where `found_inf` is not 0, and drop them.

        Args:
            found_inf: known on the host (bool: nothing is launched for False), or a 0-dim tensor. That is waited for in
                the learning steps, and where a buffer that held still has moved.
        """
        if not self._began:
            return
        groups, alone, histories = self._groups, self._alone, self._histories
        lent, self._lent = self._lent, []
        self.forget()
        self._give_back(lent, found_inf)
        late = self._still.touched()
        if isinstance(found_inf, Tensor) and (alone or late):
            found_inf = bool(found_inf)
        if alone:
            changed = changed_of(alone)
            self._learn(alone, changed)
        if late:
            self._moving.extend(kept.place for kept in self._still.take(late))
        if found_inf is False:
            return
        for kept in alone:
            if kept in changed:
                kept.put_back()
        for kept in late:
            kept.put_back()
        for group in groups:
            group.put_back(found_inf)
        if histories is not None:
            histories.put_back(found_inf)
        self._look = True

    @torch.no_grad()
    def mend(self, found_inf: Tensor | bool) -> None:
        """Put the copies back, and keep them, where `found_inf` is not 0 and a buffer is no longer finite that was.

        For the step of another network: its loss came through this one, whose statistics its overflow may have spoiled.
        """
        if found_inf is False:
            return
        for group in self._groups:
            group.mend(found_inf)
        one_by_one = [*self._alone, *self._still.touched()]
        if one_by_one and bool(found_inf):
            for kept in one_by_one:
                if kept.copy is not None and spoiled_by(kept.copy, kept.place.now()):
                    kept.put_back()

    def _neighbours(self) -> dict[RunningStatistics, int]:
        """A view of our own of each other network: its own copies may be of another moment."""
        found: dict[RunningStatistics, int] = {}
        for model, updates in self._others():
            statistics = self._of_others.get(model)
            if statistics is None:
                statistics = self._of_others[model] = RunningStatistics(model)
            found[statistics] = updates
        return found

    def _give_back(self, lent: list[tuple[RunningStatistics, int]], found_inf: Tensor | bool) -> None:
        """Undo what the step did to the other networks; of one that took a step of its own meanwhile, the damage."""
        now = self._neighbours() if lent and found_inf is not False else {}
        for statistics, updates in lent:
            if now.get(statistics, updates) == updates:
                statistics.restore(found_inf)
            else:
                statistics.mend(found_inf)
                statistics.forget()

    def forget(self) -> None:
        """Drop the copies."""
        for statistics, _ in self._lent:
            statistics.forget()
        self._lent = []
        self._groups, self._alone, self._histories, self._began = [], [], None, False

    def state(self) -> dict[str, Tensor]:
        """The copies: name of a buffer -> its values before the step."""
        kept = {each.place.path: each.copy.clone() for each in self._alone if each.copy is not None}
        for group in self._groups:
            kept.update(
                (place.path, part.clone()) for place, part in zip(group.places, group.parts(), strict=True)
            )
        return kept

    @torch.no_grad()
    def load(self, state: dict[str, Tensor] | list[Tensor]) -> None:
        """Take the copies that `state` gave. Those of other buffers are dropped, and so is an older Mezzo's list."""
        self._look = True
        self._learning += [kept.place for kept in self._still.take()]
        self.remember()
        if not isinstance(state, dict):
            self.forget()
            return
        copies = {each.place.path: each.copy for each in self._alone if each.copy is not None}
        for group in self._groups:
            copies.update((place.path, part) for place, part in zip(group.places, group.parts()))
        if any(path not in copies or copies[path].shape != saved.shape for path, saved in state.items()):
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

    def _learn(self, compared: list[Kept], changed: set[Kept]) -> None:
        """Settle which buffers move, once they have been compared often enough."""
        moved = {kept.place: kept in changed for kept in compared}
        for place in self._learning:
            place.steps += 1
            place.moved |= moved.get(place, False)
        settled = [place for place in self._learning if place.steps >= LEARNED_AFTER]
        self._learning = [place for place in self._learning if place.steps < LEARNED_AFTER]
        self._moving += [place for place in settled if place.moved]
        self._still.add([place for place in settled if not place.moved])
        self._look = True

    def _histories_now(self) -> HistoriesBefore | None:
        """The fp8 histories, if a layer has been multiplied in fp8 at all: else their code is not even loaded."""
        if "mezzo.pytorch.kernels.fp8.history" not in sys.modules:
            return None
        from mezzo.pytorch.kernels.fp8.history import HistoriesBefore

        model = self._model()
        return None if model is None else HistoriesBefore.of(model)
