"""The experiments of Micikevicius et al. 2017 (arXiv 1710.03740), at a size for one small machine.

Each is a module of this package that nothing imports until it is asked for: ``lost-updates`` is
``mezzo.reproduce.lost_updates``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mezzo.core.errors import unknown_name

if TYPE_CHECKING:
    from mezzo.reproduce.experiment import Experiment

NAMES = (
    "lstm-loss-scale",
    "gradient-histogram",
    "lost-updates",
    "accumulation",
    "side-by-side",
    "gan",
)
"""Every experiment, in the order in which they are run."""


def load(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        UnknownNameError: there is none; the message has the nearest one.
    """
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The names given, each once and in the order of `NAMES`; all of them if none is given.

    Raises:
        UnknownNameError: one of them is no experiment's.
    """
    given = set(names)
    for name in sorted(given):
        if name not in NAMES:
            raise unknown_name("experiment", name, NAMES)
    return tuple(name for name in NAMES if name in given or not given)
