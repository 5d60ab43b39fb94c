"""Tuning: from what a calibration measured to a policy, with a reason for each of its lines.

Three things decide, in this order:

1. Range. A module that fails in the lower format, overflows there or comes within a factor of two of its largest
   number, or whose gradients are another's, stays in FP32 whatever it would save. So do both ends of an edge whose
   numbers are too large: the module that makes them, and the one that would round them.
2. Error. To first order a rounding changes the loss by the sum of gradient times rounding error. The expected squares
   of these changes add up (`expected_square`), and their sum stays under the square of the margin.
3. Time. Of the assignments that are left, the one that takes least: each module's measured time, and the casts
   between modules of different formats (`mezzo.core.assignment`).

Where two choices take the same time as far as could be measured, the module is lowered: it then holds fewer bytes.
With the goal ``memory``, time counts for nothing: as many modules are lowered as do no harm. That is for a calibration
on a machine whose times are not those of the machine that will train.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from mezzo.core.assignment import Assignment, Edge, Graph, Node, assign, lines_of
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.policy import Policy
from mezzo.core.range_rules import broken, edge_rules, range_rule
from mezzo.core.sensitivity import Sensitivities, UnitFacts, expected_square

GOALS = {
    "time": "the least time that was measured here",
    "memory": "as many modules in 16 bits as do no harm",
}
"""What a policy is tuned for."""
WORTH_A_LINE = 0.25
"""FP32 that is only faster is given a line if all such lines together save this share of the preset's time.

