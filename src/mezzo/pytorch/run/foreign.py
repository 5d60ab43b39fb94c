"""A script that brings its own mixed precision is left alone, whoever's it is. What counts is that it is used, not that
it is imported.

Told by their first use, by code that is neither PyTorch's nor ours: `torch.autocast` entered (through which Accelerate
and Lightning's `bf16-mixed` go as well), `GradScaler.scale`, `deepspeed.initialize`, `apex.amp.initialize`; and Mezzo's
own: an autocast that computes in fewer than 32 bits, a `MixedPrecision`, a loss that its `GradScaler` scales, a search
that trains the model. Models whose parameters are 16-bit already are told by `Preparation`.

An autocast that is only switched off (`enabled=False`, as many libraries do around a sensitive op) is no use of it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
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

# Functions of PyTorch's that do for their caller what he asked for: `@autocast`, `ExitStack`-like helpers.
_TRANSPARENT = frozenset({"decorate_autocast", "watched", "scale", "<genexpr>", "apply_scale"})


def watch(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Notice the first use of PyTorch's mixed precision, or of Mezzo's."""
    import torch

    import mezzo

    def before(owner: Any, name: str, enabled: Callable[[Any], bool], told: Callable[[str], None]) -> None:
        """Tell of the first call of `owner.name` by the script, where its first argument is enabled."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if session.left_alone is None and enabled(args[0]):
                asking = _caller(sys._getframe(1))
                if asking is not None:
                    told(_place(asking))
            return original(*args, **kwargs)

        watched._torchdynamo_disable = True  # type: ignore[attr-defined]
        patches.set(owner, name, watched)

    def by_torch(name: str) -> Callable[[str], None]:
        return lambda where: session.stand_back(f"it uses {name} itself ({where})", SWITCH_OFF)

    def scaler_imported(module: ModuleType | Any) -> None:
        before(module.GradScaler, "scale", is_enabled, functools.partial(_told, session, "GradScaler"))

    def training_imported(module: ModuleType | Any) -> None:
        told = functools.partial(_told, session, "MixedPrecision")
        before(module.MixedPrecision, "__init__", lambda this: True, told)

    is_enabled = torch.amp.GradScaler.is_enabled
    autocast = torch.amp.autocast_mode.autocast
    before(autocast, "__enter__", lambda this: bool(this._enabled), by_torch("torch.autocast"))
    before(torch.amp.GradScaler, "scale", is_enabled, by_torch("GradScaler"))
    imports.when("mezzo.pytorch.grad_scaler", scaler_imported)
    imports.when("mezzo.pytorch.training.mixed_precision", training_imported)
    patches.set(mezzo, "autocast", _autocast(session))
    for name, home in SEARCHES.items():
        patches.set(mezzo, name, _search(session, name, home))


def watch_initialize(session: Session, patches: Patches, what: str) -> Callable[[ModuleType], None]:
    """A callback for a library whose `initialize` takes over precision."""

    def imported(module: ModuleType) -> None:
        original = getattr(module, "initialize", None)
        if original is None:
            return

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            fix = f"to have Mezzo do it, switch 16 bits off in what {what} is given, or take its initialize() out"
            session.stand_back(f"it uses {what}", fix)
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
            _told(session, "autocast", "in a compiled function")

    @unseen
    @functools.wraps(autocast)
    def region(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            if args[:1] != ("fp32",) and kwargs.get("enabled", True):
                from torch._dynamo.comptime import comptime

                comptime(traced)
            return autocast(*args, **kwargs)
        made = autocast(*args, **kwargs)
        if session.left_alone is None and made.policy is not None:
            asking = _caller(sys._getframe(1))
            if asking is not None:
                _told(session, "autocast", _place(asking))
        return made

    return region


def _search(session: Session, name: str, home: str) -> Any:
    def search(*args: Any, **kwargs: Any) -> Any:
        asking = _caller(sys._getframe(1))
        if session.left_alone is None and asking is not None:
            _told(session, name, _place(asking))
        return getattr(importlib.import_module(home), name)(*args, **kwargs)

    return search


def _told(session: Session, name: str, where: str) -> None:
    looks = "; its watch= and records= do what --watch and --records do" if name == "MixedPrecision" else ""
    session.stand_back(
        f"it uses mezzo.{name} itself ({where})",
        f"choose its precision there{looks}. Or take mezzo.{name} out, and mezzo run does it",
    )


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that asked for mixed precision, or None if it was PyTorch's own doing, or Mezzo's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "mezzo":
            return None
        if package != "torch":
            return frame
        if frame.f_code.co_name not in _TRANSPARENT:
            return None
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    """Where a frame's code stands, for a reader: whose it is, its file and line."""
    name = str(frame.f_globals.get("__name__", ""))
    package = name.partition(".")[0]
    file = os.path.basename(frame.f_code.co_filename)
    by = f"{package}, " if name != "__main__" and package not in ("", "__mp_main__") else ""
    return f"{by}{file} line {frame.f_lineno}"
