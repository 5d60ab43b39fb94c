"""Mezzo's mixed precision under Hugging Face Accelerate: `attach(accelerator, "fp16")`, or `Accelerator("fp16")`.

The accelerator's own mixed precision stays off. Its class becomes a subclass whose `prepare`, `backward`, clipping and
optimizer step use `mezzo.autocast`, `mezzo.GradScaler` and the optimizers of `mezzo.optim`. The loop stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import CallOrderError, UsageError, checks_keywords
from mezzo.core.loss_scale import LossScale
from mezzo.core.policy import Policy
from mezzo.core.policy_text import matches
from mezzo.core.version import library
from mezzo.pytorch.autocast import modules
from mezzo.pytorch.autocast.context import Context, context_of
from mezzo.pytorch.grad_scaler import GradScaler
from mezzo.pytorch.module_paths import unwrapped, walk
from mezzo.pytorch.optim.adopt import extend
from mezzo.pytorch.step import parameters
from mezzo.pytorch.trainer_step import TrainerStep
from mezzo.pytorch.training.backward import Gradients

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
    `clip_grad_value_` unscale the gradients of those optimizers whose parameters they get, and with a loss scale leave
    out those of no optimizer. `save_state` saves the loss scale and masters. `accelerator.mezzo` is the `Precision`.

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
    given = dict(locals())
    return attached(accelerator, Precision(written="mezzo.accelerate.attach(accelerator, {!r})", **given))


def attached(accelerator: Any, precision: Precision, *, late: bool = False) -> Any:
    """The accelerator, with the precision in use; `late`: models may be prepared already, for evaluation."""
    prepared = [*accelerator._optimizers, *([] if late else accelerator._models)]
    if prepared:
        raise CallOrderError(
            f"{precision.where}: the accelerator has prepared a {type(prepared[0]).__name__} already. Call it before "
            "accelerator.prepare(...)."
        )
    precision.apply(list(map(unwrapped, accelerator._models)), stores=False)
    extend(accelerator, _Attached)
    accelerator.mezzo, accelerator.scaler = precision, precision.scaler
    return accelerator


class Precision(TrainerStep):
    """The precision of an attached accelerator."""

    def __init__(self, accelerator: Any, policy: Any, written: str, **options: Any) -> None:
        _refuse_unfit(accelerator, written.partition("(")[0])
        self.device_type: str = accelerator.device.type
        super().__init__(written, self.device_type, policy, **options)
        handler = accelerator.scaler_handler
        if self.scaler is not None and options.get("loss_scale") is None and handler is not None:
            self.scaler = GradScaler(**handler.to_kwargs())
        self._accelerator = accelerator
        self._gradients = Gradients(fp32=True)
        finalize(self, self._gradients.clear).atexit = False
        self._paths: set[str] = set()  # of the modules of all models
        inside = " inside `with accelerator.accumulate(model):`" * ("transformers" not in self.where)
        self.observe([], self.context, self.device_type, inside=inside)

    def __repr__(self) -> str:
        scaled = f", loss_scale={self.loss_scale:g}, {self.skipped_steps} skipped"
        return f"Precision('{self.policy}'{'' if self.scaler is None else scaled})"

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step, 1.0 without one. Waits for the device."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def context(self, enabled: bool = True) -> Context:
        """The autocast context of the policy."""
        return context_of(self.policy, self.device_type, enabled)

    def apply(self, models: Sequence[nn.Module], *, stores: bool = True) -> None:
        """Let models compute by the policy, and store their weights as the policy says, if it `stores`."""
        self._paths.update(path for model in models for path, _ in walk(model, inside=True))
        for pattern, _ in self.policy.modules if models and stores else ():
            if not any(matches(pattern, path) for path in self._paths):
                raise modules.no_such_module(pattern, sorted(self._paths), "the prepared models")
        for model in models:
            before = vars(model).get("forward")
            if isinstance(before, _Forward):
                before.remove()  # perhaps another accelerator's
            policy = modules.with_heads(modules.fitting(self.policy, model), model)
            model.forward = _Forward(model, policy, self.device_type)
            if stores:
                self.lower(model)

    def watch(self, model: nn.Module) -> None:
        """Report the calls of a model, as it is called: perhaps compiled, or wrapped for data parallelism."""
        handles = vars(unwrapped(model))["forward"].handles
        if self.scaler is not None and not handles:
            handles += [model.register_forward_pre_hook(self.networks.called), *self.observing.watch(model)]

    def prepare(self, optimizer: Optimizer) -> None:
        """Give an optimizer the masters and the state formats of the policy."""
        owned = self.adopt(optimizer, map(unwrapped, self._accelerator._models))
        if not owned and (self.policy.params, self.policy.state) != ("fp32", "fp32"):
            raise UsageError(
                f"policy '{self.policy}' stores weights and states in other formats, but the optimizer's model was not "
                "prepared. Prepare them together: accelerator.prepare(model, optimizer)."
            )

    def backward(self, loss: Any) -> None:
        """A loss is about to be scaled and backpropagated."""
        accelerator = self._accelerator
        if not accelerator.sync_gradients and accelerator.num_processes == 1:
            for optimizer in map(_own, accelerator._optimizers):  # sums of several backward passes
                self._gradients.cover(optimizer)
        self.backward_begins(loss, accelerator.gradient_accumulation_steps)

    def step(self, optimizer: Optimizer, *closure: Any) -> bool:
        """Step an optimizer and update the loss scale; whether the step was skipped."""
        if self.scaler is None:
            optimizer.step(*closure)
            return False
        self.scaler.step(optimizer, *closure)
        self.explain(optimizer, self.scaler.was_skipped(optimizer))
        skipped = self.ended(optimizer, self._accelerator._optimizers)
        self.update()
        return skipped


class _Forward:
    """A model's `forward` inside the policy's context; an attribute of the model, so that copies of it have it too."""

    def __init__(self, model: nn.Module, policy: Policy, device_type: str) -> None:
        self._model, self._policy, self._device_type = model, policy, device_type
        self._overrides = modules.apply_module_overrides(model, policy, device_type)
        self._before = vars(model).get("forward")
        self.handles: list[Any] = []  # of hooks on the model as it is called

    @property
    def __wrapped__(self) -> Any:  # for inspect.signature
        return type(self._model).forward.__get__(self._model) if self._before is None else self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context_of(self._policy, self._device_type):
            out = self.__wrapped__(*args, **kwargs)
        return modules.to_fp32(out)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handles": []}

    def remove(self) -> None:
        """Take it off the model, with the policy's overrides and the hooks."""
        for handle in self.handles:
            handle.remove()
        del self._model.forward
        if self._before is not None:
            self._model.forward = self._before
        self._overrides.remove()


