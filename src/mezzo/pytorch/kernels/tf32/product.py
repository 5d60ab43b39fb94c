"""A product of TF32 factors, on hardware that has none: both are rounded to 10 bits of mantissa, the rest is FP32.

    def product(x, w):
        return op(round_tf32(x), round_tf32(w))  # and in backward the gradient is rounded before it is multiplied

That is what a tensor core does with FP32 operands: it reads 19 bits of each, multiplies them exactly and sums in FP32.
Rounding is to nearest, ties to even. (GPUs differ in how they drop the 13 bits; the error is at most one unit in the
last of the 10 places either way.)

The rounded factors are not kept for backward beside the tensors that they were made of: each is made again there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain
from mezzo.pytorch.kernels.tf32 import round_tf32
from mezzo.pytorch.kernels.unseen import unseen


class _Factor(torch.autograd.Function):
    """Rounded on the way in; its gradient, an FP32 sum, passes as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return round_tf32(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    @unseen
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return round_tf32(tangents[0])


class _Result(torch.autograd.Function):
    """As it is on the way out; the gradient that comes back is rounded: it is a factor of two products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    @unseen
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Factor.apply(gradients[0])  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].view_as(tangents[0])


class _Again:
    """Saved-tensor hooks that keep a factor's source in the place of its rounded form."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._sources = {rounded.untyped_storage().data_ptr(): (rounded, source) for rounded, source in pairs}
        self._outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(self, saved: Tensor) -> Callable[[], Tensor]:
        """The hook for saving: what restores ``saved``."""
        found = self._sources.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
        again = False
        kept = saved
        if found is not None and found[0].stride() == found[1].stride():
            again, kept = True, found[1].detach()
        size, stride, offset = saved.size(), saved.stride(), saved.storage_offset()
        outer = self._outer
        handle: Any = kept if outer is None else outer[0](kept)
        version = kept._version

        def restore() -> Tensor:
            tensor: Tensor = handle if outer is None else outer[1](handle)
            if outer is None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {list(tensor.shape)}, a factor that Mezzo rounds to TF32, is at version "
                    f"{tensor._version}; expected version {version}. Use the out-of-place form."
                )
            # A rounded tensor has the strides of its source, so a view's geometry fits it.
            return round_tf32(tensor).as_strided(size, stride, offset) if again else tensor

        return restore

    def forget(self) -> None:
        """The op is done: let go of the rounded forms, though the graph may hold on to these hooks."""
        self._sources.clear()


def _unpack(restore: Callable[[], Tensor]) -> Tensor:
    return restore()


def product(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The op, of TF32 factors: FP32 and 16-bit tensors among the arguments are factors, all else passes as it is.

    What is added and not multiplied (a bias, a mask, the hidden state that a recurrent layer begins with) keeps its
    24 bits. Gradients obey the same contract: the one that arrives is rounded before it is multiplied; those that leave
    are FP32 sums. NaN, infinities and signed zeros pass; a value that rounds beyond FP32's largest is infinite. Inside
    one kernel (a recurrent layer's steps, attention's second product) intermediate factors stay FP32.
    """
    addends = _addends(op)
    places = tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in addends)

    def in_tf32(*args: Any, **kwargs: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []
        rounded = [
            _widened(value) if place in places else _rounded(value, pairs) for place, value in enumerate(args)
        ]
        named = {
            name: _widened(value) if name in addends else _rounded(value, pairs)
            for name, value in kwargs.items()
        }
        hooked = (
            torch.is_grad_enabled()
            and any(source.requires_grad for _, source in pairs)
            and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
            and is_plain(*(source for _, source in pairs))
        )
        if not hooked:
            return _handed_on(op(*rounded, **named))
        hooks = _Again(pairs)
        try:
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, _unpack):
                out = op(*rounded, **named)
        finally:
            hooks.forget()
        return _handed_on(out)

    return in_tf32


def _addends(op: torch._ops.OpOverload) -> frozenset[str]:
    """The arguments that are added to a product and no factor of one."""
    name = op._schema.name.removeprefix("aten::")
    own = {"self"} if name.removeprefix("_").startswith(("add", "badd")) else set()
    return frozenset(own | {"bias", "b_ih", "b_hh", "hx", "attn_mask"})


def _rounded(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        if not _is_short(value):
            return value
        source = value.float()
        factor: Tensor = _factor(source)
        pairs.append((factor, source))
        return factor
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        # Among a recurrent layer's parameters the vectors are biases.
        lone = all(isinstance(item, Tensor) and item.dim() == 1 for item in value)
        return [
            _widened(item)
            if isinstance(item, Tensor) and item.dim() == 1 and not lone
            else _rounded(item, pairs)
            for item in value
        ]
    return value


def _factor(x: Tensor) -> Tensor:
    if is_plain(x):
        rounded: Tensor = _Factor.apply(x)  # type: ignore[no-untyped-call]
        return rounded
    # A kernel that torch.func transforms can't hold an autograd Function. The difference of a number and the
    # one that it rounds to is exact, and so is their sum.
    change = (round_tf32(x.detach()) - x.detach()).detach()
    return torch.where(x.isfinite(), x + change, x)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if _is_short(value) else value
    if isinstance(value, (list, tuple)):
        return [_widened(item) for item in value]
    return value


def _is_short(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype is not torch.float64


def _handed_on(result: Any) -> Any:
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.requires_grad:
            if is_plain(result):
                return _Result.apply(result)  # type: ignore[no-untyped-call]
            result.register_hook(lambda grad: None if grad is None else round_tf32(grad))
        return result
    if isinstance(result, (list, tuple)):
        return tuple(_handed_on(item) for item in result)
    return result
