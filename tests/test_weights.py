"""A model's 16-bit weights: which ones, to which bits, what is kept, what is refused; and its state in FP32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import mezzo
from alive import bytes_alive
from bad_steps import same
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.optim import AdamW, adopt, with_masters
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.weights.stored_parameters import has_master, lower_weights, peek_master, take_master

INF, NAN = float("inf"), float("nan")


class LlamaRMSNorm(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(*shape))


class LayerNorm2d(LlamaRMSNorm):
    pass


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
        self.two = LayerNorm2d(1, 6, 1, 1)
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
    (mezzo.Policy("bf16", params="bf16"), (), LINEAR_AND_CONV),
    ("bf16,module.mlp=fp32,module.mlp.2=bf16", (), without("mlp.0")),
    ("fp16,module.block=bf16", (), without("block")),
    ("bf16", ("mlp", "conv.0.bias"), without("mlp", "conv.0.bias")),
    ("bf16", ("**.bias",), [name for name in LINEAR_AND_CONV if not name.endswith("bias")]),
    ("bf16", ("head",), without("token")),
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


KEPT: dict[str, Callable[[], Tensor]] = {
    "special": lambda: torch.cat([torch.tensor([0.0, -0.0, INF, NAN]), torch.logspace(-6, 4, 999)]),
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "no dimension": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "longer than a piece": lambda: torch.randn((1 << 20) + 3),
}


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KEPT)
def test_weights_are_rounded_once_and_masters_come_back_to_the_bit_once(kind: str, fmt: str) -> None:
    torch.manual_seed(0)
    value = KEPT[kind]()
    model = nn.ParameterList([nn.Parameter(value)])
    before = value.clone()
    assert lower_weights(model, fmt) == ["0"]
    nearest = before.to(torch.bfloat16 if fmt == "bf16" else torch.float16)
    if kind != "longer than a piece":  # where ties are, which round away from zero
        torch.testing.assert_close(model[0].data, nearest, rtol=0, atol=0, equal_nan=True)
    if kind not in ("with gaps", "expanded"):
        assert model[0].stride() == value.stride()
    for read in (peek_master, take_master) if value.numel() else ():
        master = read(model[0])
        torch.testing.assert_close(master, before, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(master.signbit(), before.signbit())
        assert master.stride() == model[0].stride()
    assert take_master(model[0]) is None
    assert not has_master(model[0])


def test_a_gradient_that_is_there_and_hooks_go_along() -> None:
    layer = nn.Linear(3, 2)
    seen: list[torch.dtype] = []
    layer.weight.register_hook(lambda g: seen.append(g.dtype))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.dtype))
    layer(torch.ones(1, 3)).sum().backward()
    lower_weights(layer, "bf16")
    assert layer.weight.grad.dtype is torch.bfloat16
    with mezzo.autocast("bf16", "cpu"):
        layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 2.0, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.heavy
def test_the_peak_is_the_model_and_one_parameter() -> None:
    others = bytes_alive()
    model = nn.ParameterList([nn.Parameter(torch.randn(1 << 23)) for _ in range(3)])
    one = 4 << 23
    peak = PeakTensorBytes()
    peak.start()
    lower_weights(model, "bf16")
    # Weights and remainders are as many bytes as what they replace;
    # encoding a piece takes 16 MiB more.
    assert peak.stop().peak_bytes - others <= 3 * one + one + (20 << 20)


# How the second module is made, the precision -> words of the error: what, the value received, what to do.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, list[str]]] = {
    "lazy": (lambda: nn.LazyLinear(3), "bf16", ["'second.weight'", "lazy"]),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "bf16", ["'second.weight'", "meta", "to_empty"]),
    "fp16's range": (lambda: filled(-7e4), "fp16", ["70000", "65504", "module.second=fp32"]),
    "a trainable subclass": (lambda: quantized(), "bf16", ["TwoTensor", "module.second=fp32"]),
    "bf16's range": (lambda: filled(3.4e38), "bf16", ["'second.weight'", "3.4e+38", "bf16"]),
    "no 16 bits": (lambda: nn.Linear(2, 2), "fp32", ["'fp32'", "bf16, fp16"]),
    "8 bits": (lambda: nn.Linear(2, 2), "fp8", ["'fp8'", "bf16, fp16"]),
    "auto": (lambda: nn.Linear(2, 2), "auto", ["auto", "resolved"]),
    "module": (lambda: nn.Linear(2, 2), "bf16,module.haed=fp32", ["'haed'"]),
}


def quantized(*, trains: bool = True) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=trains)
    return layer


def filled(value: float) -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, value)
    return layer


def test_frozen_quantized_parameters_are_left_alone() -> None:
    model = nn.Sequential(quantized(trains=False), nn.Linear(2, 2))
    before = model[0].weight.data
    assert lower_weights(model) == ["0.bias", "1.weight", "1.bias"]
    assert model[0].weight.data is before or torch.equal(model[0].weight.a, before.a)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_leaves_the_model_alone(row: str) -> None:
    build, precision, words = REFUSED[row]
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": build()})
    with pytest.raises(UsageError) as caught:
        lower_weights(model, precision)
    assert all(word in str(caught.value) for word in words), caught.value
    assert model["first"].weight.dtype is torch.float32
    assert not has_master(model["first"].weight)
    with pytest.raises(UsageError, match="Parameter"):
        lower_weights(model["first"].weight)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match=r"'frist'.*'first"):
        lower_weights(model, "bf16", keep="frist")
    with pytest.raises(UsageError, match=r"keep is 5\. Pass patterns"):
        lower_weights(model, "bf16", keep=5)  # type: ignore[arg-type]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("apart", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.norm(self.token(x)))))


OWNERS: dict[str, Callable[[Any], Any]] = {
    "split": lambda p: AdamW(p, lr=1e-2, masters="split"),
    "separate": lambda p: AdamW(p, lr=1e-2, masters="fp32"),
    "adopted": lambda p: adopt(torch.optim.AdamW(p, lr=1e-2), masters="split", state="fp32"),
    "with_masters": lambda p: with_masters(torch.optim.RMSprop(p, lr=1e-2)),
    "several": lambda p: [AdamW(p[:2], masters="split"), with_masters(torch.optim.SGD(p[2:], lr=0.1))],
    "none": lambda p: [],
}


def made(owner: str, seed: int = 0) -> tuple[Tied, Any]:
    torch.manual_seed(seed)
    model = Tied()
    lower_weights(model, "bf16")
    return model, OWNERS[owner](list(model.parameters()))


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for index in range(steps):
        x = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(index))
        with mezzo.autocast("bf16", "cpu"):
            loss = F.cross_entropy(model(x), x)
        model.zero_grad()
        loss.backward()
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()


def of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("owner", OWNERS)
def test_it_comes_back_to_the_bit(owner: str, steps: int) -> None:
    model, optimizer = made(owner)
    train(model, optimizer, steps)
    state = copy.deepcopy(mezzo.master_state_dict(model, optimizer))
    assert not torch.equal(state["body.weight"], model.body.weight.float()), "a master, not the weight"
    other, resumed = made(owner, seed=1)
    mezzo.load_master_state_dict(other, resumed, state)
    assert same(of(other), of(model))
    assert same(mezzo.master_state_dict(other, resumed), state)
    if steps == 0:  # moments are not a part of it
        for each, its in ((model, optimizer), (other, resumed)):
            train(each, its, 2)
        assert same(mezzo.master_state_dict(other, resumed), mezzo.master_state_dict(model, optimizer))


@pytest.mark.parametrize("owner", sorted(OWNERS.keys() - {"none"}))
def test_a_model_that_is_brought_back_to_fp32_goes_on_from_its_masters(owner: str) -> None:
    model, optimizer = made(owner)
    train(model, optimizer)
    state = copy.deepcopy(mezzo.master_state_dict(model, optimizer))
    with pytest.raises(UsageError, match=r"in another optimizer.*master_state_dict\(model, \["):
        mezzo.master_state_dict(model, torch.optim.SGD(model.parameters()))
    model.float()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        for group in one.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, steps=1)
    assert all(torch.equal(param, state[name]) for name, param in model.named_parameters())
    with torch.no_grad():
        model.body.weight.fill_(1 / 3)  # an edit stays
    train(model, optimizer, steps=1)
    assert (model.body.weight == 1 / 3).all()


@pytest.mark.parametrize("given", ["another model's", "the first of two"])
def test_masters_are_not_loaded_without_the_optimizer_that_has_them(given: str) -> None:
    model, both = made("several")
    train(model, both)
    unrelated = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    before = copy.deepcopy(mezzo.master_state_dict(model, both))
    target = {name: (value * 1.001234).to(value.dtype) for name, value in before.items()}
    with pytest.raises(UsageError, match=r"in another optimizer.*load_master_state_dict\(model, \["):
        mezzo.load_master_state_dict(model, both[0] if given == "the first of two" else unrelated, target)
    assert same(mezzo.master_state_dict(model, both), before), "nothing was written"
    mezzo.load_master_state_dict(model, both, target)
    assert same(mezzo.master_state_dict(model, both), target)


def test_loading_without_an_optimizer_keeps_the_masters_for_the_next() -> None:
    torch.manual_seed(5)
    state = Tied().state_dict()
    state["body.bias"] = state["body.bias"].bfloat16()  # as a 16-bit model's is
    model, _ = made("none")
    mezzo.load_master_state_dict(model, [], state)
    assert has_master(model.body.weight)
    optimizer = AdamW(model.parameters(), masters="split")
    assert torch.equal(optimizer.master(model.body.weight), state["body.weight"])
    assert torch.equal(optimizer.master(model.body.bias), state["body.bias"].float())


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda s: s.pop("body.bias"), "'body.bias'"),
    "unknown": (lambda s: s.update({"body.wieght": torch.zeros(1)}), "'body.wieght'.*'body.weight'"),
    "shape": (lambda s: s.update({"body.weight": torch.zeros(6, 5)}), r"'body.weight'.*\[6, 5\].*\[6, 6\]"),
    "buffer": (lambda s: s.update({"norm.running_var": torch.zeros(2)}), r"'norm.running_var'.*\[2\]"),
    "type": (lambda s: s.update({"body.weight": [1.0]}), "'body.weight' is list"),
    "range": (lambda s: s.update({"body.bias": torch.full((6,), 3.4e38)}), "'body.bias'.*bfloat16"),
    "a path": (lambda s: "weights.pt", r"type str.*torch\.load"),
}


@pytest.mark.parametrize("row", BROKEN)
def test_a_state_that_does_not_fit_changes_nothing(row: str) -> None:
    change, message = BROKEN[row]
    model, optimizer = made("split")
    before = copy.deepcopy(mezzo.master_state_dict(model, optimizer))
    weights = of(model)
    state = dict(Tied().state_dict())
    changed = change(state)
    with pytest.raises(UsageError, match=message):
        mezzo.load_master_state_dict(model, optimizer, changed if isinstance(changed, str) else state)  # type: ignore[arg-type]
    assert same(of(model), weights)
    assert same(mezzo.master_state_dict(model, optimizer), before)
