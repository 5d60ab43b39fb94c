"""Which policy is active: a number in base 3 that travels with autocast's own thread state (docs/dev/architecture.md).

Each digit is the autocast switch and dtype of a backend that this computer lacks: off, bfloat16, float16 (the dtypes
that `torch.autocast` takes without complaint). The first is never off, so "no label" costs one query. A label stands
for one binding, the policy of each device type, and is never reused, since a compiled graph may be guarded by it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mezzo import __version__
from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.core.policy import Policy
from mezzo.pytorch.autocast import recompute
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.hardware import ASSUME_NATIVE, leaves_autocast_off, native_formats

Binding = tuple[tuple[str, Policy], ...]

# In the order in which they are used; what this computer has is left out.
_CANDIDATES = ("maia", "ipu", "hpu", "mtia", "xpu", "mps")
LABEL_DEVICE = _CANDIDATES[0]  # on in every context of ours, and nowhere else
_DTYPES = (None, torch.bfloat16, torch.float16)

_lock = threading.RLock()
_bindings: dict[int, Binding] = {0: ()}
# The keys contain `MEZZO_ASSUME_NATIVE`: a policy installed for other native formats is another one.
_labels: dict[tuple[Binding, bytes | str | None], int] = {((), None): 0}
_devices: tuple[str, ...] = ()
_resting: dict[str, torch.dtype] = {}  # the dtype of each device's autocast while it is off
_digits = 1

# `MEZZO_ASSUME_NATIVE` is read at each context: `os.environ.get` would be a third of the context's time.
_raw_environment: dict[bytes, bytes] | None = (
    getattr(os.environ, "_data", None) if os.name == "posix" else None
)
native_key: Callable[[], bytes | str | None] = (
    functools.partial(os.environ.get, ASSUME_NATIVE)
    if _raw_environment is None
    else functools.partial(_raw_environment.get, os.fsencode(ASSUME_NATIVE))
)

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype


def label_devices() -> tuple[str, ...]:
    """The absent backends that carry the label, least significant digit first. Determined at the first context."""
    global _devices
    if not _devices:
        accelerator = torch.accelerator.current_accelerator()
        present = "" if accelerator is None else accelerator.type
        known = [name for name in _CANDIDATES if torch.amp.is_autocast_available(name)]
        _resting.update({name: _get_dtype(name) for name in known})
        _devices = tuple(name for name in known if name != present)
    return _devices


def label() -> int:
    """The label of this thread; 0 for none."""
    if not _devices or not _is_enabled(_devices[0]):
        return 0
    code = 1 if _get_dtype(_devices[0]) is torch.bfloat16 else 2
    if _digits > 1:
        weight = 3
        for device in _devices[1:_digits]:
            if _is_enabled(device):
                code += weight * (1 if _get_dtype(device) is torch.bfloat16 else 2)
            weight *= 3
    return code


@contextmanager
def rebound(code: int) -> Iterator[None]:
    """A context in which the label is `code`: recomputation must run under the policy of the forward pass."""
    before = label()
    _set_label(code)
    try:
        yield
    finally:
        _set_label(before)


def _set_label(code: int) -> None:
    for device, dtype in label_state(code):
        _set_enabled(device, dtype is not None)
        _set_dtype(device, dtype or _resting[device])


def label_state(code: int) -> tuple[tuple[str, torch.dtype | None], ...]:
    """The label as autocast settings: the dtype, or None for off, of each device that labels use so far."""
    settings = []
    rest = code
    for device in _devices[:_digits]:
        rest, digit = divmod(rest, 3)
        settings.append((device, _DTYPES[digit]))
    return tuple(settings)


def binding_of(code: int) -> Binding:
    """The binding of a label; () for 0 and for a label that is not ours."""
    return _bindings.get(code, ())


def current_policy(device_type: str = "cpu") -> Policy | None:
    """The policy active in this thread for ops on `device_type`, or None.

    None also in a `torch.autocast` context inside Mezzo's that has another dtype: PyTorch's own table applies there.
    """
    policy = dict(binding_of(label())).get(device_type)
    if policy is None:
        return None
    enabled = _is_enabled(device_type)
    if leaves_autocast_off(policy, device_type):
        return None if enabled else policy
    return policy if enabled and _get_dtype(device_type) is dtype_of(policy.activations) else None


def belongs(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a `torch.autocast` is part of a context of Mezzo as compiled code replays it: the label comes first."""
    if device_type in label_devices():
        return True
    policy = dict(binding_of(label())).get(device_type)
    return policy is not None and dtype is dtype_of(policy.activations)


