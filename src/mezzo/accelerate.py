"""Mezzo's mixed precision under Hugging Face Accelerate: `attach(accelerator, "fp16")`, or `Accelerator("fp16")`.

The accelerator's own mixed precision stays off. Its class becomes a subclass whose `prepare`, `backward`, clipping and
optimizer step use `mezzo.autocast`, `mezzo.GradScaler` and the optimizers of `mezzo.optim`. The loop stays as it is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError, checks_keywords
from mezzo.core.loss_scale import LossScale, NoLossScale
from mezzo.core.overflow import OverflowReport
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import as_loss_scale, matches
from mezzo.core.version import library
from mezzo.pytorch import auto
from mezzo.pytorch.autocast.context import Context, autocast
from mezzo.pytorch.autocast.modules import (
    ModuleOverrides,
    apply_module_overrides,
    fitting,
    no_such_module,
    to_fp32,
    with_heads,
)
from mezzo.pytorch.grad_scaler import GradScaler
from mezzo.pytorch.monitor.module_paths import unwrapped
from mezzo.pytorch.monitor.observer import Scale, StepObserver
from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer
from mezzo.pytorch.optim.adopt import class_of
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training import cast_parameters
from mezzo.pytorch.training.backward import Gradients, leaves_of
from mezzo.pytorch.training.networks import Networks
from mezzo.pytorch.training.observers import Observers
from mezzo.pytorch.weights.stored_parameters import lower_weights

# Not under its own name, which `mezzo.accelerate` would then return.
_library = library("accelerate", "1.10")

__all__ = ["Accelerator", "Precision", "attach"]

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")
_OPTIONS = ("params", "masters", "state", "loss_scale", "trace")


@checks_keywords
def attach(
    accelerator: Any,
    policy: str | os.PathLike[str] | Policy | torch.dtype = "auto",
    *,
    params: str | None = None,
    masters: str | None = None,
    state: str | None = None,
    loss_scale: LossScale | float | str | None = None,
    trace: bool | None = None,
) -> Any:
    """Let an `accelerate.Accelerator` train under a policy, and return it. Call it before `prepare`.

    Example::

        accelerator = mezzo.accelerate.attach(accelerate.Accelerator(), "fp16")
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    A prepared model computes by the policy and returns FP32. If a gradient is NaN or infinite, the step is skipped: the
    optimizer's state and the model's running statistics keep their values, `accelerator.optimizer_step_was_skipped` is
    True (also with fused optimizers), and a prepared scheduler does not advance. `clip_grad_norm_` and
    `clip_grad_value_` unscale the gradients of those optimizers whose parameters they get. `save_state` saves the loss
    scale and the masters. `accelerator.mezzo` is the `Precision`.

    Args:
        accelerator: without mixed precision of its own, on one device or under DistributedDataParallel.
        policy: as for `mezzo.MixedPrecision`; `"auto"` takes a format that the device has, and times nothing.
        params, masters, state: formats of the stored parameters, of their masters and of the optimizer's moments, as
            for `mezzo.MixedPrecision`. Applied by `prepare`.
        loss_scale: replaces the policy's; by default also the accelerator's `GradScalerKwargs`.
        trace: explain skipped steps in `accelerator.mezzo.findings`; None: on a CPU.

    Raises:
        UsageError: not an Accelerator; one with mixed precision of its own, or that is attached; an unsupported kind of
            distributed training; an invalid policy.
        CallOrderError: something was prepared before.
    """
    return attached(
        accelerator,
        Precision(accelerator, policy, params, masters, state, loss_scale, trace, "mezzo.accelerate.attach"),
    )


def attached(accelerator: Any, precision: Precision, *, late: bool = False) -> Any:
    """The accelerator, with the precision in use; `late`: models may be prepared already, for evaluation."""
    prepared = [*accelerator._optimizers, *([] if late else accelerator._models)]
    if prepared:
        raise CallOrderError(
            f"{precision.where}: the accelerator has prepared a {type(prepared[0]).__name__} already. Call it before "
            "accelerator.prepare(...)."
        )
    precision.apply(list(map(unwrapped, accelerator._models)), stores=False)
    kind: Any = type(accelerator)
    accelerator.__class__ = class_of(_Attached, kind)
    accelerator.mezzo, accelerator.scaler = precision, precision.scaler
    return accelerator


class Precision:
    """The precision of an attached accelerator: its `policy`, and its `scaler`, None without a loss scale.

    `skipped_steps` counts them, and `findings` has the last hundred reports on them.
    """

    def __init__(
        self,
        accelerator: Any,
        policy: str | os.PathLike[str] | Policy | torch.dtype,
        params: str | None,
        masters: str | None,
        state: str | None,
        loss_scale: LossScale | float | str | None,
        trace: bool | None,
        where: str,
        written: Callable[[str], str] = 'mezzo.accelerate.attach(accelerator, "{}")'.format,
    ) -> None:
        self.where = where
        _refuse_unfit(accelerator, where)
        self.device_type: str = accelerator.device.type
        with _as_from(where):
            asked, _ = cast_parameters.stored(policy_of(policy), params, masters, state, self.device_type)
            self.policy, _ = auto.resolve(asked, self.device_type)
            self.scaler = _scaler(as_loss_scale(loss_scale, where), self.policy, accelerator.scaler_handler)
        self.skipped_steps = 0
        self.findings: deque[OverflowReport] = deque(maxlen=100)
        self._accelerator = accelerator
        self._updates = 0
        self._gradients = Gradients(fp32=True)
        finalize(self, self._gradients.undo).atexit = False
        self._paths: set[str] = set()  # of the modules of all models
        self._observers: list[StepObserver] = []
        if self.scaler is not None:
            self._observers.append(_MovingBuffers(self._trained))
            if trace or (trace is None and self.device_type == "cpu"):
                self._observers.append(OverflowTracer(enter=self.context, waits=bool(trace), written=written))

    def __repr__(self) -> str:
        scaled = f", loss_scale={self.loss_scale:g}, {self.skipped_steps} skipped"
        return f"Precision('{self.policy}'{'' if self.scaler is None else scaled})"

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step, 1.0 without one. Waits for the device."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def context(self, enabled: bool = True) -> Context:
        """The autocast context of the policy."""
        return autocast(self.policy, self.device_type, enabled)

    def apply(self, models: Sequence[nn.Module], *, stores: bool = True) -> None:
        """Let models compute by the policy, and store their weights as the policy says, if it `stores`."""
        self._paths.update(path for model in models for path, _ in model.named_modules())
        for pattern, _ in self.policy.modules if models and stores else ():
            if not any(matches(pattern, path) for path in self._paths):
                raise no_such_module(pattern, sorted(self._paths), "the prepared models")
        for model in models:
            policy = fitting(self.policy, model)
            forward = model.__dict__.get("forward")
            if isinstance(forward, _Forward) and forward.owner is not self:
                forward.remove()  # of another accelerator
            if not isinstance(model.__dict__.get("forward"), _Forward):
                model.forward = _Forward(self, model, with_heads(policy, model))
            if stores and policy.params != "fp32":
                lower_weights(model, policy)

    def observe(self, model: nn.Module) -> None:
        """Report the calls of a model, as it is called: perhaps compiled, or wrapped for data parallelism."""
        forward = unwrapped(model).__dict__["forward"]
        if self._observers and forward.observers is None:
            forward.observers = Observers(model, self._observers)

    def adopt(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Give an optimizer the masters and the state formats of the policy."""
        mine = {id(param) for param in parameters(optimizer)}
        owner = next((one for one in models if not mine.isdisjoint(map(id, one.parameters()))), None)
        with _as_from(self.where):
            policy, _ = cast_parameters.chosen(self.policy, None, None, None, self.device_type, optimizer)
            if owner is not None:
                cast_parameters.apply(owner, optimizer, fitting(policy, owner))
            elif (policy.params, policy.state) != ("fp32", "fp32"):
                raise UsageError(
                    f"policy '{policy}' stores weights and states in other formats, but the optimizer's model was not "
                    "prepared. Prepare them together: accelerator.prepare(model, optimizer)."
                )

    def backward_begins(self, loss: Any) -> None:
        """A loss is about to be scaled and backpropagated."""
        accelerator = self._accelerator
        if not accelerator.sync_gradients and accelerator.num_processes == 1:
            for optimizer in map(_own, accelerator._optimizers):  # sums of several backward passes
                self._gradients.cover(optimizer)
        for observer in self._observers if isinstance(loss, Tensor) else ():
            observer.backward_begins(loss, self._scale_now() / accelerator.gradient_accumulation_steps)

    def unscale(self, optimizers: Iterable[Any]) -> None:
        """Unscale the gradients of optimizers where that was not done."""
        scaler = self.scaler
        for optimizer in map(_own, optimizers if scaler is not None else ()):
            assert scaler is not None
            if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *closure: Any) -> bool:
        """Step an optimizer and update the loss scale; whether the step was skipped."""
        self._updates += 1
        scaler, scale = self.scaler, self._scale_now()
        if scaler is None:
            optimizer.step(*closure)
            return False
        scaler.step(optimizer, *closure)
        skipped = scaler.was_skipped(optimizer)
        self.skipped_steps += skipped
        for observer in self._observers:
            observer.update_ended(optimizer, index=self._updates, number=0, skipped=skipped, loss_scale=scale)
            observer.drain()
            if observer.finding is not None:
                self.findings.append(observer.finding)
        # Gradients of other optimizers that are unscaled and wait for their step must not be unscaled again.
        states = scaler._per_optimizer_states
        waiting = {key: states.pop(key) for key in list(states) if states[key]["stage"] is OptState.UNSCALED}
        try:
            scaler.update()
        except LossScaleCollapseError as collapse:
            raise (collapse.named(self.findings[-1]) if self.findings else collapse) from collapse
        states.update(waiting)
        return skipped

    def _scale_now(self) -> Scale:
        if self.scaler is None:
            return 1.0
        scale = self.scaler._get_scale_async()
        return self.scaler.get_scale() if scale is None else scale

    def _trained(self) -> Iterator[Tensor]:
        for optimizer in self._accelerator._optimizers:
            yield from parameters(optimizer)


