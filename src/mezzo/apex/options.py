"""The options of `amp.initialize`: the defaults of O0 to O3, and checks of what is given instead of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import checked_scale


@dataclass(frozen=True)
class Options:
    """What `amp.initialize` does; without arguments, nothing."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: Any = None  # dtype of weights and inputs; None or False leaves them
    patch_torch_functions: bool = False  # autocast, until the script ends
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0


LEVELS = {
    "O0": Options(True, "O0", torch.float32, master_weights=False),
    "O1": Options(True, "O1", patch_torch_functions=True, loss_scale="dynamic"),
    "O2": Options(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Options(True, "O3", torch.float16, False, False, False),
}
_FLAGS, _DTYPES = (True, False), (torch.float32, torch.float16, torch.bfloat16, False)

# Option -> the values that O1 allows (which leaves all weights in FP32), and those that the other levels allow.
_ALLOWED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "cast_model_type": ((torch.float32, False), _DTYPES),
    "patch_torch_functions": (_FLAGS, (False,)),
    "keep_batchnorm_fp32": ((), _FLAGS),
    "master_weights": ((), _FLAGS),
}


def resolved(opt_level: str, given: dict[str, Any]) -> Options:
    """The options of a level, each replaced by what is given instead of it, if that is not None."""
    if opt_level not in LEVELS:
        raise unknown_name("opt_level", str(opt_level), LEVELS, where="amp.initialize (with the letter O): ")
    given = {name: given[name] for name in (*_ALLOWED, "loss_scale") if given[name] is not None}
    if isinstance(norm := given.get("keep_batchnorm_fp32"), str):
        given["keep_batchnorm_fp32"] = {"True": True, "False": False}.get(norm, norm)
    for name, values in _ALLOWED.items():
        in_o1, elsewhere = values
        allowed, other = (in_o1, elsewhere) if opt_level == "O1" else (elsewhere, in_o1)
        if name in given and given[name] not in allowed:
            level = "opt_level='O2'" if opt_level == "O1" else "opt_level='O1'"
            use = level if given[name] in other else " or ".join(map(str, allowed))
            raise _refused(f"{name} is {given[name]!r} with {opt_level}", use)
    if given.get("loss_scale", "dynamic") != "dynamic":
        given["loss_scale"] = _number(given["loss_scale"])
    return replace(LEVELS[opt_level], **given)


def _number(value: Any) -> float:
    try:
        return checked_scale("loss_scale", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise _refused(f"loss_scale is {value!r}", "'dynamic' or a number such as 128.0") from None


def _refused(what: str, use: str) -> UsageError:
    return UsageError(f"amp.initialize: {what}. Use {use}.")
