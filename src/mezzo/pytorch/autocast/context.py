"""`mezzo.autocast`: a `torch.autocast` with a label for its policy and the kernels of the policy's plan.

In eager mode the thread's autocast state is written directly, in the order of `torch.autocast`; its checks are made
once, when a context is created. In `torch.compile` a context is replayed as nested `torch.autocast` objects.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from mezzo.core import errors
from mezzo.core.errors import UnknownDeviceError, UnknownNameError, UsageError, did_you_mean
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import is_toml
from mezzo.pytorch.autocast import active_policy, compiling, patches
from mezzo.pytorch.autocast.plan import AUTOCAST_KEYS
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.hardware import leaves_autocast_off, switch_on_tf32
from mezzo.pytorch.kernels.not_traced import breaks_graph, not_traced

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Resolved(NamedTuple):
    """The active policy of a device type, or None, and autocast's switch and dtype."""

    policy: Policy | None
    enabled: bool
    dtype: torch.dtype | None


_OFF = _Resolved(None, False, None)
_STORAGE = ("params=", "masters=", "state=", "loss_scale=", "reduce=")  # settings without effect in a context
_DEVICES = {name: name for name in AUTOCAST_KEYS} | {"gpu": "cuda"}
_Outside = tuple[active_policy.Transition, bool, torch.dtype, bool | None]

applied: WeakKeyDictionary[Any, tuple[tuple[str, str], ...]] = WeakKeyDictionary()  # override -> its patterns
_contexts: dict[tuple[Any, ...], Context] = {}  # one object for all calls with the same arguments

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
_FP32 = torch.float32  # autocast's dtype under emulated TF32, which `torch.autocast` objects refuse


@not_traced
def autocast(
    policy: str | os.PathLike[str] | Policy | torch.dtype | None = None,
    device_type: str | torch.dtype | Policy | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    dtype: torch.dtype | str | Policy | None = None,
    **unknown: NoReturn,
) -> Context:
    """A context manager or decorator in which ops follow a policy.

    Example::

        with mezzo.autocast("bf16"):                       # for torch.autocast("cuda", torch.bfloat16)
            loss = loss_fn(model(x), y)
        with mezzo.autocast("fp16,op.softmax=lower", "cuda"):
            ...

    For ops whose rule is PyTorch's own it equals ``torch.autocast(device_type, dtype)``. Any other op behaves as if its
    inputs had been cast by hand, the op run with autocast off, and its outputs cast as the plan
    (`mezzo.pytorch.autocast.plan.plan`) says. NaN, infinities and subnormals pass as in those casts. FP64 and integer
    tensors, ``out=`` variants and in-place ops are left alone, as by torch.

    A nested context replaces the outer one until it ends. A new thread has no context and must enter one itself. One
    context object may be entered many times, nested, and by several threads.

    Args:
        policy: a precision (``"bf16"``), a torch dtype, a string with settings (``"fp16,op.softmax=lower"``), the path
            of a TOML file, or a `Policy`. ``"fp32"`` switches autocast off. ``"auto"`` takes what this device has.
            The model is unknown here: a module pattern is an error, in a `Policy` unless it was applied to a model.
        device_type: ``"cpu"``, ``"cuda"``, ... Default: the accelerator of this computer, or ``"cpu"``.
        enabled: False for a context without autocast and without a policy.
        cache_enabled: whether 16-bit copies of weights are kept until the outermost context ends. Default: as outside,
            but not where gradients aren't recorded, since there any op may write a weight.
        dtype: instead of `policy`, as in ``torch.autocast("cuda", dtype=torch.float16)``: the first argument is then
            the device type. ``mezzo.autocast("cuda", torch.float16)`` works too. With a device type alone it is
            ``torch.get_autocast_dtype(device_type)``, as in PyTorch: fp16 on CUDA, bf16 on a CPU.
        unknown: any other keyword argument is an error.

    Raises:
        UsageError: an unknown precision, op, keyword argument or device type; no precision, or two; a module pattern.
        UnsupportedPrecisionError: too many different policies in this process (several hundred).
        BannedOpError: from an op that the policy bans, when it receives a 16-bit input.
    """
    if unknown:
        raise errors.unknown_argument(autocast, next(iter(unknown)))
    if dtype is not None or policy is None:
        policy, device_type = _as_in_torch(policy, device_type, dtype)
    if type(policy) is Policy or type(device_type) is Policy:
        given = policy if type(policy) is Policy else cast("Policy", device_type)
        if not _is_dynamo_compiling() and (missing := set(given.modules).difference(*applied.values())):
            raise _without_model(given, *missing)
    elif not _is_dynamo_compiling():  # the usual call, without a call of `context_of`
        known = _contexts.get((policy, device_type, enabled, cache_enabled, _native_key()))
        if known is not None:
            return known
    return context_of(policy, device_type, enabled, cache_enabled)