class _Forward:
    """A model's `forward` inside the policy's context; an attribute of the model, so that copies of it have it too."""

    def __init__(self, owner: Precision, model: nn.Module, policy: Policy) -> None:
        self.owner: Precision | None = owner
        self.observers: Observers | None = None
        self._model, self._policy, self._device_type = model, policy, owner.device_type
        self._overrides: ModuleOverrides | None = None
        if policy.modules:
            self._overrides = apply_module_overrides(model, policy, owner.device_type)
        self._before = model.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Any:  # for inspect.signature
        return type(self._model).forward.__get__(self._model) if self._before is None else self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self._policy, self._device_type):
            out = self.__wrapped__(*args, **kwargs)
        return to_fp32(out)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"owner": None, "observers": None}

    def remove(self) -> None:
        """Take it off the model, with the policy's overrides and the observers."""
        if self.observers is not None:
            self.observers.undo()
        del self._model.forward
        if self._before is not None:
            self._model.forward = self._before
        if self._overrides is not None:
            self._overrides.remove()


class _MovingBuffers(StepObserver):
    """Restores the buffers that forward passes have changed (running statistics) after a skipped step."""

    def __init__(self, trained: Callable[[], Iterator[Tensor]]) -> None:
        self._networks = Networks()
        self._trained = trained

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy them."""
        self._networks.call(model)

    def backward_begins(self, loss: Tensor, scale: Scale) -> None:
        """Note whose gradients the loss reaches."""
        if len(self._networks) > 1:
            self._networks.backward(leaves_of([loss]))

    def update_ended(self, optimizer: Optimizer, *, skipped: Tensor | bool, **_: Any) -> None:
        """Restore them, or drop the copies."""
        self._networks.step_ended(
            parameters(optimizer), skipped, lambda: {id(param) for param in self._trained()}
        )


class _Attached:
    """The first base class of an attached accelerator."""

    mezzo: Precision

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the models first: their optimizers take the bits that 16-bit weights lack."""
        self.mezzo.apply([unwrapped(model) for model in args if isinstance(model, nn.Module)])
        base: Any = super()
        return base.prepare(*args, **kwargs)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """As Accelerate's, under the policy."""
        self.mezzo.apply([unwrapped(model)], stores=not evaluation_mode)
        base: Any = super()
        prepared = base.prepare_model(model, device_placement, evaluation_mode)
        self.mezzo.observe(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """As Accelerate's, with the masters of the policy, and with steps of `mezzo.GradScaler`."""
        base: Any = super()
        accelerator: Any = self
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return base.prepare_optimizer(optimizer, device_placement)
        self.mezzo.adopt(optimizer, map(unwrapped, accelerator._models))
        prepared = base.prepare_optimizer(optimizer, device_placement)
        kind: Any = type(prepared)
        prepared.__class__ = class_of(_Optimizer, kind)
        prepared.mezzo = self.mezzo
        return prepared

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As Accelerate's, with the loss scale."""
        base: Any = super()
        self.mezzo.backward_begins(loss)
        base.backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of one optimizer, several, or all; those that are unscaled stay."""
        accelerator: Any = self
        several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.mezzo.unscale(accelerator._optimizers if optimizer is None else several)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Unscale and clip the gradients of these parameters, and return their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._unscaled(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Unscale and clip the gradients of these parameters."""
        torch.nn.utils.clip_grad_value_(self._unscaled(parameters), clip_value)

    def _unscaled(self, params: Any) -> list[Tensor]:
        accelerator: Any = self
        several: list[Tensor] = [params] if isinstance(params, Tensor) else list(params)
        mine = {id(param) for param in several}
        optimizers = [one for one in accelerator._optimizers if not mine.isdisjoint(map(id, parameters(one)))]
        self.mezzo.unscale(optimizers)
        return several

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """The policy's context, for code outside of prepared models."""
        with self.mezzo.context(autocast_handler is None or autocast_handler.enabled):
            yield


class _Optimizer:
    """The first base class of a prepared optimizer."""

    mezzo: Precision

    def step(self, closure: Any = None) -> None:
        """Step at the end of an accumulation window, unless a gradient is NaN or infinite."""
        wrapper: Any = self
        if wrapper.gradient_state.sync_gradients:
            arguments = () if closure is None else (closure,)
            wrapper._is_overflow = self.mezzo.step(wrapper.optimizer, *arguments)


class Accelerator(_Attached, _library.Accelerator):  # type: ignore[misc, name-defined]
    """An `accelerate.Accelerator` with Mezzo's mixed precision: `attach` for new code, with the same arguments.

    Keyword arguments that `attach` does not have go to `accelerate.Accelerator`.
    """

    def __init__(self, policy: str | os.PathLike[str] | Policy | torch.dtype = "auto", **kwargs: Any) -> None:
        mine = {name: kwargs.pop(name, None) for name in _OPTIONS}
        super().__init__(**kwargs)
        self.mezzo = Precision(self, policy, where="mezzo.accelerate.Accelerator", **mine)
        self.scaler = self.mezzo.scaler


def _own(optimizer: Any) -> Any:
    """The user's optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _scaler(given: LossScale | None, policy: Policy, handler: Any) -> GradScaler | None:
    """The scaler of a loss scale: the one given, that of Accelerate's `GradScalerKwargs`, or the policy's."""
    pure = policy.make_loss_scale() if given is None else given
    if isinstance(pure, NoLossScale):
        return None
    if given is None and handler is not None:
        return GradScaler(**handler.to_kwargs())
    return GradScaler.of(pure)


def _refuse_unfit(accelerator: Any, where: str) -> None:
    if not isinstance(accelerator, _library.Accelerator):
        raise UsageError(f"{where}: received {type(accelerator).__name__}. Pass an accelerate.Accelerator.")
    if "mezzo" in vars(accelerator):
        raise UsageError(
            f"{where}: this accelerator was attached before, under '{accelerator.mezzo.policy}'. Attach it once."
        )
    own = str(accelerator.mixed_precision)
    if own != "no":
        raise UsageError(
            f"{where}: two precision settings: the accelerator has mixed_precision='{own}' too. Remove "
            f"mixed_precision='{own}' from Accelerator(...), from `accelerate launch` and from the variable "
            "ACCELERATE_MIXED_PRECISION; a process keeps the setting of its first Accelerator."
        )
    kind = accelerator.distributed_type.name
    if kind not in _SUPPORTED:
        raise UsageError(
            f"{where}: distributed_type is {kind}. Use one of {', '.join(_SUPPORTED)}; under {kind} keep "
            "Accelerate's own mixed_precision='bf16'."
        )


@contextmanager
def _as_from(where: str) -> Iterator[None]:
    """Errors of `MixedPrecision`'s checks name the caller."""
    try:
        yield
    except UsageError as error:
        error.args = (str(error).replace("MixedPrecision:", f"{where}:", 1),)
        raise
