"""Buffers that forward passes in training change: copied before a step, restored if the step is skipped.

Copied are small buffers, those of BatchNorm and InstanceNorm, and large ones that changed in one of the first two steps
or whose version counter says later that they were written (native kernels and `.data` do not raise it).

Each step of any optimizer, taken or skipped, ends an interval. The buffers of a network are copied before its first
call of an interval. When optimizer S ends an interval, these become of each network:

| owner of its parameters              | S stepped         | S skipped                                   |
|--------------------------------------|-------------------|---------------------------------------------|
| S, of some of them                   | stay              | go back to before S's gradients began       |
| no optimizer                         | stay              | go back to the last step                    |
| another, but the loss of S ran       | stay, copies kept | back to the interval's start, copies kept   |
| through it (a GAN's discriminator)   |                   |                                             |
| another                              | stay, copies kept | what is not finite goes back, copies kept   |

At the end of an interval in which a network was called, what its calls left NaN or infinite goes back to kept copies.

Kept copies are for the network's own optimizer. If that one steps after the third row's skip, and the network was not
called in between, its buffers go forward again: the two losses were one, and its own gradients were good.

A call belongs to the gradients of the network's newest interval when a backward pass finds its gradients empty. The
loss of S ran through a network if one backward pass of the interval reached parameters of both, or if it is frozen. Of
two calls of one network in one interval, one for a good and one for a skipped step, there is one copy: both are undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as _graph_task  # -1 outside a backward pass
from torch.nn.parameter import is_lazy

from mezzo.pytorch.snapshot import BufferSlot, BufferSnapshot, has_running_statistics

SMALL = 2**16
"""Bytes up to which a buffer is always copied."""

LEARNED_AFTER = 2
"""Steps in which a larger one is copied, and compared afterwards."""

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class MovingBuffers:
    """The buffers of a model (held weakly) that its forward pass changes in training.

    Naive code::

        before = [buffer.clone() for buffer in model.buffers()]     # remember()
        for buffer, old in zip(model.buffers(), before):            # restore(found_inf)
            buffer.copy_(torch.where(found_inf != 0, old, buffer))

    `parameters` are ids; `interval` is that of `Networks` in which the newest copies were taken.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._slots: list[BufferSlot] = []
        self._known: set[tuple[int, str]] = set()
        self._first: BufferSnapshot | None = None  # before the step's first forward pass
        self._last: BufferSnapshot | None = None  # before the newest interval; may outlive the step
        self._undone: tuple[BufferSnapshot, BufferSnapshot] | None = None  # by `undo`: before, and after
        self._lost = False  # whether a buffer went back to the newest copies, because it was not finite
        self._look = True
        self.parameters: frozenset[int] = frozenset()
        self.interval = -1
        # Plain bools, for a compiler may read `watches`.
        self._has_norm = any(map(has_running_statistics, model.modules()))
        self._has_buffers = self._has_norm or any(module._buffers for module in model.modules())

    @property
    def watches(self) -> bool:
        """Whether the model may have moving buffers; compiled, only normalizations: copies break the graph."""
        return self._has_norm if torch.compiler.is_dynamo_compiling() else self._has_buffers

    @property
    def remembers(self) -> bool:
        """Whether a step has begun, whose buffers can be restored."""
        return self._first is not None

    @property
    def holds_copies(self) -> bool:
        """Whether there is anything to restore, of this step or of an older one."""
        return not (self._first is None and self._last is None and self._undone is None)

    @property
    def spans_intervals(self) -> bool:
        """Whether other steps have ended since this one began, and the model was called again."""
        return self._first is not self._last and self._first is not None

    @property
    def order(self) -> int:
        """Larger for a step that began later."""
        return -1 if self._first is None else self._first.serial

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
        self._last, self._lost = self.copied(), False
        self._first = self._first or self._last

    def copied(self) -> BufferSnapshot:
        """What a forward pass may change, as it is now."""
        due = [slot for slot in self._slots if slot.is_due]
        return BufferSnapshot(
            (slot for slot in due if not slot.learning), (slot for slot in due if slot.learning)
        )

    def begin_anew(self) -> None:
        """Take calls before the newest copies out of the step, unless nothing was called since."""
        if self.spans_intervals and self._last is not None and (self._lost or self._last.moved()):
            self._first = self._last

    @torch.no_grad()
    def restore(self, found_inf: Tensor | bool, *, keep: bool = False) -> None:
        """End the step: restore the copies where `found_inf` is not 0, and drop them; `keep` leaves the newest."""
        if not self.holds_copies:
            self._look |= found_inf is not False
            return
        first, self._first = self._first, None
        undone, self._undone = self._undone, None
        if undone is not None and not bool(found_inf) and not undone[1].moved():
            undone[0].put_back()
        if first is not None:
            self._end(first, found_inf)
        elif bool(found_inf):
            self.restore_lost()
        if not keep:
            self._last = None

    def _end(self, first: BufferSnapshot, found_inf: Tensor | bool) -> None:
        learning = [each for each in first.single if each.slot.learning]
        for each in learning:
            each.slot.learning -= 1
            each.slot.moves |= each.moved()
            if not (each.slot.learning or each.slot.moves):
                each.slot.still = each.slot.version
        self._look |= bool(learning)
        if found_inf is not False:
            first.put_back(found_inf)
            self._look = True

    @torch.no_grad()
    def undo(self) -> None:
        """Put the newest copies back, for another network's skipped step; `restore` may take this back."""
        if self._last is not None:
            self._undone = self.copied(), self._last
            self._last.put_back()
            self.restore_lost()

    @torch.no_grad()
    def restore_lost(self) -> None:
        """Restore what an overflow of another network's step has made NaN or infinite, and keep the copies."""
        if self._last is not None:
            self._lost |= self._last.restore_lost()

    def forget(self) -> None:
        """Drop the copies."""
        self._first = self._last = self._undone = None

    def state(self, *, every: bool = False) -> dict[str, Tensor]:
        """The copies: name of a buffer -> its values before the step; of `every` buffer, without a copy as it is."""
        named = {} if self._first is None else self._first.named()
        if every and (model := self._model()) is not None:
            named = {**dict(model.named_buffers()), **named}
        return {name: values.clone() for name, values in named.items()}

    def load(self, state: dict[str, Tensor] | list[Tensor]) -> None:
        """Take the copies that `state` gave. Those of other buffers are dropped, and so is an older Mezzo's list."""
        self._known.clear()
        self._slots.clear()
        self._look = True
        self.forget()
        self.remember()
        named = {} if self._first is None else self._first.named()
        if not isinstance(state, dict) or any(
            path not in named or named[path].shape != saved.shape for path, saved in state.items()
        ):
            self.forget()
            return
        for path, saved in state.items():
            named[path].copy_(saved)

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
                is_norm = has_running_statistics(module) and name in _NORM_BUFFERS
                path = f"{prefix}.{name}" if prefix else name
                norm = weakref.ref(module) if is_norm else None
                slot = BufferSlot(path, module._buffers, name, norm)
                if norm is None and buffer is not None and not is_lazy(buffer) and buffer.nbytes > SMALL:
                    slot.moves, slot.learning = False, LEARNED_AFTER
                self._slots.append(slot)
        self._has_buffers = bool(self._known)


