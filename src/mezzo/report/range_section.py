"""Where the numbers of a run lie: exponents, shares lost, updates over weights."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.report.markup import Markup
from mezzo.report.run import Run


def ranges(runs: Sequence[Run]) -> Markup | None:
    """The section; None where no run was watched."""
    return None