@not_traced
def context_of(
    policy: Any, device_type: Any = None, enabled: bool = True, cache_enabled: bool | None = None
) -> Context:
    """`autocast` for Mezzo's own calls, which know the model that a policy's module patterns are for."""
    first, second = _policy_first(policy, device_type)
    if _is_dynamo_compiling():
        # Field by field: the graph is guarded by the content. Dynamo of torch 2.11 takes no dataclass there.
        plain = tuple([getattr(first, name) for name in _FIELDS]) if isinstance(first, Policy) else first
        if not _is_eager_only(plain, second, enabled):
            return cast("Context", _traced(plain, second, enabled, cache_enabled))
    key = (first, second, enabled, cache_enabled, _native_key())
    found = _contexts.get(key)
    if found is None:
        found = Context(first, second, enabled, cache_enabled)
        is_file = not isinstance(first, (Policy, str, torch.dtype)) or is_toml(str(first))
        if found.is_as_asked:  # which devices there are may change, and so may a file
            _contexts[(found.policy, *key[1:]) if is_file else key] = found
    return found


def _as_in_torch(first: Any, second: Any, dtype: Any) -> tuple[Any, str | None]:
    """Policy and device type of a call with `dtype`, or with a device type alone, as `torch.autocast` takes them."""
    first, second = _without_index(first), _without_index(second)
    if first is None and dtype is not None:
        return dtype, second
    if first is None and second is not None:
        return _default_dtype(second), second
    if second is None and type(first) is str and first in AUTOCAST_KEYS:
        return dtype, first
    raise _not_one_precision(policy=first, device_type=second, dtype=dtype)


def _policy_first(first: Any, second: Any) -> tuple[Any, Any]:
    """Policy and device type, where the arguments are in PyTorch's order: a device type, then a dtype or none."""
    first, second = _without_index(first), _without_index(second)
    if type(first) is str and first in AUTOCAST_KEYS and second not in AUTOCAST_KEYS:
        return _default_dtype(first) if second is None else second, first
    if type(first) is torch.device:
        raise _unknown_device(first)
    if second is not None and (first in AUTOCAST_KEYS or isinstance(second, (torch.dtype, Policy))):
        raise _not_one_precision(policy=first, device_type=second)
    return first, second


def _without_index(given: Any) -> Any:
    """``cuda`` of ``cuda:0``, which PyTorch's autocast takes too."""
    kind, _, index = given.partition(":") if type(given) is str else ("", "", "")
    return kind if kind in AUTOCAST_KEYS and index.isdecimal() else given


def _not_one_precision(**given: Any) -> UsageError:
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    fix = did_you_mean(str(given["policy"]), AUTOCAST_KEYS, cutoff=0.6)
    return UsageError(
        f"mezzo.autocast({arguments}): give one precision and one device type, mezzo.autocast('bf16', 'cuda') or "
        f"mezzo.autocast('cuda', dtype=torch.bfloat16).{fix}"
    )


def _default_dtype(device_type: Any) -> torch.dtype:
    """The dtype of PyTorch's autocast on a device type, if none is given: that of an outer context, or its default."""
    if type(device_type) is not str or device_type not in AUTOCAST_KEYS:
        raise _unknown_device(device_type)
    return _get_dtype(device_type)


