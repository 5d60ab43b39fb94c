"""What `amp` keeps between calls: options, loss scalers, and the handle of O1. Scripts read it as `amp._amp_state`.

`resolved` checks what `amp.initialize` is given instead of the defaults of O0 to O3.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import DynamicLossScale, Observation, StaticLossScale, checked_scale

if TYPE_CHECKING:
    from mezzo.apex.casts import Handle


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


class LossScaler:
    """The scale of one loss, in Apex's names, which scripts read and write; `mezzo.core.loss_scale` moves it."""

    def __init__(self, loss_scale: float | str, lowest: float | None, highest: float) -> None:
        self.dynamic = isinstance(loss_scale, str)
        self.found_inf = False  # since the last update
        self._unskipped = 0
        self._pure: Any = None if isinstance(loss_scale, str) else StaticLossScale(loss_scale)
        if self.dynamic:
            ceiling = checked_scale("amp.initialize: max_loss_scale", highest)
            first = min(ceiling, DynamicLossScale.init)
            floor = min(DynamicLossScale.floor, first) if lowest is None else lowest
            if not 0 < floor <= first:
                raise _refused(f"min_loss_scale is {lowest!r}", f"one from 2**-126 to {first:g}")
            self._pure = DynamicLossScale(init=first, floor=floor, ceiling=ceiling)
        self._loss_scale: float = self._pure.scale

    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self._loss_scale

    def update(self) -> None:
        """The scale after a backward pass: doubled after 2,000 good ones in a row, halved after an overflow."""
        found_inf, self.found_inf = self.found_inf, False
        if self.dynamic:
            scale = self._pure.allowed(self._loss_scale)
            now = replace(self._pure, scale=scale, good_steps=self._unskipped).next(Observation(found_inf))
            self._pure, self._loss_scale, self._unskipped = now, now.scale, now.good_steps
        else:
            self._pure = replace(self._pure, scale=self._loss_scale).next(Observation(found_inf))
            self._unskipped = 0 if found_inf else self._unskipped + 1


@dataclass
class AmpState:
    """The state of `amp` in this process."""

    opt_properties: Options | None = None  # None before `initialize`
    loss_scalers: list[LossScaler] = field(default_factory=list)
    handle: Handle | None = None
    verbosity: int = 1
    allow_incoming_model_not_fp32: bool = False

    def tell(self, message: str) -> None:
        """Print a message on the first rank, unless verbosity is 0."""
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.verbosity > 0 and not (together and torch.distributed.get_rank()):
            print(f"amp: {message}")


state = AmpState()
