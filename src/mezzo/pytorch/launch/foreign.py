"""A script that brings its own mixed precision is left alone. What counts is that it is used, not that it
is imported.

Told by their first use: `torch.autocast` (through which Accelerate and Lightning's `bf16-mixed` go as well)
entered by code that is neither PyTorch's nor ours, `GradScaler.scale`, `deepspeed.initialize`,
`apex.amp.initialize`. Models whose parameters are 16-bit already are told by `Preparation`, Mezzo's own names
by `own_use`. A region that only switches autocast off (`enabled=False`, as many libraries do around a sensitive op)
is no use of it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.pytorch.launch.session import Session
    from mezzo.scripts.patches import Patches


SWITCH_OFF = (
    "to have Mezzo do it, run the script with its own mixed precision switched off (by an option of its own, or "
    "enabled=False)"
)
"""What to do about a script that uses PyTorch's."""


def watch_torch(session: Session, patches: Patches) -> None:
    """Notice the first use of PyTorch's own mixed precision."""
    import torch

    autocast = torch.amp.autocast_mode.autocast
    enter: Any = autocast.__enter__

    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        if self._enabled and session.left_alone is None:
            frame = caller(sys._getframe(1))
            if frame is not None:
                session.stand_back(f"it uses torch.autocast itself ({place(frame)})", SWITCH_OFF)
        return enter(self)

    patches.set(autocast, "__enter__", entering)
    scaler = torch.amp.GradScaler
    scale = scaler.scale

    @functools.wraps(scale)
    def scale_(self: Any, outputs: Any) -> Any:
        if self.is_enabled() and session.left_alone is None:
            frame = caller(sys._getframe(1))
            if frame is not None:
                session.stand_back(f"it uses GradScaler itself ({place(frame)})", SWITCH_OFF)
        return scale(self, outputs)

    patches.set(scaler, "scale", scale_)


def watch_initialize(session: Session, patches: Patches, what: str) -> Callable[[ModuleType], None]:
    """A callback for a library whose `initialize` takes over precision."""

    def imported(module: ModuleType) -> None:
        original = getattr(module, "initialize", None)
        if original is None:
            return

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            mend = f"to have Mezzo do it, switch 16 bits off in what {what} is given, or take its initialize() out"
            session.stand_back(f"it uses {what}", mend)
            return original(*args, **kwargs)

        patches.set(module, "initialize", initialize)

    return imported


def caller(frame: FrameType | None) -> FrameType | None:
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


# Functions of PyTorch's that do for their caller what he asked for: `@autocast`, `ExitStack`-like helpers.
_TRANSPARENT = frozenset({"decorate_autocast", "entering", "scale_", "scale", "<genexpr>", "apply_scale"})


def place(frame: FrameType) -> str:
    """Where a frame's code stands, for a reader: whose it is, its file and line."""
    name = str(frame.f_globals.get("__name__", ""))
    package = name.partition(".")[0]
    file = os.path.basename(frame.f_code.co_filename)
    by = f"{package}, " if name != "__main__" and package not in ("", "__mp_main__") else ""
    return f"{by}{file} line {frame.f_lineno}"
