"""What a calibration measured of each module: errors of rounding, times, ranges; as values and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from mezzo.core.errors import UsageError


@dataclass(frozen=True)
class Rounding:
    """To first order, what one rounding does to the loss: the sums of e = gradient * (rounded - exact).

    Args:
        signed: sum of e: the change of the loss, in this step, by these errors.
        squares: sum of e * e: the variance of that sum if each error's sign were drawn by chance.
        absolute: sum of abs(e): no signs can make the change larger.
    """

    signed: float = 0.0
    squares: float = 0.0
    absolute: float = 0.0

    def plus(self, other: Rounding) -> Rounding:
        """Of two roundings in the same step."""
        return Rounding(
            self.signed + other.signed, self.squares + other.squares, self.absolute + other.absolute
        )

    def times(self, number: float) -> Rounding:
        """Of so many independent ones like it; their signs are taken to agree."""
        return Rounding(self.signed * number, self.squares * number, self.absolute * number)


def expected_square(roundings: Sequence[Rounding]) -> float:
    """The expected squared change of the loss, from what several steps saw.

    The mean over the steps of the larger of ``signed**2`` and ``squares``. Where errors are random the two have the
    same expectation and `squares` is the steadier one; where they have a common direction (saturation, cancellation)
    only `signed` sees it. docs/tune.md has the measurement that compares the three sums. Infinite if a step's is no
    number: what could not be computed is not small.

    >>> expected_square([Rounding(signed=0.1, squares=0.04, absolute=1.0)])
    0.04
    """
    if not roundings:
        return 0.0
    if not all(math.isfinite(one.signed) and math.isfinite(one.squares) for one in roundings):
        return math.inf
    return math.fsum(max(one.signed**2, one.squares) for one in roundings) / len(roundings)


@dataclass(frozen=True)
class UnitFacts:
    """A module that does floating-point arithmetic of its own, beside that of the modules that it calls.

    Args:
        path: in the model; ``""`` for the model itself.
        kind: its class's name.
        inner: the modules that it calls directly, by path. Both measurements have them in the lower format; or,
            where that alone makes most of the difference, computing in FP32 and handing out what is rounded.
        ops: its own operations that round.
        calls: in a step.
        seconds: pairs of one call's forward and backward: (FP32, lowered), taken in turns.
        roundings: a step each: lowered against FP32, on the same inputs.
        largest: largest finite magnitude, in FP32, of those of its outputs that lowering puts into 16 bits.
        gradient_errors: a step each: norm of the gradients' difference over the gradients' norm.
        scale_exponent: the largest loss scale, as a power of two, with which its backward pass stays finite.
        overflow: what is not finite in the lower format and is in FP32: ``input`` (so that outputs or gradients are not
            either), ``output``, ``gradient``; ``""``.
        failed: the error that the lower format raises; ``""``.
        unseen: whether it ran without gradients, so that its errors could not be weighed.
        inside: the largest finite magnitude, in the lower format, that its own operations made on the way and the loss
            depends on, where that is close to the format's largest; else 0.
        inside_op: the operation that made it, or the first number that is not finite.
    """

    path: str
    kind: str
    inner: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    calls: int = 1
    seconds: list[list[float]] = field(default_factory=list)
    roundings: list[Rounding] = field(default_factory=list)
    largest: float = 0.0
    gradient_errors: list[float] = field(default_factory=list)
    scale_exponent: int = 0
    overflow: str = ""
    failed: str = ""
    unseen: bool = False
    inside: float = 0.0
    inside_op: str = ""

    @property
    def fp32_seconds(self) -> float:
        """Of a step's calls, the median; NaN where none was timed."""
        return self.calls * median(pair[0] for pair in self.seconds) if self.seconds else math.nan

    @property
    def saved_seconds(self) -> float:
        """What lowering saves in a step: the median of FP32's time less the other's; 0 if noise could be all of it.

        Noise is two standard errors of the median, from the median distance to it. And the pairs must agree by a sign
        test at 5 % (all of 6, 17 of 24): a machine with other work slows down some by more than any format would.
        """
        if not self.seconds:
            return 0.0
        differences = [pair[0] - pair[1] for pair in self.seconds]
        middle = median(differences)
        deviation = 1.4826 * median(abs(one - middle) for one in differences)
        noise = 2.0 * 1.2533 * deviation / math.sqrt(len(differences))
        pairs = len(differences)
        agree = sum(one * middle > 0.0 for one in differences) >= pairs / 2 + 0.98 * math.sqrt(pairs)
        return self.calls * middle if agree and abs(middle) > noise else 0.0


@dataclass(frozen=True)
class EdgeFacts:
    """A tensor that one unit makes and another takes.

    Args:
        producer, consumer: their paths.
        elements: of the tensors, together, in a step.
        seconds: of casting them: down, and the gradients up.
        casts: whether the consumer, lowered, rounds a tensor that comes in FP32; else it takes it as it comes.
        roundings: a step each: of rounding the tensors.
        largest: largest finite magnitude, in FP32, of their elements that the loss depends on, as far as it was seen.
    """

    producer: str
    consumer: str
    elements: int
    seconds: float
    casts: bool
    roundings: list[Rounding] = field(default_factory=list)
    largest: float = 0.0


@dataclass(frozen=True)
class Sensitivities:
    """All that a calibration measured.

    Args:
        format: the lower format.
        model: the class of the model that was measured.
        device: its device's type.
        losses: of the steps that were measured.
        region_seconds: what a module with a format of its own takes, a call, beside its work.
        units, edges: the model's arithmetic and its flow of data.
        notes: what could not be measured, a sentence each.
    """

    format: str
    model: str = ""
    device: str = ""
    losses: list[float] = field(default_factory=list)
    region_seconds: float = 0.0
    units: list[UnitFacts] = field(default_factory=list)
    edges: list[EdgeFacts] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """As JSON; NaN and infinities as Python writes them."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sensitivities:
        """What `to_json` wrote.

        Raises:
            UsageError: the text is something else.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            units = [UnitFacts(**{**one, "roundings": _roundings(one)}) for one in data.pop("units")]
            edges = [EdgeFacts(**{**one, "roundings": _roundings(one)}) for one in data.pop("edges")]
            return cls(**data, units=units, edges=edges)
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"not a sensitivity measurement: {text[:80]!r} ({error})") from error


def _roundings(data: dict[str, Any]) -> list[Rounding]:
    return [Rounding(**one) for one in data["roundings"]]
