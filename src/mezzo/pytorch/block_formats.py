"""`mezzo.formats.quantize`: what a block format makes of a tensor, for study."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.core import formats
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.recipes import Factor, recipe_of
from mezzo.pytorch.kernels.quantized import quantize

ROLES = ("input", "weight", "gradient")


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor: ``values`` is ``codes * scales * tensor_scale``, each scale for a block of elements.

    Args:
        codes: the bit patterns, uint8, of the tensor's shape. NaN is 0 in 4 and 6 bits: its block's scale is NaN.
        scales: FP32, one for each block: the shape of the tensor as a matrix, divided by the block.
        tensor_scale: FP32 and 0-dim; 1 where the format has no scale of the whole tensor.
        values: FP32, what the codes and scales stand for.
        factor: element format, block and scale.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    values: Tensor
    factor: Factor

    @property
    def stored_bytes(self) -> int:
        """What a GPU stores: codes in their bits, packed, and scales in theirs."""
        return self.factor.stored_bytes(self.codes.numel(), self.scales.numel())

    def __repr__(self) -> str:
        bits = formats.named(self.factor.element).bits
        return (
            f"QuantizedTensor({self.factor.element}, shape {tuple(self.values.shape)}, {bits} bits an element, "
            f"{self.scales.numel()} scales {self.factor.scale})"
        )


def quantize_tensor(x: Tensor, recipe: str, role: str) -> QuantizedTensor:
    """See `mezzo.formats.quantize`."""
    recipe = str(recipe)  # or a path
    if role not in ROLES:
        raise unknown_name("role", role, ROLES)
    found = recipe_of(recipe, recipe=recipe)
    is_dense = isinstance(x, Tensor) and x.layout is torch.strided
    if not is_dense or not x.is_floating_point() or x.dim() == 0 or not x.numel():
        what = f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        what = what if is_dense or not isinstance(x, Tensor) else f"{what}, {x.layout}"
        raise UsageError(f"quantize: x is {what}. Use a dense floating-point torch tensor with elements.")
    factor = {"input": found.output[0], "weight": found.output[1], "gradient": found.input_gradient[0]}[role]
    matrix = x.detach().reshape(-1, x.shape[-1])
    rows, columns = matrix.shape
    quantized = quantize(matrix, factor)
    tensor_scale = torch.ones(()) if quantized.tensor_scale is None else quantized.tensor_scale
    elements = quantized.codes[:rows, :columns]
    values = quantized.values(torch.float32)[:rows, :columns] * tensor_scale
    return QuantizedTensor(
        _patterns(elements, factor.element).reshape(x.shape),
        quantized.inv_scale,
        tensor_scale,
        values.reshape(x.shape),
        factor,
    )


def _patterns(elements: Tensor, name: str) -> Tensor:
    """The codes of elements that are stored as e4m3fn or e5m2; 0 for a NaN that the format has no code for."""
    if name in ("e4m3fn", "e5m2"):
        return elements.contiguous().view(torch.uint8)
    form = formats.named(name)
    last = 1 << (form.bits - 1)
    grid = torch.tensor([formats.decode(code, form) for code in range(last)], device=elements.device)
    wide = elements.float().nan_to_num(0.0)
    found = torch.searchsorted(grid, wide.abs().contiguous())
    return (found + wide.signbit() * last).to(torch.uint8)
