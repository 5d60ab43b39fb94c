"""How a layer comes to the policy that a plan has for its path: when it is first built or called, before all else.

Keras knows a layer's path no earlier, and of layers without a build (Activation, Softmax, Dropout, Add) never: their
`path` is None for good, so that a `keras.DTypePolicyMap` cannot name them. Here a path is where the layer is first
used, by the names of the scopes around it, which is what Keras writes into `path` of the others.

A layer that was given a `dtype` keeps it, and so does one that was made before the plan: both have a policy whose name
is no `PlannedName`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.backend.common.name_scope import current_path  # Keras has no public name for it

from mezzo.core.errors import UsageError
from mezzo.keras.policy.plan import KerasPlan
from mezzo.keras.policy.planned_name import PlannedName, plan_behind
from mezzo.scripts.patches import Patches

# Layer -> its path, of layers that have their plan's policy.
_PATHS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def watch(patches: Patches) -> None:
    """From here on every layer takes its plan's policy at its first build or call, until the patches are undone."""
    for name in ("__call__", "_open_name_scope"):  # the second opens a build
        patches.set(keras.layers.Layer, name, _first_taking_policy(getattr(keras.layers.Layer, name)))


def _first_taking_policy(method: Any) -> Any:
    @functools.wraps(method)
    def taking(layer: Any, *args: Any, **kwargs: Any) -> Any:
        take_policy(layer)
        return method(layer, *args, **kwargs)

    return taking


def take_policy(layer: Any) -> None:
    """Give a layer the policy that its plan has for its path, once; nothing for a layer with a policy of its own."""
    plan = plan_behind(
        getattr(layer, "_dtype_policy", None)
    )  # no such attribute: its __init__ called no super()
    if plan is None or layer in _PATHS:
        return
    around = layer._parent_path if layer._parent_path is not None else current_path()
    path = _PATHS[layer] = f"{around}/{layer.name}" if around else str(layer.name)
    name = plan.policy_for(path)
    if name != layer.dtype_policy.name:
        layer.dtype_policy = keras.DTypePolicy(PlannedName(name, plan))


def paths_under(plan: KerasPlan) -> list[str]:
    """The paths of all layers of any model that took their policy from this plan."""
    return [path for layer, path in list(_PATHS.items()) if plan_behind(layer.dtype_policy) is plan]


def check_is_layer(given: Any, where: str) -> None:
    """Nothing, for a model or another layer of Keras's.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(given, keras.layers.Layer):
        raise UsageError(f"{where}: model is {given!r}; give a keras.Model.")


def walk(model: Any) -> Iterator[tuple[str, Any]]:
    """(path, layer) of everything in a model that computes: all layers within it, but for its inputs, at any depth.

    A layer that was not used yet has the path that it would get as far as anyone can say.
    """
    seen = {id(model)}

    def inside(layer: Any, around: str) -> Iterator[tuple[str, Any]]:
        for each in layer._flatten_layers(include_self=False, recursive=False):
            if id(each) in seen or isinstance(each, keras.layers.InputLayer):
                continue
            seen.add(id(each))
            path = path_of(each) or (f"{around}/{each.name}" if around else each.name)
            yield path, each
            yield from inside(each, path)

    # The layers of a Functional model were called before there was a model whose name could stand before theirs.
    functional = isinstance(model, keras.Model) and hasattr(model, "_inputs_struct")
    yield from inside(model, "" if functional else path_of(model) or model.name)


def path_of(layer: Any) -> str | None:
    """A layer's path; None for one that was never built, and for one of Keras's own that has no build."""
    return _PATHS.get(layer) or layer.path
