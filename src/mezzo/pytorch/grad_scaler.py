"""GradScaler: a `torch.amp.GradScaler` with a bounded loss scale, closures, and `was_skipped`.

It is a subclass with torch's private attributes, which scripts and libraries use. The numbers are torch's while the
scale stays within its bounds; docs/torch-amp.md lists the differences.
"""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError, checks_keywords
from mezzo.core.loss_scale import LARGEST, DynamicLossScale, ScaleArrays, StaticLossScale, check, on_host
from mezzo.pytorch import distributed, loss_scaler
from mezzo.pytorch import step as engine
from mezzo.pytorch.kernels.not_traced import breaks_graph
from mezzo.pytorch.loss_scaler import from_scaler_state, moved, to_scaler_state
from mezzo.pytorch.same_options import compare_arguments, follow


def _setting(name: str) -> Any:
    """A setting of the loss scale, by torch's name of it."""

    def change(scaler: GradScaler, value: Any) -> None:
        scaler._pure = replace(scaler._pure, **{name: value})

    return property(lambda scaler: getattr(scaler._pure, name), change)


class GradScaler(torch.amp.GradScaler):
    """Scales losses, unscales gradients, skips steps whose gradients are not finite, and adapts the scale.

    A subclass of `torch.amp.GradScaler`, and used as that one.

    Example::

        scaler = mezzo.GradScaler()
        with mezzo.autocast("fp16"):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # only to look at the gradients, or to clip them
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)                  # skips if a gradient is NaN or infinite
        scaler.update()

    Args:
        device: a device type, or None. `"cuda"` without CUDA disables the scaler with a warning, as in torch. The scale
            is always on the device of the first loss.
        init_scale: first scale, in FP32; powers of two scale without rounding. Above 2**126 a warning is given, and
            2**126 is used.
        growth_factor: above 1; multiplies the scale after `growth_interval` steps in a row without overflow.
        backoff_factor: between 0 and 1; multiplies the scale on overflow.
        growth_interval: steps in a row without overflow after which the scale grows.
        enabled: if False, `scale` and `unscale_` do nothing, and `step` calls the optimizer.
        floor: smallest scale; by default 2**-14, or `init_scale` if that is smaller.
        ceiling: largest scale; by default 2**24, or `init_scale` if that is larger.
        hysteresis: overflows in a row after which the scale backs off; each of them skips its step.
        patience: skips in a row at the floor after which `update` raises LossScaleCollapseError.

    Raises:
        UsageError: a factor, an interval or a bound that is out of range, or an unknown keyword argument.
    """

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    @checks_keywords
    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        floor: float | None = None,
        ceiling: float | None = None,
        hysteresis: int = 1,
        patience: int = 50,
    ) -> None:
        device = device.type if isinstance(device, torch.device) else device
        if device is not None and not isinstance(device, str):
            raise UsageError(
                f"GradScaler: device is {device!r}, not a device type. Did you mean init_scale={device!r}?"
            )
        if device == "cuda" and enabled and not torch.cuda.is_available():
            warnings.warn(
                "GradScaler('cuda'): CUDA is not available; disabling it. To scale on any device use GradScaler().",
                stacklevel=3,
            )
            enabled = False
        if LARGEST < init_scale < math.inf:
            warnings.warn(
                f"GradScaler: init_scale is {init_scale:g}; the largest, 2**126, is used.", stacklevel=3
            )
            init_scale = LARGEST
        defaults = DynamicLossScale()
        pure = DynamicLossScale(
            init=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            floor=min(defaults.floor, init_scale) if floor is None else floor,
            ceiling=max(defaults.ceiling, init_scale) if ceiling is None else ceiling,
            hysteresis=hysteresis,
            patience=patience,
        )
        self._begin(device, enabled, pure)

    @classmethod
    def of(cls, pure: DynamicLossScale | StaticLossScale) -> GradScaler:
        """The scaler of a loss scale; that of a constant one has equal bounds."""
        if isinstance(pure, StaticLossScale):
            constant = pure.scale
            pure = DynamicLossScale(
                init=constant, floor=constant, ceiling=constant, patience=pure.patience, stuck=pure.skips
            )
        made = cls.__new__(cls)
        made._begin(None, True, pure)
        return made

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        steps = f"{self._get_growth_tracker()} of {self._growth_interval} good steps"
        return f"GradScaler(scale={self.get_scale():.10g}, {steps} until it grows)"

    def _begin(self, device: str | None, enabled: bool, pure: DynamicLossScale) -> None:
        self._pure = pure
        self._compared = False  # with the arguments of other ranks
        self._given = {
            name: value for name, value in vars(pure).items() if name not in ScaleArrays.__annotations__
        }
        super().__init__("cpu")  # enabled: a disabled one of torch's has no numbers
        self._device, self._enabled = device or "", enabled
        self._forget()
        self._hold(pure)

    def _forget(self) -> None:
        self._used_scale: Tensor | None = None  # what `scale` multiplied with last
        self._scale_calls = 0
        self._unchecked = 0
        # What each optimizer's last step was: the count of `scale` calls, and whether it was skipped.
        self._last: WeakKeyDictionary[Optimizer, tuple[int, Tensor | bool | None]] = WeakKeyDictionary()

    def _hold(self, pure: DynamicLossScale) -> None:
        """Go on from this state. `_overflows` and `_stuck` are tensors where the scale is on an accelerator."""
        self._pure = pure
        self._init_scale, self._init_growth_tracker = pure.scale, pure.good_steps
        self._overflows: Any = pure.overflows
        self._stuck: Any = pure.stuck
        if self._scale is not None:
            device = self._scale.device
            self._scale = self._growth_tracker = None
            self._lazy_init_scale_growth_tracker(device)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        follow()
        super()._lazy_init_scale_growth_tracker(dev)
        if self._scale is not None and not loss_scaler.reading_is_free(self._scale):
            self._overflows, self._stuck = (
                torch.full((), int(count), dtype=torch.int32, device=dev)
                for count in (self._overflows, self._stuck)
            )

    def _state(self) -> ScaleArrays:
        """The moving parts: numbers, or tensors of an accelerator."""
        scale, good_steps = self._scale, self._growth_tracker
        if scale is None or good_steps is None:
            return ScaleArrays(self._init_scale, self._init_growth_tracker, self._overflows, self._stuck)
        if loss_scaler.reading_is_free(scale):
            return ScaleArrays(scale.item(), int(good_steps.item()), self._overflows, self._stuck)
        return ScaleArrays(scale, good_steps, self._overflows, self._stuck)

    def _advance(self, found_inf: Tensor) -> None:
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        self._scale, after = moved(self._pure, scale, self._state(), found_inf)
        self._overflows, self._stuck = after.overflows, after.stuck
        good = after.good_steps
        self._growth_tracker = good if isinstance(good, Tensor) else torch.full_like(growth_tracker, good)

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or lists and tuples of losses (also nested), by the scale; differentiable.

        Each result has the dtype of `output * scale` with a 0-dim FP32 scale. Disabled: returns `outputs` itself.
        """
        if not self._enabled:
            return outputs
        self._scale_calls += 1
        scaled = super().scale(outputs)
        self._used_scale = self._scale
        return scaled

    @property
    def _states(self) -> dict[int, dict[str, Any]]:
        """Since `update`, by the id of an optimizer: the stage of its step, and what was found in its gradients."""
        return self._per_optimizer_states

    def _state_of(self, optimizer: Optimizer, call: str) -> dict[str, Any]:
        state = self._states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise CallOrderError(
                f"{call}() was called after step() and before update(). Call scaler.update() after each step."
            )
        return state

    def _check_scaled(self, optimizer: Optimizer, call: str) -> None:
        # A library may multiply by `_scale` itself: then `scale` is never called, which proves nothing.
        last, _ = self._last.get(optimizer, (0, None))
        if self._scale is None or 0 < last == self._scale_calls:
            raise CallOrderError(
                f"{call}(optimizer): scale() was not called since this optimizer's last step, so its gradients are not "
                "scaled and the update would be too small. Use scaler.scale(loss).backward()."
            )

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients in place by the scale that the loss was multiplied with. Does not wait.

        Raises:
            UsageError: no loss was scaled, the gradients are unscaled already, or are fp16.
        """
        if not self._enabled:
            return
        state = self._state_of(optimizer, "unscale_")
        if state["stage"] is OptState.UNSCALED:
            raise CallOrderError(
                "unscale_() has already been called on this optimizer since update(). Call it once per update()."
            )
        self._check_scaled(optimizer, "unscale_")
        scale = self._scale_in_use()
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, loss_scaler.inverse(scale), found_inf, False
        )
        state["stage"], state["optimizer"] = OptState.UNSCALED, optimizer

    def _scale_again(self) -> None:
        """Undo `unscale_` where no step has followed, since the next backward pass adds scaled gradients."""
        for state in self._states.values():
            if state["stage"] is OptState.UNSCALED and self._scale is not None:
                if state["found_inf_per_device"]:
                    # NaN keeps what was found, which clipping by value takes out of the gradients.
                    factor = self._scale.masked_fill(self._found(state) > 0, math.nan)
                    params = engine.parameters(state["optimizer"])
                    engine.unscale_(engine.gradients_of(params, allow_fp16=True), factor)
                state.clear()
                state |= {"stage": OptState.READY, "found_inf_per_device": {}}

    def _scale_in_use(self) -> Tensor:
        # What the losses were multiplied with; `update` may have changed the scale since.
        scale = self._scale if self._used_scale is None else self._used_scale
        assert scale is not None
        return scale

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = [p for p in engine.parameters(optimizer) if p.grad is not None]
        grads = engine.gradients_of(params, allow_fp16=allow_fp16)
        found = engine.unscale_(grads, inv_scale, found_inf)
        if not distributed.is_distributed():
            return found
        every, scale = list(engine.parameters(optimizer)), self._scale_in_use().to(found_inf)
        ranks = distributed.ranks_of(every)
        if not self._compared and optimizer not in self._last:  # at its first step
            together = ranks or distributed.ranks_of(every, distributed.averaging(every))
            self._compared = bool(together)
            compare_arguments("GradScaler", "step(optimizer)", self._given, together.holders)
            if not (ranks and loss_scaler.reading_is_free(found_inf)):
                together.agreed(None, began=torch.stack([found_inf, scale]))
        if not ranks:
            return found
        own = engine.combined([found_inf, *found.values()], found_inf.device)
        state, began = self._states[id(optimizer)], torch.stack([own, scale])
        agreed, state["norm"], _ = engine.clip_(params, grads, own, None, state.get("max_norm"), ranks, began)
        return found if agreed is None else {agreed.device: agreed}

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Unscale the optimizer's gradients if needed, clip their total 2-norm, and return the norm before, 0-dim.

        The norm is that of all shards of `DTensor` gradients. Ranks exchange it together with what unscaling found.
        """
        state = self._states[id(optimizer)]
        if self._enabled and state["stage"] is OptState.READY:
            state["max_norm"] = max_norm
            self.unscale_(optimizer)
            if state.get("norm") is not None:
                return torch.as_tensor(state["norm"])
        params = [p for p in engine.parameters(optimizer) if p.grad is not None]
        grads = engine.gradients_of(params, allow_fp16=True)
        norm = engine.clip_(params, grads, None, None, max_norm, distributed.ranks_of(params))[1]
        assert norm is not None
        return norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale unless that was done, then call `optimizer.step(*args, **kwargs)` if all gradients are finite.

        A closure (LBFGS) calls `scaler.scale(loss).backward()` and returns the unscaled loss. It runs again at a
        smaller scale until its gradients are finite. Where that can't help (the loss is not finite, or the scale is at
        its floor) the step is skipped, and parameters and optimizer state are restored from a copy.

        A fused optimizer decides on the device. Any other costs one wait, as in torch.amp.

        Returns:
            What `optimizer.step` returned; None if it was skipped.

        Raises:
            CallOrderError: `step` was called already since `update`, or nothing was scaled.
            UsageError: no parameter of the optimizer has a gradient.
        """
        if not self._enabled:
            self._last[optimizer] = (0, False)
            return optimizer.step(*args, **kwargs)
        state = self._state_of(optimizer, "step")
        closure = kwargs.pop("closure", None)
        if closure is None and args and callable(args[0]):
            closure, *args = args  # type: ignore[assignment]
        if closure is not None:
            result = self._step_with_closure(optimizer, state, closure, *args, **kwargs)
        else:
            result = self._step_once(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        if "skipped" not in state:
            state["skipped"] = self._found(state) if state["found_inf_per_device"] else None
        self._last[optimizer] = (self._scale_calls, state["skipped"])
        return result

    @breaks_graph  # Dynamo would lose what `unscale_` writes into the optimizer's state
    def _step_once(self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ready = state["stage"] is OptState.READY
        if ready:
            self._check_scaled(optimizer, "step")
        if all(param.grad is None for param in engine.parameters(optimizer)):
            raise UsageError(
                "step(optimizer): no parameter of it has a gradient. Call scaler.scale(loss).backward() first."
            )
        if not engine.can_skip_on_device(optimizer):
            if ready:
                self.unscale_(optimizer)
            else:
                self._look_again(optimizer, state)
            skipped = state["skipped"] = bool(self._found(state))
            return None if skipped else optimizer.step(*args, **kwargs)
        if _takes_scaler(type(optimizer)):  # type: ignore[arg-type]  # which torch deprecates, with a warning
            return super().step(optimizer, *args, **kwargs)
        if ready:
            self._check_inf_per_device(optimizer)
        else:
            self._look_again(optimizer, state)
        found_inf = state["skipped"] = self._found(state)
        grad_scale = self._scale_in_use() if ready else None
        return engine.step_on_device(optimizer, found_inf, *args, grad_scale=grad_scale, **kwargs)

    def _look_again(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """After `unscale_` a script may have reduced gradients, and so brought another rank's NaN here."""
        params = list(engine.parameters(optimizer))
        if distributed.is_distributed() and not distributed.ranks_of(params):
            grads = [grad for grad in engine.gradients_of(params, allow_fp16=True) if grad.numel()]
            for device, known in state["found_inf_per_device"].items():
                largest = torch._foreach_norm([grad for grad in grads if grad.device == device], math.inf)
                if largest:
                    bad = torch.stack(largest).isfinite().all().logical_not()
                    state["found_inf_per_device"][device] = known.maximum(bad.to(known))

    def _found(self, *states: dict[str, Any]) -> Tensor:
        """Whether anything was found, on the scale's device: 0.0 or 1.0."""
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        return engine.combined(flags, self._scale_in_use().device)

    def _step_with_closure(
        self, optimizer: Optimizer, state: dict[str, Any], closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if state["stage"] is OptState.UNSCALED:
            raise CallOrderError("step(optimizer, closure) unscales itself. Remove the call of unscale_().")

        # Of several ranks none may end before the others, whose losses may be finite: then the scale does not matter.
        before: Any = on_host(self._pure, self._state()) if distributed.is_distributed() else None

        def evaluate() -> tuple[Any, bool]:
            calls = self._scale_calls
            self._scale_again()
            loss = closure()
            if self._scale_calls == calls:
                raise CallOrderError(
                    "step(optimizer, closure): the closure did not call scale(). It must call "
                    "scaler.scale(loss).backward(), and return the unscaled loss."
                )
            if state["stage"] is OptState.READY:  # else the closure has clipped
                self.unscale_(optimizer)
            finite = not bool(self._found(state))
            if not finite:
                state["stage"] = OptState.READY
            self._evaluated(optimizer, finite)
            return loss, finite

        def back_off(loss: Any) -> bool:
            if self.get_scale() <= self._pure.floor or not (before or engine.is_finite(loss)):
                return False
            self._advance(self._found(state))
            return True

        result, skipped = engine.step_with_closure(
            optimizer, lambda runner: optimizer.step(runner, *args, **kwargs), evaluate, back_off
        )
        state["skipped"] = skipped
        if skipped and before:
            self._hold(before)
        return None if skipped else result

    def _evaluated(self, optimizer: Optimizer, finite: bool) -> None:
        """For subclasses: a closure has run, and its gradients are unscaled."""

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's last `step` was skipped. May wait for the device. CallOrderError before a step."""
        _, skipped = self._last.get(optimizer, (0, None))
        if skipped is None:
            raise CallOrderError(
                "was_skipped(optimizer): this optimizer has not stepped yet. Call scaler.step(optimizer) first."
            )
        return bool(skipped)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale from the checks since the last `update`, or set it. Call it once per iteration, at its end.

        Args:
            new_scale: a number within the bounds, or a tensor of one element without gradient, which is clamped to
                the bounds (NaN to the floor).

        Raises:
            LossScaleCollapseError: `patience` steps in a row were skipped at the floor. At once on a CPU and where the
                host saw the skip; elsewhere within `patience` more steps, so that not every step waits.
            CallOrderError: no gradients were checked since the last `update`.
            UsageError: an invalid `new_scale`.
        """
        if not self._enabled:
            return
        states = self._states.values()
        if new_scale is not None:
            self._set_scale(new_scale)
            self._states.clear()
            return
        if self._scale is None or not any(state["found_inf_per_device"] for state in states):
            raise CallOrderError(
                "update(): no gradients were checked since the last update(). Call "
                "scaler.scale(loss).backward() and scaler.step(optimizer) first."
            )
        saw_skip = any(state.get("skipped") is True for state in states)
        self._advance(self._found(*states))
        self._states.clear()
        self._unchecked += 1
        host_knows = saw_skip or loss_scaler.reading_is_free(self._scale)
        if host_knows or self._unchecked >= self._pure.patience:
            self._unchecked = 0
            try:
                check(self._pure, ScaleArrays(1.0, 0, 0, self._stuck))
            except LossScaleCollapseError as collapse:
                again = f"scaler.update({self._pure.init:.17g}). It sets the scale back to its first value"
                raise collapse.going_on(again) from collapse

    def _set_scale(self, new_scale: float | Tensor) -> None:
        pure = self._pure
        if not isinstance(new_scale, Tensor):
            # `or nan`: DynamicLossScale takes 0 for "not given".
            self._init_scale = replace(pure, scale=float(new_scale) or math.nan).scale
            if self._scale is not None:
                self._scale = torch.full_like(self._scale, self._init_scale)
            return
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise UsageError(
                f"update({new_scale!r}): new_scale must be a number, or a tensor of one element without gradient."
            )
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(new_scale.device)
        scale, _ = self._check_scale_growth_tracker("update")
        given = new_scale.reshape(()).to(scale, copy=True)
        self._scale = given.nan_to_num(pure.floor).clamp(pure.floor, pure.ceiling)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers: torch's five keys, and six that torch's scaler ignores. Waits for the device."""
        return to_scaler_state(on_host(self._pure, self._state()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`, also into a disabled scaler.

        The empty state of a disabled torch scaler changes nothing. A scale outside the bounds is clamped to them,
        with a warning. A state that lacks one of torch's five keys is a UsageError.
        """
        if state_dict:
            self._hold(from_scaler_state(state_dict, self._pure))

    def __getstate__(self) -> dict[str, Any]:
        counts = {"_overflows": int(self._overflows), "_stuck": int(self._stuck)}
        return super().__getstate__() | counts | {"_used_scale": None, "_last": None}  # as in `_forget`

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "pure" in state:  # a pickle of version 0.1.0
            self._begin(state["device"], state["enabled"], state["pure"])
        else:
            super().__setstate__(state)
            self._forget()


@lru_cache(maxsize=256)
def _takes_scaler(kind: Any) -> bool:
    """Whether an optimizer's `step` has the parameter `grad_scaler`, which torch deprecates."""
    return "grad_scaler" in inspect.signature(kind.step).parameters
