"""The compiled CPU kernels equal the reference to the bit, whatever the numbers, sizes, layouts and threads."""

from __future__ import annotations

import ctypes
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.core.errors import MezzoError
from mezzo.pytorch.kernels.gradient_norm import reference as norm_reference
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, reference
from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper, LionHyper, SgdHyper
from mezzo.pytorch.kernels.optimizer_step.storage import groups

pytest.importorskip("numba", reason="the CPU kernels are compiled by Numba")

from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.gradient_norm import cpu as norm_cpu
from mezzo.pytorch.kernels.optimizer_step import cpu, cpu_loops

RULES: dict[str, Hyper] = {
    "adamw": AdamHyper(1e-2, 0.9, 0.99, 1e-8, 1e-2, decoupled=True),
    "adam": AdamHyper(1e-2, 0.8, 0.99, 1e-6, 0.1, decoupled=False, maximize=True),
    "sgd": SgdHyper(0.1, weight_decay=0.01),
    "momentum": SgdHyper(0.1, momentum=0.9, dampening=0.3, weight_decay=0.01, maximize=True),
    "nesterov": SgdHyper(0.05, momentum=0.8, nesterov=True),
    "lion": LionHyper(1e-2, 0.9, 0.99, 0.1),
}
WEIGHTS = {
    "own": ("own", torch.float32, None),
    "fp32 bf16": ("fp32", torch.bfloat16, torch.float32),
    "fp32 fp16": ("fp32", torch.float16, torch.float32),
    "split": ("split", torch.bfloat16, torch.int16),
    "split8": ("split8", torch.bfloat16, torch.int8),
    "none": ("none", torch.bfloat16, None),
}
STORED_AS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
GRADS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 63, 64, 65, 1000, 65_537, 70_001)

