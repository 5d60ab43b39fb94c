"""In which format a head's matrix products are computed, from the region around them and the tensors' own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.core.rules import Rule
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.machine import native_formats
from mezzo.pytorch.region import identity

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Arithmetic:
    """How operands become products.

    Args:
        rounded: the format that the operands are rounded to.
        product: the format that they then have, and logits and their gradients with them. It is wider than
            `rounded` where this machine has no fast products in that: then FP32 serves, between the same roundings.
    """

    rounded: torch.dtype
    product: torch.dtype

    @property
    def sums(self) -> torch.dtype:
        """The format of losses and of sums over rows: FP32, or FP64 for FP64."""
        return torch.float64 if self.product is torch.float64 else torch.float32

    def operand(self, tensor: Tensor) -> Tensor:
        """A tensor as a product takes it; itself where it is so already."""
        return tensor.to(self.rounded).to(self.product)


def arithmetic_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> Arithmetic:
    """What F.linear would compute in, here: autocast's dtype inside a region, else the tensors' own.

    FP64 is left alone by autocast, and so it is here. A policy that gives `linear` the rule ``fp32`` is obeyed.

    Raises:
        UsageError: dtypes that differ and that no region makes equal.
    """
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    dtypes = {tensor.dtype for tensor in tensors}
    device = weight.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        policy = identity.current_policy(device)
        decision = None if policy is None else policy.rule_for("linear")
        if decision is not None and decision.rule in (Rule.FP32, Rule.INTERNAL_FP32):
            return Arithmetic(torch.float32, torch.float32)
        low = torch.get_autocast_dtype(device)
        return _stored_in(low, device)
    if len(dtypes) > 1 or not weight.is_floating_point():
        named = ", ".join(name_of(tensor.dtype) for tensor in tensors)
        raise UsageError(
            f"linear_cross_entropy: input, weight and bias of {named}. Outside a region, and with fp64, all have "
            "one floating format: cast one side, or enter mezzo.autocast."
        )
    return _stored_in(weight.dtype, device)


def _stored_in(dtype: torch.dtype, device_type: str) -> Arithmetic:
    if dtype in _HALVES and name_of(dtype) not in native_formats(device_type):
        return Arithmetic(dtype, torch.float32)
    return Arithmetic(dtype, dtype)
