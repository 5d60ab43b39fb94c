"""Buffers of PyTorch modules inside a Keras model, put back after it was called beside the training.

What a Keras layer assigns while it is called can be caught in a `keras.StatelessScope`. A `torch.nn.Module` in a
`TorchModuleWrapper` knows of none: its batch norms write their statistics, and count their batches, where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras


@contextmanager
def torch_buffers_kept(model: Any) -> Iterator[None]:
    """Afterwards every buffer within a model has the numbers it has now; on other backends nothing is done.

    Args:
        model: a Keras model or layer, built.
    """
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    # By Keras's list: PyTorch does not see layers that a model keeps in a Python list. By name: a buffer may be
    # replaced by another tensor rather than written to.
    modules = {id(module): module for layer in model._flatten_layers() for module in layer.modules()}
    kept = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules.values()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer
                if before is None:
                    continue
                # Only where it differs: one that was expanded can't be written to.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
