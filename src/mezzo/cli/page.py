"""The report of what a verb has found: where it can't be made, that is said, and the result is printed all the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from mezzo.core.errors import MezzoError


def page(build: Callable[[Path], Path], folder: Path) -> Path | None:
    """Make a folder's report; None where that fails, which is told on stderr with how to make it later.

    Args:
        build: makes it, such as `mezzo.report.build`.
        folder: with the records.
    """
    try:
        return build(folder)
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
    except MezzoError as error:
        why = str(error)
    print(
        f"mezzo: no report: {why.rstrip('.')}. Once that is mended: mezzo report {os.fspath(folder)}",
        file=sys.stderr,
    )
    return None
