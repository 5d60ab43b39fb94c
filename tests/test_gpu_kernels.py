"""The Triton kernels on a GPU: the same bits as the reference on a CPU, no host sync, one launch, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import stepper_cases as cases
from mezzo.pytorch.kernels.gradient_norm import reference as norm_reference
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.kernels.optimizer_step import reference, stepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # PyTorch's own and Triton's, at their imports and first compilations.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ADAMW = cases.HYPERS["adamw"]


def pair(hyper: cases.Hyper, **how: object) -> tuple[list[cases.Row], list[cases.Row]]:
    """Rows on the GPU, some at odd addresses, and the same on the CPU."""
    ours = cases.rows(hyper, device="cuda", **how)
    return ours, cases.copied(ours)


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(cases.HYPERS))
def test_step_equals_the_reference_in_every_mode(name: str) -> None:
    hyper = cases.HYPERS[name]
    ours, expected = pair(hyper)
    step = stepper("cuda")
    overflows = torch.zeros((), device="cuda"), torch.zeros(())
    for number in (1, 2, 3):
        given = torch.tensor(0.37) if number > 1 else None
        on_gpu = None if given is None else given.cuda()
        step([(hyper, ours)], multiplier=on_gpu, found_inf=None, overflow=overflows[0])
        reference.DeviceStepper()(
            [(hyper, expected)], multiplier=given, found_inf=None, overflow=overflows[1]
        )
        cases.assert_same(ours, expected)
        cases.new_gradients(number, ours, expected)
    assert overflows[0].item() == overflows[1].item() == 1


@pytest.mark.heavy
@pytest.mark.parametrize("mode", cases.MODES[::4], ids=str)
def test_step_of_one_mode_alone_and_long(mode: tuple[str, str, torch.dtype]) -> None:
    """One kind has code of its own; three million elements are many programs of several blocks, with one step."""
    ours = [cases.row(ADAMW, mode, 3_000_017, 0, device="cuda")]
    expected = cases.copied(ours)
    step = stepper("cuda")
    for number in (1, 2):
        cases.move(step, ADAMW, ours)
        cases.reference_move(ADAMW, expected)
        cases.assert_same(ours, expected)
        cases.new_gradients(number, ours, expected)


def test_steps_are_counted_once_by_whichever_program_is_last() -> None:
    ours = [
        cases.row(ADAMW, ("split", "fp32", torch.bfloat16), 1_000_000, i, device="cuda") for i in range(8)
    ]
    step = stepper("cuda")
    for _ in range(100):
        cases.move(step, ADAMW, ours)
    assert [int(each.step) for each in ours] == [100] * 8


@pytest.mark.parametrize("found", [1.0, float("nan")])
def test_found_inf_leaves_everything(found: float) -> None:
    ours, expected = pair(ADAMW)
    step = stepper("cuda")
    cases.move(step, ADAMW, ours, found_inf=torch.tensor(found, device="cuda"))
    cases.assert_same(ours, expected)
    cases.move(step, ADAMW, ours, found_inf=torch.tensor(0.0, device="cuda"))
    cases.reference_move(ADAMW, expected)
    cases.assert_same(ours, expected)


@pytest.fixture
def default_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("default_sync_mode")
def test_the_host_never_waits() -> None:
    hyper = cases.HYPERS["lion"]
    mode = ("split", "fp32", torch.bfloat16)
    ours = [cases.row(hyper, mode, 5000, i, special=False, device="cuda") for i in range(3)]
    scalars = {name: torch.ones((), device="cuda") for name in ("multiplier", "overflow")}
    scalars["found_inf"] = torch.zeros((), device="cuda")
    grads = [torch.ones(5000, dtype=torch.bfloat16, device="cuda") for _ in ours]
    step = stepper("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        for each, grad in zip(ours, grads):
            each.grad = grad.clone()
        total = sum_of_squares([each.grad for each in ours if each.grad is not None])
        cases.move(step, hyper, ours, **scalars)
    torch.cuda.set_sync_debug_mode("default")
    assert total.item() == 15_000
    assert [int(each.step) for each in ours] == [3, 3, 3]


def test_one_launch_updates_all() -> None:
    ours, _ = pair(ADAMW, special=False)
    step = stepper("cuda")
    cases.move(step, ADAMW, ours)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiled:
        cases.move(step, ADAMW, ours)
        torch.cuda.synchronize()
    kernels = [
        event.name for event in profiled.events() if event.device_type is torch.autograd.DeviceType.CUDA
    ]
    assert [name for name in kernels if "Memcpy" not in name] == ["step_kernel"]


def test_a_step_in_a_cuda_graph_repeats_and_does_not_disturb_others() -> None:
    ours, expected = pair(ADAMW)
    step = stepper("cuda")
    cases.move(step, ADAMW, ours)  # compiles
    cases.reference_move(ADAMW, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.move(step, ADAMW, ours)
    cases.assert_same(ours, expected)  # capturing runs nothing
    for _ in range(2):
        graph.replay()
        cases.reference_move(ADAMW, expected)
    cases.move(step, ADAMW, ours)
    cases.reference_move(ADAMW, expected)
    graph.replay()
    cases.reference_move(ADAMW, expected)
    torch.cuda.synchronize()
    cases.assert_same(ours, expected)


def test_the_norm_equals_the_reference_and_itself() -> None:
    grads = [each.grad for each in pair(ADAMW, special=False)[0] if each.grad is not None]
    grads.append(torch.randn(1_000_003, device="cuda"))
    ours = sum_of_squares(grads)
    expected = norm_reference([grad.cpu() for grad in grads])
    assert abs(ours.item() / expected.item() - 1) < 1e-12
    assert all(torch.equal(sum_of_squares(grads), ours) for _ in range(5))
    grads[3][0] = float("nan")
    assert sum_of_squares(grads).isnan().item()
