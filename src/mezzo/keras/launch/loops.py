"""Training loops of the script's own: an optimizer of Keras's that is applied outside of Keras's trainer.

An update is a call of `apply` (`stateless_apply` on JAX, a torch optimizer's `step` on PyTorch), the loss is what the
gradients before it were taken of. How a compiled function tells of its steps is each backend's own:

| backend    | loss                                   | update                                                     |
|------------|----------------------------------------|------------------------------------------------------------|
| TensorFlow | the target of `GradientTape.gradient`, | `apply`; after a `tf.function`: the optimizer's count says |
|            | kept in a variable in a `tf.function`  | whether it stepped in it                                   |
| JAX        | the value of `jax.value_and_grad`      | `stateless_apply`; both call back from compiled functions  |
| PyTorch    | what `backward` is called on           | `apply`, and the steps of torch's optimizers               |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from mezzo.keras.launch.nudge import nudge
from mezzo.keras.scaling.loss_scale_optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from mezzo.keras.launch.session import Session
    from mezzo.scripts.patches import Patches

_UNSCALED = (
    "float16 in a training loop of its own: its gradients are not scaled, and small ones are lost. Wrap the optimizer: "
    "mezzo.keras.LossScaleOptimizer(optimizer), and take the gradients of optimizer.scale_loss(loss)"
)


class Loops:
    """Records what the script's own loops do.

    Attributes:
        loss: the loss whose gradients were taken last and not applied yet: a tensor, or a function that reads it.
        scaled: what `scale_loss` gave last, and what it was given.
        at_end: what gives back what patches can't.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.loss: Any = None
        self.scaled: tuple[Any, Any] = (None, None)
        self.at_end: list[Callable[[], None]] = []
        self._depth = 0
        self._nudged: set[int] = set()

    def install(self, patches: Patches) -> None:
        """From now on."""
        base: Any = next(cls for cls in reversed(keras.optimizers.Optimizer.__mro__) if "apply" in vars(cls))
        backend = self._backend()
        for cls in (base, keras.optimizers.LossScaleOptimizer, LossScaleOptimizer):
            for name, make in (
                ("apply", self._make_apply(backend)),
                ("scale_loss", self._make_scale_loss(backend)),
            ):
                if name in vars(cls):
                    patches.set(cls, name, make(vars(cls)[name]))
        backend.install(patches)

    def remove(self) -> None:
        """Give back what patches can't."""
        while self.at_end:
            self.at_end.pop()()

    def _backend(self) -> Any:
        name = self.session.backend
        if name == "tensorflow":
            from mezzo.keras.launch.tensorflow_loops import TensorFlowLoops

            return TensorFlowLoops(self)
        if name == "jax":
            from mezzo.keras.launch.jax_loops import JaxLoops

            return JaxLoops(self)
        from mezzo.keras.launch.torch_loops import TorchLoops

        return TorchLoops(self)

    def outermost(self, call: Any, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """What a call gives, and whether it is a step of the script's own: no other of these calls was under way."""
        if self.session.inside or self._depth:
            return call(*args, **kwargs), False
        self._depth += 1
        try:
            return call(*args, **kwargs), True
        finally:
            self._depth -= 1

    def _make_apply(self, backend: Any) -> Any:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                made, own = self.outermost(original, optimizer, *args, **kwargs)
                if own and not backend.compiling(optimizer):
                    self.applied(optimizer)
                return made

            return apply

        return make

    def _make_scale_loss(self, backend: Any) -> Any:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def scale_loss(optimizer: Any, loss: Any) -> Any:
                made = original(optimizer, loss)
                if not self.session.inside:
                    self.scaled = made, loss
                    backend.told(loss)
                return made

            return scale_loss

        return make

    def unscaled(self, target: Any) -> Any:
        """The loss that a target of gradients stands for."""
        return self.scaled[1] if target is self.scaled[0] else target

    def applied(self, optimizer: Any) -> None:
        """An optimizer's step is over, and its values can be read.

        Raises:
            SystemExit: as many steps as were asked for are done.
        """
        self.told_of_scale(optimizer)
        loss, self.loss, self.scaled = self.loss, None, (None, None)
        variables = getattr(optimizer, "_trainable_variables", ())
        if self.session.request.nudge and id(optimizer) not in self._nudged:
            self._nudged.add(id(optimizer))
            nudge(variables)
        is_ours = isinstance(optimizer, LossScaleOptimizer)
        self.session.stepped(
            optimizer,
            loss=None if loss is None else number(loss() if callable(loss) else loss),
            skipped=is_ours and bool(number(optimizer.last_step_skipped)),
            scale=number(optimizer._scale) if is_ours else 1.0,
        )

    def told_of_scale(self, optimizer: Any) -> None:
        """Say so, where float16 gradients are not scaled."""
        if self.session.scales and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self.session.journal.note(_UNSCALED)


def number(value: Any) -> float:
    """A tensor's or a variable's mean, as a float; waits for it."""
    import numpy as np

    if isinstance(value, float):
        return value
    return float(np.mean(np.asarray(keras.ops.convert_to_numpy(value), dtype=np.float64)))
