"""Names of operations: what a function, or a node of autograd's graph, is called in Mezzo's op table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mezzo.core.rules import RULES as OP_TABLE

_DUNDERS = {
    "truediv": "div",
    "rtruediv": "div",
    "rdiv": "div",
    "itruediv": "div",
    "idiv": "div",
    "radd": "add",
    "iadd": "add",
    "rmul": "mul",
    "imul": "mul",
    "isub": "sub",
    "rsub": "sub",
    "rpow": "pow",
    "ipow": "pow",
    "rmatmul": "matmul",
}

_IN_PLACE = ("add", "sub", "mul", "matmul", "truediv", "div", "floordiv", "mod", "pow")

HOOK = "gradient hook"
"""What is no operation: a function of the script's own on a gradient."""

_POLES = """div true_divide reciprocal log log2 log10 log1p logit rsqrt sqrt pow float_power acos asin atanh xlogy norm
linalg_vector_norm fmod remainder binary_cross_entropy cosine_similarity std var log_softmax softmax
nll_loss lgamma digamma erfinv tan linalg_inv inverse cholesky linalg_solve"""

_DECOMPOSED = r"_?linalg_(eig|svd|qr|lu|chol|inv|solve|lstsq|pinv|matrix_exp|ldl)"

COMPOSED = frozenset(op for op in OP_TABLE if op not in _POLES.split() and not re.match(_DECOMPOSED, op))
"""Operations of many steps, or of one, that have a finite slope everywhere."""

POLES = frozenset(_POLES.split())
"""Operations that have no finite result, or no finite slope, for some finite numbers."""


def of_function(function: Any) -> str:
    """The op's name of a torch function: ``Tensor.__truediv__`` is ``div``, ``exp_`` is ``exp``."""
    name = str(getattr(function, "__name__", function))
    name = name.split(".")[0] if not name.startswith("_") else name
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        return _DUNDERS.get(inner, name if inner in ("getitem", "setitem", "get") else inner)
    return name.rstrip("_") or name


def writes(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function writes what it is given: ``Tensor.mul_``, ``x *= y``, ``x[0] = y``, ``out=``."""
    name = str(getattr(function, "__name__", ""))
    if kwargs.get("out") is not None or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name.strip("_")[1:] in _IN_PLACE
    return name.endswith("_")


def of_node(node: Any) -> str:
    """The op's name of a node: ``LinalgVectorNormBackward0`` is ``linalg_vector_norm``."""
    name = re.sub(r"Backward\d*$", "", str(node.name()).split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
