"""What `MixedPrecision` saves, and how it goes on from it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, StaticLossScale, from_state_dict
from mezzo.core.scale_numbers import power_text
from mezzo.core.trial import TrialDecision
from mezzo.pytorch.scaling import gradients
from mezzo.pytorch.scaling import state as scaler_state
from mezzo.pytorch.scaling.device_scale import DeviceLossScale

if TYPE_CHECKING:
    from mezzo.pytorch.training.mixed_precision import MixedPrecision

SCHEMA = 1

# kind of loss scale -> what a collapse has spoiled of its state; a scale of 0 stands for `init`.
_ANEW: dict[str, dict[str, float]] = {
    "dynamic": {"scale": 0.0, "good_steps": 0, "overflows": 0, "stuck": 0},
    "static": {"skips": 0},
}


def save(mp: MixedPrecision) -> dict[str, Any]:
    """The state as plain values and tensors."""
    window, force = mp._window, mp._in_force
    decision, machine = force.decision, force.machine
    saved_window = None
    if window.seen:
        saved_window = {
            "seen": window.seen,
            "scale": None if window.scale is None else float(window.scale),
            "loss": None if window.loss is None else float(window.loss),
            "gradients": [_copy(mp._gradients.of(p)) for p in gradients.parameters(mp.optimizer)],
            "statistics": mp._statistics.state(),
        }
    return {
        "schema": SCHEMA,
        "policy": str(mp.policy),
        "weights": mp._stored_as,
        "decision": None if decision is None else [decision.precision, decision.speedup, decision.reason],
        "loss_scale": None if machine is None else machine.on_host().state_dict(),
        "accumulate": mp.accumulate,
        "window": saved_window,
        "losses": mp._journal.losses,
        "updates": mp._journal.updates,
    }


def load(mp: MixedPrecision, state: dict[str, Any]) -> None:
    """Go on from a state; see `MixedPrecision.load_state_dict`."""
    if not state:
        return
    if scaler_state.looks_like(state):
        _load_scaler(mp, state)
        return
    if "schema" not in state or "loss_scale" not in state:
        raise UsageError(
            f"this is no state of MixedPrecision or of a GradScaler: it has {', '.join(map(str, state))}"
        )
    if state["schema"] > SCHEMA:
        raise UsageError(
            f"this state has schema {state['schema']}, and this release of Mezzo reads up to {SCHEMA}: use "
            "a newer one"
        )
    window = state["window"]
    saved_as = state.get("weights", "fp32")
    # An FP32 run may go on in 16 bits, between two windows: its weights can be rounded, not the reverse.
    if saved_as != mp._stored_as and (saved_as != "fp32" or window is not None):
        raise UsageError(
            f"the state was saved with weights {saved_as}; here they are {mp._stored_as}. Make this "
            "MixedPrecision with the weights= it was saved with, or go on from mezzo.master_state_dict in FP32."
        )
    params = list(gradients.parameters(mp.optimizer))
    if window is not None and (
        state["accumulate"] != mp.accumulate or len(window["gradients"]) != len(params)
    ):
        raise UsageError(
            f"the state was saved {window['seen']} losses into a window of {state['accumulate']} over "
            f"{len(window['gradients'])} parameters; here a window has {mp.accumulate}, over {len(params)}. "
            "Load it with the same accumulate, or save after flush()."
        )
    if mp._in_force.asked.compute == "auto" and state["decision"] is not None:
        mp._in_force.settle(TrialDecision(*state["decision"]))
    machine = mp._in_force.machine
    if machine is not None and state["loss_scale"] is not None:
        saved = from_state_dict(anew_if_collapsed(state["loss_scale"]))
        if type(saved) is type(machine.pure):
            mp._in_force.set_scale(saved)
    mp._journal.losses, mp._journal.updates = state["losses"], state["updates"]
    mp._window.seen, mp._window.scale, mp._window.loss = 0, None, None
    mp._statistics.forget()
    mp._gradients.clear()
    if window is not None:
        mp._window.seen = window["seen"]
        if window.get("loss") is not None:  # a state of version 0.1.0 has none
            mp._window.loss = torch.tensor(window["loss"])
        if window["scale"] is not None:
            mp._window.scale = torch.full(
                (), window["scale"], dtype=torch.float32, device=mp._in_force.device
            )
        for param, grad in zip(params, window["gradients"]):
            mp._gradients.put(param, None if grad is None else grad.to(param.device, copy=True))
        mp._statistics.load(window["statistics"])


def anew_if_collapsed(scale: dict[str, Any]) -> dict[str, Any]:
    """The state of a loss scale; one that had collapsed begins anew.

    At its floor it says what bad steps did to it, and nothing of the gradients to come: growing from there to where it
    began takes thirty times `growth_interval` good steps, in which fp16 would flush small gradients to zero. Its
    skips in a row are forgotten, too, or the first bad step after resuming would end the run again.
    """
    skips = scale.get("stuck", scale.get("skips", 0))
    if "patience" not in scale or skips < scale["patience"]:
        return scale
    return _anew(scale)


def _anew(scale: dict[str, Any]) -> dict[str, Any]:
    return {**scale, **_ANEW.get(str(scale.get("kind")), {})}


def begun_anew(machine: DeviceLossScale) -> LossScale:
    """A loss scale with its settings, as if no step had been skipped."""
    return from_state_dict(_anew(machine.on_host().state_dict()))


def how_to_go_on(machine: DeviceLossScale) -> str:
    """What to call after a collapse that was mended, and what would be without."""
    again = begun_anew(machine)
    if isinstance(again, StaticLossScale):
        return "mp.reset_loss_scale() forgets the skips: without it the next one raises this again"
    slow = ""
    if isinstance(again, DynamicLossScale):
        grows = (
            "doubling" if again.growth_factor == 2.0 else f"growing by a factor of {again.growth_factor:g}"
        )
        slow = f", {grows} after every {again.growth_interval} good steps"
    return (
        f"mp.reset_loss_scale() lets the scale begin anew, at {power_text(again.scale)}: without it training goes on "
        f"from {power_text(float(machine.scale))}{slow}"
    )


def _load_scaler(mp: MixedPrecision, state: dict[str, Any]) -> None:
    machine = mp._in_force.machine
    if machine is None or not isinstance(machine.pure, DynamicLossScale):
        warnings.warn(
            f"precision {mp.policy} has no dynamic loss scale, so the GradScaler's state is not used",
            stacklevel=4,
        )
        return
    mp._in_force.set_scale(scaler_state.from_state(state, machine.pure))


def _copy(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
