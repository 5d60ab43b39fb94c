"""Makers: of numbers that are finite where they are made and beyond fp16, the operation that made them first.

An operation that FP32 computes, by its rule or because its module is kept in FP32, may make 1e6; the next one takes it
in fp16, and that is where it becomes infinite. What is to be mended is before that place, and is told beside it. A
number is passed on by whoever was given one beyond fp16: `relu` of 1e6 made nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import SUM, Maker, TensorFacts, rounded_to_infinity
from mezzo.pytorch.monitor import user_line
from mezzo.pytorch.monitor.events import Place
from mezzo.pytorch.monitor.tensor_facts import facts, values

_BEYOND = rounded_to_infinity("fp16")


@dataclass(frozen=True)
class Large:
    """Numbers beyond fp16, where they were first.

    Args:
        place: who made them; without an op of a tensor that was there.
        result: what was made.
    """

    place: Place
    result: TensorFacts

    def told(self) -> Maker:
        """As a finding has it."""
        return Maker(self.place.module, self.place.op, user_line.text(self.place.line), self.result)


def beyond(tensor: Tensor, scale: float = 1.0) -> float:
    """The largest magnitude of a finite tensor of a wider range than fp16's; 0.0 where fp16 holds it.

    Args:
        tensor: of any dtype.
        scale: how many times its numbers are too large.
    """
    seen = None if tensor.dtype is torch.float16 or tensor.dtype.itemsize < 2 else values(tensor)
    if seen is None or not seen.numel():
        return 0.0
    low, high = torch.aminmax(seen)
    largest = float(torch.maximum(-low, high))
    return largest if _BEYOND * scale <= largest < float("inf") else 0.0


class ForwardMakers:
    """Of the operations of a forward pass.

    Args:
        states: address -> the path, the name, and whether it is a parameter, of what modules have.
        given: address -> the name of what the model is given.
    """

    def __init__(self, states: Mapping[int, tuple[str, str, bool]], given: Mapping[int, str]) -> None:
        self._states, self._given = states, given
        self._of: dict[int, tuple[weakref.ref[Tensor], Large]] = {}
        self._by_storage: dict[int, tuple[weakref.ref[Tensor], Large]] = {}

    def ran(
        self, place: Callable[[], Place], ins: Sequence[Tensor], written: set[int], outs: Sequence[Tensor]
    ) -> None:
        """An operation has run.

        Args:
            place: makes its place.
            ins: what it was given.
            written: ids of those that it has written since.
            outs: what is finite of what it made.
        """
        large = [tensor for tensor in outs if beyond(tensor)]
        found: Large | None = None
        if large:
            given, found = self._largest(ins, written)
            if not given:
                found = Large(place(), facts(large[0], "output"))
        for tensor in outs:
            self._of.pop(id(tensor), None)
            if found is not None and any(tensor is one for one in large):
                held = weakref.ref(tensor), found
                self._of[id(tensor)] = held
                if tensor.layout is torch.strided:
                    self._by_storage[tensor.untyped_storage().data_ptr()] = held

    def behind(self, ins: Sequence[Tensor], written: set[int]) -> Large | None:
        """Who made the largest of what an operation was given; None where fp16 holds that, or nobody saw it made."""
        return self._largest(ins, written)[1]

    def _largest(self, ins: Sequence[Tensor], written: set[int]) -> tuple[bool, Large | None]:
        sizes: list[tuple[float, Tensor]] = []
        for tensor in ins:
            if id(tensor) in written:  # what it held before is told by who made that
                held = self._known(tensor)
                sizes.append((0.0 if held is None else held.result.largest, tensor))
            else:
                sizes.append((beyond(tensor), tensor))
        size, most = max(sizes, key=lambda pair: pair[0], default=(0.0, None))
        if most is None or not size:
            return False, None
        return True, self._known(most) or self._from_before(most)

    def _known(self, tensor: Tensor) -> Large | None:
        held = self._of.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        if tensor.layout is torch.strided:
            held = self._by_storage.get(tensor.untyped_storage().data_ptr())
            if held is not None and held[0]() is not None:  # a view of what was written through another
                return held[1]
        return None

    def _from_before(self, tensor: Tensor) -> Large | None:
        pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
        if pointer in self._states:
            path, name, _ = self._states[pointer]
            return Large(Place(path, ""), facts(tensor, name))
        if pointer in self._given:
            return Large(Place("", ""), facts(tensor, self._given[pointer]))
        return None


class BackwardMakers:
    """Of the nodes of a backward pass, each told once it has run.

    Args:
        scale: how many times the gradients are too large.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._sent: dict[Any, tuple[float, Large]] = {}
        self._senders: Counter[Any] = Counter()

    def ran(
        self, node: Any, place: Place, going: Sequence[Tensor | None], coming: Sequence[Tensor | None]
    ) -> None:
        """A node has made `going`, all finite, of `coming`."""
        for number, ((following, _), grad) in enumerate(zip(node.next_functions, going)):
            if grad is None or following is None:
                continue
            self._senders[following] += 1
            size = beyond(grad, self._scale)
            if not size:
                continue
            given = any(one is not None and beyond(one, self._scale) for one in coming)
            found = self.behind(node, place, coming) if given else None
            if not given:
                found = Large(place, facts(grad, f"gradient of input {number}"))
            if found is not None and size > self._sent.get(following, (0.0, found))[0]:
                self._sent[following] = size, found

    def behind(self, node: Any, place: Place, coming: Sequence[Tensor | None]) -> Large | None:
        """Who made the gradients that came to a node; None where fp16 holds them, or nobody saw them made."""
        large = [one for one in coming if one is not None and beyond(one, self._scale)]
        if not large:
            return None
        if node in self._sent:
            return self._sent[node][1]
        if self._senders[node] > 1:  # each fits, and not their sum
            return Large(Place(place.module, SUM, place.line), facts(large[0], SUM))
        return None
