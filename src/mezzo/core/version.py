"""The version of Mezzo, and the versions of PyTorch that it was tested with."""

import re

VERSION = "0.2.0"

TORCH_TESTED = ("2.11", "2.14")
"""The oldest and the newest minor version of PyTorch that `make versions` tests."""


def untested_torch(version: str) -> str:
    """The warning for a version of PyTorch that was not tested; empty for a tested one."""
    found, oldest, newest = (list(map(int, re.findall(r"\d+", v)[:2])) for v in (version, *TORCH_TESTED))
    if oldest <= found <= newest:
        return ""
    return (
        f"mezzo {VERSION} was tested with torch {' to '.join(TORCH_TESTED)}, and this is torch {version}. If something "
        f"fails, install a tested version: pip install 'torch>={TORCH_TESTED[0]},<{newest[0]}.{newest[1] + 1}'"
    )
