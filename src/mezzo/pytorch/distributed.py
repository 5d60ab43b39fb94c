"""One decision of all ranks: either every rank skips a step or none does, and all clip by one norm.

Which ranks decide together about an optimizer follows from its parameters (`ranks_of`):

- `DTensor` parameters: the ranks of their root mesh.
- Parameters of a `DistributedDataParallel`: the ranks of its process group.
- Gradients that a script reduces by hand: `mezzo run` takes the process group of `all_reduce`. Elsewhere no rank is
  asked: the reduction brings a NaN or infinity to every rank, which finds it by itself.
- Else an optimizer may exist on this rank only, so the rank decides alone. No collective is started for it.

The ranks add a few FP64 numbers in one reduction per step, whose result has the same bits on every rank.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import gradient_norm

_AVAILABLE = dist.is_available()  # asked once: it cannot change


class Agreement(NamedTuple):
    """What all ranks know: `found` (0-dim; None: not checked), sums of squares over all shards, and who found it.

    `by` is None on one rank, else 4 numbers: how many ranks found something and the sum of their numbers, and the same
    of those ranks where it began.
    """

    found: Tensor | None
    squares: Tensor
    by: Tensor | None = None


class _Part(NamedTuple):
    """Ranks, and the process groups over which to reduce, one after another, for a reduction over all of them."""

    ranks: frozenset[int]
    groups: tuple[Any, ...]


class Ranks:
    """The ranks that decide together about one optimizer's steps; false if this one decides alone.

    Sums are over `holders`, the ranks that have parts of its parameters. Flags are over `everyone`: of a mesh with
    pipeline stages, say, the parameters are on a part.
    """

    def __init__(
        self, holders: _Part | None = None, everyone: _Part | None = None, device: Any = None
    ) -> None:
        self._holders, self._everyone, self._device = holders, everyone, device
        self._counts: dict[Any, bool] = {}

    def __bool__(self) -> bool:
        return self._everyone is not None

    @property
    def holders(self) -> list[int]:
        """The ranks that have parts of the parameters, in order."""
        return [] if self._holders is None else sorted(self._holders.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks, which speaks for all."""
        return self._everyone is None or dist.get_rank() == min(self._everyone.ranks)

    def agreed(
        self, found: Tensor | None, squares: Tensor | None = None, began: Tensor | None = None
    ) -> Agreement:
        """From this rank's `found` (0-dim) and sums of squares (n,) to those of all ranks, in one reduction.

        `began` (2,): whether what any rank found came from this rank, and its loss scale, where they are known.
        UsageError for different scales, on all ranks, unless the result is on an accelerator.
        """
        if squares is None:
            squares = torch.zeros(0, dtype=torch.float64)
        if self._holders is None or self._everyone is None:
            return Agreement(found, squares)
        at, rank = squares.device if found is None else found.device, dist.get_rank()
        flag = torch.zeros((), dtype=torch.float64, device=at) if found is None else (found != 0).double()
        # A sharded gradient may be found by other ranks.
        source, scale = (flag, torch.zeros_like(flag)) if began is None else began.to(flag)
        flags = torch.stack([flag, flag * rank, source, source * rank, scale]).to(self._device)
        numbers = torch.cat([flags, squares.double().to(self._device)])
        _add(numbers, self._holders.groups)
        by = numbers[:5]
        if self._everyone is not self._holders:
            by = flags
            _add(by, self._everyone.groups)
        by = by.to(at)
        total = scale * len(self._everyone.ranks)  # exact for FP32 numbers
        if at.type == "cpu" and by[4] != total:
            raise UsageError(
                f"the ranks have different loss scales: on rank {rank} it is {float(scale):g}. Call load_state_dict "
                "with the same state on every rank."
            )
        return Agreement(None if found is None else (by[0] > 0).to(found.dtype), numbers[5:].to(at), by[:4])

    def largest(self, *numbers: float, of_holders: bool = False) -> list[float]:
        """The largest of all ranks' numbers, each; waits for the device."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        part = self._holders if of_holders else self._everyone
        for group in () if part is None else part.groups:
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
        return own.tolist()

    def of_first(self, *numbers: float) -> list[float]:
        """The numbers of the first rank; waits for the device."""
        if self._everyone is None:
            return list(numbers)
        return self.largest(*(number if self.is_first else -math.inf for number in numbers))

    def counts(self, param: Tensor) -> bool:
        """Whether this rank adds its part of this parameter's gradient to the sums: of equal copies, one rank does."""
        if self._holders is None:
            return True
        spread: Any = param
        key = (spread.device_mesh, spread.placements) if is_spread(param) else None
        if key not in self._counts:
            first = min(self._holders.ranks)
            if key is None:
                self._counts[key] = dist.get_rank() == first
            else:
                mesh, placements = key
                of_copies = zip(mesh.get_coordinate(), placements)
                copy = any(at != 0 for at, placement in of_copies if placement.is_replicate())
                self._counts[key] = not copy and first in mesh.mesh.flatten().tolist()
        return self._counts[key]


