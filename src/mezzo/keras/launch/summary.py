"""The few lines that end a run of a Keras script: what ran in which precision, and what was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mezzo.keras.launch.session import Session


def summary(session: Session, *, failed: bool = False) -> str:
    """The account of a run, a line each, ready to print; empty where the script failed before it did anything."""
    journal = session.journal
    if failed and not (session.used or journal.updates or journal.losses or journal.notes):
        return ""
    if session.left_alone is not None:
        lines = [f"this script ran by its own policy: {session.plan.precision} was not applied"]
    elif not session.backend:
        lines = ["Keras was not imported, so there was nothing to run in another precision"]
    else:
        lines = [f"policy {session.plan.precision} ({session.plan.default}), Keras on {session.backend}"]
    if journal.updates:
        steps = journal.updates
        lines.append(f"{steps} training step{'' if steps == 1 else 's'}, {journal.skipped} skipped")
        if session.scales:
            lines.append(f"loss scale {journal.loss_scale:g} in the last step")
    return "\n".join(f"mezzo: {line}" for line in [*lines, *journal.notes])
