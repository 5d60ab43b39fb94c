"""Save and restore what training changes: parameters, gradients, buffers, optimizer state, attributes, random state.

A restore writes into the saved tensor, so that optimizers, tied layers and captured graphs keep theirs, and does not
raise its version counter, so that graphs which saved it can still run backward.
"""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.plain import is_dense
from mezzo.pytorch.nested import mapped

_SERIALS = itertools.count()


class Snapshot:
    """A whole training now, for code that runs trial steps; `others` are optimizers, schedulers, scalers.

    Tensors are kept as NumPy arrays, which a count of tensor bytes does not see.
    """

    def __init__(self, models: Iterable[nn.Module] = (), others: Iterable[Any] = ()) -> None:
        models, others = list(models), list(others)
        for other in others:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise UsageError(
                    f"a {type(other).__name__} cannot be saved and restored: it lacks state_dict or load_state_dict."
                )
        self._modes = {module: module.training for model in models for module in model.modules()}
        parameters = [parameter for model in models for parameter in model.parameters()]
        buffers = [buffer for model in models for buffer in model.buffers()]
        self._tensors = list(map(_HostCopy, (*parameters, *buffers)))
        self._gradients = [(p, None if p.grad is None else _HostCopy(p.grad)) for p in parameters]
        # torch's own load_state_dict casts states to the parameter's dtype, so its optimizers are restored by hand.
        self._plain = [(one, _state_of(one)) for one in others if _is_plain_optimizer(one)]
        self._loaded = [
            (one, mapped(one.state_dict(), _HostCopy)) for one in others if not _is_plain_optimizer(one)
        ]
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        self._random = RandomState.now(tuple(torch.device("cuda", index) for index in gpus))

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back. May be called again."""
        for saved in self._tensors:
            saved.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.put_back()
        for module, mode in self._modes.items():
            module.training = mode
        for optimizer, (groups, state) in self._plain:
            for group, settings in zip(optimizer.param_groups, groups):
                group.update(mapped(settings, _HostCopy.put_back, _HostCopy))
            optimizer.state.clear()
            for key, entries in state.items():
                optimizer.state[key] = mapped(entries, _HostCopy.put_back, _HostCopy)
        for other, saved in self._loaded:
            other.load_state_dict(mapped(saved, _HostCopy.anew, _HostCopy))
        self._random.put_back()


class _HostCopy:
    """A tensor, and its bytes on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, keeping_versions((tensor,))
        self._like = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._bytes = np.array(_bytes(tensor.cpu()).numpy())

    def put_back(self) -> Tensor:
        """The same tensor, with the values that it had."""
        with self._version:
            self._tensor.detach().copy_(self._values())
        return self._tensor

    def anew(self) -> Tensor:
        """Another tensor with those values, of the same strides and device."""
        return torch.empty_like(self._like, device=self._tensor.device).copy_(self._values())

    def _values(self) -> Tensor:
        return torch.from_numpy(self._bytes).view(self._like.dtype).view(self._like.shape)


def _is_plain_optimizer(one: Any) -> bool:
    """Whether torch's own `load_state_dict` loads it, so that all its state is in `state` and groups."""
    return isinstance(one, Optimizer) and type(one).load_state_dict is Optimizer.load_state_dict


def _state_of(optimizer: Optimizer) -> tuple[list[Any], dict[Any, Any]]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return mapped(groups, _HostCopy), {
        k: mapped(entries, _HostCopy) for k, entries in optimizer.state.items()
    }


class OptimizerSnapshot:
    """Parameters and state of one optimizer, copied on their device, for a step with a closure.

    Lists in its state (LBFGS's history) are copied only as lists: their tensors are never written to.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._params = [(param, param.detach().clone(), keeping_versions((param,))) for param in params]
        self._state = {
            param: {
                name: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
                for name, value in entries.items()
            }
            for param, entries in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back. Once only: the state's copies become the state."""
        for param, values, version in self._params:
            with version:
                param.detach().copy_(values)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


