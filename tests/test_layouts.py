"""Tensors that are not plain strided ones: each op of the table with each layout and kind of tensor that reaches it.

The table is made, not written: a case is an op's sample in which one argument, or all, have another layout. What is
expected is computed: where plain FP32 raises there is no case; where `torch.autocast` works, `mezzo.autocast` must; and
with the kernels that `mezzo run` lends, it must wherever FP32 works. `LIMITS` says what still does not, and why.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import autocast_samples as samples
import mezzo
from cpu import needs_avx512
from mezzo.core.errors import BannedOpError
from mezzo.pytorch.autocast.fallback import lend_kernels

# Prototypes and deprecated ops each say that they are.
pytestmark = pytest.mark.filterwarnings("ignore")

Convert = Callable[[Tensor], Tensor]
Places = tuple[tuple[int, ...], ...]  # of arguments: an index, or an index and one in a list

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Plain(Tensor):
    """A subclass that changes nothing."""


def blocks(x: Tensor) -> tuple[int, int]:
    return (1, 2) if x.shape[-1] % 2 == 0 else (1, 1)


# One argument at a time has the layout, and all of them.
LAYOUTS: dict[str, Convert] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr(blocks(x)),
    "bsc": lambda x: x.to_sparse_bsc(blocks(x)),
    "nested": lambda x: torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.strided),
    "jagged": lambda x: torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.jagged),
    "mkldnn": Tensor.to_mkldnn,
}
SPARSE = ("coo", "csr", "csc", "bsr", "bsc")
# All of them are of the kind.
KINDS: dict[str, Convert] = {
    "subclass": lambda x: x.as_subclass(Plain),
    "negative view": lambda x: torch._neg_view(-x),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.01, 0, torch.qint8),
}
CONVERSIONS = LAYOUTS | KINDS

# Ops that read oneDNN memory as if it were dense, in FP32 without Mezzo: random numbers, or the process ends.
UNSOUND = """
    batch_norm index_add index_add_ index_copy index_copy_ index_put index_put_ index_reduce index_reduce_ put put_
    masked_scatter masked_scatter_ scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_"""

# What raises in a run although FP32 works (torch.autocast raises, too): part of the error -> why.
LIMITS: dict[str, str] = {
    "could not create": "oneDNN has no fp16 on a CPU without fp16 instructions",
    "fp16 path needs": "the same",
    "empty_strided": "PyTorch's own autocast can't cast a oneDNN tensor: it has no kernel to wrap for a cast",
    "should be the same or input should be a MKLDNN": "the same",
    "support converting to a different layout": "its cast of a sparse tensor takes no dense gradient",
    "must be contiguous to get buffer": "its cast of a nested tensor takes no gradient with gaps, as attention's is",
    "addmm_out_sparse_csr_impl_mkl": "conv_tbc of a CSR weight multiplies in place, which has no kernel to wrap",
    "addmv_out_sparse_csr_impl_mkl": "addmv_ of a CSR matrix, in place: the kernel writes into its argument",
}


def places(args: list[Any]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for i, value in enumerate(args):
        for j, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Tensor) and item.is_floating_point():
                found.append((i, j) if isinstance(value, list) else (i,))
    return found


def attempt(
    name: str,
    convert: Convert,
    where: Places,
    rounded: Any,
    inputs: torch.dtype,
    context: Any,
    backward: bool,
) -> list[Tensor]:
    """The results of one call and, with `backward`, the gradients of its inputs.

    The arguments in `where` are converted. Values are rounded to `rounded` first, and given in the format `inputs`.
    """
    function, args, kwargs = samples.sample(name, torch.float32)
    leaves: list[Tensor] = []
    for place in places(args):
        holder, index = (args, place[0]) if len(place) == 1 else (args[place[0]], place[1])
        value = holder[index].to(rounded or torch.float32).to(inputs)
        value = convert(value) if place in where else value
        leaves.append(value.detach().requires_grad_(backward))
        writes = name.partition(".")[0].endswith("_")
        holder[index] = leaves[-1] * 1 if backward and writes else leaves[-1]
    torch.default_generator.manual_seed(
        0
    )  # not `torch.manual_seed`, which takes as long as an op and its backward
    with context, nullcontext() if backward else torch.no_grad():
        out = function(*args, **kwargs)
    results = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
    if not backward:
        return results
    targets = [value for value in results if value.requires_grad]
    if not targets:
        raise NotImplementedError("no gradient in FP32")
    ones = [torch.ones_like(value) for value in targets]
    grads = torch.autograd.grad(targets, leaves, ones, allow_unused=True)
    return results + [grad for grad in grads if grad is not None]


def dense(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_quantized:
        value = value.dequantize()
    if value.is_nested:
        value = torch.cat([part.reshape(-1) for part in value.unbind()])
    elif value.layout is not torch.strided:
        value = value.to_dense()
    value = value.as_subclass(Tensor).resolve_neg().resolve_conj()
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def difference(got: list[Tensor], expected: list[Tensor], eps: float) -> str:
    """How far results are apart, if further than rounding explains."""
    if len(got) != len(expected):
        return f"{len(got)} results, not {len(expected)}"
    for i, (a, b) in enumerate(zip(got, expected)):
        x, y = dense(a), dense(b)
        if x.shape != y.shape:
            return f"shape {tuple(x.shape)}, not {tuple(y.shape)}"
        known = torch.isfinite(x) & torch.isfinite(y)
        error, size = (x - y)[known].norm(), y[known].norm()
        if error > 32 * eps * max(1.0, size):
            return f"result {i} is off by {error / max(1.0, size) / eps:.0f} eps"
    return ""


@functools.cache
def cases(kind: str) -> list[tuple[str, Places, bool, list[Tensor]]]:
    """Op, converted arguments, whether with gradients, results: where FP32 works without Mezzo."""
    found = []
    for name in samples.SAMPLES:
        if kind in LAYOUTS and name in samples.LAPACK:
            continue
        if kind == "mkldnn" and name.partition(".")[0] in UNSOUND.split():
            continue
        every = tuple(places(samples.sample(name, torch.float32)[1]))
        single = [(place,) for place in every] if kind in LAYOUTS else []
        for where in dict.fromkeys([*single, every]):
            with suppress(Exception):
                for backward in (False, True):
                    exact = attempt(
                        name, CONVERSIONS[kind], where, None, torch.float32, nullcontext(), backward
                    )
                    works = (name, where, backward, exact)
                    found = [*found[:-1], works] if backward else [*found, works]
    return found


def attempted(call: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    with suppress(Exception):
        return call()
    return None


def outcomes(kind: str, spec: str) -> list[tuple[str, str, bool]]:
    """Each case that reaches Mezzo: what it is, Mezzo's error or difference, and then whether torch.autocast works."""
    dtype, convert, found = FORMATS[spec], CONVERSIONS[kind], []
    eps = torch.finfo(dtype).eps
    for (name, where, backward, exact), low in itertools.product(cases(kind), (False, True)):
        inputs = dtype if low else torch.float32
        arguments = (name, convert, where, dtype if low else None)
        told = f"{name} {where} {'16 bits' if low else 'FP32'} {'backward' if backward else 'forward'}"
        torchs = functools.partial(attempt, *arguments, inputs, torch.autocast("cpu", dtype), backward)
        try:
            ours = attempt(*arguments, inputs, mezzo.autocast(spec, "cpu"), backward)
        except BannedOpError:
            continue
        except Exception as error:
            found.append((told, str(error).partition("\n")[0], attempted(torchs) is not None))
            continue
        off = ""
        if name not in samples.LAPACK:
            expected = attempt(*arguments, torch.float32, nullcontext(), backward) if low else exact
            # The others serve ATen's backward; their shapes depend on the table's strides.
            if name == "embedding_bag":
                ours, expected = ours[:1] + ours[4:], expected[:1] + expected[4:]
            off = difference(ours, expected, eps)
        theirs = attempted(torchs) if off else None
        if theirs is not None and not difference(ours, theirs, eps):
            off = ""
        found.append((told, off, theirs is not None))
    return found


