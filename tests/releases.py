"""What differs between the releases of PyTorch that are supported."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def before_torch(major: int, minor: int, reason: str) -> None:
    """Skip the rest of a test in an older release."""
    if (major, minor) > TORCH:
        pytest.skip(f"before torch {major}.{minor}: {reason}")
