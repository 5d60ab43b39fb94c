"""Which findings an experiment shows at this size, and which it is known not to: ``expected.toml``, read.

The table is a declaration, made once and tested, and not a record of the last run: a finding that is `shown` and no
longer holds is a regression; one that is in `not_shown` is a known negative, with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from mezzo.reproduce.experiment import Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "expected.toml"

WORDS = {
    "holds": "holds",
    "lost": "does not hold any more",
    "known": "known not to show at this size",
    "gained": "holds, though it is known not to show at this size",
    "unlisted": "not in expected.toml",
}
"""Every fate of a finding, in the words that a reader sees."""

COUNTED = {
    "holds": "held",
    "lost": "lost",
    "known": "known negatives",
    "gained": "gained",
    "unlisted": "not listed",
}


def tally(findings: Iterable[Mapping[str, Any]], missing: int = 0, crashed: int = 0) -> str:
    """How many findings of each fate.

    >>> tally([{"fate": "holds"}, {"fate": "known"}, {"fate": "holds"}], missing=1)
    '3 findings: held 2, known negatives 1, missing 1'
    """
    fates = [finding["fate"] for finding in findings]
    counts = {words: fates.count(fate) for fate, words in COUNTED.items()}
    counts |= {"missing": missing, "crashed": crashed}
    told = ", ".join(f"{words} {count}" for words, count in counts.items() if count)
    return f"{len(fates)} finding{'s' * (len(fates) != 1)}{': ' * bool(told)}{told}"


@dataclass(frozen=True)
class Expected:
    """What one experiment shows at one effort.

    Args:
        shown: names of the findings that hold.
        not_shown: findings that don't, and why.
    """

    shown: tuple[str, ...] = ()
    not_shown: dict[str, str] = field(default_factory=dict)

    def fate(self, finding: Finding) -> str:
        """Which key of `WORDS` a finding has earned."""
        if finding.name in self.shown:
            return "holds" if finding.holds else "lost"
        if finding.name in self.not_shown:
            return "gained" if finding.holds else "known"
        return "unlisted"

    def missing(self, findings: tuple[Finding, ...]) -> tuple[str, ...]:
        """Findings that should be shown and that the experiment did not even speak of."""
        spoken = {finding.name for finding in findings}
        return tuple(name for name in self.shown if name not in spoken)


def read(text: str | None = None) -> dict[str, dict[str, Expected]]:
    """Experiment -> ``quick`` and ``full`` -> what it shows. The packaged table, unless a text is given.

    Raises:
        ValueError: a table with other keys than `shown` and `not_shown`, or a finding in both. The file is ours, so
            that this is no user's mistake.
    """
    if text is None:
        text = files("mezzo.reproduce").joinpath(FILE).read_text(encoding="utf-8")
    tables: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)
    return {
        name: {effort: _expected(f"{name}.{effort}", table) for effort, table in efforts.items()}
        for name, efforts in tables.items()
    }


def _expected(where: str, table: dict[str, Any]) -> Expected:
    strange = set(table) - {"shown", "not_shown"}
    found = Expected(tuple(table.get("shown", ())), dict(table.get("not_shown", {})))
    both = set(found.shown) & set(found.not_shown)
    if strange or both or not where.endswith((".quick", ".full")):
        raise ValueError(
            f"{FILE} [{where}]: unknown keys {sorted(strange)}, findings in both lists {sorted(both)}"
        )
    return found
