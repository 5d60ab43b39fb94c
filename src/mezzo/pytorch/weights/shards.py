"""Parameters that are `DTensor`s: this rank's part of a value, a value made of the ranks' parts, and their places.

The kernels read and write the local parts only, so a step communicates nothing, except Muon's. Entries of
`optimizer.state` are `DTensor`s of the parameter's mesh and placements, which `torch.distributed.checkpoint` loads in
any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import is_spread, local
from mezzo.pytorch.kernels.optimizer_step.formulas import GROUP


@torch.no_grad()
def part(value: Tensor, like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """This rank's part of a value, cut as a parameter is; the value itself for a parameter that is not cut.

    A whole tensor has the same values on all ranks. `shape`: of the value before it is cut, by default its own.
    UsageError for a `DTensor` and a plain parameter; one with other placements is redistributed.
    """
    if not is_spread(like):
        if is_spread(value):
            raise UsageError(
                f"a DTensor of shape {list(value.shape)} belongs to a parameter that is a plain tensor here. Pass "
                "whole tensors: tensor.full_tensor(), or a file of dcp_to_torch_save (torch.distributed.checkpoint)."
            )
        return value
    cut: Any = like
    spread: Any = value
    if not is_spread(value):
        from torch.distributed.tensor import distribute_tensor

        whole = value.detach().to(like.device).view(value.shape if shape is None else shape)
        spread = distribute_tensor(whole, cut.device_mesh, cut.placements, src_data_rank=None)
    elif spread.device_mesh != cut.device_mesh:
        raise UsageError(
            f"a DTensor of shape {list(value.shape)} is on {spread.device_mesh}, and its parameter on "
            f"{cut.device_mesh}. Load the state by torch.distributed.checkpoint, which reshards it."
        )
    elif spread.placements != cut.placements:
        spread = spread.redistribute(placements=cut.placements)
    return local(spread)


def placed(value: Any, like: Tensor) -> Any:
    """A value of a parameter's shape, cut as the parameter is; any other value itself."""
    if not isinstance(value, Tensor) or value.shape != like.shape or are_cut_alike(value, like):
        return value
    return joined(part(value, like), like)


def are_cut_alike(value: Tensor, like: Tensor) -> bool:
    """Whether two tensors lie on the ranks alike: the same mesh and placements, or both plain."""
    if not is_spread(value) or not is_spread(like):
        return is_spread(value) == is_spread(like)
    one: Any = value
    other: Any = like
    return bool(one.device_mesh == other.device_mesh and one.placements == other.placements)


@torch.no_grad()
def joined(own: Tensor, like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """The inverse of `part`: a `DTensor` of the ranks' parts, of the parameter's shape unless one is given."""
    if not is_spread(like):
        return own
    from torch.distributed.tensor import DTensor

    cut: Any = like
    shape = like.shape if shape is None else shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if shape == like.shape:
        strides = list(like.stride())
    made: Tensor = DTensor.from_local(
        own, cut.device_mesh, cut.placements, run_check=False, shape=shape, stride=tuple(strides)
    )
    return made


def has_whole_groups(param: Tensor) -> bool:
    """Whether ranks hold whole rows, of whole groups of elements with one scale: 8-bit states need this.

    A row is what follows the first dimension. The number of ranks must not count: a checkpoint loads on any number.
    """
    cut: Any = param
    has_rows = param.dim() > 1 and not any(getattr(placement, "dim", 0) for placement in cut.placements)
    return has_rows and param.shape[1:].numel() % GROUP == 0


def scale_shape(param: Tensor) -> torch.Size:
    """Of the scales of a cut parameter with whole groups: a row for each of its rows."""
    return torch.Size((param.shape[0], param.shape[1:].numel() // GROUP))


def offset(param: Tensor) -> int:
    """Where the noise of this rank's part starts: at the part's first element in the whole parameter, if the parameter
    is cut along its first dimension alone; else at a number that gives every element noise of its own.
    """
    if not is_spread(param):
        return 0
    cut: Any = param
    (chunk,) = cut.__create_chunk_list__()
    sizes, shape = chunk.sizes, param.shape
    return sum(
        at * math.prod(sizes[:dim]) * math.prod(shape[dim + 1 :]) for dim, at in enumerate(chunk.offsets)
    )
