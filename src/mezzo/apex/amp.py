"""`amp`, as in Apex: `initialize`, `scale_loss`, `master_params`, `state_dict`, and the functions of O1 (`casts`).

docs/torch-amp.md lists what differs from Apex.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.apex import casts, imports
from mezzo.apex.casts import disable_casts as disable_casts
from mezzo.apex.casts import init as init
from mezzo.apex.stash import Stash
from mezzo.apex.state import LossScaler, resolved
from mezzo.apex.state import state as _amp_state
from mezzo.core.errors import CallOrderError, UsageError, checks_keywords
from mezzo.core.loss_scale import check_whole
from mezzo.pytorch import step as engine
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.snapshot import has_running_statistics

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# Decorators: while O1's casts are on, inputs become fp16, or FP32, or FP32 if they are of both formats. The `register_`
# forms do so for `module.name`, from the next `initialize` on.
_FORMATS = ("half", "float", "promote")
half_function, float_function, promote_function = (functools.partial(casts.cast, how) for how in _FORMATS)
register_half_function, register_float_function, register_promote_function = (
    functools.partial(casts.register, how) for how in _FORMATS
)


@checks_keywords
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place, and return them, single or as lists, as given.

    Args:
        models, optimizers: FP32 modules, not wrapped in DistributedDataParallel, and their optimizers; None for none.
        enabled: False makes every call of `amp` do nothing.
        opt_level: O0: FP32. O1: autocast in fp16. O2: fp16 weights with FP32 masters, and FP32 BatchNorm. O3: fp16
            weights. O1 and O2 scale the loss. The next five arguments each replace a default of the level.
        cast_model_type: dtype of weights and inputs: FP32, fp16 or bf16. False leaves them.
        loss_scale: ``"dynamic"`` or a number, also as a string.
        cast_model_outputs: dtype of what the models return. Default: FP32 where inputs are cast.
        num_losses: number of loss scales, of which `scale_loss(loss_id=...)` uses one.
        verbosity: 0 prints nothing.
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale.

    Raises:
        UsageError: options that do not fit, or a model that is wrapped or not in FP32. Nothing was changed.
    """
    given = locals()
    _amp_state.verbosity = verbosity
    result = models if optimizers is None else (models, optimizers)
    if imports.replaced_by or not enabled:
        if enabled:
            _amp_state.tell(f"--precision {imports.replaced_by} replaces opt_level {opt_level}")
        _amp_state.opt_properties.enabled, _amp_state.loss_scalers = False, []
        return result
    options = resolved(opt_level, given)
    check_whole("amp.initialize: num_losses", num_losses, 1)
    all_models = _listed(models)
    all_optimizers = [] if optimizers is None else _listed(optimizers)
    scalers = [LossScaler(options.loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    for model in all_models:
        _refuse_unfit(model)
    exact = [{param: param.data for param in engine.parameters(optimizer)} for optimizer in all_optimizers]
    for model in all_models:
        _cast_model(model, options, cast_model_outputs)
    for optimizer, values in zip(all_optimizers, exact):
        Stash(optimizer, values if options.master_weights else None)
        if not options.master_weights:
            _warn_of_eps(optimizer)
    if options.patch_torch_functions:
        first = next((param for model in all_models for param in model.parameters()), None)
        init(device_type="" if first is None else first.device.type)
    _amp_state.opt_properties, _amp_state.loss_scalers = options, scalers
    _amp_state.tell(f"opt_level {opt_level}, loss scale {options.loss_scale}")
    return result


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """A block that yields ``loss.float() * scale`` for one backward pass; at its end the gradients are unscaled.

    Naive code for its end::

        master.grad = weight.grad.float()               # with masters
        grad = grad / scale + grad_of_earlier_backward_passes
        if the new gradients have a NaN or infinity:
            optimizer.step = lambda: None               # once
            scale = scale / 2
        elif there were 2000 good backward passes since the last change:
            scale = scale * 2

    `delay_unscale` leaves this to a later `scale_loss`, and `delay_overflow_check` its last four lines. `optimizers`
    are those of all parameters that get gradients. `model` is ignored.

    Raises:
        UsageError: `initialize` was not called, or not for these optimizers; there is no such loss_id.
        LossScaleCollapseError: 50 overflows in a row at the smallest scale.
    """
    if _amp_state.opt_properties.enabled is False:
        yield loss
        return
    stashes: list[Any] = [getattr(optimizer, "_amp_stash", None) for optimizer in _listed(optimizers)]
    if None in stashes:
        fix = "First call model, optimizer = amp.initialize(model, optimizer, opt_level='O1')."
        raise CallOrderError(f"amp.scale_loss: an optimizer was not initialized. {fix}")
    scalers = _amp_state.loss_scalers
    if loss_id not in range(len(scalers)):
        fix = f"Use 0 to {len(scalers) - 1}, or amp.initialize(..., num_losses=N)."
        raise UsageError(f"amp.scale_loss: loss_id is {loss_id!r}, and num_losses={len(scalers)}. {fix}")
    scaler = scalers[loss_id]
    scale = scaler.loss_scale()
    if scale == 1.0 and not scaler.dynamic and not _amp_state.opt_properties.master_weights:
        stashes, delay_unscale = [], True  # nothing to unscale
    for stash in stashes:
        stash.begin()
    with disable_casts():
        yield loss.float() * scale
    if delay_unscale:
        return
    for stash in stashes:
        scaler.found_inf |= stash.unscale(scale)
    if delay_overflow_check:
        return
    overflow = scaler.found_inf
    for stash in stashes:
        stash.skips |= overflow
    scaler.update()
    if overflow:
        _amp_state.tell(f"overflow: step skipped, scale of loss {loss_id} is now {scaler.loss_scale():g}")


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that the optimizer updates: FP32 masters where there are some. Clip these."""
    stash = getattr(optimizer, "_amp_stash", None)
    return engine.parameters(optimizer) if stash is None else iter(stash.parameters())


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales: ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``."""
    state = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        state[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return state


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load what `state_dict` returned, as far as there are losses for it; a different number is only printed."""
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        _amp_state.tell(f"the state has {len(state_dict)} loss scales, and num_losses is {len(scalers)}")
    for scaler, saved in zip(scalers, state_dict.values()):
        scaler._loss_scale, scaler._unskipped = saved["loss_scale"], saved["unskipped"]


def reset() -> None:
    """End O1's casts and forget everything, as if `initialize` had not been called; for tests and notebooks."""
    if _amp_state.handle is not None:
        _amp_state.handle.close()
    casts.registered.clear()
    _amp_state.__init__()  # type: ignore[misc]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _refuse_unfit(model: nn.Module) -> None:
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        what = f"amp.initialize: the model is wrapped in {type(model).__name__}"
        raise UsageError(f"{what}. Initialize it first, then wrap it.")
    for name, param in model.named_parameters():
        if param.dtype in SIXTEEN_BITS and not _amp_state.allow_incoming_model_not_fp32:
            raise UsageError(
                f"amp.initialize: {name} is {param.dtype}. Pass the model in FP32 (model.float()), also for O2 and O3, "
                "and only once."
            )


def _warn_of_eps(optimizer: Optimizer) -> None:
    """Warn if `eps` is 0 in fp16 and weights are in fp16 without masters: an update can be 0 / 0, which is NaN."""
    for group in optimizer.param_groups:
        is_fp16 = any(param.dtype is torch.float16 for param in group["params"])
        if is_fp16 and (eps := group.get("eps")) and not torch.tensor(eps, dtype=torch.float16):
            what = f"amp.initialize: eps={eps:g} of {type(optimizer).__name__} is 0 in fp16, the format of its weights"
            fix = "Use opt_level='O2' with its masters, or eps=1e-4."
            warnings.warn(f"{what}: updates can become NaN. {fix}", stacklevel=4)


def _cast_model(model: nn.Module, options: Any, outputs: torch.dtype | None) -> None:
    """Cast weights, and what goes into each call of a model and comes out; `state_dict()` is FP32."""
    if dtype := options.cast_model_type:
        for module in model.modules():
            is_batch_norm = has_running_statistics(module) and not isinstance(module, _INSTANCE_NORMS)
            if not (is_batch_norm and module.affine and options.keep_batchnorm_fp32):
                module._apply(functools.partial(casts.cast_to, dtype), recurse=False)
            module.register_state_dict_post_hook(_in_fp32)
        model.register_forward_pre_hook(functools.partial(_before_call, dtype), with_kwargs=True)
    if outputs := outputs or (torch.float32 if dtype else None):
        model.register_forward_hook(functools.partial(_after_call, outputs), prepend=True)


def _before_call(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return casts.cast_to(dtype, (args, kwargs))


def _after_call(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return casts.cast_to(dtype, output)


def _in_fp32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in SIXTEEN_BITS:
            state[name] = value.float()
