"""Lowering a model's weights in place: which ones, to which bits, what is kept of them and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import mezzo
from alive import bytes_alive
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.weights import lowering
from mezzo.pytorch.weights.lowering import has_master, lower_weights, peek_master, take_master

INF, NAN = float("inf"), float("nan")


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class LayerNorm2d(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, width, 1, 1))


class PreNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)
        self.mix = nn.Parameter(torch.ones(width, width))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 6)
        self.block = PreNorm(6)
        self.rms = LlamaRMSNorm(6)
        self.two = LayerNorm2d(6)
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.PReLU())
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.token.weight
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.whole = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)


LINEAR_AND_CONV = [
    *("frozen", "token.weight", "block.mix", "block.layer.weight", "block.layer.bias"),
    *("conv.0.weight", "conv.0.bias", "conv.3.weight"),
    *("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"),
]


def without(*gone: str) -> list[str]:
    return [name for name in LINEAR_AND_CONV if not any(name.startswith(one) for one in gone)]


CHOICES: list[tuple[Any, tuple[str, ...], list[str]]] = [
    ("bf16", (), LINEAR_AND_CONV),
    ("bf16,params=bf16", (), LINEAR_AND_CONV),
    ("fp16", (), LINEAR_AND_CONV),
    (mezzo.Policy("bf16", params="bf16"), (), LINEAR_AND_CONV),
    ("bf16,module.mlp=fp32", (), without("mlp")),
    ("bf16,module.mlp=fp32,module.mlp.2=bf16", (), without("mlp.0")),
    ("bf16,module.mlp.*=fp32", (), without("mlp")),
    ("fp16,module.block=bf16", (), without("block")),
    ("bf16", ("mlp", "conv.0.bias"), without("mlp", "conv.0.bias")),
    ("bf16", ("**.bias",), [name for name in LINEAR_AND_CONV if not name.endswith("bias")]),
    ("bf16", ("head",), without("token")),
    ("bf16,module.head=fp32", (), without("token")),
    ("bf16,module.token=fp32", (), without("token")),
]


@pytest.mark.parametrize(("precision", "keep", "names"), CHOICES, ids=str)
def test_which_parameters_are_lowered(precision: Any, keep: tuple[str, ...], names: list[str]) -> None:
    model = Model()
    before = {name: (param, param.dtype) for name, param in model.named_parameters()}
    assert lower_weights(model, precision, keep=keep) == names
    assert lower_weights(model, precision, keep=keep) == []
    low = torch.float16 if str(precision).startswith("fp16") else torch.bfloat16
    for name, param in model.named_parameters():
        was, dtype = before[name]
        assert param is was, name
        assert param.dtype is (low if name in names else dtype), name
        assert param.requires_grad is (name not in ("whole", "frozen")), name
    assert model.head.weight is model.token.weight
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}


def every_pattern() -> Tensor:
    """One in 997 of all FP32 patterns, and the neighbourhood of each that is special."""
    sample = torch.arange(-(2**31), 2**31, 997, dtype=torch.int64)
    special = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F7F8000, 0x3F808000, 0x7F7F7FFF, 0x7F800000]
    near = torch.tensor([s + d for s in special for d in (-2, -1, 0, 1, 2)], dtype=torch.int64)
    bits = torch.cat([sample, near, near - 2**31]).clamp(-(2**31), 2**31 - 1)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(("fmt", "limit"), [("bf16", 0x7F7F8000), ("fp16", 0x477FF000)])
def test_masters_come_back_to_the_bit(fmt: str, limit: int) -> None:
    values = every_pattern()
    magnitude = values.view(torch.int32) & 0x7FFFFFFF
    values = values[(magnitude < limit) | (magnitude >= 0x7F800000)]
    model = nn.ParameterList([nn.Parameter(values.clone())])
    assert lower_weights(model, fmt) == ["0"]
    weight = model[0].detach()
    nan = values.isnan()
    if fmt == "bf16":
        bits = values.view(torch.int32)
        away = ((bits + 0x8000) >> 16).to(torch.int16)
        assert torch.equal(weight.view(torch.int16)[~nan], away[~nan])
    else:
        assert torch.equal(weight[~nan], values[~nan].to(torch.float16))
    assert bool(weight[nan].isnan().all())
    assert has_master(model[0])
    kept = peek_master(model[0])
    master = take_master(model[0])
    assert master is not None
    assert kept is not None
    assert torch.equal(kept.view(torch.int32), master.view(torch.int32))
    assert torch.equal(master.view(torch.int32)[~nan], values.view(torch.int32)[~nan])
    assert bool(master[nan].isnan().all())
    assert take_master(model[0]) is None
    assert not has_master(model[0])


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_weights_that_sixteen_bits_hold_exactly_keep_nothing(fmt: str) -> None:
    dtype = torch.bfloat16 if fmt == "bf16" else torch.float16
    layer = nn.Linear(5, 5).to(dtype).float()
    lower_weights(layer, fmt)
    assert not has_master(layer.weight)
    assert take_master(layer.weight) is None


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "zero": lambda w: w.data.zero_(),
    "negative zero": lambda w: w.data.zero_().neg_(),
    "clamp": lambda w: w.data.clamp_(-0.1, 0.1),
    "negate": lambda w: w.data.neg_(),
    "another value": lambda w: w.data.fill_(3.0),
    "infinity": lambda w: w.data.fill_(INF),
    "copy": lambda w: w.data.copy_(torch.randn(w.shape)),
    "new storage": lambda w: setattr(w, "data", torch.full_like(w.data, 7.0)),
    "foreach": lambda w: torch._foreach_mul_([w.data], 2.0),
}


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_weight_has_a_master_within_one_ulp_of_it(fmt: str, edit: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 40)
    before = layer.weight.detach().clone()
    lower_weights(layer, fmt)
    was = layer.weight.detach().clone()
    with torch.no_grad():
        EDITS[edit](layer.weight)
    weight = layer.weight.detach()
    master = take_master(layer.weight)
    assert master is not None
    assert not bool(master.isnan().any())
    ulp = torch.nextafter(weight.abs(), torch.tensor(INF, dtype=weight.dtype)).float() - weight.abs().float()
    near = (master - weight.float()).abs() <= ulp
    # What rounds to infinity is no further from it than half the last step before it.
    beyond = weight.isinf() & (master.view(torch.int32) & 0x7FFFFFFF >= 0x7F7F8000)
    assert bool((near | beyond).all())
    untouched = weight == was
    assert torch.equal(master[untouched], before[untouched])
    if fmt == "fp16":
        assert torch.equal(master[~untouched], weight[~untouched].float())


@pytest.mark.parametrize(
    "replaced",
    [lambda d: d.float(), lambda d: d.half(), lambda d: d[:2].clone()],
    ids=["fp32", "fp16", "shape"],
)
def test_data_of_another_kind_has_no_master(replaced: Callable[[Tensor], Tensor]) -> None:
    layer = nn.Linear(4, 4)
    lower_weights(layer, "bf16")
    assert has_master(layer.weight)
    layer.weight.data = replaced(layer.weight.data)
    assert not has_master(layer.weight)
    assert take_master(layer.weight) is None


def test_what_is_kept_goes_with_its_parameter() -> None:
    layer = nn.Linear(4, 4)
    lower_weights(layer, "bf16")
    assert len(lowering._kept) >= 2
    gone, count = weakref.ref(layer.weight), len(lowering._kept)
    del layer
    gc.collect()
    assert gone() is None
    assert len(lowering._kept) <= count - 2


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_lowered_model_starts_from_its_weights(copier: Callable[[Any], Any]) -> None:
    layer = nn.Linear(4, 4)
    lower_weights(layer, "bf16")
    other = copier(layer)
    assert torch.equal(other.weight, layer.weight)
    assert take_master(other.weight) is None
    assert take_master(layer.weight) is not None


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "no dimension": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "longer than a piece": lambda: torch.randn((1 << 20) + 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_kept_where_they_fill_their_memory(layout: str) -> None:
    torch.manual_seed(0)
    value = LAYOUTS[layout]()
    model = nn.ParameterList([nn.Parameter(value)])
    before = value.clone()
    lower_weights(model, "bf16")
    master = take_master(model[0])
    assert torch.equal(model[0].float(), before.to(torch.bfloat16).float()) or before.numel() > 2**20
    if layout == "empty":
        assert master is None
        return
    assert master is not None
    assert torch.equal(master, before)
    assert master.stride() == model[0].stride()
    if layout not in ("with gaps", "expanded"):
        assert model[0].stride() == value.stride()


def test_a_gradient_that_is_there_and_hooks_go_along() -> None:
    layer = nn.Linear(3, 2)
    seen: list[torch.dtype] = []
    layer.weight.register_hook(lambda g: seen.append(g.dtype))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.dtype))
    layer(torch.ones(1, 3)).sum().backward()
    lower_weights(layer, "bf16")
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.bfloat16
    with mezzo.autocast("bf16", "cpu"):
        layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 2.0, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.heavy
def test_the_peak_is_the_model_and_one_parameter() -> None:
    others = bytes_alive()
    model = nn.ParameterList([nn.Parameter(torch.randn(1 << 24)) for _ in range(3)])
    one = 4 << 24
    peak = PeakTensorBytes()
    peak.start()
    lower_weights(model, "bf16")
    # Weights and remainders are as many bytes as what they replace; encoding a piece takes some MiB more.
    assert peak.stop().peak_bytes - others <= 3 * one + one + one // 2


REFUSED: list[tuple[Callable[[], nn.Module], str, str]] = [
    (lambda: nn.LazyLinear(3), "bf16", r"'weight' is lazy .* Run the model once"),
    (lambda: nn.Linear(2, 2, device="meta"), "bf16", r"'weight' is on the meta device"),
    (lambda: filled(7e4), "fp16", r"'weight' holds 70000, and fp16 ends at 65504.*keep=\['weight'\]"),
    (lambda: filled(-65520.0), "fp16", r"holds 65520"),
    (lambda: filled(3.4e38), "bf16", r"'weight' holds 3.4e\+38, and bf16 ends"),
    (lambda: nn.Linear(2, 2), "fp32", r"unknown 16-bit format 'fp32'. Use one of bf16, fp16"),
    (lambda: nn.Linear(2, 2), "auto", r"compute=auto is not decided"),
    (lambda: nn.Linear(2, 2), "b16", r"unknown|b16"),
    (lambda: nn.Linear(2, 2), "bf16,module.haed=fp32", r"'haed'"),
]


def filled(value: float) -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, value)
    return layer


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(("build", "precision", "message"), REFUSED)
def test_what_is_refused_leaves_the_model_alone(
    build: Callable[[], nn.Module], precision: str, message: str
) -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": build()})
    with pytest.raises(UsageError, match=message.replace("'weight'", r"'second\.weight'")):
        lower_weights(model, precision)
    assert model["first"].weight.dtype is torch.float32
    assert not has_master(model["first"].weight)


def test_a_parameter_is_no_model() -> None:
    with pytest.raises(UsageError, match="the model is a Parameter; give a"):
        lower_weights(nn.Linear(2, 2).weight)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match=r"keep=\['haed'\].*matches nothing.*nearest is 'head"):
        lower_weights(Model(), "bf16", keep=["haed"])


@pytest.mark.parametrize("value", [65504.0, 65519.99, INF, NAN])
def test_what_fp16_can_hold_is_not_refused(value: float) -> None:
    layer = filled(value)
    lower_weights(layer, "fp16")
    assert torch.equal(layer.weight.isnan(), torch.full((2, 2), value != value))
    assert layer.weight[0, 0].item() in (65504.0, INF) or value != value


def weight_normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(6, 6))


def symmetric() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(6, 6, 2, batch_first=True), lambda m, x: m(x)[0]),
    "gru": (lambda: nn.GRU(6, 6, batch_first=True), lambda m, x: m(x)[0]),
    "attention": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True), lambda m, x: m(x)),
    "weight_norm": (weight_normed, lambda m, x: m(x)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), lambda m, x: m(x)),
    "parametrized": (symmetric, lambda m, x: m(x)),
    "tied": (
        lambda: Model(),
        lambda m, x: F.linear(m.mlp(m.block.layer(m.token(torch.arange(7)))), m.head.weight),
    ),
}


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_with_lowered_weights_in_a_region(name: str, fmt: str) -> None:
    torch.manual_seed(0)
    build, call = LAYERS[name]
    model = build()
    exact = copy.deepcopy(model)
    x = torch.randn(4, 5, 6)
    assert lower_weights(model, fmt)
    with mezzo.autocast(fmt, "cpu"):
        out = call(model, x)
    expected = call(exact, x)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    out.float().pow(2).mean().backward()
    expected.pow(2).mean().backward()
    for (path, param), own in zip(model.named_parameters(), exact.parameters()):
        if own.grad is not None:
            assert param.grad is not None, path
            assert param.grad.dtype is param.dtype, path
            assert (param.grad.float() - own.grad).norm() <= 0.05 * own.grad.norm() + 1e-3, path
    with torch.no_grad(), mezzo.autocast(fmt, "cpu"):
        torch.testing.assert_close(call(model.eval(), x).float(), expected, atol=0.05, rtol=0.05)
