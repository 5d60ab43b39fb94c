"""The ranks of a run: which of them decide together about a step, and which leaves of a graph are gathered shards.

`DistributedDataParallel` and `fully_shard` are found when a model is first called. A gradient that the script reduces
by hand is recognized by its storage, which it gave to `all_reduce`. A copy (a flat buffer of all gradients, say) is
not recognized: then NaN or infinity reaches every rank through the reduction.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.pytorch import distributed
from mezzo.pytorch.distributed import Ranks


class RunRanks:
    """What a run knows of its ranks."""

    def __init__(self) -> None:
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Id of a parameter -> the data parallelism that averages its gradients.
        self._wrappers: dict[int, weakref.ref[Any]] = {}
        self._reduced: dict[StorageWeakRef, Any] = {}  # storage of a gradient -> process group
        self.any = False  # whether ranks decide together about any optimizer

    def register(self, model: nn.Module) -> None:
        """A model is called for the first time."""
        for part in model.modules():
            if isinstance(part, nn.parallel.DistributedDataParallel):
                self._wrappers.update(dict.fromkeys(map(id, part.parameters()), weakref.ref(part)))
        if distributed.is_sharded(model):
            self._sharded.add(model)

    def owners(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The leaves as an optimizer has them: for a gathered parameter, the sharded one."""
        if not self._sharded:
            return list(leaves)
        shards = distributed.shards(self._sharded)
        return [shards.get(id(leaf), leaf) for leaf in leaves]

    def of(self, params: Sequence[Tensor]) -> Ranks:
        """The ranks that decide together about these parameters."""
        if not distributed.is_distributed():
            return distributed.ALONE
        groups = [module.process_group for module in self._wrapped(params) if not distributed.joins(module)]
        ranks = distributed.ranks_of(params, dict.fromkeys([*groups, *self._by_hand(params)]))
        self.any |= bool(ranks)
        return ranks

    def of_graph(self, leaves_of: Callable[[Any], list[Tensor]], roots: Any) -> Ranks:
        """The ranks that run a backward pass through this graph together, because it gathers parameters."""
        return distributed.ranks_of(self.owners(leaves_of(roots))) if self._sharded else distributed.ALONE

    def averages_only(self, params: Sequence[Tensor]) -> bool:
        """Whether only the averaged gradients count: in `DistributedDataParallel.join`, where some ranks have ended."""
        return any(map(distributed.joins, self._wrapped(params)))

    def group(self, params: Iterable[Tensor]) -> Any:
        """The process group that averages gradients of these parameters, of which each rank has a part of the batch."""
        found = self._wrapped(params)
        return found[0].process_group if found and not distributed.joins(found[0]) else None

    def _wrapped(self, params: Iterable[Tensor]) -> list[Any]:
        if not self._wrappers:
            return []
        refs = dict.fromkeys(self._wrappers[id(p)] for p in params if id(p) in self._wrappers)
        return [module for ref in refs if (module := ref()) is not None]

    def _by_hand(self, params: Iterable[Tensor]) -> list[Any]:
        """The groups over which the script has reduced these parameters' gradients since their last step."""
        mine = _storages(params) if self._reduced else []
        return [self._reduced[storage] for storage in mine if storage in self._reduced]

    def step_ended(self, params: Iterable[Tensor]) -> None:
        """A step of these parameters is over."""
        if self._reduced:
            over = set(_storages(params))
            kept = (item for item in self._reduced.items() if not (item[0] in over or item[0].expired()))
            self._reduced = dict(kept)

    def make_all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The `torch.distributed.all_reduce` of a run that scales."""

        @functools.wraps(original)
        def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and _has_storage(tensor):
                group = kwargs.get("group", args[1] if len(args) > 1 else None)
                if torch.distributed.get_rank(group) >= 0:  # else this rank is not in the group
                    self._reduced[StorageWeakRef(tensor.untyped_storage())] = group
            return original(tensor, *args, **kwargs)

        return all_reduce


def _storages(params: Iterable[Tensor]) -> list[StorageWeakRef]:
    grads = (p.grad for p in params if p.grad is not None)
    return [StorageWeakRef(grad.untyped_storage()) for grad in grads if _has_storage(grad)]


def _has_storage(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
