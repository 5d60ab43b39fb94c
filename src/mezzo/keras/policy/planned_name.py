"""The name of a policy that no one chose for this layer: a string that remembers which plan it comes from.

A layer without a `dtype` takes the global policy, and hands its name on: to the layers that it makes inside itself, to
its copies (`Bidirectional`, `clone_model`), to its config. Keras compares and saves the name as the plain string that
it is. A layer with a `dtype` of its own has a plain string, and so has one that comes from a file.
"""

from __future__ import annotations

from typing import Any

from mezzo.keras.policy.plan import KerasPlan


class PlannedName(str):
    """``"mixed_float16"`` as a plan set it.

    Args:
        text: the policy's name.
        plan: whose it is.
    """

    __slots__ = ("plan",)
    plan: KerasPlan

    def __new__(cls, text: str, plan: KerasPlan) -> PlannedName:
        """The string, with its plan."""
        self = super().__new__(cls, text)
        self.plan = plan
        return self

    def __deepcopy__(self, memo: Any) -> PlannedName:
        return self  # wrappers copy a config before they make a layer from it

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # whoever unpickles it need not have Mezzo


def plan_behind(policy: Any) -> KerasPlan | None:
    """The plan that gave a layer this policy; None for a policy of the layer's own."""
    name = getattr(policy, "name", None)
    return name.plan if isinstance(name, PlannedName) else None
