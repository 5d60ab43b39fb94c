"""What `amp` keeps between calls: options, loss scalers, and the handle of O1. Scripts read it as `amp._amp_state`.

`resolved` checks what `amp.initialize` is given instead of the defaults of O0 to O3.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import DynamicLossScale, Observation, checked_scale

if TYPE_CHECKING:
    from mezzo.apex.casts import Handle

_OPTIONS = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
LEVELS: dict[str, tuple[Any, ...]] = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}
# Option -> the values that O1 allows (which leaves all weights in FP32), and those that the other levels allow.
_ALLOWED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "cast_model_type": ((torch.float32, False), (torch.float32, torch.float16, torch.bfloat16, False)),
    "patch_torch_functions": ((True, False), (False,)),
    "keep_batchnorm_fp32": ((), (True, False)),
    "master_weights": ((), (True, False)),
}


def resolved(opt_level: str, given: dict[str, Any]) -> SimpleNamespace:
    """`opt_level` and the options of a level, each replaced by what is given instead of it, if that is not None."""
    if opt_level not in LEVELS:
        raise unknown_name("opt_level", str(opt_level), LEVELS, where="amp.initialize (with the letter O): ")
    given = {name: given[name] for name in _OPTIONS if given[name] is not None}
    if given.get("keep_batchnorm_fp32") in ("True", "False"):
        given["keep_batchnorm_fp32"] = given["keep_batchnorm_fp32"] == "True"
    for name, values in _ALLOWED.items():
        if name in given and given[name] not in values[opt_level != "O1"]:
            in_o1, elsewhere = (" or ".join(map(str, (*some, None))) for some in values)
            fix = f"Use {in_o1} with O1, and {elsewhere} with O0, O2 and O3."
            raise UsageError(f"amp.initialize: {name} is {given[name]!r} with {opt_level}. {fix}")
    if given.get("loss_scale", "dynamic") != "dynamic":
        try:
            given["loss_scale"] = checked_scale("loss_scale", float(given["loss_scale"]))
        except ValueError:
            what = f"amp.initialize: loss_scale is {given['loss_scale']!r}"
            raise UsageError(f"{what}. Use 'dynamic' or a number such as 128.0.") from None
    options = dict(zip(_OPTIONS, LEVELS[opt_level])) | given
    return SimpleNamespace(enabled=True, opt_level=opt_level, **options)


class LossScaler:
    """The scale of one loss, in Apex's names, which scripts read and write; `mezzo.core.loss_scale` moves it."""

    def __init__(self, loss_scale: float | str, lowest: float | None, highest: float) -> None:
        self.dynamic = isinstance(loss_scale, str)
        self.found_inf = False  # since the last update
        self._unskipped = 0
        if isinstance(loss_scale, str):
            ceiling = checked_scale("amp.initialize: max_loss_scale", highest)
            loss_scale = min(ceiling, DynamicLossScale.init)
            floor = min(DynamicLossScale.floor, loss_scale) if lowest is None else lowest
        else:
            floor = ceiling = loss_scale
        self._pure = DynamicLossScale(loss_scale, floor=floor, ceiling=ceiling)
        self._loss_scale = loss_scale

    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self._loss_scale

    def update(self) -> None:
        """The scale after a backward pass: doubled after 2,000 good ones in a row, halved after an overflow."""
        scale, pure = self._loss_scale, self._pure  # a constant scale is one whose bounds are equal
        pure = pure if self.dynamic else replace(pure, init=scale, floor=scale, ceiling=scale, scale=scale)
        pure = replace(pure, scale=pure.allowed(scale), good_steps=self._unskipped)
        observation, self.found_inf = Observation(self.found_inf), False
        self._pure = pure = pure.next(observation)
        self._loss_scale, self._unskipped = pure.scale, pure.good_steps


class AmpState:
    """The state of `amp` in this process."""

    def __init__(self) -> None:
        self.opt_properties: Any = SimpleNamespace(enabled=None)  # what `initialize` does
        self.loss_scalers: list[LossScaler] = []
        self.handle: Handle | None = None
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False

    def tell(self, message: str) -> None:
        """Print a message on the first rank, unless verbosity is 0."""
        if self.verbosity > 0 and os.environ.get("RANK", "0") == "0":
            print(f"amp: {message}")


state = AmpState()
