"""Gradient release: the optimizer's step inside backward, so that only one gradient is alive at a time.

A hook updates a parameter as soon as its gradient is complete, and frees the gradient (K. Lv et al., "Full Parameter
Fine-tuning for Large Language Models with Limited Resources", 2023). Clipping and loss scales need all gradients first:
then backward runs twice over one graph, first to sum squares, then to update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from mezzo.core.errors import UsageError
from mezzo.pytorch import distributed, loss_scaler
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.step import StepOutcome, decide, no_gradient
from mezzo.pytorch.training.backward import backward_into, has_reentrant_checkpoint, set_aside


class GradientRelease:
    """Backward that updates each parameter as its gradient arrives, with the bits of a step after backward.

    Except where backward draws random numbers itself or adds in no fixed order. A parameter that another op's backward
    saved under `detach()` changes too early; PyTorch then raises.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self._reentrant: bool | None = None

    @staticmethod
    def check_model(model: nn.Module) -> None:
        """Raise UsageError for DistributedDataParallel, which reduces gradients after the hooks have run."""
        for name, module in model.named_modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise UsageError(
                    f"release_gradients=True: {name or 'the model'} is a DistributedDataParallel, which averages "
                    "gradients after they are freed. Use fully_shard (FSDP2), or release_gradients=False."
                )

    def backward(
        self,
        loss: Tensor,
        seed: Tensor | None,
        params: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        clip_norm: float | None = None,
        began: Tensor | None = None,
    ) -> StepOutcome:
        """Backward of one loss, and the optimizer's step; afterwards no parameter has a gradient.

        `clip_norm`, and `scale` (change nothing if a gradient is not finite), take two passes. Where backward raises,
        the parameters whose gradients had come are updated; in the first of two passes, none is.
        """
        if self._reentrant is None:
            self._reentrant = has_reentrant_checkpoint(loss)
        if self._reentrant:
            raise UsageError(
                "release_gradients=True: torch.utils.checkpoint(..., use_reentrant=True) computes a shared weight's "
                "gradient in pieces. Use torch.utils.checkpoint(..., use_reentrant=False)."
            )
        leaves = list(dict.fromkeys(param for param in params if param.requires_grad))
        found = norm = by = None
        multiplier = None if scale is None else loss_scaler.inverse(scale)
        if scale is not None or clip_norm is not None:
            ranks = distributed.ranks_of(leaves)
            sums = self._sums_of_squares(loss, seed, leaves, ranks)
            found, multiplier, norm, by = decide(
                *sums, multiplier, clip_norm, ranks, looks=scale is not None, began=began
            )
            if found is not None and loss_scaler.reading_is_free(found) and bool(found):
                _clear(leaves)
                return StepOutcome(found, True, norm, by)
        self._step_within(loss, seed, leaves, multiplier, found, seen=norm is not None)
        torch.clear_autocast_cache()  # the optimizer's hooks, which do it, have not run
        return StepOutcome(found, False if found is None else found, norm, by)

    def _sums_of_squares(
        self, loss: Tensor, seed: Tensor | None, leaves: Sequence[Tensor], ranks: distributed.Ranks
    ) -> tuple[Tensor, Tensor]:
        """The first pass, over the gradients of the second: as `own_squares`. Leaves `.grad` as it was."""
        before = {param: param.grad for param in leaves}
        sums: dict[Tensor, Tensor] = {}

        def add(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is None:
                return
            if grad.layout is not torch.strided:
                checks.gradient(grad, param, type(self._optimizer).__name__)
            accumulated = before[param]
            if accumulated is not None:
                grad = accumulated + grad
            sums[param] = sum_of_squares([distributed.local(grad.detach())])

        with set_aside(leaves), _hooked(leaves, add):
            _backward(loss, seed, leaves, first=True)
        for param, grad in before.items():
            if grad is not None and param not in sums:
                sums[param] = sum_of_squares([distributed.local(grad)])
        if not sums:
            raise no_gradient(self._optimizer)
        device = next(iter(sums.values())).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        each = torch.stack([sums.get(param, zero).to(device) for param in leaves])
        counted = torch.tensor([ranks.counts(param) for param in leaves], device=device)
        return each.sum(), each.where(counted, zero).sum()

    def _step_within(
        self,
        loss: Tensor,
        seed: Tensor | None,
        leaves: Sequence[Tensor],
        multiplier: Tensor | None,
        found_inf: Tensor | None,
        *,
        seen: bool,
    ) -> None:
        lock = threading.Lock()  # the engine has a thread for each device
        stepped = False

        def update(params: Sequence[Tensor]) -> None:
            nonlocal stepped
            with lock:
                self._optimizer.step_parameters(params, multiplier=multiplier, found_inf=found_inf)
                stepped = True
            _clear(params)

        with _hooked(leaves, lambda param: update([param])):
            _backward(loss, seed, leaves, seen=seen)
        rest = [param for param in leaves if param.grad is not None]  # this loss did not reach them
        if rest:
            update(rest)
        if not stepped:
            raise no_gradient(self._optimizer)


@contextmanager
def _hooked(params: Sequence[Tensor], act: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `act` on each parameter when its gradient is complete."""
    with ExitStack() as handles:
        for param in params:
            handles.enter_context(param.register_post_accumulate_grad_hook(act))
        yield


def _backward(
    loss: Tensor, seed: Tensor | None, leaves: Sequence[Tensor], *, first: bool = False, seen: bool = False
) -> None:
    if any(distributed.is_spread(param) for param in leaves):
        # FSDP2's graph ends in the gathered parameters, and it hands their gradients to the shards itself.
        torch.autograd.backward(loss, seed, retain_graph=first)
    else:
        backward_into(loss, seed, list(leaves), retain_graph=first, seen=seen)


def _clear(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None
