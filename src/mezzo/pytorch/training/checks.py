"""What `MixedPrecision` refuses, each error with its fix."""

from __future__ import annotations

import gc
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mezzo.core.compute import activations_of
from mezzo.core.errors import CallOrderError, UsageError
from mezzo.core.loss_scale import is_real
from mezzo.core.policy import Policy
from mezzo.pytorch.autocast.context import was_entered
from mezzo.pytorch.distributed import Ranks, joins, shards, wrappers
from mezzo.pytorch.dtypes import SIXTEEN_BITS, name_of
from mezzo.pytorch.optim.checks import refuse_replaced
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.with_masters import WithMasters
from mezzo.pytorch.same_options import compare_arguments
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training.backward import has_gradient, is_simple, nodes_of

_MASTERS = frozenset({"master", "remainder"})  # in the state of an optimizer with masters

_TORCH = "Write MixedPrecision(model, optimizer), one per optimizer."
_KERAS = "For Keras call mezzo.keras.set_policy('bf16') before the model is built, and train with model.fit."


def refused(problem: str, where: str = "MixedPrecision") -> UsageError:
    """The error for an argument or model that `MixedPrecision`, or the integration `where`, can't take."""
    return UsageError(f"{where}: {problem}")


def same_arguments(mp: Any, loss_scale: object, ranks: Ranks) -> None:
    """Before a MixedPrecision's first backward: raise a UsageError on all its ranks if arguments or states differ.

    `loss_scale`: as given. The store may have messages of ranks that were restarted since, so states are reduced.
    """
    parts = {"precision": mp._resolved.asked, "accumulate": mp.accumulate}
    parts |= {"clip_norm": mp.clip_norm, "clip_value": mp.clip_value, "loss_scale": loss_scale}
    parts["trace"] = mp._observing.tracer is not None or None  # ranks that trace exchange what they found
    parts["release_gradients"] = mp._release is not None or None
    for name in ("masters", "state"):
        kinds = dict.fromkeys(group.get(name) for group in mp.optimizer.param_groups)
        parts[f"optimizer's {name}"] = "/".join(filter(None, kinds)) or None
    compare_arguments("MixedPrecision", "step(loss)", parts, ranks.holders)
    state = mp.loss_scale, float(mp._window.seen)
    largest = ranks.largest(*state, *(-number for number in state), of_holders=True)
    if any(most != -least for most, least in zip(largest[:2], largest[2:])):
        raise refused(
            f"the ranks have different states: on rank {dist.get_rank()} the loss scale is {state[0]:g}, with "
            f"{state[1]:g} accumulated losses. Call mp.load_state_dict with the same state on every rank."
        )


def model_and_optimizer(model: nn.Module, optimizer: Optimizer, others: Iterable[Any]) -> list[Any]:
    """The MixedPrecision objects of this model with any of these parameters, which the new one replaces.

    Raises UsageError unless the optimizer trains parameters of this model that no other model's MixedPrecision has.
    """
    for what, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            keras = any(base.__module__.startswith(("keras.", "tf_keras.")) for base in type(given).__mro__)
            got = f"the {what} has type {type(given).__name__}, not torch's {kind.__name__}"
            raise refused(f"{got}. {_KERAS if keras else _TORCH}")
    in_model = {id(p) for p in model.parameters()} | {id(p) for p in shards([model]).values()}
    if not in_model:
        raise refused(
            f"{type(model).__name__} has no parameters. If it is lazy, call it once first: model(x)."
        )
    for group in () if isinstance(optimizer, (FusedOptimizer, WithMasters)) else optimizer.param_groups:
        if any(not _MASTERS.isdisjoint(optimizer.state.get(p, ())) for p in group["params"]):
            masters = group.get("masters", "fp32")
            raise refused(
                f"the optimizer's state was saved with masters={masters!r}, and this optimizer has none. First create "
                f"MixedPrecision(model, optimizer, masters={masters!r}), then load model and optimizer. To train in "
                "FP32, save mezzo.master_state_dict(model, optimizer) and optimizer.torch_state_dict() instead."
            )
    refuse_replaced(optimizer)
    mine = {id(p) for p in parameters(optimizer)}
    if in_model.isdisjoint(mine):
        raise refused(
            f"none of the optimizer's parameters belongs to this {type(model).__name__}. Create the optimizer from "
            "model.parameters(), after model.to(device)."
        )
    sharing = [other for other in others if any(id(p) in mine for p in parameters(other.optimizer))]
    if any(other.model is not model for other in sharing):
        raise refused(
            "another MixedPrecision, of another model object, already has some of these parameters. Call close() on it "
            "first, or put all parameters into one optimizer."
        )
    if needs_closure(optimizer):
        raise refused(
            f"{type(optimizer).__name__} evaluates the loss several times per step. Use scaler = mezzo.GradScaler(), "
            "scaler.step(optimizer, closure)."
        )
    return sharing


