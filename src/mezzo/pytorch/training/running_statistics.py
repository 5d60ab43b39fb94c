"""Running statistics of normalisation layers, as they were before a step: copied at its start, put back if
skipped.

An overflow in the forward pass makes running means infinite or NaN for good, though the step itself is
skipped (PyTorch issue 90342). Copy and return are each a handful of launches whatever the number of layers,
and without a
wait: all statistics of one dtype and device are laid out in one flat tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """The running statistics of a model's BatchNorm and InstanceNorm layers in training mode.

    Naive code::

        before = [buffer.clone() for buffer in buffers]     # remember()
        for buffer, old in zip(buffers, before):            # restore(found_inf)
            buffer.copy_(torch.where(found_inf != 0, old, buffer))
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._groups: list[tuple[list[Tensor], Tensor]] = []

    @property
    def watches(self) -> bool:
        """Whether the model has such layers at all."""
        return bool(self._layers)

    @property
    def remembers(self) -> bool:
        """Whether there is a copy."""
        return bool(self._groups)

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the statistics of the layers that would update them now."""
        grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for layer in self._layers:
            if layer.training and layer.track_running_stats:
                for buffer in layer.buffers(recurse=False):
                    grouped.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._groups = [(buffers, _flat(buffers)) for buffers in grouped.values()]

    @torch.no_grad()
    def restore(self, found_inf: Tensor | bool) -> None:
        """Put the copy back where `found_inf` is not 0, and drop it.

        Args:
            found_inf: known on the host (bool: nothing is launched for False), or a 0-dim tensor.
        """
        groups, self._groups = self._groups, []
        if found_inf is False:
            return
        for buffers, before in groups:
            if isinstance(found_inf, Tensor):
                skipped = found_inf.to(before.device, non_blocking=True) != 0
                before = torch.where(skipped, before, _flat(buffers))
            _put(buffers, before)

    @torch.no_grad()
    def mend(self, found_inf: Tensor | bool) -> None:
        """Put the copy back, and keep it, where `found_inf` is not 0 and the statistics are no longer finite.

        For the step of another network: its loss came through this one, whose statistics its overflow may have spoiled.
        """
        if found_inf is False:
            return
        for buffers, before in self._groups:
            now = _flat(buffers)
            spoiled = ~now.isfinite().all()
            if isinstance(found_inf, Tensor):
                spoiled = spoiled & (found_inf.to(before.device, non_blocking=True) != 0)
            _put(buffers, torch.where(spoiled, before, now))

    def forget(self) -> None:
        """Drop the copy."""
        self._groups = []

    def state(self) -> list[Tensor]:
        """The copy, as flat tensors."""
        return [before.clone() for _, before in self._groups]

    def load(self, state: list[Tensor]) -> None:
        """Take a copy that `state` gave; one of other layers is dropped."""
        self.remember()
        if [before.shape for before in state] == [before.shape for _, before in self._groups]:
            self._groups = [
                (buffers, saved.to(before.device, copy=True))
                for (buffers, before), saved in zip(self._groups, state)
            ]
        else:
            self.forget()


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _put(buffers: list[Tensor], flat: Tensor) -> None:
    sizes = [buffer.numel() for buffer in buffers]
    parts = [part.view(buffer.shape) for part, buffer in zip(flat.split(sizes), buffers)]
    torch._foreach_copy_(buffers, parts)
