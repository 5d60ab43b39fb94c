"""16 bits in and out, FP32 between: each op under that rule, and each with a kernel of Mezzo's own, in a region.

For each row, format and shape: forward is within one ulp of computing in FP32 and rounding once, and every gradient is
no farther from FP64's truth than the naive one (the op on 16-bit tensors, parameters rounded too, no autocast) or than
FP32's, plus one rounding. Whose kernel it is (the device's, Mezzo's own, FP32's between casts) must not matter.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mezzo
from alive import bytes_alive
from mezzo.core.policy import policy
from mezzo.core.rules import RULES, Rule
from mezzo.pytorch.autocast.plan import plan
from mezzo.pytorch.dtypes import dtype_of

BITS = {"bf16": 7, "fp16": 10}
FORMATS = list(BITS)


@dataclass(frozen=True)
class Row:
    """How an op is called on x, weight and bias, and on which shapes of x; a negative last size is not contiguous."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ((65_536, 8), (7, 1), (33, -64), (3, 0))
    width: int | None = None  # which dimension of x has the parameters' length
    low: bool = False  # whether it also takes 16-bit parameters
    factor: float = 1.0  # of x, so that no sum leaves fp16's range


NOT_EMPTY = ((65_536, 8), (7, 1), (33, -64))
CHANNELS = ((65_536, 2, 3), (64, 32, 64), (3, 4, -33))
IMAGES = {
    1: ((1, 1, 1), (4096, 16, 3), (3, 5, -8)),
    2: ((1, 1, 6, 1), (64, 8, 9, 7), (3, 5, 6, -8)),
    3: ((1, 1, 2, 3, 1), (8, 4, 5, 3, 3), (3, 5, 2, 3, -8)),
}


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def native_group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.native_group_norm(x, w, b, *x.shape[:2], x[0, 0].numel(), 2, 1e-5)[0]


def resizing(dims: int, mode: str, **kwargs: Any) -> Row:
    def call(x: Tensor, *_: Tensor) -> Tensor:
        sizes = [max(1, round(1.7 * size)) for size in x.shape[2:]]
        return F.interpolate(x, sizes, mode=mode, **kwargs)

    return Row(call, IMAGES[dims])


