"""Agreement of all ranks in a process group: either every rank skips a step or none does, and all clip by one norm.

Every rank has the whole gradient of a replicated parameter, and a part of the gradient of a `DTensor`. One gather of a
few numbers serves both: all ranks compute the same sum in the same order, to the bit, and a NaN on one is a NaN on all.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.pytorch.kernels import gradient_norm

_Layout = tuple[Any, tuple[int, ...]]
"""How a parameter is spread over ranks: its DeviceMesh, and the dimensions of the mesh over which it is cut."""


def agreed(
    found_inf: Tensor | None, sum_of_squares: Tensor, params: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor]:
    """The largest `found_inf` (None: not checked) and the sum of squares over all shards; 0-dim, equal on all ranks."""
    if not is_distributed():
        return found_inf, (sum_of_squares if sum_of_squares.dim() == 0 else sum_of_squares.sum())
    members = _members(params)
    if sum_of_squares.dim() == 0:
        sums = [sum_of_squares]
    else:
        at = sum_of_squares.device
        sums = [sum_of_squares[torch.tensor(indices, device=at)].sum() for indices in members.values()]
    device = sum_of_squares.device
    found = torch.zeros((), device=device) if found_inf is None else found_inf.to(device)
    everyone = _gathered(torch.stack([found.double(), *(one.double() for one in sums)]))

    totals = [_total(everyone[:, i], layout) for i, layout in enumerate(members, start=1)]
    total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    if any(layout is not None and layout[0].size() < dist.get_world_size() for layout in members):
        # Other ranks have summed over other copies of the shards.
        total = _gathered(total.reshape(1)).amax()
    agreed_found = everyone[:, 0].amax().to(found.dtype)
    return (None if found_inf is None else agreed_found.to(found_inf.device)), total


def agreed_largest(value: Tensor, group: Any = None) -> Tensor:
    """The largest of all ranks' 0-dim numbers, bit-equal on all ranks of the group; NaN if one is NaN."""
    if not is_distributed(group):
        return value
    return _gathered(value.reshape(1), group).amax()


def own_sum_of_squares(params: Sequence[Tensor]) -> Tensor:
    """This rank's FP64 sum of squares of `.grad`: 0-dim, or ``(len(params),)`` where not all are spread alike."""
    grads = [None if param.grad is None else local(param.grad) for param in params]
    first = next((grad.device for grad in grads if grad is not None), torch.device("cpu"))
    if is_distributed() and len(_members(params)) > 1:
        zero = torch.zeros((), dtype=torch.float64, device=first)
        sums = [zero if grad is None else gradient_norm.sum_of_squares([grad]).to(first) for grad in grads]
        return torch.stack(sums)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        if grad is not None:
            by_device[grad.device].append(grad)
    sums = [gradient_norm.sum_of_squares(some).to(first) for some in by_device.values()]
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def local(tensor: Tensor) -> Tensor:
    """The part of a `DTensor` that this rank holds, summed first where it is `Partial`; any other tensor itself."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    if any(placement.is_partial() for placement in spread.placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if placement.is_partial() else placement for placement in spread.placements]
        spread = spread.redistribute(placements=whole)
    part: Tensor = spread.to_local()
    return part


def is_distributed(group: Any = None) -> bool:
    """Whether there is a process group with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # imported, if any DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def _members(params: Sequence[Tensor]) -> dict[_Layout | None, list[int]]:
    """The parameters' indices by how they are spread, in order of first appearance."""
    members: dict[_Layout | None, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        members[_layout(param)].append(index)
    return members or {None: []}


def _layout(param: Tensor) -> _Layout | None:
    if not is_spread(param):
        return None
    spread: Any = param
    sharded = tuple(i for i, placement in enumerate(spread.placements) if not placement.is_replicate())
    return (spread.device_mesh, sharded) if sharded else None


def _gathered(own: Tensor, group: Any = None) -> Tensor:
    """``(ranks, n)``: every rank's `n` numbers."""
    everyone = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(everyone.unbind(0)), own.contiguous(), group=group)
    return everyone


def _total(of_ranks: Tensor, layout: _Layout | None) -> Tensor:
    """From the ranks' own sums to the whole: over shards the sum, over copies (which are equal) the largest."""
    if layout is None:
        return of_ranks.amax()
    ranks, sharded = layout[0].mesh, layout[1]
    of_mesh = of_ranks[ranks.flatten().to(of_ranks.device)].view(tuple(ranks.shape))
    copies = [i for i in range(of_mesh.dim()) if i not in sharded]
    return (of_mesh.amax(copies) if copies else of_mesh).sum()
