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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,  # ignored
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if master_weights or not bias_correction:
            raise UsageError(
                f"FusedAdam: bias_correction={bias_correction}, master_weights={master_weights}. Use True and False. "
                "For masters use mezzo.optim.AdamW."
            )
        how = {"capturable": capturable, "decoupled_weight_decay": adam_w_mode}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **how)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`; `materialize_master_grads` and `set_grad_none` are ignored."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        **ignored: Any,
    ) -> None:
        if wd_after_momentum:
            raise UsageError("FusedSGD: wd_after_momentum is True. Only False is supported.")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
