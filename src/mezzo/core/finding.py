"""Finding: where a value that is not finite was made, from what, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field

OUTSIDE = "(outside the model)"
"""The module of an op that no watched model's call holds: a loss, a penalty, arithmetic between two models."""

CAUSES = {
    "loss scale": "the gradients overflow at this loss scale and not at a smaller one: what a dynamic scale probes for",
    "overflow": "finite numbers went in, and the result lies beyond the largest number of its format",
    "invalid": "the operation has no finite result for what went in: log(0), 0 / 0, the root of 0 in backward",
    "input": "the model was given NaN or infinity",
    "state": "a parameter or a buffer held NaN or infinity before the step",
    "unknown": "the step could not be repeated, and has not happened again yet",
}
"""What can be behind a step whose gradients are not finite."""


@dataclass(frozen=True)
class TensorFacts:
    """What is told of a tensor.

    Args:
        name: what it is to the operation: ``input 0``, ``weight``, ``output``, ``gradient of output``.
        shape: its sizes.
        format: the name of its number format.
        largest: largest finite magnitude; 0 where there is none.
        smallest: smallest magnitude that is not 0; 0 where there is none.
        zeros, infinities, nans: how many elements are.
    """

    name: str
    shape: list[int]
    format: str
    largest: float
    smallest: float
    zeros: int
    infinities: int
    nans: int

    @property
    def finite(self) -> bool:
        """Whether every element is."""
        return not self.infinities and not self.nans

    def __str__(self) -> str:
        bad = [
            f"{count} {word}" for count, word in ((self.infinities, "infinite"), (self.nans, "NaN")) if count
        ]
        shape = "x".join(map(str, self.shape)) or "scalar"
        return (
            f"{self.name} {self.format} {shape}, largest {self.largest:.4g}{''.join(', ' + b for b in bad)}"
        )


@dataclass(frozen=True)
class Finding:
    """Where a value that is not finite was produced, as against those places that only passed it on.

    Args:
        cause: a key of `CAUSES`.
        module: path of the module in its model, ``""`` for the model itself, or `OUTSIDE`.
        op: the operation that produced it: ``exp``, ``linear``, ``DivBackward0``.
        direction: ``forward`` or ``backward``.
        inputs: what went in.
        outputs: what came out.
        propagators: those that passed it on, in order, as ``module: op``; the first few.
        line: the user's own line that called the operation, as ``file.py:12: code``; ``""`` where none is known.
        how: ``replay`` (the step's model calls were run again), ``live`` (watched as it happened).
        remedies: what to try, the likeliest first.
        seconds: what finding it took.
        kept_bytes: bytes that were kept until the step's end for it, beside what the script itself kept.
        note: why it is less than it should be, where it is.
    """

    cause: str
    module: str = ""
    op: str = ""
    direction: str = "forward"
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    propagators: list[str] = field(default_factory=list)
    line: str = ""
    how: str = "replay"
    remedies: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kept_bytes: int = 0
    note: str = ""

    @property
    def alarms(self) -> bool:
        """Whether it is something to mend, and not a dynamic loss scale that finds its place."""
        return self.cause != "loss scale"

    def __str__(self) -> str:
        if self.cause == "unknown":
            return f"{CAUSES['unknown']}{': ' + self.note if self.note else ''}"
        line = f" ({self.line})" if self.line else ""
        if self.cause in ("input", "state"):  # a tensor that was there
            names = ", ".join(facts.name for facts in self.inputs)
            return f"{names or 'a tensor'}{f' of {self.module}' if self.module else ''}{line}: {CAUSES[self.cause]}"
        where = "outside the model" if self.module == OUTSIDE else f"in {self.module or 'the model'}"
        return f"{self.direction} of {self.op or 'an operation'} {where}{line}: {CAUSES[self.cause]}"
