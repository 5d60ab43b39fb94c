"""The step engine: from the gradients of one optimizer to a step that is taken, or skipped without a trace.

`step_in_place` and `step_fused` unscale, look for NaN and infinity (`found_inf`), clip, and call `take`, which decides
whether host or device knows of a skip. `mezzo.GradScaler` and `mezzo run` call the parts: there the script steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch import distributed, loss_scaler
from mezzo.pytorch.distributed import ALONE, Ranks
from mezzo.pytorch.loss_scaler import inverse
from mezzo.pytorch.optim import checks
from mezzo.pytorch.snapshot import OptimizerSnapshot


@dataclass(slots=True)
class StepOutcome:
    """What an optimizer step did."""

    found_inf: Tensor | None  # 0-dim FP32, 0.0 where every gradient was finite; None if not checked
    skipped: Tensor | bool  # a tensor where only the device knows
    grad_norm: Tensor | None  # 0-dim 2-norm of the unscaled gradients before clipping; None if not needed
    by: Tensor | None = None  # which ranks found something, as in `Agreement`; None on one rank


def step_in_place(
    optimizer: Optimizer,
    scale: Tensor | None,
    rescale: float = 1.0,
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    host_must_know: bool = False,
    ranks: Ranks = ALONE,
    began: Tensor | None = None,
) -> StepOutcome:
    """The step of any optimizer: unscale, check and clip in `.grad`, then call `optimizer.step()`.

    `ranks` decide together; `began` as in `Ranks.agreed`.
    """
    params = [param for param in parameters(optimizer) if param.grad is not None]
    if not params:
        raise no_gradient(optimizer)
    if scale is None and rescale == 1.0 and clip_value is None and clip_norm is None and not ranks:
        return StepOutcome(None, take(optimizer, None), None)  # nothing to do to the gradients
    grads, found = gradients_of(params), None
    if scale is not None:
        found = combined(unscale_(grads, _inverse(scale, rescale)).values(), scale.device)
    elif rescale != 1.0:
        with torch.no_grad():
            torch._foreach_mul_(grads, rescale)
    found, norm, by = clip_(params, grads, found, clip_value, clip_norm, ranks, began)
    return StepOutcome(found, take(optimizer, found, host_must_know=host_must_know), norm, by)


def step_fused(
    optimizer: Optimizer,
    scale: Tensor | None,
    rescale: float = 1.0,
    *,
    clip_norm: float | None = None,
    host_must_know: bool = False,
    ranks: Ranks = ALONE,
    began: Tensor | None = None,
) -> StepOutcome:
    """The step of a `FusedOptimizer`, whose kernel unscales and clips what it reads: `.grad` is not written.

    Naive code::

        inv_scale = rescale / scale
        norm = inv_scale * sqrt(sum((g.double() ** 2).sum() for g in grads))
        found_inf = not isfinite(norm)
        optimizer.step(multiplier=inv_scale * min(1, clip_norm / (norm + 1e-6)), found_inf=found_inf)

    The sum of squares is FP64, so it is finite if and only if every gradient is. It is computed only where needed.
    """
    params = list(parameters(optimizer))
    first = next((param.grad for param in params if param.grad is not None), None)
    if first is None:
        raise no_gradient(optimizer)
    found = norm = multiplier = by = None
    device = first.device if scale is None else scale.device
    if scale is not None:
        multiplier = _inverse(scale, rescale)
    elif rescale != 1.0:
        multiplier = torch.full((), rescale, device=device)
    if scale is not None or clip_norm is not None:
        for param in params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                checks.gradient(param.grad, param, type(optimizer).__name__)
        sums, counted = (one.to(device, non_blocking=True) for one in distributed.own_squares(params, ranks))
        found, multiplier, norm, by = decide(
            sums, counted, multiplier, clip_norm, ranks, looks=scale is not None, began=began
        )
    skipped = take(optimizer, found, host_must_know=host_must_know, multiplier=multiplier)
    return StepOutcome(found, skipped, norm, by)


def decide(
    sums: Tensor,
    counted: Tensor,
    multiplier: Tensor | None,
    clip_norm: float | None,
    ranks: Ranks,
    *,
    looks: bool,
    began: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """found_inf (None unless `looks`), the multiplier that also clips, the norm, and `Agreement.by`.

    From the sum of squares of this rank's gradients, and of those that it counts; all ranks get the same.
    """
    found = 1.0 - sums.isfinite().float() if looks else None
    found, squares, by = ranks.agreed(found, counted.reshape(1), began)
    norm = squares[0].sqrt()
    if multiplier is not None:
        norm = norm * multiplier
    if clip_norm is not None and clip_norm < math.inf:
        # As torch.nn.utils.clip_grad_norm_: a factor of 1 is multiplied in rather than branched on.
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        multiplier = (factor if multiplier is None else factor * multiplier).float()
    return found, multiplier, norm.float(), by


def take(
    optimizer: Optimizer, found_inf: Tensor | None, *, host_must_know: bool = False, **kwargs: Any
) -> Tensor | bool:
    """Call `optimizer.step(**kwargs)` unless `found_inf` (0-dim FP32; None steps); return whether it was skipped."""
    if found_inf is None:
        optimizer.step(**kwargs)
        return False
    host_knows = host_must_know or loss_scaler.reading_is_free(found_inf)
    if not host_knows and can_skip_on_device(optimizer):
        step_on_device(optimizer, found_inf, **kwargs)
        return found_inf
    skipped = bool(found_inf)
    if not skipped:
        optimizer.step(**kwargs)
    return skipped


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether this optimizer, in its present state, leaves no trace of a step that its device skips.

    Not a fused SGD with momentum before its first step: torch 2.13 allocates the momentum with `empty_like` and leaves
    it uninitialized if that step is skipped.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not isinstance(optimizer, SGD):
        return True
    return not any(
        group["momentum"] != 0
        and any(
            param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
            for param in group["params"]
        )
        for group in optimizer.param_groups
    )


def step_on_device(
    optimizer: Any, found_inf: Tensor, *args: Any, grad_scale: Tensor | None = None, **kwargs: Any
) -> Any:
    """Call `optimizer.step`, which does nothing where `found_inf` (0-dim FP32) is not 0, as PyTorch's protocol says."""
    own = getattr(optimizer, "grad_scale", None)
    if own is not None:
        grad_scale = own if grad_scale is None else grad_scale * own
    optimizer.grad_scale = grad_scale
    optimizer.found_inf = found_inf
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradients_of(params: Iterable[Tensor], *, allow_fp16: bool = False) -> list[Tensor]:
    """The tensors that hold the gradients' numbers on this rank, to be written to; a sparse gradient is coalesced."""
    found = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.dtype is torch.float16 and not allow_fp16:
            raise UsageError(
                "cannot unscale an fp16 gradient: its small values would become zero. The weights are fp16, for "
                "example after model.half(). Keep them in FP32, and compute in fp16 with mezzo.autocast('fp16'). For "
                "fp16 weights use a mezzo.optim optimizer with mezzo.MixedPrecision(clip_norm=...), or with "
                "scaler.step(optimizer) and without scaler.unscale_(optimizer)."
            )
        if grad.is_sparse:
            # Entries of one index can be finite apart and overflow together, and a norm is of their sums.
            param.grad = grad = grad.coalesce()
            grad = grad._values()
        elif distributed.is_spread(grad):
            param.grad = grad = distributed.summed(grad)
            grad = distributed.local(grad)
        if grad.is_complex():  # its two numbers each, which PyTorch's check and clips need
            param.grad = grad = grad.resolve_conj()
            grad = torch.view_as_real(grad)
        found.append(grad)
    return found


