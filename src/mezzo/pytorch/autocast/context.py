"""`mezzo.autocast`: a context in which a policy is active.

A context is `torch.autocast`, plus a label that identifies the policy (`active_policy.py`), plus the kernels that
the policy's plan asks for (`dispatch.py`, registered once per policy). So everything that knows autocast knows this:
the weight-cast cache, `custom_fwd`, checkpointing, `torch.is_autocast_enabled()`.

Inside `torch.compile` a context is replayed as genuine `torch.autocast` objects, the only ones that Dynamo
puts into a graph: one for the device and one for each digit of the label. Elsewhere the thread's autocast state is
written by the functions that `torch.autocast` calls itself, in its order: what it checks each time it is made
(whether the device is there, whether the dtype goes with it) is asked once a policy, of a genuine one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from mezzo.core.errors import UsageError
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.pytorch.autocast import active_policy, compiling, patches
from mezzo.pytorch.autocast.plan import AUTOCAST_KEYS
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.hardware import leaves_autocast_off, switch_on_tf32
from mezzo.pytorch.kernels.unseen import unseen

__all__ = ["Context", "autocast"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class _Meaning:
    """What a policy asks for on a kind of device, worked out once: see `_meaning_of`."""

    policy: Policy | None  # the policy in force; None for a region without one
    enabled: bool  # whether autocast itself is on
    dtype: torch.dtype | None
    ways: dict[int, active_policy.Way] = field(
        default_factory=dict
    )  # label outside -> the way to the one inside
    checked: bool = False  # whether a genuine torch.autocast object has been made of it without complaint


_Outside = tuple[active_policy.Way, torch.autocast | None, bool, torch.dtype, bool | None]

_meanings: dict[tuple[Any, ...], _Meaning] = {}
_regions: dict[tuple[Any, ...], Context] = {}  # one object serves all who ask for the same

_get_ident = threading.get_ident
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_label, _native_key = active_policy.label, active_policy.native_key
_hold, _release = patches.hold, patches.release
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_grad_enabled = torch.is_grad_enabled
_is_cache_enabled, _set_cache_enabled = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_increment_nesting, _decrement_nesting = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_clear_cache = torch.clear_autocast_cache
_function_mode = torch._C._is_torch_function_mode_enabled
_FP32 = torch.float32  # the dtype of autocast under emulated TF32, which torch.autocast's own objects refuse


@unseen
def autocast(
    policy: str | os.PathLike[str] | Policy,
    device_type: str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> Context:
    """A region, as context manager or decorator, in which ops follow a policy.

    For ops whose rule is PyTorch's own it equals ``torch.autocast(device_type, dtype)``; each op on which the
    policy differs behaves as if its inputs had been cast by hand, the op run with autocast off, and its
    outputs cast as the plan (`mezzo.pytorch.autocast.dispatch.plan`) says. NaN, infinities and subnormals pass as in
    those casts. FP64 and integer tensors, ``out=`` variants and in-place ops are left alone, as by torch.

    Args:
        policy: a `Policy`, a short string (``"bf16"``, ``"fp16,op.softmax=lower"``), or the path of a TOML
            file. ``"fp32"`` is a region with autocast off. ``"auto"`` takes what this device has.
        device_type: ``"cpu"``, ``"cuda"``, ... Default: the accelerator of this machine, else ``"cpu"``.
        enabled: False for a region without autocast and without a policy, wherever it stands.
        cache_enabled: whether 16-bit copies of weights are kept until the outermost region ends (autocast's
            own cache; `mezzo.pytorch.autocast.patches` says when it is cleared). Default: as
            outside, but not where gradients aren't recorded, since there any op may write a weight.

    A region inside another takes its place until it ends; a thread that should compute in a policy enters it
    itself. One region object may be entered many times, nested, and by several threads.

    Raises:
        UnknownNameError, UsageError: the policy, or a device type that autocast does not know.
        UnsupportedPrecisionError: more different policies in this process than labels (hundreds).
        BannedOpError: from an op that the policy bans, when it meets a 16-bit input.
    """
    if _is_dynamo_compiling() and not _is_eager_only(policy, device_type, enabled):
        return cast("Context", _traced(policy, device_type, enabled, cache_enabled))
    key = (policy, device_type, enabled, cache_enabled, _native_key())
    found = _regions.get(key)
    if found is None:
        found = Context(policy, device_type, enabled, cache_enabled)
        if _is_lasting(policy):
            _regions[key] = found
    return found


class Context:
    """What `autocast` returns: enter it with ``with``, or put it above a function with ``@``.

    ``device_type`` is the device type whose ops it rules. Make it inside a function that is compiled, not
    outside: Dynamo can't enter an object that it did not see made, and breaks the graph there.
    """

    __slots__ = ("_cache_enabled", "_entered", "_meaning", "device_type")

    def __init__(
        self,
        policy: str | os.PathLike[str] | Policy,
        device_type: str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self.device_type = default_device_type() if device_type is None else device_type
        compiling.set_up()
        self._meaning = _meaning_of(policy, self.device_type, enabled)
        self._cache_enabled = cache_enabled
        # What each thread found outside, once for each time that it is inside.
        self._entered: dict[int, list[_Outside]] = {}

    @property
    def policy(self) -> Policy | None:
        """The policy, with ``auto`` resolved; None where the region is disabled."""
        return self._meaning.policy

    @unseen
    def __enter__(self) -> Context:
        if _is_dynamo_compiling():
            torch._dynamo.graph_break(msg="a Context that was made outside of what is compiled")
        meaning, device = self._meaning, self.device_type
        enabled, dtype = _is_enabled(device), _get_dtype(device)
        genuine: torch.autocast | None = None
        if meaning.dtype is not _FP32 and (not meaning.checked or _function_mode()):
            genuine = torch.autocast(device, meaning.dtype, meaning.enabled, self._cache_enabled)
        before = _label() if _increment_nesting() > 1 else 0
        way = meaning.ways.get(before)
        if way is None:
            try:
                way = meaning.ways[before] = active_policy.way(before, device, meaning.policy)
            except BaseException:
                _decrement_nesting()
                raise
        if genuine is not None:
            meaning.checked = genuine._enabled == meaning.enabled and device in AUTOCAST_KEYS
            if meaning.enabled and not genuine._enabled:
                # torch has said why (the device is absent). Without autocast there is no policy either.
                way = active_policy.way(before, device, None)
            genuine.__enter__()
        else:
            if enabled is not meaning.enabled:
                _set_enabled(device, meaning.enabled)
            if meaning.dtype is not None and meaning.dtype is not dtype:
                _set_dtype(device, meaning.dtype)
        cached = None
        if self._cache_enabled is not None or not _is_grad_enabled():
            cached = _is_cache_enabled()
            # Without gradients a weight could be written at any moment.
            _set_cache_enabled(bool(self._cache_enabled))
        way.enter()
        if way.is_outermost:
            _hold()
            if compiling.handler is not None:
                compiling.set_up()
        outside = (way, genuine, enabled, dtype, cached)
        try:
            self._entered[_get_ident()].append(outside)
        except KeyError:
            self._entered[_get_ident()] = [outside]
        return self

    @unseen
    def __exit__(self, *exc_info: object) -> None:
        way, genuine, enabled, dtype, cached = self._entered[_get_ident()].pop()
        device = self.device_type
        way.leave()
        if way.is_outermost:
            _release()
        if genuine is not None:
            genuine.__exit__(None, None, None)
        else:
            _set_enabled(device, enabled)
            _set_dtype(device, dtype)
        if cached is not None:
            _set_cache_enabled(cached)
        if _decrement_nesting() == 0:
            _clear_cache()

    def __call__(self, function: _Function) -> _Function:
        """The function, with a region of its own around each call."""
        if not callable(function):
            raise UsageError(
                f"mezzo.autocast(...)(function) needs a callable, received {type(function).__name__}. "
                "For a block of code write: with mezzo.autocast(...):"
            )
        policy, device_type, enabled, cache_enabled = (
            self.policy or "fp32",
            self.device_type,
            self.policy is not None,
            self._cache_enabled,
        )

        shared = Context(policy, device_type, enabled, cache_enabled)

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            if not _is_dynamo_compiling():
                with shared:
                    return function(*args, **kwargs)
            with autocast(policy, device_type, enabled, cache_enabled):
                return function(*args, **kwargs)

        return cast("_Function", in_region)

    def __repr__(self) -> str:
        return f"mezzo.autocast({str(self.policy) if self.policy else 'fp32'!r}, {self.device_type!r})"


@functools.cache
def default_device_type() -> str:
    """The type of the accelerator that this machine has and autocast knows, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        return str(accelerator.type)
    return "cpu"


