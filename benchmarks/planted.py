"""A training script with a planted harm that is active only under autocast, so FP32 runs are unchanged.

    python benchmarks/planted.py HARM SIZE SCRIPT [ARGS...]

`benchmarks/harms.py` runs it under `mezzo compare` to find the size from which each harm is called divergent.
The four harms here are in the training loop; the fifth (fp16 with too small a loss scale) is a policy and
needs no code.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Candidate:
    """Whether this run computes in 16 bits: true from the first forward pass inside an autocast region on."""

    seen = False

    @classmethod
    def watch(cls) -> None:
        def look(module: torch.nn.Module, inputs: Any) -> None:
            cls.seen = cls.seen or torch.is_autocast_enabled("cpu")

        torch.nn.modules.module.register_module_forward_pre_hook(look)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def coarse_gradients(size: float) -> None:
    """Each gradient tensor rounded to a signed integer of 16 - size bits, scaled to its largest element."""
    levels = 2.0 ** (15 - size) - 1 if size < 15 else 0.5

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if Candidate.seen:
            for gradient in _gradients(optimizer):
                unit = gradient.abs().max().clamp_min(1e-30) / levels
                gradient.copy_((gradient / unit).round_() * unit)

    register_optimizer_step_pre_hook(before_step)


def frozen_copy(size: float) -> None:
    """The forward pass sees a copy of the weights that is refreshed every `size` steps only."""
    masters: dict[Tensor, Tensor] = {}
    steps = 0

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, master in masters.items():
            parameter.data.copy_(master)
        masters.clear()

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not Candidate.seen:
                    continue
                if steps % size == 0 or parameter not in copies:
                    copies[parameter] = parameter.data.clone()
                masters[parameter] = parameter.data.clone()
                parameter.data.copy_(copies[parameter])

    copies: dict[Tensor, Tensor] = {}
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def fp16_norm(size: float) -> None:
    """Normalisation statistics taken in fp16 by E[x^2] - E[x]^2, over inputs multiplied by `size`.

    In exact arithmetic the factor changes nothing: a normalization divides it out, and eps grows with it.
    """

    def normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
        x16 = (x * size).half()
        mean = x16.mean(dims, keepdim=True)
        variance = ((x16 * x16).mean(dims, keepdim=True) - mean * mean).clamp_min(0)
        return (x16 - mean) / (variance + eps * size * size).sqrt()

    def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        out = x if weight is None else x * weight.view(shape)
        return out if bias is None else out + bias.view(shape)

    true_batch, true_layer = F.batch_norm, F.layer_norm

    def batch_norm(
        x: Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not (training and torch.is_autocast_enabled("cpu")):
            return true_batch(x, running_mean, running_var, weight, bias, training, momentum, eps)
        with torch.no_grad():
            true_batch(x.float(), running_mean, running_var, None, None, True, momentum, eps)
        dims = (0, *range(2, x.dim()))
        return affine(normalized(x, dims, eps), weight, bias, (1, -1, *([1] * (x.dim() - 2)))).to(x.dtype)

    def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return true_layer(x, shape, weight, bias, eps)
        dims = tuple(range(-len(shape), 0))
        return affine(normalized(x, dims, eps), weight, bias, tuple(shape)).to(x.dtype)

    setattr(F, "batch_norm", batch_norm)  # noqa: B010  (a plain assignment is what mypy refuses)
    setattr(F, "layer_norm", layer_norm)  # noqa: B010


def wrong_unscale(size: float) -> None:
    """Every fourth step's gradients are unscaled with a loss scale that is wrong by a factor of `size`."""
    steps = 0

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        if Candidate.seen and steps % 4 == 0:
            for gradient in _gradients(optimizer):
                gradient.mul_(size)

    register_optimizer_step_pre_hook(before_step)


HARMS: dict[str, Callable[[float], None]] = {
    "coarse-gradients": coarse_gradients,
    "frozen-copy": frozen_copy,
    "fp16-norm": fp16_norm,
    "wrong-unscale": wrong_unscale,
}


if __name__ == "__main__":
    harm, size, script, *rest = sys.argv[1:]
    Candidate.watch()
    HARMS[harm](float(size))
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