def numbers_of(grad: Tensor) -> Tensor:
    """The numbers that a gradient of any layout holds on this rank, as a strided tensor, to be read only."""
    grad = distributed.local(grad)
    if grad.layout is torch.strided and not grad.is_nested:
        return grad
    return grad._values() if grad.is_sparse else grad.values()


def check_finite(optimizer: Optimizer) -> bool:
    """Whether every `.grad` that the optimizer would read now is finite. Writes nothing; waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in parameters(optimizer):
        grad = param.grad
        if grad is not None and not grad.is_meta:
            grad = grad.detach() if grad.requires_grad else grad  # cheaper than `no_grad` around it all
            by_device.setdefault(grad.device, []).append(numbers_of(grad))
    for device, grads in by_device.items():
        norms = torch._foreach_norm(grads)
        if device.type != "cpu":
            norms = (torch.stack(norms).sum(),)  # one wait for the device
        # A norm may overflow where no gradient does: then an exact look decides.
        are_finite = all(math.isfinite(norm.item()) for norm in norms)
        if not are_finite and not all(bool(grad.isfinite().all()) for grad in grads):
            return False
    return True


def unscale_(
    grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor | None = None
) -> dict[torch.device, Tensor]:
    """Multiply gradients in place by `inv_scale`; returns device -> 0-dim FP32, 1.0 where a gradient was not finite."""
    grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        grouped.setdefault((grad.device, grad.dtype), []).append(grad)
    found: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _), group in grouped.items():
            if device not in found:
                if found_inf is not None and found_inf.device == device:
                    found[device] = found_inf
                else:
                    found[device] = torch.zeros((), dtype=torch.float32, device=device)
            inverse_here = inv_scale.to(device, non_blocking=True)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found[device], inverse_here)
    return found


def combined(found: Iterable[Tensor], device: torch.device) -> Tensor:
    """One number on one device out of each device's: 0.0 where all were finite, 1.0 otherwise."""
    flags = [flag.to(device, non_blocking=True) for flag in found]
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


