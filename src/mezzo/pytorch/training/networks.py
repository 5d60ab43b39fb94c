"""Several networks in training: whose running statistics a skipped step puts back.

Time is divided into turns, and each step of any optimizer, taken or skipped, ends one. The buffers of a network are
copied before its first call of a turn. When optimizer S ends a turn, these become of each network:

| owner of its parameters              | S stepped         | S skipped                                   |
|--------------------------------------|-------------------|---------------------------------------------|
| S, of some of them                   | stay              | go back to before S's gradients began       |
| no optimizer                         | stay              | go back to the last step                    |
| another, but the loss of S ran       | stay, copies kept | go back to the turn's start, copies kept    |
| through it (a GAN's discriminator)   |                   |                                             |
| another                              | stay, copies kept | what is not finite goes back, copies kept   |

Kept copies are for the network's own optimizer. If that one steps after the third row's skip, and the network was not
called in between, its buffers go forward again: the two losses were one, and its own gradients were good.

A call belongs to the gradients of the network's newest turn when a backward pass finds its gradients empty: older calls
went into gradients that were used or cleared, or had no backward pass. The loss of S ran through a network if one
backward pass of the turn reached parameters of both, or if none of its parameters requires a gradient at the moment.
A network of two optimizers follows each of them. Newer copies are put back before older ones, for networks that share
modules.

What it can't do: between two calls of one network in one turn, one for a good step and one for a skipped step, there
is no copy. Both are undone where the step is the network's own, and else the values that are not finite.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from mezzo.pytorch.training.buffers import MovingBuffers


class Networks:
    """The running statistics of all networks in training."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, MovingBuffers] = weakref.WeakKeyDictionary()
        self._order = itertools.count()
        # The leaves that each backward of this turn reached -> those whose gradients it is still part of.
        self._passes: dict[frozenset[int], frozenset[int]] = {}
        self._turn = 0
        self.hold_copies = (
            False  # since every network's copies were dropped: else a step has nothing to put back
        )

    def __len__(self) -> int:
        """How many there are."""
        return len(self._of)

    def of(self, model: nn.Module) -> MovingBuffers:
        """A network's statistics."""
        statistics = self._of.get(model)
        if statistics is None:
            statistics = self._of[model] = MovingBuffers(model)
        return statistics

    def keep(self, models: set[nn.Module]) -> None:
        """Forget all networks but these, which are still in training."""
        for model in [model for model in self._of if model not in models]:
            self._of.pop(model).forget()

    @property
    def several(self) -> bool:
        """Whether more than one network has copies: the host must know then whether a step was skipped."""
        return self.hold_copies and sum(statistics.remembers for statistics in self._of.values()) > 1

    def call(self, model: nn.Module) -> None:
        """A network is about to be called in training mode."""
        statistics = self.of(model)
        self.hold_copies = True
        if statistics.turn != self._turn or not statistics.remembers:
            statistics.turn = self._turn
            if not statistics.remembers:
                statistics.order = next(self._order)
            statistics.remember()

    def optimizer_made(self, owned: set[int]) -> None:
        """Calls before a network's first optimizer was made (to build or to try it) are part of no step."""
        for statistics in self._of.values():
            if statistics.remembers and owned.isdisjoint(statistics.parameters):
                statistics.restore(False, keep=True)

    def backward(self, leaves: Sequence[Tensor]) -> None:
        """A backward pass is about to reach these leaves."""
        if len(self._of) < 2:
            return
        reached = frozenset(map(id, leaves))
        empty = frozenset(id(leaf) for leaf in leaves if leaf.grad is None)
        self._passes = {each: receiving - empty for each, receiving in self._passes.items()}
        self._passes[reached] = reached
        for statistics in self._of.values():
            if statistics.spans_turns and frozenset() < reached & statistics.parameters <= empty:
                statistics.begin_anew()

    def step_ended(
        self,
        parameters: Iterable[Tensor],
        found_inf: Tensor | bool,
        owned: Callable[[], set[int]],
        *,
        passes: Callable[[], Iterable[frozenset[int]]] = tuple,
        alone: bool = False,
    ) -> None:
        """An optimizer has stepped, or its step was skipped.

        Args:
            parameters: the optimizer's.
            found_inf: whether it was skipped; a 0-dim tensor only where one network is trained.
            owned: gives the ids of the parameters of all optimizers.
            passes: gives the ids of the leaves of each backward that was not announced to `backward`.
            alone: whether there is no other optimizer.
        """
        turn, self._turn = self._turn, self._turn + 1
        told, self._passes = self._passes, {}
        if not self.hold_copies:
            return
        mine = {id(parameter) for parameter in parameters}
        everyone: set[int] | None = None
        with_mine: list[frozenset[int]] | None = None
        keep = len(self._of) > 1 or not alone
        for statistics in sorted(self._of.values(), key=lambda each: -each.order):
            its_own = not mine.isdisjoint(statistics.parameters)
            if not its_own:
                everyone = owned() if everyone is None else everyone
            if its_own or (everyone is not None and everyone.isdisjoint(statistics.parameters)):
                statistics.restore(found_inf, keep=keep)
            elif bool(found_inf):
                if with_mine is None:
                    told.update((each, each) for each in passes())
                    with_mine = [each for each, receiving in told.items() if not mine.isdisjoint(receiving)]
                reached = any(not each.isdisjoint(statistics.parameters) for each in with_mine)
                if statistics.turn == turn and (reached or statistics.is_frozen):
                    statistics.undo()
                else:
                    statistics.restore_lost()
        self.hold_copies = any(statistics.holds_copies for statistics in self._of.values())
