"""Veto: which parameters got gradients that are not finite, from the hook that saw it to the step that
asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo.pytorch.distributed import agreed_largest
from mezzo.pytorch.launch.quiet import quiet

if TYPE_CHECKING:
    from mezzo.pytorch.launch.session import Session


class Found:
    """One number for each leaf of one backward pass, on the leaf's own device: was its gradient not finite?

    Args:
        devices: of each leaf, in order.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices: dict[torch.device, list[int]] = {}
        for index, device in enumerate(devices):
            self.devices.setdefault(device, []).append(index)
        self._flags = {
            device: torch.zeros(len(indices), dtype=torch.float32, device=device)
            for device, indices in self.devices.items()
        }
        self._slots: list[Tensor | None] = [None] * len(devices)
        for device, indices in self.devices.items():
            for index, slot in zip(indices, self._flags[device].unbind()):
                self._slots[index] = slot

    def slot(self, index: int) -> Tensor:
        """Where leaf `index` notes what it saw: 0-dim FP32, a view of its device's flags."""
        slot = self._slots[index]
        assert slot is not None
        return slot

    def read(self) -> list[bool]:
        """What each leaf saw; waits for the devices. Ask anew after more of the backward pass has run."""
        result = [False] * len(self._slots)
        for device, indices in self.devices.items():
            for index, flag in zip(indices, self._flags[device].tolist()):
                result[index] = flag != 0
        return result


class Veto:
    """Whether an optimizer may step: not if a gradient that one of its parameters holds was not finite.

    A flag lives as long as the gradient that it speaks of: it falls when a backward finds `.grad` empty, or
    when `zero_grad` clears it. After a step the gradient itself is asked, since a script may have zeroed it
    by hand.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._flags: dict[int, list[tuple[Found, int]]] = {}
        self._stale: set[int] = set()
        self.attempts: Attempts | None = None

    @quiet
    def owned(self) -> set[int]:
        """The ids of all parameters of all optimizers alive."""
        return {
            id(p)
            for optimizer in self._session.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

    @quiet
    def remember(self, leaves: Iterable[Tensor], found: Found) -> None:
        """These leaves are about to receive gradients, of which `found` will tell."""
        for index, leaf in enumerate(leaves):
            key = id(leaf)
            if leaf.grad is None:
                self._stale.discard(key)
                self._flags[key] = [(found, index)]
            else:
                self._flags.setdefault(key, []).append((found, index))

    def flags(self, leaf: Tensor) -> list[tuple[Found, int]]:
        """The flags of one leaf's gradient."""
        return self._flags.setdefault(id(leaf), [])

    @quiet
    def forget(self, optimizer: Any) -> None:
        """The optimizer's gradients were cleared."""
        for parameter in _parameters(optimizer):
            self._flags.pop(id(parameter), None)
            self._stale.discard(id(parameter))

    @quiet
    def forbids(self, optimizer: Any) -> bool:
        """Whether the optimizer must not step now; waits for the device."""
        read: dict[int, list[bool]] = {}
        bad = False
        parameters = _parameters(optimizer)
        for parameter in parameters:
            for found, index in self._flags.pop(id(parameter), ()):
                if id(found) not in read:
                    read[id(found)] = found.read()
                if read[id(found)][index]:
                    bad = True
                    self._stale.add(id(parameter))
        if self._stale and not bad:
            for parameter in parameters:
                if id(parameter) not in self._stale:
                    continue
                grad = parameter.grad
                values = None if grad is None else grad._values() if grad.is_sparse else grad
                if values is None or bool(values.isfinite().all()):
                    self._stale.discard(id(parameter))
                else:
                    bad = True
        return self._agreed(bad, parameters)

    def _agreed(self, bad: bool, parameters: list[Tensor]) -> bool:
        """Whether any rank found a gradient that is not finite: each has looked at its own, before they were added."""
        wrappers = self._session.wrappers
        for wrapper in dict.fromkeys(wrappers[id(p)] for p in parameters if id(p) in wrappers):
            module = wrapper()
            if module is not None:
                found = torch.full((), float(bad), device=parameters[0].device)
                bad = bool(agreed_largest(found, module.process_group))
        return bad


class Attempts:
    """One backward that is run until its gradients are finite: what each attempt starts from, and what it found.

    Args:
        veto: knows the flags of the leaves.
        scale: of the first attempt.

    Attributes:
        scale: of the attempt that runs.
        before: for each leaf reached its gradient and flags from before the first attempt, by the leaf's id.
        found: of the attempt that runs, by each graph in it: a backward inside the backward has one of its own.
    """

    def __init__(self, veto: Veto, scale: float) -> None:
        self._veto = veto
        self.scale = scale
        self.before: dict[int, tuple[Tensor, Tensor | None, list[tuple[Found, int]]]] = {}
        self.found: list[Found] = []

    def reach(self, leaves: Iterable[Tensor]) -> None:
        """These leaves are about to receive gradients."""
        for leaf in leaves:
            if id(leaf) not in self.before:
                self.before[id(leaf)] = (leaf, leaf.grad, list(self._veto.flags(leaf)))
                self._reset(leaf)

    def begin(self) -> None:
        """An attempt begins: no leaf has received anything."""
        self.found.clear()
        for leaf, _, _ in self.before.values():
            self._reset(leaf)

    @property
    def overflowed(self) -> bool:
        """Whether the attempt found a gradient that is not finite; waits for the devices."""
        return any(any(found.read()) for found in self.found)

    def _reset(self, leaf: Tensor) -> None:
        _, old, flags = self.before[id(leaf)]
        leaf.grad = None if old is None else old.clone()
        self._veto.flags(leaf)[:] = flags


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
