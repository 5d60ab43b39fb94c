"""The tensors that a `RangeWatch` counts: outputs of modules, their gradients, and the parameters of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as _graph_task  # -1 outside a backward pass
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.core.overflow import OUTSIDE
from mezzo.core.ranges import BINS, INFINITE, NAN, WHAT, ZERO, Histogram, RangeRow
from mezzo.pytorch import distributed
from mezzo.pytorch.dtypes import SIXTEEN_BITS, name_of
from mezzo.pytorch.kernels.plain import PLAIN, is_dense
from mezzo.pytorch.module_paths import joined
from mezzo.pytorch.nested import tensors
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.snapshot import version_of
from mezzo.pytorch.step import parameters
from mezzo.pytorch.weights import master_state
from mezzo.pytorch.weights.stored_parameters import wide_value

WEIGHT, ACTIVATION, ACTIVATION_GRADIENT, WEIGHT_GRADIENT, RATIO = WHAT

BLOCK = 1 << 18
"""Elements that are counted, or whose ratio is computed, at once: what lies between stays small, and in a cache."""
LARGEST = BINS
"""Index of the FP32 pattern of the largest finite magnitude. Patterns are ordered as their numbers."""
WORDS = BINS + 1  # length of a row: the bins of `mezzo.core.ranges`, and `LARGEST`

_INFINITY = 0xFF << 23  # its FP32 pattern


def count(tensor: Tensor, row: Tensor) -> None:
    """Add the exponents of a floating tensor of any strides to a row, int64 [WORDS] on its device.

    FP64 is rounded to FP32 first. Naive code::

        for x in tensor.flatten().float():
            pattern = abs(x).view(torch.int32)
            row[ZERO if x == 0 else NAN if x.isnan() else pattern >> 23] += 1
            row[LARGEST] = max(row[LARGEST], pattern if x.isfinite() else 0)
    """
    if not tensor.numel():
        return
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    for block in tensor.as_strided((tensor.numel(),), (1,)).split(BLOCK):
        pattern = block.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
        fields = pattern >> 23
        if row.device.type == "cpu":
            row[: INFINITE + 1] += torch.bincount(fields, minlength=INFINITE + 1)
        else:  # bincount would wait for the device
            row.scatter_add_(0, fields.long(), torch.ones_like(fields, dtype=torch.int64))
        for field, bin, special in ((0, ZERO, pattern == 0), (INFINITE, NAN, pattern > _INFINITY)):
            number = special.sum()
            row[field] -= number
            row[bin] += number
        finite = torch.where(pattern < _INFINITY, pattern, 0)
        row[LARGEST] = torch.maximum(row[LARGEST], finite.max())


class _Key(NamedTuple):
    """The row of a record that a tensor counts into; the fields are `RangeRow`'s."""

    module: str
    what: str
    name: str
    format: str


class ExponentRows:
    """Rows of counts by key, in order of first appearance, on the devices where the tensors are."""

    def __init__(self) -> None:
        self._rows: dict[tuple[_Key, torch.device], Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, module: str, what: str, tensor: Tensor, *, name: str = "", format: str = "") -> None:
        """Count any tensor's floating elements, without waiting for the device; `format` is by default its own."""
        numbers = _numbers(tensor)
        if numbers is None:
            return
        device = numbers.device
        key = _Key(module, what, name, format or name_of(numbers.dtype)), device
        if key not in self._rows:  # autograd has a thread for each device
            self._rows.setdefault(key, torch.zeros(WORDS, dtype=torch.int64, device=device))
        count(numbers, self._rows[key])

    def take(self, other: ExponentRows) -> None:
        """Take over the rows of another, whose keys are none of these."""
        self._rows.update(other._rows)

    def read(self, shifts: dict[str, int]) -> list[RangeRow]:
        """Let go of the rows, and return each shifted by the exponents given for its `what`. Waits for the devices."""
        every, self._rows = self._rows, {}
        found: dict[_Key, Histogram] = {}
        for device in {device for _, device in every}:
            rows = {key: row for (key, place), row in every.items() if place == device}
            counted = torch.stack(list(rows.values())).cpu().numpy()
            largest = counted[:, LARGEST].astype(np.int32).view(np.float32)
            for key, words, size in zip(rows, counted, largest.tolist()):
                one = Histogram.from_bins(words[:BINS].tolist(), size)
                shift = shifts.get(key.what, 0)
                if shift and one.counts:
                    one = replace(one, lowest=one.lowest + shift, largest=math.ldexp(size, shift))
                found[key] = found[key].plus(one) if key in found else one
        keys = dict.fromkeys(key for key, _ in every)
        return [RangeRow(key.module, key.what, key.format, found[key], key.name) for key in keys]


