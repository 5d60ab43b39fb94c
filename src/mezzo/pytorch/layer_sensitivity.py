"""By how much a linear layer's quantized factors change the loss, to first order, for the ranking of `sensitivity`.

    forward    sum of  gradient of the output * (output by the recipe - output in FP32)
    update     sum of  gradient of the weight * (that gradient by the recipe - in FP32) * |update| / |gradient|

The first is the error of weights and inputs. The second is that of output gradients and inputs: how much less (or more)
the step's own update lowers the loss, as if it followed the gradient. An error in the input's gradient is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mezzo.core.recipes import Recipe
from mezzo.core.records import ModuleRounding
from mezzo.pytorch.emulation import is_finite
from mezzo.pytorch.kernels.quantized_linear import quantized_linear

Sums = tuple[float, float]
"""Of ``e``, and of ``e * e``, over the elements' changes e."""


def sums(gradient: Tensor, error: Tensor, exact: Tensor) -> Sums:
    """The sums of ``gradient * error``, without elements on which nothing depends and which were not finite before."""
    terms = (gradient.float() * error.float()).double()
    if not is_finite(terms):
        terms = terms[torch.isfinite(exact) & (gradient != 0.0)]
    return float(terms.sum()), float(terms.square().sum())


def layer_changes(layer: nn.Linear, x: Tensor, gradient: Tensor, recipe: Recipe) -> tuple[Sums, Sums]:
    """Of one call: `sums` of the output, and of the weight's gradient (before the factor; 0 without `weight.grad`)."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    x, leaf, grad = x.detach(), weight.clone().requires_grad_(), layer.weight.grad
    exact = nn.functional.linear(x, weight, bias)
    with torch.enable_grad():
        output = quantized_linear(x, leaf, bias, recipe=recipe)
        (found,) = torch.autograd.grad(output, leaf, gradient.to(output.dtype))
    rows, columns = (one.reshape(-1, one.shape[-1]).float() for one in (gradient, x))
    error = found - rows.t() @ columns
    return sums(gradient, output.detach().float() - exact, exact), (0.0, 0.0) if grad is None else sums(
        grad, error, error
    )


@dataclass(eq=False)
class LayerUpdate:
    """A layer's weight before an update, and the sums of its gradient's error."""

    weight: Tensor
    before: Tensor
    size: float  # norm of the weight's gradient
    signed: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, layer: nn.Linear) -> LayerUpdate:
        """Before the update."""
        weight, grad = layer.weight, layer.weight.grad
        return cls(weight, weight.detach().clone(), 0.0 if grad is None else float(grad.float().norm()))

    def added_to(self, row: ModuleRounding) -> ModuleRounding:
        """After the update: a layer's row with both changes."""
        factor = float((self.weight.detach() - self.before).float().norm()) / self.size if self.size else 0.0
        if not math.isfinite(factor):
            return row
        squares = row.squares + factor**2 * self.squares
        return replace(row, signed=row.signed - factor * self.signed, squares=squares)
