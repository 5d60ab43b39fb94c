"""The text forms of a policy: the short string, the loss scale, module patterns, and the TOML file.

This file turns text into `Entry` values and back; `mezzo.core.policy` checks them. docs/policies.md has the grammar.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mezzo.core.compute import COMPUTE
from mezzo.core.errors import UnknownNameError, UsageError, did_you_mean, unknown_name
from mezzo.core.formats import ALIASES, FORMATS
from mezzo.core.loss_scale import KINDS, LossScale, NoLossScale, StaticLossScale, fl32, is_real

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = {"ops": "op", "modules": "module"}

PRECISION_NAMES: Mapping[str, str] = {
    **{other: name for other, name in ALIASES.items() if name in COMPUTE},  # torch's: float16, half, bfloat16
    "tensorfloat32": "tf32",
    **dict.fromkeys(("float", "single", "32", "32-true"), "fp32"),
    # Keras's have an underscore, Lightning's a hyphen or only a number.
    **dict.fromkeys(("mixed_float16", "16", "16-mixed", "fp16-mixed"), "fp16"),
    **dict.fromkeys(("mixed_bfloat16", "bf16-mixed"), "bf16"),
}
"""Other names of the precisions, accepted wherever a precision is given."""
_WEIGHTS = {  # Lightning's
    "bf16-true": "bf16 weights without masters. Use 'bf16,masters=none', or with FP32 masters 'bf16,masters=split'",
    "16-true": "fp16 weights without masters, which lose small updates. Use 'fp16,masters=fp32'",
}
_KEYS = "compute params masters state loss_scale recompute scaling recipe bf16_from hidden reduce"
KEYS = tuple(_KEYS.split())

# What a user may set in `dynamic(...)`, or in another kind that moves, with its default: all but the state.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    kind: {field.name: field.default for field in fields(cls) if field.name not in vars(cls().arrays())}
    for kind, cls in KINDS.items()
    if cls not in (NoLossScale, StaticLossScale)
}

# Another separator than a comma, before a key.
_NO_COMMA = re.compile(rf"(?<=[^\s,])\s*[;\s]\s*(?=(?:{'|'.join(KEYS)}|(?:op|module)\.[^\s=]+)\s*=)")

_COMPONENT = r"""[^\s.,=()"'#\[\]]+"""
_PATTERN = re.compile(rf"{_COMPONENT}(?:\.{_COMPONENT})*")


class Entry(NamedTuple):
    """One setting. `key` is one of `KEYS`, or ``op`` or ``module`` with a `name`; errors begin with `where`."""

    key: str
    name: str
    value: str
    where: str


def precision_name(value: object) -> str:
    """Mezzo's name of a precision, for a `torch.dtype` or a name of `PRECISION_NAMES`; any other value as text.

    >>> [precision_name(value) for value in ("half", "bf16-mixed", "mixed_float16", 16, "fp8")]
    ['fp16', 'bf16', 'fp16', 'fp16', 'fp8']
    """
    lower = str(value).removeprefix("torch.").lower()
    return lower if lower in COMPUTE else PRECISION_NAMES.get(lower, str(value))


def read_string(text: str, presets: Mapping[str, object]) -> list[Entry]:
    """The entries of a short string: a preset's name first, if any, then `key=value` parts."""
    where = f"policy {text!r}: "
    if (fixed := _NO_COMMA.sub(",", text)) != text:
        raise UsageError(f"{where}settings are separated by commas. Write {fixed!r}.")
    entries = []
    for index, part in enumerate(re.split(r",(?![^(]*\))", text)):  # commas outside parentheses
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            entries.append(_entry(key, value, where))
        elif index == 0 and precision_name(key) in presets:
            entries.append(Entry("compute", "", key, where))
        elif index == 0 and key in FORMATS:
            using = [each.name for each in COMPUTE.values() if key in (each.forward, each.backward)]
            hint = f"{using[0]} multiplies in it" if using else "no device trains in it"
            raise UnknownNameError(
                f"{where}{key} is a number format (mezzo formats {key}) and not a precision: {hint}. "
                f"Use one of {', '.join(sorted(presets))}."
            )
        elif index == 0 and key.lower() in _WEIGHTS:
            raise UnknownNameError(f"{where}{key} stands for {_WEIGHTS[key.lower()]}.")
        elif index == 0:
            raise unknown_name("precision", key, presets, where=where)
        else:
            late = precision_name(key) in presets and all(entry.key != "compute" for entry in entries)
            first = ",".join([key, *(part for part in text.split(",") if part.strip() != key)])
            raise UsageError(
                f"{where}{key!r} is not key=value. Write key=value parts with commas between them; the first part "
                f"may be one of {', '.join(presets)}.{f' Write {first!r}.' if late else ''}"
            )
    return entries


def _entry(key: str, value: str, where: str) -> Entry:
    head, dot, name = key.partition(".")
    if head in ("op", "module") and dot:
        return Entry(head, name, value, where)
    if key in (*KEYS, "output"):  # output is ignored
        return Entry(key, "", value, where)
    is_path = precision_name(value) in COMPUTE and not dot and not did_you_mean(key, KEYS, cutoff=0.75)
    if (head == "modules" and dot) or is_path:
        near = did_you_mean(key, KEYS, cutoff=0.6)
        raise UnknownNameError(
            f"{where}unknown key {key!r}.{near} For a module: 'module.{name or key}={value}'."
        )
    raise unknown_name("key", key, [*KEYS, "op.NAME", "module.PATTERN"], where=where)


def loss_scale_of(text: str, where: str = "") -> LossScale:
    """The loss scale for `none`, `dynamic`, `dynamic(init=1024)` or a number (`1024`, `2**10`)."""
    text = text.strip()
    if text == "none":
        return NoLossScale()
    try:
        called = re.fullmatch(r"(\w+)(?:\((.*)\))?", text, re.DOTALL)
        if called is not None and called[1] == "statistical":
            raise unknown_name("loss scale kind", called[1], KINDS)  # says what replaced it
        if called is None or called[1] not in _SETTINGS:
            return StaticLossScale(_number(text))
        return KINDS[called[1]](**_settings(called[1], called[2] or ""))
    except UsageError as error:
        raise type(error)(f"{where}{error}") from None


def as_loss_scale(given: LossScale | float | str | None, where: str) -> LossScale | None:
    """The loss scale for an argument: a loss scale, a number, a text, or None, which stays None."""
    if given is None or isinstance(given, LossScale):
        return given
    try:
        if isinstance(given, str):
            return loss_scale_of(given)
        if is_real(given):  # NumPy's numbers too
            return StaticLossScale(given)
    except UsageError as error:
        raise type(error)(f"{where}: loss_scale: {error}") from None
    raise UsageError(
        f"{where}: loss_scale is {given!r}. Use 'dynamic', 'dynamic(init=1024)', 'none', a number such as 1024, "
        "or a mezzo.DynamicLossScale."
    )


def _settings(kind: str, text: str) -> dict[str, Any]:
    known = _SETTINGS[kind]
    settings: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise unknown_name(f"setting of {kind}(...)", name, known)
        if name in settings:
            raise UsageError(f"{kind}(...) sets {name} twice. Keep one of the two.")
        given = _number(value)
        settings[name] = int(given) if isinstance(known[name], int) and given.is_integer() else given
    return settings


def _number(text: str) -> float:
    power = re.fullmatch(r"2\s*(?:\*\*|\^)\s*(-?\d{1,4})", text)
    try:
        return math.ldexp(1.0, int(power[1])) if power else float(text)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r} is not a loss scale. Use none, dynamic, dynamic(init=1024,growth_interval=100), "
            "or a number such as 1024 or 2**10."
        ) from None


