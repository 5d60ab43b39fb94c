"""Cross entropy on 16-bit logits: PyTorch's FP32 loss, a gradient rounded once, and no FP32 copy.

The truth is PyTorch's own op on the same 16-bit numbers in FP64. `test_kernel_backend.py` runs the first and the
special numbers once more on Triton's interpreter.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alive import bytes_alive
from mezzo.pytorch.kernels import cross_entropy as kernel
from mezzo.pytorch.kernels.cross_entropy import cross_entropy_loss, reference
from mezzo.pytorch.memory import PeakTensorBytes

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IMPLEMENTATIONS = ["triton"] if IS_INTERPRETED else ["reference", "numba"]
COMPILED = pytest.mark.parametrize("implementation", ["numba"], indirect=True)
TARGET = torch.tensor([1, 0, 2])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
INF, NAN = float("inf"), float("nan")

if IS_INTERPRETED:
    np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of what the tests are about


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MEZZO_KERNELS", request.param)
    monkeypatch.setattr(kernel, "SMALL", 0)  # or the shapes here would be PyTorch's
    return request.param


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor


def ours(logits: Tensor, target: Tensor, reduction: str = "mean", seed: Any = None, **options) -> Result:
    leaf = logits.detach().requires_grad_()
    out = cross_entropy_loss(leaf, target, reduction=REDUCTIONS[reduction], **options)
    out.backward(torch.ones_like(out) if seed is None else seed)
    assert out.dtype is torch.float32
    assert leaf.grad.dtype is logits.dtype
    return Result(out.detach(), leaf.grad)


def torchs(
    dtype: torch.dtype, logits: Tensor, target: Tensor, reduction: str = "mean", seed: Any = None, **options
) -> Result:
    """PyTorch's own op on the same numbers in another format, and the gradient in that."""
    leaf = logits.detach().to(dtype).requires_grad_()
    options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    target = target.to(dtype) if target.is_floating_point() else target
    out = F.cross_entropy(leaf, target, reduction=reduction, **options)
    out.backward((torch.ones_like(out) if seed is None else seed).to(out.dtype))
    return Result(out.detach(), leaf.grad)


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between a number's neighbours in a 16-bit format."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=info.tiny))[1] - 1
    return torch.ldexp(torch.full_like(x, info.eps / 2), exponent)


def assert_right(got: Result, truth: Result, fp32: Result, dtype: torch.dtype) -> None:
    """Loss: no further from the truth than PyTorch's FP32, and 4 ulp. Gradient: the truth rounded once, and FP32's
    own error on the way, which is twice what PyTorch's is at most."""
    naive = (fp32.loss.double() - truth.loss).abs()
    assert_near(got.loss, truth.loss, naive + 4 * 2**-23 * truth.loss.abs() + 1e-7)
    naive = (fp32.gradient.double() - truth.gradient).abs()
    allowed = half_ulp(truth.gradient, dtype) + 2 * naive + 2e-6 * truth.gradient.abs()
    if truth.gradient.dim() > 1 and truth.gradient.shape[1] == 1:
        allowed += 1e-7  # all is 0, of terms that cancel
    if IS_INTERPRETED:
        allowed += 1e-7 * (truth.gradient < 0)  # the target: p - 1, and exponentials are summed in FP32
    assert_near(got.gradient, truth.gradient, allowed)


def assert_near(got: Tensor, truth: Tensor, allowed: Tensor) -> None:
    """The same NaNs and infinities; all else within what is allowed."""
    assert torch.equal(got.isnan(), truth.isnan())
    is_near = (got.double() - truth).abs() <= allowed
    is_near = torch.where(truth.isfinite(), is_near, (got == truth) | truth.isnan())
    assert bool(is_near.all()), (got[~is_near], truth[~is_near])


def check(logits: Tensor, target: Tensor, reduction: str = "mean", **options) -> Result:
    got = ours(logits, target, reduction, **options)
    truth = torchs(torch.float64, logits, target, reduction, **options)
    fp32 = torchs(torch.float32, logits, target, reduction, **options)
    assert got.loss.shape == fp32.loss.shape
    assert_right(got, truth, fp32, logits.dtype)
    return got


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 2.0, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def classes(logits: Tensor, ignored: int | None = None, seed: int = 0) -> Tensor:
    shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else ()
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, logits.shape[min(1, logits.dim() - 1)], shape, generator=generator)
    if ignored is not None and target.numel():
        target.view(-1)[::3] = ignored
    return target


def weights(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(5)) + 0.1


