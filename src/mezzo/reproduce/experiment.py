"""An experiment as a value: what it asks, how it is run, what it found, and how that is drawn.

An experiment is one module of this package with ``EXPERIMENT = Experiment(...)``. It knows nothing of files, terminals
or of what is expected to be found at this size: `run` and `outputs` do the first two, ``expected.toml`` the third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Finding:
    """One statement of the original work, held against this run.

    Args:
        name: its key in ``expected.toml``: lower case, words joined by hyphens.
        expected: one plain sentence: what the original work, or arithmetic, says.
        seen: one plain sentence with this run's own numbers.
        holds: whether what was seen is what was expected.
    """

    name: str
    expected: str
    seen: str
    holds: bool


@dataclass(frozen=True)
class Outcome:
    """What came of one run of an experiment.

    Args:
        findings: in the order in which a reader should meet them.
        numbers: all that the figure and the sentences come from, as plain JSON. A NaN or an infinity is written as
            null, and keys as text: `Experiment.draw` is handed what was written.
    """

    findings: tuple[Finding, ...]
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much to do, and whom to tell.

    Args:
        quick: the small size, for CI: seconds in place of minutes.
        report: called now and then with what goes on ("training, fp16 with scale 128") and the share of the whole
            experiment that is done, from 0 to 1.
    """

    quick: bool
    report: Callable[[str, float], None]

    @property
    def name(self) -> str:
        """``quick`` or ``full``, as the tables of ``expected.toml`` are named."""
        return "quick" if self.quick else "full"


@dataclass(frozen=True)
class Experiment:
    """An experiment of the original work, at a size for one small machine.

    Args:
        name: as on the command line: lower case, words joined by hyphens. Its module has underscores in their place.
        title: what it is about, in a line.
        source: where the original is: paper, section or figure.
        run: does it. PyTorch's random state is seeded before, and put back afterwards.
        draw: draws ``Outcome.numbers``, as they were written to the file, into an empty figure of 9 by 5 inches (a
            figure may be made higher, not wider). Only here may matplotlib be imported.
    """

    name: str
    title: str
    source: str
    run: Callable[[Effort], Outcome]
    draw: Callable[[dict[str, Any], Figure], None]
