"""Gradient averages of `DistributedDataParallel` with 16 bits per element on the wire.

`fully_shard` has this in its `MixedPrecisionPolicy(reduce_dtype=...)`. Gradients of several losses are added in FP32.
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.policy import Policy
from mezzo.pytorch.distributed import is_sharded, wrappers

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_sends: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # the format of each wrapper


def average_in(model: Any, format: str) -> None:
    """Let a `DistributedDataParallel` send gradients in `bf16` or `fp16`, and average them in FP32.

    Naive code, with N ranks::

        power = 2 ** ceil(log2(N))                      # at least N: a sum of N elements cannot overflow
        sent = (grad.float() / power).to(format)        # exact, but for the rounding to the format
        dist.all_reduce(sent)                           # adds in the format
        grad.copy_(sent.float() * (power / N))

    where `grad` is what one backward pass adds to `.grad`. It is added to earlier averages in FP32.

    All ranks get the same bits. The error of an element is at most N times u times the mean of the ranks' magnitudes,
    where u is the format's largest relative rounding error: 2**-8 in bf16, 2**-11 in fp16. Subnormal numbers of fp16
    add up to 2**-25 times `power`. NaN and infinity reach all ranks, and so does a gradient above fp16's largest number
    times `power`. Call it once per model.

    Raises:
        UsageError: a model that is not a `DistributedDataParallel`, or has a communication hook.
        UnknownNameError: another format.
    """
    _check(model, format)
    dtype, group = FORMATS[format], model.process_group
    size = dist.get_world_size(group)
    power = 2.0 ** math.ceil(math.log2(size))

    averaged: set[Tensor] = set()  # the parameters whose `.grad` is an average
    before: dict[Tensor, Tensor] = {}  # averages to which backward is adding

    def keep(param: Tensor, _: Any) -> None:
        before.pop(param, None)
        if param in averaged and param.grad is not None:
            before[param] = param.grad.clone()
        averaged.discard(param)

    def average(state: Any, bucket: Any) -> Any:
        grads: Tensor = bucket.buffer()
        of_parts = zip(bucket.parameters(), bucket.gradients())
        earlier = [(part, before.pop(param)) for param, part in of_parts if param in before]
        averaged.update(bucket.parameters())
        for part, kept in earlier:
            part.sub_(kept)
        sent = (grads.float() / power).to(dtype)
        grads.zero_()
        for part, kept in earlier:
            part.copy_(kept)
        reduced = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return reduced.then(lambda done: grads.add_(done.value()[0].float() * (power / size)))

    average.__annotations__ = {}  # DDP compares them with its own types, which must not be strings
    model.register_comm_hook(None, average)
    for param in filter(lambda one: one.requires_grad, model.parameters()):
        get_gradient_edge(param).node.register_prehook(partial(keep, param))
    _sends[model] = format


def _check(model: Any, format: str) -> None:
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            f"average_in: the model has type {type(model).__name__}, not DistributedDataParallel. Wrap it first: model "
            "= torch.nn.parallel.DistributedDataParallel(model). For fully_shard use "
            "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
        )
    if format not in FORMATS:
        raise unknown_name("format", format, tuple(FORMATS), where="average_in: ")
    if model._comm_hooks:
        raise UsageError(
            "average_in: this DistributedDataParallel has a communication hook already, and can have only one. Remove "
            "that hook, or the call of average_in, or reduce= from the policy."
        )


def to_average(model: nn.Module, policy: Policy) -> list[Any]:
    """Every `DistributedDataParallel` of a model that ``reduce=`` of the policy is for, and has not reached yet.

    Raises:
        UsageError: `average_in` would raise it for one of them, or the model is sharded.
    """
    if policy.reduce == "fp32":
        return []
    if is_sharded(model):
        raise UsageError(
            f"policy '{policy}': fully_shard reduces gradients itself. Remove reduce={policy.reduce}, and use "
            f"fully_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype={FORMATS[policy.reduce]}))."
        )
    new = [wrapper for wrapper in wrappers(model) if _sends.get(wrapper) != policy.reduce]
    for wrapper in new:
        _check(wrapper, policy.reduce)
    return new
