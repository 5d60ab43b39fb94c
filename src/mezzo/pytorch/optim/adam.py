"""Adam, fused over all parameters, with masters and states in the formats that are asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer


class Adam(FusedOptimizer):
    """Adam, with an L2 term in the gradient where `weight_decay` isn't 0.

    Naive code, of one parameter's step number t (1, 2, ...), in FP32::

        g = grad.float() + weight_decay * w
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**t) * m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.Adam`. FP32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, which is read at each step: on a GPU, the
            host would wait for it, so keep it on the CPU.
        betas: decays of the first and the second moment, each from 0 to 1.
        eps: added to the denominator.
        weight_decay: coefficient of the L2 term.
        maximize: go up the gradient.
        state: how the moments are stored: `"fp32"`, `"bf16"`, `"int8"`. The small forms are rounded stochastically.
        masters: where a 16-bit weight's FP32 master is: `"fp32"` (a tensor), `"split"` (a 16-bit remainder
            beside a bf16 weight: the same numbers as `"fp32"`), `"split8"` (an 8-bit one: a 24-bit master),
            `"none"`. An FP32 weight is its own master.

    Raises:
        UsageError: a number out of range, a parameter that can't be moved in this mode.
        UnknownNameError: an unknown `state` or `masters`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam
    DECOUPLED: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: str = "fp32",
        masters: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": self.DECOUPLED,
        }
        super().__init__(params, defaults, state=state, masters=masters)

    def _check(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        checks.betas(owner, group["betas"])
        for name in ("lr", "eps", "weight_decay"):
            checks.number(owner, name, group[name])

    def _hyper(self, group: dict[str, Any]) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
        )
