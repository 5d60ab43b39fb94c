"""Whoever writes a weight inside a region makes autocast forget its 16-bit copies of weights.

`torch.autocast` keeps the 16-bit copy of an FP32 leaf until the outermost region ends, found by the tensor's
address alone: a weight that is written in between is used at its old value, in silence. Every write that PyTorch
makes is an op whose schema names what it changes, and inside a region every op passes the Autocast key. So each
of those ops (in place, ``out=``, ``_foreach_``, ``_fused_``) gets a kernel there that asks whether what is written
may be a weight, clears the cache if so, and goes on to the next key as if it were not there. Reading ops (linear,
matmul, convolution) are not touched.

Most writes are not weights, and that is decided by what a tensor is, not by a list of weights (which nobody has):

- Where gradients are recorded PyTorch itself refuses to write a leaf that requires one, or a view of it. So a target
  that requires a gradient is an activation.
- Memory that one tensor alone refers to (or a view and its base) belongs to no weight but itself. Aliases without
  a gradient, ``p.data`` and ``p.detach()``, share their storage with the weight.

All else clears the cache: an alias of something that is no weight costs a cast more than torch.amp, never a
wrong number. ``p.data = t`` is no op; the setter of `torch.Tensor.data` tells.

A kernel costs some 2 microseconds a call, 2 more where it must look at the storage, and 3 more where a number stands in
a tensor's place (`benchmarks/overhead.py`). What it can't see: memory
written behind PyTorch's back (NumPy's view of a weight, an extension with a raw pointer, another process, a
collective), and ops of a library that is loaded after the first region. `torch.optim` optimizers of any kind are
seen by their hook (`weight_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.region import identity
from mezzo.pytorch.region.torch_table import AUTOCAST_KEYS, has_kernel

__all__ = ["install", "may_be_weight"]

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, complex)  # bool is an int

# Written by them: running statistics, a mask, flags. No product reads any of these as a weight.
_INNOCENT = frozenset(
    {
        *("aten::_batch_norm_with_update", "aten::_native_batch_norm_legit", "aten::rrelu_with_noise"),
        *("aten::rrelu_with_noise_", "aten::retain_grad", "aten::record_stream", "aten::requires_grad_"),
        *("aten::detach_", "aten::set_data", "aten::_backward"),
    }
)
# On every device they call another op in place, which tells.
_TOLD_BY_ANOTHER = frozenset(
    {"aten::relu_", "aten::add_.Scalar", "aten::sub_.Scalar", "aten::mul_.Scalar", "aten::div_.Scalar"}
)
# Of PyTorch's own libraries, those that write what autograd knows. Others' (torchvision's, a user's) are all taken.
_PASSED_OVER = frozenset(
    {"prim", "prims", "quantized", "_c10d_functional", "symm_mem", "inductor", "mkldnn", "onednn"}
)

_libraries: dict[str, torch.library.Library] = {}
_installed: set[str] = set()
_setter_installed = False

_label = identity.label
_is_grad_enabled = torch.is_grad_enabled
_use_count = torch._C._storage_Use_Count
_clear = torch.clear_autocast_cache
_ExcludeKey = torch._C._ExcludeDispatchKeyGuard


def install(device_type: str) -> None:
    """See every write to tensors of a device type inside regions from now on; once a process."""
    if device_type in _installed or device_type not in AUTOCAST_KEYS:
        return
    _installed.add(device_type)
    _install_setter()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name
        if name.partition("::")[0] in _PASSED_OVER or name in _INNOCENT:
            continue
        for argument in schema.arguments:
            if _is_written(argument):
                _register(schema, device_type)
                break


def may_be_weight(target: Tensor) -> bool:
    """Whether writing a tensor may change a weight of which autocast has a copy: False only if it can't.

    Args:
        target: what is about to be written, in the grad mode in which that is done.
    """
    if target.requires_grad:
        return not _is_grad_enabled()  # else an activation, or PyTorch is about to raise
    if type(target) not in _PLAIN or isinstance(target, torch.nn.Parameter):
        return True  # a frozen weight may be thawed in the same region
    try:
        owners = _use_count(target.untyped_storage()._cdata) - 1  # the object asked counts itself
    except (RuntimeError, NotImplementedError):
        return True  # a wrapper of `torch.func`, a sparse tensor
    if owners == 1:
        return False
    if owners > 2:
        return True
    if target._is_view():
        base = target._base
        return base is None or base.requires_grad or isinstance(base, torch.nn.Parameter)
    # Views of inference tensors have no base. A part of memory is a view; the whole of it may be `p.data`.
    return (
        not target.is_inference()
        or target.numel() * target.element_size() == target.untyped_storage().nbytes()
    )


def _is_written(argument: Any) -> bool:
    return (
        argument.alias_info is not None
        and argument.alias_info.is_write
        and str(argument.type) in ("Tensor", "Optional[Tensor]", "List[Tensor]")
    )


def _register(schema: Any, device_type: str) -> None:
    key_name = AUTOCAST_KEYS[device_type]
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if name in _TOLD_BY_ANOTHER or not torch._C._dispatch_has_kernel(name) or has_kernel(name, device_type):
        return  # TorchScript's own; or one that autocast has an opinion on, which is no writer's
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return  # made of other ops, which pass the key themselves
    namespace, _, op = name.partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    # What Library.impl does besides, for a thousand ops, takes a quarter of a second.
    _libraries[namespace].m.impl(op, key_name, _kernel(schema, key_name), True)  # type: ignore[union-attr]


def _kernel(schema: Any, key_name: str) -> Callable[..., Any]:
    """The kernel of one op: clear the cache if it may write a weight, and call the keys below as if it were not there.

    What that is for this op is worked out at its first call: most ops never have one.
    """
    first = schema.arguments[0]
    if schema.name.startswith("aten::") and schema.name.endswith("_") and str(first.type) == "Tensor":
        return _in_place(schema, key_name)
    written: Callable[..., list[Any]] | None = None
    go_on: Callable[..., Any]

    def write(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal written, go_on
        if written is None:
            written, go_on = _targets(schema), _Below(schema, key_name).call
        if _label() and any(map(_is_any_weight, written(args, kwargs))):
            try:
                return go_on(keyset, args, kwargs)
            finally:
                _clear()
        return go_on(keyset, args, kwargs)

    return write


def _in_place(schema: Any, key_name: str) -> Callable[..., Any]:
    """The kernel of an op that writes its first argument: nearly all calls there are, so it is short."""
    below: _Below | None = None
    redispatch: Any = None
    numbers = False
    keys: Any = None

    def write(keyset: torch._C.DispatchKeySet, target: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal below, redispatch, numbers, keys
        if below is None:
            below = _Below(schema, key_name)
            redispatch, keys, numbers = below.redispatch, below.keys, bool(below.numbers)
        if not (target.requires_grad and _is_grad_enabled()) and _label() and may_be_weight(target):
            try:
                return below.call(keyset, (target, *args), kwargs)
            finally:
                _clear()
        if numbers:
            return below.call(keyset, (target, *args), kwargs)
        return redispatch(keyset & keys, target, *args, **kwargs)

    return write


class _Below:
    """An op at the keys below Autocast."""

    __slots__ = ("_excluded", "_overload", "_takes_numbers", "keys", "numbers", "redispatch")

    def __init__(self, schema: Any, key_name: str) -> None:
        key = torch._C.DispatchKey.__members__[key_name]
        namespace, _, op = schema.name.partition("::")
        self._excluded = torch._C.DispatchKeySet(key)
        self._overload = getattr(
            getattr(getattr(torch.ops, namespace), op), schema.overload_name or "default"
        )
        self.keys = torch._C._dispatch_keyset_full_after(key)
        self.redispatch = self._overload._handle.redispatch_boxed
        # `x += 1` calls `add_.Tensor` with a number in a tensor's place.
        self.numbers = tuple(
            i
            for i, argument in enumerate(schema.arguments)
            if not argument.kwarg_only and not _is_written(argument) and str(argument.type) == "Tensor"
        )
        self._takes_numbers = torch._C._should_allow_numbers_as_tensors(op)

    def call(self, keyset: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Go on; a number is wrapped again, which only calling the op does."""
        for place in self.numbers:
            if place < len(args) and isinstance(args[place], _NUMBERS):
                if not self._takes_numbers:
                    args = tuple(
                        torch.tensor(value) if i in self.numbers and isinstance(value, _NUMBERS) else value
                        for i, value in enumerate(args)
                    )
                    break
                with _ExcludeKey(self._excluded):
                    return self._overload(*args, **kwargs)
        return self.redispatch(keyset & self.keys, *args, **kwargs)


def _targets(schema: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """What a call writes: tensors, lists of them, None."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    places = tuple(i for i, argument in enumerate(positional) if _is_written(argument))
    names = tuple(a.name for a in schema.arguments if a.kwarg_only and _is_written(a))

    def written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [args[i] for i in places if i < len(args)] + [kwargs[name] for name in names if name in kwargs]

    return written


def _is_any_weight(target: Any) -> bool:
    if isinstance(target, Tensor):
        return may_be_weight(target)
    return target is not None and any(may_be_weight(one) for one in target)


def _install_setter() -> None:
    """Let ``t.data = ...`` clear the cache: it changes a tensor's memory, and is no op."""
    global _setter_installed
    if _setter_installed:
        return
    _setter_installed = True
    plain: Any = torch._C.TensorBase.data

    def assign(tensor: Tensor, value: Tensor) -> None:
        plain.__set__(tensor, value)
        if _label():
            _clear()

    torch.Tensor.data = property(plain.__get__, assign, None, plain.__doc__)  # type: ignore[assignment]