@dataclass(eq=False)
class BufferSlot:
    """Where a buffer is registered."""

    path: str  # in the model
    holder: dict[str, Tensor | None]  # the module's own buffers
    name: str  # key in `holder`
    norm: weakref.ref[Any] | None  # the layer whose running statistic it is
    learning: int = 0  # steps to come after which it is compared, to find out whether it moves
    moves: bool = True  # whether it has, or need not be compared
    still: tuple[int, int] | None = None  # its version when that was decided, if it has not

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that is registered now."""
        return self.holder[self.name] if self.name in self.holder else None  # noqa: SIM401, a scripted module's have no get

    @property
    def version(self) -> tuple[int, int]:
        """Which tensor is registered, and its version counter: other values after most writes."""
        tensor = self.tensor
        return id(tensor), -1 if tensor is None else version_of(tensor)

    @property
    def is_due(self) -> bool:
        """Whether a forward pass may change it; a normalization layer's flags say so."""
        if self.norm is None:
            if self.still is not None and self.still != self.version:
                self.still = None
            return self.still is None
        layer = self.norm()
        return layer is not None and layer.training and layer.track_running_stats


class SavedBuffer(NamedTuple):
    """One buffer at one moment. `values` is a copy; None where there were none (a lazy buffer)."""

    slot: BufferSlot
    tensor: Tensor | None
    values: Tensor | None

    @classmethod
    def of(cls, slot: BufferSlot) -> SavedBuffer:
        """The buffer as it is now."""
        tensor = slot.tensor
        return cls(slot, tensor, None if tensor is None or is_lazy(tensor) else tensor.detach().clone())

    def moved(self) -> bool:
        """Whether another tensor is there, or other bits; waits for the device."""
        now = self.slot.tensor
        if now is None or self.values is None or now is not self.tensor:
            return now is not self.tensor or self.tensor is not None
        return not torch.equal(_bytes(now), _bytes(self.values))

    def put_back(self) -> None:
        """Make the buffer what it was. A graph that holds it keeps the values that it saw."""
        slot, tensor = self.slot, self.tensor
        if tensor is not None and self.values is not None:
            # BatchNorm's backward in training mode does not use the running statistics that its graph holds.
            if slot.norm is None and tensor._use_count() > 1:  # type: ignore[attr-defined]
                slot.holder[slot.name] = self.values.clone()
                return
            if not overlaps(tensor):  # nothing can have written into one that does
                with keeping_versions((tensor,)):
                    tensor.copy_(self.values)
        elif tensor is not None and slot.norm is not None:
            layer = slot.norm()
            if layer is not None and not is_lazy(tensor):  # it was, before its first input
                layer.reset_running_stats()
            return
        slot.holder[slot.name] = tensor

    def restore_lost(self) -> bool:
        """Put it back if more of its elements are NaN or infinite now than were; whether they are."""
        now = self.slot.tensor
        if self.values is None or now is None or now.dtype.itemsize == 1:
            return False
        if lost := _not_finite(now) > _not_finite(self.values):
            self.put_back()
        return lost


class _Group(NamedTuple):
    """Buffers of one dtype and device, copied as one flat tensor."""

    flat: Tensor
    slots: list[BufferSlot]
    tensors: list[Tensor]

    def saved(self) -> list[SavedBuffer]:
        return list(map(SavedBuffer, self.slots, self.tensors, _parts(self.flat, self.tensors)))

    def was_replaced(self) -> bool:
        """Whether another tensor is in one of the slots."""
        return any(slot.tensor is not tensor for slot, tensor in zip(self.slots, self.tensors))


