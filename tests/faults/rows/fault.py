"""A planted fault as a row: how it is planted, and what has to be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.models import Trainee

PLANTED = 2
"""The step in which a fault acts for the first time."""


@dataclass(frozen=True)
class Expected:
    """What is to be found.

    Args:
        module: path of the culprit.
        op: key of `score.FAMILIES`, or the operation's own name in small letters; "" where there is none.
        cause: a key of `mezzo.core.finding.CAUSES`.
        direction: forward or backward.
        line: part of the code of the user's line; "" where the operation is inside of a module of torch.
        part: whose step, in a training of several.
        also: another path that says the same.
        in_script: the path in a plain script, where another module is the one that is called.
    """

    module: str
    op: str
    cause: str
    direction: str = "forward"
    line: str = ""
    part: str = "main"
    also: str = ""
    in_script: str | None = None


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Args:
        name: what it is.
        family: CNN, transformer, recurrent, GAN or perceptron.
        make: makes the training.
        expected: what is to be found, in one step or in several parts' steps.
        plant: done before step `PLANTED`; by default what is built in is armed.
        mended: whether the same step is finite in FP32; None where it can't be run there.
        precision: the policy.
        scale: first loss scale: low enough that nothing else overflows.
        repeats: how many steps it acts in; the last one's finding counts.
        delay: how many steps after it was planted it acts.
        options: of `MixedPrecision`.
        seen: whether `plain.py`, which looks at modules only, can tell.
    """

    name: str
    family: str
    make: Callable[[], Trainee]
    expected: Expected | tuple[Expected, ...]
    plant: Callable[[Trainee], Any] = Trainee.arm
    mended: bool | None = True
    precision: str = "fp16"
    scale: float = 2.0**6
    repeats: int = 1
    delay: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    seen: bool = True

    @property
    def all_expected(self) -> tuple[Expected, ...]:
        return self.expected if isinstance(self.expected, tuple) else (self.expected,)
