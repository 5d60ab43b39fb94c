"""find_batch_size on real models: what it finds is so, what fails is told apart, and nothing of it stays."""

from __future__ import annotations

import gc
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo
from alive import bytes_alive
from mezzo.core.errors import UsageError
from mezzo.pytorch.batch_size import NothingFitsError, Trial
from mezzo.pytorch.free_memory import LEAST_MARGIN, available_bytes, spendable_bytes
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.out_of_memory import is_out_of_memory, says_out_of_memory
from mezzo.pytorch.snapshot import Snapshot

Step = Callable[[int], object]


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


def peak_of(step: Step, size: int) -> int:
    step(size)
    watch = PeakTensorBytes()
    watch.start()
    step(size)
    return watch.stop().peak_bytes


@pytest.fixture(scope="module")
def found_alone() -> Any:
    """START-MULTIPLE -> what a process of its own found."""
    child = Path(__file__).parent / "children" / "batch_sizes.py"
    return json.loads(subprocess.run([sys.executable, str(child)], check=True, capture_output=True).stdout)


@pytest.mark.heavy
@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("start", [16, 512])
def test_what_is_found_fits_and_the_next_multiple_does_not(
    found_alone: Any, multiple: int, start: int
) -> None:
    found = found_alone[f"{start}-{multiple}"]
    largest, limit, peaks = found["largest"], found["limit"], found["peaks"]
    assert largest % multiple == 0
    assert peaks[str(largest)] <= limit < peaks[str(largest + multiple)]
    for size, peak, fits, timed in found["trials"]:
        assert timed is fits
        assert peak == peaks[str(size)]
    assert limit == found["asked"]
    assert found["device"] == "cpu"


def test_nothing_fits_says_what_it_took() -> None:
    def whole(size: int) -> None:
        torch.zeros(100, size)

    with pytest.raises(NothingFitsError, match=r"nothing fits: batch size 1 takes .* the limit is 300 B\.$"):
        mezzo.find_batch_size(whole, limit=300)


def test_a_step_that_needs_two_samples_fails_below_what_does_not_fit() -> None:
    model, _, step = small()
    says = r"batch size 8 takes .* the limit is 1 kB\. No smaller .* 1 fails for another reason: Expected more than 1"
    with pytest.raises(NothingFitsError, match=says):  # it's BatchNorm that refuses a single sample
        mezzo.find_batch_size(step, limit="1kB", model=model)


def out_of_memory_beyond(step: Step, largest: int, error: BaseException) -> Step:
    def guarded(size: int) -> None:
        if size > largest:
            kept = torch.zeros(1000, size)  # what the failed step had made so far
            raise error from None if kept is None else error.__cause__
        step(size)

    return guarded


FAILURES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB."),
    MemoryError(),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
]  # fmt: skip


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__ + str(error)[:20])
def test_a_step_that_runs_out_of_memory_is_a_size_that_does_not_fit(error: Exception) -> None:
    model, optimizer, step = small()
    told: list[Trial] = []
    found = mezzo.find_batch_size(
        out_of_memory_beyond(step, 37, error),
        limit="10 GB",
        rounds=0,
        model=model,
        optimizer=optimizer,
        on_trial=told.append,
    )
    assert found.largest == 37
    assert tuple(told) == found.trials
    failed = [trial for trial in found.trials if not trial.fits]
    assert all(trial.size > 37 and trial.peak_bytes is None for trial in failed)
    assert {trial.why for trial in failed} == {
        str(error) if "Tried" not in str(error) else "CUDA out of memory. Tried to allocate 2.00 GiB"
    } or {trial.why for trial in failed} == {"out of memory"}


def test_the_failed_step_keeps_nothing_alive() -> None:
    before = bytes_alive()
    model, optimizer, step = small()
    step(8)
    mine = bytes_alive() - before
    error = torch.OutOfMemoryError("out")
    mezzo.find_batch_size(
        out_of_memory_beyond(step, 20, error), limit="10 GB", rounds=0, model=model, optimizer=optimizer
    )
    error.__traceback__ = None  # this test's own hold on the frames
    assert bytes_alive() - before <= mine


def test_gradients_of_a_size_that_failed_half_way_are_gone_at_the_next() -> None:
    model = nn.Linear(4, 1)
    began_clean: dict[int, bool] = {}

    def step(size: int) -> None:
        began_clean.setdefault(size, model.weight.grad is None)
        model(torch.ones(size, 4)).sum().backward()
        if size > 10:
            raise MemoryError

    mezzo.find_batch_size(step, limit="10 GB", rounds=0, model=model)
    assert all(began_clean.values())


