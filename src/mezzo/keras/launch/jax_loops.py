"""How JAX's own loops tell of their losses and updates: by calling back, from within compiled functions too."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import jax
import keras

from mezzo.keras.scaling.loss_scale_optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from mezzo.keras.launch.loops import Loops
    from mezzo.scripts.patches import Patches


class JaxLoops:
    """Has `value_and_grad` and `stateless_apply` call back with what they computed."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._lock = threading.Lock()  # a compiled function calls back from a thread of its own
        self._told = False

    def install(self, patches: Patches) -> None:
        """From now on."""
        patches.set(jax, "value_and_grad", self._make_value_and_grad(jax.value_and_grad))
        base: Any = next(
            cls for cls in reversed(keras.optimizers.Optimizer.__mro__) if "stateless_apply" in vars(cls)
        )
        for cls in (base, keras.optimizers.LossScaleOptimizer, LossScaleOptimizer):
            if "stateless_apply" in vars(cls):
                patches.set(cls, "stateless_apply", self._make_apply(cls.stateless_apply))
        scale = self._make_scale_loss(LossScaleOptimizer.stateless_scale_loss)
        patches.set(LossScaleOptimizer, "stateless_scale_loss", scale)

    def compiling(self, optimizer: Any) -> bool:
        """Whether `apply` was called on what is being traced."""
        return isinstance(keras.ops.ones(()), jax.core.Tracer)

    def told(self, loss: Any) -> None:
        """A loss is scaled: it is recorded here, before; what gradients are taken of is not."""
        self._told = True
        jax.debug.callback(self._on_loss, keras.ops.mean(keras.ops.cast(loss, "float32")))

    def _make_scale_loss(self, original: Any) -> Any:
        @functools.wraps(original)
        def stateless_scale_loss(optimizer: Any, optimizer_variables: Any, loss: Any) -> Any:
            if not self._loops.session.inside:
                self.told(loss)
            return original(optimizer, optimizer_variables, loss)

        return stateless_scale_loss

    def _make_value_and_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def value_and_grad(fun: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(fun, *args, **kwargs)
            has_aux = kwargs.get("has_aux", args[1] if len(args) > 1 else False)

            @functools.wraps(made)
            def watched(*args: Any, **kwargs: Any) -> Any:
                if self._loops.session.inside:
                    return made(*args, **kwargs)
                self._told = False
                value, gradients = made(*args, **kwargs)
                if not self._told:
                    loss = value[0] if has_aux else value
                    jax.debug.callback(self._on_loss, keras.ops.cast(loss, "float32"))
                return value, gradients

            return watched

        return value_and_grad

    def _make_apply(self, original: Any) -> Any:
        @functools.wraps(original)
        def stateless_apply(optimizer: Any, optimizer_variables: Any, *args: Any, **kwargs: Any) -> Any:
            made, own = self._loops.outermost(original, optimizer, optimizer_variables, *args, **kwargs)
            if own:
                self._loops.told_of_scale(optimizer)
                scale, skipped = self._scale(optimizer, optimizer_variables, made[1])
                jax.debug.callback(functools.partial(self._on_update, optimizer), scale, skipped)
            return made

        return stateless_apply

    def _scale(self, optimizer: Any, before: Any, after: Any) -> tuple[Any, Any]:
        """The scale that the step used, and whether it was skipped."""
        if not isinstance(optimizer, LossScaleOptimizer):
            return 1.0, 0
        places = {id(one): place for place, one in enumerate(optimizer.variables)}
        return before[places[id(optimizer._scale)]], after[places[id(optimizer.last_step_skipped)]]

    def _on_loss(self, loss: Any) -> None:
        with self._lock:
            self._loops.session.journal.loss(float(loss))

    def _on_update(self, optimizer: Any, scale: Any, skipped: Any) -> None:
        with self._lock:
            try:
                self._loops.session.stepped(optimizer, loss=None, skipped=bool(skipped), scale=float(scale))
            except SystemExit:  # in a thread of JAX's, where it would be an error of the computation
                self._loops.session.journal.note("a loop of its own on JAX can't be ended early: it went on")
