"""``python -m mezzo.report DIR``: make DIR/report.html anew from the records in DIR, as `mezzo report DIR` does."""

from __future__ import annotations

import sys

from mezzo.core.errors import MezzoError
from mezzo.report import build_any


def main(words: list[str]) -> int:
    """Build each folder's report and print its path; 2 for wrong usage."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    try:
        for word in words:
            print(build_any(word))
    except (MezzoError, OSError) as error:
        print(f"mezzo.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
