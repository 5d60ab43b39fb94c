"""Which policy is in force here: a label that travels with autocast's own thread state.

A thread-local of ours would be lost where it matters: in the recomputation of a checkpoint, in the guards of
a compiled function, in the key of a compile cache. Autocast's state is carried through all of them, so the
label is written there: as the autocast switch and dtype of backends that this machine does not have. No
tensor lives on such a backend, so no op is touched; Dynamo compares the switch and the dtype of *every*
device type before it reuses a graph, and AOTAutograd puts them into its cache key.

A label is a number written in base 3, one digit a device: off, bfloat16, float16 (the dtypes that
`torch.autocast` takes without complaint, which matters where Dynamo replays it). The first device's digit is
never zero, so "no label" costs one question. Most processes know one or two policies and use one digit. A
label stands for one *binding*: the policy in force on each device type. It is never given to another binding,
since a compiled graph may still be guarded by it.

Nothing else in Mezzo reads or writes the label. Where it can't be carried (a thread that enters
`torch.autocast` itself, `torch.amp.custom_bwd`, DataParallel's replicas), no policy is in force and PyTorch's
own table applies.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.core.policy import Policy
from mezzo.pytorch.autocast import recompute
from mezzo.pytorch.hardware import ASSUME_NATIVE, leaves_autocast_off, native_formats

Binding = tuple[tuple[str, Policy], ...]

# In the order in which they are used; what this machine really has is left out.
_CANDIDATES = ("maia", "ipu", "hpu", "mtia", "xpu", "mps")
LABEL_DEVICE = _CANDIDATES[0]  # on in every region of ours, and nowhere else
_DTYPES = (None, torch.bfloat16, torch.float16)

_lock = threading.RLock()
_bindings: dict[int, Binding] = {0: ()}
# Keyed by what `MEZZO_ASSUME_NATIVE` said too: a policy installed for other native formats is another one.
_labels: dict[tuple[Binding, bytes | str | None], int] = {((), None): 0}
_states: dict[int, tuple[tuple[str, torch.dtype | None], ...]] = {}
_successors: dict[tuple[int, str, Policy | None, bytes | str | None], int] = {}
_devices: tuple[str, ...] = ()
_resting: dict[str, torch.dtype] = {}  # the dtype of each device's autocast where it is off
_ways: list[Way] = []
_digits = 1

# What `MEZZO_ASSUME_NATIVE` says, read at each context from `os.environ`'s own table of bytes where there is one
# (POSIX): `os.environ.get` would be a third of the context's time.
_raw_environment: dict[bytes, bytes] | None = (
    getattr(os.environ, "_data", None) if os.name == "posix" else None
)
native_key: Callable[[], bytes | str | None] = (
    functools.partial(os.environ.get, ASSUME_NATIVE)
    if _raw_environment is None
    else functools.partial(_raw_environment.get, os.fsencode(ASSUME_NATIVE))
)

_is_enabled = torch.is_autocast_enabled
_get_dtype = torch.get_autocast_dtype
_set_enabled = torch.set_autocast_enabled
_set_dtype = torch.set_autocast_dtype


def label_devices() -> tuple[str, ...]:
    """The absent backends that carry the label, most significant use first. Asked once, at the first
    region."""
    global _devices
    if not _devices:
        accelerator = torch.accelerator.current_accelerator()
        present = {"" if accelerator is None else accelerator.type}
        known = set(torch._C._autocast_supported_devices())
        _resting.update({name: _get_dtype(name) for name in _CANDIDATES if name in known})
        _devices = tuple(name for name in _CANDIDATES if name in known and name not in present)
    return _devices


def label() -> int:
    """The label in force in this thread; 0 for none."""
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


def set_label(code: int) -> None:
    """Write a label into this thread's autocast state, as it was read by `label`.

    A switch that is off keeps the dtype that every thread begins with, so that turning it on may need no dtype.
    """
    settings = _states.get(code, ())
    if len(settings) != _digits:  # unknown so far, or made when labels had fewer digits
        settings = label_state(code)
    for device, dtype in settings:
        _set_enabled(device, dtype is not None)
        _set_dtype(device, dtype or _resting[device])


def label_state(code: int) -> tuple[tuple[str, torch.dtype | None], ...]:
    """The label as autocast settings: the dtype, or None for off, of each device that labels use so far."""
    settings = []
    rest = code
    for device in _devices[:_digits]:
        rest, digit = divmod(rest, 3)
        settings.append((device, _DTYPES[digit]))
    _states[code] = tuple(settings)
    return tuple(settings)


def binding_of(code: int) -> Binding:
    """The binding for which a label stands; () for 0 and for a label that is not ours."""
    return _bindings.get(code, ())


def current_policy(device_type: str = "cpu") -> Policy | None:
    """The policy in force in this thread for ops on `device_type`, or None.

    A region that `torch.autocast` opened inside Mezzo's with another dtype is a region without a policy:
    there PyTorch's own table applies.
    """
    for device, policy in binding_of(label()):
        if device == device_type:
            return policy if _dtype_agrees(policy, device_type) else None
    return None


def successor(code: int, device_type: str, policy: Policy | None) -> int:
    """The label after `policy` (None: no policy) is bound to `device_type` in a region whose label is
    `code`."""
    key = (code, device_type, policy, native_key())
    found = _successors.get(key)
    if found is None:
        rest = tuple(pair for pair in binding_of(code) if pair[0] != device_type)
        binding = tuple(
            sorted((*rest, *(((device_type, policy),) if policy else ())), key=lambda pair: pair[0])
        )
        found = _label_for(binding)
        _successors[key] = found
    return found


class Way:
    """From one label to another and back, as the fewest autocast settings that say so.

    ``enter()`` writes the label inside into this thread's autocast state, which holds the one outside; ``leave()``
    writes the one outside again.

    Args:
        before: the label outside.
        code: the label inside.
        recomputes: whether some outputs are not kept for backward inside.
    """

    __slots__ = ("_recomputes", "before", "code", "enter", "is_outermost", "leave")

    def __init__(self, before: int, code: int, recomputes: bool = False) -> None:
        self._recomputes = recomputes
        self.before = before
        self.code = code
        self.is_outermost = bool(code) and not before
        self.work_out()
        _ways.append(self)

    def work_out(self) -> None:
        """Compare both labels digit by digit; again whenever labels have got another digit."""
        pairs = [
            (device, outside, inside)
            for (device, outside), (_, inside) in zip(label_state(self.before), label_state(self.code))
            if outside is not inside
        ]
        inside = [(device, *_step(device, outer, inner)) for device, outer, inner in pairs]
        outside = [(device, *_step(device, inner, outer)) for device, outer, inner in pairs]
        self.enter = _writing(inside, recompute.push if self._recomputes else None)
        self.leave = _writing(outside, recompute.pop if self._recomputes else None)


def _writing(
    settings: list[tuple[str, bool, torch.dtype | None]], also: Callable[[], None] | None
) -> Callable[[], None]:
    """What writes (device, on, dtype or None for the one that is there) into this thread's autocast state."""
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