ALONE = Ranks()


def ranks_of(params: Iterable[Tensor], groups: Iterable[Any] = ()) -> Ranks:
    """The ranks that decide together about these parameters; `groups` reduce gradients of the plain ones."""
    if not is_distributed():
        return ALONE
    params = list(params)
    spread: list[Any] = [param for param in params if is_spread(param)]
    meshes = dict.fromkeys(param.device_mesh for param in spread)
    given = (dist.group.WORLD if group is None else group for group in groups)
    plain = [_Part(frozenset(dist.get_process_group_ranks(group)), (group,)) for group in given]
    holders = [*(_of_mesh(mesh) for mesh in meshes), *plain]
    everyone = [*(_of_mesh(mesh._get_root_mesh()) for mesh in meshes), *plain]
    if not everyone or len(_covering(everyone).ranks) < 2:
        return ALONE
    whole, held = _covering(everyone), _covering(holders)
    if whole.ranks == held.ranks:
        held = whole
    return Ranks(held, whole, next((mesh.device_type for mesh in meshes), params[0].device))


def replica_groups(model: nn.Module) -> list[Any]:
    """The process groups over which `DistributedDataParallel` averages gradients of parts of a model."""
    return list(dict.fromkeys(part.process_group for part in wrappers(model) if not joins(part)))


def wrappers(model: nn.Module) -> list[Any]:
    """Every `DistributedDataParallel` of a model, also of one rank: it holds gradients in the parameters' format."""
    if not (_AVAILABLE and dist.is_initialized()):
        return []
    return [part for part in model.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]


def averaging(params: Iterable[Tensor]) -> list[Any]:
    """The process groups over which any `DistributedDataParallel` averages these; slow: looks at all objects."""
    mine, kind = set(map(id, params)), nn.parallel.DistributedDataParallel
    found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return [one.process_group for one in found if not joins(one) and mine & set(map(id, one.parameters()))]


def averages_others(wrapper: Any, params: Iterable[Tensor]) -> bool:
    """Whether a `DistributedDataParallel` averages gradients of some of these parameters, and of others."""
    mine = set(map(id, params))
    owned = [id(p) in mine for p in wrapper.parameters() if p.requires_grad]
    return any(owned) and not all(owned)


def check_averaged(wrappers: Iterable[Any]) -> None:
    """At the end of a window: raise UsageError if a `DistributedDataParallel` still waits for gradients."""
    try:
        for part in wrappers:
            part.reducer._check_reducer_finalized()
    except RuntimeError as error:
        raise UsageError(
            f"step(loss): on rank {dist.get_rank()}, the losses use a part of a DistributedDataParallel's parameters, "
            "so no gradient was averaged. Add the losses of one call of the model: mp.step(loss_a + loss_b). If none "
            "uses the others, wrap it again: DistributedDataParallel(model, find_unused_parameters=True)."
        ) from error


def hook_memories(wrappers: Iterable[Any]) -> list[Any]:
    """The states of communication hooks that add errors of earlier gradients to later ones (PowerSGD)."""
    return [state for part in wrappers for _, state in part._comm_hooks if hasattr(state, "error_dict")]


def forget_errors(memories: Iterable[Any]) -> None:
    """After a skipped step, whose NaN or infinity the hooks would add to all later gradients."""
    for state in memories:
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            getattr(state, name, {}).clear()


def joins(wrapper: Any) -> bool:
    """Whether a `DistributedDataParallel` is inside `join()`: ranks that have no more data run no other collective.

    PyTorch leaves `enable` on at the end, so the configuration of a `join()` that has ended is kept here.
    """
    config = wrapper._join_config
    return bool(config.enable) and getattr(wrapper, "_ended_join", None) is not config


def shards(models: Iterable[nn.Module]) -> dict[int, Tensor]:
    """By the id of a gathered parameter of `fully_shard`, which is a leaf of the graph: its sharded parameter."""
    return {id(leaf): one.sharded_param for one, leaf in _sharded(models) if leaf is not None}


def holds_unreduced(models: Iterable[nn.Module]) -> bool:
    """Whether `set_requires_gradient_sync(False)` has left gradients unreduced."""
    return any(
        getattr(one, "unsharded_accumulated_grad", None) is not None
        or (leaf is not None and leaf.grad is not None)
        for one, leaf in _sharded(models)
    )