def test_what_earlier_sizes_left_in_cycles_is_not_counted() -> None:
    def step(size: int) -> None:
        cycle: list[Any] = [torch.zeros(size * 1000)]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        trials = mezzo.find_batch_size(step, limit="10 GB", max_size=32, rounds=0).trials
    finally:
        gc.enable()
    assert [trial.size for trial in trials] == [8, 16, 32]
    assert [b.peak_bytes - a.peak_bytes for a, b in pairwise(trials)] == [32_000, 64_000]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ValueError("out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: out of memory"), True),
        (torch.OutOfMemoryError("x"), True),
    ],
)
def test_what_is_out_of_memory(error: Exception, answer: bool) -> None:
    assert is_out_of_memory(error) is answer
    wrapper = RuntimeError("the backend failed")
    wrapper.__cause__ = error
    assert is_out_of_memory(wrapper) is answer
    assert says_out_of_memory("...\nMemoryError\n")


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

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (
                value.dtype,
                value.stride(),
                value.detach().contiguous().reshape(-1).view(torch.uint8).tolist(),
            )
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    return [
        plain(list(model.parameters())),
        plain([parameter.grad for parameter in model.parameters()]),
        plain(dict(model.named_buffers())),
        [module.training for module in model.modules()],
        [plain(other.state_dict()) for other in others],
        random.getstate(),
        plain(np.random.get_state()[1].tolist()),
        plain(torch.get_rng_state()),
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)


def of_mezzo(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = mezzo.optim.AdamW(model.parameters(), lr=0.01, state="int8")
    return optimizer


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", [adamw, lbfgs, pytest.param(of_mezzo, marks=pytest.mark.heavy), momentum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_handed_over_is_put_back_to_the_bit(
    make: Callable[[nn.Module], torch.optim.Optimizer], steps_before: int, dtype: torch.dtype
) -> None:
    """After the search training goes on exactly as without it."""
    if dtype == torch.bfloat16 and make is lbfgs:
        dtype = torch.float64  # LBFGS needs a precision to search in

    def train(search: bool) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).to(dtype)
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(size: int) -> None:
            x = torch.randn(size, 6, dtype=dtype) + random.random() + float(np.random.rand())

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                loss.backward()
                return loss

            model.train()
            if make is lbfgs:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            schedule.step()
            model.seen += size
            model.eval()

        for _ in range(steps_before):
            step(5)
        if search:
            before = everything(model, optimizer, schedule)
            found = mezzo.find_batch_size(
                step,
                limit="10 GB",
                max_size=16,
                rounds=1,
                model=model,
                optimizer=optimizer,
                restore=[schedule],
            )
            assert found.largest == 16
            assert everything(model, optimizer, schedule) == before
        for _ in range(2):
            step(5)
        return everything(model, optimizer, schedule)

    np.random.seed(1)
    plain = train(search=False)
    np.random.seed(1)
    assert train(search=True) == plain


@pytest.mark.heavy
def test_weights_with_split_masters_and_the_short_loop_are_put_back() -> None:
    def train(search: bool) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mp = mezzo.MixedPrecision(model, optimizer, "bf16,masters=split")

        def step(size: int) -> None:
            with mp.autocast():
                loss = F.cross_entropy(model(torch.randn(size, 16)), torch.randint(0, 4, (size,)))
            mp.step(loss)

        step(4)
        if search:
            mezzo.find_batch_size(
                step, limit="10 GB", max_size=32, rounds=1, model=model, optimizer=optimizer, restore=[mp]
            )
        step(4)
        masters = mezzo.master_state_dict(model, optimizer)
        result = [everything(model, optimizer), {name: value.tolist() for name, value in masters.items()}]
        mp.close()
        return result

    assert train(search=True) == train(search=False)


def test_tensors_stay_the_same_objects() -> None:
    model, optimizer, step = small()
    step(4)
    held = [*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())]
    snapshot = Snapshot([model], [optimizer])
    step(4)
    snapshot.restore()
    now = [*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())]
    assert all(a is b for a, b in zip(held, now))


def test_the_copies_are_no_tensors() -> None:
    model, optimizer, step = small()
    step(4)
    before = bytes_alive()
    snapshot = Snapshot([model], [optimizer])
    assert bytes_alive() == before
    snapshot.restore()