class _Attached(_library.Accelerator):  # type: ignore[misc, name-defined]
    """The first base class of an attached accelerator."""

    mezzo: Precision

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the models first: their optimizers take the bits that 16-bit weights lack."""
        self.mezzo.apply([unwrapped(model) for model in args if isinstance(model, nn.Module)])
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """As Accelerate's, under the policy."""
        self.mezzo.apply([unwrapped(model)], stores=not evaluation_mode)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self.mezzo.watch(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """As Accelerate's, with the masters of the policy, and with steps of `mezzo.GradScaler`."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        self.mezzo.prepare(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        extend(prepared, _Optimizer)
        prepared.mezzo = self.mezzo
        return prepared

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As Accelerate's, with the loss scale."""
        self.mezzo.backward(loss)
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of one optimizer, several, or all; those that are unscaled stay."""
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            self.mezzo.unscale(_own(one))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Unscale and clip the gradients of these parameters, and return their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._unscaled(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Unscale and clip the gradients of these parameters."""
        torch.nn.utils.clip_grad_value_(self._unscaled(parameters), clip_value)

    def _unscaled(self, params: Any) -> list[Tensor]:
        several: list[Tensor] = [params] if isinstance(params, Tensor) else list(params)
        if self.mezzo.scaler is None:
            return several
        unscaled: set[int] = set()  # others stay scaled, and no step uses them
        for optimizer in map(_own, self._optimizers):
            mine = {id(param) for param in parameters(optimizer)}
            if not mine.isdisjoint(map(id, several)):
                self.mezzo.unscale(optimizer)
                unscaled |= mine
        return [param for param in several if id(param) in unscaled]

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """As Accelerate's; after a skipped step that was not explained, the operations inside are traced."""
        with super().accumulate(*models), self.mezzo.observing.live():
            yield

    def autocast(self, autocast_handler: Any = None) -> Context:
        """The policy's context, for code outside of prepared models."""
        return self.mezzo.context(autocast_handler is None or autocast_handler.enabled)


class _Optimizer(_library.optimizer.AcceleratedOptimizer):  # type: ignore[misc, name-defined]
    """The first base class of a prepared optimizer."""

    mezzo: Precision

    def step(self, closure: Any = None) -> None:
        """Step at the end of an accumulation window, unless a gradient is NaN or infinite."""
        if self.gradient_state.sync_gradients:
            self._is_overflow = self.mezzo.step(self.optimizer, *[closure] * (closure is not None))


class Accelerator(_Attached):
    """An `accelerate.Accelerator` with Mezzo's mixed precision: `attach` for new code, with the same arguments.

    Keyword arguments that `attach` does not have go to `accelerate.Accelerator`.
    """

    def __init__(self, policy: str | os.PathLike[str] | Policy | torch.dtype = "auto", **kwargs: Any) -> None:
        mine = {name: kwargs.pop(name, None) for name in _OPTIONS}
        super().__init__(**kwargs)
        theirs = "".join(f", {name}={value!r}" for name, value in kwargs.items())
        written = f"mezzo.accelerate.Accelerator({{!r}}{theirs.replace('{', '{{').replace('}', '}}')})"
        self.mezzo = Precision(self, policy, written, **mine)
        self.scaler = self.mezzo.scaler


def _own(optimizer: Any) -> Any:
    """The user's optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


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
