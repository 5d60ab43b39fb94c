"""The layers of a model: their paths, the policy that a plan gives each, and `mezzo.keras.layer_policies(model)`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.backend.common.name_scope import current_path  # Keras has no public name for it

from mezzo.core.errors import UsageError
from mezzo.keras.plan import KerasPlan, PlannedName, plan_behind
from mezzo.runner.patches import Patches

# Layer -> its path, of layers that have their plan's policy.
_PATHS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def install(patches: Patches) -> None:
    """From here on every layer takes its plan's policy at its first build or call, until the patches are undone."""
    for name in ("__call__", "_open_name_scope"):  # the second opens a build
        patches.set(keras.layers.Layer, name, _first_taking_policy(getattr(keras.layers.Layer, name)))


def _first_taking_policy(method: Any) -> Any:
    @functools.wraps(method)
    def taking(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # A layer has no such attribute if its __init__ called no super().
        plan = plan_behind(getattr(layer, "_dtype_policy", None))
        if plan is not None and layer not in _PATHS:
            around = layer._parent_path if layer._parent_path is not None else current_path()
            path = _PATHS[layer] = f"{around}/{layer.name}" if around else str(layer.name)
            name = plan.policy_for(path)
            if name != layer.dtype_policy.name:
                layer.dtype_policy = keras.DTypePolicy(PlannedName(name, plan))
        return method(layer, *args, **kwargs)

    return taking


def paths_under(plan: KerasPlan) -> list[str]:
    """The paths of the layers of all models under this plan."""
    return [path for layer, path in list(_PATHS.items()) if plan_behind(layer.dtype_policy) is plan]


def walk(model: Any) -> Iterator[tuple[str, Any]]:
    """(path, layer) of all layers in a model at any depth, without its inputs; the likely path of one not used yet."""
    seen = {id(model)}

    def inside(layer: Any, around: str) -> Iterator[tuple[str, Any]]:
        for each in layer._flatten_layers(include_self=False, recursive=False):
            if id(each) in seen or isinstance(each, keras.layers.InputLayer):
                continue
            seen.add(id(each))
            path = _path_of(each) or (f"{around}/{each.name}" if around else each.name)
            yield path, each
            yield from inside(each, path)

    # The layers of a Functional model were called before there was a model whose name could stand before theirs.
    functional = isinstance(model, keras.Model) and hasattr(model, "_inputs_struct")
    yield from inside(model, "" if functional else _path_of(model) or model.name)


def _path_of(layer: Any) -> str | None:
    return _PATHS.get(layer) or layer.path


@dataclass(frozen=True)
class LayerPolicy:
    """One layer's path, class, Keras policy, formats, and `why`: ``plan``, ``module.PATTERN`` or ``its own``."""

    path: str
    kind: str
    policy: str
    compute: str
    variables: str
    why: str


class LayerPolicies(tuple[LayerPolicy, ...]):
    """The rows of a model in the order of its layers; `unmatched`: patterns that name none. Printed, a table."""

    unmatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = ("layer", "class", "policy", "computes in", "why")
        rows = [head, *((row.path, row.kind, row.policy, row.compute, row.why) for row in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)) for row in rows]
        lines += [f"module.{pattern} matches no layer of this model" for pattern in self.unmatched]
        return "\n".join(line.rstrip() for line in lines)


def layer_policies(model: Any) -> LayerPolicies:
    """The format that each layer of a Keras model computes in, and why. Raises UsageError for other objects.

    A layer takes its plan's policy when it is first built or called; before that its row has the default.
    """
    if not isinstance(model, keras.layers.Layer):
        raise UsageError(f"layer_policies: model is {model!r}. Give a keras.Model or another Keras layer.")
    rows: list[LayerPolicy] = []
    plans: dict[KerasPlan, None] = {}
    for path, layer in walk(model):
        why, plan = "its own", plan_behind(layer.dtype_policy)
        if plan is not None:
            plans[plan] = None
            pattern = plan.decision(path)[0]
            why = f"module.{pattern}" if pattern else "plan"
        dtypes = str(layer.dtype_policy.name), layer.compute_dtype, layer.variable_dtype
        rows.append(LayerPolicy(path, type(layer).__name__, *dtypes, why))
    found = LayerPolicies(rows)
    paths = [row.path for row in rows]
    found.unmatched = tuple(dict.fromkeys(pattern for plan in plans for pattern in plan.unmatched(paths)))
    return found
