"""Does a plan hold for a model: does every pattern name a layer, and does any layer compute in 16 bits at all?"""

from __future__ import annotations

import difflib
import warnings
from typing import Any

from mezzo.core.errors import UnknownNameError
from mezzo.keras.dtypes import SIXTEEN_BITS
from mezzo.keras.policy.layers import paths_under, walk
from mezzo.keras.policy.plan import KerasPlan, names
from mezzo.keras.policy.planned_name import plan_behind


class PolicyWarning(UserWarning):
    """A model, or a layer that a policy names, does not follow the policy in force; the message says why."""


def check_plan(model: Any, plan: KerasPlan) -> None:
    """Say where a plan does not hold for a model whose layers are all known.

    Args:
        model: a `keras.Model`.
        plan: the plan in force.

    Raises:
        UnknownNameError: a pattern names no layer of this model, nor of another one made under the same plan; the
            message has the nearest layer's path.

    Warns:
        PolicyWarning: no layer computes in 16 bits; or a layer that a pattern names has a policy of its own.
    """
    layers = list(walk(model))
    following = [path for path, layer in layers if plan_behind(layer.dtype_policy) is plan]
    sixteen = [layer for _, layer in layers if layer.compute_dtype in SIXTEEN_BITS]
    if not following and not sixteen and layers:
        warnings.warn(
            f"no layer of the model {model.name!r} computes in 16 bits under set_policy({plan.precision!r}): its "
            "layers were made before set_policy, or have a dtype of their own. Make the model after set_policy, in the "
            "same thread; keras.utils.clear_session() forgets the policy.",
            PolicyWarning,
            stacklevel=3,
        )
        return
    if not following:
        return  # its layers came with policies of their own, from a file for one: the patterns are not about them
    for path, layer in layers:
        pattern, name = plan.decision(path)
        if pattern and plan_behind(layer.dtype_policy) is None and layer.dtype_policy.name != name:
            warnings.warn(
                f"set_policy({plan.precision!r}): module.{pattern} names the layer {path!r}, which has the policy "
                f"{layer.dtype_policy.name} of its own and keeps it: it was given a dtype, or made before set_policy. "
                "Make it after set_policy and without a dtype, or leave the pattern out.",
                PolicyWarning,
                stacklevel=3,
            )
    check_patterns(model, plan)


def check_patterns(model: Any, plan: KerasPlan) -> None:
    """Nothing, if every pattern of a plan names a layer of this model, or of another one made under the plan.

    Raises:
        UnknownNameError: one names none; the message has the nearest layer's path.
    """
    known = [path for path, _ in walk(model)]
    for pattern in plan.unmatched([*known, *paths_under(plan)]):
        raise UnknownNameError(
            f"set_policy({plan.precision!r}): module.{pattern} names no layer of the model {model.name!r}. "
            f"Its layers are {_some(known)}. Did you mean {_nearest(pattern, known)!r}? A pattern for another model "
            "needs that model made, and called once, before this one is compiled."
        )


def _some(paths: list[str], most: int = 8) -> str:
    more = (
        f" and {len(paths) - most} more (mezzo.keras.layer_policies prints them)" if len(paths) > most else ""
    )
    return ", ".join(paths[:most]) + more


def _nearest(pattern: str, paths: list[str]) -> str:
    """The end of a layer's path that is most like the pattern, and names it."""
    plain = pattern.replace(".", "/").replace("*", "").strip("/")
    ends = {end: None for path in paths for end in _ends(path)}
    likeness = difflib.SequenceMatcher(b=plain)

    def score(end: str) -> float:
        likeness.set_seq1(end)
        return likeness.ratio()

    best = max(ends, key=score)
    assert any(names(best, path) for path in paths)
    return best


def _ends(path: str) -> list[str]:
    components = path.split("/")
    return ["/".join(components[index:]) for index in range(len(components))]
