"""What a user writes to move ops between the rewrite's lists: a mapping, or a TOML file with the same keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from mezzo.core.errors import UsageError, unknown_name
from mezzo.tensorflow.op_lists import COLOURS, NO_LIST

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_EXAMPLE = '{"deny": ["Tanh"]}'


def overrides_of(given: Mapping[str, Iterable[str]] | str | os.PathLike[str]) -> dict[str, list[str]]:
    """The lists that `given` names, each with the ops to be moved there.

    Args:
        given: `{"deny": ["Tanh"], "infer": [...]}`, or the path of a TOML file: ``deny = ["Tanh"]``.

    Raises:
        UnknownNameError: a key that is no list, or an op that TensorFlow has not.
        UsageError: no such file, no TOML, or values that are no lists of names.
    """
    where, lists, example = "op_lists: ", given, _EXAMPLE
    if isinstance(given, (str, os.PathLike)):
        where, lists, example = f"{os.fspath(given)}: ", _read(given), 'deny = ["Tanh"]'
    if not isinstance(lists, Mapping):
        raise UsageError(
            f"op_lists is {given!r}; give a mapping such as {_EXAMPLE}, or the path of a TOML file"
        )
    moved = {}
    for colour, ops in lists.items():
        if colour not in (*COLOURS, NO_LIST):
            raise unknown_name("list", str(colour), [*COLOURS, NO_LIST], where=where)
        if isinstance(ops, (str, Mapping)) or not isinstance(ops, Iterable):
            raise UsageError(f"{where}{colour} is {ops!r}; give a list of names of ops, as in {example}")
        moved[colour] = [_op(op, where) for op in ops]
    return moved


def _op(name: Any, where: str) -> str:
    if not isinstance(name, str) or op_def_registry.get(name) is None:
        known = [op for op in dir(tf.raw_ops) if not op.startswith("_")]
        error = unknown_name("op", str(name), known)
        mend = str(error).rpartition(".")[2] if "Did you mean" in str(error) else ""
        said = f"{where}unknown op {name!r}. Use the name of one of TensorFlow's ops, as tf.raw_ops has them."
        raise type(error)(said + mend)
    return name


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"op_lists: {os.fspath(path)!r}: {error.strerror or error}. Give the path of a TOML file that can be "
            f"read, or a mapping such as {_EXAMPLE}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"op_lists: {os.fspath(path)!r} is no TOML: {error}") from None
