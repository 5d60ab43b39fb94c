"""Names of operations, the user's lines that call them, and facts of their tensors."""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import os
import re
import sys
import textwrap
from types import CodeType
from typing import Any

import torch
from torch import Tensor

import mezzo
from mezzo.core.overflow import TensorFacts
from mezzo.core.rules import RULES
from mezzo.pytorch.dtypes import name_of

_DUNDERS = {f"{how}{op}": op for how in "ri" for op in ("add", "sub", "mul", "pow", "matmul", "div")}
_DUNDERS |= {"truediv": "div", "rtruediv": "div", "itruediv": "div"}

HOOK = "gradient hook"
"""Not an operation: a function of the script's own on a gradient."""

_POLES = """div true_divide reciprocal log log2 log10 log1p logit rsqrt sqrt pow float_power acos asin atanh xlogy norm
linalg_vector_norm fmod remainder binary_cross_entropy cosine_similarity std var log_softmax softmax
nll_loss lgamma digamma erfinv tan linalg_inv inverse cholesky linalg_solve"""
POLES = frozenset(_POLES.split())
"""Operations that have no finite result, or no finite slope, for some finite numbers."""

_DECOMPOSED = r"_?linalg_(eig|svd|qr|lu|chol|inv|solve|lstsq|pinv|matrix_exp|ldl)"

COMPOSED = frozenset(op for op in RULES if op not in POLES and not re.match(_DECOMPOSED, op))
"""Operations of many steps, or of one, that have a finite slope everywhere."""


def op_of_function(function: Any) -> str:
    """The op's name of a torch function: ``Tensor.__truediv__`` is ``div``, ``exp_`` is ``exp``."""
    name = str(getattr(function, "__name__", function))
    name = name.split(".")[0] if not name.startswith("_") else name
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        return _DUNDERS.get(inner, name if inner in ("getitem", "setitem", "get") else inner)
    return name.rstrip("_") or name


def op_of_node(node: Any) -> str:
    """The op's name of a node: ``LinalgVectorNormBackward0`` is ``linalg_vector_norm``."""
    name = re.sub(r"Backward\d*$", "", str(node.name()).split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


Line = tuple[str, int]

_PASSED = ("contextlib", "lightning.fabric.wrappers", "lightning_fabric.wrappers")
_FOREIGN = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (torch, mezzo)
)


@functools.cache
def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    passed = (getattr(sys.modules.get(module), "__file__", "") for module in _PASSED)
    return not (name.startswith((*_FOREIGN, "<")) or name in passed)


def users_line(stop: CodeType | None = None) -> Line | None:
    """File and number of the innermost running line of the user's, inside of the code `stop`; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stop:
        if _is_users(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def line_text(line: Line | None) -> str:
    """A line as ``file.py:12: code``; ``""`` for None."""
    if line is None:
        return ""
    name, number = line
    code = textwrap.shorten(linecache.getline(name, number), 100, placeholder=" ...")
    return f"{os.path.basename(name)}:{number}: {code}".rstrip(": ")


def in_one_line(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def values(tensor: Tensor) -> Tensor | None:
    """The numbers of a floating or complex tensor, detached; None where there are none to look at."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    tensor = torch.func.debug_unwrap(tensor).detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def finite(tensor: Tensor) -> bool:
    """Whether every element is; True of integers. Waits for the device."""
    seen = values(tensor)
    if seen is None:
        return True
    # One pass: a sum in FP32 is finite only if every element is. torch.isfinite is four operations.
    wide = torch.float64 if seen.dtype is torch.float64 else torch.float32
    total = seen if seen.numel() == 1 else seen.sum(dtype=wide)
    return math.isfinite(total.item()) or (seen.numel() > 1 and bool(torch.isfinite(seen).all()))


def only_minus_infinity(tensor: Tensor) -> bool:
    """Whether it holds -inf and no other value that is not finite, as a mask on scores."""
    seen = values(tensor)
    return seen is not None and not bool((torch.isnan(seen) | torch.isposinf(seen)).any())


def over(tensor: Tensor, scale: float, dtype: torch.dtype | None = None) -> Tensor:
    """A gradient without the loss scale, in a format, its own by default."""
    return (tensor.detach().double() / scale).to(dtype or tensor.dtype)


def facts(tensor: Tensor, name: str) -> TensorFacts:
    """Facts of a tensor, under a name. Waits for the device."""
    seen = values(tensor)
    shape, form = list(tensor.shape), name_of(tensor.dtype)
    if seen is None:
        return TensorFacts(name, shape, form, 0.0, 0.0, 0, 0, 0)
    size = seen.abs()
    normal = size[torch.isfinite(size) & (size != 0)].double()
    largest, smallest = (float(normal.max()), float(normal.min())) if normal.numel() else (0.0, 0.0)
    zeros, infinities, nans = (int(one.sum()) for one in (size == 0, torch.isinf(size), torch.isnan(size)))
    return TensorFacts(name, shape, form, largest, smallest, zeros, infinities, nans)
