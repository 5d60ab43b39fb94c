"""What PyTorch wraps around a user's model."""

from __future__ import annotations

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrappers of `torch.compile` and of data parallelism; itself if there is none.

    Args:
        model: as a loop calls it.
    """
    while True:
        wrapped = model._modules.get("_orig_mod")
        if wrapped is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            wrapped = model.module
        if wrapped is None:
            return model
        model = wrapped
