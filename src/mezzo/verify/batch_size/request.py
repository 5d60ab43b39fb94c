"""BatchSizeRequest: which script's batch size is sought, under which precisions, and within what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.core.batch_search import BatchSearch
from mezzo.core.errors import UsageError
from mezzo.core.policy import policy
from mezzo.pytorch.launch.storage import check
from mezzo.scripts.script import locate
from mezzo.verify.batch_size.vary import Vary
from mezzo.verify.precisions import split_precisions

LEAST_STEPS = 4
"""The third is watched for its memory; a fourth is the least that can be timed, and five more are warm-up."""


@dataclass(frozen=True)
class BatchSizeRequest:
    """What is sought, checked before anything runs.

    Args:
        target: the script's path, or a module's name where `is_module`.
        vary: how the script is told its batch size.
        argv: the script's own arguments.
        precisions: presets, policy strings or `.toml` files.
        steps: after so many optimizer steps a run is ended.
        limit: bytes that a step may take; None for what the machine has.

    Raises:
        UsageError: a script that isn't there, an unknown precision, a value out of range.
    """

    target: str
    vary: Vary
    argv: tuple[str, ...] = ()
    is_module: bool = False
    precisions: tuple[str, ...] = ("fp32", "bf16")
    steps: int = 12
    limit: int | None = None
    start: int = 8
    multiple_of: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise UsageError(
                f"--steps {self.steps}: give {LEAST_STEPS} or more, since the third is watched for its memory and "
                "the first five are not timed"
            )
        if not self.is_module:
            locate(self.target, is_module=False)
        for name in self.precisions:
            check(policy(name))
            if policy(name).compute == "auto":
                raise UsageError(
                    f"--precision {name}: auto runs its first steps in two precisions by turns, so they show the "
                    "memory of neither. Name one, such as bf16 (`mezzo doctor` says which suits this machine)."
                )
        self.search(None)
        self.vary.argv(self.argv, self.start)

    def search(self, limit: int | None) -> BatchSearch:
        """The search at its beginning, within a limit in bytes."""
        return BatchSearch(self.start, self.multiple_of, 2.0, limit, self.max_size)


def precisions_of(words: Sequence[str]) -> tuple[str, ...]:
    """The precisions that `--precision` names, each once.

    Raises:
        UsageError: an unknown one, or none.
    """
    kept: dict[str, str] = {}
    for name in split_precisions(words):
        kept.setdefault(policy(name).fingerprint(), name)
    if not kept:
        raise UsageError("--precision names nothing: give one such as bf16, or several such as fp32,bf16")
    return tuple(kept.values())
