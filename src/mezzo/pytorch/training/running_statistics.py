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

import weakref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.pytorch.training.buffers_before import (
    Copies,
    Group,
    Kept,
    Place,
    Still,
    changed_of,
    is_plain,
    overlaps,
    spoiled_by,
)

LEARNED_AFTER = 2
"""Steps in which every buffer is copied, and compared afterwards."""

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
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
        self._still = Still()
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
        if torch.compiler.is_dynamo_compiling():
            return self._has_norm
        return self._has_buffers

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
        if self._first is None:
            self._still.refresh()
        with torch.no_grad():
            self._last = self._copied()
        self._first = self._first or self._last

    def _copied(self) -> Copies:
        grouped: dict[tuple[torch.device, torch.dtype], tuple[list[Place], list[Tensor]]] = {}
        alone = [Kept.of(place) for place in self._learning]
        for place in self._moving:
            if not place.trains():
                continue
            tensor = place.now()
            if tensor is None or not is_plain(tensor) or (place.norm is None and overlaps(tensor)):
                alone.append(Kept.of(place))
                continue
            places, tensors = grouped.setdefault((tensor.device, tensor.dtype), ([], []))
            places.append(place)
            tensors.append(tensor)
        older = {} if self._last is None else {group.kind: group for group in self._last.groups}
        groups = [Group(*each, older.get(kind)) for kind, each in grouped.items()]
        return Copies(groups, alone)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """What was called before the newest copies is no part of the step, unless nothing was called since."""
        if self.spans_turns and self._last is not None and self._last.moved():
            self._first = self._last

    def restore(self, found_inf: Tensor | bool, *, keep: bool = False) -> None:
        """The step is over: put the copies back where `found_inf` is not 0, and drop them.

        Args:
            found_inf: known on the host (bool: nothing is launched for False), or a 0-dim tensor. That is waited for in
                the learning steps, and where a buffer that held still has moved.
            keep: keep the newest copies for `mend`.
        """
        if not self.holds_copies:
            self._look |= found_inf is not False
            return
        with torch.no_grad():
            self._restore(found_inf, keep)

    def _restore(self, found_inf: Tensor | bool, keep: bool) -> None:
        first, self._first = self._first, None
        undone, self._undone = self._undone, None
        if undone is not None and not bool(found_inf) and not undone[1].moved():
            undone[0].put_back(True)
        if first is not None:
            self._end(first, found_inf)
        elif self._last is not None and bool(found_inf):
            self.mend()
        if not keep:
            self._last = None

    def _end(self, first: Copies, found_inf: Tensor | bool) -> None:
        late = self._still.touched()
        if isinstance(found_inf, Tensor) and (first.alone or late):
            found_inf = bool(found_inf)
        if first.alone:
            self._learn(first.alone, changed_of(first.alone))
        if late:
            self._moving.extend(kept.place for kept in self._still.take(late))
        if found_inf is False:
            return
        for kept in late:
            kept.put_back()
        first.put_back(found_inf)
        self._look = True

    @torch.no_grad()
    def undo(self) -> None:
        """Put the newest copies back, for the skipped step of another network.

        The step of this one is not over. If it is taken, and nothing has moved since, this is taken back.
        """
        if self._last is not None:
            self._undone = self._copied(), self._last
            self._last.put_back(True)
            self.mend()

    @torch.no_grad()
    def mend(self) -> None:
        """Put the copies of those buffers back that are no longer finite and were, and keep the copies.

        For the step of another network: its overflow may have spoiled the statistics of this one.
        """
        if self._last is not None:
            for group in self._last.groups:
                group.mend()
            for kept in (*self._last.alone, *self._still.touched()):
                if kept.copy is not None and spoiled_by(kept.copy, kept.place.now()):
                    kept.put_back()

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
        self._learning += [kept.place for kept in self._still.take()]
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

    def _learn(self, compared: list[Kept], changed: set[Kept]) -> None:
        """Settle which buffers move, once they have been compared often enough."""
        for kept in compared:
            kept.place.steps += 1
            kept.place.moved |= kept in changed
        settled = [place for place in self._learning if place.steps >= LEARNED_AFTER]
        self._learning = [place for place in self._learning if place.steps < LEARNED_AFTER]
        self._moving += [place for place in settled if place.moved]
        self._still.add([place for place in settled if not place.moved])
        self._look = True
