"""Registering kernels, and FP32 where PyTorch has no 16-bit kernel for a call.

What PyTorch's autocast casts (a product in bf16) arrives in 16 bits at the kernel for the tensor's layout. `mezzo run`
wraps those kernels, so that a script that runs in FP32 runs in each format. Dense tensors reach only those of "CPU".
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.autocast.plan import overload_named
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.nested import mapped, tensors
from mezzo.pytorch.rounding import straight_through

#: Op -> how many of its calls ran in FP32 although its rule has 16 bits.
CALLS: Counter[str] = Counter()

#: Dispatch key -> overloads whose kernel there takes no bf16 or no fp16 (torch 2.13).
LACKING: Mapping[str, str] = {
    "CPU": "_fused_moving_avg_obs_fq_helper",  # no rule serves it, because it writes its statistics
    "SparseCPU": "_sparse_sparse_matmul add.Tensor bmm sub.Tensor",
    "SparseCsrCPU": "add.Tensor addmm mm triangular_solve.X",
}

#: Bits of a dispatch key set, one of which is set where an argument's memory is not its values in order.
OTHER_LAYOUTS: int = 0
for _name in ("Sparse", "SparseCsr", "NestedTensor", "MkldnnCPU", "Negative"):
    OTHER_LAYOUTS |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_name)).raw_repr()


class Kernels:
    """Kernels registered with the dispatcher, until `remove`."""

    def __init__(self) -> None:
        self._libraries: dict[str, torch.library.Library] = {}

    def register(self, name: str, kernel: Callable[..., Any], key: str) -> None:
        """Register a kernel, which gets the key set first, without the warning that it replaces one."""
        namespace, _, op = overload_named(name).name().partition("::")
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._libraries[namespace].impl(op, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """Remove them all: the kernels beneath are used again."""
        self._libraries.clear()  # a library that nothing refers to takes its kernels away


def widen(tensor: Tensor) -> Tensor:
    """A tensor of any layout in FP32 if it has 16 bits, else as it is."""
    if tensor.dtype not in SIXTEEN_BITS:
        return tensor
    if tensor.is_mkldnn:  # has no cast
        return tensor.to_dense().float().to_mkldnn()
    if tensor.is_nested or not tensor.requires_grad:
        return tensor.float()
    # Its gradient may have another layout than the tensor, which that of `float` must not.
    return straight_through(tensor, Tensor.float)


def noted(op: str, action: Callable[..., Any]) -> Callable[..., Any]:
    """The action, with its calls counted in `CALLS`."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS[op] += 1
        return action(*args, **kwargs)

    return counted


def lend_kernels() -> Callable[[], None]:
    """Have the kernels in `LACKING` compute 16-bit tensors in FP32; returns a function that undoes it."""
    CALLS.clear()
    kernels = Kernels()
    for key, names in LACKING.items():
        for name in names.split():
            kernels.register(name, _in_fp32(name, key), key)
    return kernels.remove


def _in_fp32(name: str, key: str) -> Callable[..., Any]:
    op = name.partition(".")[0]
    original = torch.library.get_kernel(overload_named(name), key)

    def run(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        dtypes = {tensor.dtype for tensor in tensors((args, kwargs))}
        if dtypes.isdisjoint(SIXTEEN_BITS):
            return original.call_boxed(keyset, *args, **kwargs)
        CALLS[op] += 1
        wide_args, wide_kwargs = mapped((args, kwargs), widen)
        out = original.call_boxed(keyset, *wide_args, **wide_kwargs)
        return mapped(out, lambda t: t.to(*dtypes)) if len(dtypes) == 1 else out

    return run