def print_loss_scale(scale: LossScale) -> str:
    """The one way in which a loss scale's settings are written."""
    if isinstance(scale, NoLossScale):
        return "none"
    if isinstance(scale, StaticLossScale):
        return _print_number(scale.scale)
    own = ((name, getattr(scale, name), default) for name, default in _SETTINGS[scale.kind].items())
    changed = ",".join(f"{name}={_print_number(value)}" for name, value, usual in own if value != fl32(usual))
    return f"{scale.kind}({changed})" if changed else scale.kind


def _print_number(value: float) -> str:
    """A number as a person would write it (1024, 2**-14, 0.3), reading back as exactly the same value."""
    if float(value).is_integer() and abs(value) < 2**24:
        return str(int(value))
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 else repr(float(value))


def print_toml(entries: Sequence[Entry]) -> str:
    """The entries as a TOML file: keys first, then the tables `[ops]` and `[modules]`."""
    lines = [f"{entry.key} = {json.dumps(entry.value)}" for entry in entries if entry.key in KEYS]
    for table, key in _TABLES.items():
        rows = [f"{json.dumps(e.name)} = {json.dumps(e.value)}" for e in entries if e.key == key]
        lines += ["", f"[{table}]", *rows] if rows else []
    return "\n".join(lines) + "\n"


