"""Probe: one batch of the user's, run forward and backward beside the training, to see what lies between the weights.

Inside of a compiled training step nobody can look at what a layer returned, or at its gradient. So the same model, with
the weights and the loss scale that it has at that moment, computes the loss of one batch outside of it, and each
layer's output and that output's gradient are counted as they come by. The training does not notice: whatever the
layers assign (moving statistics, metrics, the states of seed generators) goes into a `keras.StatelessScope` and is
forgotten, gradients are asked for and not kept, the generators of Python, NumPy and PyTorch are put back, and so are
the buffers of PyTorch modules.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from mezzo.core.errors import UsageError
from mezzo.keras.dtypes import NAMES
from mezzo.keras.monitor import during_fit, exponents
from mezzo.keras.scaling.scale_use import ScaleUse
from mezzo.keras.torch_buffers import torch_buffers_kept

Tap = Callable[[str, Any], Any]
"""(path of a layer, a floating tensor that it returned) -> what it returns in place of it."""

Step = Callable[[Any, Any, Any, "list[Counted]"], "list[Any]"]
"""(x, y, sample weight, where what is counted is added) -> the gradients of the trainable variables, scaled."""


class Counted(NamedTuple):
    """One tensor's exponents, still on the device; the first four fields are `RangeRow`'s.

    `scaled` says whether the numbers are too large by the loss scale.
    """

    module: str
    what: str
    format: str
    name: str
    words: Any
    scaled: bool = False


class Probe:
    """A batch, as `fit` takes one.

    Args:
        batch: ``(x, y)`` or ``(x, y, sample_weight)``; x and y may be nested, of arrays with equal first sizes.

    Raises:
        UsageError: something else.
    """

    def __init__(self, batch: Any) -> None:
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise UsageError(
                f"probe={_told(batch)}: give one batch as a tuple, (x, y) or (x, y, sample_weight): x_train[:32], "
                "y_train[:32] for one."
            )
        x, y, weight = (*batch, None)[:3]
        arrays = keras.tree.flatten((x, y, weight))
        sizes = {len(one) for one in arrays if one is not None and getattr(one, "shape", None)}
        if len(sizes) != 1 or 0 in sizes:
            raise UsageError(
                f"probe: the arrays in it have {sorted(sizes) or 'no'} samples. All of one batch have the same number, "
                "1 or more."
            )
        self._batch = (x, y, weight)
        self._step: tuple[Any, Step] | None = None  # of the model that was looked at last: JAX's is compiled

    def look(self, model: Any) -> list[Counted]:
        """What lies between the weights of a model for this batch, as it is now. Waits for nothing.

        Args:
            model: compiled and built, possibly in the middle of its `fit`.

        Raises:
            UsageError: the model can't be called on the batch.
        """
        x, y, weight = keras.tree.map_structure(_tensor, self._batch)
        seen: list[Counted] = []
        if self._step is None or self._step[0] is not model:
            self._step = (model, _step_of(model))
        with ExitStack() as stack:
            stack.enter_context(_generators_kept())
            stack.enter_context(torch_buffers_kept(model))
            stack.enter_context(_scale_not_asked_for(model.optimizer))
            stack.enter_context(during_fit.reading(model))
            try:
                gradients = self._step[1](x, y, weight, seen)
            except UsageError:
                raise
            except Exception as error:
                shapes = ", ".join(
                    str(tuple(one.shape)) for one in keras.tree.flatten((x, y)) if one is not None
                )
                raise UsageError(
                    f"probe: the model's loss and gradients could not be computed for this batch (shapes {shapes}): "
                    f"{type(error).__name__}: {str(error).strip()[:500]}. Give a batch as fit gets it, "
                    "(x_train[:32], y_train[:32]) for one."
                ) from error
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            if gradient is not None:
                module, _, name = variable.path.rpartition("/")
                form, words = exponents.format_of(gradient), exponents.count(gradient)
                seen.append(Counted(module, "weight gradient", form, name, words, scaled=True))
        return seen


def _told(batch: Any) -> str:
    shape = getattr(batch, "shape", None)
    return f"<array of shape {tuple(shape)}>" if shape is not None else f"<{type(batch).__name__}>"


def _tensor(value: Any) -> Any:
    """What Keras's own adapters make of an array: floating numbers in the default format."""
    if value is None:
        return None
    value = value if keras.ops.is_tensor(value) else np.asarray(value)
    floating = str(keras.backend.standardize_dtype(value.dtype)) in NAMES
    return keras.ops.convert_to_tensor(value, dtype=keras.config.floatx() if floating else None)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Random numbers go on afterwards as if nothing had been drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    fork: Any = nullcontext()
    if keras.backend.backend() == "torch":
        import torch

        fork = torch.random.fork_rng()
    try:
        with fork:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _scale_not_asked_for(optimizer: Any) -> AbstractContextManager[None]:
    """A loop that forgot to scale its loss is found out, although the probe has scaled its own."""
    use = getattr(optimizer, "_use", None)
    return use.beside() if isinstance(use, ScaleUse) else nullcontext()


