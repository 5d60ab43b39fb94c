"""What `mezzo.tensorflow.explain` found: a row a node, printed as a table by op and reason that fits 80 columns."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from mezzo.core.errors import UnknownNameError

_WIDTH = 80
_NARROWEST = 40
_NAMES = 3  # how many nodes of a group are named
_LONGEST = 56  # columns of a node's name

VALUE = "value"
"""The rule of nodes that compute nothing: constants, variables, arguments, results."""

# The rules that paint, in the order of the pass, and the rule that denies by way of others.
_RULES = {
    "allow list": "allow list",
    "forced": "forced by the environment",
    "between": "infer or clear, between allow nodes",
    "follows": "infer, reads a 16-bit node and no denied one",
    "spread": "clear, takes the colour of a neighbour",
    "tensor list": "shares a tensor list",
    "loop": "takes the colour of its loop",
    "cast": "a cast that only 16-bit nodes read",
    "below deny": "below a deny node as well",
    "not reached": "not reached either",
}


@dataclass(frozen=True)
class NodeRow:
    """One node that has an FP32 type.

    Attributes:
        node, op: as in the graph, function calls inlined.
        colour: the list that the op is on: `allow`, `infer`, `deny`, `clear`, or `other`.
        painted: whether any of its FP32 types becomes 16 bits.
        types: each FP32 type attribute of the node -> what it becomes (`T` of a fixed type is called `fixed`).
        rule: why, in words that all nodes of one kind share.
        why: why, as a sentence about this node.
    """

    node: str
    op: str
    colour: str
    painted: bool
    types: dict[str, str]
    rule: str
    why: str


@dataclass(frozen=True)
class CastRow:
    """One cast that the pass inserts: after output `port` of `node`, for the nodes of `readers`."""

    node: str
    port: int
    dtype: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Which nodes run in 16 bits and why the others do not. Printed, it is a table by op and reason.

    Attributes:
        mode: the mode of the pass, `auto` resolved.
        dtype: `float16` or `bfloat16`.
        device: the device type whose nodes the pass looks at.
        nodes: how many nodes the graph has, with those that have no FP32 type and so no row.
        rows: in the graph's order.
        casts: in the graph's order.
        notes: what else a reader should know, a sentence each.
    """

    mode: str
    dtype: str
    device: str
    nodes: int
    rows: tuple[NodeRow, ...]
    casts: tuple[CastRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def painted(self) -> tuple[NodeRow, ...]:
        """The nodes that run in 16 bits."""
        return tuple(row for row in self.rows if row.painted)

    @property
    def unpainted(self) -> tuple[NodeRow, ...]:
        """The nodes with FP32 types that stay as they are."""
        return tuple(row for row in self.rows if not row.painted)

    def row(self, node: str) -> NodeRow:
        """The row of a node.

        Raises:
            UnknownNameError: no node of that name has an FP32 type.
        """
        for row in self.rows:
            if row.node == node:
                return row
        of_op = [row.node for row in self.rows if row.op == node]
        if of_op:
            said = f"{node!r} is an op; the names of its nodes are {', '.join(map(repr, of_op[:_NAMES]))}"
            raise UnknownNameError(f"row: {said}{', ...' if len(of_op) > _NAMES else '.'}")
        near = difflib.get_close_matches(node, [row.node for row in self.rows], n=_NAMES, cutoff=0.4)
        mend = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
        raise UnknownNameError(
            f"row: no node {node!r} with an FP32 type. [row.node for row in explanation.rows] has the names.{mend}"
        )

    def to_json(self) -> str:
        """The explanation as one JSON object, with a list of ``rows`` and one of ``casts``."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        return self.as_text(min(shutil.get_terminal_size().columns, _WIDTH) if terminal else _WIDTH)

    def as_text(self, width: int = _WIDTH, *, every_node: bool = False) -> str:
        """The table, no line longer than `width` columns (at least 40); long names lose their first parts.

        Args:
            width: columns.
            every_node: a block for each node, in place of one for all nodes with the same op and reason.
        """
        width = max(width, _NARROWEST)
        lines = textwrap.wrap(self._headline(), width)
        for note in self.notes:
            lines += textwrap.wrap(f"* {note}", width, subsequent_indent="  ")
        computing = [row for row in self.unpainted if row.rule != VALUE]
        if computing:
            lines += ["", f"Stays FP32 ({len(computing)})", *_blocks(computing, width, every_node)]
        if self.painted:
            lines += ["", f"Becomes {self.dtype} ({len(self.painted)})"]
            lines += _blocks(self.painted, width, True) if every_node else _by_rule(self.painted, width)
        values = [row for row in self.unpainted if row.rule == VALUE]
        if values:
            lines += [
                "",
                f"Holds or moves an FP32 value ({len(values)})",
                *_wrapped(_counted(values), width, "  ", "  "),
            ]
        if self.casts:
            lines += ["", *textwrap.wrap(self._cast_line(), width)]
        return "\n".join(lines)

    def _headline(self) -> str:
        count, of = len(self.painted), len(self.rows)
        return (
            f"{self.mode}: {count} of the {of} FP32 nodes {'becomes' if count == 1 else 'become'} {self.dtype} on the "
            f"{self.device}; {len(self.casts)} cast{'' if len(self.casts) == 1 else 's'} inserted."
        )

    def _cast_line(self) -> str:
        down = sum(cast.dtype == self.dtype for cast in self.casts)
        return f"Casts: {down} to {self.dtype}, {len(self.casts) - down} back to FP32 (see .casts)."


def _blocks(rows: Sequence[NodeRow], width: int, every_node: bool) -> Iterator[str]:
    """A block for each op and reason: those on a list first, where 16 bits could be expected."""
    order = {"deny": 0, "infer": 1, "clear": 2, "allow": 3}

    def key(row: NodeRow) -> tuple[int, str, str, str]:
        return (order.get(row.colour, 4), row.op, row.rule, row.node if every_node else "")

    for _, group in groupby(sorted(rows, key=key), key):
        yield from _block(list(group), width)


def _block(rows: list[NodeRow], width: int) -> Iterator[str]:
    first = rows[0]
    count = f" x{len(rows)}" if len(rows) > 1 else ""
    yield from _wrapped(
        f"{first.colour if first.colour != 'other' else '-':<6}{first.op}{count}", width, "  ", "          "
    )
    yield from _wrapped(_listed(row.node for row in rows), width, " " * 8, " " * 8)
    reasons = list(dict.fromkeys(row.why for row in rows))
    more = f" (the others: {_RULES[first.rule]})" if len(reasons) > 1 and first.rule in _RULES else ""
    yield from _wrapped(f"- {reasons[0]}{more}", width, " " * 8, " " * 10)


def _by_rule(rows: Sequence[NodeRow], width: int) -> Iterator[str]:
    """How many nodes of each op each rule painted."""
    for rule, said in _RULES.items():
        group = [row for row in rows if row.rule == rule]
        if group:
            yield from _wrapped(f"{said}:", width, "  ", "  ")
            yield from _wrapped(_counted(group), width, " " * 8, " " * 8)


def _counted(rows: Iterable[NodeRow]) -> str:
    counts = Counter(row.op for row in rows)
    return ", ".join(f"{op} x{count}" if count > 1 else op for op, count in counts.most_common())


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    rest = len(known) - _NAMES
    return ", ".join(known[:_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _wrapped(text: str, width: int, first: str, then: str) -> Iterator[str]:
    room = width - max(len(first), len(then)) - 6  # a comma or a bracket may follow
    words = " ".join(
        _short(word, min(room, _LONGEST)) if "/" in word else word for word in text.strip().split(" ")
    )
    yield from textwrap.wrap(
        words, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=False
    )


def _short(word: str, room: int) -> str:
    """A node's name without its first parts, where it is longer than `room`: `.../while/Tanh_grad/TanhGrad`."""
    if len(word) <= room:
        return word
    opening = "(" if word.startswith("(") else ""
    parts = word.split("/")
    while len(parts) > 1 and len(".../" + "/".join(parts)) > room:
        del parts[0]
    return f"{opening}.../{'/'.join(parts)}"
