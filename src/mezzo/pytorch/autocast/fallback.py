"""FP32 where PyTorch has no 16-bit kernel for a call: which calls these were, and the kernels that a run needs for it.

Mezzo's kernels at the Autocast key widen their inputs themselves (`mezzo.pytorch.autocast.actions.for_other_layouts`).
What PyTorch's autocast casts (a product in bf16) arrives in 16 bits at the kernel for the tensor's layout. `mezzo run`
wraps those kernels, so that a script that runs in FP32 runs in each format. Dense tensors never meet them. Outside of a
run nothing is wrapped, and a plain `torch.autocast` fails where it failed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["CALLS", "LACKING", "OTHER_LAYOUTS", "lend_kernels", "noted", "quietly", "widen"]

#: Op -> how many of its calls ran in FP32 although its rule has 16 bits.
CALLS: Counter[str] = Counter()

#: Dispatch key -> overloads whose kernel there takes no bf16 or no fp16 (torch 2.13).
LACKING: Mapping[str, str] = {
    "SparseCPU": "_sparse_sparse_matmul add.Tensor bmm sub.Tensor",
    "SparseCsrCPU": "add.Tensor addmm mm triangular_solve.X",
}

#: Bits of a dispatch key set, of which one is set where an argument's memory is not its values in order.
OTHER_LAYOUTS: int = 0
for _name in ("Sparse", "SparseCsr", "NestedTensor", "MkldnnCPU", "Negative"):
    OTHER_LAYOUTS |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_name)).raw_repr()

_HALVES = (torch.float16, torch.bfloat16)


class _Widened(torch.autograd.Function):
    """A cast whose gradient may have another layout than the tensor, which that of `Tensor.to` must not."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(ctx.dtype)


def widen(tensor: Tensor) -> Tensor:
    """A tensor of any layout in FP32 if it has 16 bits, else as it is."""
    if tensor.dtype not in _HALVES:
        return tensor
    if tensor.is_mkldnn:  # has no cast of its own
        return tensor.to_dense().float().to_mkldnn()
    if tensor.is_nested or not tensor.requires_grad:
        return tensor.float()
    wide: Tensor = _Widened.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
    return wide


def noted(op: str, action: Callable[..., Any]) -> Callable[..., Any]:
    """The action, whose calls are counted in `CALLS`."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS[op] += 1
        return action(*args, **kwargs)

    return counted


def lend_kernels() -> Callable[[], None]:
    """Wrap the kernels in `LACKING`, so that they compute 16-bit tensors in FP32; returns what undoes it."""
    CALLS.clear()
    library = torch.library.Library("aten", "IMPL")
    with quietly():
        for key, names in LACKING.items():
            for name in names.split():
                library.impl(name, _in_fp32(name, key), key, with_keyset=True)
    return library._destroy


def _in_fp32(name: str, key: str) -> Callable[..., Any]:
    op, _, overload = name.partition(".")
    original = torch.library.get_kernel(getattr(getattr(torch.ops.aten, op), overload or "default"), key)

    def run(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        dtypes = {t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if dtypes.isdisjoint(_HALVES):
            return original.call_boxed(keyset, *args, **kwargs)
        CALLS[op] += 1
        wide_args, wide_kwargs = tree_map_only(Tensor, widen, (args, kwargs))
        out = original.call_boxed(keyset, *wide_args, **wide_kwargs)
        return tree_map_only(Tensor, lambda t: t.to(*dtypes), out) if len(dtypes) == 1 else out

    return run


@contextmanager
def quietly() -> Iterator[None]:
    """The dispatcher says once that a kernel of its own is replaced; that is the purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
