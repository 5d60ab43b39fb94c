"""Errors that leave a `tf.function` as they were raised."""

from __future__ import annotations

from mezzo.core.errors import MezzoError


def as_raised(error: MezzoError) -> MezzoError:
    """The same error, marked so that AutoGraph lets it through: it makes a `StagingError` of those it cannot rebuild,
    and whoever catches a `UsageError` around a traced function would not."""
    error.ag_pass_through = True  # type: ignore[attr-defined]
    return error
