"""A comparison's folder: made, checked and resumed; every file in it appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.verify.request import BASELINE, FILE, Request, differences, read_request

OURS = (FILE, "verdict.json", "report.html", "runs")


def prepare(folder: Path, request: Request, *, fresh: bool = False) -> bool:
    """Make the folder ready for the request's runs; whether it holds runs that are kept.

    A folder that holds another comparison is left as it is, unless none of its candidates has run yet.

    Raises:
        UsageError: the folder holds something else, or a comparison that was declared otherwise.
        OSError: the folder can't be written.
    """
    declared = request.declared()
    path = folder / FILE
    if folder.exists():
        _check_ours(folder)
    if fresh:
        _clear(folder)
    resumed = path.exists()
    if resumed:
        changed = differences(declared, read_request(path))
        if changed and _candidates_seen(folder):
            raise UsageError(
                f"{folder}: holds a comparison that was declared otherwise: {'; '.join(changed)}. "
                "Start over with --fresh (its runs are deleted), or choose another --out."
            )
        if any(
            not change.startswith(("seeds", "margin", "metric", "precisions", "policies"))
            for change in changed
        ):
            _clear(folder)  # FP32 runs of another script or version are of no use
            resumed = False
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(declared, indent=2) + "\n")
    return resumed and any((folder / "runs").glob("*.jsonl"))


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, and a failure leaves the old one.

    Raises:
        OSError: it can't be written; nothing is left behind.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's 0600 would keep a colleague out
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def forget_run(folder: Path, name: str) -> None:
    """Delete what an unfinished run left."""
    for suffix in (".jsonl", ".log", ".request.json"):
        (folder / "runs" / f"{name}{suffix}").unlink(missing_ok=True)


def _check_ours(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"--out {folder}: is a file. Name a folder.")
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in OURS and not p.name.startswith("."))
    if strangers and not (folder / FILE).exists():
        raise UsageError(
            f"--out {folder}: holds other files ({', '.join(strangers[:5])}). Name an empty or a new folder."
        )


def _clear(folder: Path) -> None:
    for name in OURS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _candidates_seen(folder: Path) -> bool:
    return any(not path.name.startswith(f"{BASELINE}-") for path in (folder / "runs").glob("*.jsonl"))


def strict(value: Any) -> Any:
    """The value with every number that JSON lacks (NaN, infinities) as None."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value
