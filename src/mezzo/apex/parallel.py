"""`apex.parallel`: PyTorch's DistributedDataParallel and SyncBatchNorm with Apex's arguments."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import SyncBatchNorm as SyncBatchNorm

from mezzo.core.errors import UsageError


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """PyTorch's. `delay_allreduce` allows for unused parameters; the other arguments set up Apex's own buckets."""

    def __init__(
        self, module: nn.Module, message_size: int = 0, delay_allreduce: bool = False, **ignored: Any
    ) -> None:
        if not ignored.get("gradient_average", True):
            raise UsageError("gradient_average is False. Multiply the loss by the number of processes.")
        super().__init__(module, find_unused_parameters=delay_allreduce)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> Any:
    """`torch.nn.SyncBatchNorm.convert_sync_batchnorm`; `channel_last` is ignored, since PyTorch's takes both."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)