ROWS: dict[str, Row] = {
    "layer_norm": Row(lambda x, w, b: F.layer_norm(x, w.shape, w, b), width=-1, low=True),
    "native_layer_norm": Row(
        lambda x, w, b: torch.native_layer_norm(x, w.shape, w, b, 1e-5)[0], width=-1, low=True
    ),
    "rms_norm": Row(lambda x, w, b: F.rms_norm(x, w.shape, w, eps=1e-5), width=-1, low=True),
    "group_norm": Row(lambda x, w, b: F.group_norm(x, 2, w, b), CHANNELS, width=1, low=True),
    "native_group_norm": Row(native_group_norm, CHANNELS[:2], width=1, low=True),
    "batch_norm": Row(batch_norm, CHANNELS, width=1),
    "instance_norm": Row(lambda x, w, b: F.instance_norm(x, None, None, w, b), CHANNELS, width=1, low=True),
    "sum": Row(lambda x, *_: torch.sum(x), factor=2.0**-6),
    "sum, a row": Row(lambda x, *_: torch.sum(x, -1), factor=2.0**-6),
    "sum, a column": Row(lambda x, *_: torch.sum(x, 0), factor=2.0**-6),
    "nansum": Row(lambda x, *_: torch.nansum(x, 0), factor=2.0**-6),
    "mean": Row(lambda x, *_: torch.mean(x), NOT_EMPTY),
    "mean, a row": Row(lambda x, *_: torch.mean(x, -1), NOT_EMPTY),
    "mean, a column": Row(lambda x, *_: torch.mean(x, 0)),
    "gelu": Row(lambda x, *_: F.gelu(x)),
    "gelu, tanh": Row(lambda x, *_: F.gelu(x, approximate="tanh")),
    **{op: Row(lambda x, *_, op=op: getattr(F, op)(x)) for op in ("silu", "mish", "elu", "selu", "celu")},
    "tanh": Row(lambda x, *_: torch.tanh(x)),
    "glu": Row(lambda x, *_: F.glu(x), ((65_536, 8), (7, 2), (33, -64), (3, 0))),
    **{f"upsample_nearest{n}d": resizing(n, "nearest") for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": resizing(n, "nearest-exact") for n in (1, 2, 3)},
    "upsample_linear1d": resizing(1, "linear"),
    "upsample_bilinear2d": resizing(2, "bilinear"),
    "_upsample_bilinear2d_aa": resizing(2, "bilinear", antialias=True),
    "upsample_trilinear3d": resizing(3, "trilinear"),
    "upsample_bicubic2d": resizing(2, "bicubic"),
    "_upsample_bicubic2d_aa": resizing(2, "bicubic", antialias=True),
    "softmax": Row(lambda x, *_: torch.softmax(x, -1)),
    "softmax, a column": Row(lambda x, *_: torch.softmax(x, 0)),
}
# Not in 16 bits by themselves, but a policy may say so.
ASKED_FOR = {"softmax"}


def test_every_op_under_the_rule_has_a_row_and_gives_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every device, whatever evidence or kernel there is."""
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,fp16")
    rows = {name.partition(",")[0] for name in ROWS}
    ours = {op for op, row in RULES.items() if row.kernel and row.kernel.kind == "inside"}
    assert ours - rows == set()
    assert rows - ASKED_FOR <= {op for op, row in RULES.items() if row.rule is Rule.INTERNAL_FP32}
    for fmt, device in itertools.product(FORMATS, ("cpu", "cuda", "mps", "xpu")):
        plans = [p for p in plan(policy(fmt), device).values() if p.rule == "internal_fp32"]
        inside = {p.op: p.format_out for p in plans if p.how != "absent"}
        assert set(inside.values()) == {"first input's"}
        assert device != "cpu" or inside.keys() - rows == set()


def made(shape: tuple[int, ...], row: Row, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    *front, last = map(abs, shape)
    x = torch.randn(last, *front).movedim(0, -1) if shape[-1] < 0 else torch.randn(*front, last)
    x = ((2 * x + 1) * row.factor).to(dtype)
    if row.width is None:
        return [x]
    width = x.shape[row.width]
    return [x, (torch.rand(width) + 0.5).to(parameters), torch.randn(width).to(parameters)]


def ulp_excess(low: Tensor, wide: Tensor, fmt: str) -> float:
    """By how much |low - wide| exceeds one ulp of the format plus what FP32's cancellation leaves, at worst."""
    if not low.numel():
        return 0.0
    true = wide.detach().double()
    exponent = torch.floor(torch.log2(true.abs().clamp_min(torch.finfo(dtype_of(fmt)).tiny)))
    allowed = torch.exp2(exponent - BITS[fmt]) + 2.0**-18 * true.abs().max()
    return float(((low.detach().double() - true).abs() - allowed).max())


def distance(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).norm())


