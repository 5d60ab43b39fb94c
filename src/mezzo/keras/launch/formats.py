"""LayerFormats: which layer computed in which format, and what it gave, as a report shows it for ops."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mezzo.core.records import OpFormats
from mezzo.keras.dtypes import NAMES

if TYPE_CHECKING:
    from mezzo.keras.launch.session import Session
    from mezzo.scripts.patches import Patches


class LayerFormats:
    """Notes what each layer returns while it is called (or traced), until the table has been made.

    A layer's inputs are cast to its compute dtype before its `call`, so that is what it computes in; what it returns is
    looked at. Layers that only hold others (a model) are left out: their parts are told.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: dict[str, OpFormats] = {}
        self._done = False

    def install(self, patches: Patches) -> None:
        """Look at every call of a layer."""
        from keras.src.layers.layer import Layer

        call: Any = Layer.__call__

        @functools.wraps(call)
        def seen(layer: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            if not self._done:
                self._note(layer, outputs)
            return outputs

        patches.set(Layer, "__call__", seen)

    def table(self) -> list[OpFormats]:
        """A row for each layer, in the order of their first calls; what is called later is not noted."""
        self._done = True
        return list(self._seen.values())

    def _note(self, layer: Any, outputs: Any) -> None:
        from keras import tree

        parts = getattr(layer, "_layers", None)
        path = getattr(layer, "path", None) or layer.name
        if parts or path in self._seen:
            return
        given = [str(getattr(one, "dtype", "")).rpartition(".")[2] for one in tree.flatten(outputs)]
        floats = list(dict.fromkeys(NAMES[name] for name in given if name in NAMES))
        if not floats:
            return
        computed = str(layer.compute_dtype)
        planned = self._session.plan.policy_for(path)
        low = {"float32": "fp32", "mixed_bfloat16": "bf16", "mixed_float16": "fp16"}[planned]
        self._seen[path] = OpFormats(
            op=type(layer).__name__,
            rule="lower" if low != "fp32" else "fp32",
            planned=f"{low} -> {low}",
            observed=f"{NAMES.get(computed, computed)} -> {', '.join(floats)}",
            calls=1,
            casts=0,
            reason=f"dtype policy {layer.dtype_policy.name}",
            module=path,
        )