def _numbers(tensor: Tensor) -> Tensor | None:
    """The strided floating tensor with a tensor's numbers on this rank; None where there is none."""
    if type(tensor) not in PLAIN:
        tensor = distributed.local(tensor)
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided and hasattr(tensor, "values"):  # compressed, or nested and jagged
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    if tensor.is_meta or torch.func.debug_unwrap(tensor) is not tensor:
        return None
    return tensor.resolve_neg()


class WatchedOutputs:
    """Counts outputs of modules and their gradients for one update, by hooks that exist only until `end`.

    `distinct`: what several modules return counts for the innermost alone.
    """

    def __init__(self, *, distinct: bool = False) -> None:
        self._distinct = distinct
        self._passes = 0
        self.rows = ExponentRows()
        self._counted: Any = WeakTensorKeyDictionary()  # tensor -> its version then
        self._hooks = ExitStack()
        self._hooked: set[int] = set()
        self._calling: ref[nn.Module] | None = None  # the model whose call is running
        self._root: str | None = None  # the path that its own output counts for
        self.backward = 0  # number of the backward pass that is being counted; 0: none is

    def call_begins(self, model: nn.Module, paths: dict[str, nn.Module], prefix: str = "") -> None:
        """A model's call that counts begins. Paths in rows begin with the prefix."""
        self._calling, self.backward = ref(model), 0
        self._root = prefix if paths.get("") is model else None
        for path, module in paths.items():
            if id(module) not in self._hooked and module is not model:
                self._hooked.add(id(module))
                hook = partial(self._returned, joined(prefix, path))
                self._hooks.enter_context(module.register_forward_hook(hook))

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """A call has ended, perhaps one whose beginning was not reported."""
        if self._calling is not None and self._calling() is model and self._root is not None:
            self._count(self._root, output)
        self._calling = None

    def backward_begins(self) -> None:
        """Gradients count from here until `backward` is set to 0."""
        self._calling = None
        self._passes += 1
        self.backward = self._passes

    def end(self) -> ExponentRows:
        """Take all hooks away; what was counted."""
        self._hooks.close()
        return self.rows

    def _returned(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # A call that raised has no end, and evaluation may follow it.
        model = None if self._calling is None else self._calling()
        counts = model is not None and model.training and _graph_task() == -1
        if counts or (self.backward and _graph_task() != -1):
            self._count(path, output)

    def _count(self, path: str, output: Any) -> None:
        repeats = _graph_task() != -1
        for tensor in {id(tensor): tensor for tensor in tensors(output)}.values():
            # A parameter was not computed; and to detach one makes a context forget its casts.
            if isinstance(tensor, nn.Parameter) or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if self._distinct:
                known, version = self._counted.get(tensor), version_of(tensor)
                self._counted[tensor] = version
                if known == version:  # a module has returned this tensor, as it is now
                    continue
            if not repeats:
                self.rows.add(path, ACTIVATION, tensor)
            if tensor.requires_grad and torch.func.debug_unwrap(tensor) is tensor:
                self._hooks.enter_context(tensor.register_hook(self._gradient_hook(path)))

    def _gradient_hook(self, path: str) -> Any:
        counted = 0

        def hook(gradient: Tensor | None) -> None:
            nonlocal counted
            # Once for each backward pass that counts: gradient release may run one graph twice, and a penalty's own
            # torch.autograd.grad is not a backward of the loss.
            if gradient is not None and self.backward and counted != self.backward:
                counted = self.backward
                self.rows.add(path, ACTIVATION_GRADIENT, gradient)

        return hook


class WatchedParameters:
    """Counts weights (or their FP32 masters), gradients and update ratios of one optimizer in one update."""

    def __init__(self, optimizer: Optimizer, names: dict[int, tuple[str, str]], ratios: bool) -> None:
        self._optimizer, self._names, self._ratios = optimizer, names, ratios
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: set[int] = set()
        self._hooks = ExitStack()
        self._owners = master_state._owners(optimizer)
        owners = {id(owner): owner for owner in self._owners.values()}.values()
        groups = [group for owner in owners for group in owner.param_groups]
        self._without = {id(p) for group in groups if group.get("masters") == "none" for p in group["params"]}
        self.rows = ExponentRows()

    def before(self, params: Iterable[Tensor] | None = None) -> None:
        """Look at weights and gradients of all parameters, or of some whose gradients have just come."""
        for param in parameters(self._optimizer) if params is None else params:
            if id(param) in self._seen:
                continue
            self._seen.add(id(param))
            module, name = self._name(param)
            moves = param.grad is not None
            value = self._exact(param) if moves else distributed.local(param.detach())
            self.rows.add(module, WEIGHT, value, name=name, format=name_of(param.dtype))
            if param.grad is not None:
                self.rows.add(module, WEIGHT_GRADIENT, param.grad, name=name)
            if self._ratios and moves:
                self._before[id(param)] = param, value.clone()

    def before_each(self) -> None:
        """Look at each parameter as soon as its gradient is complete, before any hook that is put on it later."""
        for param in parameters(self._optimizer):
            if param.requires_grad:
                hook = lambda param: self.before([param])  # noqa: E731
                self._hooks.enter_context(param.register_post_accumulate_grad_hook(hook))

    def after(self) -> ExponentRows:
        """The ratios by which the parameters have moved."""
        rows = ExponentRows()
        for param, before in self._before.values():
            module, name = self._name(param)
            for ratio in ratios(before, self._exact(param)):
                rows.add(module, RATIO, ratio, name=name, format=name_of(before.dtype))
        return rows

    def end(self) -> None:
        """Let go of copies and hooks."""
        self._before.clear()
        self._hooks.close()

    def _name(self, param: Tensor) -> tuple[str, str]:
        if id(param) in self._names:
            return self._names[id(param)]
        place = next(i for i, one in enumerate(parameters(self._optimizer)) if one is param)
        return OUTSIDE, f"parameter {place}"

    def _exact(self, param: Tensor) -> Tensor:
        """The value in the optimizer's FP32 master or in itself."""
        has_master = param.dtype in SIXTEEN_BITS and id(param) not in self._without
        owner = self._owners.get(id(param)) if has_master else None
        value = param.detach()
        if isinstance(owner, FusedOptimizer) and not owner.state.get(param):
            # It has not moved yet. To ask for its master would give it a state, which a skipped step must not.
            value = wide_value(param)
        elif owner is not None:
            value = owner.master(param).detach()
        return distributed.local(value)


def ratios(before: Tensor, after: Tensor) -> Iterable[Tensor]:
    """``abs(after - before) / abs(before)``, in FP32 at least, by blocks; 0 where nothing moved, infinite from 0."""
    wide = torch.promote_types(before.dtype, torch.float32)
    old, new = before.reshape(-1), after.reshape(-1)
    for start in range(0, old.numel(), BLOCK):
        base = old[start : start + BLOCK].to(wide)
        moved = new[start : start + BLOCK].to(wide) - base
        still = moved == 0
        yield moved.abs().div_(base.abs()).masked_fill_(still, 0)