Modules are timed alone, and of a whole step less comes true: on text-gpt 5 and 12 % were predicted, and none measured.
"""


@dataclass(frozen=True)
class Choice:
    """One module's format, and why.

    Args:
        module: its path; ``""`` is the model's own arithmetic.
        kind: its class.
        format: what it runs in.
        reason: a sentence.
        line: the pattern by which the policy names it; ``""`` where it has no line.
        saved_seconds: what lowering it alone saves in a step; negative if FP32 is faster.
        change: the expected change of the loss if it is lowered.
    """

    module: str
    kind: str
    format: str
    reason: str
    line: str
    saved_seconds: float
    change: float


@dataclass(frozen=True)
class Tuned:
    """A policy, and what it rests on.

    Args:
        policy: what was found.
        preset: the format that was tried everywhere.
        choices: each module's, in the model's order.
        loss: mean of the losses that were measured.
        margin: the largest change of it that is allowed, as a share.
        change: expected change of the loss under the policy; `preset_change`: with all modules lowered (infinite where
            one of them overflows or fails).
        seconds: predicted for the modules' work in a step; `preset_seconds`, `fp32_seconds` likewise.
        notes: what could not be measured.
        goal: a key of `GOALS`.
    """

    policy: Policy
    preset: str
    choices: tuple[Choice, ...]
    loss: float
    margin: float
    change: float
    preset_change: float
    seconds: float
    preset_seconds: float
    fp32_seconds: float
    notes: tuple[str, ...] = field(default=())
    goal: str = "time"

    def to_toml(self) -> str:
        """The policy as a TOML file, with a reason on each line."""
        lines = [
            f"# {self.preset}, tuned: the loss is expected to change by {self.change:.1g}, of {self.loss:.4g}.",
            f"# {self.preset} everywhere: {_number(self.preset_change)}.",
            f"compute = {json.dumps(self.policy.compute)}  # {self._base_reason()}",
        ]
        named_lines = [choice for choice in self.choices if choice.line]
        if named_lines:
            reasons = {choice.line: choice.reason for choice in named_lines}
            lines += ["", "[modules]"]
            for pattern, fmt in self.policy.modules:
                lines.append(f"{json.dumps(pattern)} = {json.dumps(fmt)}  # {_one_line(reasons[pattern])}")
        return "\n".join(lines) + "\n"

    def _base_reason(self) -> str:
        rest = [choice for choice in self.choices if not choice.line]
        if self.policy.compute == "fp32":
            root = next((choice for choice in rest if not choice.module), None)
            return (
                "nothing is gained by 16 bits without harm"
                if root is None
                else _one_line(f"the model itself: {root.reason}")
            )
        change = math.sqrt(
            math.fsum(c.change**2 for c in rest if c.format != "fp32" and math.isfinite(c.change))
        )
        return f"{len(rest)} modules, which change the loss by about {change:.1g}"


def tune(measured: Sensitivities, *, margin: float = 0.005, goal: str = "time") -> Tuned:
    """The policy that takes least time and is expected to change the loss by less than a margin.

    Args:
        measured: what a calibration found.
        margin: as a share of the loss, between 0 and 1.
        goal: a key of `GOALS`.

    Raises:
        UnknownNameError: another goal.
        UsageError: the margin is out of range; nothing was measured.
    """
    if not 0.0 < margin < 1.0:
        raise UsageError(f"margin {margin:g}: give a share of the loss between 0 and 1, such as 0.005")
    if goal not in GOALS:
        raise unknown_name("goal", goal, GOALS)
    if not measured.units or not measured.losses:
        raise UsageError("nothing was measured: no module ran forward and backward before an update")
    loss = math.fsum(map(abs, measured.losses)) / len(measured.losses)
    if not math.isfinite(loss):
        raise UsageError(
            "the loss is not finite in FP32 in the steps that were measured: mend the script first"
        )
    budget = (margin * loss) ** 2
    nodes = _nodes(measured)
    edges = [
        Edge(e.producer, e.consumer, e.seconds, _or_zero(expected_square(e.roundings)))
        for e in measured.edges
    ]
    edges += _regions(measured)
    graph = Graph(nodes, edges)
    if goal == "memory":
        alike = [replace(node, fp32_seconds=1.0, low_seconds=0.0) for node in nodes]
        lowered = assign(alike, [replace(edge, seconds=0.0) for edge in edges], budget=budget).lowered
        found = graph.evaluate(lowered)
    else:
        found = _worth_it(graph, nodes, edges, budget)
    preset = graph.evaluate(graph.nodes)
    fp32 = graph.evaluate(())
    if not found.lowered:
        policy, lines = Policy("fp32"), {}
    else:
        # What no line names, the model's own arithmetic included, runs in the policy's own format.
        base = "" not in graph.nodes or "" in found.lowered
        lines = lines_of({path: path in found.lowered for path in graph.nodes}, base)
        modules = {_pattern(path): measured.format if low else "fp32" for path, low in lines.items()}
        policy = Policy(measured.format if base else "fp32", modules=tuple(modules.items()))
    infinite = broken(measured)
    why = _Reasons(graph, found, budget, measured.format)
    follow = _followers(graph.nodes, found.lowered, lines)
    choices = tuple(
        Choice(
            unit.path,
            unit.kind,
            measured.format if unit.path in found.lowered else "fp32",
            why.of(unit) + _with(follow.get(unit.path, 0)),
            _pattern(unit.path) if unit.path in lines else "",
            graph.nodes[unit.path].fp32_seconds - graph.nodes[unit.path].low_seconds,
            math.inf if unit.path in infinite else math.sqrt(graph.nodes[unit.path].error),
        )
        for unit in measured.units
    )
    return Tuned(
        policy,
        measured.format,
        choices,
        loss,
        margin,
        math.sqrt(found.error),
        math.inf if infinite else math.sqrt(preset.error),
        found.seconds,
        preset.seconds,
        fp32.seconds,
        tuple(measured.notes) + _unseen(measured),
        goal,
    )


def _followers(paths: Iterable[str], lowered: Collection[str], lines: Collection[str]) -> dict[str, int]:
    """Line for FP32 -> how many modules inside it stay in FP32 by it: each counts for the nearest line around it."""
    found: Counter[str] = Counter()
    for path in paths:
        if path not in lines and path not in lowered:
            around = [line for line in lines if line and _within(path, line)]
            found.update([max(around, key=len)] if around else [])
    return found


def _or_zero(error: float) -> float:
    """An infinite error is a module's reason to stay, and then counts in no sum."""
    return error if math.isfinite(error) else 0.0


def _nodes(measured: Sensitivities) -> list[Node]:
    """Each unit's own times: without those of the units inside it, and without the casts around those."""
    low = {
        unit.path: 0.0 if not unit.seconds else unit.calls * median(pair[1] for pair in unit.seconds)
        for unit in measured.units
    }
    nodes, between = [], edge_rules(measured)
    for unit in measured.units:
        inside = [path for path in low if path in unit.inner or any(_within(path, m) for m in unit.inner)]
        direct = [path for path in inside if not any(_within(path, other) for other in inside)]
        casts = math.fsum(
            edge.seconds
            for edge in measured.edges
            if unit.path in (edge.producer, edge.consumer) and {edge.producer, edge.consumer} & set(inside)
        )
        saved = unit.saved_seconds
        saved = math.copysign(max(0.0, abs(saved) - casts), saved) if saved > 0.0 else saved
        own = max(0.0, low[unit.path] - math.fsum(low[path] for path in direct))
        nodes.append(
            Node(
                unit.path,
                max(own + saved, 0.0),
                own if own + saved >= 0.0 else -saved,
                _or_zero(expected_square(unit.roundings)),
                range_rule(unit, measured.format) or between.get(unit.path, ""),
            )
        )
    return nodes


