"""`mezzo.autocast`: a region in which a policy is in force.

A region is `torch.autocast` plus a label that says which policy is meant (`mezzo.pytorch.identity`) plus the
kernels that the policy's plan asks for (`mezzo.pytorch.dispatch`, registered once a policy). So everything
that knows autocast knows this: the weight-cast cache, `custom_fwd`, checkpointing,
`torch.is_autocast_enabled()`.

Inside `torch.compile` a region is replayed as genuine `torch.autocast` objects, the only ones that Dynamo
puts into a graph: one for the device and one for each digit of the label.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from mezzo.core.errors import UsageError
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.pytorch import checkpoint, dispatch, identity
from mezzo.pytorch.dtypes import dtype_of

__all__ = ["Region", "autocast"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_parsed: dict[tuple[Any, str], Policy] = {}

# What must be in place before the first label of a policy is used.
identity.on_new_label(dispatch.install)
identity.on_new_label(checkpoint.install)


def autocast(
    policy: str | os.PathLike[str] | Policy,
    device_type: str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> Region:
    """A region, as context manager or decorator, in which ops follow a policy.

    For ops whose rule is PyTorch's own it equals ``torch.autocast(device_type, dtype)``; each op on which the
    policy differs behaves as if its inputs had been cast by hand, the op run with autocast off, and its
    outputs cast as the plan (`mezzo.pytorch.dispatch.plan`) says. NaN, infinities and subnormals pass as in
    those casts. FP64 and integer tensors, ``out=`` variants and in-place ops are left alone, as by torch.

    Args:
        policy: a `Policy`, a short string (``"bf16"``, ``"fp16,op.softmax=lower"``), or the path of a TOML
        file.
            ``"fp32"`` is a region with autocast off. ``"auto"`` takes what this device has.
        device_type: ``"cpu"``, ``"cuda"``, ... Default: the accelerator of this machine, else ``"cpu"``.
        enabled: False for a region without autocast and without a policy, wherever it stands. cache_enabled:
        whether 16-bit copies of weights are kept until the outermost region ends (autocast's own
            cache). Default: as outside.

    A region inside another takes its place until it ends; a thread that should compute in a policy enters it
    itself. One region object may be entered many times, nested, and by several threads.

    Raises:
        UnknownNameError, UsageError: the policy, or a device type that autocast does not know.
        UnsupportedPrecisionError: more different policies in this process than labels (hundreds).
        BannedOpError: from an op that the policy bans, when it meets a 16-bit input.
    """
    if torch.compiler.is_dynamo_compiling():
        return cast("Region", _traced(policy, device_type, enabled, cache_enabled))
    return Region(policy, device_type, enabled, cache_enabled)


class Region:
    """What `autocast` returns: enter it with ``with``, or put it above a function with ``@``.

    Attributes:
        policy: the policy, with ``auto`` resolved; None where the region is disabled.
        device_type: the device type whose ops it rules.
    """

    __slots__ = ("_cache_enabled", "_dtype", "_enabled", "_entered", "device_type", "policy")

    def __init__(
        self,
        policy: str | os.PathLike[str] | Policy,
        device_type: str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self.device_type = default_device_type() if device_type is None else device_type
        resolved = _resolve(policy, self.device_type)
        self.policy = resolved if enabled and not resolved.is_fp32 else None
        self._enabled = self.policy is not None and resolved.compute != "fp32"
        self._dtype = dtype_of(resolved.compute) if self._enabled else None
        self._cache_enabled = cache_enabled
        self._entered: list[tuple[int, int, torch.autocast]] = []

    def __enter__(self) -> Region:
        inner = torch.autocast(self.device_type, self._dtype, self._enabled, self._cache_enabled)
        before = identity.label()
        # torch.autocast disables itself, with a warning, where the device is absent; then there is no policy
        # either.
        policy = self.policy if inner._enabled or not self._enabled else None
        code = identity.successor(before, self.device_type, policy)
        inner.__enter__()
        if code != before:
            identity.set_label(code)
        self._entered.append((threading.get_ident(), before, inner))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        thread = threading.get_ident()
        index = next(i for i in range(len(self._entered) - 1, -1, -1) if self._entered[i][0] == thread)
        _, before, inner = self._entered.pop(index)
        identity.set_label(before)
        inner.__exit__(None, None, None)

    def __call__(self, function: _Function) -> _Function:
        if not callable(function):
            raise UsageError(
                f"mezzo.autocast(...)(function) needs a callable, received {type(function).__name__}. For a block of "
                "code write: with mezzo.autocast(...):"
            )
        policy, device_type, enabled, cache_enabled = (
            self.policy or "fp32",
            self.device_type,
            self.policy is not None,
            self._cache_enabled,
        )

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
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


def _resolve(policy: str | os.PathLike[str] | Policy, device_type: str) -> Policy:
    """The policy as a value, `auto` replaced. Strings are parsed once; a file may change, so it is read each
    time."""
    key = (policy, device_type)
    found = _parsed.get(key) if type(policy) in (str, Policy) else None
    if found is None:
        if not torch.amp.is_autocast_available(device_type):
            known = ", ".join(torch._C._autocast_supported_devices())
            raise UsageError(
                f"mezzo.autocast: autocast knows no device type {device_type!r}. Use one of {known}."
            )
        found = policy_of(policy)
        if found.compute == "auto":
            from mezzo.pytorch.auto import resolve

            found = resolve(found, device_type)[0]
        if type(policy) is Policy or (type(policy) is str and not policy.endswith(".toml")):
            _parsed[key] = found
    return found


@contextmanager
def _traced(
    policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None
) -> Iterator[None]:
    """The region as Dynamo traces it: genuine `torch.autocast` objects, one inside the other.

    What the policy means is worked out once, while tracing, by functions whose results Dynamo takes as constants. A
    `Policy` is handed to them field by field, so that the graph is guarded by what the policy says.
    """
    if isinstance(policy, Policy):
        policy = (
            policy.compute,
            policy.params,
            policy.output,
            policy.loss_scale,
            policy.ops,
            policy.modules,
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
    return identity.label()


def _settings(
    policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None, before: int
) -> tuple[tuple[str, torch.dtype, bool, bool | None], ...]:
    """The region as settings of `torch.autocast`: (device type, dtype, enabled, cache_enabled) of each object."""
    region = Region(Policy(*policy) if isinstance(policy, tuple) else policy, device_type, enabled, cache_enabled)
    code = identity.successor(before, region.device_type, region.policy)
    dtype = region._dtype or torch.get_autocast_dtype(region.device_type)
    label = (
        (device, digit or torch.bfloat16, digit is not None, cache_enabled)
        for device, digit in identity.label_state(code)
    )
    return ((region.device_type, dtype, region._enabled, cache_enabled), *label)


# As torch.compiler.assume_constant_result does, without importing the compiler. The arguments are constants that
# Dynamo guards, and so is the autocast state from which the label is read.
_label_now._dynamo_marked_constant = True  # type: ignore[attr-defined]
_settings._dynamo_marked_constant = True  # type: ignore[attr-defined]