def drop_unsharded(models: Iterable[nn.Module]) -> None:
    """Drop the gradients that `set_requires_gradient_sync(False)` has left unreduced."""
    for one, leaf in _sharded(models):
        one.unsharded_accumulated_grad = None
        if leaf is not None:
            leaf.grad = None


def named(by: Tensor) -> str:
    """Who found something that is not finite, in words: where it began, if that is known; waits for the device."""
    count, ranks, began, first = by.tolist()
    if began:
        count, ranks = began, first
    who = f"rank {ranks:.0f}" if count == 1 else f"{count:.0f} ranks"
    return who if began else f"{who} after the reduction, which spreads it"


def own_squares(params: Sequence[Tensor], ranks: Ranks) -> tuple[Tensor, Tensor]:
    """This rank's FP64 sums of squares of `.grad`, 0-dim: of all parameters, and of those that it counts."""
    counted = _sum_of_squares([param for param in params if ranks.counts(param)])
    others = [param for param in params if not ranks.counts(param)]
    if not others:
        return counted, counted
    rest = _sum_of_squares(others)
    return rest + counted.to(rest.device), counted.to(rest.device)


def local(tensor: Tensor) -> Tensor:
    """The part of a `DTensor` that this rank holds, summed first where it is `Partial`; any other tensor itself."""
    part: Tensor = summed(tensor).to_local() if is_spread(tensor) else tensor
    return part


def summed(spread: Any) -> Any:
    """A `DTensor` whose sums are made, where it is `Partial`; else the same."""
    if not any(placement.is_partial() for placement in spread.placements):
        return spread
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placement.is_partial() else placement for placement in spread.placements]
    return spread.redistribute(placements=whole)


def is_distributed(group: Any = None) -> bool:
    """Whether there is a process group with more than one rank."""
    return _AVAILABLE and dist.is_initialized() and dist.get_world_size(group) > 1


def own_path(given: Any) -> Any:
    """A path with `-rankN` on the ranks above 0, as `mezzo run` names their files; anything else as it is."""
    from mezzo.runner.journal import of_rank
    from mezzo.runner.lifecycle import rank_here

    rank = dist.get_rank() if is_distributed() else rank_here() or 0
    is_named = not isinstance(given, (str, os.PathLike)) or Path(given).stem.endswith(f"rank{rank}")
    return of_rank(Path(given), rank) if rank and not is_named else given


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # imported, if any DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Whether a call of the model runs collectives that move parameters: `fully_shard`, or `DTensor` parameters."""
    return any(map(_state, model.modules())) or any(map(is_spread, model.parameters()))


def sharded_format(model: nn.Module) -> torch.dtype | None:
    """The 16-bit format in which `fully_shard` gathers parameters, by its `MixedPrecisionPolicy`; None for FP32."""
    formats = (param.mp_policy.param_dtype for param, _ in _sharded([model]))
    return next((one for one in formats if one in (torch.bfloat16, torch.float16)), None)


def _state(module: nn.Module) -> Any:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return fsdp.fully_shard.state(module) if kind is not None and isinstance(module, kind) else None


def _sharded(models: Iterable[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """The parameters of `fully_shard`, as it keeps them, each with its gathered one (None: not gathered)."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for model in models:
        for state in filter(None, map(_state, model.modules())):
            one = getattr(state, "_fsdp_param_group", None)  # until torch 2.11
            for group in getattr(state, "_fsdp_param_groups", [] if one is None else [one]):
                yield from ((param, getattr(param, "_unsharded_param", None)) for param in group.fsdp_params)


def _of_mesh(mesh: Any) -> _Part:
    return _Part(frozenset(mesh.mesh.flatten().tolist()), tuple(mesh.get_all_groups()))


def _covering(parts: Sequence[_Part]) -> _Part:
    """The part that has all ranks of the others; the world, if none has."""
    everyone = frozenset[int]().union(*(part.ranks for part in parts))
    if len(everyone) < dist.get_world_size():
        for part in parts:
            if part.ranks == everyone:
                return part
    return _Part(frozenset(range(dist.get_world_size())), (None,))


def _add(numbers: Tensor, groups: Iterable[Any]) -> None:
    for group in groups:
        dist.all_reduce(numbers, group=group)


def _sum_of_squares(params: Iterable[Tensor]) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is not None:
            grad = local(param.grad)
            by_device[grad.device].append(grad)
    sums = [gradient_norm.sum_of_squares(some) for some in by_device.values()]
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    return sums[0] if len(sums) == 1 else torch.stack([one.to(sums[0].device) for one in sums]).sum()
