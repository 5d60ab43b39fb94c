"""Flow: which module makes each tensor of a forward pass, which module takes it, and in which format it would come.

Every operation that a forward pass runs is seen below autograd, with the module that was innermost when it ran. An
operation that rounds makes its module a unit and the maker of what it returns. One that copies or selects (a view, a
relu, a maximum) hands its inputs' makers on. Makers are known by storage: a view has its base's.

Each tensor also carries whether it would be in the lower format if the whole model were lowered: the op table's rules
(`mezzo.core.rules`), followed from op to op. So a unit can later be run on inputs in the format in which they would
come, and an edge knows whether its consumer rounds what it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.core.rules import RULES, Rule

# Besides views: they return values that were there before, or constants.
_COPY_NAMES = """
    relu relu6 leaky_relu threshold hardtanh clamp clamp_min clamp_max max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d max min amax amin cat stack clone copy _to_copy contiguous index index_select gather
    where masked_fill scatter embedding constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d repeat repeat_interleave flip roll tril triu native_dropout
    bernoulli zero fill neg abs maximum minimum sort topk lift_fresh detach slice_scatter select_scatter
"""
COPIES = frozenset(_COPY_NAMES.split())
"""Operations that round nothing."""
# Below autograd an op of the table goes by another name: what stands around it is cut off.
_AROUND = ("native_", "_native_", "cudnn_", "miopen_", "mkldnn_", "_")
_AFTER = ("_legit", "_backend", "_forward", "_")


@dataclass
class Taken:
    """What one unit takes from another, of what would come in the lower format: storage -> elements.

    `casts`: whether an operation of the consumer's own rounds it if it comes in FP32.
    """

    elements: dict[int, int] = field(default_factory=dict)
    casts: bool = False


class Flow(TorchDispatchMode):
    """Follows the tensors of forward passes; `enter` and `leave` tell it of modules.

    Args:
        format: the lower format.
    """

    def __init__(self, format: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._format = format
        self._stack: list[tuple[str, bool]] = []
        self._makers: dict[int, frozenset[str]] = {}
        self._low: dict[int, bool] = {}
        self.ops: dict[str, dict[str, None]] = {}
        self.taken: dict[tuple[str, str], Taken] = {}

    def enter(self, path: str | None, module: nn.Module) -> str | None:
        """A module's call begins; the path of the module around it. One without a path is part of that one.

        A dropout's scaling is one rounding of numbers that are drawn anyhow: it makes no unit.
        """
        outer = self._stack[-1][0] if self._stack else None
        exact = isinstance(module, nn.modules.dropout._DropoutNd)
        self._stack.append((path if path is not None else outer or "", exact))
        return outer

    def leave(self) -> None:
        """The innermost module's call has ended."""
        self._stack.pop()

    def would_be_low(self, tensor: Tensor) -> bool:
        """Whether this tensor would be in the lower format if all of the model were lowered."""
        return self._low.get(_storage(tensor), False)

    def makers(self, tensor: Tensor) -> frozenset[str]:
        """The units that made it; none if it came from outside, or is a parameter."""
        return self._makers.get(_storage(tensor), frozenset())

    def comes_from_outside(self, tensors: Iterable[Tensor]) -> None:
        """These are a forward pass's inputs: whatever was at their place before is gone."""
        for tensor in tensors:
            self._makers.pop(_storage(tensor), None)
            self._low.pop(_storage(tensor), None)

    def forget(self) -> None:
        """What is known of tensors ends with their step; the units' operations stay known."""
        self._makers.clear()
        self._low.clear()
        self._stack.clear()
        self.taken.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._stack:
            self._follow(func, [*_floats(args), *_floats(kwargs or {})], list(_floats(out)))
        return out

    def _follow(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if not outputs:
            return
        unit, exact = self._stack[-1]
        name = _table_name(func._schema.name.split("::")[1])
        makers = frozenset[str]().union(*map(self.makers, inputs))
        low = self._low_after(name, inputs)
        if inputs and not (exact or name in COPIES or func.is_view):
            self.ops.setdefault(unit, {}).setdefault(name)
            lowers = rule_of(name, self._format) is Rule.LOWER
            for tensor in inputs:
                if not self.would_be_low(tensor):
                    continue  # in FP32 either way: what rounds it is part of the unit
                for maker in self.makers(tensor) - {unit}:
                    taken = self.taken.setdefault((maker, unit), Taken())
                    taken.elements[_storage(tensor)] = tensor.numel()
                    taken.casts |= lowers
            makers = frozenset({unit})
        for tensor in outputs:
            place = _storage(tensor)
            self._makers[place] = makers
            self._low[place] = low

    def _low_after(self, name: str, inputs: list[Tensor]) -> bool:
        rule = rule_of(name, self._format)
        if any(tensor.dtype is torch.float64 for tensor in inputs):
            return False  # FP64 is left alone
        if rule is Rule.LOWER:
            return True
        if rule in (Rule.FP32, Rule.BANNED):
            return False
        wide = [self.would_be_low(t) for t in inputs if t.dim() > 0] or [self.would_be_low(t) for t in inputs]
        return (wide[0] if rule is Rule.INTERNAL_FP32 else all(wide)) if wide else False


def rule_of(name: str, format: str) -> Rule:
    """The op table's rule for an operation; one that it does not know runs in the format of its inputs."""
    row = RULES.get(name)
    return Rule.PROMOTE if row is None else row.in_format(format)[0]


def _table_name(name: str) -> str:
    """The op table's name of an operation, if it has one there: ``native_layer_norm`` and ``add_`` are in it."""
    candidates = [name, name.rstrip("_")]
    for end in _AFTER:
        candidates += [one.removesuffix(end) for one in candidates if one.endswith(end)]
    for start in _AROUND:
        candidates += [one.removeprefix(start) for one in candidates if one.startswith(start)]
    return next((one for one in candidates if one in RULES or one in COPIES), name)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a value, nested or not, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)


floats_in = _floats
