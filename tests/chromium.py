"""A headless Chromium for tests: the page as it is after its scripts ran, a picture of it, or a print of it.

Each call is a fresh process with a profile of its own, which the test's temporary folder holds.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FOUND = next(
    (path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    # Whatever a page might ask the network for is answered by nobody.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=2000",
)

needs_chromium = pytest.mark.skipif(
    FOUND is None, reason="no Chromium on this machine (chromium, google-chrome)"
)


def run(page: Path, *flags: str, width: int = 1200, height: int = 900, dark: bool = False) -> str:
    """Open a page and return what Chromium writes to its standard output.

    Args:
        page: the HTML file.
        flags: what to do, for instance ``--dump-dom`` or ``--screenshot=FILE``.
        width, height: of the window, in pixels. Chromium makes no window narrower than 500.
        dark: whether the system asks for a dark theme.
    """
    assert FOUND is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        shade = (
            ("--blink-settings=preferredColorScheme=0",)
            if dark
            else ("--blink-settings=preferredColorScheme=1",)
        )
        done = subprocess.run(
            [
                FOUND,
                *_FLAGS,
                *shade,
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                *flags,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def dom(page: Path, *flags: str, **window: int | bool) -> str:
    """The document as Chromium has it after the page's scripts ran, as HTML."""
    return run(page, "--dump-dom", *flags, **window)  # type: ignore[arg-type]