def is_toml(text: str) -> bool:
    """Whether a text is the name of a TOML file, with its suffix in lower or upper case."""
    return text.lower().endswith(".toml")


def load_toml(path: str | os.PathLike[str], noun: str, instead: str, example: str) -> dict[str, Any]:
    """A TOML file as a dictionary; the errors say which kinds of file are meant, and show a line of one."""
    name = os.fspath(path)
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{noun} file {name!r}: {error.strerror or error}. Give the path of a TOML file, such as {instead}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{noun} file {name!r} is not TOML: {error}. Example of a line: {example}") from None


def read_toml(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a TOML file."""
    kinds = "the policy.toml that `mezzo calibrate` writes, or a precision, such as bf16"
    precision, comma, alone = os.fspath(path).rpartition(",")
    if comma:
        kinds = (
            f"{alone.strip()} alone: a policy file has its own precision, and {precision} is not added to it"
        )
    data = load_toml(path, "policy", kinds, 'compute = "bf16"')
    entries = []
    for keys, value in _leaves(data):
        where = f"{os.fspath(path)}: {'.'.join(keys)}: "
        if keys[0] not in (*KEYS, "output", *_TABLES):
            raise unknown_name("key", keys[0], [*KEYS, *_TABLES], where=where)
        if keys[0] in _TABLES and len(keys) == 1:
            raise UsageError(f'{where}it is a table. Write a line [{keys[0]}], and under it NAME = "fp32".')
        if keys[0] in KEYS and len(keys) > 1:
            raise UsageError(f'{where}{keys[0]} is a single value, not a table. Write {keys[0]} = "...".')
        number = keys[0] == "loss_scale" and isinstance(value, (int, float)) and not isinstance(value, bool)
        if not isinstance(value, str) and not number:
            raise UsageError(f'{where}{value!r} is not a string. Write it in quotes: "{value}".')
        entries.append(Entry(_TABLES.get(keys[0], keys[0]), ".".join(keys[1:]), str(value), where))
    return entries


def _leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with its path of keys: bare dotted keys (blocks.0.norm = ...) nest in TOML."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def is_pattern(text: str) -> bool:
    """Whether the text is a dotted path, with `*` for a component or a part of one and `**` for any number of them."""
    return _PATTERN.fullmatch(text) is not None


def matches(pattern: str, path: str) -> bool:
    """Whether a module pattern matches a dotted path.

    >>> [matches("blocks.*.norm*", path) for path in ("blocks.0.norm1", "blocks.0.attn.norm", "norm")]
    [True, False, False]
    >>> matches("**.norm", "norm") and matches("**.norm", "blocks.0.norm")
    True
    """
    return _regex(pattern).fullmatch("." + path) is not None


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"*": r"\.[^.]+", "**": r"(?:\.[^.]+)*"}
    found = (parts.get(one) or r"\." + re.escape(one).replace(r"\*", "[^.]*") for one in pattern.split("."))
    return re.compile("".join(found))
