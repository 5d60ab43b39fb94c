"""A headless Chromium for tests, with a profile of its own: a page as it is after its scripts ran, or a print of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# No request to the network can succeed.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000"),
)

needs_chromium = pytest.mark.skipif(FOUND is None, reason="no Chromium (chromium, google-chrome) was found")


def run(page: Path, *flags: str, width: int = 1200, height: int = 900, dark: bool = False) -> str:
    """Open a page with flags and return Chromium's standard output; it makes no window narrower than 500."""
    assert FOUND is not None
    window = (f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={int(not dark)}")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        words = [FOUND, *_FLAGS, *window, f"--user-data-dir={profile}", *flags, page.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def dom(page: Path, *flags: str, **window: int | bool) -> str:
    """The document as Chromium has it after the page's scripts ran, as HTML."""
    return run(page, "--dump-dom", *flags, **window)  # type: ignore[arg-type]