def unexplained(found: list[tuple[str, str, bool]]) -> list[tuple[str, str]]:
    return [(told, error) for told, error, _ in found if error and not any(part in error for part in LIMITS)]


def rows(daily: Iterable[str], nightly: tuple[str, ...]) -> list[Any]:
    return [(kind, "bf16") for kind in daily] + [
        pytest.param(kind, "fp16", marks=pytest.mark.nightly) for kind in nightly
    ]


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "spec"), rows(CONVERSIONS, ("coo", "nested", "jagged", "mkldnn")))
def test_where_torch_autocast_works_a_context_does(kind: str, spec: str) -> None:
    if kind == "mkldnn":
        needs_avx512("oneDNN's layers refuse bf16")
    found = outcomes(kind, spec)
    assert len(found) > 10
    assert [(told, error) for told, error, torchs in found if error and torchs] == []
    if kind not in SPARSE:  # a run lends those kernels of their own
        assert unexplained(found) == []


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "spec"), rows(SPARSE, ("csr",)))
def test_where_fp32_works_a_run_does(kind: str, spec: str) -> None:
    end = lend_kernels()
    try:
        assert unexplained(outcomes(kind, spec)) == []
    finally:
        end()


@pytest.mark.parametrize("rule", ["promote", "fp32", "lower"])
def test_a_write_keeps_its_tensor_under_each_rule(rule: str) -> None:
    for destination, source in itertools.permutations([torch.float32, torch.bfloat16]):
        out, x = torch.zeros(3, 4, dtype=destination), torch.ones(2, 4, dtype=source)
        with mezzo.autocast(f"bf16,op.index_add_={rule}", "cpu"):
            assert out.index_add_(0, torch.tensor([0, 2]), x) is out
        assert (out.dtype, out.sum().item()) == (destination, 8)


