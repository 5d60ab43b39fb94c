"""How fp8 factors are scaled: one value, which a policy's text says and prints.

An 8-bit format spans few binades (e4m3fn eighteen, e5m2 thirty-two), so a tensor is multiplied by a power of two that
brings its largest magnitude just under the format's largest value, and the product is divided by it again. Powers of
two, because they round nothing: what 8 bits lose is then lost by one rounding, and the inverse is exact.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from mezzo.core.errors import UsageError, unknown_name

GRANULARITIES = ("rowwise", "tensorwise")
MOST_HISTORY = 1 << 16
MOST_MARGIN = 15


@dataclass(frozen=True)
class Fp8Scaling:
    """How the scale of an fp8 factor is found. Equal values are equal; printed, they read back as themselves.

    >>> str(Fp8Scaling(history=16, margin=1)), Fp8Scaling.parse("rowwise") == Fp8Scaling("rowwise")
    ('tensorwise(history=16,margin=1)', True)

    Args:
        granularity: ``tensorwise``, one scale a tensor; ``rowwise``, one for each row of a product's left factor and
            each column of its right one, which are the dimensions that the product keeps.
        history: 0 for *dynamic* scales, from the very tensor that is cast, which is read twice; n for *delayed* ones,
            from the largest magnitude of the last n steps, which is read once and saturates where a step outgrows it.
        margin: how many binades are left free below the format's largest value.
        pays_from: where fp8 has hardware, the smallest ``K * N / (K + N)`` of a layer that is multiplied in it (a
            layer is K inputs, N outputs); smaller ones stay bf16. ``None`` for what is known of the hardware, 0 for
            all layers.

    Raises:
        UnknownNameError: a granularity that does not exist.
        UsageError: a number out of range; rowwise scales with a history.
    """

    granularity: str = "tensorwise"
    history: int = 0
    margin: int = 0
    pays_from: float | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise unknown_name("fp8 scaling", str(self.granularity), GRANULARITIES)
        for name, most in (("history", MOST_HISTORY), ("margin", MOST_MARGIN)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise UsageError(f"fp8 scaling: {name}={value!r}. Use a whole number from 0 to {most}.")
        pays_from = self.pays_from
        if pays_from is not None:
            is_number = isinstance(pays_from, (int, float)) and not isinstance(pays_from, bool)
            if not (is_number and 0 <= pays_from < math.inf):
                raise UsageError(
                    f"fp8 scaling: pays_from={pays_from!r}. Use a number from 0 up, or leave it out."
                )
            object.__setattr__(self, "pays_from", float(pays_from))
        if self.granularity == "rowwise" and self.history:
            raise UsageError(
                f"fp8 scaling: rowwise(history={self.history}): rows are other samples each step, whose past says "
                f"nothing. Use tensorwise(history={self.history}), or rowwise without a history."
            )

    @classmethod
    def parse(cls, text: str, where: str = "") -> Fp8Scaling:
        """The scaling that `tensorwise`, `rowwise` or `tensorwise(history=16,margin=1,pays_from=360)` stands for.

        Args:
            text: what was written; spaces around words do no harm.
            where: how an error begins, for instance ``"policy 'scaling=colwise': "``.

        Raises:
            UnknownNameError: an unknown granularity or setting.
            UsageError: no such form, something given twice, or a number out of range.
        """
        written = re.fullmatch(r"\s*([^()]*?)\s*(?:\(([^()]*)\)\s*)?", text)
        if written is None:
            raise UsageError(f"{where}{text!r} is no fp8 scaling. {_FORMS}")
        try:
            return cls(written[1], **_settings(written[2] or ""))
        except UsageError as error:
            raise type(error)(f"{where}{error}") from None

    def __str__(self) -> str:
        given = ((name, getattr(self, name), default) for name, default in _SETTINGS.items())
        changed = ",".join(f"{name}={_print(value)}" for name, value, default in given if value != default)
        return f"{self.granularity}({changed})" if changed else self.granularity


_SETTINGS: dict[str, Any] = {f.name: f.default for f in fields(Fp8Scaling) if f.name != "granularity"}
_FORMS = "Use tensorwise, rowwise, or tensorwise(history=16,margin=1,pays_from=360)."


def _settings(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in _SETTINGS:
            raise unknown_name("setting of an fp8 scaling", name, _SETTINGS)
        if name in settings:
            raise UsageError(f"an fp8 scaling has {name} twice. Keep one of the two.")
        settings[name] = _number(name, value if equals else "")
    return settings


def _number(name: str, text: str) -> int | float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"fp8 scaling: {name}={text!r} is no number. {_FORMS}")
    return int(number) if number.is_integer() else number


def _print(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)
