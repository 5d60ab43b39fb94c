"""The measured speed of each format on this device (matrix products, a convolution's training step, memory bandwidth),
as PyTorch runs it in that dtype; and the precision to use.

Both are measured, since one does not predict the other: on a CPU with AVX512-FP16 products are fast in fp16, but the
backward of an fp16 convolution took 80 times as long as in bf16 (torch 2.13).
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzo.doctor.gpus import FP16_RANGE, Recommendation
from mezzo.pytorch.dtypes import dtype_of

CELLS = (
    *(("matmul", form) for form in ("fp32", "tf32", "bf16", "fp16", "e4m3fn")),
    *(("conv step", form) for form in ("fp32", "tf32", "bf16", "fp16")),
    ("copy", "fp32"),
)
"""What is measured, in which format. The copy moves fp32: the speed per byte is the same in every format."""

WORTH_IT = 1.1
"""A format must make the work this much faster than fp32 to be worth the coarser numbers."""

Task = Callable[[], object]


Row = dict[str, Any]
"""One measured figure, with the keys of the JSON (docs/formats.md); None where it could not run, for its ``reason``."""

LATE = "the time was up before it ran"
BUDGET = 2.5  # seconds of all timed runs together
LIMIT = 8  # no task starts after this many times the budget


def row(what: str, form: str, work: float, seconds: Sequence[float] = (), reason: str = "") -> Row:
    """The figure of 10^9 operations (or bytes) per run, with the middle half of the repeats, or all if below four."""
    found: Row = {"what": what, "format": form, "unit": "GB/s" if what == "copy" else "GFLOP/s"}
    found |= dict.fromkeys(("median", "low", "high", "seconds"))
    found |= {"repeats": len(seconds), "work": work, "reason": reason, "unsteady": False}
    if seconds:
        fast, middle, slow = min(seconds), statistics.median(seconds), max(seconds)
        if len(seconds) >= 4:
            fast, _, slow = statistics.quantiles(seconds, n=4, method="inclusive")
        found |= {"median": work / middle, "low": work / slow, "high": work / fast, "seconds": middle}
        found["unsteady"] = slow > 1.5 * fast
    return found


@dataclass(frozen=True)
class Sizes:
    """The measured work: side of the square matrices, batch and side of the images, bytes to copy."""

    side: int
    batch: int
    image: int
    copy_bytes: int


CPU_SIZES = Sizes(side=1024, batch=4, image=28, copy_bytes=256 << 20)
GPU_SIZES = Sizes(side=8192, batch=128, image=56, copy_bytes=1 << 30)
QUICK_CPU_SIZES = Sizes(side=512, batch=2, image=14, copy_bytes=64 << 20)
QUICK_GPU_SIZES = Sizes(side=4096, batch=32, image=56, copy_bytes=256 << 20)
_CHANNELS = 64


def measure(device_type: str, *, sizes: Sizes | None = None, budget: float = BUDGET) -> list[Row]:
    """Measure every format on a device; the first run of a task, a warm-up, counts only if the time is up after it."""
    sizes = sizes or (CPU_SIZES if device_type == "cpu" else GPU_SIZES)
    rows, tasks = list[Row](), list[Task]()
    torch.empty(1, device=device_type)  # starting a GPU takes seconds, which are not measured
    until = time.perf_counter() + LIMIT * budget
    for what, form in CELLS:
        try:
            if time.perf_counter() >= until:
                raise NotImplementedError(LATE)
            if form in ("tf32", "e4m3fn") and device_type != "cuda":
                raise RuntimeError(f"PyTorch has no fast {form.replace('e4m3fn', 'fp8')} on {device_type}")
            make = {"matmul": _matmul, "conv step": _conv_step, "copy": _copy}[what]
            work, task = make(form, device_type, sizes)
            start = time.perf_counter()
            task()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            lines = str(error).strip().splitlines()
            rows.append(row(what, form, 0.0, reason=lines[0] if lines else type(error).__name__))
        else:
            rows.append(row(what, form, work, (time.perf_counter() - start,)))
            tasks.append(task)
    ran = [one for one in rows if not one["reason"]]
    for one, seconds in zip(ran, _take_turns(tasks, budget, until)):
        one.update(row(one["what"], one["format"], one["work"], seconds or (one["seconds"],)))
    return rows


def _take_turns(tasks: Sequence[Task], budget: float, until: float) -> list[list[float]]:
    """Seconds of every task, run in turn so that drift affects all alike; once if it takes a third of `budget`."""
    taken: list[list[float]] = [[] for _ in tasks]
    begun = time.perf_counter()
    for turn in range(25):
        if turn >= 3 and time.perf_counter() - begun >= budget:
            break
        for seconds, task in zip(taken, tasks):
            start = time.perf_counter()
            if start < until and (not seconds or seconds[0] <= budget / 3):
                task()
                seconds.append(time.perf_counter() - start)
    return taken


def _matmul(form: str, device_type: str, sizes: Sizes) -> tuple[float, Task]:
    n = sizes.side
    a, b = (torch.randn(n, n, device=device_type) for _ in range(2))
    if form == "e4m3fn":
        one, fp8 = torch.ones((), device=device_type), torch.float8_e4m3fn
        product = functools.partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        # cuBLAS takes the second factor column by column
        run: Task = functools.partial(product, a.to(fp8), b.to(fp8).t())
    else:
        dtype = torch.float32 if form == "tf32" else dtype_of(form)
        out = torch.empty(n, n, device=device_type, dtype=dtype)
        run = functools.partial(torch.mm, a.to(dtype), b.to(dtype), out=out)
    return 2 * n**3 / 1e9, _waited_for(run, form, device_type)


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
    return work, _waited_for(step, form, device_type)


def _copy(form: str, device_type: str, sizes: Sizes) -> tuple[float, Task]:
    source = torch.ones(sizes.copy_bytes // 4, device=device_type)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / 1e9, _waited_for(lambda: target.copy_(source), form, device_type)


def _waited_for(task: Task, form: str, device_type: str) -> Task:
    """The task with TF32 on for "tf32" and off for everything else, until the device is done."""
    switches = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined,unused-ignore]

    def run() -> None:
        before = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = "tf32" if form == "tf32" else "ieee"
            task()
            if device_type != "cpu":
                getattr(torch, device_type).synchronize()
        finally:
            for switch, value in zip(switches, before):
                switch.fp32_precision = value

    return run


def recommend(rows: Iterable[Row], native: Iterable[str], *, device: str) -> Recommendation:
    """The precision for a device (named as in a sentence) with these native formats; bf16 first, for its range."""
    cells = {(one["what"], one["format"]): one for one in rows}
    native, said, chosen = frozenset(native), dict[str, list[str]](), "fp32"
    for form in ("bf16", "fp16"):
        used = [cells[what, one] for what in ("matmul", "conv step") for one in (form, "fp32")]
        rates = [one["median"] or math.nan for one in used]
        speedups = matmul, conv = rates[0] / rates[1], rates[2] / rates[3]
        # One kind of work gains and none loses; NaN, what cannot run, is a loss.
        gains = max(speedups) >= WORTH_IT and all(one >= 1 / WORTH_IT for one in speedups)
        measured = (
            f"matrix products are {_times(matmul)} fp32, {'but ' if min(speedups) < 1 < max(speedups) else ''}"
            f"a convolution's training step is {_times(conv)} fp32"
        )
        runs = all(one["reason"] in ("", LATE) for one in used)
        # A format that Mezzo emulates may have run only once because it is slow.
        few = [one for one in used if one["repeats"] == 1 and (form in native or one["format"] == "fp32")]
        if few or any(one["unsteady"] or one["reason"] == LATE for one in used):
            measured = "too few steady repeats to say how fast (measure again when the machine is idle)"
            gains = runs
        if form not in native:
            text = f"{measured if runs else 'PyTorch cannot run it there'}."
        elif gains:
            text = f"{device} has native {form}: {measured}."
            chosen = form if chosen == "fp32" else chosen
        else:
            text = f"{device} has native {form}, but gains too little: {measured}."
        said.setdefault(text, []).append(form)
    reasons = [f"{' and '.join(forms)}: {text}" for text, forms in said.items()]
    if emulated := [form for form in ("bf16", "fp16") if form not in native]:
        how = f"Mezzo computes {' and '.join(emulated)} in FP32 here, so that you can test the numerics."
        reasons.append(f"{how} The casts make training slower; `mezzo compare` measures how much.")
    why = {
        "bf16": "bf16 is preferred to fp16: it has the range of fp32, so it needs no loss scale.",
        "fp16": FP16_RANGE,
        "fp32": "fp32: 16-bit formats save no time here. They save memory if activations or weights take most of it.",
    }
    return Recommendation(chosen, (*reasons, why[chosen]))


def _times(speedup: float) -> str:
    if math.isnan(speedup):
        return "not available, unlike in"
    if 0.95 <= speedup <= 1.05:
        return "as fast as in"
    return f"{speedup:.3g}x faster than in" if speedup > 1 else f"{1 / speedup:.3g}x slower than in"
