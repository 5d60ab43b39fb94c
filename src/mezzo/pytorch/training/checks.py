"""What `MixedPrecision` refuses, each error with its fix."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mezzo.core.errors import UsageError
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training.accumulation import SIXTEEN_BITS


def model_and_optimizer(model: nn.Module, optimizer: Optimizer, others: Iterable[Any]) -> None:
    """Check that the optimizer trains parameters of this model that no other MixedPrecision has.

    Raises:
        UsageError: it does not.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"MixedPrecision: the model is a {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"MixedPrecision: the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer. "
            "Make one MixedPrecision per optimizer."
        )
    own = {id(p) for p in model.parameters()}
    if not own:
        raise UsageError(
            f"MixedPrecision: {type(model).__name__} has no parameters, so there is nothing to train. A "
            "lazy module must have seen its first input."
        )
    mine = {id(p) for p in parameters(optimizer)}
    if own.isdisjoint(mine):
        raise UsageError(
            f"MixedPrecision: none of the optimizer's parameters belongs to this {type(model).__name__}. "
            "Make the optimizer from model.parameters(), after the model is on its device."
        )
    if any(id(p) in mine for other in others for p in parameters(other.optimizer)):
        raise UsageError(
            "MixedPrecision: another MixedPrecision already has some of these parameters, and the two "
            "would unscale and clear each other's gradients. Give both optimizers' parameters to one, "
            "or call close() on the other (or delete it) first."
        )
    inner = getattr(optimizer, "inner", optimizer)  # of with_masters
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"MixedPrecision: {type(inner).__name__} evaluates the loss several times a step and needs "
            "a closure. Use mezzo.GradScaler: scaler.step(optimizer, closure)."
        )


def arguments(
    *,
    clip_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    watch: bool | int,
    trace: bool | None,
    scheduler: Any,
    records: Any,
    release: bool,
) -> None:
    """Check `MixedPrecision`'s other arguments.

    Raises:
        UsageError: one is out of range or of the wrong kind, or can't go with `release_gradients`.
    """
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        measures = name == "clip_norm" and bound == math.inf
        if bound is not None and not measures and not (math.isfinite(bound) and bound > 0):
            only = ", math.inf to be told the norm only," if name == "clip_norm" else ""
            raise UsageError(
                f"MixedPrecision: {name} is {bound!r}; give a finite number above 0,{only} or None"
            )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"MixedPrecision: accumulate is {accumulate!r}; give a whole number of at least 1")
    if not isinstance(watch, int) or watch < 0:
        raise UsageError(
            f"MixedPrecision: watch is {watch!r}; give True, False, or the updates from one that is watched to the next"
        )
    if trace is not None and not isinstance(trace, bool):
        raise UsageError(
            f"MixedPrecision: trace is {trace!r}; give True (look into every skipped step), False (into none), or None "
            "(where looking costs no wait)"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "MixedPrecision: ReduceLROnPlateau needs a metric at each step. Step it yourself, by result.stepped."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"MixedPrecision: scheduler is a {type(scheduler).__name__}, which has no step()")
    if records is not None and not hasattr(records, "write"):
        raise UsageError(
            f"MixedPrecision: records is {records!r}; give a RecordWriter, such as "
            'mezzo.core.records.RecordWriter("run.jsonl"), or a mezzo.TensorBoardWriter'
        )
    if release and clip_value is not None:
        raise UsageError(
            "MixedPrecision: release_gradients=True frees each gradient within backward, and clip_value would "
            "have to rewrite it first. Use clip_norm, or keep the gradients."
        )


def averager(ema: Any, *, low: bool) -> Callable[[nn.Module], Any] | None:
    """What to call with the model after each step that was taken.

    Args:
        ema: as the user gave it.
        low: whether the model's weights are, or will be, stored in 16 bits.

    Raises:
        UsageError: nothing can be called; or an average that is itself in 16 bits.
    """
    if ema is None:
        return None
    update = getattr(ema, "update_parameters", None)
    if update is None and not isinstance(ema, nn.Module):
        update = ema
    if not callable(update):
        raise UsageError(
            f"MixedPrecision: ema is a {type(ema).__name__}; give something with update_parameters(model), "
            "such as torch.optim.swa_utils.AveragedModel, or a function of the model"
        )
    if low and isinstance(ema, nn.Module):
        for name, param in ema.named_parameters():
            if param.dtype in SIXTEEN_BITS:
                raise UsageError(
                    f"MixedPrecision: the average's {name} is {name_of(param.dtype)}, in whose steps the small "
                    "moves of an average are lost. Make it FP32, ema.float(), or before the model is lowered."
                )
    chosen: Callable[[nn.Module], Any] = update
    return chosen


def loss(given: Any) -> None:
    """Check that backward can start from a loss.

    Raises:
        UsageError: it can't.
    """
    if not isinstance(given, Tensor):
        problem = f"is a {type(given).__name__}; hand in the tensor, without .item()"
    elif given.numel() != 1:
        problem = f"has shape {tuple(given.shape)}; reduce it to one number, e.g. loss.mean()"
    elif not given.requires_grad:
        problem = (
            "needs no gradient. Was it computed under torch.no_grad(), detached, or from a model whose parameters "
            "are frozen?"
        )
    elif not given.is_floating_point():
        problem = f"is {name_of(given.dtype)}; it must be a real floating number"
    else:
        return
    raise UsageError(f"step(loss): the loss {problem}")
