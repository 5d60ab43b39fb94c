"""Whose policy a remedy is: patterns name modules of one `MixedPrecision`'s model, and a call may be of another's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from mezzo.pytorch.monitor.kept_call import KeptCall
from mezzo.pytorch.monitor.module_paths import path_of

_NAMES_MODULES = re.compile(r"`[^`]*\bmodule\.[^`]*`")


def with_model(remedies: Sequence[str], call: KeptCall | None, model: nn.Module | None) -> list[str]:
    """The remedies; those whose policy names modules say of which model it is the policy, if that isn't `model`.

    Args:
        remedies: made of the policy in which the call was kept: that of its own model.
        call: the one in which it happened; None if in none.
        model: who is told of it has this one; None: one policy is for all models (`mezzo run`).
    """
    if call is None or model is None or path_of(call.inner, model) is not None:
        return list(remedies)
    name = type(call.inner).__name__
    words = f", as the policy of the MixedPrecision of that module's own model ({name})"
    return [f"{one}{words}" if _NAMES_MODULES.search(one) else one for one in remedies]