def gradients(call: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        out = call(*leaves)
    found = torch.autograd.grad(out, leaves, dy.to(out.dtype), allow_unused=True)
    return out.detach(), [grad for grad in found if grad is not None]


def in_region(name: str, row: Row, fmt: str, device: str = "cpu") -> Callable[..., Tensor]:
    op = name.partition(",")[0]
    return mezzo.autocast(f"{fmt},op.{op}=internal_fp32" if op in ASKED_FOR else fmt, device)(row.call)


CASES = [
    pytest.param(name, shape, low, id=f"{name}-{'x'.join(map(str, shape))}{'-low parameters' * low}")
    for name, row in ROWS.items()
    for shape in row.shapes
    for low in ((False, True) if row.low else (False,))
    if not (shape[-1] == 0 and row.width is not None)
]
HAS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "shape", "low"), CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, HAS_CUDA))])
def test_fp32_inside(name: str, shape: tuple[int, ...], low: bool, fmt: str, device: str) -> None:
    row, dtype, op = ROWS[name], dtype_of(fmt), name.partition(",")[0]
    rule = "internal_fp32" if op in ASKED_FOR else plan(policy(fmt), device)[op].rule
    inputs = [t.to(device) for t in made(shape, row, dtype, dtype if low else torch.float32)]
    wide = row.call(*[t.float() for t in inputs])
    torch.manual_seed(1)
    upstream = torch.randn(wide.shape).to(device, dtype)
    out, ours = gradients(in_region(name, row, fmt, device), inputs, upstream)
    assert out.dtype is (dtype if rule == "internal_fp32" else torch.float32)
    assert out.shape == wide.shape
    assert ulp_excess(out, wide, fmt) <= 0

    _, truth = gradients(row.call, [t.double() for t in inputs], upstream.double())
    _, single = gradients(row.call, [t.float() for t in inputs], upstream.float())
    try:
        _, naive = gradients(row.call, [t.to(dtype) for t in inputs], upstream)
    except RuntimeError:  # what no 16-bit kernel does can't be worse than FP32
        naive = single
    for mine, theirs, exact, true, leaf in zip(ours, naive, single, truth, inputs[: len(truth)], strict=True):
        assert mine.dtype is leaf.dtype
        allowed = max(distance(theirs, true), distance(exact, true))
        assert distance(mine, true) <= 1.01 * allowed + 2.0 ** -(BITS[fmt] + 1) * float(true.norm())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_finite_is_where_fp32_has_it(name: str, fmt: str) -> None:
    row, dtype = ROWS[name], dtype_of(fmt)
    *front, last = row.shapes[-2]
    for value in (float("nan"), float("inf"), float("-inf")):
        inputs = made((*front, max(4, abs(last))), row, dtype, torch.float32)
        inputs[0].view(-1)[1] = value
        out, wide = in_region(name, row, fmt)(*inputs), row.call(*[t.float() for t in inputs])
        # PyTorch's FP32 gelu of +inf is NaN on some CPUs.
        assert torch.equal(out.isfinite(), wide.isfinite()), value
        assert torch.equal(out[wide.isinf()].float(), wide[wide.isinf()]), value


@pytest.mark.parametrize("name", ROWS)
def test_fp32_input_is_left_in_fp32(name: str) -> None:
    """It never lowers; 16-bit parameters beside FP32 input are widened."""
    row = ROWS[name]
    low = row.low and not name.endswith("group_norm")  # whose own kernel refuses that
    inputs = made(row.shapes[0], row, torch.float32, torch.bfloat16 if low else torch.float32)
    out = in_region(name, row, "bf16")(*inputs)
    assert out.dtype is torch.float32
    assert torch.equal(out, row.call(*[t.float() for t in inputs]))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "instance_norm"])
def test_lower_takes_the_own_kernel_with_fp32_parameters(op: str, fmt: str) -> None:
    """`op.layer_norm=lower`: an FP32 residual stream is read in 16 bits, the gradients are summed in FP32."""
    row, dtype = ROWS[op], dtype_of(fmt)
    inputs = made(row.shapes[0], row, torch.float32, torch.float32)

    lowered = mezzo.autocast(f"{fmt},op.{op}=lower", "cpu")(row.call)
    upstream = torch.randn(row.shapes[0]).to(dtype)
    out, ours = gradients(lowered, inputs, upstream)
    expected, theirs = gradients(in_region(op, row, fmt), [inputs[0].to(dtype), *inputs[1:]], upstream)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, theirs, strict=True))
    assert {g.dtype for g in ours} == {torch.float32}


KEEPS_ITS_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5)[0],
}


@pytest.mark.parametrize("call", KEEPS_ITS_INPUT.values(), ids=KEEPS_ITS_INPUT)
def test_an_fp32_op_keeps_its_16_bit_input_and_no_fp32_copy(call: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    leaf = (torch.rand(512, 256) + 0.1).bfloat16().requires_grad_()
    with mezzo.autocast("bf16", "cpu"):
        call(leaf)  # what is made once is made
        before = bytes_alive()
        outs = [call(leaf) for _ in range(4)]
    assert (bytes_alive() - before) / 4 - outs[0].nbytes < leaf.numel()
    wide = leaf.detach().float().requires_grad_()
    upstream = torch.randn(outs[0].shape)
    outs[0].backward(upstream.to(outs[0].dtype))
    call(wide).backward(upstream.to(outs[0].dtype).float())
    assert torch.equal(leaf.grad, wide.grad.bfloat16())
