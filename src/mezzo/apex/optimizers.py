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
        set_grad_none: bool = True,
        **others: Any,
    ) -> None:
        if not bias_correction:
            raise UsageError("FusedAdam: bias_correction is False. Only True is supported.")
        others["decoupled_weight_decay"] = adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **others)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`; the two keyword arguments are ignored."""

    def __init__(
        self, *args: Any, materialize_master_grads: bool = True, set_grad_none: bool = False, **others: Any
    ) -> None:
        super().__init__(*args, **others)
