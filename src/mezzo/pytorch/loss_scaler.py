"""LossScaler: the loss scale of a training, kept on its device.

On an accelerator the state is 0-dim tensors, since reading a number waits for all queued work. On a CPU it is Python's
numbers, ten times as fast, and only the scale is a tensor.
"""

from __future__ import annotations

import math
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezzo.core import loss_scale as transition
from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, ScaleArrays, StaticLossScale
from mezzo.pytorch import distributed


class LossScaler:
    """A loss scale in use: `scale` (0-dim FP32) multiplies losses, `update` replaces it; `pure` has its settings."""

    def __init__(self, pure: DynamicLossScale | StaticLossScale, device: torch.device) -> None:
        self.pure = pure
        self._device = device
        self._unchecked = 0
        self.load(pure)

    @classmethod
    def of(cls, pure: LossScale, device: torch.device) -> LossScaler | None:
        """The scaler of a loss scale; None for `NoLossScale`."""
        return None if isinstance(pure, NoLossScale) else cls(pure, device)

    def load(self, pure: DynamicLossScale | StaticLossScale) -> None:
        """Go on from this state."""
        self.pure, self._state = pure, pure.arrays()
        self.scale = torch.full((), pure.scale, dtype=torch.float32, device=self._device)
        if not reading_is_free(self.scale):
            made = {
                name: torch.full(
                    (), n, dtype=torch.float32 if isinstance(n, float) else torch.int32, device=self._device
                )
                for name, n in vars(self._state).items()
            }
            self.scale, self._state = made["scale"], replace(self._state, **made)

    def update(self, found_inf: Tensor) -> None:
        """Move to the state after one step, without waiting; `found_inf` is 0-dim FP32, above 0 after an overflow."""
        self.scale, self._state = moved(self.pure, self.scale, self._state, found_inf)

    def check(self, skipped: Tensor | bool = True) -> None:
        """Raise LossScaleCollapseError if `patience` steps in a row were skipped where the scale can't fall."""
        self._unchecked += 1
        if skipped is True or self._unchecked >= self.pure.patience:
            self._unchecked = 0
            transition.check(self.pure, self._state)

    def on_host(self) -> LossScale:
        """The present state; waits for the device."""
        return transition.on_host(self.pure, self._state)

    def reset(self) -> None:
        """Restart with the same settings, as if no step had been skipped."""
        self.load(self.pure.begun_anew())

    @property
    def how_to_go_on(self) -> str:
        """The call that continues after a collapse, and what happens without it."""
        again = self.pure.begun_anew()
        if isinstance(again, StaticLossScale):
            return "mp.reset_loss_scale(). It resets the count of skipped steps; without it the next skip raises again"
        return (
            f"mp.reset_loss_scale(). It restarts the loss scale at {transition.power_text(again.scale)}; without it "
            f"training continues at {transition.power_text(float(self.scale))}"
        )


# DistributedDataParallel -> who trains through it; each has a `scaler`, or None there. Equally many on every rank.
_TRAINED: WeakKeyDictionary[Any, list[weakref.ref[Any]]] = WeakKeyDictionary()


def follow_joins(model: nn.Module, owner: Any) -> None:
    """Let `owner.scaler` end a `join()` with the state of the ranks that had the most data, on every rank.

    DDP sums gradients that each rank has scaled, so all ranks must have one scale; a rank without data does not step.
    """
    for part in distributed.wrappers(model):
        _TRAINED.setdefault(part, []).append(weakref.ref(owner))
        part.join_hook = partial(_join_hook, part)