def _unknown_device(device_type: Any) -> UnknownDeviceError:
    if isinstance(device_type, torch.device):
        what = f"device_type is {device_type!r}. Use its type: {device_type.type!r}."
    else:
        fix = did_you_mean(str(_DEVICES.get(device_type, device_type)), AUTOCAST_KEYS)
        what = f"unknown device type {device_type!r}. Use one of {', '.join(AUTOCAST_KEYS)}.{fix}"
    return UnknownDeviceError(f"mezzo.autocast: {what}{_torch_says(lambda: torch.autocast(device_type))}")


def _torch_says(call: Callable[[], object]) -> str:
    """What PyTorch's own error for this call says: scripts may look for its words."""
    try:
        call()
    except Exception as error:
        return f" (PyTorch: {str(error).partition('. ')[0]})"
    return ""


@breaks_graph
def _a_context_from_outside_of_the_compiled_function() -> None: ...  # Dynamo names it as the reason


class Context:
    """What `autocast` returns: enter it with ``with``, or put it above a function with ``@``.

    Create it inside a function that is compiled, not outside: there Dynamo breaks the graph.

    Attributes:
        device_type: whose ops follow the policy.
        policy: with ``auto`` resolved; None where the context is disabled.
        is_as_asked: False where PyTorch disabled autocast, with a warning, since the device is absent.
    """

    def __init__(
        self, policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None
    ) -> None:
        self.device_type = default_device_type() if device_type is None else device_type
        compiling.set_up()
        resolved = _resolve(policy, self.device_type, enabled)
        self.is_as_asked = True
        if resolved.enabled and resolved.dtype is not _FP32:
            absent = self.device_type == "cuda" and torch.cuda.amp.common.amp_definitely_not_available()
            if absent:  # PyTorch's own warning would name a line of this file
                warnings.warn("CUDA is not available. Disabling autocast.", stacklevel=4)
            self.is_as_asked = not absent and torch.autocast(self.device_type, resolved.dtype)._enabled
        self.policy, self._enabled, self._dtype = resolved if self.is_as_asked else _OFF
        # A disabled one, which must leave the device's switch alone: it may be a digit of the label.
        self._is_absent = self.device_type in active_policy.label_devices()
        self._cache_enabled = cache_enabled
        self._transitions: dict[int, active_policy.Transition] = {}  # by the label outside
        self._entered: dict[int, list[_Outside]] = {}  # by thread: the state outside, once per entry

    @not_traced
    def __enter__(self) -> Context:
        if _is_dynamo_compiling():
            _a_context_from_outside_of_the_compiled_function()
        device = self.device_type
        before = _label() if _increment_nesting() > 1 else 0
        transition = self._transitions.get(before)
        if transition is None:
            try:
                transition = active_policy.transition(before, device, self.policy)
            except BaseException:
                _decrement_nesting()
                raise
            self._transitions[before] = transition
        enabled, dtype = _is_enabled(device), _get_dtype(device)
        if enabled is not self._enabled and not self._is_absent:
            _set_enabled(device, self._enabled)
        if self._dtype is not None and self._dtype is not dtype:
            _set_dtype(device, self._dtype)
        cached = None
        if self._cache_enabled is not None or not _is_grad_enabled():
            cached = _is_cache_enabled()
            # Without gradients a weight could be written at any moment.
            _set_cache_enabled(bool(self._cache_enabled))
        transition.enter()
        if transition.is_outermost:
            _hold()
            if compiling.handler is not None:
                compiling.set_up()
        outside = (transition, enabled, dtype, cached)
        try:
            self._entered[_get_ident()].append(outside)
        except KeyError:
            self._entered[_get_ident()] = [outside]
        return self

    @not_traced
    def __exit__(self, *exc_info: object) -> None:
        transition, enabled, dtype, cached = self._entered[_get_ident()].pop()
        device = self.device_type
        transition.leave()
        if transition.is_outermost:
            _release()
        _set_enabled(device, enabled)
        _set_dtype(device, dtype)
        if cached is not None:
            _set_cache_enabled(cached)
        if _decrement_nesting() == 0:
            _clear_cache()

    @not_traced
    def begin(self) -> tuple[Any, ...]:
        """`__enter__` at less cost, where all autocast is off and `patches` are held; what `end` is to be given."""
        device, dtype, cached = self.device_type, _get_dtype(self.device_type), None
        transition = self._transitions.get(0)
        if transition is None:
            transition = self._transitions[0] = active_policy.transition(0, device, self.policy)
        enabled = _is_enabled(device)  # True where only MPS's is on, which PyTorch does not count
        _increment_nesting()
        _set_enabled(device, self._enabled)
        if self._dtype is not None and self._dtype is not dtype:
            _set_dtype(device, self._dtype)
        if not _is_grad_enabled():
            cached = _is_cache_enabled()
            _set_cache_enabled(False)
        transition.enter()
        if compiling.handler is not None:
            compiling.set_up()
        return transition.leave, device, enabled, dtype, cached

    @not_traced
    def end(self, begun: tuple[Any, ...]) -> None:
        """End what `begin` began."""
        leave, device, enabled, dtype, cached = begun
        leave()
        _set_enabled(device, enabled)
        if dtype is not self._dtype:
            _set_dtype(device, dtype)
        if cached is not None:
            _set_cache_enabled(cached)
        if _decrement_nesting() == 0:
            _clear_cache()

    def __call__(self, function: _Function) -> _Function:
        """The function, with a context around each call."""
        if not callable(function):
            raise errors.ArgumentTypeError(
                f"mezzo.autocast(...)(function): function is not callable, received {type(function).__name__}. "
                "For a block of code write: with mezzo.autocast(...):"
                + _torch_says(lambda: torch.autocast("cpu", enabled=False)(function))
            )
        policy, enabled = self.policy or "fp32", self.policy is not None
        device_type, cache_enabled = self.device_type, self._cache_enabled
        shared = self

        @functools.wraps(function)
        def in_context(*args: Any, **kwargs: Any) -> Any:
            traced = _is_dynamo_compiling()
            with context_of(policy, device_type, enabled, cache_enabled) if traced else shared:
                return function(*args, **kwargs)

        return cast("_Function", in_context)

    def __repr__(self) -> str:
        return f"mezzo.autocast({str(self.policy) if self.policy else 'fp32'!r}, {self.device_type!r})"