def way(before: int, device_type: str, policy: Policy | None) -> Way:
    """The way from a region whose label is `before` into one in which `policy` rules `device_type`."""
    return Way(before, successor(before, device_type, policy), bool(policy and policy.recomputed))


def _step(
    device: str, held: torch.dtype | None, wanted: torch.dtype | None
) -> tuple[bool, torch.dtype | None]:
    """Whether a device's switch is then on, and the dtype to be written; None if it is there already."""
    resting = _resting[device]
    written = wanted or resting
    return wanted is not None, None if written is (held or resting) else written


@contextmanager
def rebound(code: int) -> Iterator[None]:
    """A region in which the label is `code`: for recomputation, which must see what the forward saw."""
    before = label()
    set_label(code)
    try:
        yield
    finally:
        set_label(before)


def _dtype_agrees(policy: Policy, device_type: str) -> bool:
    from mezzo.pytorch.dtypes import dtype_of

    off = leaves_autocast_off(policy, device_type)
    if off or not _is_enabled(device_type):
        return off and not _is_enabled(device_type)

    return _get_dtype(device_type) is dtype_of(policy.activations)


def _label_for(binding: Binding) -> int:
    global _digits
    from mezzo.pytorch.autocast.dispatch import install

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
                f"mezzo.autocast: this process has used {len(_labels) - 1} different policies, and the labels of "
                f"{len(devices)} absent autocast backends ({', '.join(devices)}) can tell no more apart. Reuse "
                "policy values, or run further policies in a new process."
            )
        for device_type, policy in binding:
            install(code, device_type, policy)  # what must be in place before the label is first used
        _labels[key] = code
        _bindings[code] = binding
        if 3**_digits <= code:
            while 3**_digits <= code:
                _digits += 1
            for known in _ways:
                known.work_out()
        return code


def fingerprint() -> str:
    """Of what each label of this process means, in the order of their making: see `compiling`."""
    content = "|".join(
        f"{code}:{assumed!r}:" + ",".join(f"{device}={policy.fingerprint()}" for device, policy in binding)
        for (binding, assumed), code in sorted(_labels.items(), key=lambda item: item[1])
    )
    content += "|" + ",".join(_devices) + "|" + _environment()
    return f"mezzo:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _environment() -> str:
    from mezzo import __version__

    native = "".join(f"{name}:{sorted(native_formats(name))};" for name in ("cpu", "cuda"))
    return f"{__version__}|{native}"
