"""Block formats: codes, scales and products against the definitions, written out element by element or in FP64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
import mx_casts
from faults.models import linear, net
from mezzo.core import formats
from mezzo.core.errors import UsageError
from mezzo.core.recipes import ELEMENTS, RECIPES, Factor, Recipe, read_recipe
from mezzo.pytorch.autocast.modules import described, last_blocks_of, with_heads
from mezzo.pytorch.block_formats import _patterns
from mezzo.pytorch.kernels.quantized import hadamard, quantize
from mezzo.pytorch.kernels.quantized_linear import quantized_linear
from mezzo.pytorch.rounding import random_integers
from trainers import refused, stepped

BLOCKS = ["mxfp8", "fp8-block", "nvfp4"]


def matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-12, 9, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * sizes).to(dtype)


def scale_by_definition(largest: float, factor: Factor) -> float:
    """A power of two: rounded up for training, or by the text of OCP MX."""
    if factor.scale == "e8m0-floor":
        top = math.floor(math.log2(factor.largest))
        return 2.0 ** max(-127, math.floor(math.log2(largest)) - top) if largest else 2.0**-127
    lowest = -127 if factor.scale == "e8m0" else -126
    return 2.0 ** max(lowest, math.ceil(math.log2(largest / factor.largest))) if largest else 2.0**lowest


MX = [
    Factor("e4m3fn", (1, 32), "e8m0"),
    Factor("e2m1", (1, 32), "e8m0-floor"),
    Factor("e4m3fn", (1, 16)),
    Factor("e4m3fn", (16, 16)),
]


@pytest.mark.parametrize("factor", MX, ids=str)
@pytest.mark.parametrize("dim", [1, 0])
def test_codes_and_scales_of_one_scale_a_block(factor: Factor, dim: int) -> None:
    x = matrix(64, 64)
    x[:32, :32] = 0
    x[32:, 32:] *= 2.0**-120  # scales at the end of their range
    found = quantize(x if dim == 1 else x.t().contiguous(), factor, dim)
    codes, scales = found.codes.float(), found.inv_scale
    if dim == 0:
        codes, scales = codes.t(), scales.t()
    height, width = factor.block
    largest = x.abs().double().reshape(64 // height, height, 64 // width, width).amax((1, 3))
    expected = [[scale_by_definition(one, factor) for one in row] for row in largest.tolist()]
    assert scales.tolist() == expected
    spread = scales.double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    assert torch.equal(codes, formats.round(x.double() / spread, factor.element, overflow="saturate").float())


@pytest.mark.parametrize("scale", mx_casts.MODES)
@pytest.mark.parametrize("element", mx_casts.ELEMENTS)
def test_mx_casts_are_those_of_torchao(element: str, scale: str) -> None:
    """For every finite bf16 value as the largest of its block; codes where the scale is above 2^-127.

    There torchao's codes are not the elements divided by the scale.
    """
    found = quantize(mx_casts.inputs(), Factor(element, (1, 32), scale))
    exponents = (found.inv_scale.view(torch.int32) >> 23).to(torch.uint8).flatten()
    expected = json.loads(mx_casts.FILE.read_text(encoding="utf-8"))["digests"]
    assert mx_casts.digest(exponents, _patterns(found.codes, element)) == expected[f"{element} {scale}"]


@pytest.mark.parametrize("case", mx_casts.NVFP4)
def test_nvfp4_casts_are_those_of_torchao(case: str) -> None:
    """Of torchao's training reference: codes, scales of blocks and of the tensor, for each matrix of the table."""
    block, _, form = case.partition(" ")
    factor = Factor("e2m1", (int(block.split("x")[0]), 16), "e4m3fn", hadamard=form == "hadamard")
    found = {}
    for name, x in mx_casts.nvfp4_inputs(case).items():
        made = quantize(x, factor, 0 if form else 1)
        assert made.tensor_scale is not None
        codes = _patterns(made.codes, "e2m1")
        found[name] = mx_casts.digest_nvfp4(made.inv_scale, codes, made.tensor_scale)
    assert found == json.loads(mx_casts.FILE.read_text(encoding="utf-8"))["nvfp4"][case]


