"""Emulation of a module's operations in any format, on FP32 tensors that are rounded as the op table says.

In a format of 16 bits or more, the inputs of products and all results are rounded, as autocast does. In a narrower one,
the matrices that products read, each scaled by a power of two that brings its largest number just under the format's;
everything else is bf16. Sums inside one operation are FP32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.core.calibration import HEADROOM
from mezzo.core.formats import Format, named
from mezzo.core.rules import RULES, Rule
from mezzo.pytorch.dtypes import DTYPES
from mezzo.pytorch.nested import mapped, tensors
from mezzo.pytorch.rounding import round_array

_COPY_NAMES = """
    relu relu6 leaky_relu threshold hardtanh clamp clamp_min clamp_max max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d max min amax amin cat stack clone copy _to_copy contiguous index index_select gather
    where masked_fill scatter embedding constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d repeat repeat_interleave flip roll tril triu native_dropout
    bernoulli zero fill neg abs maximum minimum sort topk lift_fresh detach slice_scatter select_scatter
"""
COPIES = frozenset(_COPY_NAMES.split())  # operations that return numbers that were there before, or constants
# Below autograd an op of the table may have a longer name: these parts are cut off.
_BEFORE = ("native_", "_native_", "cudnn_", "miopen_", "mkldnn_", "_")
_CALLED = {"mm": "matmul", "bmm": "matmul", "addmm": "linear"}  # -> what code and policies name it
_AFTER = ("_legit", "_backend", "_forward", "_for_cpu", "_")


class Rounding(TorchDispatchMode):
    """Follows which tensors would be in a format, and rounds what one module computes (if `rounds`)."""

    def __init__(self, form: Format, *, rounds: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._narrow = form if form.bits < 16 else None
        self._form = form if form.bits >= 16 else named("bf16")  # of all but a product's factors
        self._rounds = rounds
        self._most = math.ldexp(float(self._form.max), -HEADROOM)
        self._low: dict[int, bool] = {}
        self.inside: list[Any] = []  # running calls of inner modules, whose operations are not rounded
        # Innermost call that runs operations itself -> whether it has a product.
        self.computed: dict[Any, bool] = {}
        self.cause = ""  # what made the first number beyond the format's largest, less the headroom
        self.near = False  # whether that one is within the headroom
        self.masks = True  # whether all those are below 0, as a mask's on scores
        self.within = ""  # the first inner module that handed on a number beyond it, which stays FP32

    def low(self, tensor: Tensor) -> bool:
        """Whether this tensor would be in the format."""
        return self._low.get(_storage(tensor), False)

    def handed_on(self, tensor: Tensor, low: bool, path: str = "") -> Tensor:
        """A new tensor with these numbers, rounded where it would come so, of the module `path` inside, if it fits."""
        if low and tensor.dtype is torch.float32:
            rounded = self._cast(tensor)
            if is_finite(rounded) or bool((torch.isfinite(rounded) == torch.isfinite(tensor)).all()):
                self._low[_storage(rounded)] = True
                return rounded
            self.within = self.within or path * bool((tensor > self._most).any())  # else it may be a mask
        copy = tensor.detach().clone()
        self._low[_storage(copy)] = False
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = floats((args, kwargs))
        name = _table_name(func._schema.name.split("::")[1])
        row = RULES.get(name)
        rule = Rule.PROMOTE if row is None else row.in_format(self._form.name)[0]
        low = self._result_is_low(rule, inputs)
        mine = self._rounds and not self.inside
        if mine and rule is Rule.LOWER and not func._schema.is_mutable:
            args, kwargs = mapped((args, kwargs), lambda t: self._taken(name, t))
        out = func(*args, **kwargs)
        exact = name in COPIES or func.is_view
        if inputs and not exact and self.inside:
            call = self.inside[-1]
            self.computed[call] = self.computed.get(call, False) or rule is Rule.LOWER
        results = floats(out)
        for place, tensor in enumerate(results):
            self._low[_storage(tensor)] = low
            # A normalization's other results are statistics, which are FP32.
            if mine and low and not exact and (place == 0 or rule is not Rule.INTERNAL_FP32):
                tensor.copy_(self._limited(name, tensor))
        return out

    def _result_is_low(self, rule: Rule, inputs: list[Tensor]) -> bool:
        if any(tensor.dtype is torch.float64 for tensor in inputs):
            return False  # FP64 is left alone
        if rule in (Rule.LOWER, Rule.FP32, Rule.BANNED):
            return rule is Rule.LOWER
        wide = [self.low(t) for t in inputs if t.dim() > 0] or [self.low(t) for t in inputs]
        return (wide[0] if rule is Rule.INTERNAL_FP32 else all(wide)) if wide else False

    def _taken(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        rounded = tensor if self.low(tensor) else self._limited(name, tensor)
        if self._narrow is None or tensor.dim() < 2:
            return rounded
        finite = torch.nan_to_num(rounded, nan=0.0, posinf=0.0, neginf=0.0)
        largest = float(finite.abs().max()) if tensor.numel() else 0.0
        if not largest:
            return rounded
        scale = 2.0 ** math.floor(math.log2(float(self._narrow.max) / largest))
        return round_array(rounded * scale, self._narrow, "saturate") / scale

    def _limited(self, name: str, tensor: Tensor) -> Tensor:
        """Rounded; infinite beyond the format's largest number, less the headroom."""
        if tensor.dtype is not torch.float32:
            return tensor
        rounded, size = self._cast(tensor), tensor.abs()
        if not tensor.numel() or bool(size.max() <= self._most):  # False for NaN
            return rounded
        beyond = torch.isfinite(tensor) & (size > self._most)
        self.masks &= not bool((beyond & (tensor > 0.0)).any())
        if not self.cause and bool(beyond.any()):
            self.cause, self.near = _CALLED.get(name, name), bool(torch.isfinite(rounded[beyond]).all())
        return torch.where(beyond, tensor * math.inf, rounded)

    def _cast(self, tensor: Tensor) -> Tensor:
        values = tensor.detach()
        if self._form.name in ("bf16", "fp16"):
            return values.to(DTYPES[self._form.name]).to(torch.float32)
        return round_array(values, self._form, "infinity")


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is, as far as the sum tells."""
    return bool(torch.isfinite(tensor.sum()))


def floats(value: Any) -> list[Tensor]:
    """The floating tensors in a value, nested or not, in order."""
    return [one for one in tensors(value) if one.is_floating_point()]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


@functools.cache
def _table_name(name: str) -> str:
    """The op table's name of an operation, if it has one there: ``native_layer_norm`` and ``add_`` are in it."""
    candidates = [name, name.rstrip("_")]
    for end in _AFTER:
        candidates += [one.removesuffix(end) for one in candidates if one.endswith(end)]
    for start in _BEFORE:
        candidates += [one.removeprefix(start) for one in candidates if one.startswith(start)]
    return next((one for one in candidates if one in RULES or one in COPIES), name)