@functools.cache
def default_device_type() -> str:
    """The type of this computer's accelerator, if autocast knows it, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        return str(accelerator.type)
    return "cpu"


def _resolve(policy: object, device_type: str, enabled: bool) -> _Resolved:
    if device_type not in AUTOCAST_KEYS:
        raise _unknown_device(device_type)
    if enabled and device_type in active_policy.label_devices():
        raise UsageError(f"mezzo.autocast: no {device_type!r} device here. Use {default_device_type()!r}.")
    if isinstance(policy, str) and policy.partition(":")[0] in _DEVICES:  # cuda:0, gpu
        raise _unknown_device(policy)
    if isinstance(policy, torch.dtype) and not enabled:
        return _OFF  # of any dtype, as in PyTorch
    try:
        resolved = policy_of(policy)
    except UnknownNameError:
        if isinstance(policy, str) and did_you_mean(policy, AUTOCAST_KEYS, cutoff=0.6):  # cdua
            raise _unknown_device(policy) from None
        raise
    if resolved.bf16_from != "none":
        raise UsageError(
            f"mezzo.autocast: policy '{resolved}': a context does not count updates, so it cannot follow "
            f"bf16_from={resolved.bf16_from}. Use mezzo.MixedPrecision or mezzo run, or remove bf16_from."
        )
    if resolved.modules and not isinstance(policy, Policy):
        raise _without_model(resolved)
    if resolved.compute == "auto":
        from mezzo.pytorch.auto import resolve

        resolved = resolve(resolved, device_type)[0]
    if not enabled or resolved.is_fp32:
        return _OFF
    unused = [key for key in _STORAGE if f",{key}" in f",{resolved}"]
    if unused and not isinstance(policy, Policy):
        warnings.warn(
            f"mezzo.autocast('{resolved}'): {', '.join(unused)} has no effect in a context, which has no optimizer. "
            f"Use mezzo.MixedPrecision(model, optimizer, '{resolved}') or mezzo run, or leave it out.",
            stacklevel=5,
        )
    if leaves_autocast_off(resolved, device_type):
        if resolved.compute == "tf32":
            switch_on_tf32()
        return _Resolved(resolved, False, None)
    return _Resolved(resolved, True, dtype_of(resolved.activations))


def forget_entries() -> None:
    """Let `was_entered` begin anew, for the contexts that this thread is not in."""
    for context in list(_contexts.values()):  # other threads may add some meanwhile
        if not context._entered.get(_get_ident(), True):
            del context._entered[_get_ident()]


def was_entered(policy: Policy) -> bool:
    """Whether this thread entered a context with these rules since `forget_entries`, outside of compiled code."""
    entered = (context.policy for context in list(_contexts.values()) if _get_ident() in context._entered)
    return any(one and one.compute == policy.compute and {*one.ops} == {*policy.ops} for one in entered)


def _without_model(policy: Policy, *missing: tuple[str, str]) -> UsageError:
    pattern, fmt = min(missing or policy.modules)
    return UsageError(
        f"mezzo.autocast('{policy}'): module.{pattern}={fmt} needs the model, which mezzo.autocast does not know. Use "
        f"mezzo.MixedPrecision(model, optimizer, '{policy}').autocast(), or call that module inside "
        f"mezzo.autocast('{fmt}'). mezzo run and mezzo.explain take module patterns too."
    )


_FIELDS = tuple(field.name for field in fields(Policy))


@contextmanager
def _traced(
    policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None
) -> Iterator[None]:
    """The context as Dynamo traces it: nested `torch.autocast` objects."""
    mha = torch.backends.mha
    with _nested(_settings(policy, device_type, enabled, cache_enabled, _label())):
        by_parts = mha._is_fastpath_enabled and active_policy.is_by_parts(_label())
        if by_parts:
            mha._is_fastpath_enabled = False
        try:
            yield
        finally:
            if by_parts:
                mha._is_fastpath_enabled = True


@contextmanager
def _nested(settings: tuple[tuple[str, torch.dtype, bool, bool | None], ...]) -> Iterator[None]:
    if settings:
        device_type, dtype, enabled, cache_enabled = settings[0]
        with torch.autocast(device_type, dtype, enabled, cache_enabled), _nested(settings[1:]):
            yield
    else:
        yield


def _is_eager_only(policy: Any, device_type: str | None, enabled: bool) -> bool:
    """Whether Dynamo can't replay the context, since `torch.autocast` refuses its dtype."""
    device = default_device_type() if device_type is None else device_type
    return _resolve(_rebuilt(policy), device, enabled).dtype is _FP32


def _rebuilt(policy: Any) -> Any:
    return Policy(**dict(zip(_FIELDS, policy))) if isinstance(policy, tuple) else policy


def _settings(
    policy: Any, device_type: str | None, enabled: bool, cache_enabled: bool | None, before: int
) -> tuple[tuple[str, torch.dtype, bool, bool | None], ...]:
    """The arguments of each `torch.autocast` object that makes up the context, in order."""
    context = Context(_rebuilt(policy), device_type, enabled, cache_enabled)
    code = active_policy.successor(before, context.device_type, context.policy)
    compiling.begin()
    dtype = context._dtype or torch.get_autocast_dtype(context.device_type)
    label = (
        (device, digit or torch.bfloat16, digit is not None, cache_enabled)
        for device, digit in active_policy.label_state(code)
    )
    own = (context.device_type, dtype, context._enabled, cache_enabled)
    return (*label,) if context._is_absent else (*label, own)


# Constants while tracing, as by `torch.compiler.assume_constant_result`, without importing the compiler. Dynamo guards
# their arguments, and the autocast state from which the label is read.
_constants: tuple[Any, ...] = (_label, active_policy.is_by_parts, _is_eager_only, _settings)
for _constant in _constants:
    _constant._dynamo_marked_constant = True
