"""find_batch_size: the search as a pure function, by table and by property; real models; that all is restored."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map_only

import mezzo
from alive import bytes_alive
from mezzo.core.byte_counts import parse_bytes, written_bytes
from mezzo.core.errors import MezzoError, UsageError
from mezzo.pytorch.batch_size import BatchSizeResult, Trial, search, spendable_bytes
from mezzo.pytorch.memory import PeakTensorBytes

Step = Callable[[int], object]


def run(
    memory: Callable[[int], int],
    limit: int = 1000,
    *,
    fails: bool = False,
    start: int | None = None,
    max_size: int | None = None,
) -> BatchSizeResult:
    """The search on a device that says what each size takes; or only fails above the limit."""

    def measure(size: int) -> Trial:
        if fails and memory(size) > limit:
            return Trial(size, False, why="out of memory")
        return Trial(size, True, memory(size), 100.0)

    found = BatchSizeResult(limit=None if fails else limit)
    search(found, measure, start, max_size, flat=False)
    return found


tens = functools.partial(operator.mul, 10)
itself = functools.partial(operator.mul, 1)
# settings, what a batch takes (limit 1000), the sizes that are tried in order
MEASURED: list[tuple[dict[str, Any], Callable[[int], int], list[int]]] = [
    ({}, tens, [8, 16, 32, 64, 96]),  # 128 and 112 would take too much
    ({}, lambda n: 500 + 10 * n, [8, 4, 16, 32, 48]),  # 16 might take too much: 4 shows that it does not
    ({}, lambda n: 580 + n // 5, [8, 4, 16, 32, 64, 128, 256, 512, 1024, 2048]),
    ({"start": 400}, tens, [400, 200, 100]),
    ({"start": 4}, lambda n: 2000, [4, 2, 1]),
    ({"start": 1}, lambda n: 900 + 10 * n, [1, 2, 4, 8, 10]),
    ({"start": 5, "max_size": 20}, tens, [5, 10, 20]),
    ({"max_size": 5}, tens, [5]),
    ({"max_size": 23}, tens, [8, 16, 23]),
    ({"start": 64, "max_size": 66}, itself, [64, 66]),
]
# settings, the largest that runs, the sizes that are tried in order
FAILING: list[tuple[dict[str, Any], int, list[int]]] = [
    ({}, 20, [8, 16, 32, 24, 20, 22]),
    ({}, 100, [8, 16, 32, 64, 128, 96, 112, 104]),
    ({}, 3, [8, 4, 2, 3]),
    ({"start": 1, "max_size": 5}, 100, [1, 2, 4, 5]),
]


def test_the_sizes_that_are_tried() -> None:
    for how, memory, sizes in MEASURED:
        assert [trial.size for trial in run(memory, **how).trials] == sizes
    for how, most, sizes in FAILING:
        assert [trial.size for trial in run(itself, most, fails=True, **how).trials] == sizes


@st.composite
def ends(draw: st.DrawFn) -> tuple[int | None, int]:
    start = draw(st.none() | st.integers(1, 300))
    return start, draw(st.integers(start or 1, 20_000))


@settings(max_examples=150, deadline=None)
@given(ends(), st.integers(0, 10**6), st.integers(1, 1000), st.integers(1, 3 * 10**6), st.booleans())
def test_the_answer_is_within_an_eighth_of_the_largest_that_fits(
    ends: tuple[int | None, int], fixed: int, each: int, limit: int, fails: bool
) -> None:
    def memory(n: int) -> int:
        return fixed + each * n

    start, most = ends
    found = run(memory, limit, fails=fails, start=start, max_size=most)
    largest = max((n for n in range(1, most + 1) if memory(n) <= limit), default=0)
    assert 0 <= largest - found.largest <= found.largest // 8 + 1
    assert (found.largest > 0) == (largest > 0)
    assert len({trial.size for trial in found.trials}) == len(found.trials) < 40
    if found.trials[0].fits and not fails and start != 1:  # after the first size nothing is too large
        assert all(trial.fits for trial in found.trials)


@pytest.mark.parametrize(("memory", "first"), [(lambda n: 500, 8), (lambda n: 100 * min(n, 50), 64)])
def test_bytes_that_do_not_grow_end_the_search(memory: Callable[[int], int], first: int) -> None:
    with pytest.raises(
        UsageError, match=f"from {first} to {64 * first} .* --max {first} .max_size={first}[)]"
    ):
        run(memory, 10**9)


# what was found, what the recommendation names
SENTENCES: list[tuple[BatchSizeResult, list[str]]] = [
    (run(itself, fails=True, max_size=16), ["batch size 16 is the largest tried that fits"]),
    (run(itself, 0, fails=True, start=2), ["no size that was tried fits, not even batch size 1: out of memory."]),
    (run(tens, 5), ["no size that was tried fits, not even batch size 1: over the limit of 5 B."]),
    (BatchSizeResult([Trial(8, True, 10, 8.0), Trial(16, True, 20, 4.0), Trial(17, False)]),
     ["16 is the largest tried that fits; 8 is the fastest, with 8 samples per second."]),
    (BatchSizeResult([Trial(8, True, 10)]), ["8 is the largest tried that fits."]),
    (BatchSizeResult(), ["no size was measured"]),
]  # fmt: skip


@pytest.mark.parametrize(("result", "names"), SENTENCES, ids=range(len(SENTENCES)))
def test_what_is_recommended(result: BatchSizeResult, names: list[str]) -> None:
    assert all(name in result.sentence() for name in names)
    assert str(result).splitlines()[-1] == result.sentence()
    assert result.largest >= result.fastest
    values = result.to_dict()
    assert (values["largest"] or 0, values["fastest"] or 0) == (result.largest, result.fastest)
    assert [trial["size"] for trial in values["trials"]] == [trial.size for trial in result.trials]


def test_bytes_are_read_and_written() -> None:
    read = {"4GiB": 4 * 2**30, "4 gib": 4 * 2**30, "1.5 GB": 1_500_000_000, "7 B": 7, 7: 7, "0.5kB": 500}
    read |= {"3TiB": 3 * 2**40, ".5MiB": 2**19, "12345678901234567": 12345678901234567}
    assert {text: parse_bytes(text) for text in read} == read
    for text in ("", "GB", "4 PB", "-1", "4G", "1e9", "nan", "0", "999999", "0.1B", 0, -5):
        with pytest.raises(UsageError, match="byte"):
            parse_bytes(text)
    written = {1: "1 B", 999: "999 B", 1000: "1 kB", 999_499: "999 kB", 999_500: "1 MB", 4 * 2**30: "4.29 GB"}
    assert {count: written_bytes(count) for count in written} == written


def small() -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A model whose bytes depend on the batch, with all that steps change: weights, statistics, random state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(size: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(size, 32)), torch.randint(0, 4, (size,))).backward()
        optimizer.step()

    return model, optimizer, step


@pytest.mark.heavy
@pytest.mark.usefixtures("tensors_only")
def test_each_trial_is_measured_as_its_step_is() -> None:
    limit = bytes_alive() + 500_000
    model, optimizer, step = small()
    options: dict[str, Any] = {"rounds": 1, "model": model, "optimizer": optimizer}
    found = mezzo.find_batch_size(step, 512, limit=limit, **options)
    assert all(trial.fits is (trial.size <= found.largest) for trial in found.trials)
    for trial in found.trials:
        step(trial.size)
        watch = PeakTensorBytes()
        watch.start()
        step(trial.size)
        assert trial.peak_bytes == watch.stop().peak_bytes
        assert trial.fits is (trial.peak_bytes <= limit) is (trial.samples_per_second is not None)
    assert (found.limit, found.device) == (limit, "cpu")


NO_MEMORY = [
    (torch.OutOfMemoryError("CUDA out of memory. 2 GiB. More."), "CUDA out of memory. 2 GiB"),
    (MemoryError(), "out of memory"),
]


@pytest.mark.parametrize(("error", "why"), NO_MEMORY, ids=["cuda", "python"])
def test_a_step_that_runs_out_of_memory_is_a_size_that_does_not_fit(error: Exception, why: str) -> None:
    before = bytes_alive()
    model, optimizer, step = small()
    step(8)
    mine = bytes_alive() - before

    def guarded(size: int) -> None:
        if size > 5:
            kept = torch.zeros(1000, size)  # what the failed step had made so far
            raise error from None if kept is None else error.__cause__
        step(size)

    found = mezzo.find_batch_size(guarded, 4, limit="10 GB", rounds=0, model=model, optimizer=optimizer)
    assert (found.largest, found.fastest) == (5, 5)
    failed = {(trial.size > 5, trial.peak_bytes, trial.why) for trial in found.trials if not trial.fits}
    assert failed == {(True, None, why)}
    error.__traceback__ = None  # this test's own hold on the frames
    assert bytes_alive() - before <= mine  # the failed step keeps nothing alive


def test_a_step_that_fails_between_two_accumulated_losses_does_not_end_the_search() -> None:
    model, optimizer, _ = small()
    mp = mezzo.MixedPrecision(model, optimizer, "fp32", accumulate=2)

    def step(size: int) -> None:
        for part in range(2):
            if part and size > 5:
                raise MemoryError
            with mp.autocast():
                loss = F.cross_entropy(model(torch.randn(size, 32)), torch.randint(0, 4, (size,)))
            mp.step(loss)

    found = mezzo.find_batch_size(step, 4, limit="10 GB", rounds=0, model=model, optimizer=optimizer)
    assert found.largest == 5
    mp.close()


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("mat1 and mat2 shapes cannot be multiplied", False),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("[enforce fail] DefaultCPUAllocator: invalid size", False),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_out_of_memory(message: str, answer: bool, wrapped: bool) -> None:
    def step(size: int) -> None:
        if wrapped:
            raise RuntimeError("the backend failed") from RuntimeError(message)
        raise RuntimeError(message)

    with pytest.raises(MezzoError if answer else RuntimeError):
        mezzo.find_batch_size(step, 1, limit="1 GB")


def test_any_other_error_is_the_users_and_all_is_put_back() -> None:
    model, optimizer, step = small()
    before = everything(model, optimizer)

    def broken(size: int) -> None:
        step(size)
        if size > 16:
            raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        mezzo.find_batch_size(broken, limit="10 GB", model=model, optimizer=optimizer)
    assert everything(model, optimizer) == before


def everything(model: nn.Module, *others: Any) -> list[Any]:
    """Every bit that training changes, in a form that compares."""

    def plain(tensor: torch.Tensor) -> Any:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return str(tensor.dtype), tensor.stride(), flat

    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    modes, states = [each.training for each in model.modules()], [other.state_dict() for other in others]
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    found: list[Any] = tree_map_only(torch.Tensor, plain, [tensors, modes, states, streams])
    return found


def pytorchs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), amsgrad=True)


MEZZOS = functools.partial(mezzo.optim.AdamW, lr=0.01, state="int8")


@pytest.mark.parametrize("make", [pytorchs, pytest.param(MEZZOS, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_was_handed_over_is_put_back_to_the_bit(make: Any, steps_before: int) -> None:
    """After the search training goes on exactly as without it."""
    dtype = torch.bfloat16

    def train(search: bool) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).to(dtype)
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(size: int) -> None:
            x = torch.randn(size, 6, dtype=dtype) + random.random() + float(np.random.rand())

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                loss.backward()
                return loss

            model.train()
            optimizer.step(closure)
            schedule.step()
            model.seen += size
            model.eval()

        for _ in range(steps_before):
            step(5)
        if search:
            before = everything(model, optimizer, schedule)
            options: dict[str, Any] = {"model": model, "optimizer": optimizer, "restore": [schedule]}
            found = mezzo.find_batch_size(step, limit="10 GB", max_size=16, rounds=1, **options)
            assert found.largest == 16
            assert everything(model, optimizer, schedule) == before
        step(5)
        return everything(model, optimizer, schedule)

    assert train(search=True) == train(search=False)


def constant(size: int) -> None:
    torch.zeros(100)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"limit": "4 giga"}, "is not a number of bytes"),
    ({"limit": "4"}, "'4' has no unit. Write 4GiB"),
    ({"limit": 0}, "less than 1 byte"),
    ({"start": 0}, "start=0, .* 1 <= start <= max_size"),
    ({"max_size": 0}, "max_size=0: needs 1 <= start"),
    ({"start": 0}, r"integers as 8, 64 \(--start 8 --max 64\)"),
    ({"max_size": "a"}, "max_size='a': needs 1 <= start"),
    ({"max_size": 8.5}, "max_size=8.5: needs 1 <= start"),
    ({"start": "a"}, "start='a', .* 1 <= start <= max_size"),
    ({"step": None}, "step is None. Pass a function"),
    ({"start": 8, "max_size": 4}, "start=8, max_size=4: needs 1 <= start <= max_size"),
    ({"multiple_of": 8}, "round the result down"),
    ({"on_trial": print}, "`trials`"),
    ({"device": "meta"}, "on cpu and cuda devices only"),
    ({"restore": [3]}, "a int cannot be"),
    ({"rounds": 0}, "sizes from 8 to 512 take the same bytes"),
]


@pytest.mark.parametrize(("how", "says"), WRONG, ids=str)
def test_wrong_usage(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mezzo.find_batch_size(**{"step": constant, "limit": "1 GB", **how})


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(MezzoError, match="not even batch size 1: over the limit of 1 B"):
        mezzo.find_batch_size(constant, 2, limit=1)


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.distributed.is_distributed", lambda: True)
    with pytest.raises(UsageError, match="one process"):
        mezzo.find_batch_size(constant, limit="1 GB")


@pytest.mark.heavy
def test_the_limit_of_a_cpu_is_what_is_left_and_what_tensors_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.batch_size.spendable_bytes", lambda: 300_000)
    before = bytes_alive()
    model, optimizer, step = small()
    found = mezzo.find_batch_size(step, max_size=8, rounds=0, model=model, optimizer=optimizer)
    assert found.limit == before + 300_000 + sum(p.nbytes for p in (*model.parameters(), *model.buffers()))


GIB = 1024**3
BOX, INNER, CGROUP = "0::/box\n", "0::/box/inner\n", "proc/self/cgroup"


def group(place: str, limit: Any, used: Any = 0, stat: str = "") -> dict[str, Any]:
    """Files of a control group."""
    root = f"sys/fs/cgroup/{place}"
    return {f"{root}/memory.max": limit, f"{root}/memory.current": used, f"{root}/memory.stat": stat}


# files of a machine with 10 GiB available, and what is available with them
MACHINES: list[tuple[dict[str, Any], float | None]] = [
    ({"proc/meminfo": None}, None),
    ({"proc/meminfo": "MemFree: 1 kB\n"}, None),
    ({}, 10),
    ({CGROUP: "0::/\n"}, 10),
    ({CGROUP: BOX, **group("box", 4 * GIB, 3 * GIB, f"anon 7\ninactive_file {GIB}\n")}, 2),
    # the group's own limit is "max"; that of the one above counts
    ({CGROUP: INNER, **group("box/inner", "max"), **group("box", 8 * GIB, GIB)}, 7),
    ({CGROUP: BOX, **group("box", GIB, 2 * GIB)}, 0),
]


@pytest.mark.parametrize(("files", "gib"), MACHINES)
def test_what_a_machine_has_left(tmp_path: Path, files: dict[str, Any], gib: float | None) -> None:
    meminfo = f"MemTotal: 9 kB\nMemAvailable: {10 * GIB // 1024} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
    if gib is None:
        with pytest.raises(UsageError, match="8GiB"):
            spendable_bytes(tmp_path)
        return
    available = int(gib * GIB)
    assert spendable_bytes(tmp_path) == max(1, available - max(GIB // 2, available // 10))