# Around the lanes and blocks of the kernels: 64 and 1,024 classes; the interpreter's block is 4,096.
SHAPES = [(5, 7), (2, 5000)] if IS_INTERPRETED else [(5, 7), (3, 64), (3, 2500)]
OPTIONS = list(itertools.product(REDUCTIONS, (False, True), (-100, 1), (0.0, 0.1)))
if IS_INTERPRETED:
    OPTIONS = OPTIONS[::3]


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_option_with_every_other(fmt: str, shape: tuple[int, ...]) -> None:
    logits = values(*shape, dtype=DTYPES[fmt])
    for reduction, has_weight, ignored, smoothing in OPTIONS:
        options = {"ignore_index": ignored, "label_smoothing": smoothing}
        options |= {"weight": weights(shape[1])} if has_weight else {}
        target = classes(logits, ignored)
        rows = len(target) if reduction == "none" else 1
        seed = torch.linspace(-2, 3, rows) if reduction == "none" else torch.tensor(1.7)
        got = check(logits, target, reduction, seed=seed, **options)
        assert not got.gradient[target == ignored].any()


LAYOUTS = {
    "[C]": lambda: values(40),
    "[N, C, d]": lambda: values(3, 20, 11),
    "[N, C, d, d], channels last": lambda: values(2, 6, 5, 4).to(memory_format=torch.channels_last),
    "permuted [N, C, d]": lambda: values(11, 3, 20).permute(1, 2, 0),
    "[C, N] transposed": lambda: values(20, 9).t(),
    "columns of a wider matrix": lambda: values(5, 100)[:, :70],
    "one row for all": lambda: values(1, 50).expand(4, 50),
    "[N, 1, d]": lambda: values(4, 1, 3),
    "[N, C, 1]": lambda: values(4, 3, 1),
    "no rows": lambda: values(0, 5),
    "no rows of [N, C, d]": lambda: values(0, 5, 3),
    "no pixels": lambda: values(2, 5, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 64)
    logits = LAYOUTS[name]()
    before = logits.clone()
    for reduction in REDUCTIONS:
        check(logits, classes(logits), reduction, label_smoothing=0.1)
    assert torch.equal(logits, before)


LARGEST = 65504.0
SPECIAL = {
    "a class at -inf": [[1.0, -INF, 2.0, 0.5]],
    "all others at -inf": [[1.0, -INF, -INF, -INF]],
    "the target at -inf": [[-INF, 1.0, 2.0, 3.0]],
    "nothing but -inf": [[-INF] * 4],
    "a class at inf": [[1.0, INF, 0.0, 0.0]],
    "the target at inf": [[INF, 1.0, 0.0, 0.0]],
    "nan": [[1.0, NAN, 0.0, 0.0]],
    "nan and -inf": [[-INF, NAN, -INF, -INF]],
    "all equal": [[3.0] * 4],
    "far apart": [[0.0, 200.0, -200.0, 100.0]],
    "the target far above": [[300.0, 0.0, -5.0, 2.0]],
    "fp16's largest": [[LARGEST, LARGEST, -LARGEST, 0.0]],
    "next to it": [[65472.0, LARGEST, 65440.0, 0.0]],
    "subnormal": [[1e-7, -1e-7, 0.0, 6e-8]],
}


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", list(SPECIAL)[:: 3 if IS_INTERPRETED else 1])
def test_special_numbers(name: str, smoothing: float, fmt: str) -> None:
    row = torch.tensor(SPECIAL[name])
    usual = torch.tensor([[0.5, -1.0, 2.0, 1.0]])
    logits = torch.cat([row, usual]).to(DTYPES[fmt])
    wide = torch.cat([logits, logits.new_full((2, 1200), -3.0)], 1)  # beyond a block
    wider = torch.cat([logits.new_full((2, 1200), -INF), logits], 1)  # after a block of nothing
    for given, target in ((logits, 0), (wide, 0), (wider, 1200)):
        check(given, torch.tensor([target, 1]), "none", label_smoothing=smoothing)


def test_ignored_rows_may_hold_anything() -> None:
    """PyTorch's gradient of such a row is NaN if the row holds one."""
    logits = torch.tensor([[NAN, 1.0, 2.0], [INF, INF, 0.0], [-INF] * 3, [1.0, 2.0, 0.5]]).bfloat16()
    target = torch.tensor([-100, -100, -100, 2])
    nothing = ours(logits, torch.full((4,), -100))
    assert nothing.loss.isnan()  # the mean over no row
    assert not nothing.gradient.any()
    assert float(ours(logits, torch.full((4,), -100), "sum").loss) == 0
    for smoothing in (0.0, 0.2):
        got = ours(logits, target, label_smoothing=smoothing)
        alone = check(logits[3:], target[3:], label_smoothing=smoothing)
        assert torch.equal(got.loss, alone.loss)
        assert torch.equal(got.gradient[3:], alone.gradient)
        assert not got.gradient[:3].any()


SCALES = [2.0**k for k in (0, 15, 24, 39, 41, 60, 100, -10, -24, -59, -61, -100)]


@pytest.mark.parametrize("fmt", DTYPES)
def test_any_scale_of_the_gradient(fmt: str) -> None:
    """From FP32 to 16 bits the gradient rounds as IEEE 754 has it: beyond the largest it is infinite."""
    logits = values(4, 200, dtype=DTYPES[fmt], spread=8)
    logits[:, 7] = -INF
    target = classes(logits)
    for scale in SCALES:
        got = ours(logits, target, "sum", seed=torch.tensor(scale))
        want = torchs(torch.float64, logits, target, "sum", seed=torch.tensor(scale)).gradient
        rounded = want.to(DTYPES[fmt]).double()
        near = half_ulp(want, DTYPES[fmt]) * 2.01  # FP32 may end on the other side of a tie
        assert (((got.gradient.double() - rounded).abs() <= near) | (got.gradient == rounded)).all()
        assert not got.gradient[:, 7].any()
    assert fmt == "bf16" or ours(logits, target, "sum", seed=torch.tensor(1e9)).gradient.isinf().any()
    # Where the other class has it all, the gradient is the scale. Half an ulp above the largest is a tie with infinity.
    ulp, largest = torch.finfo(DTYPES[fmt]).eps, torch.finfo(DTYPES[fmt]).max
    edges = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, -1 - ulp / 2, largest, -largest * (1 + ulp / 4)])
    logits = torch.tensor([[0.0, 256.0]]).repeat(5, 1).to(DTYPES[fmt])
    gradient = ours(logits, torch.zeros(5).long(), "none", seed=edges).gradient
    assert torch.equal(gradient, torch.stack([-edges, edges], 1).to(DTYPES[fmt]))


