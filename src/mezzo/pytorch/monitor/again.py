"""Running a model's call again with nothing left behind: random numbers, buffers, attributes, hooks on leaves.

What is put back: the random state of PyTorch (of the CPU and the model's devices), of `random` and of NumPy; every
buffer, with its version; what modules keep in attributes. Compiled parts run eagerly, and reentrant
checkpoints as plain calls, because their backward can't be asked for single gradients.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from mezzo.pytorch.unseen import unseen

_VALUES = (int, float, bool, type(None), Tensor)
_CONTAINERS = (list, dict, set, deque)


def changeable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of what a call may change; nothing of `nn.Module`'s own, and no private containers."""
    for name, value in module.__dict__.items():
        if isinstance(value, _VALUES) and not isinstance(value, nn.Parameter):
            if name != "training":
                yield name, value
        elif (type(value) in _CONTAINERS and not name.startswith("_")) or _is_generator(value):
            yield name, value


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def copied(value: Any) -> Any:
    """What `put_back` needs to make a value what it is now."""
    if type(value) in _CONTAINERS:
        return value.copy()
    if isinstance(value, Tensor):
        return value.detach() if value.grad_fn is not None else value
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "get_state"):  # torch's, and NumPy's older ones
        return value.get_state()
    return value.bit_generator.state if hasattr(value, "bit_generator") else value


def put_back(module: nn.Module, name: str, was: Any, copy: Any) -> None:
    """Let an attribute be what it was, the same object with the same content."""
    module.__dict__[name] = was
    if type(was) in _CONTAINERS:
        was.clear()
        (was.extend if type(was) in (list, deque) else was.update)(copy)
    elif isinstance(was, random.Random):
        was.setstate(copy)
    elif hasattr(was, "set_state"):
        was.set_state(copy)
    elif hasattr(was, "bit_generator"):
        was.bit_generator.state = copy


def same(was: Any, copy: Any, now: Any) -> bool:
    """Whether an attribute still is, and holds, what it was."""
    if isinstance(now, Tensor):
        return isinstance(was, Tensor) and was.data_ptr() == now.data_ptr()
    if _is_generator(now):
        return False  # drawn from or not: its state is small
    if type(now) not in _CONTAINERS:
        return bool(was == now)
    if was is not now or len(copy) != len(now):
        return False
    if type(now) in (list, deque):
        return all(one is other for one, other in zip(copy, now))
    return all(one in now for one in copy)


_now = threading.local()


def running_again() -> bool:
    """Whether this thread is running a call again: who looks at training steps should look away."""
    return bool(getattr(_now, "again", False))


@dataclass(frozen=True)
class RandomState:
    """What random numbers will come next."""

    torch_cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: tuple[torch.device, ...] = (), *, pythons: bool = True) -> RandomState:
        """As it is now.

        Args:
            devices: those whose generators are kept beside the CPU's.
            pythons: keep those of `random` and NumPy, which takes twenty times as long as PyTorch's.
        """
        numpy = sys.modules.get("numpy") if pythons else None
        return cls(
            torch.get_rng_state(),
            tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in devices),
            random.getstate() if pythons else None,
            None if numpy is None else numpy.random.get_state(),
        )

    def put_back(self) -> None:
        """Let the random numbers go on from here."""
        torch.set_rng_state(self.torch_cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, about."""
        return (
            self.torch_cpu.nbytes
            + sum(state.nbytes for _, state in self.devices)
            + (5_000 if self.python is not None else 0)
        )

    def pythons_moved(self) -> bool:
        """Whether `random` or NumPy have drawn since."""
        if self.python is None:
            return False
        moved = bool(random.getstate() != self.python)
        if self.numpy is not None:
            _, keys, place, *_ = sys.modules["numpy"].random.get_state()
            moved |= bool(place != self.numpy[2]) or bool((keys != self.numpy[1]).any())
        return moved


def devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """The accelerators that a model's parameters and buffers are on."""
    found = {tensor.device for group in (model.parameters(), model.buffers()) for tensor in group}
    return tuple(sorted((d for d in found if d.type in ("cuda", "xpu", "mps")), key=str))


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """Run a model inside, and find everything as it was before afterwards."""
    state = RandomState.now(devices_of(model))
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modules = [
        (
            module,
            dict(module._buffers),
            dict(module.__dict__),
            [(name, value, copied(value)) for name, value in changeable(module)],
        )
        for module in model.modules()
    ]
    leaves = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    before = running_again()
    _now.again = True
    for leaf, _ in leaves:
        leaf._backward_hooks = None
    try:
        with unseen(model.buffers()):
            try:
                with eager(), _no_reentrant_checkpoint():
                    yield
            finally:
                for module, buffered, attributes, own in modules:
                    module._buffers.update(buffered)
                    for name in module.__dict__.keys() - attributes.keys():
                        del module.__dict__[name]
                    module.__dict__.update(attributes)
                    for name, was, copy in own:
                        put_back(module, name, was, copy)
                with torch.no_grad():
                    for buffer, copy in buffers:
                        buffer.copy_(copy)
    finally:
        _now.again = before
        for leaf, hooks in leaves:
            leaf._backward_hooks = hooks
        state.put_back()


def within_compiled() -> bool:
    """Whether a compiled function is being run, in a part of it that is not compiled."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


@contextmanager
def eager() -> Iterator[None]:
    """Compiled functions run as they were written."""
    if "torch._dynamo" not in sys.modules or within_compiled():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class _Plain:
    """In place of the autograd Function of reentrant checkpoints."""

    @staticmethod
    def apply(run: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return run(*args)


@contextmanager
def _no_reentrant_checkpoint() -> Iterator[None]:
    module: Any = torch_checkpoint
    before, module.CheckpointFunction = module.CheckpointFunction, _Plain
    try:
        yield
    finally:
        module.CheckpointFunction = before
