"""find_batch_size: try batch sizes with a step of the user's own, and leave no trace of the trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.core.batch_result import BatchSizeResult, remarks
from mezzo.core.batch_search import BatchSearch, NothingFitsError, Trial
from mezzo.core.byte_counts import parse_bytes
from mezzo.core.errors import UsageError
from mezzo.pytorch import distributed
from mezzo.pytorch.batch_size.device_trial import Step, bytes_alive, try_size
from mezzo.pytorch.batch_size.snapshot import Snapshot
from mezzo.pytorch.free_memory import spendable_bytes


def find_batch_size(
    step: Step,
    start: int = 8,
    *,
    limit: int | str | None = None,
    device: torch.device | str | None = None,
    max_size: int | None = None,
    multiple_of: int = 1,
    factor: float = 2.0,
    rounds: int = 3,
    model: nn.Module | Sequence[nn.Module] = (),
    optimizer: Optimizer | Sequence[Optimizer] = (),
    restore: Iterable[Any] = (),
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> BatchSizeResult:
    """The largest batch size whose training step fits into memory, and how fast each size tried is.

    On a GPU a size fails when an allocation does. A CPU does not fail but swaps, so there the bytes of all tensors at
    the step's peak are counted and held against `limit`, and a size that is expected to take far more is not tried.

    Each size runs a step to warm up, one to measure memory, and `rounds` to be timed. **They train the model**: hand
    over what they change and it is put back to the bit, gradients, buffers, and random state included (random state
    is put back in any case). What isn't handed over keeps what the trials did to it.

    Args:
        step: runs one whole training step with so many samples: batch, forward, backward, optimizer. Make the batch
            in it, of exactly that many samples; data of one's own that holds fewer gives a wrong answer.
        start: the first size. Sizes grow from it, and shrink where it doesn't fit.
        limit: bytes, or text such as ``"4 GiB"``. On a CPU, what the machine or the container has left, less 10 % or
            512 MiB, together with what tensors hold already; on a GPU there is none by default.
        device: where memory is measured: a CPU or a CUDA device. By default the model's; without a model, CUDA if
            this process has used it, and else the CPU.
        max_size: no size above it is tried.
        multiple_of: sizes are multiples of it.
        factor: how sizes grow.
        rounds: timed steps a size; 0 times none.
        model: one or several, put back afterwards.
        optimizer: likewise; theirs is the state that the first step makes.
        restore: others with `state_dict` and `load_state_dict`, put back too: a scheduler, a scaler,
            a `MixedPrecision`.
        on_trial: told of every trial when it is over.

    Returns:
        A `BatchSizeResult`: `largest`, `fastest`, `trials`; print it for a table.

    Raises:
        NothingFitsError: not even one multiple fits; says what it took.
        UsageError: an argument out of range; no limit is known on this system; the bytes don't depend on the size;
            several ranks (a rank that runs out of memory would leave the others waiting).
        Exception: what the step raises that isn't about memory. What was handed over is put back then, too.

    >>> import torch, mezzo
    >>> model = torch.nn.Linear(100, 10)
    >>> def step(batch_size):
    ...     model(torch.randn(batch_size, 100)).sum().backward()
    ...     model.zero_grad()
    >>> found = mezzo.find_batch_size(step, limit="1 MB", multiple_of=64, rounds=0, model=model)
    >>> found.largest % 64
    0
    """
    models = list(model) if isinstance(model, Sequence) and not isinstance(model, nn.Module) else [model]
    optimizers = [optimizer] if not isinstance(optimizer, Sequence) else list(optimizer)
    for one in models:
        if not isinstance(one, nn.Module):
            raise UsageError(f"model is a {type(one).__name__}: give an nn.Module, or a list of them")
    if not callable(step):
        raise UsageError(
            f"step is a {type(step).__name__}: give a function of the batch size that runs one step"
        )
    place = _device_of(device, models)
    if rounds < 0:
        raise UsageError(f"rounds={rounds}: give how many steps are timed for each size, 0 or more")
    search = BatchSearch(start, multiple_of, factor, None if limit is None else parse_bytes(limit), max_size)
    if distributed.is_distributed():
        raise UsageError(
            "find_batch_size runs in one process: where one rank runs out of memory the others would wait for ever. "
            "Call it before init_process_group, or in a process of its own."
        )
    snapshot = Snapshot(models, [*optimizers, *restore])
    if limit is None and place.type == "cpu":
        search = BatchSearch(start, multiple_of, factor, _limit_of_machine(place), max_size)

    tried: list[Trial] = []

    def attempt(size: int) -> Trial:
        for parameter in chain.from_iterable(one.parameters() for one in models):
            parameter.grad = None  # of a step that failed half-way
        try:
            trial = try_size(step, size, place, limit=search.limit, rounds=rounds, first=not tried)
        except Exception as error:
            if not tried or any(one.fits for one in tried):
                raise
            why = BatchSizeResult(replace(search, trials=tuple(tried)), str(place)).sentence()
            raise NothingFitsError(
                f"{why} No smaller size can be tried, since {size} fails for another reason: {error}"
            ) from error
        tried.append(trial)
        on_trial(trial)
        return trial

    try:
        search = search.run(attempt)
    finally:
        snapshot.restore()
    if search.unchanging:
        sizes = [trial.size for trial in search.trials]
        raise UsageError(
            f"the step takes the same bytes at every size from {min(sizes)} to {max(sizes)}: make the batch in it, "
            f"of `step`'s argument's size. If it does, give a larger start, such as {max(sizes)}."
        )
    result = BatchSizeResult(search, str(place), tuple(remarks(search)))
    if not result.fits:
        raise NothingFitsError(result.sentence())
    return result


def _device_of(device: torch.device | str | None, models: Sequence[nn.Module]) -> torch.device:
    if device is not None:
        place = torch.device(device)
    else:
        first = next(chain.from_iterable(model.parameters() for model in models), None)
        if first is not None:
            place = first.device
        else:
            place = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(place)!r}: memory is measured on cpu and cuda devices only")
    return place


def _limit_of_machine(place: torch.device) -> int:
    spendable = spendable_bytes()
    if spendable is None:
        raise UsageError(
            "this system does not say how much memory is available. Give the bytes that a step may take, such as "
            "limit='8 GiB'."
        )
    return max(1, spendable + bytes_alive(place))
