"""The optimizers: Adam, AdamW and SGD, each fused over all parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mezzo.core.errors import UsageError, checks_keywords
from mezzo.pytorch.kernels.optimizer_step import Hyper, StateSpec
from mezzo.pytorch.optim.fused import FusedOptimizer

_MOMENTS = StateSpec("exp_avg", signed=True), StateSpec("exp_avg_sq", signed=False)
BUFFER = (StateSpec("momentum_buffer", signed=True),)


def adam_hyper(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
) -> Hyper:
    """Adam; AdamW if the weight decay is `decoupled`."""
    decay = 1 - lr * weight_decay if decoupled else 1.0
    numbers = (decay, 1 - beta1, beta2, 1 - beta2, lr, beta1, eps)
    return Hyper("adamw", _MOMENTS, numbers, 0.0 if decoupled else weight_decay, maximize)


def sgd_hyper(
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Hyper:
    """SGD; there is no state without momentum."""
    rule = "plain" if not momentum else "nesterov" if nesterov else "momentum"
    numbers = (-lr, momentum, 1 - dampening, 0.0, 1.0, 0.0, 0.0)
    return Hyper(rule, BUFFER if momentum else (), numbers, weight_decay, maximize)


class Adam(FusedOptimizer):
    """Adam, with an L2 term in the gradient if `weight_decay` is not 0.

    Naive code, for step number t (1, 2, ...) of one parameter, in FP32::

        g = grad.float() + weight_decay * w
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**t) * m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)

    Args:
        params: FP32, bf16 or fp16 parameters, named parameters or groups, as for `torch.optim.Adam`.
        lr: learning rate; a number, or a tensor of one element, which is read at each step (keep it on the CPU).
        betas: decays of the first and the second moment, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of the L2 term.
        maximize: maximize the objective instead of minimizing it.
        state, masters: see `FusedOptimizer`.

    Raises:
        UsageError: a number out of range, or a parameter that these masters do not support.
        UnknownNameError: an unknown `state` or `masters`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    DECOUPLED: ClassVar[bool] = False
    NUMBERS: ClassVar[tuple[str, ...]] = ("lr", "eps", "weight_decay")

    @checks_keywords
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults["decoupled_weight_decay"] = self.DECOUPLED
        super().__init__(params, defaults, state=state, masters=masters)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = map(float, group["betas"])
        lr, eps, decay = (float(group[name]) for name in self.NUMBERS)
        return adam_hyper(lr, beta1, beta2, eps, decay, group["decoupled_weight_decay"], group["maximize"])


class AdamW(Adam):
    """Adam with decoupled weight decay: the decay is applied to the weight and does not enter the moments.

    Naive code: `Adam` with ``g = grad.float()``, and first ``w = w * (1 - lr * weight_decay)``. Otherwise as `Adam`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    DECOUPLED: ClassVar[bool] = True

    @checks_keywords
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


class SGD(FusedOptimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Naive code, for step number t (1, 2, ...) of one parameter, in FP32::

        g = grad.float() + weight_decay * w
        if momentum:
            buf = g if t == 1 else momentum * buf + (1 - dampening) * g
            g = g + momentum * buf if nesterov else buf
        w = w - lr * g

    Args:
        momentum: decay of the buffer. There is no buffer while it is 0; if it is set later, the buffer starts then.
        dampening: the part of the gradient that does not enter the buffer.
        nesterov: Nesterov momentum; UsageError without momentum or with dampening.

    The other arguments and the errors are those of `Adam`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    NUMBERS: ClassVar[tuple[str, ...]] = ("lr", "momentum", "dampening", "weight_decay")

    @checks_keywords
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
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, state=state, masters=masters)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise UsageError(
                f"{type(self).__name__}: nesterov=True with momentum={group['momentum']!r} and "
                f"dampening={group['dampening']!r}. Nesterov momentum needs momentum above 0 and dampening=0."
            )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        lr, momentum, dampening, decay = (float(group[name]) for name in self.NUMBERS)
        return sgd_hyper(lr, momentum, dampening, decay, group["nesterov"], group["maximize"])
