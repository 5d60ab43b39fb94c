"""Sensitivity: by how much a format would change the loss, module by module; and which formats a module can bear.

The records of `mezzo.pytorch.sensitivity` hold, for each module, format and step, two sums over the elements of the
module's outputs, of e = gradient * (output in the format - output in FP32): the signed sum is the change of the loss to
first order, the sum of squares the variance of that change if each error's sign is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mezzo.core.formats import Format
from mezzo.core.records import ModuleRounding, SensitivityRecord

RANKED = ("bf16", "fp16", "e5m2", "e4m3fn")
"""The formats that are ranked unless others are given."""
MARGIN = 0.005
"""The change of the loss that all modules together may make, as a share of the loss: `mezzo compare`'s own margin."""
SHOWN = 20
"""Modules that are printed; JSON has all of them."""


@dataclass(frozen=True)
class ModuleSensitivity:
    """One module of a ranking.

    Args:
        module: its path; ``""`` is the model itself.
        kind: its class.
        changes: format -> expected change of the loss if the module alone runs in that format; infinite if a result is
            not finite. Only modules with a product have formats of fewer than 16 bits.
        causes: format -> the operation that made the first number too large for the format.
        bears: the formats whose change is within the ranking's `limit`, the one with the fewest bits first.
    """

    module: str
    kind: str
    changes: dict[str, float]
    causes: dict[str, str] = field(default_factory=dict)
    bears: list[str] = field(default_factory=list)

    @property
    def lowest(self) -> str:
        """The format with the fewest bits that it can bear; ``fp32`` if it bears none."""
        return self.bears[0] if self.bears else "fp32"

    def cell(self, format: str) -> str:
        """The change in one format, as text."""
        if format not in self.changes:
            return "-"
        change = self.changes[format]
        if math.isfinite(change):
            return f"{change:.1g}"
        return f"overflow in {self.causes[format]}" if self.causes.get(format) else "not finite"


@dataclass(frozen=True)
class Sensitivity:
    """A ranking of the modules that compute something of their own, the most sensitive first.

    A module that can't bear a 16-bit format comes before one that only can't bear 8 bits. Among equals, the one that
    changes the loss most in the first format comes first.

    Args:
        loss: mean magnitude of the losses of the measured steps.
        margin: share of the loss that all modules together may change it by.
        limit: change that one module may make: ``margin * loss / sqrt(number of modules)``, since random changes add in
            squares.
        notes: what could not be measured, and why.
    """

    formats: list[str]
    modules: list[ModuleSensitivity]
    loss: float
    margin: float
    limit: float
    steps: int
    notes: list[str] = field(default_factory=list)

    def total(self, format: str) -> float:
        """Expected change of the loss with every module in a format: the root of the sum of squares."""
        return math.sqrt(math.fsum(one.changes.get(format, 0.0) ** 2 for one in self.modules))

    @property
    def title(self) -> str:
        """What the figures are."""
        return (
            f"change of the loss by each module, most sensitive first; at most {self.limit:.1g} each "
            f"({self.margin:.1%} of {self.loss:.3g} over the root of {len(self.modules)})"
        )

    def lines(self) -> list[str]:
        """A line for each of the `SHOWN` most sensitive modules, and the notes."""
        found = []
        for one in self.modules[:SHOWN]:
            cells = ", ".join(f"{name} {one.cell(name)}" for name in self.formats)
            found.append(f"{one.module or '(the model)'}: {one.lowest} ({cells})")
        if self.modules[SHOWN:]:
            found.append(f"{len(self.modules[SHOWN:])} less sensitive modules are in the JSON")
        return [*found, *self.notes]

    def to_plain(self) -> dict[str, Any]:
        """As values for JSON; a change that is not finite is None."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        modules = []
        for one in self.modules:
            changes = {name: number(change) for name, change in one.changes.items()}
            modules.append({**asdict(one), "lowest": one.lowest, "changes": changes})
        return {
            **asdict(self),
            "loss": number(self.loss),
            "limit": number(self.limit),
            "totals": {name: number(self.total(name)) for name in self.formats},
            "modules": modules,
        }


def expected_square(roundings: Sequence[ModuleRounding]) -> float:
    """The expected squared change of the loss, from one module and format in several steps.

    The mean over the steps of the larger of ``signed**2`` and ``squares``. For random errors both have the same
    expectation, and `squares` varies less. For errors with a common direction (cancellation, saturation) only
    `signed` shows it. Infinite if a sum is NaN or infinite.

    >>> expected_square([ModuleRounding("a", "Linear", "bf16", signed=0.1, squares=0.04)])
    0.04
    """
    if not roundings:
        return 0.0
    if not all(math.isfinite(one.signed) and math.isfinite(one.squares) for one in roundings):
        return math.inf
    return math.fsum(max(one.signed**2, one.squares) for one in roundings) / len(roundings)


def rank(
    records: Sequence[SensitivityRecord], formats: Sequence[Format], margin: float = MARGIN
) -> Sensitivity | None:
    """The ranking of the modules, from a record per measured step; None if nothing was measured."""
    found: dict[str, dict[str, list[ModuleRounding]]] = {}
    kinds: dict[str, str] = {}
    for row in (row for record in records for row in record.rows):
        found.setdefault(row.module, {}).setdefault(row.format, []).append(row)
        kinds[row.module] = row.kind
    if not found:
        return None
    loss = math.fsum(abs(record.loss) for record in records) / len(records)
    limit = margin * loss / math.sqrt(len(found))
    bits = {form.name: form.bits for form in formats}
    widths = sorted(set(bits.values()), reverse=True)
    modules = []
    for module, by_format in found.items():
        changes = {name: math.sqrt(expected_square(rows)) for name, rows in by_format.items()}
        causes = {
            name: next((row.cause for row in by_format[name] if row.cause), "")
            for name, change in changes.items()
            if not math.isfinite(change)
        }
        bears = [name for name, change in changes.items() if change <= limit]
        bears.sort(key=lambda name: (bits[name], changes[name]))
        modules.append(ModuleSensitivity(module, kinds[module], changes, causes, bears))

    def calm(one: ModuleSensitivity) -> tuple[float, ...]:
        """Refused formats, those with most bits first, then the change in the first format."""
        refused = [bits[name] for name in bits if name in one.changes and name not in one.bears]
        return (*(-refused.count(width) for width in widths), -one.changes.get(formats[0].name, 0.0))

    modules.sort(key=calm)
    notes = list(dict.fromkeys(note for record in records for note in record.notes))
    return Sensitivity(list(bits), modules, loss, margin, limit, len(records), notes)
