"""Photograph the top of a report with headless Chromium, for the README.

mezzo compare --demo digits --precision bf16,fp16
python benchmarks/screenshot.py mezzo-compare-digits/report.html docs/images/report.webp
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

WIDTH, HEIGHT = 1000, 900  # CSS pixels
DENSITY = 1.5  # pixels per CSS pixel
LIMIT = 120_000
"""The largest file in bytes: a README opens with it."""


def main() -> None:
    """Open the page, photograph it, and write a small WebP or PNG file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument(
        "--height", type=int, default=HEIGHT, help=f"CSS pixels of the page (default {HEIGHT})"
    )
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("Chromium was not found. Install it, for example: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        photo = Path(folder, "photo.png")
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--blink-settings=preferredColorScheme=1",
            f"--force-device-scale-factor={DENSITY}",
            f"--window-size={WIDTH},{arguments.height}",
            f"--user-data-dir={folder}/profile",
            f"--screenshot={photo}",
            arguments.report.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        Image.open(photo).convert("RGB").save(arguments.picture, quality=82, method=6)
    size = arguments.picture.stat().st_size
    if size >= LIMIT:
        raise SystemExit(
            f"{arguments.picture} has {size} bytes; the limit is {LIMIT}. Try a smaller --height."
        )
    print(f"{arguments.picture}: {size} bytes")


if __name__ == "__main__":
    main()
