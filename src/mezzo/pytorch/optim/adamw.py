"""AdamW: Adam whose weight decay pulls at the weight itself and never enters the moments."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mezzo.pytorch.optim.adam import Adam


class AdamW(Adam):
    """Adam with decoupled weight decay.

    Naive code, of one parameter's step number t (1, 2, ...), in FP32::

        g = grad.float()
        w = w * (1 - lr * weight_decay)
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**t) * m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.AdamW`. FP32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, which is read at each step: on a GPU, the
            host would wait for it, so keep it on the CPU.
        betas: decays of the first and the second moment, each from 0 to 1.
        eps: added to the denominator.
        weight_decay: coefficient of the decay.
        maximize: go up the gradient.
        state: how the moments are stored: `"fp32"`, `"bf16"`, `"int8"`. The small forms are rounded stochastically.
        masters: where a 16-bit weight's FP32 master is: `"fp32"` (a tensor), `"split"` (a 16-bit remainder
            beside a bf16 weight: the same numbers as `"fp32"`), `"split8"` (an 8-bit one: a 24-bit master),
            `"none"`. An FP32 weight is its own master.

    Raises:
        UsageError: a number out of range, a parameter that can't be moved in this mode.
        UnknownNameError: an unknown `state` or `masters`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.AdamW
    DECOUPLED: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        state: str = "fp32",
        masters: str = "fp32",
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, state=state, masters=masters
        )