# Each is compiled anew, which takes seconds. Those of 6 bits have the mantissas of those of 8, and fp4's kind of codes.
EACH_MANTISSA = [
    pytest.param(element, marks=pytest.mark.nightly) if element in ("e3m2", "e2m3") else element
    for element in ELEMENTS
]


@pytest.mark.parametrize("element", EACH_MANTISSA)
def test_stochastic_rounding_of_elements_is_that_of_formats(element: str) -> None:
    form = formats.named(element)
    factor = Factor(element, (1, 16), "e8m0", stochastic=True)
    row = torch.linspace(-form.max, form.max, 90).view(6, 15)
    x = torch.cat([row, torch.full((6, 1), form.max)], 1).repeat(64, 4)  # every scale is 1
    state = torch.get_rng_state()
    found = quantize(x, factor).values(torch.float32)
    assert torch.equal(found, formats.round(x, element, seed=0))
    assert not torch.equal(found, formats.round(x, element))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_hash_is_uniform(dtype: torch.dtype) -> None:
    for x in (torch.zeros(512, 512), torch.ones(512, 512), torch.randn(512, 512)):
        u = random_integers(x.to(dtype)).double() / 2.0 ** (30 if dtype is torch.float32 else 62)
        assert 0 <= u.min() < u.max() < 1
        counts = torch.histc(u, 64, 0, 1)
        expected = u.numel() / 64
        # Chi-squared, 63 degrees of freedom: p below 1e-5.
        assert ((counts - expected) ** 2 / expected).sum() < 120
        assert abs(torch.corrcoef(torch.stack([u[:, 1:].flatten(), u[:, :-1].flatten()]))[0, 1]) < 0.01


def test_the_hadamard_transform() -> None:
    whole = hadamard(torch.eye(16), 1)
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    for i in range(16):
        for j in range(16):
            assert whole[i, j] == signs[i] * (-1) ** (i & j).bit_count() / 4
    assert torch.equal(whole @ whole.t(), torch.eye(16))  # so it cancels in g^T x
    x = matrix(48, 32).float()
    assert torch.equal(hadamard(x, 0), hadamard(x.t().contiguous(), 1).t())
    assert torch.equal(hadamard(x, 0), hadamard(x, 0).bfloat16().float())


