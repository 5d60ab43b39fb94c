"""KeptState: what running a module changes besides its gradients: its buffers, and random numbers drawn."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.pytorch.unseen import unseen


class KeptState:
    """A module's buffers and the random generators as they are now, to be put back as often as need be.

    Args:
        module: whose buffers.
        device: whose generator, beside the CPU's and Python's own.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (owner, name, buffer, buffer.clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._python: Any = random.getstate()
        self._cpu = torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def put_back(self) -> None:
        """Everything as it was."""
        for owner, name, buffer, value in self._buffers:
            with unseen((buffer,)):
                buffer.copy_(value)  # always: a batch normalisation moves no version counter
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
        random.setstate(self._python)
        torch.random.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
