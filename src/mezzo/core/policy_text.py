"""The text forms of a policy: the short string, the loss scale's own little syntax, and the TOML file.

This file turns text into fields and fields into text; what the fields may hold is decided in `mezzo.core.policy`.

    bf16
    params=fp32,compute=bf16,output=fp32
    fp16,op.softmax=lower,module.blocks.*.norm=fp32,loss_scale=dynamic(init=1024,growth_interval=100)
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEYS = ("compute", "params", "output", "loss_scale")
_DYNAMIC = re.compile(r"dynamic(?:\((.*)\))?", re.DOTALL)
# What a user may set; the rest of DynamicLossScale's fields is state.
_SETTINGS = {
    f.name: f.default
    for f in fields(DynamicLossScale)
    if f.default is not MISSING and f.name not in ("scale", "good_steps", "overflows", "stuck")
}


@dataclass
class Fields:
    """A policy's fields as read, before anything is judged, and where each was found (for errors)."""

    values: dict[str, str] = field(default_factory=dict)
    ops: list[tuple[str, str]] = field(default_factory=list)
    modules: list[tuple[str, str]] = field(default_factory=list)

    def put(self, key: str, value: str) -> None:
        """File one `key=value`; the key may be `op.NAME` or `module.PATTERN`."""
        head, _, rest = key.partition(".")
        if head == "op" and rest:
            self.ops.append((rest, value))
        elif head == "module" and rest:
            self.modules.append((rest, value))
        elif key not in KEYS:
            raise unknown_name("key", key, [*KEYS, "op.NAME", "module.PATTERN"])
        elif key in self.values:
            raise UsageError(f"{key} is given twice. Keep one of the two.")
        else:
            self.values[key] = value


def read_string(text: str, presets: Mapping[str, object]) -> Fields:
    """The fields of a short string: a preset's name first, if any, then `key=value` parts."""
    found = Fields()
    where = f"policy {text!r}: "
    parts = [part.strip() for part in _split(text)]
    try:
        for index, part in enumerate(parts):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if equals:
                found.put(key, value)
            elif index == 0 and part in presets:
                found.values["compute"] = part
            elif index == 0 and part:
                raise unknown_name("precision", part, presets)
            else:
                raise UsageError(
                    f"{part!r} is no key=value. A preset's name may stand first, and nowhere else."
                )
    except UsageError as error:
        raise type(error)(f"{where}{error}") from None
    return found


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    return re.split(r",(?![^(]*\))", text)


def canonical_loss_scale(text: str) -> str:
    """The one way in which a loss scale is printed; `auto` stays `auto`."""
    text = text.strip()
    if text == "auto":
        return text
    scale = loss_scale_of(text)
    if isinstance(scale, NoLossScale):
        return "none"
    if isinstance(scale, StaticLossScale):
        return number(scale.scale)
    own = [
        f"{name}={number(getattr(scale, name))}"
        for name, default in _SETTINGS.items()
        if getattr(scale, name) != default
    ]
    return f"dynamic({','.join(own)})" if own else "dynamic"


def loss_scale_of(text: str) -> LossScale:
    """The loss scale that `none`, `dynamic`, `dynamic(init=1024)` or a number stands for."""
    text = text.strip()
    where = f"policy 'loss_scale={text}': "
    if text == "auto":
        raise UsageError(f"{where}the compute format is still open. Resolve the policy first.")
    if text == "none":
        return NoLossScale()
    try:
        dynamic = _DYNAMIC.fullmatch(text)
        if dynamic is None:
            return StaticLossScale(_value(text))
        settings: dict[str, Any] = {}
        for part in (dynamic[1] or "").split(","):
            if not part.strip():
                continue
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in _SETTINGS:
                raise unknown_name("setting", name, _SETTINGS)
            if name in settings:
                raise UsageError(f"{name} is given twice. Keep one of the two.")
            given = _value(value)
            whole = isinstance(_SETTINGS[name], int) and given.is_integer()
            settings[name] = int(given) if whole else given
        return DynamicLossScale(**settings)
    except UsageError as error:
        raise type(error)(f"{where}{error}") from None


def number(value: float) -> str:
    """A number as a person would write it: 1024, 2**-14, 0.3. It reads back to the same FP32 value."""
    if float(value).is_integer() and abs(value) < 2**24:
        return str(int(value))
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 else repr(float(value))


def _value(text: str) -> float:
    power = re.fullmatch(r"2(?:\.0?)?\*\*(-?\d{1,4})", text)
    try:
        return math.ldexp(1.0, int(power[1])) if power else float(text)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r} is no loss scale. Use none, dynamic, dynamic(init=1024,growth_interval=100) or a number "
            "such as 1024 or 2**10."
        ) from None


def to_toml(
    values: Mapping[str, str], ops: tuple[tuple[str, str], ...], modules: tuple[tuple[str, str], ...]
) -> str:
    """The fields as a TOML file."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    for table, pairs in (("ops", ops), ("modules", modules)):
        if pairs:
            lines += [
                "",
                f"[{table}]",
                *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in pairs),
            ]
    return "\n".join(lines) + "\n"


def read_toml(path: str | os.PathLike[str]) -> Fields:
    """The fields of a TOML file."""
    data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    found = Fields()
    for key, value in data.items():
        if key in ("ops", "modules"):
            getattr(found, key).extend(value.items())
        else:
            found.put(key, str(value))
    return found