def _join_hook(wrapper: Any, **kwargs: Any) -> Any:
    hook = type(wrapper).join_hook(wrapper, **kwargs)
    end = hook.post_hook

    def post_hook(is_last_joiner: bool) -> None:
        end(is_last_joiner)
        wrapper._ended_join = wrapper._join_config
        scalers = [getattr(owner(), "scaler", None) for owner in _TRAINED.get(wrapper, ())]
        if not scalers:  # a copy of the model
            return
        states = [vars(one._state).values() if one and is_last_joiner else None for one in scalers]
        rows = [[0.0] * 5 if state is None else [1.0, *map(float, state)] for state in states]
        known = torch.tensor(rows, dtype=torch.float64, device=wrapper.join_device)
        torch.distributed.all_reduce(known, group=wrapper.join_process_group)
        for scaler, (count, *sums) in zip(scalers, known.tolist()):
            if scaler is not None and count:
                state = ScaleArrays(*(total / count for total in sums))  # equal where it is known
                scaler.load(transition.on_host(scaler.pure, state))

    hook.post_hook = post_hook
    return hook


def moved(
    pure: LossScale, scale: Tensor, state: ScaleArrays, found_inf: Tensor
) -> tuple[Tensor, ScaleArrays]:
    """The scale and the state after one step; the given tensors are not written to."""
    if isinstance(state.scale, Tensor):
        state = pure.advance(state, found_inf != 0, torch)
        return state.scale, state
    after = pure.advance(state, bool(found_inf), transition.Numbers)
    if after.scale == state.scale and type(after) is ScaleArrays:
        return scale, after
    after = transition.rounded(after)
    return torch.full((), after.scale, dtype=torch.float32), after


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in FP32, by way of FP64 (which MPS lacks): an FP32 division may be approximate."""
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def reading_is_free(tensor: Tensor) -> bool:
    """Whether the host reads a number without waiting for a queue; then it decides, and a skip touches nothing."""
    return tensor.device.type == "cpu"


# torch's name -> the pure machine's field.
_SAME = ("scale", "growth_factor", "backoff_factor", "growth_interval")
_SHARED = {**{name: name for name in _SAME}, "_growth_tracker": "good_steps"}
_OWN = ("floor", "ceiling", "hysteresis", "patience", "overflows", "stuck")


def to_scaler_state(pure: LossScale) -> dict[str, Any]:
    """The state as plain numbers. torch's GradScaler loads it too, and ignores the other names."""
    return {name: getattr(pure, attr) for name, attr in (*_SHARED.items(), *zip(_OWN, _OWN))}


def is_scaler_state(state: dict[str, Any]) -> bool:
    """Whether a state is one of torch's GradScaler or of ours: it has torch's five names."""
    return _SHARED.keys() <= state.keys()


def from_scaler_state(state: dict[str, Any], current: DynamicLossScale) -> DynamicLossScale:
    """The loss scale in a state of ours or of torch's; what the state does not have stays as in `current`."""
    if not is_scaler_state(state):
        found = ", ".join(map(str, state)) or "nothing"
        raise UsageError(
            f"not the state of a GradScaler: it has {found}, and must have {', '.join(_SHARED)}. Pass what "
            "scaler.state_dict() returned."
        )
    fixed = {key: state[key] for key in _OWN if key in state}
    floor, ceiling = float(fixed.get("floor", current.floor)), float(fixed.get("ceiling", current.ceiling))
    saved = float(state["scale"])
    scale = floor if math.isnan(saved) else min(max(saved, floor), ceiling)
    if scale != saved:
        warnings.warn(
            f"the saved loss scale {saved:g} lies outside its bounds {floor:g} and {ceiling:g}, so {scale:g} is used. "
            "If the saved scale was 0 or infinite, that run skipped every step at its end.",
            stacklevel=3,
        )
    given: dict[str, Any] = {name: float(state[name]) for name in ("growth_factor", "backoff_factor")}
    given |= {"growth_interval": int(state["growth_interval"]), "good_steps": int(state["_growth_tracker"])}
    loaded = replace(current, init=scale, scale=scale, **given, **{"overflows": 0, "stuck": 0, **fixed})
    if not loaded.has_collapsed:
        return loaded
    return replace(loaded, init=min(max(current.init, floor), ceiling), scale=0.0).begun_anew()
