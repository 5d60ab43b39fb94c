"""The options of `amp.initialize`: the defaults of O0 to O3, and checks of what is given instead of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import checked_scale

_CAST_TO = (False, torch.float32, torch.float16, torch.bfloat16)
_BOOLEANS = {"True": True, "False": False}


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

    def __str__(self) -> str:
        parts = ["fp16 autocast"] if self.patch_torch_functions else []
        parts += [f"weights in {self.cast_model_type}"] if self.cast_model_type else []
        parts += ["BatchNorm in FP32"] if self.keep_batchnorm_fp32 else []
        parts += ["FP32 masters"] if self.master_weights else []
        return ", ".join([*parts, f"loss scale {self.loss_scale}"])


LEVELS = {
    "O0": Options(True, "O0", torch.float32, master_weights=False),
    "O1": Options(True, "O1", patch_torch_functions=True, loss_scale="dynamic"),
    "O2": Options(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Options(True, "O3", torch.float16, False, False, False),
}


def resolved(opt_level: str, **given: Any) -> Options:
    """The options of a level, each replaced by what is given instead of it, if that is not None."""
    if opt_level not in LEVELS:
        raise unknown_name("opt_level", str(opt_level), LEVELS, where="amp.initialize (with the letter O): ")
    given = {name: value for name, value in given.items() if value is not None}
    if opt_level == "O1":
        for name, allowed in (
            ("cast_model_type", _CAST_TO[:2]),
            ("keep_batchnorm_fp32", ()),
            ("master_weights", ()),
        ):
            if name in given and given[name] not in allowed:
                raise _refused(
                    f"{name} is {given[name]} with O1, which keeps all weights in FP32", "opt_level='O2'"
                )
    elif given.get("patch_torch_functions"):
        raise _refused(f"patch_torch_functions is True with {opt_level}", "opt_level='O1'")
    if given.get("cast_model_type", False) not in _CAST_TO:
        raise _refused(
            f"cast_model_type is {given['cast_model_type']!r}", f"one of {', '.join(map(str, _CAST_TO))}"
        )
    norm = given.get("keep_batchnorm_fp32", False)
    if norm not in (True, False, *_BOOLEANS):
        raise _refused(f"keep_batchnorm_fp32 is {norm!r}", "True or False")
    if norm in _BOOLEANS:
        given["keep_batchnorm_fp32"] = _BOOLEANS[norm]
    if given.get("loss_scale", "dynamic") != "dynamic":
        given["loss_scale"] = _number(given["loss_scale"])
    return replace(LEVELS[opt_level], **given)


def _number(value: Any) -> float:
    try:
        return checked_scale("amp.initialize: loss_scale", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise _refused(f"loss_scale is {value!r}", "'dynamic' or a number such as 128.0") from None


def _refused(what: str, use: str) -> UsageError:
    return UsageError(f"amp.initialize: {what}. Use {use}.")