def _meaning_of(policy: str | os.PathLike[str] | Policy, device_type: str, enabled: bool) -> _Meaning:
    """The policy resolved for a device: worked out once, but a file, which may change, is read each time."""
    key = (policy, device_type, enabled, _native_key())
    found = _meanings.get(key)
    if found is None:
        found = _work_out(policy, device_type, enabled)
        if _is_lasting(policy):
            _meanings[key] = found
    return found


def _is_eager_only(policy: Any, device_type: str | None, enabled: bool) -> bool:
    """Whether Dynamo can't replay the region: it puts genuine `torch.autocast` objects into a graph."""
    device = default_device_type() if device_type is None else device_type
    return _meaning_of(policy, device, enabled).dtype is _FP32


def _is_lasting(policy: object) -> bool:
    """Whether a policy means the same at every call: a file may change."""
    return isinstance(policy, (Policy, torch.dtype)) or (
        isinstance(policy, str) and not policy.endswith(".toml")
    )


def _work_out(policy: str | os.PathLike[str] | Policy, device_type: str, enabled: bool) -> _Meaning:
    known = torch._C._autocast_supported_devices()
    if device_type not in known:
        raise UsageError(
            f"mezzo.autocast: autocast knows no device type {device_type!r}. Use one of {', '.join(known)}."
        )
    if device_type in active_policy.label_devices():
        raise UsageError(f"mezzo.autocast: this machine has no {device_type!r} device.")
    resolved = policy_of(policy)
    if resolved.compute == "auto":
        from mezzo.pytorch.auto import resolve

        resolved = resolve(resolved, device_type)[0]
    if not enabled or resolved.is_fp32:
        return _Meaning(None, False, None)
    if leaves_autocast_off(resolved, device_type):
        if resolved.compute == "tf32":
            switch_on_tf32()
        return _Meaning(resolved, False, None)
    return _Meaning(resolved, True, dtype_of(resolved.activations))


