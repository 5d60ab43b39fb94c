"""The final metric, read from what the script prints: a pattern, a direction, and a margin in the metric's
own units.

What can't be known from a number is declared here. *Direction*: higher is better, unless the pattern's own
text names a loss, an error or another quantity of which less is better. *Units*: a number that is followed
by `%`, or that lies above 1.5 in an FP32 run, is in percent, and the default margin is 0.2 points; else it
is a fraction, and it is 0.002. Where less is better the default margin is relative, like the loss's: a
validation loss has no points.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mezzo.core.errors import UsageError
from mezzo.core.verdict import Margins

POINTS = 0.2
PERCENT_ABOVE = 1.5
LESS_IS_BETTER = (
    "loss", "err", "perplexity", "ppl", "mse", "mae", "nll", "bpc", "bpb", 
    "wer", "cer", "fid", "distance", "entropy",
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """How the metric is found and judged.

    Args:
        pattern: a regular expression with at least one group: the number. The last match in the output
        counts.
        better: ``"higher"``, ``"lower"``, or ``"auto"``: by the words in the pattern.
        margin: the largest acceptable harm in the metric's units; None for the default that the module
        declares.

    Raises:
        UsageError: the pattern is no regular expression or has no group; another word for `better`; a margin
        <= 0.
    """

    pattern: str
    better: str = "auto"
    margin: float | None = None

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise UsageError(
                f"--metric {self.pattern!r}: not a regular expression: {error}. Put a "
                "backslash before a sign that stands for itself; for instance 'accuracy: ([0-9.]+)'"
            ) from error
        if not groups:
            raise UsageError(
                f"--metric {self.pattern!r}: no group. Put parentheses around the number, "
                "as in 'accuracy: ([0-9.]+)'."
            )
        if self.better not in ("auto", "higher", "lower"):
            raise UsageError(f"--metric-better {self.better!r}: use one of auto, higher, lower")
        if self.margin is not None and not 0 < self.margin < math.inf:
            raise UsageError(f"--metric-margin {self.margin:g}: give a number above 0, in the metric's units")

    @property
    def higher(self) -> bool:
        """Whether a higher value is better."""
        if self.better == "auto":
            return not any(word in self.pattern.lower() for word in LESS_IS_BETTER)
        return self.better == "higher"

    def read(self, text: str) -> tuple[float, bool] | None:
        """The last match's number, and whether a percent sign follows it; None where nothing matches.

        Raises:
            UsageError: the group holds something that is no number.
        """
        last = None
        for last in re.finditer(self.pattern, text, re.MULTILINE):  # noqa: B007
            pass
        if last is None:
            return None
        found = last.group(1) or ""
        try:
            value = float(found.strip().rstrip("%"))
        except ValueError:
            raise UsageError(
                f"--metric {self.pattern!r}: its group matched {found!r}, which is no number. "
                "Let the first group hold the number alone."
            ) from None
        percent = found.strip().endswith("%") or re.match(r"\s*%", text[last.end(1) :]) is not None
        return value, percent

    def margins(self, loss: float, percent: bool) -> Margins:
        """The margins of a comparison: the loss's share as given, and the metric's."""
        if self.margin is not None:
            return Margins(loss, self.margin, self.higher)
        if not self.higher:
            return Margins(loss, loss, metric_higher=False, metric_relative=True)
        return Margins(loss, POINTS if percent else POINTS / 100)
