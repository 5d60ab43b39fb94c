"""From losses to the gradients of one optimizer: backward, accumulation, FP32 sums of 16-bit gradients.

In bf16 the 257th of equal terms no longer changes a sum. `p.grad_dtype` (torch 2.10) makes PyTorch's engine keep the
sum in FP32. DistributedDataParallel and `fully_shard` assign gradients in the parameters' format after they reduced
them, so there FP32 sums are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from mezzo.core.errors import CallOrderError, UsageError
from mezzo.pytorch.distributed import averages_others, is_spread, wrappers
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.step import numbers_of, parameters

_BACKWARD = torch.autograd.backward  # PyTorch's: `mezzo run` replaces it, to record losses
_run_backward = torch.autograd.Variable._execution_engine.run_backward
_AccumulateGrad: Any = type(torch.autograd.graph.get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def backward_into(
    loss: Tensor, seed: Tensor | None, params: list[Tensor], *, retain_graph: bool = False, seen: bool = False
) -> None:
    """Add d(loss)/d(p) * seed to `p.grad` of each p of `params`, and of no other leaf.

    A discriminator's loss reaches the generator too, whose next step must not see it. `seed` None stands for 1.
    `seen`: this loss's backward ran before, so `mezzo run` has recorded it.
    """
    if (seen or torch.autograd.backward is _BACKWARD) and is_simple(loss):
        run_simple(loss, torch.ones_like(loss) if seed is None else seed, params, retain_graph=retain_graph)
    else:
        torch.autograd.backward(loss, seed, retain_graph=retain_graph, inputs=params)


def is_simple(loss: Any) -> bool:
    """Whether `run_simple` may take this loss: a plain tensor, outside of modes, transforms and compilers."""
    return (
        type(loss) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.overrides.has_torch_function_unary(loss)  # of a plain tensor: a function mode is active
        and torch._C._functorch.get_interpreter_stack() is None
    )


def run_simple(
    loss: Tensor, seed: Tensor, params: Sequence[Tensor] = (), *, retain_graph: bool = False
) -> None:
    """What `torch.autograd.backward` calls, without its checks: 20 microseconds. No `params`: all leaves."""
    _run_backward(
        (loss,), (seed,), retain_graph, False, tuple(params), allow_unreachable=True, accumulate_grad=True
    )


def in_transform(kind: str) -> bool:
    """Whether a `torch.func` transform of this kind is active: Grad, Vmap, ..."""
    return any(one.key().name == kind for one in torch._C._functorch.get_interpreter_stack() or ())


def has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether the graph of a loss has a `torch.utils.checkpoint` with `use_reentrant=True`."""
    # Its backward runs another backward, and refuses to when only some inputs are asked for.
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes_of([loss]))


def leaves_of(roots: Iterable[Any]) -> list[Tensor]:
    """Every leaf tensor that a backward from these tensors or edges reaches, once each."""
    return [node.variable for node in nodes_of(roots) if type(node) is _AccumulateGrad]


def nodes_of(roots: Iterable[Any]) -> dict[Any, None]:
    """Every node of the graph, in the order in which they are found."""
    stack: list[Any] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            stack.append(root.node)
        elif isinstance(root, Tensor) and root.requires_grad:
            stack.append(root.grad_fn or torch.autograd.graph.get_gradient_edge(root).node)
    seen = dict.fromkeys(stack)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                stack.append(following)
    return seen