@contextmanager
def _traced(
    policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None
) -> Iterator[None]:
    """The region as Dynamo traces it: genuine `torch.autocast` objects, one inside the other.

    What the policy means is worked out once, while tracing, by functions whose results Dynamo takes as
    constants. A `Policy` is handed to them field by field, so that the graph is guarded by what the policy
    says.
    """
    if isinstance(policy, Policy):
        policy = (
            policy.compute,
            policy.params,
            policy.output,
            policy.loss_scale,
            policy.ops,
            policy.modules,
            policy.masters,
            policy.state,
            policy.recompute,
            policy.scaling,
            policy.hidden,
        )
    with _nested(_settings(policy, device_type, enabled, cache_enabled, _label_now())):
        yield


@contextmanager
def _nested(settings: tuple[tuple[str, torch.dtype, bool, bool | None], ...]) -> Iterator[None]:
    if settings:
        device_type, dtype, enabled, cache_enabled = settings[0]
        with torch.autocast(device_type, dtype, enabled, cache_enabled), _nested(settings[1:]):
            yield
    else:
        yield


def _label_now() -> int:
    return active_policy.label()


def _settings(
    policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None, before: int
) -> tuple[tuple[str, torch.dtype, bool, bool | None], ...]:
    """The arguments of each `torch.autocast` object that makes up the region, in order."""
    region = Context(
        Policy(*policy) if isinstance(policy, tuple) else policy, device_type, enabled, cache_enabled
    )
    meaning = region._meaning
    code = active_policy.successor(before, region.device_type, meaning.policy)
    compiling.set_up()
    compiling.begin()
    dtype = meaning.dtype or torch.get_autocast_dtype(region.device_type)
    label = (
        (device, digit or torch.bfloat16, digit is not None, cache_enabled)
        for device, digit in active_policy.label_state(code)
    )
    return ((region.device_type, dtype, meaning.enabled, cache_enabled), *label)


# As torch.compiler.assume_constant_result does, without importing the compiler. The arguments are constants
# that Dynamo guards, and so is the autocast state from which the label is read.
_label_now._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_eager_only._dynamo_marked_constant = True  # type: ignore[attr-defined]
_settings._dynamo_marked_constant = True  # type: ignore[attr-defined]