@torch.no_grad()
def clip_(
    params: list[Tensor],
    grads: list[Tensor],
    found: Tensor | None,
    clip_value: float | None,
    clip_norm: float | None,
    ranks: Ranks = ALONE,
    began: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Clip unscaled gradients in place; returns found_inf, the total 2-norm before, and `Agreement.by`, of all ranks.

    `grads` are of `params`. The norm is 0-dim, or None without `clip_norm`.
    """
    counted = [grad for grad, param in zip(grads, params) if ranks.counts(param)]
    norms = [] if clip_norm is None else [_total_norm(counted)]
    if clip_value is not None:
        if whole := [param for param, grad in zip(params, grads) if param.grad is grad]:  # of none it raises
            torch.nn.utils.clip_grad_value_(whole, clip_value)
        for param, grad in zip(params, grads):
            if param.grad is not grad:  # a part, or values, of `.grad`
                grad.clamp_(-clip_value, clip_value)
        norms += [_total_norm(counted) for _ in norms]
    by = None
    if ranks and (norms or found is not None):
        at = grads[0].device if found is None else found.device
        squares = torch.stack([norm.to(at).double().square() for norm in norms]) if norms else None
        found, squares, by = ranks.agreed(found, squares, began)
        norms = list(squares.sqrt().float())
    if clip_norm is not None and clip_norm < math.inf:
        factor = (clip_norm / (norms[-1] + 1e-6)).clamp(max=1.0)
        for device in dict.fromkeys(grad.device for grad in grads):
            group = [grad for grad in grads if grad.device == device]
            torch._foreach_mul_(group, factor.to(device, non_blocking=True))
    return found, norms[0] if norms else None, by


def _total_norm(grads: list[Tensor]) -> Tensor:
    """`torch.nn.utils.get_total_norm(grads)`, but for its slow look at where they are."""
    if len({grad.device for grad in grads}) != 1:
        return torch.nn.utils.get_total_norm(grads)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return norm


def _inverse(scale: Tensor, rescale: float) -> Tensor:
    return inverse(scale) if rescale == 1.0 else inverse(scale) * rescale


def no_gradient(optimizer: Optimizer) -> UsageError:
    """The error where no parameter of an optimizer has a gradient; raises a better one that applies."""
    checks.refuse_replaced(optimizer)
    if distributed.is_distributed():
        return UsageError(
            f"step(): on rank {torch.distributed.get_rank()}, no parameter of this optimizer got a gradient, and the "
            "other ranks wait for this rank's part. Compute the loss of every rank from the model. For a rank without "
            "data: loss = 0.0 * model(example).sum(). With fully_shard, call model.set_requires_gradient_sync(True) "
            "before the last loss of a window."
        )
    return UsageError(
        "step(): no parameter of this optimizer got a gradient, so the loss does not depend on them. Check that model "
        "and optimizer belong together: optimizer = torch.optim.AdamW(model.parameters())."
    )


class AbandonedStepError(BaseException):
    """Leaves `optimizer.step` from within. No `except Exception` may swallow it."""


def step_with_closure(
    optimizer: Optimizer,
    step: Callable[[Callable[..., Any]], Any],
    evaluate: Callable[..., tuple[Any, bool]],
    back_off: Callable[[Any], bool],
    *,
    copies: bool = True,
) -> tuple[Any, bool]:
    """A step whose closure runs again at a smaller scale until its gradients are finite; else the step is undone.

    Returns what `step` returned and False, or the last loss and True if it was skipped. `evaluate` runs the user's
    closure and tells whether all gradients are finite; `back_off` gets the loss, and is False where no smaller scale
    helps. Both give the same answer on all ranks.
    """
    before = OptimizerSnapshot(optimizer) if copies else None  # weights may move before the closure is called
    loss: Any = None

    def closure(*args: Any, **kwargs: Any) -> Any:
        nonlocal loss
        while True:
            loss, finite = evaluate(*args, **kwargs)
            if finite:
                return loss
            if not back_off(loss):
                raise AbandonedStepError

    try:
        return step(closure), False
    except AbandonedStepError:
        if before is not None:
            before.restore()
            optimizer.zero_grad()  # as the step may do at its end
        return loss, True


def is_finite(loss: Any) -> bool:
    """Whether a loss is finite; True where it has no value, as None."""
    try:
        return bool(torch.as_tensor(loss).isfinite().all())
    except (TypeError, ValueError, RuntimeError):
        return True