@contextmanager
def _tapped(model: Any, tap: Tap) -> Iterator[None]:
    """Each layer that has no others in it, or variables of its own, hands what it returns through `tap`."""
    done = []
    try:
        for path, layer in _layers(model):
            if isinstance(layer, keras.layers.InputLayer) or (
                layer._layers and not layer._trainable_variables
            ):
                continue
            layer.__dict__["call"] = _Tapped(layer.call, path, tap)
            done.append(layer)
        yield
    finally:
        for layer in done:
            del layer.__dict__["call"]


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """All layers within a model, each once, with their paths; one that Keras gave none is named as those beside it."""
    seen = {id(model)}

    def within(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
        parts = [one for one in layer._layers if id(one) not in seen]
        seen.update(map(id, parts))
        beside = [one.path for one in parts if one.path]
        prefix = path if not beside or path in {one.rpartition("/")[0] for one in beside} else ""
        for one in parts:
            found = one.path or "/".join(part for part in (prefix, one.name) if part)
            yield found, one
            yield from within(one, found)

    yield from within(model, model.path or model.name)


class _Tapped:
    """A layer's own `call`, and the tap behind it."""

    def __init__(self, call: Callable[..., Any], path: str, tap: Tap) -> None:
        self._call, self._path, self._tap = call, path, tap
        self.__wrapped__ = call  # for whoever asks for the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(self._one, self._call(*args, **kwargs))

    def _one(self, value: Any) -> Any:
        if not keras.ops.is_tensor(value) or not exponents.is_floating(value):
            return value
        mask = getattr(value, "_keras_mask", None)
        value = self._tap(self._path, value)
        if mask is not None:
            value._keras_mask = mask
        return value


def _loss(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """The loss of a batch as `fit` computes it, times the loss scale."""
    given = {"training": True} if model._call_has_training_arg else {}
    loss = model._compute_loss(x=x, y=y, y_pred=model(x, **given), sample_weight=weight, training=True)
    return model.optimizer.scale_loss(loss)


def _nothing_assigned(model: Any) -> Any:
    """A block in which what is assigned is forgotten, and each variable reads as what it holds."""
    scope = keras.StatelessScope(collect_losses=True)
    # Keras takes a regularizer's weight out of the scope itself, and finds nothing of one that was not put in.
    for variable in during_fit.variables(model):
        scope.add_update((variable, variable.value))
    return scope


def _count(path: str, what: str, value: Any, seen: list[Counted]) -> None:
    scaled = what == "activation gradient"
    seen.append(Counted(path, what, exponents.format_of(value), "", exponents.count(value), scaled))


def _count_gradients(kept: list[tuple[str, Any]], gradients: Any, seen: list[Counted]) -> None:
    for (path, _), gradient in zip(reversed(kept), reversed(gradients), strict=True):
        if gradient is not None:
            _count(path, "activation gradient", gradient, seen)


def _tensorflow(model: Any, x: Any, y: Any, weight: Any, seen: list[Counted]) -> list[Any]:
    import tensorflow as tf

    kept: list[tuple[str, Any]] = []
    with tf.GradientTape() as tape, _nothing_assigned(model):

        def tap(path: str, value: Any) -> Any:
            if tf.executing_eagerly():  # not inside a function of the layer's own
                _count(path, "activation", value, seen)
                kept.append((path, value))
            return value

        with _tapped(model, tap):
            loss = _loss(model, x, y, weight)
    weights = [variable.value for variable in model.trainable_variables]
    found = tape.gradient(loss, [*weights, *(value for _, value in kept)])
    _count_gradients(kept, found[len(weights) :], seen)
    return list(found[: len(weights)])


def _torch(model: Any, x: Any, y: Any, weight: Any, seen: list[Counted]) -> list[Any]:
    import torch

    kept: list[tuple[str, Any]] = []

    def tap(path: str, value: Any) -> Any:
        _count(path, "activation", value, seen)
        if value.requires_grad:
            value = value.view_as(value)  # what is changed in place later is not this one
            kept.append((path, value))
        return value

    with torch.enable_grad(), _nothing_assigned(model), _tapped(model, tap):
        loss = _loss(model, x, y, weight)
    weights = [variable.value for variable in model.trainable_variables]
    sources = [*weights, *(value for _, value in kept)]
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    _count_gradients(kept, found[len(weights) :], seen)
    return list(found[: len(weights)])


class _JaxStep:
    """All of it in one compiled function: JAX would compile every operation of every layer by itself otherwise.

    While it is traced, the taps count what comes by, and the counts are what the function returns.
    """

    def __init__(self, model: Any) -> None:
        import jax

        self.model = model
        self._counted: list[Counted] = []
        self._compiled = jax.jit(self._step)

    def __call__(self, x: Any, y: Any, weight: Any, seen: list[Counted]) -> list[Any]:
        model = self.model
        groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        state = [during_fit.values(model, group) for group in (*groups, model.optimizer.variables)]
        gradients, words = self._compiled(state, (x, y, weight))
        seen += [one._replace(words=row) for one, row in zip(self._counted, words, strict=True)]
        return list(gradients)

    def _step(self, state: Sequence[Any], data: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        import jax

        forward: list[Counted] = []
        backward: list[Counted] = []
        # Inside of a layer's own scan, or jit, there are no numbers that could leave it.
        trace = jax.tree.leaves(state)[0]._trace

        def tap(path: str, value: Any) -> Any:
            if value._trace is trace:  # nothing before it has a gradient
                _count(path, "activation", value, forward)
                return value
            return _jax_tapped(path, forward, backward, trace)(value)

        *held, optimizer = state
        with _tapped(self.model, tap):
            gradients, _ = jax.grad(_jax_loss(self.model), has_aux=True)(
                *held, *data, training=True, optimizer_variables=optimizer
            )
        self._counted = [one._replace(words=None) for one in forward + backward]
        return gradients, [one.words for one in forward + backward]


def _jax_loss(model: Any) -> Callable[..., Any]:
    """Keras's function of a model's loss, or the model's own that is called the same way.

    Keras's guide to a training step of one's own has a function of this name that takes other arguments.
    """
    own = model.compute_loss_and_updates
    try:
        inspect.signature(own).bind(*[None] * 6, training=True, optimizer_variables=None)
    except TypeError:
        return partial(keras.Model.compute_loss_and_updates, model)
    return own


def _jax_tapped(path: str, forward: list[Counted], backward: list[Counted], trace: Any) -> Any:
    """The identity, which counts what comes by, on the way forward and on the way back."""
    import jax

    def count(what: str, value: Any, into: list[Counted]) -> None:
        if value._trace is trace:
            _count(path, what, value, into)

    def same(value: Any) -> Any:
        return value

    def ahead(value: Any) -> tuple[Any, None]:
        count("activation", value, forward)
        return value, None

    def back(_: None, gradient: Any) -> tuple[Any]:
        count("activation gradient", gradient, backward)
        return (gradient,)

    tapped = jax.custom_vjp(same)
    tapped.defvjp(ahead, back)
    return tapped


def _step_of(model: Any) -> Step:
    """What computes a model's loss and gradients for a batch, and counts what comes by."""
    backend = keras.backend.backend()
    if backend == "jax":
        return _JaxStep(model)
    return partial({"tensorflow": _tensorflow, "torch": _torch}[backend], model)
