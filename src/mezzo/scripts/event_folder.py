"""Whether TensorBoard's events can be written, asked before the script starts: they begin at its first backward."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from mezzo.core.errors import UsageError

# What `torch.utils.tensorboard` writes with. It imports neither torch nor TensorFlow.
WRITER = "tensorboard.summary.writer.event_file_writer"


def check(folder: Path) -> None:
    """Make the folder, and see that there is something to write into it with.

    Raises:
        UsageError: TensorBoard's package is missing or can't be imported; the folder is a file, or can't be written.
    """
    try:
        importlib.import_module(WRITER)
    except Exception as error:  # also a folder called tensorboard, or a protobuf that does not go with it
        raise UsageError(
            f"--tensorboard {folder}: TensorBoard's package can't be imported ({type(error).__name__}: {error}). "
            "Install it: pip install tensorboard"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "is a file" if os.path.isfile(folder) else error.strerror or error
        raise UsageError(
            f"--tensorboard {folder}: {why}. Name a folder that can be written, new or not."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--tensorboard {folder}: it can't be written. Name another folder.")
