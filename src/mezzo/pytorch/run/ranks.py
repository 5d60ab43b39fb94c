"""The ranks of a run: which of them decide together about a step, and which leaves of a graph are gathered shards.

`DistributedDataParallel` and `fully_shard` are found when a model is first called. A gradient that the script reduces
by hand is recognized by its storage, which it gave to `all_reduce`. A copy (a flat buffer of all gradients, say) is
not recognized: then NaN or infinity reaches every rank through the reduction. Whatever a closure reduces, its ranks
decide together about the step: each evaluation needs all of them anyway.

All ranks of a process group must run under one policy: rank 0 compares the options of all when the group is made. A
small message per rank goes through the group's store, because the group itself may not be usable yet.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.core.errors import UsageError
from mezzo.pytorch import distributed
from mezzo.pytorch.distributed import Ranks
from mezzo.pytorch.same_options import difference, explained, follow, store_of_ranks

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import Patches

PATIENCE = timedelta(seconds=60)
SECONDS_TO_FREE = 0.1
SECONDS_FOR_GRADIENTS = 300  # for other ranks to step without gradients, too: one may be slow


class RunRanks:
    """What a run knows of its ranks."""

    def __init__(self) -> None:
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Id of a parameter -> the data parallelism that averages its gradients.
        self._wrappers: dict[int, weakref.ref[Any]] = {}
        self._reduced: dict[StorageWeakRef, Any] = {}  # storage of a gradient -> process group
        self.of_closure: dict[Any, None] | None = None  # groups over which a closure that runs has reduced
        self.without_gradients = Counter[str]()  # steps without gradients, by the ranks that take them
        self.any = False  # whether ranks decide together about any optimizer

    def register(self, model: nn.Module) -> None:
        """A model is called for the first time."""
        for part in distributed.wrappers(model):
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
        # The script has reduced some gradients by hand.
        stored = [StorageWeakRef(p.grad.untyped_storage()) for p in params if _has_storage(p.grad)]
        by_hand = [self._reduced[one] for one in stored if one in self._reduced]
        in_closure = () if self.averages_only(params) else self.of_closure or ()  # `join` reduces by itself
        ranks = distributed.ranks_of(params, dict.fromkeys([*groups, *by_hand, *in_closure]))
        self.any |= bool(ranks)
        return ranks

    def backward_begins(self, leaves: Iterable[Tensor]) -> None:
        """These leaves are about to receive gradients of this rank: sums with reduced ones are not reduced."""
        for leaf in leaves if self._reduced else ():
            if _has_storage(leaf.grad):
                self._reduced.pop(StorageWeakRef(leaf.grad.untyped_storage()), None)

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
        refs = dict.fromkeys(self._wrappers[id(p)] for p in params if id(p) in self._wrappers)
        return [module for ref in refs if (module := ref()) is not None]

    def step_ended(self, params: Sequence[Tensor], *, skipped: bool) -> None:
        """A step of these parameters is over."""
        if skipped:
            distributed.forget_errors(distributed.hook_memories(self._wrapped(params)))
        # A gradient that lives on stays reduced until the next backward: another optimizer may step by it, too.
        self._reduced = {one: group for one, group in self._reduced.items() if not one.expired()}

    def patch(self, session: Session, patches: Patches, *, scales: bool) -> None:
        """Replace what a run needs of `torch.distributed`; `scales`: it may have a loss scale."""
        if not dist.is_available():
            return
        replacements = {
            "init_process_group": _make_init(session, dist.init_process_group),
            "destroy_process_group": _make_destroy(dist.destroy_process_group),
        }
        if scales:
            replacements["all_reduce"] = self._all_reduce(dist.all_reduce)
        for name, function in replacements.items():
            for owner in (dist, dist.distributed_c10d):
                patches.set(owner, name, function)

    def _all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and _has_storage(tensor):
                group = kwargs.get("group", args[1] if len(args) > 1 else None)
                if dist.get_rank(group) >= 0:  # else this rank is not in the group
                    self._reduced[StorageWeakRef(tensor.untyped_storage())] = group
                    if self.of_closure is not None:
                        self.of_closure[group] = None
            return original(tensor, *args, **kwargs)

        return all_reduce


def all_without_gradients(session: Session, ranks: Ranks) -> None:
    """UsageError if a rank has gradients at this step, which this one lacks: the others then wait in a reduction."""
    counts, together = session.ranks.without_gradients, str(ranks.holders)
    counts[together] += 1  # not the updates: some may be of an optimizer that exists on one rank only
    keys = [f"mezzo/without-gradients/{together}/{counts[together]}/{rank}" for rank in ranks.holders]
    session.store.set(keys[ranks.holders.index(dist.get_rank())], "")
    seconds = min(SECONDS_FOR_GRADIENTS, session.store.timeout.total_seconds() / 2)  # less than the others'
    end = time.monotonic() + seconds
    while not session.store.check(keys):
        if time.monotonic() > end:
            session.fatal = error = UsageError(
                f"on rank {dist.get_rank()} an optimizer's step() was called without gradients, and other ranks did "
                f"not do so within {seconds:g} seconds: they wait for this rank. Call backward() "
                "on every rank before step(). On a rank without data: loss = 0.0 * model(example).sum()"
            )
            raise explained(error)
        time.sleep(0.01)


def _has_storage(tensor: Any) -> TypeGuard[Tensor]:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _make_init(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # If first imported when a group exists (by DDP or an optimizer, with Dynamo), it keeps that group as a default
        # argument, and so gloo's threads, into the end of Python: one that waits for the GIL then aborts the process.
        import torch.distributed.nn.functional  # noqa: F401

        result = original(*args, **kwargs)
        store = store_of_ranks()
        if store is not None:
            session.rank, session.world_size = dist.get_rank(), dist.get_world_size()
            session.begin()
            session.journal.tells &= not session.rank
            wrong = _difference(store, session.rank, session.world_size, _described(session))
            if wrong:
                dist.destroy_process_group()
                session.fatal = error = UsageError(wrong)
                raise error
            session.store, session.only_counts = store, False
            follow()
        return result

    return init_process_group


def _make_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give gloo's threads time for what they still have to do under the GIL.

    A thread of gloo takes the GIL to free a collective that has ended. If DDP frees the group meanwhile, it joins the
    thread without giving the GIL up, and both wait forever; if Python ends meanwhile, it aborts. So in PyTorch 2.13.
    """

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        time.sleep(SECONDS_TO_FREE)
        original(*args, **kwargs)

    return destroy_process_group


def _described(session: Session) -> str:
    """What decides the numbers, and which collectives Mezzo runs, as options of `mezzo run`."""
    request = session.request
    options = {
        f"--precision {session.policy}": True,
        f"--own {request.own}": request.own != "keep",
        f"--masters {request.masters}": bool(request.masters),
        f"--watch={request.watch}": bool(request.watch),
        "--no-trace": not request.trace,
    }
    return " ".join(option for option, given in options.items() if given)


def _difference(store: Any, rank: int, ranks: int, mine: str) -> str:
    """What is wrong, in the same words on every rank; empty if all have the same options."""
    wrong = difference(store, rank, range(ranks), mine, PATIENCE)
    if wrong is None:
        return (
            f"a rank of the process group did not answer in {PATIENCE.seconds} seconds: it runs without Mezzo, or has "
            "ended. Start every rank alike: torchrun --nproc-per-node 2 --no-python mezzo run train.py"
        )
    same = "Start every rank with the same options of mezzo run"
    return wrong and f"the ranks run under different policies: {wrong}. {same}"
