"""Events: operations that returned something that isn't finite, and why they did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import Maker, TensorFacts
from mezzo.pytorch.monitor import op_names, user_line
from mezzo.pytorch.monitor.tensor_facts import tensors


@dataclass
class Place:
    """An operation: where, by whom, on which of the user's lines; and the event that it was, if one."""

    module: str
    op: str
    line: user_line.Line | None = None
    event: Event | None = None
    zeros: bool = False  # whether there was a 0 in what went in or came out of an operation with a pole

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.op}"


@dataclass
class Event:
    """An operation that returned something that isn't finite, or a tensor that was there and is not.

    Args:
        place: of it.
        number: in order.
        kind: ``passed`` (something not finite went in), ``overflow`` or ``invalid`` (produced it), ``input``,
            ``state``, ``meant`` (-inf that somebody wrote, and what comes of it).
        parents: where what went in came from.
        inputs, outputs: what went in and came out; of those that only passed it on, nothing.
        unseen: of a tensor that is on the graph, by an operation that nobody watched.
        maker: of an overflow, who made the finite number that did not fit, where that was before.
    """

    place: Place
    number: int
    kind: str
    parents: list[Event] = field(default_factory=list)
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    unseen: bool = False
    maker: Maker | None = None

    @property
    def meant(self) -> bool:
        """Whether it is no more than a mask."""
        return self.kind == "meant"


def root(event: Event) -> tuple[Event, list[Event]]:
    """The earliest event that produced what an event has, and those that passed it on, in order."""
    seen: dict[int, Event] = {}
    stack = [event]
    while stack:
        one = stack.pop()
        if one.number in seen or one.meant:
            continue
        seen[one.number] = one
        stack.extend(one.parents)
    order = [seen[number] for number in sorted(seen)]
    producers = [one for one in order if one.kind != "passed"]
    first = producers[0] if producers else order[0]
    return first, [one for one in order if one.number > first.number]


def writes_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number among the arguments is infinite: somebody means it."""
    flat = [*args, *kwargs.values()]
    flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, float) and math.isinf(value) for value in flat)


def cause_of(op: str, func: Any, args: Any, kwargs: Any, bad: Sequence[Tensor], *, rerun: bool) -> str:
    """``overflow`` if the result lies beyond its format's range, ``invalid`` if there is none."""
    if rerun:
        wide = _in_fp64(func, args, kwargs)
        if wide is not None:
            if all(bool(torch.isfinite(t).all()) for t in wide):
                return "overflow"
            if any(bool(torch.isnan(t).any()) for t in wide):
                return "invalid"
            return "invalid" if op in op_names.POLES else "overflow"
    if op in op_names.POLES or any(bool(torch.isnan(t).any()) for t in bad):
        return "invalid"
    return "overflow"


def _in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The operation once more, on FP64 copies; None where it can't be, or doesn't compute in FP64."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            items = [wide(item) for item in value]
            return tuple(items) if type(value) is tuple else items
        return value

    device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            kept = {name: wide(value) for name, value in kwargs.items() if name not in ("dtype", "out")}
            outs = [t for t in tensors(func(*wide(args), **kept)) if t.is_floating_point()]
    except Exception:  # an op without an FP64 form, or of a kind that can't be repeated: decided by its name
        return None
    finally:
        torch.set_rng_state(random)
    return outs if outs and all(t.dtype is torch.float64 for t in outs) else None
