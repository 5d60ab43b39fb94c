"""Which layer of a model computes in what, and why: `mezzo.keras.layer_policies(model)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mezzo.keras.policy.layers import check_is_layer, walk
from mezzo.keras.policy.planned_name import plan_behind


@dataclass(frozen=True)
class LayerPolicy:
    """One layer's policy.

    Args:
        path: where it is in the model.
        kind: its class.
        policy: Keras's name of its policy.
        compute: the dtype that it computes in and hands on.
        variables: the dtype of its variables.
        why: ``plan``, the pattern of the plan that named it or a layer around it, or ``its own`` for a `dtype` that it
            was given, made before the plan, or saved with.
    """

    path: str
    kind: str
    policy: str
    compute: str
    variables: str
    why: str


class LayerPolicies(tuple[LayerPolicy, ...]):
    """The rows of a model in the order of its layers. Printed, a table.

    Attributes:
        unmatched: the patterns of its plan that name no layer of this model.
    """

    unmatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = ("layer", "class", "policy", "computes in", "why")
        rows = [head, *((row.path, row.kind, row.policy, row.compute, row.why) for row in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        lines += [f"module.{pattern} names no layer of this model" for pattern in self.unmatched]
        return "\n".join(line.rstrip() for line in lines)


def layer_policies(model: Any) -> LayerPolicies:
    """What each layer of a Keras model computes in, and why.

    A layer takes its plan's policy when it is first built or called; before that its row has the default.

    Args:
        model: a `keras.Model`, or any layer with layers in it.

    Raises:
        UsageError: it is neither.
    """
    check_is_layer(model, "layer_policies")
    layers = list(walk(model))
    found = LayerPolicies(_row(path, layer) for path, layer in layers)
    plans = dict.fromkeys(filter(None, (plan_behind(layer.dtype_policy) for _, layer in layers)))
    found.unmatched = tuple(
        dict.fromkeys(pattern for plan in plans for pattern in plan.unmatched(path for path, _ in layers))
    )
    return found


def _row(path: str, layer: Any) -> LayerPolicy:
    plan = plan_behind(layer.dtype_policy)
    if plan is None:
        why = "its own"
    else:
        pattern, _ = plan.decision(path)
        why = f"module.{pattern}" if pattern else "plan"
    policy = str(layer.dtype_policy.name)
    return LayerPolicy(path, type(layer).__name__, policy, layer.compute_dtype, layer.variable_dtype, why)
