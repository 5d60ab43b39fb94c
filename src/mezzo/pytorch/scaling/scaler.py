"""GradScaler: the calls of `torch.amp.GradScaler`, over Mezzo's bounded loss-scale machine.

A script keeps its lines and changes the import. The numbers are torch's, event by event, as long as the scale
stays within its bounds. What differs, and why:

- The scale has a floor and a ceiling, so neither it nor its inverse can become 0 or infinite, and after
  `patience` skips in a row at the floor `update` raises, where torch's goes on for ever and then writes
  infinities.
- Gradients are divided by the scale that `scale()` multiplied with, whatever `update` did in between.
- A step whose loss was never scaled raises: its update would be too small by the scale, in silence.
- `was_skipped` says what `step` did. Closures work. A disabled scaler keeps its state and its getters.

No scaler can tell that gradients were clipped before they were unscaled: a clip is an edit of `.grad` like
any other. `clip_grad_norm_` here unscales first, and `mezzo.MixedPrecision` has no order to get wrong.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale
from mezzo.pytorch.scaling import gradients
from mezzo.pytorch.scaling.closure import AbandonedStepError, ClosureRunner
from mezzo.pytorch.scaling.device_scale import inverse, reading_is_free
from mezzo.pytorch.scaling.fused_step import can_skip_on_device, step_on_device
from mezzo.pytorch.scaling.scaler_numbers import ScalerNumbers


class Stage(Enum):
    """How far an optimizer has come since the last `update`."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass
class OptimizerState:
    """What a scaler remembers of one optimizer.

    Args:
        stage: how far it has come in this iteration.
        found_inf: device -> 0-dim FP32 flag, of this iteration; empty until the gradients have been checked.
        stepped_at: the scaler's count of `scale()` calls when this optimizer last stepped.
        skipped: whether its last step was skipped; a tensor where only the device knows so far.
        step_known: its `step`, as it was when it was last looked at.
        takes_scaler: whether that takes a `grad_scaler`.
    """

    stage: Stage = Stage.READY
    found_inf: dict[torch.device, Tensor] = field(default_factory=dict)
    stepped_at: int = 0
    skipped: Tensor | bool | None = None
    step_known: Any = None
    takes_scaler: bool = False


