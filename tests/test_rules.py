"""The op table: it covers every list of PyTorch's and says why; its evidence of FP32 accumulation is here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.core.rules import READ, RULES, TESTED, Rule, bare
from mezzo.pytorch.kernels import backend
from releases import TORCH

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
# Each (op, format, device) of which the table claims that the kernel accumulates in FP32.
CLAIMED = [
    pytest.param(op, fmt, device, marks=NEEDS_GPU if device == "cuda" else ())
    for op, row in RULES.items()
    for device in ("cpu", "cuda")
    if row.evidence(device)
    for fmt in ("bf16", "fp16")
]
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def listed(macro: str) -> list[str]:
    """The ops of one `AT_FORALL_...` list in the installed header, without their overloads."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text())
    assert body, f"{macro} is gone from {HEADER}"
    return re.findall(r"_\((?:ADD_NS\()?(\w+)", body[1])


HEADER_LISTS = [
    # list, how many ops at least, the rules that keep its promise
    ("AT_FORALL_LOWER_PRECISION_FP", 30, {Rule.LOWER}),
    ("AT_FORALL_FP32", 55, {Rule.FP32, Rule.INTERNAL_FP32}),
    ("AT_FORALL_FP32_SET_OPT_DTYPE", 11, {Rule.FP32, Rule.INTERNAL_FP32}),
    ("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE", 2, {Rule.FP32}),
    ("AT_FORALL_PROMOTE", 11, {Rule.PROMOTE, Rule.FP32}),
]


@pytest.mark.parametrize(("macro", "least", "rules"), HEADER_LISTS)
def test_every_op_of_the_header_has_a_rule_that_keeps_its_promise(macro: str, least: int, rules: Any) -> None:
    ops = listed(macro)
    assert len(ops) >= least
    assert [op for op in ops if op not in RULES or RULES[op].rule not in rules] == []


# Key of the dispatcher -> how many of ATen's names have a kernel for it, at least.
KERNELS = {
    "AutocastCUDA": 110,
    "AutocastCPU": 120,
    "AutocastXPU": 110,
    "AutocastMPS": 90,
    "AutocastMTIA": 110,
}


@pytest.mark.usefixtures("forked")
def test_every_op_that_a_devices_autocast_has_a_kernel_for_is_here() -> None:
    """The dispatcher is asked, which has ops that the header does not list, where Mezzo has registered none."""
    script = (
        "import json, sys, torch\n"
        "has, names = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C._dispatch_get_all_op_names()\n"
        "aten = [name for name in names if name.startswith('aten::')]\n"
        "print(json.dumps({key: [name for name in aten if has(name, key)] for key in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *KERNELS], capture_output=True, text=True, check=True
    )
    for key, ops in json.loads(done.stdout).items():
        assert len(ops) >= KERNELS[key], key
        assert [name for name in ops if bare(name) not in RULES] == [], key


# Ops that only some of the supported releases have: the first without, or with, them.
UNTIL = {"cholesky": (2, 14), "qr": (2, 14)}
SINCE = {"linalg_matrix_sqrth": (2, 14)}


def test_every_row_is_an_op_that_exists_and_says_why() -> None:
    gone = {op for op, first in UNTIL.items() if first <= TORCH}
    to_come = {op for op, first in SINCE.items() if first > TORCH}
    assert {op for op in RULES if not hasattr(torch.ops.aten, op)} == gone | to_come
    for row in RULES.values():
        assert 20 < len(row.reason) <= 110, row
        assert not row.reason.endswith("."), row
        assert row.family
        assert bool(row.remedy) == (row.rule is Rule.BANNED), row


# Forward must be FP32 arithmetic rounded once: within one 16-bit ulp, plus the FP32 rounding that
# cancellation leaves (2^-18 of the largest result). Gradients must not lose digits as the reduction grows: at
# most 4 times what rounding the FP32 gradient to the format costs. A backward through a rounded output, as
# tanh's, costs 2.4 times that; layer_norm's, which sums in sixteen bits, 25 times at 4,096 rows.

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MANTISSA = {"bf16": 7, "fp16": 10}
GRADIENT_FACTOR = 4.0

Case = tuple[Callable[..., Tensor], tuple[int, ...], int]  # (call, shape of x, length of each FP32 parameter)


def unary(call: Callable[[Tensor], Tensor]) -> list[Case]:
    return [(call, shape, 0) for shape in ((8, 64), (3, 5, 14), (1, 4096), (257, 34))]


def reduction(call: Callable[..., Tensor], before: float = 1.0, after: float = 1.0) -> list[Case]:
    """Whole, by rows, by columns; the factors keep fp16's sums under 65504 and a mean's gradients normal."""
    return [
        (lambda x, where=where: call(x * before, **where) * after, shape, 0)
        for where in ({}, {"dim": -1}, {"dim": 0})
        for shape in ((3, 7), (2, 100_003), (4096, 33))
    ]


def normalisation(call: Callable[..., Tensor]) -> list[Case]:
    return [(call, shape, shape[1]) for shape in ((2, 8, 5, 5), (4, 6, 33, 31), (4096, 32), (16, 32, 16))]


