"""What training steps change, kept aside and put back to the bit: weights, optimizer state, random state.

Tensors are kept as NumPy arrays on the host, where a count of tensor bytes doesn't see them, and are written back into
the tensors that they came from, so that nobody who holds one (an optimizer, a tied layer, a captured graph)
holds an old one afterwards.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError


class Snapshot:
    """The state of models and of all that trains them, at the moment when it is made.

    Args:
        models: parameters, gradients, buffers (persistent or not), and training mode of every module.
        others: optimizers, schedulers, scalers, `MixedPrecision`: all that has `state_dict` and `load_state_dict`.

    Raises:
        UsageError: an object without them.
    """

    def __init__(self, models: Iterable[nn.Module] = (), others: Iterable[Any] = ()) -> None:
        models, others = list(models), list(others)
        for other in others:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise UsageError(
                    f"a {type(other).__name__} can't be restored: it has no state_dict and load_state_dict"
                )
        self._modes = {module: module.training for model in models for module in model.modules()}
        parameters = [parameter for model in models for parameter in model.parameters()]
        buffers = [buffer for model in models for buffer in model.buffers()]
        self._tensors = [_Kept(tensor) for tensor in (*parameters, *buffers)]
        self._gradients = [(p, None if p.grad is None else _Kept(p.grad)) for p in parameters]
        # torch's own load_state_dict casts states to the parameter's dtype, so its optimizers are put back by hand.
        self._plain = [(one, _state_of(one)) for one in others if _is_plain(one)]
        self._loaded = [(one, _keep(one.state_dict())) for one in others if not _is_plain(one)]
        self._random = RandomState.now(_gpus())

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back. May be called again."""
        for kept in self._tensors:
            kept.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.put_back()
        for module, mode in self._modes.items():
            module.training = mode
        for optimizer, (groups, state) in self._plain:
            for group, settings in zip(optimizer.param_groups, groups):
                group.update(_given(settings))
            optimizer.state.clear()
            for key, entries in state.items():
                optimizer.state[key] = _given(entries)
        for other, saved in self._loaded:
            other.load_state_dict(_given(saved, anew=True))
        self._random.put_back()


class _Kept:
    """A tensor's bytes, and the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = -1 if tensor.is_inference() else tensor._version
        self._like = torch.empty_like(tensor, device="meta", requires_grad=False)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._bytes = np.array(flat.numpy())

    def put_back(self) -> Tensor:
        """The same tensor, with the values that it had."""
        self._tensor.detach().copy_(self._values())
        if self._version >= 0:  # graphs that saved it then may still run backward
            torch._C._autograd._unsafe_set_version_counter((self._tensor,), (self._version,))
        return self._tensor

    def anew(self) -> Tensor:
        """Another tensor with those values, of the same strides and device."""
        return torch.empty_like(self._like, device=self._tensor.device).copy_(self._values())

    def _values(self) -> Tensor:
        return torch.from_numpy(self._bytes).view(self._like.dtype).view(self._like.shape)


def _is_plain(one: Any) -> bool:
    """Whether torch's own `load_state_dict` is what loads it, so that all its state is in `state` and groups."""
    return isinstance(one, Optimizer) and type(one).load_state_dict is Optimizer.load_state_dict


def _state_of(optimizer: Optimizer) -> tuple[list[Any], dict[Any, Any]]:
    groups = [_keep({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    return groups, {key: _keep(entries) for key, entries in optimizer.state.items()}


def _keep(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Kept(value)
    if isinstance(value, dict):
        return {key: _keep(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_keep(item) for item in value)
    return copy.deepcopy(value)


def _given(value: Any, *, anew: bool = False) -> Any:
    if isinstance(value, _Kept):
        return value.anew() if anew else value.put_back()
    if isinstance(value, dict):
        return {key: _given(item, anew=anew) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_given(item, anew=anew) for item in value)
    return copy.deepcopy(value)


def _gpus() -> tuple[torch.device, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return tuple(torch.device("cuda", index) for index in range(count))


@dataclass(frozen=True)
class RandomState:
    """Which random numbers come next: PyTorch's, of the CPU and of devices, those of `random` and NumPy's.

    As NumPy arrays: a tensor would be counted among those that a step keeps.
    """

    cpu: npt.NDArray[np.uint8]
    devices: tuple[tuple[torch.device, npt.NDArray[np.uint8]], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: tuple[torch.device, ...] = (), *, pythons: bool = True) -> RandomState:
        """As it is now.

        Args:
            devices: those whose generators are kept besides the CPU's.
            pythons: keep those of `random` and NumPy, which takes twenty times as long as PyTorch's.
        """
        of_devices = [(one, torch.get_device_module(one).get_rng_state(one)) for one in devices]
        return cls(
            torch.get_rng_state().numpy().copy(),
            tuple((device, state.numpy().copy()) for device, state in of_devices),
            random.getstate() if pythons else None,
            np.random.get_state() if pythons else None,
        )

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
        states = [self.cpu, *(state for _, state in self.devices)]
        return sum(state.nbytes for state in states) + (5_000 if self.python is not None else 0)

    def pythons_moved(self) -> bool:
        """Whether `random` or NumPy have drawn since."""
        if self.python is None:
            return False
        now: Any = np.random.get_state()
        same = bool(now[2] == self.numpy[2]) and bool((now[1] == self.numpy[1]).all())
        return not same or random.getstate() != self.python
