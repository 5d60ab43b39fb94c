"""Numbers as options take them: what is no number is told with one that is."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(what: str, example: int) -> Callable[[str], int]:
    """A reader of whole numbers, for `add_argument(type=...)`.

    Args:
        what: what is counted, in the plural; empty for a mere number.
        example: a number that makes sense there.
    """

    def read(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            of = f" of {what}" if what else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number{of}: write one such as {example}"
            ) from None

    return read


def number(example: float) -> Callable[[str], float]:
    """A reader of numbers, for `add_argument(type=...)`.

    Args:
        example: a number that makes sense there.
    """

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number: write one such as {example:g}"
            ) from None

    return read


def share(text: str) -> float:
    """A share: 0.005, or 0.5%.

    Raises:
        ArgumentTypeError: it is no number.
    """
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: write 0.005 or 0.5%") from None