SAMPLE = [
    ("adamw", "split", "fp32", torch.bfloat16),
    ("adamw", "split8", "int8", torch.bfloat16),
    ("lion", "fp32 fp16", "bf16", torch.float16),
]
# Every two of rule, weights, state and gradient together at least once; all 324 would compile for minutes.
PAIRS = [
    (rule, weights, tuple(STORED_AS)[(i + j) % 3], GRADS[(i // 2 + j // 2) % 3])
    for i, rule in enumerate(RULES)
    for j, weights in enumerate(WEIGHTS)
]
ODD = [
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-45,
    -1e-40,
    1.2e-38,
    3.3895e38,
    3.4e38,
    -3.4028235e38,
    65504.0,
]


def random(count: int, seed: int, odd: bool) -> Tensor:
    """Numbers of many sizes, some of them not numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * torch.logspace(-9, 1, count)
    if odd and count:
        positions = torch.randint(count, (count // 50 + 1,), generator=generator)
        values[positions] = torch.tensor(ODD)[torch.randint(len(ODD), positions.shape, generator=generator)]
    return values


def row(count: int, rule: str, weights: str, state: str, ordinal: int, odd: bool = True) -> Row:
    """A row whose remainder or master partly belongs to other weights, as after somebody's edit."""
    masters, dtype, kept = WEIGHTS[weights]
    weight = random(count, ordinal, odd).to(dtype)
    master = None
    if kept is torch.float32:
        master = torch.where(
            random(count, ordinal + 1, False) > 0, weight.float(), random(count, ordinal + 2, odd)
        )
    elif kept is not None:
        limits = torch.iinfo(kept)
        generator = torch.Generator().manual_seed(ordinal)
        master = torch.randint(limits.min, limits.max + 1, (count,), generator=generator).to(kept)
    specs = RULES[rule].states
    states, scales = [], []
    for spec in specs:
        generator = torch.Generator().manual_seed(ordinal + 7)
        if state == "int8":
            states.append(torch.randint(0, 256, (count,), generator=generator).to(torch.uint8))
            fields = torch.randint(1, 254, (groups(count),), generator=generator)
            scale = (fields << 7).to(torch.int16).view(torch.bfloat16)
            scale[::7] = 0
            scale[5::7] = math.nan if odd else 1.0
            scales.append(scale)
        else:
            values = random(count, ordinal + 3, odd) * 0.01
            states.append((values if spec.signed else values.abs()).to(STORED_AS[state]))
            scales.append(None)
    step = torch.tensor(float(ordinal % 2))
    return Row(weight, None, masters, master, state, tuple(states), tuple(scales), step, ordinal)


def tensors(of: Row) -> list[Tensor]:
    return [t for t in (of.weight, of.master, *of.states, *of.scales, of.step) if t is not None]


def copy(of: Row) -> Row:
    def clone(tensor: Any) -> Any:
        return None if tensor is None else tensor.clone()

    states, scales = tuple(map(clone, of.states)), tuple(map(clone, of.scales))
    return Row(
        clone(of.weight),
        of.grad,
        of.masters,
        clone(of.master),
        of.state,
        states,
        scales,
        of.step.clone(),
        of.ordinal,
    )


def assert_same(got: Row, expected: Row) -> None:
    """Bit for bit; of NaNs in FP32 and fp16 it matters only that they are."""
    for index, (a, b) in enumerate(zip(tensors(got), tensors(expected))):
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        differ = a.reshape(-1).view(whole) != b.reshape(-1).view(whole)
        if a.dtype in (torch.float32, torch.float16):
            differ &= ~(a.isnan() & b.isnan()).reshape(-1)
        where = differ.nonzero().flatten()[:5]
        assert not where.numel(), (index, a.dtype, where, a.reshape(-1)[where], b.reshape(-1)[where])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def compare(
    rule: str, weights: str, state: str, grad: torch.dtype, sizes: tuple[int, ...], steps: int = 3
) -> None:
    hyper = RULES[rule]
    got = [row(size, rule, weights, state, ordinal) for ordinal, size in enumerate(sizes)]
    expected = [copy(of) for of in got]
    step, truth = cpu.DeviceStepper(), reference.DeviceStepper()
    overflow, overflowed = torch.zeros(()), torch.zeros(())
    for index in range(steps):
        for a, b in zip(got, expected):
            a.grad = b.grad = random(a.weight.numel(), 50 + index + a.ordinal, odd=index == 1).to(grad)
        given = {"multiplier": torch.tensor(0.37) if index else None, "found_inf": torch.zeros(())}
        step([(hyper, got)], overflow=overflow, **given)
        truth([(hyper, expected)], overflow=overflowed, **given)
        for a, b in zip(got, expected):
            assert_same(a, b)
        assert overflow == overflowed


@pytest.mark.parametrize(("rule", "weights", "state", "grad"), SAMPLE)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_equals_the_reference(
    rule: str, weights: str, state: str, grad: torch.dtype, count: int
) -> None:
    torch.set_num_threads(count)
    compare(rule, weights, state, grad, SIZES)


def test_the_pairs_are_all_there() -> None:
    choices = (RULES, WEIGHTS, STORED_AS, GRADS)
    for (i, a), (j, b) in itertools.combinations(enumerate(choices), 2):
        assert {(kind[i], kind[j]) for kind in PAIRS} == set(itertools.product(a, b))


@pytest.mark.heavy
@pytest.mark.parametrize(("rule", "weights", "state", "grad"), PAIRS)
def test_every_pair_of_choices_equals_the_reference(
    rule: str, weights: str, state: str, grad: torch.dtype
) -> None:
    torch.set_num_threads(3)
    compare(rule, weights, state, grad, (1, 63, 64, 65, 1000, 33_000))


def test_several_groups_kinds_and_numbers_of_moves_in_one_step() -> None:
    rows = [row(300, "adamw", "split", "fp32", 0), row(40_000, "adamw", "own", "fp32", 1)]
    rows += [row(129, "adamw", "split", "fp32", 2), row(0, "adamw", "own", "fp32", 3)]
    late = row(77, "adamw", "own", "fp32", 4)
    got, expected = [*rows, late], [copy(of) for of in (*rows, late)]
    other = AdamHyper(3e-2, 0.5, 0.9, 1e-6, 0.0, decoupled=True, maximize=True)
    step, truth = cpu.DeviceStepper(), reference.DeviceStepper()
    for index in range(4):
        for a, b in zip(got, expected):
            dtype = torch.bfloat16 if a.weight.dtype is torch.bfloat16 else torch.float32
            a.grad = b.grad = random(a.weight.numel(), index, False).to(dtype)
        if index < 2:
            got[4].grad = expected[4].grad = None
        given = {"multiplier": None, "found_inf": None, "overflow": None}
        step([(RULES["adamw"], got[:2]), (other, got[2:])], **given)
        truth([(RULES["adamw"], expected[:2]), (other, expected[2:])], **given)
        for a, b in zip(got, expected):
            assert_same(a, b)
    assert got[4].step.item() == 2


def test_a_skipped_step_changes_nothing() -> None:
    of = row(1000, "adamw", "split8", "int8", 1)
    before = copy(of)
    of.grad = torch.ones(1000, dtype=torch.bfloat16)
    step = cpu.DeviceStepper()
    for found in (1.0, -1.0, math.nan, math.inf):
        step([(RULES["adamw"], [of])], multiplier=None, found_inf=torch.tensor(found), overflow=None)
        assert_same(of, before)


def test_overflow_is_told_and_never_taken_back() -> None:
    of = row(100, "adamw", "split", "fp32", 0, odd=False)
    of.grad = torch.ones(100, dtype=torch.bfloat16)
    step, overflow = cpu.DeviceStepper(), torch.zeros(())
    given: dict[str, Any] = {"multiplier": None, "found_inf": None, "overflow": overflow}
    step([(RULES["adamw"], [of])], **given)
    assert overflow == 0
    of.weight[70] = math.inf
    step([(RULES["adamw"], [of])], **given)
    assert overflow == 1
    of.weight[70] = 0
    step([(RULES["adamw"], [of])], **given)
    assert overflow == 1


def test_elements_are_taken_in_memory_order() -> None:
    def channels_last(tensor: Tensor) -> Tensor:
        return tensor.view(4, 5, 6, 3).to(memory_format=torch.channels_last)

    of = row(360, "adamw", "split", "fp32", 0)
    for name in ("weight", "master"):
        setattr(of, name, channels_last(getattr(of, name)))
    of.states = tuple(map(channels_last, of.states))
    of.grad = channels_last(random(360, 1, False).bfloat16())
    expected = copy(of)
    given: dict[str, Any] = {"multiplier": None, "found_inf": None, "overflow": None}
    cpu.DeviceStepper()([(RULES["adamw"], [of])], **given)
    reference.DeviceStepper()([(RULES["adamw"], [expected])], **given)
    assert_same(of, expected)
    assert of.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_weight_and_a_gradient_may_move_in_memory_and_change_dtype() -> None:
    of = row(500, "adamw", "split", "fp32", 0)
    expected = copy(of)
    step, truth = cpu.DeviceStepper(), reference.DeviceStepper()
    for index, dtype in enumerate((torch.bfloat16, torch.bfloat16, torch.float32)):
        of.weight.data = of.weight.data.clone()
        of.grad = expected.grad = random(500, index, False).to(dtype)
        given: dict[str, Any] = {"multiplier": None, "found_inf": None, "overflow": None}
        step([(RULES["adamw"], [of])], **given)
        truth([(RULES["adamw"], [expected])], **given)
        assert_same(of, expected)


def test_a_stepper_lets_go_of_replaced_rows() -> None:
    weights = [torch.zeros(10), torch.zeros(20)]
    step = cpu.DeviceStepper()
    given: dict[str, Any] = {"multiplier": None, "found_inf": None, "overflow": None}
    seen = []
    for index in range(3):
        rows = []
        for weight in weights:
            state = torch.zeros_like(weight)
            seen.append(weakref.ref(state))
            grad, moves = torch.ones_like(weight), torch.zeros(())
            rows.append(Row(weight, grad, "own", None, "fp32", (state,), (None,), moves, 0))
        if index == 0:
            step([(RULES["momentum"], rows)], **given)
        step([(RULES["momentum"], rows[:1])], **given)
        del rows, state
    assert [ref() is None for ref in seen] == [True, True, True, True, False, True]


def test_flushed_subnormals_do_not_reach_what_is_stored_in_integers() -> None:
    of = row(1000, "sgd", "split", "fp32", 0)
    tiny = torch.full((1000,), 0x0001, dtype=torch.int16).view(torch.bfloat16)
    of.weight.copy_(tiny)
    assert of.master is not None
    of.master.zero_()
    of.grad = torch.zeros(1000, dtype=torch.bfloat16)
    still = SgdHyper(0.0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush subnormals")
    try:
        torch.set_num_threads(1)
        cpu.DeviceStepper()([(still, [of])], multiplier=None, found_inf=None, overflow=None)
    finally:
        torch.set_flush_denormal(False)
    assert not of.weight.isnan().any()
    assert torch.equal(of.master, torch.zeros_like(of.master))


# --- the norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", GRADS)
def test_the_norm_does_not_depend_on_threads(dtype: torch.dtype) -> None:
    grads = [random(size, size, False).to(dtype) for size in (*SIZES, 0, 300_000)]
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(norm_cpu.sum_of_squares(grads).item())
    assert len(set(results)) == 1
    assert math.isclose(results[0], norm_reference.sum_of_squares(grads).item(), rel_tol=1e-12)


def test_the_norm_of_gradients_of_several_dtypes() -> None:
    grads = [random(1000, seed, False).to(dtype) for seed, dtype in enumerate((*GRADS, *GRADS))]
    expected = norm_reference.sum_of_squares(grads).item()
    assert math.isclose(norm_cpu.sum_of_squares(grads).item(), expected, rel_tol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_norm_shows_what_is_not_finite_wherever_it_is(value: float) -> None:
    for at in (0, 63, 64, 65_535, 65_536, 70_000):
        grad = torch.full((70_001,), 3.0e38)
        assert norm_cpu.sum_of_squares([torch.ones(5), grad]).isfinite()
        grad[at] = value
        assert not norm_cpu.sum_of_squares([torch.ones(5), grad]).isfinite()


# --- threads -------------------------------------------------------------------------------------------------------


def counter() -> tuple[int, Any, Callable[[], None]]:
    """A C function that counts its calls, the data for it, and a check that Python's lock was free."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    seen: list[int] = []
    function = kind(lambda data: seen.append(data))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address, seen, function  # type: ignore[return-value]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_region_runs_once_on_each_thread(count: int) -> None:
    torch.set_num_threads(count)
    address, seen, _function = counter()
    jit.parallel(address, 42)
    assert seen == [42] * count
    jit.alone(address, 7)
    assert seen == [42] * count + [7]


def test_python_threads_serve_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_openmp", lambda: None)
    torch.set_num_threads(3)
    assert not jit.has_openmp()
    address, seen, _function = counter()
    jit.parallel(address, 5)
    assert seen == [5] * 3
    compare("adamw", "split", "fp32", torch.bfloat16, (70_001, 64))


def _in_a_child(step: cpu.DeviceStepper, of: Row, results: Any) -> None:
    torch.set_num_threads(2)  # PyTorch's own operations would wait for the parent's threads for ever
    step([(RULES["adamw"], [of])], multiplier=None, found_inf=None, overflow=None)
    results.send((jit.has_openmp(), of.weight.view(torch.int16).tolist()))


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_steps_on_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    of = row(200_000, "adamw", "split", "fp32", 0)
    of.grad = random(200_000, 3, False).bfloat16()
    step = cpu.DeviceStepper()
    step([(RULES["adamw"], [of])], multiplier=None, found_inf=None, overflow=None)
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
    step([(RULES["adamw"], [of])], multiplier=None, found_inf=None, overflow=None)
    assert has_openmp is False
    assert weight == of.weight.view(torch.int16).tolist()


# --- the cache of compiled kernels ---------------------------------------------------------------------------------

ONE_STEP = """
import torch
from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.optimizer_step import cpu_loops
kernel = jit.kernel(cpu_loops, {}, "count_moves")
assert jit.kernel(cpu_loops, {}, "count_moves") is kernel
assert jit.kernels() == (kernel,)
assert jit.compile_seconds() == kernel.seconds > 0
print(kernel.from_cache)
"""


def run(cache: Path, code: str = ONE_STEP, **more: str) -> str:
    environment = {**os.environ, "MEZZO_CACHE_DIR": str(cache), **more}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.heavy
def test_what_one_process_compiled_the_next_loads(tmp_path: Path) -> None:
    assert run(tmp_path) == "False"
    written = list(tmp_path.rglob("optimizer_step_cpu_loops_*.py"))
    assert len(written) == 1
    assert run(tmp_path) == "True"
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.heavy
def test_processes_may_compile_the_same_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "MEZZO_CACHE_DIR": str(tmp_path)}
    several = [
        subprocess.Popen([sys.executable, "-c", ONE_STEP], env=environment, stdout=subprocess.DEVNULL)
        for _ in range(3)
    ]
    assert [process.wait(120) for process in several] == [0, 0, 0]
    assert run(tmp_path) == "True"


@pytest.mark.heavy
def test_without_a_folder_to_write_kernels_are_compiled_for_this_process(tmp_path: Path) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("not a folder")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert run(occupied, TMPDIR=str(temporary)) == "False"
    assert list(temporary.iterdir()) == []


def test_a_binding_must_be_one_of_the_templates() -> None:
    with pytest.raises(ValueError, match="cpu_loops has no bound curve"):
        jit.kernel(cpu_loops, {"curve": "math:sqrt"})


def test_a_compiler_that_fails_is_no_dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(main: Any) -> Any:
        raise TypeError("no such instruction")

    monkeypatch.setattr(jit, "entry", fails)
    monkeypatch.setattr(jit, "_kernels", {})
    with pytest.raises(MezzoError, match=r"no such instruction.*MEZZO_KERNELS=reference"):
        jit.kernel(cpu_loops, {}, "count_moves")
