"""Whether the loss was multiplied by the scale at all, and by the scale as it is now: what a custom loop can forget.

Two mistakes train on in silence. `apply` without `scale_loss` divides ordinary gradients by S. And on JAX, `scale_loss`
called while a step is being compiled reads S once: S moves on, the compiled loss does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from mezzo.core.errors import CallOrderError, UsageError

ON_UNSCALED = ("raise", "warn", "ignore")


class ScaleUse:
    """What is known of one optimizer's scale: whether anybody ever asked for it.

    Args:
        on_unscaled: what to do about a step whose loss cannot have been scaled: "raise", "warn" once or "ignore".

    Raises:
        UsageError: another word.
    """

    def __init__(self, on_unscaled: str) -> None:
        if on_unscaled not in ON_UNSCALED:
            raise UsageError(
                f"on_unscaled is {on_unscaled!r}. Use one of {', '.join(map(repr, ON_UNSCALED))}."
            )
        self.on_unscaled = on_unscaled
        self._asked = on_unscaled == "ignore"

    def asked(self) -> None:
        """Somebody has the scale from here on."""
        self._asked = True

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Who asks for the scale within is not the training loop, and has not scaled its loss."""
        before = self._asked
        try:
            yield
        finally:
            self._asked = before

    def check_scaled(self, scale: str) -> None:
        """Nothing, if the loss can have been scaled.

        Args:
            scale: the loss scale as a person writes it, for the message.

        Raises:
            CallOrderError: nobody ever asked for the scale, and `on_unscaled` is "raise".
        """
        if self._asked:
            return
        message = (
            f"apply() divides the gradients by the loss scale {scale}, and nobody has multiplied the loss by it: the "
            "step would be that much too small. Take the gradients of optimizer.scale_loss(loss); in a compiled JAX "
            "step, of optimizer.stateless_scale_loss(optimizer_variables, loss). "
            "If they are scaled otherwise, construct LossScaleOptimizer(..., on_unscaled='ignore')."
        )
        if self.on_unscaled == "raise":
            raise CallOrderError(message)
        self._asked = True
        warnings.warn(message, stacklevel=3)


def check_not_baked_in(variable: Any, instead: str) -> None:
    """Nothing, unless JAX is compiling a function in which this variable is read as a constant.

    Args:
        variable: the Keras variable that is about to be read or written.
        instead: what to call there.

    Raises:
        CallOrderError: it is.
    """
    if keras.backend.backend() != "jax":
        return
    import jax

    # A product of two constants is a tracer only while a program is recorded: `jax.grad` alone computes it at once.
    if isinstance(variable.value, jax.core.Tracer) or not isinstance(
        jax.numpy.multiply(jax.numpy.float32(1), 1), jax.core.Tracer
    ):
        return
    raise CallOrderError(
        "inside a function that JAX compiles, the optimizer's variables are constants: the loss scale would stay what "
        f"it is now, whatever becomes of it. Hand the optimizer's variables to the function and use {instead}."
    )
