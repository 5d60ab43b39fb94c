"""Lion: steps of one size, in the direction of a momentum's sign."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from mezzo.pytorch.kernels.optimizer_step.rules import LionHyper
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer


class Lion(FusedOptimizer):
    """Lion, with decoupled weight decay.

    Naive code, of one parameter's step, in FP32::

        g = grad.float()
        w = w * (1 - lr * weight_decay)
        w = w - lr * (beta1 * m + (1 - beta1) * g).sign()
        m = beta2 * m + (1 - beta2) * g

    X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.

    Args:
        params: parameters, named parameters or groups, as for `torch.optim`. FP32, bf16 or fp16.
        lr: learning rate, the size of every element's step; 3 to 10 times smaller than AdamW's. A number, or a
            tensor of one element, which is read at each step: on a GPU, the host would wait for it, so keep it
            on the CPU.
        betas: weight of the momentum in the direction, and decay of the momentum, each from 0 to 1.
        weight_decay: coefficient of the decay; 3 to 10 times larger than AdamW's.
        maximize: go up the gradient.
        state: how the momentum is stored: `"fp32"`, `"bf16"`, `"int8"`. The small forms are rounded stochastically.
        masters: where a 16-bit weight's FP32 master is: `"fp32"` (a tensor), `"split"` (a 16-bit remainder
            beside a bf16 weight: the same numbers as `"fp32"`), `"split8"` (an 8-bit one: a 24-bit master),
            `"none"`. An FP32 weight is its own master.

    Raises:
        UsageError: a number out of range, a parameter that can't be moved in this mode.
        UnknownNameError: an unknown `state` or `masters`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: str = "fp32",
        masters: str = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state=state, masters=masters)

    def _check(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        checks.betas(owner, group["betas"])
        for name in ("lr", "weight_decay"):
            checks.number(owner, name, group[name])

    def _hyper(self, group: dict[str, Any]) -> LionHyper:
        beta1, beta2 = group["betas"]
        return LionHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
        )
