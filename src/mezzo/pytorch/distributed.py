"""Agreement over a process group: every rank skips a step or none does, and all clip by the same number.

What a rank sees of the gradients depends on how parameters are spread. A replicated one (DDP) has the same gradient
everywhere once it was reduced. Of a sharded one (FSDP2, tensor parallel: a `DTensor`) each rank has a part, and
the sum of squares goes over all parts. One gather of a few numbers serves both: every rank then computes the
same sum in the same order from the same numbers, so that they agree to the bit whatever the backend's own
order of reduction is, and a NaN anywhere is a NaN everywhere.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import gradient_norm


class Layout(NamedTuple):
    """How a parameter is spread over ranks; None in place of a layout: not at all."""

    mesh: Any  # torch.distributed.DeviceMesh
    sharded: tuple[int, ...]  # dimensions of the mesh over which it is cut


def agreed(
    found_inf: Tensor | None, sum_of_squares: Tensor, params: Sequence[Tensor], group: Any = None
) -> tuple[Tensor | None, Tensor]:
    """What all ranks together found: the largest `found_inf`, and the sum of squares over all shards.

    Costs one gather of a few FP64 numbers and no wait of the host; without a process group, or in one of a single
    rank, it returns what it was given. Every rank of the group calls it, with the same parameters in the
    same order. Where ranks hold different parameters (pipeline stages), give each stage's group.

    Args:
        found_inf: 0-dim; not 0 (NaN included) where this rank found a gradient that isn't finite. None if
            nobody looked, on every rank alike.
        sum_of_squares: FP64, over this rank's own gradients. 0-dim: of all; ``(len(params),)``: of each, which
            is needed where not all parameters are spread alike. `own_sum_of_squares` gives the right one.
        params: whose gradients they are.
        group: the process group; None: the default one. It must contain the ranks of every parameter's mesh.

    Returns:
        Both, 0-dim and bit-equal on all ranks. NaN wins over every number.

    Raises:
        UsageError: one sum for parameters that are not all spread alike.
    """
    if not is_distributed(group):
        return found_inf, (sum_of_squares if sum_of_squares.dim() == 0 else sum_of_squares.sum())
    members = _members(params)
    if sum_of_squares.dim() == 0:
        if len(members) > 1:
            raise UsageError(
                "agreed(): one sum of squares for parameters of which some are sharded and others are not, or "
                "otherwise. Give one sum a parameter, as own_sum_of_squares() does."
            )
        sums = [sum_of_squares]
    else:
        at = sum_of_squares.device
        sums = [sum_of_squares[torch.tensor(indices, device=at)].sum() for indices in members.values()]
    device = sum_of_squares.device
    found = torch.zeros((), device=device) if found_inf is None else found_inf.to(device)
    everyone = _gathered(torch.stack([found.double(), *(one.double() for one in sums)]), group)

    totals = [_total(everyone[:, i], layout, group) for i, layout in enumerate(members, start=1)]
    total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    if any(layout is not None and layout.mesh.size() < dist.get_world_size(group) for layout in members):
        # Other ranks have summed over other copies of the shards.
        total = _gathered(total.reshape(1), group).amax()
    agreed_found = everyone[:, 0].amax().to(found.dtype)
    return (None if found_inf is None else agreed_found.to(found_inf.device)), total


def agreed_largest(value: Tensor, group: Any = None) -> Tensor:
    """The largest of all ranks' numbers, bit-equal on all of them; NaN wins over every number.

    Without a process group, or in one of a single rank, the number itself. Every rank of the group calls it.

    Args:
        value: 0-dim, on a device that the group's backend can gather from.
        group: the process group; None: the default one.
    """
    if not is_distributed(group):
        return value
    return _gathered(value.reshape(1), group).amax()


def own_sum_of_squares(params: Sequence[Tensor]) -> Tensor:
    """The sum of squares of this rank's part of the parameters' gradients, as `agreed` takes it.

    Args:
        params: with their gradients in `.grad`; those without count as 0.

    Returns:
        FP64 on the first gradient's device: 0-dim, or ``(len(params),)`` where not all are spread alike.
    """
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
    """The part of a `DTensor` that this rank holds; any other tensor as it is.

    A gradient that is still to be summed over a dimension of its mesh (`Partial`) is, first.
    """
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
    module = sys.modules.get("torch.distributed.tensor")  # whoever made one has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _members(params: Sequence[Tensor]) -> dict[Layout | None, list[int]]:
    """The parameters' indices by how they are spread, in order of first appearance."""
    members: dict[Layout | None, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        members[_layout(param)].append(index)
    return members or {None: []}


def _layout(param: Tensor) -> Layout | None:
    if not is_spread(param):
        return None
    spread: Any = param
    sharded = tuple(i for i, placement in enumerate(spread.placements) if not placement.is_replicate())
    return Layout(spread.device_mesh, sharded) if sharded else None


def _gathered(own: Tensor, group: Any) -> Tensor:
    """``(ranks, n)``: every rank's `n` numbers."""
    everyone = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(everyone.unbind(0)), own.contiguous(), group=group)
    return everyone


def _total(of_ranks: Tensor, layout: Layout | None, group: Any) -> Tensor:
    """From the ranks' own sums to the whole: over shards the sum, over copies (which are equal) the largest."""
    if layout is None:
        return of_ranks.amax()
    ranks = layout.mesh.mesh.flatten().tolist()
    if group is not None:
        ranks = [dist.get_group_rank(group, rank) for rank in ranks]
    of_mesh = of_ranks[torch.tensor(ranks, device=of_ranks.device)].view(tuple(layout.mesh.mesh.shape))
    copies = [i for i in range(of_mesh.dim()) if i not in layout.sharded]
    return (of_mesh.amax(copies) if copies else of_mesh).sum()
