"""SGD with momentum and Nesterov's form of it, fused over all parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.optimizer_step.rules import SgdHyper
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer


class SGD(FusedOptimizer):
    """Stochastic gradient descent, as `torch.optim.SGD` has it.

    Naive code, of one parameter's step number t (1, 2, ...), in FP32::

        g = grad.float() + weight_decay * w
        if momentum:
            buf = g if t == 1 else momentum * buf + (1 - dampening) * g
            g = g + momentum * buf if nesterov else buf
        w = w - lr * g

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.SGD`. FP32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, which is read at each step: on a GPU, the
            host would wait for it, so keep it on the CPU.
        momentum: decay of the buffer; 0 for none, and then no state either. Where it is turned on later, the
            buffer starts at that step.
        dampening: the part of the gradient that doesn't enter the buffer.
        weight_decay: coefficient of the L2 term.
        nesterov: look ahead along the buffer; needs momentum and no dampening.
        maximize: go up the gradient.
        state: how the buffer is stored: `"fp32"`, `"bf16"`, `"int8"`. The small forms are rounded stochastically.
        masters: where a 16-bit weight's FP32 master is: `"fp32"` (a tensor), `"split"` (a 16-bit remainder
            beside a bf16 weight: the same numbers as `"fp32"`), `"split8"` (an 8-bit one: a 24-bit master),
            `"none"`. An FP32 weight is its own master.

    Raises:
        UsageError: a number out of range, `nesterov` without momentum, a parameter that can't be moved in this mode.
        UnknownNameError: an unknown `state` or `masters`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state: str = "fp32",
        masters: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, masters=masters)

    def _check(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        for name in ("lr", "momentum", "dampening", "weight_decay"):
            checks.number(owner, name, group[name])
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise UsageError(
                f"{owner}: nesterov=True with momentum={group['momentum']!r} and dampening={group['dampening']!r}. "
                "Nesterov's form needs a momentum above 0 and no dampening."
            )

    def _hyper(self, group: dict[str, Any]) -> SgdHyper:
        return SgdHyper(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
