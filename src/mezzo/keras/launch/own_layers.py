"""Whether a script makes anything of Keras's: who imports TensorFlow has Keras imported too, unasked."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.keras.launch.session import Session
    from mezzo.scripts.patches import Patches


def watch_layers(session: Session, patches: Patches) -> None:
    """Note the first layer (a model is one) that is made from now on."""
    from keras.src.layers.layer import Layer

    new: Any = Layer.__new__

    @functools.wraps(new)
    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        session.used = True
        return new(cls, *args, **kwargs)

    patches.set(Layer, "__new__", staticmethod(made))
