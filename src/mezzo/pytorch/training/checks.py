"""What `MixedPrecision` refuses, each with its mend."""

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
from mezzo.pytorch.scaling import gradients
from mezzo.pytorch.training.accumulation import SIXTEEN_BITS


def model_and_optimizer(model: nn.Module, optimizer: Optimizer, others: Iterable[Any]) -> None:
    """Check that the optimizer trains parameters of this model, and that nobody else does.

    Raises:
        UsageError: it does not.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"MixedPrecision: the model is a {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"MixedPrecision: the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer. "
            "One MixedPrecision an optimizer."
        )
    own = {id(p) for p in model.parameters()}
    if not own:
        raise UsageError(
            f"MixedPrecision: {type(model).__name__} has no parameters, so there is nothing to train. A "
            "lazy module must have seen its first input."
        )
    trained = list(gradients.parameters(optimizer))
    if not any(id(p) in own for p in trained):
        raise UsageError(
            f"MixedPrecision: none of the optimizer's parameters belongs to this {type(model).__name__}. "
            "Make the optimizer from model.parameters(), after the model is on its device."
        )
    mine = {id(p) for p in trained}
    for other in others:
        if any(id(p) in mine for p in gradients.parameters(other.optimizer)):
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


def numbers(
    *,
    clip_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    watch: bool | int = False,
    trace: bool | None = None,
) -> None:
    """Check the numbers' ranges, and who is to look.

    Raises:
        UsageError: one is out of range, or neither a number nor a truth value where it must be.
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
            "(where that makes nobody wait)"
        )


def writer(records: Any) -> None:
    """Check that records can be written.

    Raises:
        UsageError: there is no way to write one.
    """
    if records is not None and not hasattr(records, "write"):
        raise UsageError(
            f"MixedPrecision: records is {records!r}; give a RecordWriter, such as "
            'mezzo.core.records.RecordWriter("run.jsonl"), or a mezzo.TensorBoardWriter'
        )


def release(clip_value: float | None) -> None:
    """Check that gradients that are released need not be rewritten.

    Raises:
        UsageError: they would.
    """
    if clip_value is not None:
        raise UsageError(
            "MixedPrecision: release_gradients=True frees each gradient within backward, and clip_value would "
            "have to rewrite it first. Use clip_norm, or keep the gradients."
        )


def released_graph(retain_graph: bool, reentrant: bool) -> None:
    """Check that weights may move while this graph's backward runs.

    Raises:
        UsageError: they may not.
    """
    if retain_graph:
        raise UsageError(
            "step(retain_graph=True): with release_gradients=True the weights have moved when backward ends, so "
            "its graph can't run again. Step the other MixedPrecision first, or keep the gradients."
        )
    if reentrant:
        raise UsageError(
            "step(): the graph holds a checkpoint with use_reentrant=True, which computes its gradients in a "
            "backward of its own. release_gradients=True needs use_reentrant=False."
        )


def scheduler(given: Any) -> None:
    """Check that a scheduler can be stepped without arguments.

    Raises:
        UsageError: it can't.
    """
    if isinstance(given, ReduceLROnPlateau):
        raise UsageError(
            "MixedPrecision: ReduceLROnPlateau needs a metric at each step. Step it yourself, by "
            "result.moved."
        )
    if given is not None and not callable(getattr(given, "step", None)):
        raise UsageError(f"MixedPrecision: scheduler is a {type(given).__name__}, which has no step()")


def averager(ema: Any, *, low: bool) -> Callable[[nn.Module], Any] | None:
    """What to call with the model after each move.

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


def loss(given: Tensor) -> None:
    """Check that backward can start from a loss.

    Raises:
        UsageError: it can't.
    """
    if not isinstance(given, Tensor):
        raise UsageError(
            f"step(loss): the loss is a {type(given).__name__}; hand in the tensor, without .item()"
        )
    if given.numel() != 1:
        raise UsageError(
            f"step(loss): the loss has shape {tuple(given.shape)}; reduce it to one number, e.g. loss.mean()"
        )
    if not given.requires_grad:
        raise UsageError(
            "step(loss): the loss needs no gradient. Was it computed under torch.no_grad(), detached, or "
            "from a model whose parameters are frozen?"
        )
    if not given.is_floating_point():
        raise UsageError(f"step(loss): the loss is {name_of(given.dtype)}; it must be a real floating number")


def no_gradient() -> UsageError:
    """The error where backward has left no gradient in any of an optimizer's parameters."""
    return UsageError("step(): the loss depends on no parameter of this optimizer. Is it another model's?")
