"""What each format measures on this device: matrix products, a convolution's training step, and memory
bandwidth.

The convolution stands beside the matrix product because one does not tell the other: on a CPU with
AVX512-FP16, fp16 matrix products are fast and the backward of an fp16 convolution took 80 times as long as
in bf16 (torch 2.13). Everything is measured as PyTorch itself runs it in that dtype, without Mezzo.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from mezzo.doctor.timing import Task, Timing, take_turns
from mezzo.pytorch.dtypes import dtype_of

FORMATS = ("fp32", "tf32", "bf16", "fp16", "e4m3fn")
KINDS = {"matmul": "GFLOP/s", "conv step": "GFLOP/s", "copy": "GB/s"}


@dataclass(frozen=True)
class Rate:
    """One measured figure.

    Args:
        what: ``"matmul"``, ``"conv step"`` (forward and backward of a convolution) or ``"copy"``.
        format: the format measured in; the copy moves fp32, and no format is faster by the byte.
        work: operations, or bytes read and written, of one run, in units of 10^9.
        timing: how long the runs took, or why there are none.
    """

    what: str
    format: str
    work: float
    timing: Timing

    @property
    def unit(self) -> str:
        """``"GFLOP/s"`` or ``"GB/s"``."""
        return KINDS[self.what]

    @property
    def value(self) -> float:
        """Work a second at the median time; NaN where it could not run."""
        return self.work / self.timing.median

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of the repeats, low to high, in the same unit."""
        fast, slow = self.timing.spread
        return self.work / slow, self.work / fast


@dataclass(frozen=True)
class Sizes:
    """How large the measured work is: side of the square matrices, batch and side of the images, bytes to
    copy."""

    side: int
    batch: int
    image: int
    copy_bytes: int


CPU_SIZES = Sizes(side=1024, batch=4, image=28, copy_bytes=256 << 20)
GPU_SIZES = Sizes(side=8192, batch=128, image=56, copy_bytes=1 << 30)
QUICK_CPU_SIZES = Sizes(side=512, batch=2, image=14, copy_bytes=64 << 20)
QUICK_GPU_SIZES = Sizes(side=4096, batch=32, image=56, copy_bytes=256 << 20)
_CHANNELS = 64
# Where a format has no fast path, one run must not take minutes: such a format is measured on work this
# much smaller.
_PROBE = Sizes(side=256, batch=1, image=7, copy_bytes=1 << 20)
_SLOW_RUN = 1.5


def measure(
    device_type: str,
    *,
    sizes: Sizes | None = None,
    budget: float = 3.0,
    tell: Callable[[float], object] = lambda _: None,
) -> list[Rate]:
    """Measure every format on a device; what cannot run there is in the list with its reason.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``.
        sizes: of the work; by default what fits the kind of device.
        budget: seconds of timed runs, all together; a format without a fast path may add one slow run.
        tell: is told the part that is done, from 0 to 1.
    """
    sizes = sizes or (CPU_SIZES if device_type == "cpu" else GPU_SIZES)
    synchronize = _synchronizer(device_type)
    cells = [(what, form) for what in ("matmul", "conv step") for form in FORMATS if _applies(what, form)]
    made: list[tuple[str, str, float, Task | str]] = []
    for what, form in cells:
        reason = _reason_against(form, device_type)
        made.append(
            (what, form, 0.0, reason) if reason else _fitting(what, form, device_type, sizes, synchronize)
        )
    made.append(("copy", "fp32", *_copy(device_type, sizes)))
    runs = [task for *_, task in made if not isinstance(task, str)]
    timings = iter(take_turns(runs, budget=budget, synchronize=synchronize, tell=tell))
    return [
        Rate(what, form, work, Timing((), task) if isinstance(task, str) else next(timings))
        for what, form, work, task in made
    ]


def unsteady(rates: Iterable[Rate]) -> bool:
    """Whether repeats vary so much (the middle half by more than a half) that something else must be
    running here."""
    spreads = [rate.spread for rate in rates if rate.timing.seconds]
    return any(high > 1.5 * low for low, high in spreads)


def _applies(what: str, form: str) -> bool:
    return what == "matmul" or form != "e4m3fn"


def _reason_against(form: str, device_type: str) -> str:
    if form in ("tf32", "e4m3fn") and device_type != "cuda":
        return f"PyTorch has no fast {form} path on {device_type}"
    return ""


def _fitting(
    what: str, form: str, device_type: str, sizes: Sizes, synchronize: Callable[[], object]
) -> tuple[str, str, float, Task | str]:
    """The task in the size asked for, or, where a small probe says that would take long, in the probe's
    size."""
    make = {"matmul": _matmul, "conv step": _conv_step}[what]
    try:
        probe_work, probe = make(form, device_type, _PROBE)
        work, task = make(form, device_type, sizes)
        (timing,) = take_turns([probe], budget=0.02, synchronize=synchronize, most=3)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return (
            what,
            form,
            0.0,
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
    if timing.reason:
        return what, form, 0.0, timing.reason
    if min(timing.seconds) * work / probe_work > _SLOW_RUN:
        return what, form, probe_work, probe
    return what, form, work, task


def _matmul(form: str, device_type: str, sizes: Sizes) -> tuple[float, Task]:
    n = sizes.side
    work = 2 * n**3 / 1e9
    if form == "e4m3fn":
        return work, _fp8_matmul(n, device_type)
    dtype = torch.float32 if form == "tf32" else dtype_of(form)
    a, b = (torch.randn(n, n, device=device_type).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device_type, dtype=dtype)
    return work, _in_fp32_precision(form, functools.partial(torch.mm, a, b, out=out))


def _fp8_matmul(n: int, device_type: str) -> Task:
    a = torch.randn(n, n, device=device_type).to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device=device_type).to(torch.float8_e4m3fn).t()  # cuBLAS takes it column by column
    one = torch.ones((), device=device_type)
    return functools.partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _conv_step(form: str, device_type: str, sizes: Sizes) -> tuple[float, Task]:
    dtype = torch.float32 if form == "tf32" else dtype_of(form)
    conv = torch.nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, device=device_type, dtype=dtype)
    shape = (sizes.batch, _CHANNELS, sizes.image, sizes.image)
    x = torch.randn(shape, device=device_type).to(dtype).requires_grad_()
    gradient = torch.randn(shape, device=device_type).to(dtype)

    def step() -> None:
        torch.autograd.backward(conv(x), gradient, inputs=[x, *conv.parameters()])
        x.grad = None
        conv.zero_grad()

    # forward, and as much again for the gradients of the input and of the weight
    work = 3 * 2 * sizes.batch * sizes.image**2 * _CHANNELS**2 * 9 / 1e9
    return work, _in_fp32_precision(form, step)


def _copy(device_type: str, sizes: Sizes) -> tuple[float, Task]:
    source = torch.ones(sizes.copy_bytes // 4, device=device_type)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / 1e9, functools.partial(target.copy_, source)


def _in_fp32_precision(form: str, task: Task) -> Task:
    """The task with TF32 on for "tf32" and off for everything else; the user's settings come back after
    each run."""

    def run() -> None:
        with fp32_precision("tf32" if form == "tf32" else "ieee"):
            task()

    return run


@contextlib.contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """What FP32 matrix products and convolutions mean inside the block: ``"ieee"`` or ``"tf32"``."""
    switches = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined,unused-ignore]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = precision
        yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value


def _synchronizer(device_type: str) -> Callable[[], object]:
    return {
        "cpu": lambda: None,
        "cuda": torch.cuda.synchronize,
        "xpu": torch.xpu.synchronize,
        "mps": torch.mps.synchronize,
    }[device_type]
