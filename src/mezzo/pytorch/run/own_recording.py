"""A script that runs in its own precision, recorded: its losses without its GradScaler's scale, and its skipped steps.

The other hooks of a run record the rest: they are on, and no policy is.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.not_traced import not_traced

if TYPE_CHECKING:
    from mezzo.pytorch.run.optimizers import Steps
    from mezzo.runner.patches import ImportWatch, Patches

KEY = "mezzo: scale"  # in the metadata of the graph's node that multiplies a loss by the scale
_NODES = 64  # searched for it, from the root of a backward pass


def record(steps: Steps, patches: Patches, imports: ImportWatch) -> None:
    """Record the losses of GradScaler, PyTorch's or Mezzo's, and of `MixedPrecision` unscaled, and their steps."""

    def precision_imported(module: Any) -> None:
        window, kind = module.Accumulation, module.MixedPrecision
        seed, end = window.seed, kind._end_window

        def seeded(self: Any, loss: Any) -> Any:
            if self.scale is not None and loss.grad_fn is not None:
                loss.grad_fn.metadata[KEY] = self.scale
            return seed(self, loss)

        def ended(self: Any, *args: Any) -> Any:
            before, scale = steps.done, self._window.scale
            steps.loss_scale = 1.0 if scale is None else float(scale)
            result = end(self, *args)
            if steps.done == before:  # skipped, or taken inside backward
                steps.ended_by_script(self.optimizer, moved=result.stepped)
            steps.loss_scale = 1.0
            return result

        patches.set(window, "seed", seeded)
        patches.set(kind, "_end_window", ended)

    _record_scaler(steps, patches, torch.amp.GradScaler)
    scaler = "mezzo.pytorch.grad_scaler"
    imports.when(scaler, lambda module: _record_scaler(steps, patches, module.GradScaler))
    imports.when("mezzo.pytorch.training.mixed_precision", precision_imported)


def _record_scaler(steps: Steps, patches: Patches, scaler: Any) -> None:
    """Remember the scale of each scaled loss, and record each step that a scaler of this class skips."""
    scale, step = scaler.scale, scaler.step

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if self.is_enabled():
            for one in [result] if isinstance(result, Tensor) else result:
                if isinstance(one, Tensor) and one.grad_fn is not None:
                    metadata: Any = one.grad_fn.metadata
                    # A copy: `update` changes the scaler's tensor in place.
                    metadata[KEY] = self._get_scale_async().clone()
        return result

    @functools.wraps(step)
    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return step(self, optimizer, *args, **kwargs)
        steps.loss_scale = self.get_scale()
        before = steps.done
        try:
            result = step(self, optimizer, *args, **kwargs)
            if steps.done == before:
                steps.ended_by_script(getattr(optimizer, "optimizer", optimizer), moved=False)
        finally:
            steps.loss_scale = 1.0
        return result

    patches.set(scaler, "scale", not_traced(scaled))
    patches.set(scaler, "step", not_traced(stepped))


@not_traced
def unscaled(root: Any, loss: Any) -> Any:
    """The loss of a backward pass from this root, divided by the scale that a GradScaler multiplied it by."""
    found: Any = None
    nodes, seen = deque([getattr(root, "grad_fn", None)]), 0
    while nodes and seen < _NODES and found is None:
        node = nodes.popleft()
        if node is not None:
            seen += 1
            found = node.metadata.get(KEY)
            nodes.extend(following for following, _ in node.next_functions)
    return loss if found is None else loss / found