class Networks:
    """The moving buffers of all networks in training."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, MovingBuffers] = weakref.WeakKeyDictionary()
        # The leaves that each backward of this interval reached -> those whose gradients it is still part of.
        self._passes: dict[frozenset[int], frozenset[int]] = {}
        self._interval = 0
        self.hold_copies = False  # without copies a step has nothing to restore

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of a model has the hook `called`

    def __len__(self) -> int:
        return len(self._of)

    def of(self, model: nn.Module) -> MovingBuffers:
        """A network's buffers."""
        buffers = self._of.get(model)
        if buffers is None:
            buffers = self._of[model] = MovingBuffers(model)
        return buffers

    def keep(self, models: set[nn.Module]) -> None:
        """Forget all networks but these, which are still in training."""
        for model in [model for model in self._of if model not in models]:
            self._of.pop(model).forget()

    @property
    def several(self) -> bool:
        """Whether more than one network has copies: the host must know then whether a step was skipped."""
        return self.hold_copies and sum(buffers.remembers for buffers in self._of.values()) > 1

    def called(self, model: nn.Module, *_: Any) -> None:
        """A pre-hook of a network: `call`, if it is in training."""
        if torch.compiler.is_compiling() or _graph_task() != -1:  # -1: not recomputed in backward
            return
        if model.training and torch.is_grad_enabled():
            self.call(model)

    def call(self, model: nn.Module) -> None:
        """A network is about to be called in training mode."""
        buffers = self.of(model)
        self.hold_copies = True
        if buffers.interval != self._interval or not buffers.remembers:
            buffers.interval = self._interval
            buffers.remember()

    def optimizer_made(self, owned: set[int]) -> None:
        """Calls before a network's first optimizer was made (to build or to try it) are part of no step."""
        for buffers in self._of.values():
            if buffers.remembers and owned.isdisjoint(buffers.parameters):
                buffers.restore(False, keep=True)

    def backward(self, leaves: Sequence[Tensor]) -> None:
        """A backward pass is about to reach these leaves."""
        if len(self._of) < 2:
            return
        reached = frozenset(map(id, leaves))
        empty = frozenset(id(leaf) for leaf in leaves if leaf.grad is None)
        self._passes = {each: receiving - empty for each, receiving in self._passes.items()}
        self._passes[reached] = reached
        for buffers in self._of.values():
            if buffers.spans_intervals and frozenset() < reached & buffers.parameters <= empty:
                buffers.begin_anew()

    def step_ended(
        self,
        parameters: Iterable[Tensor],
        found_inf: Tensor | bool,
        owned: Callable[[], set[int]],
        *,
        passes: Callable[[], Iterable[frozenset[int]]] = tuple,
        alone: bool = False,
    ) -> None:
        """An optimizer of these parameters has stepped, or its step was skipped; `alone`: there is no other optimizer.

        `owned` gives the ids of all optimizers' parameters, `passes` those of the leaves of each backward that was not
        announced. `found_inf` is a tensor only where one network is trained.
        """
        interval, self._interval = self._interval, self._interval + 1
        announced, self._passes = self._passes, {}
        if found_inf is False and self.hold_copies:
            self.hold_copies = any(buffers.holds_copies for buffers in self._of.values())
        if not self.hold_copies:
            return
        mine = {id(parameter) for parameter in parameters}
        everyone: set[int] | None = None
        with_mine: list[frozenset[int]] | None = None
        keep = len(self._of) > 1 or not alone
        for buffers in sorted(self._of.values(), key=lambda each: -each.order):
            is_mine = not mine.isdisjoint(buffers.parameters)
            if not is_mine and everyone is None:
                everyone = owned()
            if is_mine or (everyone is not None and everyone.isdisjoint(buffers.parameters)):
                buffers.restore(found_inf, keep=keep)
            elif bool(found_inf):
                if with_mine is None:
                    announced.update((each, each) for each in passes())
                    with_mine = [
                        each for each, receiving in announced.items() if not mine.isdisjoint(receiving)
                    ]
                reached = any(not each.isdisjoint(buffers.parameters) for each in with_mine)
                if buffers.interval == interval and (reached or buffers.is_frozen):
                    buffers.undo()
            if buffers.interval == interval:  # a step that is still to come may have overflowed
                buffers.restore_lost()  # now, because what the script writes before the next call stays
        self.hold_copies = any(buffers.holds_copies for buffers in self._of.values())