def resizing(mode: str) -> Callable[[int], list[Case]]:
    def cases(dims: int) -> list[Case]:
        shape = (2, 3, *(7, 9, 5)[:dims])
        sizes = (2.0, 2.7, 0.4, 16.0)[: 4 if dims < 3 else 3]
        return [(lambda x, s=s: F.interpolate(x, scale_factor=s, mode=mode), shape, 0) for s in sizes]

    return cases


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, torch.zeros_like(weight), torch.ones_like(weight), weight, bias, training=True)


def native_group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rest = x.numel() // (x.shape[0] * x.shape[1])
    return torch.native_group_norm(x, weight, bias, x.shape[0], x.shape[1], rest, 2, 1e-5)[0]


nearest, exact = resizing("nearest"), resizing("nearest-exact")
CASES: dict[str, list[Case]] = {
    "batch_norm": normalisation(batch_norm),
    "group_norm": normalisation(lambda x, weight, bias: F.group_norm(x, 2, weight, bias)),
    "native_group_norm": normalisation(native_group_norm),
    "sum": reduction(torch.sum, before=2.0**-6),
    "nansum": reduction(torch.nansum, before=2.0**-6),
    "mean": reduction(torch.mean, after=2.0**6),
    "gelu": unary(F.gelu) + unary(lambda x: F.gelu(x, approximate="tanh")),
    "tanh": unary(torch.tanh),
    **{name: unary(getattr(F, name)) for name in ("silu", "mish", "elu", "selu", "celu", "glu")},
    **{f"upsample_nearest{dims}d": nearest(dims) for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": exact(dims) for dims in (1, 2, 3)},
    # Not claimed: the reasons stand beside the table.
    "layer_norm": [(lambda x, w, b: F.layer_norm(x, w.shape, w, b), (4096, 64), 64)],
    "nanmean": reduction(torch.nanmean),
}


def departures(op: str, fmt: str, device: str = "cpu") -> list[str]:
    """Where the 16-bit kernel departs from FP32 arithmetic rounded once; an empty list is the evidence."""
    torch.manual_seed(0)
    dtype, found = DTYPES[fmt], []
    for call, shape, width in CASES[op]:
        x = (2 * torch.randn(shape) + 1).to(device, dtype)
        parameters = [torch.randn(width, device=device) for _ in range(2 if width else 0)]
        low_in, high_in = (
            [t.clone().requires_grad_() for t in (start, *parameters)] for start in (x, x.float())
        )
        low, high = call(*low_in), call(*high_in)
        if low.dtype != dtype:
            found.append(f"{shape}: returns {low.dtype}")
            continue
        excess = _excess(low, high, fmt)
        if excess > 0:
            found.append(f"{shape}: forward is off by {excess:.2g} more than one rounding")
        gradient = torch.randn_like(high).to(dtype)
        low.backward(gradient)
        high.backward(gradient.float())
        for name, one, two in zip(("x", "weight", "bias"), low_in, high_in):
            assert one.grad is not None
            assert two.grad is not None
            error = _distance(one.grad, two.grad)
            rounding = 2.0 ** -(MANTISSA[fmt] + 2)  # about what rounding to nearest costs, in the 2-norm
            if error > GRADIENT_FACTOR * rounding:
                found.append(f"{shape}: gradient of {name} is off by {error:.2g}")
    return found


def _excess(low: Tensor, high: Tensor, fmt: str) -> float:
    """By how much |low - high| exceeds one ulp of the format plus FP32's own cancellation, at worst."""
    true = high.detach().double()
    exponent = torch.floor(torch.log2(true.abs().clamp_min(torch.finfo(DTYPES[fmt]).tiny)))
    allowed = torch.exp2(exponent - MANTISSA[fmt]) + 2.0**-18 * true.abs().max()
    return float(((low.detach().double() - true).abs() - allowed).max())


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).norm() / two.double().norm())


@pytest.mark.parametrize(("op", "fmt", "device"), CLAIMED)
def test_each_kernel_that_is_said_to_accumulate_in_fp32_does(op: str, fmt: str, device: str) -> None:
    assert departures(op, fmt, device) == []


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize(("op", "words"), [("layer_norm", "gradient of weight"), ("nanmean", "forward")])
def test_each_kernel_that_was_tried_and_left_out_still_departs(op: str, words: str, fmt: str) -> None:
    """Also the proof that the check above can fail. If this fails PyTorch has mended the op: claim it."""
    assert not RULES[op].evidence("cpu")
    assert any(words in departure for departure in departures(op, fmt))


def test_evidence_and_kernels_are_where_the_table_says() -> None:
    for op, row in RULES.items():
        assert set(dict(row.native).items()) <= {("cpu", TESTED), ("cuda", READ)}
        assert not row.native or row.rule is Rule.INTERNAL_FP32, op
        if row.kernel is None or row.kernel.kind not in ("inside", "result"):
            continue
        assert callable(backend.kernel(row.kernel.path))
        assert row.kernel.why.startswith("Mezzo's own kernel")
        assert not any(row.evidence(device) for device in row.kernel.devices)
        wide = row.kernel.kind == "result" or op == "softmax"
        assert row.rule is (Rule.FP32 if wide else Rule.INTERNAL_FP32)
    assert RULES["layer_norm"].kernel_on("mps") is RULES["gelu"].kernel_on("cpu") is None
    assert RULES["layer_norm"].evidence("cuda") == RULES["gelu"].evidence("mps") == ""