@pytest.mark.parametrize("spec", FORMATS)
def test_an_adaptive_softmax_on_a_layer_s_output_trains_as_in_fp32(spec: str) -> None:
    """Its buffer has its input's 16 bits, and its log-probabilities, which index_copy_ writes there, are FP32."""
    body, head = nn.Linear(8, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])
    x, y = torch.randn(6, 8), torch.randint(0, 20, (6,))
    grads = []
    for context in (nullcontext(), mezzo.autocast(spec, "cpu")):
        with context:
            loss = head(body(x), y).loss
        grads.append(torch.autograd.grad(loss, [*body.parameters(), *head.parameters()]))
    for exact, ours in zip(*grads, strict=True):
        assert (ours - exact).norm() <= 0.03 * exact.norm() + 1e-3


# Format, number, what masked_fill gives, and masked_fill_ in place.
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NUMBERS = [
    (HALF, -1e9, (FP32, -1e9), -65504.0),
    (HALF, -65504.0, (HALF, -65504.0), -65504.0),
    (HALF, float("-inf"), (HALF, float("-inf")), float("-inf")),
    (BF16, -1e9, (BF16, -998244352.0), -998244352.0),
    (BF16, 3.4e38, (FP32, 3.3999999521443642e38), 3.3895313892515355e38),
    (FP32, -1e9, (FP32, -1e9), -1e9),
]


@pytest.mark.parametrize(("dtype", "number", "expected", "in_place"), NUMBERS)
def test_a_number_beyond_the_format(dtype: Any, number: float, expected: Any, in_place: float) -> None:
    x, mask = torch.ones(2, dtype=dtype), torch.tensor([True, False])
    with mezzo.autocast("bf16", "cpu"):
        out = x.masked_fill(mask, number)
        assert (out.dtype, out[0].item(), out[1].item()) == (*expected, 1.0)
        assert x.masked_fill_(mask, number) is x
        assert x.tolist() == [in_place, 1.0]