class BufferSnapshot:
    """Buffers at one moment: all of one dtype and device in one flat tensor, so that a copy costs few launches."""

    def __init__(self, slots: Iterable[BufferSlot], single: Iterable[BufferSlot] = ()) -> None:
        self.serial = next(_SERIALS)
        self.single = [SavedBuffer.of(slot) for slot in single]
        self._groups: list[_Group] = []
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[BufferSlot], list[Tensor]]] = {}
        for slot in slots:
            tensor = slot.tensor
            if tensor is None or not _is_plain(tensor):
                self.single.append(SavedBuffer.of(slot))
            else:
                group = kinds.setdefault((tensor.device, tensor.dtype), ([], []))
                group[0].append(slot)
                group[1].append(tensor)
        with torch.no_grad():
            self._groups = [_Group(_flat(tensors), some, tensors) for some, tensors in kinds.values()]

    def __iter__(self) -> Iterator[SavedBuffer]:
        yield from self.single
        for group in self._groups:
            yield from group.saved()

    def put_back(self, found_inf: Tensor | bool = True) -> None:
        """Restore the buffers where `found_inf` is not 0; waits for it only if some were replaced or copied singly."""
        by_device = not self.single and not any(group.was_replaced() for group in self._groups)
        if by_device and isinstance(found_inf, Tensor):
            for flat, _, tensors in self._groups:
                restored = torch.where(
                    found_inf.to(flat.device, non_blocking=True) != 0, flat, _flat(tensors)
                )
                with keeping_versions(tensors):
                    torch.split_with_sizes_copy(restored, _sizes(tensors), out=_memory(tensors))
        elif bool(found_inf):
            for each in self:
                if each.moved():
                    each.put_back()

    def restore_lost(self) -> bool:
        """Put back those with more NaN or infinite elements than before; whether any were. Waits for the device."""
        lost = [each.restore_lost() for each in self.single]
        for group in self._groups:
            if group.was_replaced() or _not_finite(_flat(group.tensors)) > _not_finite(group.flat):
                lost += [each.restore_lost() for each in group.saved()]
        return any(lost)

    def moved(self) -> bool:
        """Whether a buffer has other bits than it had. Waits for the device."""
        return any(each.moved() for each in self.single) or any(
            group.was_replaced() or not torch.equal(_bytes(_flat(group.tensors)), _bytes(group.flat))
            for group in self._groups
        )

    def named(self) -> dict[str, Tensor]:
        """Name of a buffer -> its copy."""
        return {each.slot.path: each.values for each in self if each.values is not None}


def version_of(tensor: Tensor) -> int:
    """The number of writes in place; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def keeping_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """After it these tensors have the version counters of now, so graphs that saved one still run backward."""
    return _unsafe_preserve_version_counter(tuple(one for one in tensors if not one.is_inference()))


def _is_plain(tensor: Tensor) -> bool:
    """Whether it can be part of a flat tensor."""
    if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return is_dense(tensor) and (tensor.dtype.itemsize > 1 or not tensor.dtype.is_floating_point)


def has_running_statistics(module: nn.Module) -> bool:
    """Whether it is a normalization that may keep running statistics: of batches, or of instances."""
    return "track_running_stats" in vars(module) and hasattr(type(module), "reset_running_stats")


def overlaps(tensor: Tensor) -> bool:
    """Whether several of its elements are one number in memory, as in an expanded tensor: PyTorch refuses writes."""
    spread = tensor.layout is torch.strided and not tensor.is_contiguous()
    return spread and any(not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape))


def _not_finite(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.isfinite().sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sizes(tensors: list[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _memory(tensors: list[Tensor]) -> list[Tensor]:
    """The elements of each dense tensor in memory order."""
    return [one.view(-1) if one.is_contiguous() else one.as_strided((one.numel(),), (1,)) for one in tensors]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat(_memory(tensors))


def _parts(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    pairs = zip(flat.split(_sizes(like)), like)
    return [part.as_strided(tensor.shape, tensor.stride()) for part, tensor in pairs]


class RandomState(NamedTuple):
    """Which random numbers come next: PyTorch's on the CPU and on devices, `random`'s and NumPy's."""

    cpu: npt.NDArray[np.uint8]
    devices: tuple[tuple[torch.device, npt.NDArray[np.uint8]], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: tuple[torch.device, ...] = (), *, pythons: bool = True) -> RandomState:
        """As it is now, with `devices` besides the CPU, and `random` and NumPy if `pythons` (20 times as slow)."""
        states = [(one, torch.get_device_module(one).get_rng_state(one).numpy().copy()) for one in devices]
        drawn = (random.getstate(), np.random.get_state()) if pythons else (None, None)
        return cls(torch.get_rng_state().numpy().copy(), tuple(states), *drawn)

    def put_back(self) -> None:
        """Let the random numbers go on from here."""
        torch.set_rng_state(torch.from_numpy(self.cpu))
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(torch.from_numpy(state), device)
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, about."""
        device_bytes = sum(state.nbytes for _, state in self.devices)
        return self.cpu.nbytes + device_bytes + (5_000 if self.python is not None else 0)

    def pythons_moved(self) -> bool:
        """Whether `random` or NumPy have drawn since."""
        if self.python is None:
            return False
        now: Any = np.random.get_state()
        same = bool(now[2] == self.numpy[2]) and bool((now[1] == self.numpy[1]).all())
        return not same or random.getstate() != self.python
