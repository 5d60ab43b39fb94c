"""How PyTorch's own loops tell of their losses and updates: `backward`, and the steps of torch's optimizers too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mezzo.keras.launch.loops import Loops
    from mezzo.scripts.patches import Patches


class TorchLoops:
    """Remembers what `backward` was called on."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops

    def install(self, patches: Patches) -> None:
        """From now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.set(torch.autograd, "backward", self._make_backward(torch.autograd.backward))
        self._loops.at_end.append(register_optimizer_step_post_hook(self._stepped).remove)

    def compiling(self, optimizer: Any) -> bool:
        """Never: what a compiled function would hide is not taken apart here."""
        return False

    def told(self, loss: Any) -> None:
        """A loss was scaled: nothing to do until its gradients are taken."""

    def _make_backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(tensors, *args, **kwargs)
            if not self._loops.session.inside:
                first = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
                self._loops.loss = self._loops.unscaled(first).detach().clone()
            return made

        return backward

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        loops = self._loops
        if loops.session.inside:
            return
        loops.told_of_scale(optimizer)
        loss, loops.loss = loops.loss, None
        loops.session.stepped(optimizer, loss=None if loss is None else float(loss.mean()))
