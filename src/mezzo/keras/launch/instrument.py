"""What a run sets and patches in Keras, when, and how it is undone. All else in this folder is called from here."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from mezzo.keras.launch.memory import resident
from mezzo.scripts.imports import ImportWatch
from mezzo.scripts.patches import Patches

if TYPE_CHECKING:
    from mezzo.keras.launch.session import Session


class Instrument:
    """Sets the policy once the script has imported Keras, records what it trains, and undoes all of it at the end."""

    def __init__(self, session: Session, imports: ImportWatch) -> None:
        self._session = session
        self._imports = imports
        self._patches = Patches()
        self._policy_set = False
        self._loops: Any = None

    def install(self) -> None:
        """Wait for Keras, and for TensorFlow, which a script may set up before."""
        self._imports.when("tensorflow", self._tensorflow_imported)
        self._imports.when("keras", self._keras_imported)

    def remove(self) -> None:
        """Undo all of it."""
        if self._loops is not None:
            self._loops.remove()
        self._patches.undo()
        if self._policy_set:
            from mezzo.keras.policy.global_policy import set_policy

            set_policy("fp32")

    def _tensorflow_imported(self, tensorflow: ModuleType) -> None:
        from mezzo.keras.launch.own_rewrite import watch_rewrite

        watch_rewrite(self._session, self._patches)

    def _keras_imported(self, keras: ModuleType | Any) -> None:
        from mezzo.core.errors import UsageError

        session, patches = self._session, self._patches
        session.backend = keras.backend.backend()
        if session.backend not in ("tensorflow", "jax", "torch"):
            session.stop(
                UsageError(
                    f"Keras's backend is {session.backend!r}, which does not train. Set KERAS_BACKEND to tensorflow, "
                    "jax or torch."
                )
            )
        session.resident = resident()
        from mezzo.keras.launch.formats import LayerFormats
        from mezzo.keras.launch.loops import Loops
        from mezzo.keras.launch.own_layers import watch_layers
        from mezzo.keras.launch.own_policy import OwnPolicy
        from mezzo.keras.launch.steps import Steps
        from mezzo.keras.policy.global_policy import set_policy

        if session.plan.is_fp32:
            from mezzo.keras.launch.true_fp32 import switch_off_tf32

            switch_off_tf32(session.backend)
        set_policy(session.request.policy)
        self._policy_set = True
        watch_layers(session, patches)
        own = OwnPolicy(session)
        own.install(patches)
        Steps(session, own).install(patches)
        self._loops = Loops(session)
        self._loops.install(patches)
        if session.request.observe:
            session.formats = LayerFormats(session)
            session.formats.install(patches)