def doubtful(model: nn.Module, optimizer: Optimizer, policy: Policy) -> None:
    """Warn of parameters that were replaced after the optimizer was made, and of formats that no policy lowers."""
    params, mine = dict(model.named_parameters()), {id(p) for p in parameters(optimizer)}
    left = [name for name, p in params.items() if p.requires_grad and id(p) not in mine]
    known = {id(p) for p in (*params.values(), *shards([model]).values())}
    if left and not mine <= known:  # either alone is usual: several optimizers, or a loss with parameters
        warnings.warn(
            f"MixedPrecision: the optimizer lacks {', '.join(left[:3])}{', ...' * (len(left) > 3)} and has parameters "
            "that are not in the model. If a part of the model was replaced, create the optimizer after that.",
            stacklevel=4,
        )
    dtypes = {p.dtype for p in params.values()}
    if policy.computed != {"fp32"} and not any(one.is_floating_point and one.itemsize <= 4 for one in dtypes):
        warnings.warn(
            f"MixedPrecision: the model's parameters are {' and '.join(sorted(map(name_of, dtypes)))}, so nothing runs "
            f"in {policy.compute}. Use precision='fp32', or for fp64 model.float() before the optimizer is created.",
            stacklevel=4,
        )


def needs_closure(optimizer: Any) -> bool:
    """Whether its step evaluates the loss itself, as LBFGS's does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# Argument -> whether a value is allowed, and which are.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "clip_norm": (lambda one: _is_bound(one) or one == math.inf, "a number above 0, or None"),
    "clip_value": (lambda one: _is_bound(one), "a finite number above 0, or None"),
    "accumulate": (lambda one: type(one) is int and one >= 1, "an integer of at least 1"),
    "watch": (lambda one: isinstance(one, int) and one >= 0, "True, False, or an interval in updates"),
    "trace": (lambda one: one is None or isinstance(one, bool), "True, False, or None"),
    "scheduler": (
        lambda one: one is None or (callable(getattr(one, "step", None)) and not isinstance(one, type)),
        "an object with step()",
    ),
}


def arguments(given: dict[str, Any]) -> None:
    """Raise UsageError for an argument of MixedPrecision that is out of range, or does not fit another."""
    for name, (is_allowed, allowed) in _ARGUMENTS.items():
        if not is_allowed(given[name]):
            raise refused(f"{name} is {given[name]!r}. Use {allowed}.")
    if isinstance(given["scheduler"], ReduceLROnPlateau):
        raise refused(
            "scheduler is a ReduceLROnPlateau, whose step needs a metric. Leave scheduler out, and call "
            "scheduler.step(metric) after each evaluation."
        )
    if given["release_gradients"] and given["clip_value"] is not None:
        raise refused(
            "release_gradients=True frees gradients before clip_value could clip them. Use clip_norm instead."
        )


def _is_bound(value: Any) -> bool:
    return value is None or (is_real(value) and math.isfinite(value) and value > 0)


def outside_autocast(loss: Tensor, policy: Policy, model: nn.Module, stored: str) -> None:
    """Warn of a loss that the policy, or a pattern, had no part in; weights `stored` in 16 bits may hide it."""
    low = [form for form in sorted(policy.computed) if activations_of(form) != "fp32"]
    ignored = [
        path or "the model" for path, inner in model.named_modules() if getattr(inner.forward, "ignored", 0)
    ]
    looks = low and stored == "fp32" and not was_entered(policy)
    nodes = list(nodes_of([loss])) if looks and not ignored else []
    if ignored:
        what = f"the policy's format of {', '.join(ignored[:3])} had no effect. Replace torch.autocast by mp.autocast"
    elif not looks or any(isinstance(node, BackwardCFunction) for node in nodes):  # compiled
        return
    elif any("ToCopy" in node.name() for node in nodes):
        what = "its formats are another autocast's, or the model's own. Replace torch.autocast by mp.autocast"
    else:
        what = f"nothing ran in {' or '.join(low)}. Compute it inside"
    told = f"MixedPrecision: the loss was computed outside mp.autocast(), so {what}"
    warnings.warn(f"{told}: with mp.autocast(): loss = loss_fn(model(x), y).", stacklevel=4)


def first_loss(loss: Tensor, accumulate: int, optimizer: Optimizer) -> None:
    """Warn of what an old loop did to the first loss: divided by `accumulate`, scaled, or its backward has run."""
    if has_gradient(optimizer):
        warnings.warn(
            "MixedPrecision: the parameters had gradients before the first step(loss), and its own are added to them. "
            "Remove loss.backward() from the loop, or call optimizer.zero_grad() before the first step(loss).",
            stacklevel=4,
        )
    node: Any = loss.grad_fn
    if not is_simple(loss) or node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return
    try:
        slope, other = node(torch.ones_like(loss))  # the derivatives of that operation alone
    except RuntimeError:  # its graph was freed: the backward pass raises the error that explains it
        return
    factor = float(slope) if slope is not None and other is None else 1.0
    if accumulate > 1 and "Div" in node.name() and math.isclose(factor * accumulate, 1.0, rel_tol=1e-6):
        done, by, twice = "divided", str(accumulate), f"step(loss) divides by accumulate={accumulate} again"
    elif (factor >= 1024 and math.frexp(factor)[0] == 0.5) or (factor != 1 and _is_of_scaler(node)):
        done, by = "multiplied", f"{factor:g}"
        twice = "step(loss) applies a loss scale itself, where one is needed"
    else:
        return
    warnings.warn(
        f"MixedPrecision: the loss was {done} by {by}, and {twice}. If it was done for that, remove it. If it has "
        f"another reason: warnings.filterwarnings('ignore', 'MixedPrecision: the loss was {done}').",
        stacklevel=4,
    )


def _is_of_scaler(node: Any) -> bool:
    """Whether a product is `GradScaler.scale`'s, with the scaler's own FP32 tensor (that of a number is FP64)."""
    scale = getattr(node, "_saved_other", None)
    if scale is None or scale.dim() or scale.dtype is not torch.float32:
        return False
    # Among all objects of the process; an object without a dict of its own is the referrer itself.
    holders = (getattr(one, "__dict__", one) for one in gc.get_referrers(scale))
    return any(type(one) is dict and "_growth_tracker" in one for one in holders)


def not_joined(model: nn.Module, setting: str) -> None:
    """Refuse a format that changes with this rank's number of steps: inside `join()` these numbers differ."""
    if any(map(joins, wrappers(model))):
        raise refused(
            f"inside model.join() the ranks take different numbers of steps, so with {setting} they could train in "
            f"different formats. Use another precision without {setting}, such as precision='bf16', or equally many "
            "batches on all ranks, without join()."
        )


