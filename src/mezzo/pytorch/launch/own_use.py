"""A script that calls Mezzo itself is left alone, as one is that calls `torch.amp`: a loss that its own scaler has
scaled would be scaled again.

What counts is the use of a public name by code that is not Mezzo's: a `MixedPrecision` or a loss that a `GradScaler`
scales, a region that computes in fewer than 32 bits, a search that trains the model (`calibrate`, `find_batch_size`).

Dynamo traces a script's `mezzo.autocast` in a compiled function: this file is not among those that it must skip.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mezzo.pytorch.launch.foreign import caller, place

if TYPE_CHECKING:
    from types import FrameType

    from mezzo.pytorch.launch.session import Session
    from mezzo.scripts.patches import ImportWatch, Patches

SEARCHES = {
    "calibrate": "mezzo.pytorch.calibrate",
    "find_batch_size": "mezzo.pytorch.batch_size",
}
"""Public functions that call the model in formats of their own, and where each is."""


def watch(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Notice the first use of Mezzo by the script."""
    import mezzo
    from mezzo.pytorch.kernels.unseen import unseen
    from mezzo.pytorch.region.autocast import autocast

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
            _stand_back(session, "autocast", sys._getframe(1))
        return made

    patches.set(mezzo, "autocast", region)
    for name, home in SEARCHES.items():
        patches.set(mezzo, name, _search(session, name, home))
    imports.when("mezzo.pytorch.scaling.scaler", lambda module: _watch_scaler(session, patches, module))
    imports.when(
        "mezzo.pytorch.training.mixed_precision", lambda module: _watch_training(session, patches, module)
    )


def _search(session: Session, name: str, home: str) -> Any:
    def search(*args: Any, **kwargs: Any) -> Any:
        if session.left_alone is None:
            _stand_back(session, name, sys._getframe(1))
        return getattr(importlib.import_module(home), name)(*args, **kwargs)

    return search


def _watch_scaler(session: Session, patches: Patches, module: ModuleType | Any) -> None:
    scale: Any = module.GradScaler.scale

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        if session.left_alone is None and self.is_enabled():
            _stand_back(session, "GradScaler", sys._getframe(1))
        return scale(self, outputs)

    patches.set(module.GradScaler, "scale", scaled)


def _watch_training(session: Session, patches: Patches, module: ModuleType | Any) -> None:
    make: Any = module.MixedPrecision.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if session.left_alone is None:
            _stand_back(session, "MixedPrecision", sys._getframe(1))
        make(self, *args, **kwargs)

    patches.set(module.MixedPrecision, "__init__", made)


def _stand_back(session: Session, name: str, frame: FrameType) -> None:
    asking = caller(frame)
    if asking is not None:
        _told(session, name, place(asking))


def _told(session: Session, name: str, where: str) -> None:
    looks = "; its watch= and records= do what --watch and --records do" if name == "MixedPrecision" else ""
    session.stand_back(
        f"it uses mezzo.{name} itself ({where})",
        f"choose its precision there{looks}. Or take mezzo.{name} out, and mezzo run does it",
    )
