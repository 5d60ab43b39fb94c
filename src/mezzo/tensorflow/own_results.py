"""What a call returned, known again when it is given back: scaled twice and unscaled twice train on in silence."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import tensorflow as tf


class OwnResults:
    """Tensors by identity, held weakly: a tensor is unhashable, and `==` compares its elements.

    Of `tf.IndexedSlices` their values, so that new slices of the same values are known too.
    """

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def remember(self, result: Any) -> None:
        """Know this tensor again, or these slices; None is nothing."""
        if result is not None:
            result = _values(result)
            self._by_id[id(result)] = result

    def __contains__(self, given: Any) -> bool:
        given = _values(given)
        return given is not None and self._by_id.get(id(given)) is given

    def forget(self) -> None:
        """Know none any more."""
        self._by_id.clear()


def _values(given: Any) -> Any:
    return given.values if isinstance(given, tf.IndexedSlices) else given
