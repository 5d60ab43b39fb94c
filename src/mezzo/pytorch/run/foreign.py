"""A script that uses mixed precision itself is left alone. Importing it is not using it.

Noticed at the first use by code that is neither PyTorch's nor Mezzo's: `torch.autocast` entered (through which
Accelerate and Lightning's `bf16-mixed` go as well), `GradScaler.scale`, `deepspeed.initialize`, `apex.amp.initialize`;
and Mezzo's own: an autocast that computes in fewer than 32 bits, a `MixedPrecision`, a loss that its `GradScaler`
scales, a function that trains the model in formats of its own. Models whose parameters are 16-bit are noticed by
`Preparation`. An autocast that is only switched off (`enabled=False`, as many libraries do around a sensitive op) is
ignored.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

SWITCH_OFF = (
    "to have Mezzo do it, run the script with its own mixed precision switched off (by an option of its own, or "
    "enabled=False)"
)
SEARCHES = {"calibrate": "mezzo.pytorch.calibrate", "find_batch_size": "mezzo.pytorch.batch_size"}
"""Public functions that call the model in formats of their own, and where each is."""

# Functions of PyTorch's that act for their caller: `@autocast`, `ExitStack`-like helpers.
_TRANSPARENT = frozenset({"decorate_autocast", "watched", "scale", "<genexpr>", "apply_scale"})


def watch(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Notice the first use of PyTorch's mixed precision, or of Mezzo's."""
    import torch

    import mezzo

    def watch_method(owner: Any, method: str, is_used: Callable[[Any], bool], name: str) -> None:
        """Leave the script alone at its first call of `owner.method` with an object that `is_used`."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if session.left_alone is None and is_used(args[0]):
                _notice(session, name)
            return original(*args, **kwargs)

        watched._torchdynamo_disable = True  # type: ignore[attr-defined]
        patches.set(owner, method, watched)

    is_enabled = torch.amp.GradScaler.is_enabled
    watch_method(torch.amp.autocast, "__enter__", lambda this: bool(this._enabled), "torch.autocast")
    watch_method(torch.amp.GradScaler, "scale", is_enabled, "GradScaler")
    imports.when(
        "mezzo.pytorch.grad_scaler",
        lambda module: watch_method(module.GradScaler, "scale", is_enabled, "mezzo.GradScaler"),
    )
    imports.when(
        "mezzo.pytorch.training.mixed_precision",
        lambda module: watch_method(
            module.MixedPrecision, "__init__", lambda this: True, "mezzo.MixedPrecision"
        ),
    )
    patches.set(mezzo, "autocast", _autocast(session))
    for name, home in SEARCHES.items():
        patches.set(mezzo, name, _search(session, name, home))


def watch_initialize(session: Session, patches: Patches, library: str) -> Callable[[Any], None]:
    """A callback for a library whose `initialize` takes over precision."""

    def imported(module: Any) -> None:
        original = getattr(module, "initialize", None)
        if original is None:
            return

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            fix = f"to have Mezzo do it, switch 16 bits off in the arguments of {library}, or remove its initialize()"
            session.stand_back(f"it uses {library}", fix)
            return original(*args, **kwargs)

        patches.set(module, "initialize", initialize)

    return imported


def _autocast(session: Session) -> Any:
    """The `mezzo.autocast` of a run. Dynamo traces it in a compiled function."""
    from mezzo.pytorch.autocast.context import autocast
    from mezzo.pytorch.kernels.unseen import unseen

    compiling: Any = sys.modules["torch"].compiler.is_dynamo_compiling

    def traced(context: Any) -> None:
        if session.left_alone is None:
            _stand_back(session, "mezzo.autocast", "in a compiled function")

    @unseen
    @functools.wraps(autocast)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            if args[:1] != ("fp32",) and kwargs.get("enabled", True):
                from torch._dynamo.comptime import comptime

                comptime(traced)
            return autocast(*args, **kwargs)
        made = autocast(*args, **kwargs)
        if session.left_alone is None and made.policy is not None:
            _notice(session, "mezzo.autocast")
        return made

    return watched


def _search(session: Session, name: str, home: str) -> Any:
    def search(*args: Any, **kwargs: Any) -> Any:
        if session.left_alone is None:
            _notice(session, f"mezzo.{name}")
        return getattr(importlib.import_module(home), name)(*args, **kwargs)

    return search


def _notice(session: Session, name: str) -> None:
    """Leave the script alone if the caller of the patched function is the script's or a library's code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == "mezzo" or (package == "torch" and frame.f_code.co_name not in _TRANSPARENT):
            return
        if package != "torch":
            by = f"{package}, " if module != "__main__" and package not in ("", "__mp_main__") else ""
            _stand_back(
                session, name, f"{by}{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}"
            )
            return
        frame = frame.f_back


def _stand_back(session: Session, name: str, where: str) -> None:
    fix = SWITCH_OFF
    if name.startswith("mezzo."):
        options = "; its watch= and records= do what --watch and --records do" if "Mixed" in name else ""
        fix = f"choose its precision there{options}. Or take {name} out, and mezzo run does it"
    session.stand_back(f"it uses {name} itself ({where})", fix)
