"""Collected: what is known of each unit and each edge, gathered over the steps that are looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mezzo.core.sensitivity import EdgeFacts, Rounding, UnitFacts
from mezzo.pytorch.sensitivity.flow import Taken
from mezzo.pytorch.sensitivity.kept import KeptCall
from mezzo.pytorch.sensitivity.measure import Measured


@dataclass
class Unit:
    """What is known of a unit so far; see `UnitFacts`."""

    kind: str
    inner: dict[str, None] = field(default_factory=dict)
    calls: int = 1
    seconds: list[list[float]] = field(default_factory=list)
    roundings: list[Rounding] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    largest: float = 0.0
    exponent: int = 0
    overflow: str = ""
    failed: str = ""
    inside: float = 0.0
    inside_op: str = ""
    seen: bool = False


class Collected:
    """Units and edges."""

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}
        self._edges: dict[tuple[str, str], list[tuple[Taken, Rounding]]] = defaultdict(list)
        self._largest: dict[tuple[str, str], float] = defaultdict(float)

    def failed(self, call: KeptCall, error: Exception) -> None:
        """The lower format raised."""
        lines = str(error).strip().splitlines()
        self._unit(call).failed = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")

    def unmeasured(self, call: KeptCall) -> None:
        """It is there, and nothing is known of it."""
        self._unit(call)

    def unit(self, calls: Sequence[tuple[KeptCall, Measured]], count: int) -> None:
        """One unit's calls in one step.

        Args:
            calls: those that were measured, at least one.
            count: how many there were.
        """
        unit = self._unit(calls[0][0])
        share = count / len(calls)
        total = Rounding()
        for call, found in calls:
            total = total.plus(found.rounding)
            unit.inner.update(dict.fromkeys(call.inner))
            unit.seconds += found.seconds
            unit.largest = max(unit.largest, found.largest)
            if found.own.largest > unit.inside:
                unit.inside, unit.inside_op = found.own.largest, found.own.op
            if found.overflow and not unit.inside:
                unit.inside_op = unit.inside_op or found.own.first
            unit.exponent = min(unit.exponent, found.exponent) if unit.seen else found.exponent
            unit.overflow = unit.overflow or found.overflow
            unit.seen |= any(g is not None for g in call.gradients)
        unit.calls = max(unit.calls, count)
        unit.roundings.append(total.times(share))
        unit.gradient_errors.append(max(found.gradient_error for _, found in calls))

    def edges(
        self,
        taken: Mapping[tuple[str, str], Taken],
        calls: Mapping[str, Sequence[tuple[KeptCall, Measured]]],
        of_outputs: Callable[[str], Rounding],
    ) -> None:
        """The flow of one step.

        Args:
            taken: (producer, consumer) -> what was.
            calls: path -> what was measured of it.
            of_outputs: what rounding a unit's outputs would do, for tensors that are no call's inputs.
        """
        for (producer, consumer), what in taken.items():
            parts = [
                (rounding, largest)
                for call, found in calls.get(consumer, ())
                for makers, rounding, largest, low in zip(
                    call.makers, found.inputs, found.input_largest, call.low
                )
                if producer in makers and low
            ]
            total = Rounding()
            if what.casts:
                for part in [rounding for rounding, _ in parts] or [of_outputs(producer)]:
                    total = total.plus(part)
            ends = producer, consumer
            self._largest[ends] = max([self._largest[ends], *(number for _, number in parts)])
            self._edges[producer, consumer].append((what, total))

    def facts(
        self, ops: Mapping[str, Mapping[str, None]], cast_seconds: Callable[[int], float]
    ) -> tuple[list[UnitFacts], list[EdgeFacts]]:
        """As values.

        Args:
            ops: path -> its own operations.
            cast_seconds: the time of casting so many elements.
        """
        units = [
            UnitFacts(
                path,
                unit.kind,
                list(unit.inner),
                list(ops.get(path, ())),
                unit.calls,
                unit.seconds,
                unit.roundings,
                unit.largest,
                unit.gradient_errors,
                unit.exponent,
                unit.overflow,
                unit.failed,
                unseen=not unit.seen and not unit.failed,
                inside=unit.inside,
                inside_op=unit.inside_op,
            )
            for path, unit in self._units.items()
        ]
        edges = []
        for (producer, consumer), steps in self._edges.items():
            elements = sum(steps[-1][0].elements.values())
            casts = any(what.casts for what, _ in steps)
            roundings = [rounding for _, rounding in steps]
            seconds, number = cast_seconds(elements), self._largest[producer, consumer]
            edges.append(EdgeFacts(producer, consumer, elements, seconds, casts, roundings, number))
        return units, [e for e in edges if e.producer in self._units and e.consumer in self._units]

    def _unit(self, call: KeptCall) -> Unit:
        return self._units.setdefault(call.path, Unit(type(call.module).__name__))
