"""A script that has TensorFlow rewrite its graphs in 16 bits: grappler's auto mixed precision, whoever switches it on.

What the baseline computes is not FP32 then, and a candidate's policy would come on top of it: both are refused.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mezzo.core.errors import ScriptError

if TYPE_CHECKING:
    from types import FrameType

    from mezzo.keras.launch.session import Session
    from mezzo.scripts.patches import Patches

REWRITES = ("auto_mixed_precision", "auto_mixed_precision_mkl", "auto_mixed_precision_onednn_bfloat16")
"""The options that switch a rewrite on."""


def watch_rewrite(session: Session, patches: Patches) -> None:
    """Refuse what switches a rewrite on from now on: `tf.config.optimizer.set_experimental_options`, under any name."""
    from tensorflow.python.eager.context import Context

    original: Any = Context.set_optimizer_experimental_options

    @functools.wraps(original)
    def set_optimizer_experimental_options(context: Any, options: Any) -> Any:
        on = next((name for name in REWRITES if isinstance(options, dict) and options.get(name)), None)
        if on is not None:
            session.stop(
                ScriptError(
                    f"the script switches TensorFlow's mixed precision graph rewrite on itself ({on}, "
                    f"{_place(sys._getframe(1))}), so "
                    + (
                        "this run would not be in FP32"
                        if session.plan.is_fp32
                        else f"this run would not be in {session.plan.precision} alone"
                    )
                    + ". Take that out: Mezzo sets the precision of each run"
                )
            )
        return original(context, options)

    patches.set(Context, "set_optimizer_experimental_options", set_optimizer_experimental_options)


def _place(frame: FrameType | None) -> str:
    """The first line that is neither TensorFlow's nor Mezzo's: the script's, or its library's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("tensorflow", "mezzo", "contextlib"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that is not known"