def test_memory_and_time_are_taken_from_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is watched or timed, and the first is neither."""
    log: list[str] = []
    clock = iter(range(1000))

    class Watch(PeakTensorBytes):
        def start(self) -> None:
            log.append("[")
            super().start()

        def stop(self) -> Any:
            log.append("]")
            return super().stop()

    def now() -> float:
        log.append("t")
        return float(next(clock))

    monkeypatch.setattr("mezzo.pytorch.batch_size.PeakTensorBytes", Watch)
    monkeypatch.setattr("mezzo.pytorch.batch_size.time.perf_counter", now)

    def step(size: int) -> None:
        log.append("s")
        torch.zeros(size)

    found = mezzo.find_batch_size(step, 8, max_size=8, limit="10 GB", rounds=2)
    assert "".join(log) == "s[s]tsttst"
    assert found.trials[0].seconds == 1.0


def constant(size: int) -> None:
    torch.zeros(100)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rounds": -1}, "rounds=-1"),
    ({"limit": "4 giga"}, "is no number of bytes"),
    ({"start": 0}, "start=0"),
    ({"device": "meta"}, "memory is measured on cpu and cuda devices only"),
    ({"model": 3}, "model is a int"),
    ({"model": [3]}, "model is a int: give an nn.Module"),
    ({"restore": [3]}, "a int can't be restored"),
    (
        {"limit": "1 GB", "rounds": 0, "factor": 100.0},
        r"the same bytes at every size from 8 to 800: .* larger start, such as 800",
    ),
]


@pytest.mark.parametrize(("how", "says"), WRONG)
def test_wrong_usage(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mezzo.find_batch_size(constant, **how)


@pytest.mark.heavy
def test_the_limit_of_a_cpu_is_what_is_left_and_what_tensors_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.batch_size.spendable_bytes", lambda: 300_000)
    before = bytes_alive()
    model, optimizer, step = small()
    found = mezzo.find_batch_size(step, rounds=0, model=model, optimizer=optimizer)
    assert found.limit == before + 300_000 + sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    monkeypatch.setattr("mezzo.pytorch.batch_size.spendable_bytes", lambda: None)
    with pytest.raises(UsageError, match=r"this system does not say how much memory is available\. Give"):
        mezzo.find_batch_size(step)


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.distributed.is_distributed", lambda: True)
    with pytest.raises(UsageError, match="one process"):
        mezzo.find_batch_size(constant, limit="1 GB")


GIB = 1024**3
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"

# files of a machine with 10 GiB available, and what is available with them
MACHINES: list[tuple[dict[str, Any], float | None]] = [
    ({}, 10),
    ({"proc/meminfo": "MemFree: 1 kB\n"}, None),
    ({"proc/meminfo": None}, None),
    ({"proc/self/cgroup": "0::/\n"}, 10),
    (
        {
            "proc/self/cgroup": "0::/box\n",
            f"{V2}/box/memory.max": 4 * GIB,
            f"{V2}/box/memory.current": 3 * GIB,
            f"{V2}/box/memory.stat": f"anon 7\ninactive_file {GIB}\n",
        },
        2,
    ),
    (
        {  # the group's own limit is "max"; that of the one above counts
            "proc/self/cgroup": "0::/box/inner\n",
            f"{V2}/box/inner/memory.max": "max",
            f"{V2}/box/inner/memory.current": 0,
            f"{V2}/box/memory.max": 4 * GIB,
            f"{V2}/box/memory.current": GIB,
            f"{V2}/box/memory.stat": "",
        },
        3,
    ),
    (
        {  # a container that sees itself as the top
            "proc/self/cgroup": "5:cpu,memory:/docker/abc\n0::/\n",
            f"{V1}/memory.limit_in_bytes": 6 * GIB,
            f"{V1}/memory.usage_in_bytes": 5 * GIB,
            f"{V1}/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
        1.5,
    ),
    (
        {
            "proc/self/cgroup": "0::/box\n",
            f"{V2}/box/memory.max": GIB,
            f"{V2}/box/memory.current": 2 * GIB,
            f"{V2}/box/memory.stat": "",
        },
        0,
    ),
]


@pytest.mark.parametrize(("files", "gib"), MACHINES)
def test_what_a_machine_has_left(tmp_path: Path, files: dict[str, Any], gib: float | None) -> None:
    for name, text in {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {10 * GIB // 1024} kB\n",
        **files,
    }.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
    expected = None if gib is None else int(gib * GIB)
    assert available_bytes(tmp_path) == expected
    if expected is not None:
        assert spendable_bytes(tmp_path) == max(0, expected - max(LEAST_MARGIN, int(0.1 * expected)))


@pytest.mark.heavy
def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "batch-size.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    others = bytes_alive()
    names: dict[str, Any] = {}
    exec(block.replace('limit="2 MB"', f"limit={2_000_000 + others}"), names)
    found = names["found"]
    assert found.largest % 8 == 0
    assert f"batch size {found.largest} is the largest that fits" in capsys.readouterr().out


def test_a_step_that_is_no_function_is_named() -> None:
    with pytest.raises(UsageError, match="step is a int: give a function of the batch size"):
        mezzo.find_batch_size(3)  # type: ignore[arg-type]
