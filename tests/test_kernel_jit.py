"""Numba's support: PyTorch's threads, the cache of compiled kernels, and who may own that cache and write to it.

The cache is executed as Python code, so one that others can change is not used.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stepper_cases as cases
from mezzo.core.errors import MezzoError
from mezzo.core.recipes import RECIPES
from mezzo.pytorch.kernels.optimizer_step import Row

pytest.importorskip("numba")

from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.cross_entropy import cross_entropy_loss
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.kernels.norms import layer_norm, rms_norm
from mezzo.pytorch.kernels.optimizer_step import cpu
from mezzo.pytorch.kernels.quantized import quantize

ADAMW = cases.HYPERS["adamw"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def norm_of(norm: Callable[..., Tensor], rows: int, columns: int) -> list[Tensor]:
    leaves = [normal(rows, columns).bfloat16().requires_grad_(), normal(columns).requires_grad_()]
    out = norm(leaves[0], (columns,), leaves[1])
    return [out, *torch.autograd.grad(out, leaves, normal(rows, columns).bfloat16())]


def loss_rows() -> list[Tensor]:
    leaf, target = normal(70, 3000).bfloat16().requires_grad_(), torch.arange(70)
    target[::3] = -100
    out = cross_entropy_loss(leaf, target, None, 0, -100, 0.1)
    return [out, *torch.autograd.grad(out, leaf, torch.ones(70))]


def quantized(recipe: str) -> list[Tensor]:
    x, factors = normal(512, 512).mul(64).round().div(64).bfloat16(), RECIPES[recipe].weight_gradient
    found = [quantize(x, factor, 0, torch.bfloat16) for factor in factors]
    return [part for each in found for part in (each.codes, each.inv_scale, each.values(torch.bfloat16))]


ON_THREADS: dict[str, Callable[[], list[Tensor]]] = {
    "many rows of layer_norm": lambda: norm_of(layer_norm, 1000, 100),
    "long rows of layer_norm": lambda: norm_of(layer_norm, 70, 1024),
    "many rows of rms_norm": lambda: norm_of(rms_norm, 1000, 100),
    "long rows of rms_norm": lambda: norm_of(rms_norm, 70, 1024),
    "cross entropy": loss_rows,
    "mxfp8": lambda: quantized("mxfp8"),
    "nvfp4": lambda: quantized("nvfp4"),
    "sum of squares": lambda: [sum_of_squares([normal(count) for count in (1 << 18, 3, 70_000)])],
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((n, "numba") for n in ON_THREADS), ("cross entropy", "reference"), ("sum of squares", "reference")],
)
def test_threads_change_no_bit(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", implementation)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(ON_THREADS[name]())
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def _in_a_child(step: cpu.DeviceStepper, of: Row, results: Any) -> None:
    torch.set_num_threads(2)  # PyTorch's own operations would wait for the parent's threads for ever
    cases.move(step, ADAMW, [of])
    results.send((jit.has_openmp(), of.weight.view(torch.int16).tolist()))


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_steps_on_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    of = cases.row(ADAMW, ("split", "fp32", torch.bfloat16), 200_000, 0, special=False)
    step = cpu.DeviceStepper()
    cases.move(step, ADAMW, [of])
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_in_a_child, args=(step, of, sending), daemon=True)
    child.start()
    try:
        assert receiving.poll(60)
        has_openmp, weight = receiving.recv()
    finally:
        child.kill()
        child.join(10)
    cases.move(step, ADAMW, [of])
    assert has_openmp is False
    assert weight == of.weight.view(torch.int16).tolist()


ONE_STEP = """
from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.optimizer_step import cpu
kernel = jit.kernel(cpu, {}, "count_moves")
assert jit.kernel(cpu, {}, "count_moves") is kernel
print(kernel.from_cache)
"""


def run(cache: Path, code: str = ONE_STEP, **more: str) -> str:
    environment = {**os.environ, "MEZZO_CACHE_DIR": str(cache), **more}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_what_processes_compile_at_once_the_next_loads(tmp_path: Path) -> None:
    environment = {**os.environ, "MEZZO_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ONE_STEP]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    written = list(tmp_path.rglob("optimizer_step_cpu_*.py"))
    assert len(written) == 1
    assert run(tmp_path) == "True"
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_without_a_folder_to_write_kernels_are_compiled_for_this_process(tmp_path: Path) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("not a folder")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert run(occupied, TMPDIR=str(temporary)) == "False"
    assert list(temporary.iterdir()) == []


def test_a_compiler_that_fails_is_no_dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(main: Any) -> Any:
        raise TypeError("no such instruction")

    monkeypatch.setattr(jit, "entry", fails)
    monkeypatch.setattr(jit, "_kernels", {})
    with pytest.raises(MezzoError, match=r"no such instruction.*MEZZO_KERNELS=reference"):
        jit.kernel(cpu, {}, "count_moves")


@pytest.fixture(autouse=True)
def ordinary_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def folder_of(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEZZO_CACHE_DIR", str(cache))
    return jit._folder.__wrapped__()


def owned_by_another(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another user had made it: only root could really give a file away."""
    lstat = Path.lstat

    def pretended(path: Path) -> os.stat_result:
        found = lstat(path)
        if path == place.resolve():
            found = os.stat_result((*found[:4], os.getuid() + 4711, *found[5:]))
        return found

    monkeypatch.setattr(Path, "lstat", pretended)


# Name -> whether it is the cache or the folder in it, and what happens to that.
REFUSED: dict[str, tuple[str, Callable[[Path, pytest.MonkeyPatch], object]]] = {
    "cache writable by group": ("cache", lambda place, _: place.chmod(0o770)),
    "folder writable by all": ("folder", lambda place, _: place.chmod(0o707)),
    "folder of another user": ("folder", owned_by_another),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_cache_that_others_can_change_is_not_used(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, cache = tmp_path / "real", tmp_path / "link"
    folder = folder_of(real, monkeypatch)
    cache.symlink_to(real)
    which, change = REFUSED[what]
    named = real if which == "cache" else folder
    change(named, monkeypatch)
    with pytest.warns(UserWarning, match="kernel cache") as told:
        found = folder_of(cache, monkeypatch)
    assert real not in found.parents
    assert found.stat().st_mode & 0o777 == 0o700
    assert len(told) == 1
    for word in (str(named), "chmod 700", "MEZZO_CACHE_DIR"):
        assert word in str(told[0].message)


USED: dict[str, Callable[[Path], Path]] = {
    "fresh": lambda place: place / "new" / "cache",
    "private": lambda place: place,
    "in a sticky folder, as /tmp": lambda place: place / "tmp" / "mine",
    "a link of one's own": lambda place: place / "link",
}


@pytest.mark.parametrize("what", USED)
def test_a_cache_of_ones_own_is_used(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "readable").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "readable")
    cache = USED[what](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = folder_of(cache, monkeypatch)
        assert folder_of(cache, monkeypatch) == folder
    assert cache.resolve() in folder.parents
    assert folder.stat().st_mode & 0o777 == 0o700