def closed() -> NoReturn:
    """Instead of the `autocast` of a closed MixedPrecision."""
    raise CallOrderError("autocast(): this MixedPrecision is closed. Create a new one.")


def averager(ema: Any, *, low: bool) -> Callable[[nn.Module], Any] | None:
    """The function to call with the model after each step; UsageError for an average that can't be updated."""
    if ema is None:
        return None
    update = getattr(ema, "update_parameters", None if isinstance(ema, nn.Module) else ema)
    if not callable(update) or isinstance(ema, type):
        raise refused(
            f"ema has type {type(ema).__name__}. Use a torch.optim.swa_utils.AveragedModel, another object with "
            "update_parameters(model), or a function of the model."
        )
    for name, param in ema.named_parameters() if low and isinstance(ema, nn.Module) else ():
        if param.dtype in SIXTEEN_BITS:
            raise refused(
                f"ema has {name} in {name_of(param.dtype)}, which loses small updates. Convert it to FP32: ema.float()."
            )
    chosen: Callable[[nn.Module], Any] = update
    return chosen


def averaged(average: Any) -> int | None:
    """How many models torch's AveragedModel holds the mean of; None for another average, or a count on a device."""
    count = getattr(getattr(average, "__self__", None), "n_averaged", None)
    return int(count) if isinstance(count, Tensor) and count.device.type == "cpu" else None


def loss(given: Any) -> None:
    """Raise UsageError where backward can't start from a loss."""
    if not isinstance(given, Tensor):
        problem = f"has type {type(given).__name__}. Pass the tensor itself, without .item()."
    elif given.numel() != 1:
        problem = f"has shape {tuple(given.shape)}. Reduce it to one number: loss.mean()."
    elif not given.requires_grad:
        problem = (
            "does not require a gradient. Compute it from the model's output, without torch.no_grad() or detach(), "
            "with parameters that have requires_grad=True."
        )
    elif not given.is_floating_point():
        problem = f"is {name_of(given.dtype)}. It must be a real floating-point number."
    else:
        return
    raise UsageError(f"step(loss): the loss {problem}")