def peak_of(logits: Tensor, target: Tensor, **options: float) -> int:
    peak = PeakTensorBytes()
    others = bytes_alive()
    leaf = logits.clone().requires_grad_()
    peak.start()
    torch.autograd.grad(cross_entropy_loss(leaf, target, **options), leaf)
    return peak.stop().peak_bytes - others


@pytest.mark.parametrize("shape", [(600, 4096), (12, 4096, 50)])  # copied: the gradient takes its place
def test_the_peak_is_logits_gradient_and_little_more(shape: tuple[int, ...], implementation: str) -> None:
    logits = values(shape[0], 5000)[:, :4096] if len(shape) == 2 else values(*shape)
    target = classes(logits)
    scratch = 0 if implementation == "numba" else 5 * 4 * reference.CHUNK
    most = 4 * logits.numel() + 64 * target.numel() + scratch
    assert 4 * logits.numel() <= peak_of(logits, target) <= most


@COMPILED
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.int64, torch.uint8, torch.bfloat16, torch.float32])
def test_formats_of_targets_and_weights(target: torch.dtype, weight: torch.dtype) -> None:
    logits, weights = values(3, 6), torch.linspace(0.5, 1, 6).to(weight)
    given = TARGET.to(target) if not target.is_floating_point else torch.full((3, 6), 1 / 8, dtype=target)
    got = cross_entropy_loss(logits, given, weights)
    wide = given.float() if given.dtype is torch.bfloat16 else given
    want = F.cross_entropy(logits.float(), wide, weights.float())
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=5e-7, atol=0)


LOGITS = values(3, 6)
WRONG = {
    "a class too high": (LOGITS, torch.tensor([1, 6, 9]), {}),
    "a class below": (LOGITS, torch.tensor([1, 2, -1]), {}),
    "integers of 32 bits": (LOGITS, TARGET.int(), {}),
    "classes in the logits' shape": (LOGITS, torch.ones(3, 6, dtype=torch.int64), {}),
    "weights of too few classes": (LOGITS, TARGET, {"weight": torch.ones(5)}),
    "smoothing above 1": (LOGITS, TARGET, {"label_smoothing": 1.5}),
}


@COMPILED
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_as_by_pytorch(name: str) -> None:
    logits, target, options = WRONG[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011  # which one is PyTorch's to say
        torch.ops.aten.cross_entropy_loss(logits.float(), target, **options)
    with pytest.raises(theirs.type) as mine:
        cross_entropy_loss(logits, target, **options)
    assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]
