"""Veto: whether an optimizer may step, by the gradients that it is about to read and by what backward found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo.pytorch.distributed import agreed_largest, local
from mezzo.pytorch.launch.quiet import quiet

if TYPE_CHECKING:
    from mezzo.pytorch.launch.session import Session


class Found:
    """One number for each leaf of one backward pass, on the leaf's own device: was its gradient not finite?

    Args:
        devices: of each leaf, in order.

    Attributes:
        spent: ids of the optimizers that have asked for it at a step.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.spent: set[int] = set()
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
    """Whether an optimizer may step: not if one of its gradients is not finite, or was not when it was computed.

    The first check reads `.grad` as it is at the step, written by backward, an `all_reduce`, or the script, with
    gradients that it had saved or got from `autograd.grad`. The second reads flags that backward leaves, since
    `clip_grad_value_` makes finite numbers of an overflow. A flag lives as long as the gradient that it speaks of: it
    falls when a backward finds `.grad` empty, when `zero_grad` clears it, and at the first backward after a step.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._flags: dict[int, list[tuple[Found, int]]] = {}
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
            earlier = () if leaf.grad is None else self._flags.get(key, ())
            self._flags[key] = [*(flag for flag in earlier if not flag[0].spent), (found, index)]

    def flags(self, leaf: Tensor) -> list[tuple[Found, int]]:
        """The flags of one leaf's gradient."""
        return self._flags.setdefault(id(leaf), [])

    @quiet
    def forget(self, optimizer: Any) -> None:
        """The optimizer's gradients were cleared."""
        for parameter in _parameters(optimizer):
            self._flags.pop(id(parameter), None)

    @quiet
    def forbids(self, optimizer: Any) -> bool:
        """Whether the optimizer must not step now; waits for the device."""
        parameters = _parameters(optimizer)
        return self._agreed(self._flagged(optimizer, parameters) or not holds_finite(optimizer), parameters)

    def _flagged(self, optimizer: Any, parameters: list[Tensor]) -> bool:
        """Whether backward found a gradient of these that was not finite, and this optimizer has not skipped for it."""
        flags = [flag for parameter in parameters for flag in self._flags.get(id(parameter), ())]
        founds = {id(found): found for found, _ in flags if id(optimizer) not in found.spent}
        read = {key: found.read() for key, found in founds.items()}
        for found in founds.values():
            found.spent.add(id(optimizer))
        return any(id(found) in read and read[id(found)][index] for found, index in flags)

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


def values_of(grad: Tensor) -> Tensor:
    """The numbers that a gradient of any layout holds on this rank, as a strided tensor."""
    grad = local(grad)
    if grad.layout is torch.strided and not grad.is_nested:
        return grad
    return grad._values() if grad.is_sparse else grad.values()


@quiet
def holds_finite(optimizer: Any) -> bool:
    """Whether every `.grad` that the optimizer would read now is finite; waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in _parameters(optimizer):
        grad = parameter.grad
        if grad is not None and not grad.is_meta:
            grad = grad.detach() if grad.requires_grad else grad  # cheaper than `no_grad` around it all
            by_device.setdefault(grad.device, []).append(values_of(grad))
    # Norms only read, in one call, and are NaN or infinite where an element is: few need the exact look.
    return all(
        math.isfinite(torch.stack(torch._foreach_norm(grads)).sum())
        or all(bool(grad.isfinite().all()) for grad in grads)
        for grads in by_device.values()
    )