class OptimizerBackward:
    """Accumulates a loss's gradients into the parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer, self._model = optimizer, model
        self.wrappers: list[Any] = []
        self._shares = False  # whether one of them averages gradients of others, too
        self._whole: bool | None = None  # whether backward must run through the whole graph

    @property
    def reduces(self) -> bool:
        """Whether ranks reduce the gradients of the last call of the model, which was not in `no_sync()`."""
        return all(part.require_forward_param_sync for part in self.wrappers)

    def params(self) -> list[Tensor]:
        """The parameters that get gradients; UsageError if there are none."""
        params = [p for p in parameters(self._optimizer) if p.requires_grad]
        if not params:
            raise UsageError(
                "step(): no parameter of the optimizer requires a gradient. Unfreeze some: param.requires_grad_(True)."
            )
        return params

    def __call__(
        self, loss: Tensor, seed: Tensor | None, others: Iterable[Tensor], *, retain_graph: bool
    ) -> None:
        """As `backward_into`; where the whole graph must run (the first loss decides) `others` keep their gradients.

        That is with reentrant checkpoints, under `fully_shard`, whose graph ends in gathered parameters: it hands
        their gradients to the shards itself, and where an optimizer has a part of what a `DistributedDataParallel`
        averages: that waits for the gradients of all its parameters.
        """
        params = self.params()
        if self._whole is None:
            self.wrappers = wrappers(self._model)
            self._shares = any(averages_others(one, params) for one in self.wrappers)
            self._whole = self._shares or any(map(is_spread, params)) or has_reentrant_checkpoint(loss)
        if self._shares and retain_graph:
            raise UsageError(
                "step(retain_graph=True): this optimizer has a part of what a DistributedDataParallel averages, in the "
                "first backward after a call only. Call the model once for each MixedPrecision, or use one optimizer: "
                "torch.optim.AdamW([{'params': a.parameters(), 'lr': 1e-3}, {'params': b.parameters(), 'lr': 1e-4}])."
            )
        if not self._whole:
            backward_into(loss, seed, params, retain_graph=retain_graph)
            return
        mine = set(map(id, params))
        shared = self._model.parameters() if self._shares else ()
        with set_aside(p for p in (*others, *shared) if id(p) not in mine):
            torch.autograd.backward(loss, seed, retain_graph=retain_graph)


@contextmanager
def set_aside(others: Iterable[Tensor]) -> Iterator[None]:
    """Let these parameters keep their gradients, whatever a backward through the whole graph adds to them."""
    before = [(p, p.grad) for p in others]
    for other, _ in before:
        other.grad = None
    try:
        yield
    finally:
        for other, grad in before:
            other.grad = grad


@dataclass
class Accumulation:
    """The losses between two optimizer steps: `seen` of `accumulate`, each divided by that number.

    `scale` (0-dim FP32, or None) multiplied each of them; `loss` is the last one, detached.
    """

    accumulate: int
    seen: int = 0
    scale: Tensor | None = None
    loss: Tensor | None = None
    noted: tuple[Tensor, Tensor, int] | None = None  # a parameter, its `.grad`, and the version of that

    def note(self, optimizer: Optimizer) -> None:
        """Note what the window has in `.grad`, for `check`."""
        found = ((p, p.grad, p.grad._version) for p in parameters(optimizer) if p.grad is not None)
        self.noted = next(found, None)

    def check(self, optimizer: Optimizer) -> bool:
        """Whether scaled gradients were written in place since `note`; CallOrderError if all were dropped or zeroed."""
        noted, self.noted = self.noted, None
        if noted is None or (noted[0].grad is noted[1] and noted[1]._version == noted[2]):
            return False
        if not has_gradient(optimizer):  # read only where something was changed
            raise CallOrderError(
                "step(): the gradients of this window's earlier losses were cleared. Remove optimizer.zero_grad() or "
                "model.zero_grad() from the loop: MixedPrecision clears gradients itself, after each update."
            )
        return self.scale is not None and noted[0].grad is noted[1]

    def refuse_step(self, optimizer: Optimizer) -> None:
        """Raise CallOrderError for a step of the optimizer before the window's end, unless all gradients are 0."""
        if has_gradient(optimizer):  # a checkpoint has states created by a step of zeros
            scaled = "" if self.scale is None else ", multiplied by the loss scale"
            raise CallOrderError(
                f"optimizer.step(): {self.seen} of {self.accumulate} losses are accumulated, and this would apply "
                f"their gradients{scaled}. Remove optimizer.step() from the loop: mp.step(loss) steps the optimizer "
                f"after {self.accumulate} losses, and mp.flush() after fewer. Nothing was changed."
            )

    def begin(self, loss: Tensor, scale: Tensor) -> None:
        """Take the scale of this window's losses, if the loss is its first."""
        if self.seen == 0:
            # A seed of 2**16 is infinite in fp16, and would cost a skipped step before anything was computed.
            self.scale = scale.clamp(max=2.0**15) if loss.dtype is torch.float16 else scale

    def seed(self, loss: Tensor) -> Tensor | None:
        """The seed of a loss's backward, `scale / accumulate` in its dtype and shape; None for 1."""
        if self.scale is not None:
            seed = (self.scale.to(loss.device) / self.accumulate).to(loss.dtype)
            return torch.ones_like(loss) * seed if is_spread(loss) else seed.expand_as(loss)
        return torch.full_like(loss, 1.0 / self.accumulate) if self.accumulate > 1 else None

    @property
    def rescale(self) -> float:
        """`accumulate / seen`: makes the sum of a short window follow the mean of its losses."""
        return self.accumulate / self.seen

    def scale_over(self, divisor: float) -> Tensor | float:
        """Of `accumulate`: what `seed` multiplies with. Of `rescale`: how many times the sums are too large."""
        scale = 1.0 if self.scale is None else self.scale
        return scale if divisor == 1 else scale / divisor  # a division by 1 takes time, too