def successor(outside: int, device_type: str, policy: Policy | None) -> int:
    """The label after `policy` (None: no policy) is bound to `device_type` where the label is `outside`."""
    global _digits
    from mezzo.pytorch.autocast.dispatch import install

    bound = dict(binding_of(outside)) | {device_type: policy}
    binding = tuple((device, each) for device in sorted(bound) if (each := bound[device]) is not None)
    if not binding:
        return 0
    key = (binding, native_key())
    with _lock:
        found = _labels.get(key)
        if found is not None:
            return found
        devices = label_devices()
        code = max(_bindings) + 1
        if code % 3 == 0:
            code += 1
        if code >= 3 ** len(devices):
            raise UnsupportedPrecisionError(
                f"mezzo.autocast: this process has used {len(_labels) - 1} different policies, the most that it can "
                f"distinguish with the {len(devices)} absent autocast backends ({', '.join(devices)}). Use fewer "
                "policies, or run further ones in a new process."
            )
        for device, its in binding:
            install(code, device, its)  # before the label is first used
        _labels[key] = code
        _bindings[code] = binding
        while 3**_digits <= code:
            _digits += 1
        return code


class Transition(NamedTuple):
    """Functions that write one label and then the one outside; `is_outermost` if there is none outside."""

    enter: Callable[[], None]
    leave: Callable[[], None]
    is_outermost: bool


def transition(before: int, device_type: str, policy: Policy | None) -> Transition:
    """The transition from a context whose label is `before` into one in which `policy` applies to `device_type`."""
    code = successor(before, device_type, policy)
    changes = [
        (device, outer, inner)
        for (device, outer), (_, inner) in zip(label_state(before), label_state(code))
        if outer is not inner
    ]
    push, pop = (recompute.push, recompute.pop) if policy and policy.recomputed else (None, None)
    return Transition(
        enter=_writer(changes, push),
        leave=_writer([(d, inner, outer) for d, outer, inner in changes], pop),
        is_outermost=bool(code) and not before,
    )


def is_by_parts(code: int) -> bool:
    """Whether under a label a layer inside another one may have a format of its own."""
    return any(policy.is_by_parts for _, policy in binding_of(code))


def _writer(
    changes: list[tuple[str, torch.dtype | None, torch.dtype | None]], also: Callable[[], None] | None
) -> Callable[[], None]:
    """A function that changes each device from one dtype to another (None for off) in this thread's autocast state."""
    # A switch that is off keeps the dtype that every thread begins with, so turning it on often needs no dtype.
    settings: list[tuple[str, bool, torch.dtype | None]] = []
    for device, old, new in changes:
        resting = _resting[device]
        dtype = None if (new or resting) is (old or resting) else new or resting
        settings.append((device, new is not None, dtype))
    if len(settings) == 1 and settings[0][2] is None and also is None:
        return functools.partial(_set_enabled, *settings[0][:2])  # the usual case, without Python

    def write() -> None:
        for device, on, dtype in settings:
            _set_enabled(device, on)
            if dtype is not None:
                _set_dtype(device, dtype)
        if also is not None:
            also()

    return write


def fingerprint() -> str:
    """A hash of what each label of this process means, for the tag of compile caches."""
    labels = "|".join(
        f"{code}:{assumed!r}:" + ",".join(f"{device}={policy.fingerprint()}" for device, policy in binding)
        for (binding, assumed), code in sorted(_labels.items(), key=lambda item: item[1])
    )
    native = "".join(f"{name}:{sorted(native_formats(name))};" for name in ("cpu", "cuda"))
    content = "|".join((labels, ",".join(_devices), __version__, native))
    return f"mezzo:{hashlib.sha256(content.encode()).hexdigest()[:16]}"
