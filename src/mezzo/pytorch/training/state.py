"""`MixedPrecision.state_dict` and `load_state_dict`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, from_state_dict
from mezzo.core.version import VERSION
from mezzo.pytorch.auto import TrialDecision
from mezzo.pytorch.distributed import holds_unreduced
from mezzo.pytorch.loss_scaler import from_scaler_state, is_scaler_state
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training.backward import Accumulation

if TYPE_CHECKING:
    from mezzo.pytorch.training.mixed_precision import MixedPrecision

SCHEMA = 2


def save(mp: MixedPrecision, *, fixed_keys: bool = False) -> dict[str, Any]:
    """The state as plain values and tensors; with `fixed_keys` also where no window is open."""
    window, resolved = mp._window, mp._resolved
    params, masters = mp._stored_as
    decision, scaler = resolved.decision, resolved.scaler
    saved_window = None
    if window.seen and holds_unreduced([mp.model]):
        raise UsageError(
            f"state_dict(): the gradients of {window.seen} losses are not reduced yet, because of "
            "set_requires_gradient_sync(False). Save after an update: result.updated is true."
        )
    if window.seen or fixed_keys:
        params_of = list(parameters(mp.optimizer))
        gradients = [mp._gradients.of(p) for p in params_of]
        given = [grad is not None for grad in gradients]
        for index, p in enumerate(params_of) if fixed_keys else ():
            if not given[index]:  # zeros, in the format of a window's sums
                gradients[index] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        saved_window = {
            "seen": window.seen,
            "scale": None if window.scale is None else float(window.scale),
            "loss": None if window.loss is None else float(window.loss),
            "gradients": [None if grad is None else grad.detach().clone() for grad in gradients],
            "given": given,
            "statistics": mp._buffers.state(every=fixed_keys),
        }
    return {
        "schema": SCHEMA,
        "policy": str(mp.policy),
        "params": params,
        "masters": masters,
        "decision": None if decision is None else [decision.precision, decision.speedup, decision.reason],
        "loss_scale": None if scaler is None else scaler.on_host().state_dict(),
        "accumulate": mp.accumulate,
        "window": saved_window,
        "losses": mp._journal.losses,
        "updates": mp._journal.updates,
        "skipped": mp._journal.skipped,
    }


def load(mp: MixedPrecision, state: dict[str, Any]) -> None:
    """Go on from a state; see `MixedPrecision.load_state_dict`."""
    if not isinstance(state, dict):
        raise UsageError(
            f"load_state_dict: the state has type {type(state).__name__}, not dict. Load the file first: "
            "mp.load_state_dict(torch.load('checkpoint.pt')['mp'])."
        )
    scaler = mp._resolved.scaler
    if not state and scaler is None:  # of a disabled GradScaler
        return
    if is_scaler_state(state):
        if scaler is not None and isinstance(scaler.pure, DynamicLossScale):
            scaler.load(from_scaler_state(state, scaler.pure))
        else:
            ignored = f"precision {mp.policy} has no dynamic loss scale, so the GradScaler's state is ignored"
            warnings.warn(ignored, stacklevel=3)
        return
    params = list(parameters(mp.optimizer))
    _check(mp, state, len(params))
    if mp._resolved.asked.compute == "auto" and state["decision"] is not None:
        mp._resolved.settle(TrialDecision(*state["decision"]))
    scaler = mp._resolved.scaler
    if scaler is not None and state["loss_scale"] is not None:
        saved: Any = from_state_dict(state["loss_scale"])
        if type(saved) is type(scaler.pure):
            scaler.load(saved.begun_anew() if saved.has_collapsed else saved)
    mp._journal.losses, mp._journal.updates = state["losses"], state["updates"]
    mp._resolved.counted(mp._journal.updates)
    mp._journal.skips = state.get("skipped", 0)  # version 0.1.0 has none
    mp._journal.flags.clear()
    mp._window = Accumulation(mp.accumulate)
    mp._buffers.forget()
    mp._gradients.clear()
    window = state["window"]
    if window is None or window["seen"] == 0:
        return
    mp._window.seen = window["seen"]
    if window.get("loss") is not None:  # a state of version 0.1.0 has none
        mp._window.loss = torch.tensor(window["loss"])
    if window["scale"] is not None:
        mp._window.scale = torch.full((), window["scale"], dtype=torch.float32, device=mp._resolved.device)
    mp._gradients.cover(mp.optimizer)
    given = window.get("given", [True] * len(params))  # an older state has None for the others
    for param, grad, is_given in zip(params, window["gradients"], given):
        grad = grad if is_given else None
        mp._gradients.put(param, None if grad is None else grad.to(param.device, copy=True))
    mp._buffers.load(window["statistics"])


def _check(mp: MixedPrecision, state: dict[str, Any], params: int) -> None:
    """Raise UsageError for a state that this training can't go on from."""
    if "schema" not in state or "loss_scale" not in state:
        found = f"its keys are {', '.join(map(str, state))}" if state else "it is empty"
        raise UsageError(f"load_state_dict: not the state of a MixedPrecision: {found}. Use mp.state_dict().")
    if state["schema"] > SCHEMA:
        raise UsageError(
            f"load_state_dict: the state has schema {state['schema']}; Mezzo {VERSION} reads {SCHEMA}. Update Mezzo."
        )
    if "params" in state:
        saved_as = state["params"], state["masters"]
    else:  # version 0.1.0
        stored, _, kind = state.get("weights", "fp32").partition(" with masters=")
        saved_as = stored, kind or "fp32"
    window = state["window"]
    window = None if window is None or window["seen"] == 0 else window
    # An FP32 run may go on in 16 bits, between two windows: its parameters can be rounded, not the reverse.
    if saved_as != mp._stored_as and (saved_as[0] != "fp32" or window is not None):
        saved, here = ("params={}, masters={}".format(*each) for each in (saved_as, mp._stored_as))
        raise UsageError(
            f"load_state_dict: the state was saved with {saved}, and this training has {here}. Create MixedPrecision "
            "with the params and masters of the state, or load the model from mezzo.master_state_dict."
        )
    if window is None:
        return
    if state["accumulate"] != mp.accumulate or len(window["gradients"]) != params:
        raise UsageError(
            f"load_state_dict: the state was saved after {window['seen']} of accumulate={state['accumulate']} losses, "
            f"with gradients of {len(window['gradients'])} parameters. This training has accumulate={mp.accumulate} "
            f"and {params} parameters. Use the same accumulate, or save after mp.flush()."
        )
