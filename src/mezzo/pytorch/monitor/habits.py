"""What a model's calls were seen to change besides its parameters, so that it can be put back when one is run again.

It is learned: everything is copied before the first call, and from then on what a call changed.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.pytorch.monitor.again import RandomState, devices_of
from mezzo.pytorch.monitor.kept_call import KeptCall
from mezzo.pytorch.monitor.own_state import changeable, copied, same


class Habits:
    """Of one model.

    A normalisation's running statistics are left out: in training nothing is computed from them, and else they rest.

    Args:
        model: not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._buffers = [
            buffer
            for module in self._modules
            if not isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
        ]
        self._attributes: list[tuple[nn.Module, str]] = []
        self._devices = devices_of(model)
        self._draws_in_python = False
        self._calls = 0
        self.writes_arguments = False

    def random(self) -> RandomState:
        """What random numbers come next, of the generators that calls draw from."""
        return RandomState.now(self._devices, pythons=self._draws_in_python or self._calls == 0)

    def before(self, call: KeptCall) -> None:
        """Keep with a call what it may change."""
        call.buffers = [(buffer, buffer.detach().clone()) for buffer in self._buffers]
        if self._calls == 0:
            self._attributes = [(module, name) for module in self._modules for name, _ in changeable(module)]
        for module, name in self._attributes:
            if name in module.__dict__:
                value: Any = module.__dict__[name]
                call.attributes.append((module, name, value, copied(value)))
        self._versions = [buffer._version for buffer in self._buffers]

    def after(self, call: KeptCall) -> None:
        """Learn from what it did change."""
        self.writes_arguments |= call.written
        if self._calls == 0:
            self._draws_in_python = call.random.pythons_moved()
        if self._calls == 0:
            moved = [b for b, version in zip(self._buffers, self._versions) if b._version != version]
            self._buffers = moved
            call.buffers = [
                (buffer, copy) for buffer, copy in call.buffers if any(buffer is m for m in moved)
            ]
            before = {(id(module), name): (was, copy) for module, name, was, copy in call.attributes}
            self._attributes = [
                (module, name)
                for module in self._modules
                for name, value in changeable(module)
                if not same(*before.get((id(module), name), (None, None)), value)
            ]
            changed = {(id(module), name) for module, name in self._attributes}
            call.attributes = [one for one in call.attributes if (id(one[0]), one[1]) in changed]
        self._calls += 1