class GradScaler(ScalerNumbers):
    """Scales losses, unscales gradients, skips steps whose gradients are not finite, and adapts the scale.

    A step, as with torch.amp::

        with mezzo.autocast("fp16"):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # only to look at the gradients, or to clip them
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)                  # skips if a gradient is NaN or infinite
        scaler.update()

    Args:
        device: device type that `update(tensor)` must come from; None takes any. `"cuda"` on a machine
            without CUDA disables the scaler with a warning, as torch's does. The scale lives where the first
            loss is.
        init_scale: first scale. FP32; powers of two scale without rounding.
        growth_factor: above 1; multiplies the scale after `growth_interval` steps in a row without overflow.
        backoff_factor: between 0 and 1; multiplies the scale on overflow.
        growth_interval: in steps.
        enabled: False makes `scale` and `unscale_` pass through, and `step` call the optimizer.
        floor: least scale; by default 2**-14, or `init_scale` if that is smaller.
        ceiling: largest scale; by default 2**24, or `init_scale` if that is larger.
        hysteresis: overflows in a row from which the scale backs off; each of them skips its step.
        patience: skips in a row at the floor after which `update` raises LossScaleCollapseError.

    Raises:
        UsageError: a factor, an interval or a bound that makes no sense.
    """

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
        if device is not None and not isinstance(device, str):
            raise UsageError(
                f"GradScaler's first argument is a device type such as 'cuda', not {device!r}. "
                f"Name the others: GradScaler(init_scale={device!r})."
            )
        if device == "cuda" and enabled and not torch.cuda.is_available():
            warnings.warn(
                "GradScaler('cuda') is enabled, but CUDA is not available: disabling it. To scale on "
                "whatever "
                "device the loss is on, leave the device out.",
                stacklevel=2,
            )
            enabled = False
        self._device_type = device
        self._enabled = enabled
        self._machine = None
        defaults = DynamicLossScale()
        self._pure = DynamicLossScale(
            init=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            floor=min(defaults.floor, init_scale) if floor is None else floor,
            ceiling=max(defaults.ceiling, init_scale) if ceiling is None else ceiling,
            hysteresis=hysteresis,
            patience=patience,
        )
        self._forget()

    def _forget(self) -> None:
        self._used_scale: Tensor | None = None
        self._scale_calls = 0
        self._unchecked = 0
        self._optimizers: WeakKeyDictionary[Optimizer, OptimizerState] = WeakKeyDictionary()

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...

    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...

    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Tensor | Iterable[Tensor]:
        """Multiply a loss, or lists and tuples of them (nested too), by the scale; the result is
        differentiable.

        Each result has the dtype that PyTorch gives `output * scale` with a 0-dim FP32 scale. Disabled: they
        are returned as they are.

        Raises:
            UsageError: something that is neither a tensor nor an iterable of them.
        """
        if not self._enabled:
            return outputs
        self._scale_calls += 1
        scaled: Tensor | Iterable[Tensor] = self._scaled(outputs)
        return scaled

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            self._used_scale = self._started(outputs.device).scale
            return outputs * self._used_scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, dict)):
            each = map(self._scaled, outputs)
            if isinstance(outputs, (list, tuple)):
                return getattr(type(outputs), "_make", type(outputs))(each)
            return each
        raise UsageError(f"scale() takes a tensor, or an iterable of tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients in place by the scale that the loss was multiplied with. Does not
        wait.

        Raises:
            CallOrderError: nothing was scaled, or the gradients are unscaled already, or `step` has been
                called.
            UsageError: an fp16 gradient.
        """
        if not self._enabled:
            return
        state = self._state(optimizer)
        if state.stage is Stage.UNSCALED:
            raise CallOrderError(
                "unscale_() has already been called on this optimizer since the last update(). Call it once, "
                "after the last backward of the step."
            )
        if state.stage is Stage.STEPPED:
            raise CallOrderError("unscale_() is being called after step(). Call scaler.update() first.")
        self._unscale(optimizer, state, "unscale_")
        state.stage = Stage.UNSCALED

    def _unscale(self, optimizer: Optimizer, state: OptimizerState, call: str) -> None:
        scale = self._scale_in_use(state, call)
        grads = gradients.values(gradients.parameters(optimizer))
        state.found_inf = gradients.unscale_(grads, inverse(scale))

    def _scale_in_use(self, state: OptimizerState, call: str) -> Tensor:
        if self._used_scale is None or state.stepped_at == self._scale_calls:
            raise CallOrderError(
                f"{call}(optimizer): scale() has not been called since this optimizer's last step, so that "
                "its gradients are not scaled; dividing them would shrink the update by the scale. Use "
                "scaler.scale(loss).backward()."
            )
        return self._used_scale

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Unscale the optimizer's gradients if that is still to be done, then clip them to `max_norm`.

        Naive code::

            scaler.unscale_(optimizer)
            return torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm)

        Returns:
            The total 2-norm before clipping, 0-dim; NaN or infinite if a gradient is (`step` will then skip).
        """
        if self._enabled and self._state(optimizer).stage is Stage.READY:
            self.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(list(gradients.parameters(optimizer)), max_norm)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that is still to be done, then call `optimizer.step(*args, **kwargs)` if all is finite.

        With a closure (LBFGS), write it as without scaler, but for `scaler.scale(loss).backward()`, and
        return the loss as it is. It runs again at a smaller scale until its gradients are finite; where that
        can't help (the loss itself is not finite, or the scale is at its floor) the step is skipped, and
        parameters and optimizer state are put back. A copy of them is kept during the step.

        An optimizer that takes `found_inf` (fused Adam, AdamW, Adagrad, SGD) decides on the device. Any other
        costs one wait for the device, as in torch.amp.

        Returns:
            What `optimizer.step` returned, None if it was skipped. `was_skipped` says which it was.

        Raises:
            CallOrderError: `step` was called already since `update`, or nothing was scaled.
            UsageError: no parameter of the optimizer has a gradient.
        """
        state = self._state(optimizer)
        if not self._enabled:
            state.skipped = False
            return optimizer.step(*args, **kwargs)
        if state.stage is Stage.STEPPED:
            raise CallOrderError(
                "step() has already been called since the last update(). Call scaler.update() after each "
                "step."
            )
        closure = kwargs.get("closure", args[0] if args and callable(args[0]) else None)
        if closure is not None:
            result = self._step_with_closure(optimizer, state, closure, args, kwargs)
        elif _takes_scaler(optimizer, state):
            result = self._step_taking_scaler(optimizer, state, args, kwargs)
        elif can_skip_on_device(optimizer):
            used = None
            if state.stage is Stage.READY:
                used = self._scale_in_use(state, "step")
                self._check_inf_per_device(optimizer)
            state.skipped = self._found(state)
            result = step_on_device(optimizer, state.skipped, used, args, kwargs)
        else:
            if state.stage is Stage.READY:
                self._unscale(optimizer, state, "step")
            state.skipped = bool(self._found(state))
            result = None if state.skipped else optimizer.step(*args, **kwargs)
        state.stage = Stage.STEPPED
        state.stepped_at = self._scale_calls
        return result

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's last `step` left it where it was. May wait for the device.

        Raises:
            CallOrderError: it has not stepped yet.
        """
        skipped = self._state(optimizer).skipped
        if skipped is None:
            raise CallOrderError("was_skipped(optimizer): this optimizer has not stepped yet")
        return bool(skipped)

    def _step_taking_scaler(
        self, optimizer: Optimizer, state: OptimizerState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The contract that torch.amp gives up: `optimizer.step(grad_scaler=scaler)` calls back into us."""
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        if state.found_inf:
            state.skipped = self._found(state)
        return result

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        state: OptimizerState,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if state.stage is Stage.UNSCALED:
            raise CallOrderError(
                "step(optimizer, closure) unscales what its closure computes: do not call unscale_() "
                "before it"
            )

        def evaluate() -> tuple[Any, bool]:
            before = self._scale_calls
            loss = closure()
            if self._scale_calls == before:
                raise CallOrderError(
                    "step(optimizer, closure): the closure did not scale its loss. It must call "
                    "scaler.scale(loss).backward() and return the loss."
                )
            self._unscale(optimizer, state, "step")
            return loss, not bool(self._found(state))

        def back_off() -> bool:
            machine = self._machine
            assert machine is not None
            if float(machine.scale) <= machine.pure.floor:
                return False
            self._machine = machine.next(self._found(state))
            return True

        runner = ClosureRunner(optimizer, evaluate, back_off)
        if "closure" in kwargs:
            kwargs = {**kwargs, "closure": runner}
        else:
            args = (runner, *args[1:])
        state.skipped = False
        try:
            return optimizer.step(*args, **kwargs)
        except AbandonedStepError:
            runner.restore()
            state.skipped = True
            return None

    def _found(self, state: OptimizerState) -> Tensor:
        if not state.found_inf:
            raise UsageError(
                "no parameter of this optimizer has a gradient. Before step(), call "
                "scaler.scale(loss).backward() on a loss that depends on them."
            )
        assert self._machine is not None
        return gradients.combined(state.found_inf.values(), self._machine.scale.device)

    def _state(self, optimizer: Optimizer) -> OptimizerState:
        state = self._optimizers.get(optimizer)
        if state is None:
            state = self._optimizers[optimizer] = OptimizerState()
        return state

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what the iteration's checks found, or set it. Once an iteration, at its end.

        Args:
            new_scale: a number, or a tensor of one element without gradient. A number must lie within the
                bounds; a tensor is brought within them on its device (NaN to the floor).

        Raises:
            LossScaleCollapseError: the scale is at its floor and `patience` steps in a row were skipped. At
                once on a CPU, and where the host saw the skip; elsewhere within `patience` more steps, so as
                not to wait at each.
            CallOrderError: no gradients were checked since the last `update`.
            UsageError: a `new_scale` that is no scale.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_scale(new_scale)
            self._begin_iteration()
            return
        found = [flag for state in self._optimizers.values() for flag in state.found_inf.values()]
        if self._machine is None or not found:
            raise CallOrderError(
                "update(): no gradients were checked since the last update(). Call "
                "scaler.scale(loss).backward() and scaler.step(optimizer) first."
            )
        device = self._machine.scale.device
        host_knows = reading_is_free(found[0]) or any(
            state.skipped is True for state in self._optimizers.values()
        )
        self._machine = self._machine.next(gradients.combined(found, device))
        self._begin_iteration()
        self._unchecked += 1
        if host_knows or self._unchecked >= self._machine.pure.patience:
            self._unchecked = 0
            try:
                self._machine.check()
            except LossScaleCollapseError as collapse:
                init = self._machine.pure.init
                raise collapse.going_on(
                    f"scaler.update({init:.17g}) sets the scale with which it began"
                ) from collapse

    def _begin_iteration(self) -> None:
        for state in self._optimizers.values():
            state.stage = Stage.READY
            state.found_inf = {}

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if not isinstance(new_scale, Tensor):
            # `or nan`: the pure machine takes 0 for "not given".
            self._set_host_state(replace(self._host_state(), scale=float(new_scale) or math.nan))
            return
        elsewhere = self._device_type is not None and new_scale.device.type != self._device_type
        if new_scale.numel() != 1 or new_scale.requires_grad or elsewhere:
            where = f" on a {self._device_type} device" if self._device_type else ""
            raise UsageError(
                f"update(new_scale): give a number, or a tensor of one element{where} with "
                "requires_grad=False"
            )
        machine = self._started(new_scale.device)
        scale = new_scale.detach().reshape(()).to(machine.scale, copy=True)
        floor, ceiling = machine.pure.floor, machine.pure.ceiling
        self._machine = replace(machine, scale=scale.nan_to_num(floor).clamp(floor, ceiling))

    def __getstate__(self) -> dict[str, Any]:
        if any(state.stage is not Stage.READY for state in self._optimizers.values()):
            raise CallOrderError(
                "copy or pickle a GradScaler after update(), before the next unscale_() or step()"
            )
        return {"device": self._device_type, "enabled": self._enabled, "pure": self._host_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._device_type, self._enabled, self._pure = state["device"], state["enabled"], state["pure"]
        self._machine = None
        self._forget()

    # What optimizers and trainers call on torch's scaler, though its name says that they shouldn't.

    @property
    def _scale(self) -> Tensor | None:
        return None if self._machine is None else self._machine.scale

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return self._host_state().good_steps if self._enabled else 0

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        if self._machine is None:
            raise CallOrderError("no loss has been scaled yet. Use scaler.scale(loss).backward().")
        grads = gradients.values(gradients.parameters(optimizer), allow_fp16=True)
        found = gradients.unscale_(grads, torch.ones_like(self._machine.scale))
        self._state(optimizer).found_inf = found
        return found

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        return self._state(optimizer).found_inf


def _takes_scaler(optimizer: Optimizer, state: OptimizerState) -> bool:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # A scheduler may have put its own in the place of the class's. The method itself would hold the optimizer.
    step = getattr(optimizer.step, "__func__", None)
    if step is None or state.step_known is not step:
        state.step_known = step
        state.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
    return state.takes_scaler
