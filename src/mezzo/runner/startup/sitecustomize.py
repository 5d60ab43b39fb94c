"""Python's start of a process that a script under `mezzo run` started: the policy is applied when torch is imported.

Python imports `sitecustomize` from PYTHONPATH before it runs anything. Until the import of torch this file imports
nothing; without the variable it does nothing. An existing `sitecustomize` runs after it.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class WaitsForTorch:
    """Import hook of a process whose script has not imported torch yet; a `mezzo` command takes it away."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Apply the policy; torch itself is found by the hooks after this one."""
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        _join()
        from importlib.util import find_spec

        return find_spec(name)


def _join() -> None:
    """Hand over to Mezzo: the copy that the first process runs, which need not be installed for this Python."""
    import importlib
    import json

    run = json.loads(os.environ["MEZZO_RUN"])
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
    try:
        module = importlib.import_module(run["module"])
        if run["request"]["apex"]:
            importlib.import_module("mezzo.apex.imports").join(run)
    except ImportError as error:
        raise ImportError(
            f"mezzo run: {sys.executable} lacks {error.name}, which Mezzo needs to apply the policy to this process. "
            f"Install it: {sys.executable} -m pip install {error.name}",
            name=error.name,
        ) from error
    finally:
        del sys.path[0]
    module.join(run)


# The first entry of PYTHONPATH, which no script should see.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
if _text := os.environ.get("MEZZO_RUN"):
    if '"seed_offset": null' in _text and '"apex": true' not in _text:
        sys.meta_path.insert(0, WaitsForTorch)
    else:  # mezzo compare seeds what the script draws before it imports torch; --apex has apex before torch
        _join()
sys.modules.pop("sitecustomize", None)
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401