def has_gradient(optimizer: Optimizer) -> bool:
    """Whether a gradient is not 0; waits for the device."""
    return any(p.grad is not None and bool(numbers_of(p.grad).any()) for p in parameters(optimizer))


class Gradients:
    """A window's gradients, as PyTorch keeps them, or as FP32 sums: in the engine, or apart where ranks reduce them."""

    def __init__(self, *, fp32: bool = False, reduced: bool = False) -> None:
        self._in_engine, self._apart = fp32 and not reduced, fp32 and reduced
        self._changed: dict[int, tuple[Tensor, torch.dtype | None]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._own = False  # whether sums have gradients of this rank alone, of DDP's `no_sync()`

    def cover(self, optimizer: Optimizer) -> None:
        """Prepare for a window's first backward: the engine's gradients become FP32, also those that are there."""
        for param in parameters(optimizer) if self._in_engine else ():
            self._widen(param)

    def _widen(self, param: Tensor) -> None:
        if id(param) not in self._changed and param.dtype in SIXTEEN_BITS:
            self._changed[id(param)] = (param, param.grad_dtype)
            _set_dtype(param, torch.float32)

    def hand_over(self) -> None:
        """Before ranks reduce a loss's gradients: have them reduce this rank's own sums too, rounded once."""
        if self._own:
            for param, total in self._sums.values():
                param.grad = total.to(param.dtype)
            self._sums.clear()

    def take(self, optimizer: Optimizer, *, reduced: bool) -> None:
        """Add the 16-bit gradients of one loss to sums that are kept apart, and drop them."""
        self._own = not reduced
        for param in parameters(optimizer) if self._apart else ():
            if param.grad is not None and param.dtype in SIXTEEN_BITS:
                grad, param.grad = param.grad.detach(), None
                total = self._sums.get(id(param))
                self.put(param, grad if total is None else total[1].add_(grad))

    def give(self) -> None:
        """Put the sums into `.grad`, for the optimizer step."""
        for param, total in self._sums.values():
            self._widen(param)
            param.grad = total

    def of(self, param: Tensor) -> Tensor | None:
        """A parameter's gradient so far."""
        return self._sums.get(id(param), (param, param.grad))[1]

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Go on from a gradient that `of` gave."""
        if grad is None or not self._apart or param.dtype not in SIXTEEN_BITS:
            param.grad = grad
        else:
            self._sums[id(param)] = (param, grad.to(torch.float32))

    def clear(self) -> None:
        """Drop the sums, and put every parameter's `grad_dtype` back: others, too, assign gradients between windows."""
        for param, _ in self._sums.values():
            param.grad = None
        self._sums.clear()
        for param, before in self._changed.values():
            _set_dtype(param, before)
        self._changed.clear()


def _set_dtype(param: Tensor, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)
