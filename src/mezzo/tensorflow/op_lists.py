"""Which ops grappler's auto mixed precision may, must and must not run in 16 bits: ``op_lists.toml``, read.

Four lists decide the colour of an op:

- **allow**: always 16 bits (matrix products, convolutions);
- **infer**: 16 bits between two allow ops, unless a deny op is upstream (additions, activations, softmax);
- **deny**: never, and what follows it through infer and clear ops stays FP32 too (exp, pow, losses);
- **clear**: has no numerics of its own, so it takes its neighbours' colour (reshape, relu, max pooling).

An op on no list stays as it is and nothing passes through it. Each mode of the pass has its own lists.

>>> lists = op_lists("onednn_bfloat16", environ={})
>>> lists.colour("MatMul"), lists.colour("Tanh"), lists.colour("Exp"), lists.colour("Reshape"), lists.colour("Cos")
('allow', 'infer', 'deny', 'clear', 'other')
>>> op_lists("cuda", {"deny": ["Tanh"]}, environ={}).colour("Tanh")
'deny'
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from mezzo.core.errors import UsageError, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "op_lists.toml"
COLOURS = ("allow", "infer", "deny", "clear")
NO_LIST = "other"
"""In an override: off every list. As a colour: on no list."""

Overrides = Mapping[str, Iterable[str]]

_VARIABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
LEVEL_VARIABLE = _VARIABLE + "LEVEL"
_LEVELS = ("", "TENSOR_CORES_ONLY", "TREAT_INFER_AS_DENY", "UNSAFE_FORCE_ALL")
# TF still reads the lists' former names, after the present ones.
_FORMER = {"allow": "WHITELIST", "infer": "GRAYLIST", "deny": "BLACKLIST"}
VARIABLES = (
    *(
        f"{_VARIABLE}{name}_{verb}"
        for name in (*(f"{colour.upper()}LIST" for colour in COLOURS), *_FORMER.values())
        for verb in ("ADD", "REMOVE")
    ),
    LEVEL_VARIABLE,
)
"""Every environment variable that says something of the lists."""


@dataclass(frozen=True)
class OpLists:
    """The lists of one mode of the pass.

    Attributes:
        mode: `cuda`, `onednn_bfloat16`, `onednn_float16` or `cpu`.
        pass_name: grappler's name of the optimizer.
        option: the field of TensorFlow's `RewriterConfig` that turns it on.
        dtype: what painted types become, `"float16"` or `"bfloat16"`.
        device: the device type whose nodes the pass looks at, `"GPU"` or `"CPU"`.
        allow, infer, deny, clear: names of TensorFlow ops.
        force_all: TF's level UNSAFE_FORCE_ALL: paint whatever can be painted.
    """

    mode: str
    pass_name: str
    option: str
    dtype: str
    device: str
    allow: frozenset[str]
    infer: frozenset[str]
    deny: frozenset[str]
    clear: frozenset[str]
    force_all: bool = False

    def colour(self, op: str) -> str:
        """The list that `op` is on: `allow`, `infer`, `deny`, `clear`, or `other` for none."""
        return next((colour for colour in COLOURS if op in getattr(self, colour)), NO_LIST)

    def overridden(self, overrides: Overrides) -> OpLists:
        """The same with ops moved: each op of `overrides[colour]` is then on that list and on no other.

        Args:
            overrides: `allow`, `infer`, `deny`, `clear` or `other` -> names of ops.

        Raises:
            UsageError: a key that is no list, or an op that two keys claim.
        """
        target: dict[str, str] = {}
        for colour, ops in overrides.items():
            if colour not in (*COLOURS, NO_LIST):
                raise unknown_name("list", colour, [*COLOURS, NO_LIST], where="op_lists: ")
            if isinstance(ops, str):
                raise UsageError(
                    f"op_lists: {colour!r} is given the string {ops!r}; give a list of ops: [{ops!r}]."
                )
            for op in ops:
                if target.setdefault(op, colour) != colour:
                    raise UsageError(
                        f"op_lists: {op!r} is under both {target[op]!r} and {colour!r}. Keep one of them."
                    )
        moved = {
            colour: frozenset(op for op in getattr(self, colour) if target.get(op, colour) == colour)
            | {op for op, wanted in target.items() if wanted == colour}
            for colour in COLOURS
        }
        return self._with(moved)

    def _with(self, ops: Mapping[str, frozenset[str]]) -> OpLists:
        return replace(self, allow=ops["allow"], infer=ops["infer"], deny=ops["deny"], clear=ops["clear"])

    def environment(self) -> dict[str, str]:
        """The environment variables that make TensorFlow's own pass use these lists instead of its own.

        TensorFlow reads them each time the pass runs. They are all that is to be set of `VARIABLES`: one beside them
        would change the lists once more.
        """
        own = _own(self.mode)
        found: dict[str, str] = {}
        for colour in COLOURS:
            wanted, given = getattr(self, colour), getattr(own, colour)
            for verb, ops in (("ADD", wanted - given), ("REMOVE", given - wanted)):
                if ops:
                    found[f"{_VARIABLE}{colour.upper()}LIST_{verb}"] = ",".join(sorted(ops))
        if self.force_all:
            found[LEVEL_VARIABLE] = "UNSAFE_FORCE_ALL"
        return found


def modes() -> tuple[str, ...]:
    """The names that `op_lists` takes."""
    return tuple(_data()["modes"])


def op_lists(
    mode: str, overrides: Overrides | None = None, *, environ: Mapping[str, str] | None = None
) -> OpLists:
    """The lists of `mode`, as TensorFlow's environment variables and then `overrides` change them.

    Args:
        mode: `cuda` (FP16 on a GPU), `onednn_bfloat16` (BF16 on a CPU), `onednn_float16` (FP16 on a CPU with
            AMX-FP16 or AVX-NE-CONVERT) or `cpu` (FP16 on a CPU with the GPU's lists).
        overrides: a list's name (or `other`, for none of them) -> ops to move there.
        environ: where TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_* are looked up; `os.environ` unless given.

    Raises:
        UnknownNameError: no such mode, or no such list in `overrides`.
        UsageError: lists that TensorFlow would refuse: an op on two of them.
    """
    if mode not in modes():
        raise unknown_name("mode", mode, modes(), where="op_lists: ")
    lists = _from_environment(_own(mode), os.environ if environ is None else environ)
    return lists.overridden(overrides) if overrides else lists


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads(files("mezzo.tensorflow").joinpath(FILE).read_text("utf-8"))
    return data


@cache
def _own(mode: str) -> OpLists:
    """What `mode` has in TensorFlow when nobody changes it."""
    settings = _data()["modes"][mode]
    tables = [_data()["lists"][name] for name in settings["tables"]]
    ops = {colour: frozenset(op for table in tables for op in table.get(colour, ())) for colour in COLOURS}
    return OpLists(
        mode,
        pass_name=settings["pass"],
        option=settings["option"],
        dtype=settings["dtype"],
        device=settings["device"],
        allow=ops["allow"],
        infer=ops["infer"],
        deny=ops["deny"],
        clear=ops["clear"],
    )


def _from_environment(lists: OpLists, environ: Mapping[str, str]) -> OpLists:
    level = environ.get(LEVEL_VARIABLE, "").upper()
    if level not in _LEVELS:
        raise unknown_name("level", level, _LEVELS[1:], where=f"{LEVEL_VARIABLE}: ")
    on_a_gpu = "gpu" in _data()["modes"][lists.mode]["tables"]
    if level == "UNSAFE_FORCE_ALL" and not on_a_gpu:
        raise UsageError(
            f"{LEVEL_VARIABLE}=UNSAFE_FORCE_ALL: TensorFlow refuses it in mode {lists.mode!r}; unset it."
        )
    ops = {colour: getattr(lists, colour) for colour in COLOURS}
    for colour in COLOURS:
        if level == "TENSOR_CORES_ONLY" and on_a_gpu and colour != "allow":
            ops[colour] = frozenset()  # TF then reads no variable for it either
            continue
        for name in filter(None, (f"{colour.upper()}LIST", _FORMER.get(colour))):
            ops[colour] |= _words(environ, f"{_VARIABLE}{name}_ADD")
            ops[colour] -= _words(environ, f"{_VARIABLE}{name}_REMOVE")
    if level == "TREAT_INFER_AS_DENY":
        ops["deny"], ops["infer"] = ops["deny"] | ops["infer"], frozenset()
    twice = sorted(
        op for op in frozenset().union(*ops.values()) if sum(op in listed for listed in ops.values()) > 1
    )
    if twice:
        raise UsageError(
            f"{_VARIABLE}*: {', '.join(twice)} would be on two lists, and TensorFlow then rewrites nothing. "
            "With every ..._ADD of one list goes a ..._REMOVE of the list that the op is on."
        )
    return replace(lists._with(ops), force_all=level == "UNSAFE_FORCE_ALL")


def _words(environ: Mapping[str, str], name: str) -> frozenset[str]:
    return frozenset(filter(None, environ.get(name, "").split(",")))
