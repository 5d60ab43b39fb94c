"""`apex.optimizers`: PyTorch's optimizers with Apex's arguments."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.core.errors import UsageError


class FusedAdam(torch.optim.Adam):
    """`torch.optim.Adam`; with `adam_w_mode` the arithmetic is that of `torch.optim.AdamW`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        *,
        adam_w_mode: bool = True,
        set_grad_none: bool = True,
        master_weights: bool = False,
        **others: Any,
    ) -> None:
        if master_weights or not bias_correction:
            raise UsageError(
                f"FusedAdam: bias_correction={bias_correction}, master_weights={master_weights}. Use True and False. "
                "For masters use mezzo.optim.AdamW."
            )
        super().__init__(params, lr, decoupled_weight_decay=adam_w_mode, **others)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`; the last two arguments are ignored."""

    def __init__(
        self,
        *args: Any,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **others: Any,
    ) -> None:
        if wd_after_momentum:
            raise UsageError("FusedSGD: wd_after_momentum is True. Only False is supported.")
        super().__init__(*args, **others)