def _regions(measured: Sensitivities) -> list[Edge]:
    """A module whose format is not that of the unit around it has a region of its own, which takes time."""
    outer = {inner: unit.path for unit in measured.units for inner in unit.inner}
    edges = []
    for unit in measured.units:
        pieces = unit.path.split(".") if unit.path else []
        above = [".".join(pieces[:length]) for length in range(len(pieces), 0, -1)]
        around = next((outer[path] for path in above if path in outer), None)
        if around is not None and around != unit.path:
            edges.append(Edge(around, unit.path, measured.region_seconds * unit.calls))
    known = {unit.path for unit in measured.units}
    return [edge for edge in edges if edge.producer in known]


def _within(path: str, around: str) -> bool:
    return path != around and (not around or path.startswith(f"{around}."))


def _worth_it(graph: Graph, nodes: list[Node], edges: list[Edge], budget: float) -> Assignment:
    """The assignment; without the modules that FP32 only makes faster, unless these save enough together."""
    found = assign(nodes, edges, budget=budget)
    indifferent = [replace(node, low_seconds=min(node.low_seconds, node.fp32_seconds)) for node in nodes]
    plainer = assign(indifferent, edges, budget=budget)
    taken = graph.evaluate(plainer.lowered, plainer.price)
    enough = WORTH_A_LINE * graph.evaluate(graph.nodes).seconds
    return found if taken.seconds - found.seconds > enough else taken


class _Reasons:
    """Why each module runs in what it runs in."""

    def __init__(self, graph: Graph, found: Assignment, budget: float, format: str) -> None:
        self._graph, self._found, self._budget, self._format = graph, found, budget, format

    def of(self, unit: UnitFacts) -> str:
        node = self._graph.nodes[unit.path]
        change = math.sqrt(node.error)
        saved = node.fp32_seconds - node.low_seconds
        if unit.path in self._found.lowered:
            told = (
                f"changes the loss by about {change:.1g}"
                if not unit.unseen
                else "its error could not be weighed"
            )
            return f"{told}; {_time(saved)}"
        if node.stays:
            return node.stays
        other = self._graph.evaluate(self._found.lowered | {unit.path})
        allowed = math.sqrt(self._budget)
        if other.error > self._budget:
            if change > allowed:
                return f"would change the loss by about {change:.1g}, more than the margin of {allowed:.1g}"
            return (
                f"would change the loss by about {change:.1g}; with what the others take, more than the margin of "
                f"{allowed:.1g}"
            )
        if saved <= 0.0:
            return f"{_time(saved)} in {self._format}"
        return f"casts to and from its neighbours would take more than the {1e3 * saved:.2g} ms that it saves"


def _time(saved: float) -> str:
    if saved > 0.0:
        return f"saves {1e3 * saved:.2g} ms a step"
    return (
        f"takes {-1e3 * saved:.2g} ms a step longer"
        if saved < 0.0
        else "saves no time that could be measured"
    )


def _with(inside: int) -> str:
    """What a line's reason adds of the modules that have none because it covers them."""
    if not inside:
        return ""
    return f"; with it {inside} module{'' if inside == 1 else 's'} inside it that stay{'s' if inside == 1 else ''} too"


def _unseen(measured: Sensitivities) -> tuple[str, ...]:
    names = [unit.path or "the model itself" for unit in measured.units if unit.unseen]
    if not names:
        return ()
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"no gradient was seen at {', '.join(names[:5])}{more} (a frozen part, or a reentrant checkpoint): their "
        "errors could not be weighed",
    )


def _pattern(path: str) -> str:
    """A pattern for a path, which may hold what no pattern does: a `ModuleDict`'s keys are any text."""
    return re.sub(r"""[\s,=()"'#\[\]]+""", "*", path)


def _number(value: float) -> str:
    return f"{value:.1g}" if math.isfinite(value) else "not finite"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def rows(tuned: Tuned) -> list[Mapping[str, object]]:
    """The choices as plain values, for JSON."""
    return [
        {**choice.__dict__, "change": choice.change if math.isfinite(choice.change) else None}
        for choice in tuned.choices
    ]
