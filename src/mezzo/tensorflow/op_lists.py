"""A user's changes to the op lists of grappler's auto mixed precision, as the environment variables that it reads.

TensorFlow has four lists: `allow` (always 16 bits), `infer` (16 bits unless a deny op is upstream), `deny` (FP32, and
what follows it) and `clear` (the format of its neighbours). An op on no list, here `other`, stays in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from mezzo.core.errors import UsageError, unknown_name

_LISTS = ("allow", "infer", "deny", "clear")
_PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
VARIABLES = tuple(
    f"{_PREFIX}{name}_{verb}"
    # TensorFlow reads the former names of three lists too, after the present ones.
    for name in (*(f"{each.upper()}LIST" for each in _LISTS), "WHITELIST", "GRAYLIST", "BLACKLIST")
    for verb in ("ADD", "REMOVE")
)
"""The environment variables that add ops to lists and remove them."""
LEVEL = _PREFIX + "LEVEL"
"""The one that changes whole lists. Mezzo leaves it as it is: TensorFlow applies it after the others."""

_EXAMPLE = '{"deny": ["Tanh"]}'


def list_of_each(lists: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Op -> the list that it is moved to.

    Args:
        lists: `{"deny": ["Tanh"], "infer": [...]}`.

    Raises:
        UnknownNameError: a key that is no list, or an op that TensorFlow has not.
        UsageError: values that are no lists of names, or an op that two lists claim.
    """
    if not isinstance(lists, Mapping):
        raise UsageError(
            f"op_lists is {lists!r}; give a mapping such as {_EXAMPLE}. Of a TOML file, tomllib.load's."
        )
    found: dict[str, str] = {}
    for name, ops in lists.items():
        if name not in (*_LISTS, "other"):
            raise unknown_name("list", str(name), [*_LISTS, "other"], where="op_lists: ")
        if isinstance(ops, (str, Mapping)) or not isinstance(ops, Iterable):
            raise UsageError(f"op_lists: {name} is {ops!r}; give a list of names of ops, as in {_EXAMPLE}")
        for op in ops:
            _check_op(op)
            if found.setdefault(op, name) != name:
                raise UsageError(
                    f"op_lists: {op!r} is under both {found[op]!r} and {name!r}. Keep one of them."
                )
    return found


def environment_of(list_of: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """All of `VARIABLES` that put each op on its list and on no other; what `environ` says of other ops stays."""
    words = {
        name: {op for op in environ.get(name, "").split(",") if op and op not in list_of}
        for name in VARIABLES
    }
    for op, wanted in list_of.items():
        for name in _LISTS:
            words[f"{_PREFIX}{name.upper()}LIST_{'ADD' if name == wanted else 'REMOVE'}"].add(op)
    return {name: ",".join(sorted(ops)) for name, ops in words.items() if ops}


def _check_op(name: Any) -> None:
    if not isinstance(name, str) or op_def_registry.get(name) is None:
        error = unknown_name("op", str(name), [op for op in dir(tf.raw_ops) if not op.startswith("_")])
        mend = str(error).rpartition(".")[2] if "Did you mean" in str(error) else ""
        said = (
            f"op_lists: unknown op {name!r}. Use the name of one of TensorFlow's ops, as tf.raw_ops has them."
        )
        raise type(error)(said + mend)
