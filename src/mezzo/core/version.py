"""The version of Mezzo, and the versions of PyTorch and of other libraries that it works with."""

import importlib
import re
from typing import Any

from mezzo.core.errors import UsageError

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


def library(name: str, oldest: str, mine: str = "") -> Any:
    """Import the library of the integration `mine`; UsageError if it is missing, or older than the oldest supported."""
    package, mine = name.replace("_", "-"), f"mezzo.{mine or name}"
    fix = f"Install it: pip install -U '{package}>={oldest}'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(f"{mine} needs {package} >= {oldest}, which is not installed. {fix}") from error
    found, needed = (list(map(int, re.findall(r"\d+", v)[:3])) for v in (str(module.__version__), oldest))
    if found < needed:
        raise UsageError(f"{mine} needs {package} >= {oldest}, and {module.__version__} is installed. {fix}")
    return module
