"""A script that sets a dtype policy of its own.

A run in FP32 would not be FP32 then, so it is refused. Under another precision the script is left alone: what it says
rules. What says float32, as every script does that says nothing, is passed over.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mezzo.core.errors import ScriptError
from mezzo.keras.dtypes import NARROW

if TYPE_CHECKING:
    from types import FrameType

    from mezzo.keras.launch.session import Session
    from mezzo.scripts.patches import Patches

_NAMES = ("set_dtype_policy", "set_global_policy")


class OwnPolicy:
    """Notices what the script says of policies."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self, patches: Patches) -> None:
        """From now on; `mezzo.keras.set_policy` goes through as it is."""
        from keras.src.dtype_policies.dtype_policy import set_dtype_policy

        seen = self._make(set_dtype_policy)
        for module in list(sys.modules.values()):
            name = str(getattr(module, "__name__", ""))
            if name.startswith("keras.") and not name.startswith("keras.src."):
                for attribute in _NAMES:
                    if vars(module).get(attribute) is set_dtype_policy:
                        patches.set(module, attribute, seen)

    def _make(self, original: Any) -> Any:
        @functools.wraps(original)
        def set_dtype_policy(policy: Any) -> Any:
            frame = sys._getframe(1)
            if str(frame.f_globals.get("__name__", "")).startswith(("mezzo.", "keras.")):
                return original(policy)
            name = str(getattr(policy, "name", policy))
            if name == "float32":
                self._session.journal.note(
                    f"{_place(frame)} sets the dtype policy float32, which is passed over: this run's is "
                    f"{self._session.plan.precision}"
                )
                return None
            self._chosen(f"sets the dtype policy {name!r} itself ({_place(frame)})")
            return original(policy)

        return set_dtype_policy

    def check(self, model: Any) -> None:
        """Look at a model that is trained: in FP32 none of its layers may compute in fewer than 32 bits.

        Raises:
            ScriptError: one does.
        """
        if not self._session.plan.is_fp32:
            return
        for layer in model._flatten_layers():
            if layer.compute_dtype in NARROW:
                self._chosen(
                    f"gives the layer {layer.path} the dtype policy {layer.dtype_policy.name!r} itself"
                )

    def _chosen(self, what: str) -> None:
        session = self._session
        if session.plan.is_fp32:
            session.stop(
                ScriptError(
                    f"the script {what}, so this run would not be in FP32. Take that out: Mezzo sets the policy of "
                    "each run"
                )
            )
        if session.left_alone is None:
            from mezzo.keras.policy.global_policy import set_policy

            set_policy("fp32")
            session.left_alone = f"it {what}"
            session.journal.note(f"left alone: {session.left_alone}")
            session.journal.note("to have Mezzo set it, take that line out")


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