def decoded(x: Tensor, factor: Factor, dim: int) -> Tensor:
    """What quantization leaves of a matrix, in FP64; the transform stays applied."""
    found = quantize(x, factor, dim)
    height, width = (total // count for total, count in zip(found.codes.shape, found.inv_scale.shape))
    spread = found.inv_scale.double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    tensor = 1.0 if found.tensor_scale is None else found.tensor_scale.double()
    return found.codes.double() * spread * tensor


_NVFP4, _MXFP8 = Factor("e2m1", (1, 16), "e4m3fn"), Factor("e4m3fn", (1, 32), "e8m0")
# Only one factor of each product has a scale of the whole tensor.
MIXED = Recipe("mixed", (_NVFP4, _MXFP8), (_MXFP8, _NVFP4), (_NVFP4, _MXFP8), 32)
# Blocks that are not whole groups of the transform's rows: each factor is padded to both.
_MIX8, _MIX24, _MIX40 = (Factor("e2m1", (1, size), "e4m3fn", hadamard=True) for size in (8, 24, 40))
ODD = Recipe("odd", (_MIX24, _MIX8), (_MIX8, _MIX24), (_MIX40, _MIX24), 24)


@pytest.mark.parametrize("native", ["bf16", ""])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), MIXED, ODD], ids=lambda recipe: recipe.name)
def test_the_three_products(recipe: Recipe, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
    k, n = (size - size % recipe.multiple for size in (128, 256))
    x = matrix(40, k, 1).clamp(-4, 4).requires_grad_()  # 40 tokens: not whole blocks
    w = matrix(n, k, 2, torch.float32).clamp(-1, 1).requires_grad_()
    b, g = torch.randn(n, requires_grad=True), matrix(40, n, 3).clamp(-2, 2)
    y = quantized_linear(x, w, b, recipe=recipe)
    y.backward(g)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    pairs = {
        "y": (x, 1, recipe.output, w, 1, y, b.bfloat16().double()),
        "dx": (g, 1, recipe.input_gradient, w, 0, x.grad, 0),
        "dw": (g, 0, recipe.weight_gradient, x, 0, w.grad, 0),
    }
    for what, (one, along, factors, other, across, found, bias) in pairs.items():
        left, right = decoded(one, factors[0], along), decoded(other, factors[1], across)
        left, right = (left if along else left.t()), (right.t() if across else right)
        shared = min(left.shape[1], right.shape[0])  # the rest of the longer blocks is zeros
        left, right = left[:, :shared], right[:shared]
        error = (found.double() - (left @ right + bias)).abs()
        bound = 2.0**-7 * (left.abs() @ right.abs() + torch.as_tensor(bias).abs())  # two roundings to bf16
        assert (error <= bound + 1e-30).all(), what
    assert torch.allclose(b.grad, g.float().sum(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_stay_visible_and_reach_their_block_only(name: str, bad: float) -> None:
    x, w = matrix(32, 128).clamp(-4, 4), matrix(128, 128, 1).clamp(-1, 1)
    x[3, 5] = bad
    y = quantized_linear(x, w, recipe=RECIPES[name])
    assert y[3].isnan().all()
    assert y[[*range(3), *range(4, 32)]].isfinite().all()


@pytest.mark.parametrize("factor", [*RECIPES["nvfp4"].factors, *RECIPES["mxfp8"].output], ids=str)
def test_blocks_too_small_for_a_scale_are_zero_and_not_nan(factor: Factor) -> None:
    x = matrix(32, 64).clamp(-4, 4).to(torch.bfloat16 if factor.stochastic else torch.float32)
    x[0, 0] = 3e6  # NVFP4's scale of the other blocks is then 0
    bad = x.clone()
    bad[5, 40] = math.nan
    one, other = (quantize(each, factor).values(torch.float32) for each in (x, bad))
    assert one.isfinite().all()
    assert torch.equal(one[other.isfinite()], other[other.isfinite()])
    height = factor.block[0]
    assert other[5 // height * height + height :].isfinite().all()


def test_a_scale_below_the_smallest_fp32_number() -> None:
    found = quantize(torch.full((2, 32), 1e-45), Factor("e4m3fn", (1, 32), "fp32"))
    assert torch.equal(found.values(torch.float32), torch.zeros(2, 32))


SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 60), nn.Linear(60, 4))
model(torch.ones(2, 128)).sum().backward()
"""


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_compute_in_bf16_where_sizes_do_not_fit_and_say_so(name: str, launch: Any) -> None:
    """In `explain`, which knows the sizes of lazy layers, and in the summary of a run."""
    model = nn.Sequential(nn.LazyLinear(128), nn.LazyLinear(60), nn.Linear(60, 4))
    explained = str(mezzo.explain(model, torch.ones(2, 128), precision=name))
    for text in (explained, launch(SCRIPT, policy=name).err):
        for part in (
            f"{name} in 1 linear layer: 0.",
            "1 (bf16: 60 outputs",
            f"multiple of {RECIPES[name].multiple}",
        ):
            assert part in text
    assert "Emulated on cpu" in text


def blocks(count: int) -> nn.Module:
    each = [nn.ModuleDict({"up": nn.Linear(128, 64), "down": nn.Linear(64, 128)}) for _ in range(count)]
    odd, head = nn.Linear(128, 65), nn.Linear(128, 16)
    return nn.ModuleDict({"odd": odd, "blocks": nn.ModuleList(each), "head": head})


def attention() -> nn.Module:
    return nn.ModuleDict({"inner": nn.MultiheadAttention(64, 4, kdim=32, vdim=72), "head": nn.Linear(64, 16)})


# Model, policy, the layers in each format, and those in bf16. Layers of one kind are shortened to *, or to numbers.
DESCRIBED = [
    (blocks(3), "mxfp8", {"mxfp8": "blocks.*.up, blocks.*.down"}, ["odd", "head"]),
    (
        blocks(8),
        "nvfp4,module.blocks.2.up=bf16",
        {"nvfp4": "blocks.0-1,3-5.up, blocks.0-5.down"},
        ["odd", "blocks.6-7.up", "blocks.6-7.down", "blocks.2.up", "head"],
    ),
    (
        blocks(2),
        "bf16,module.blocks.0.up=mxfp8,module.blocks.1.up=nvfp4",
        {"mxfp8": "blocks.0.up", "nvfp4": "blocks.1.up"},
        ["odd", "blocks.*.down", "head"],
    ),
    (
        attention(),
        "mxfp8",
        {"mxfp8": "inner.q_proj_weight, inner.k_proj_weight, inner.out_proj.weight"},
        ["inner.v_proj_weight", "head"],
    ),
    (nn.Linear(32, 32), "mxfp8", {"mxfp8": "the model"}, []),
]


@pytest.mark.parametrize(("model", "text", "lower", "apart"), DESCRIBED)
def test_each_layer_is_listed_once_in_its_format(
    model: nn.Module, text: str, lower: dict[str, str], apart: list[str]
) -> None:
    notes = described(with_heads(mezzo.policy(text), model), model)
    found = [note for note in notes if " linear layer" in note]
    assert [(note.split()[0], note.partition(": ")[2].rstrip(".")) for note in found] == list(lower.items())
    assert [note.split()[3] for note in notes if note.startswith("Emulated")] == [*lower]
    others = next((note for note in notes if note.startswith("Not in")), "").partition(": ")[2]
    names = [name for part in others.split("; ") if part for name in part.split(" (")[0].split(", ")]
    assert sorted(names) == sorted(apart)


@net(up=lambda: nn.Parameter(torch.randn(4, 64, 64)))
def experts(self: Any, x: Tensor) -> Tensor:
    return torch.bmm(x.expand(4, *x.shape), self.up).mean(0)


@net(
    into=linear(64, 64),
    experts=experts,
    conv=lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 32, padding=16)),
    head=linear(64, 4),
    score_bias=lambda: nn.Parameter(torch.randn(4, 64, 64)),
    pos_embed=lambda: nn.Parameter(torch.randn(2, 64, 64)),
)
def mixture(self: Any, x: Tensor) -> Tensor:
    x = self.into(x + self.pos_embed[0, : len(x)])
    return self.head(self.conv(self.experts(x).t()).t()) + self.score_bias.mean()


def test_explain_names_batched_weights_of_experts() -> None:
    text = mezzo.explain(mixture(), torch.randn(8, 64), precision="mxfp8").as_text(300)
    assert (
        "score_bias, pos_embed, experts.up (a batch of matrices: only linear products are quantized)" in text
    )
    assert "conv" not in next(line for line in text.splitlines() if "Not in mxfp8" in line)
    text = mezzo.explain(mixture(), torch.randn(8, 64), precision="bf16,module.into=mxfp8").as_text(300)
    assert "a batch" not in text


def test_a_run_with_batched_weights_of_experts_names_the_line(launch: Any) -> None:
    layers = "torch.nn.Linear(64, 64), experts(), torch.nn.Linear(64, 4)"
    script = f"import torch\nfrom {__name__} import experts\nmodel = torch.nn.Sequential({layers})\n"
    ran = launch(f"{script}model(torch.ones(2, 64)).sum().backward()", policy="mxfp8")
    assert (ran.status, "module.1=bf16" in ran.err) == (1, True)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4", "bf16,module.**=mxfp8,module.experts=mxfp8", "bf16"])
def test_batched_weights_of_experts_need_a_line_of_the_policy(precision: str) -> None:
    def trained(text: str, model: nn.Module) -> float | None:
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
        return stepped(mp, lambda: model(torch.randn(8, 64)).square().mean()).loss

    if precision in BLOCKS:
        with refused(UsageError, "experts.up", "4 matrices", "module.experts=bf16"):
            trained(precision, mixture())
        with refused(UsageError, "bf16,module.PATH="):
            trained(precision, experts())
        precision = f"{precision},module.experts=bf16"
    assert trained(precision, mixture()) is not None


def test_a_tied_head_that_a_policy_names_is_refused_with_the_reason() -> None:
    """The weight of an embedding is not quantized. `explain` lists such a head; a wider pattern may match it."""
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    model[2].weight = model[0].weight

    def made(text: str) -> mezzo.MixedPrecision:
        return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)

    for text in ("nvfp4,module.2=nvfp4", "mxfp8,module.*=bf16,module.2=mxfp8"):
        with refused(
            UsageError, text.rpartition(",")[2], "2 has the weight of the embedding 0", "module.2=bf16"
        ):
            made(text)
        assert "also in linear products" in str(mezzo.explain(model, torch.ones(2, 2).int(), precision=text))
    for text in ("nvfp4", "fp8,module.*=fp8", "mxfp8,module.2=bf16", "bf16,module.2=mxfp8"):
        made(text)


def test_which_blocks_are_the_last() -> None:
    many = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(14)])
    model = nn.ModuleDict({"embed": nn.Embedding(8, 32), "blocks": many, "head": nn.Linear(32, 8)})
    assert last_blocks_of(model, 0.15) == ["blocks.11", "blocks.12", "blocks.13"]
    assert last_blocks_of(model, 0.0) == last_blocks_of(nn.Linear(2, 2), 0.15) == []
    both = nn.Transformer(32, 2, 6, 6, 32, batch_first=True)
    assert last_blocks_of(both, 0.15) == ["decoder.layers.5"]
    long = nn.Transformer(32, 2, 12, 2, 32, batch_first=True)
    assert last_blocks_of(long, 0.15) == ["encoder.layers.11", "decoder.layers.0", "decoder.layers.1"]
    deep = nn.Sequential(
        nn.Linear(32, 32),
        *(nn.Sequential(many) for _ in range(8)),
        nn.ModuleList(nn.Linear(32, 8) for _ in range(3)),
    )
    assert last_blocks_of(deep, 0.15) == ["7", "8"]
    flat = nn.Sequential(nn.Linear(32, 32), *many[:4], nn.Linear(32, 8))
    assert last_blocks_of(flat, 0.5) == ["3", "4"]
    again = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(32, 32)] * 8), "head": nn.Linear(32, 8)})
    assert last_blocks_of(again, 0.15) == []  # one block, eight times
    notes = described(with_heads(mezzo.policy("nvfp4"), again), again)
    assert notes[0] == "nvfp4 in 1 linear layer: blocks.0."
    assert any("blocks" in note and note.startswith("No ") for note in notes)


def _changed(of: Recipe = RECIPES["mxfp8"], **changes: Any) -> Callable[[], Recipe]:
    return lambda: replace(of, **changes)


# What is made, parts of the error.
WRONG = [
    (lambda: Factor("fp8", (1, 32)), ("fp8", "e4m3fn")),
    (lambda: Factor("e4m3fn", (1, 32), "e8m"), ("e8m", "e8m0")),
    (lambda: Factor("e4m3fn", (1, -1)), ("[1, -1]", "[1, 32]")),
    (lambda: Factor("e4m3fn", (1, 16), "e4m3fn"), ("e4m3fn", "element='e2m1'")),
    (_changed(name="mine", output=(Factor("e4m3fn", (32, 32)),) * 2), ("mine", "[32, 32]", "output")),
    (_changed(RECIPES["fp8-block"], multiple=48), ("48", "[1, 128]", "x has in output", "multiple=384")),
    # The weight's gradient would have 64 rows in place of 48; the factors of the output 128 and 96 columns.
    (
        _changed(MIXED, weight_gradient=(Factor("e2m1", (64, 16), "e4m3fn"), _MXFP8)),
        ("32", "[64, 16]", "g", "weight_gradient", "multiple=64"),
    ),
    (_changed(output=(Factor("e4m3fn", (1, 64)), _MXFP8)), ("[1, 64]", "x has in output", "multiple=64")),
    (_changed(output=(replace(_MXFP8, hadamard=True), _MXFP8)), ("hadamard", "output", "x and w")),
]


@pytest.mark.parametrize(("make", "parts"), WRONG)
def test_a_recipe_that_cannot_be(make: Callable[[], Any], parts: tuple[str, ...]) -> None:
    with refused(UsageError, *parts):
        make()


MINE = """
multiple = 32
[output]
x = { element = "e2m1", block = [1, 32], scale = "e8m0" }
w = { element = "e2m3", block = [32, 32], scale = "fp32" }
[input_gradient]
g = { element = "e2m1", block = [1, 32], scale = "e8m0", stochastic = true }
w = { element = "e5m2", block = [0, 0] }
[weight_gradient]
g = { element = "e3m2", block = [1, 16], scale = "e8m0-floor" }
x = { element = "e4m3fn", block = [1, 0] }
"""


@pytest.mark.parametrize("file", ["mine.toml", "Mine.TOML"])
def test_a_recipe_from_a_file(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(MINE)
    policy = mezzo.policy(f"mxfp8,recipe={file}")
    recipe = policy.quantization
    assert recipe.output == (Factor("e2m1", (1, 32), "e8m0"), Factor("e2m3", (32, 32), "fp32"))
    assert recipe.input_gradient[0].stochastic
    assert not recipe.is_exact_in_bf16
    assert mezzo.policy(str(policy)) == policy
    x, w = torch.randn(8, 64), torch.randn(32, 64, requires_grad=True)
    with mezzo.autocast(policy, "cpu"):
        y = nn.functional.linear(x, w)
    assert torch.equal(y, quantized_linear(x, w, recipe=recipe))
    y.sum().backward()
    before = policy.fingerprint()
    Path(file).write_text(MINE.replace("[1, 16]", "[1, 32]"))
    read_recipe.cache_clear()
    assert mezzo.policy(f"mxfp8,recipe={file}").fingerprint() != before


@pytest.mark.parametrize("preset", ["fp8", "mxfp8", "nvfp4"])
def test_layers_are_listed_by_the_file_of_the_recipe_and_each_reason_once(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("apart.toml").write_text(f"last_blocks = 0.1\n{MINE}")
    policy, model = mezzo.policy(f"{preset},recipe=apart.toml"), blocks(3)
    lower, others, *_ = described(with_heads(policy, model), model)
    assert lower == "recipe apart.toml in 4 linear layers: blocks.0-1.up, blocks.0-1.down."
    assert others.startswith("Not in recipe apart.toml: ")
    assert "blocks.2.up, blocks.2.down (" in others


WRONG_FILES = [
    ("output = 3", ("output", "element")),
    (MINE.replace("block = [1, 16], ", ""), ("weight_gradient", "g", "block")),
    (MINE.replace("stochastic", "stocastic"), ("stocastic", "stochastic", "input_gradient")),
    (MINE.replace("[output]", "[outputs]"), ("outputs", "output")),
    (MINE.replace('"e2m3"', '"e2m4"'), ("[output] w", "e2m4", "e2m3")),
    (MINE.replace('"e2m3"', '["e2m3"]'), ("['e2m3']", "e2m3")),
    (MINE.replace('"fp32"', "true"), ("True", "fp32")),
    (MINE.replace('"fp32"', '["fp32"]'), ("['fp32']", "fp32")),
    (MINE.replace("element", "elment", 1), ("elment", "element", "output", "x")),
    ("[output", ("not TOML",)),
    (MINE.replace("[1, 16]", "16"), ("[weight_gradient] g", "block=16", "[1, 32]")),
    (MINE.replace("[input_gradient]", "z = {}\n[input_gradient]"), ("[output]", "'z'", "w, x")),
    (MINE.replace("[1, 16]", '["1", 16]'), ("block=['1', 16]", "[1, 32]")),
    (MINE.replace("= true", '= "yes"'), ("stochastic='yes'", "true or false")),
    (MINE.replace("multiple = 32", 'multiple = "32"'), ("multiple='32'", "32")),
    (f"last_blocks = 15\n{MINE}", ("last_blocks=15", "0.15")),
]


@pytest.mark.parametrize(("text", "parts"), WRONG_FILES)
def test_a_wrong_file_is_refused(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with refused(UsageError, "mine.toml", *parts):
        mezzo.policy(f"mxfp8,recipe={tmp_path}/mine.toml")


def test_a_recipe_by_name_and_where_it_has_no_place() -> None:
    assert [name for name, recipe in RECIPES.items() if recipe.hardware == "fp8"] == ["fp8", "fp8-rowwise"]
    assert all(hash(recipe) == hash(replace(recipe, name=name)) for name, recipe in RECIPES.items())
    assert mezzo.policy("nvfp4,recipe=nvfp4-plain").quantization == RECIPES["nvfp4-plain"]
    assert mezzo.policy("fp8,scaling=rowwise").quantization == RECIPES["fp8-rowwise"]
    assert mezzo.policy("bf16,module.x=fp8,scaling=rowwise").with_modules("bf16", ()) == mezzo.policy("bf16")
    for text, part in (
        ("bf16,recipe=nvfp4-plain", "mxfp8"),
        ("nvfp4,recipe=nvfp4-plane", "nvfp4-plain"),
        ("mxfp8,scaling=rowwise", "compute in fp8"),
        ("bf16,scaling=rowwise", "compute in fp8"),
        ("fp8,recipe=mxfp8,scaling=rowwise", "Remove scaling"),
        ("nvfp4,module.x=fp8-block,recipe=nvfp4-plain", "fp8-block and nvfp4"),
    ):
        with pytest.raises(UsageError, match=part):
            mezzo.policy(text)


@pytest.mark.parametrize("text", ["mxfp8,recipe=mxfp8-floor", "bf16,module.0=mxfp8,recipe=mxfp8-floor"])
def test_a_recipe_by_name_where_another_layer_stays_in_bf16(text: str) -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 5)), torch.randn(4, 32)
    hidden = quantized_linear(x, *model[0].parameters(), recipe=RECIPES["mxfp8-floor"])
    with torch.autocast("cpu", torch.bfloat16):
        expected = model[1](hidden)
    why = "bf16 by default: the head" if text.startswith("mxfp8") else "the policy says bf16"
    assert f"Not in recipe mxfp8-floor: 1 ({why})" in str(mezzo.explain(model, x, precision=text))
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
    with mp.autocast():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", [*BLOCKS, "fp8", "nvfp4-plain"])
@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
def test_quantize_for_study(name: str, role: str) -> None:
    x = matrix(24, 50).reshape(2, 12, 50)
    signed = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)  # NaN with a sign
    for bad in (math.nan, signed, -math.inf, None):  # the last is examined further
        given = x.clone()
        if bad is not None:
            given[1, 3, 20] = bad
        found = formats.quantize(given, name, role)
        form = formats.named(found.factor.element)
        assert found.codes.shape == found.values.shape == x.shape
        assert int(found.codes.max()) < 1 << form.bits
        elements = torch.tensor([formats.decode(code, form) for code in range(1 << form.bits)])
        height, width = (-(-total // count) for total, count in zip((24, 50), found.scales.shape))
        height, width = found.factor.block[0] or height, found.factor.block[1] or width
        spread = found.scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:24, :50]
        values = elements[found.codes.int()] * spread.reshape(x.shape) * found.tensor_scale
        assert torch.allclose(values, found.values, rtol=0, atol=0, equal_nan=True)
        assert found.values[1, 3, 20].isfinite() == (bad is None)
    bound = {"e2m1": 0.5, "e4m3fn": 0.07, "e5m2": 0.13}[form.name]
    assert (found.values - x.float()).norm() < bound * x.float().norm()
    assert form.name in repr(found)
    scale_bytes = {"mxfp8": 1, "nvfp4": 1, "nvfp4-plain": 1}.get(name, 4) * found.scales.numel()
    scale_of_tensor = 4 * (form.name == "e2m1")
    assert found.stored_bytes == x.numel() * form.bits / 8 + scale_bytes + scale_of_tensor


WRONG_CALLS = [
    ((torch.ones(4), "mxfp9"), ("mxfp9", "mxfp8")),
    ((torch.ones(4), "mxfp8", "inputs"), ("inputs", "input")),
    ((torch.ones(4), 8), ("8", "mxfp8")),
    ((torch.ones(4), "mxfp8", 0), ("0", "input")),
    ((torch.ones(4).int(), "mxfp8"), ("int32", "floating-point")),
    ((torch.eye(32).to_sparse(), "mxfp8"), ("sparse_coo", "dense")),
    (([1.0], "mxfp8"), ("list", "torch tensor")),
]


@pytest.mark.parametrize(("arguments", "parts"), WRONG_CALLS)
def test_a_wrong_call_of_quantize(arguments: tuple[object, ...], parts: tuple[str, ...]) -> None:
    with refused(UsageError, *parts):
        formats.quantize(*arguments)  # type: ignore[arg-type]


def losses(precision: str, way: str = "eager", steps: int = 3) -> list[float]:
    """The last step has one number that is large beside all others."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    net = nn.ModuleDict({"block": block, "head": nn.Linear(128, 8)})
    mp = mezzo.MixedPrecision(net, torch.optim.Adam(net.parameters(), lr=3e-3), precision)
    x, target = torch.randn(256, 128), torch.randint(0, 8, (256,))

    def forward() -> torch.Tensor:
        if way in ("reentrant", "not reentrant"):
            inner = checkpoint(block, x.requires_grad_(), use_reentrant=way == "reentrant")
        else:
            inner = block(x)
        return nn.functional.cross_entropy(net["head"](inner), target)

    called = torch.compile(forward, backend="aot_eager") if way == "compiled" else forward
    found = [stepped(mp, called).loss for _ in range(steps - 1)]
    with torch.no_grad():
        x[0, 0] = 3e6
    return [*found, stepped(mp, called).loss]


@pytest.mark.parametrize("precision", BLOCKS)
def test_checkpointed_and_compiled_steps_have_the_bits_of_eager_ones(precision: str) -> None:
    eager = losses(precision)
    assert all(map(math.isfinite, eager))
    for way in ("reentrant", "not reentrant", "compiled"):
        assert losses(precision, way) == eager, way


@pytest.mark.parametrize("name", BLOCKS)
def test_a_training_follows_bf16(name: str) -> None:
    ours, bf16 = losses(name, steps=40), losses("bf16", steps=40)
    assert ours != bf16
    assert ours[-2] < 0.2 * ours[0]
    assert ours[:5] == pytest.approx(bf16[:5], rel=0.1)


def test_a_model_trains_whose_head_is_also_its_last_block() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for text in ("nvfp4", "nvfp4,recipe=nvfp4-plain", "mxfp8,recipe=mxfp8-floor"):
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
        stepped(mp, lambda: model(torch.ones(2, 32)).sum())
        mp.close()
