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
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, False)
_OVERRIDES = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
_O1_ALLOWS = {
    "cast_model_type": (torch.float32, False),
    "keep_batchnorm_fp32": (),
    "master_weights": (),
}


def resolved(opt_level: str, given: dict[str, Any]) -> Options:
    """The options of a level, each replaced by what is given instead of it, if that is not None."""
    if opt_level not in LEVELS:
        raise unknown_name("opt_level", str(opt_level), LEVELS, where="amp.initialize (with the letter O): ")
    given = {name: given[name] for name in _OVERRIDES if given[name] is not None}
    if isinstance(norm := given.get("keep_batchnorm_fp32"), str):
        given["keep_batchnorm_fp32"] = {"True": True, "False": False}.get(norm, norm)
    for name, value in given.items():
        if opt_level == "O1" and value not in _O1_ALLOWS.get(name, (value,)):
            raise _refused(f"{name} is {value!r} with O1, which keeps all weights in FP32", "opt_level='O2'")
        if name == "patch_torch_functions" and value and opt_level != "O1":
            raise _refused(f"{name} is {value!r} with {opt_level}", "opt_level='O1'")
        if name == "cast_model_type" and value not in _DTYPES:
            raise _refused(f"{name} is {value!r}", f"one of {', '.join(map(str, _DTYPES))}")
        if name == "keep_batchnorm_fp32" and not isinstance(value, bool):
            raise _refused(f"{name} is {value!r}", "True or False")
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
