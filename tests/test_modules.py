"""Per-module overrides by path pattern, and the containers in which tensors pass through modules."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import mezzo
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.policy import policy
from mezzo.pytorch.autocast.modules import apply_module_overrides, to_fp32
from mezzo.pytorch.nested import mapped, tensors

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Probe(nn.Module):
    """A linear layer that notes the formats of its input and its product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = (None, None)

    def forward(self, x: torch.Tensor, *, extra: object = None) -> torch.Tensor:
        out = self.linear(x)
        self.seen = (x.dtype, out.dtype)
        return out if extra is None else (out, extra)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Probe(), Probe())
        self.head = Probe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))

    @property
    def products(self) -> list[torch.dtype]:
        return [probe.seen[1] for probe in (*self.blocks, self.head)]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8).reshape(2, 4)

ROWS = [
    ("bf16,module.head=fp32", [BF16, BF16, FP32]),
    ("bf16,module.blocks=fp32,module.blocks.1=bf16", [FP32, BF16, BF16]),
    ("fp16,module.blocks.0=bf16,module.head=fp32", [BF16, FP16, FP32]),
    ("fp32,module.blocks=bf16", [BF16, BF16, FP32]),
    ("bf16,module.**.linear=fp32", [FP32, FP32, FP32]),
]


@pytest.mark.parametrize(("spec", "expected"), ROWS)
def test_each_module_runs_in_its_own_format(net, spec, expected):
    chosen = policy(spec)
    handle = apply_module_overrides(net, chosen, "cpu")
    with mezzo.autocast(chosen, "cpu"):
        net(X)
    assert net.products == expected
    net(X)  # outside every region nothing is lowered
    assert net.products == [FP32] * 3
    with mezzo.autocast(chosen, "cpu", enabled=False):
        net(X)
    assert net.products == [FP32] * 3
    handle.remove()
    handle.remove()
    assert not any("forward" in module.__dict__ for module in net.modules())
    with mezzo.autocast("bf16", "cpu"):
        net(X)
    assert net.products == [BF16] * 3


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda net: torch.compile(net, backend="eager"),
        lambda net: nn.DataParallel(torch.compile(net, backend="eager")),
        lambda net: setattr(net, "blocks", torch.compile(net.blocks, backend="eager")) or net,
    ],
    ids=["compiled", "in DataParallel", "a part compiled"],
)
def test_patterns_are_paths_without_wrappers(net, wrapped):
    inner = {"blocks.1": net.blocks[1], "head": net.head}
    model = wrapped(net)
    with apply_module_overrides(model, policy("bf16,module.blocks.1=fp32,module.head=fp32"), "cpu") as found:
        assert found.formats == dict.fromkeys(inner, "fp32")
        assert all("forward" in module.__dict__ for module in inner.values())
    assert not any("forward" in module.__dict__ for module in inner.values())
    last = [name for name, _ in net.blocks.named_parameters(prefix="blocks")][:2]
    assert len(mezzo.lower_weights(model, "bf16,module.blocks.1=fp32", keep=last)) == 2
    assert len(mezzo.optim.muon_groups(model)[0]["params"]) == 2


def test_autocast_refuses_module_patterns_until_they_are_applied_to_a_model(tmp_path, net):
    text, file = "bf16,module.hea*=fp32", tmp_path / "policy.toml"
    chosen = policy(text)
    file.write_text(chosen.to_toml())

    def enter(given):
        with mezzo.autocast(given, "cpu"):
            return X @ X.T

    compiled = torch.compile(enter, backend="eager")
    for given, run in ((text, enter), (file, enter), (chosen, enter), (text, compiled)):
        with pytest.raises(Exception, match=r"module\.hea\*=fp32 needs the model") as caught:
            run(given)
        assert run is compiled or isinstance(caught.value, UsageError)
        assert f"mezzo.MixedPrecision(model, optimizer, '{text}')" in str(caught.value)
    with pytest.raises(UsageError, match=r"module\.hea\*=fp32"):
        mezzo.autocast("cpu", dtype=chosen)
    with apply_module_overrides(net, chosen, "cpu"):
        assert mezzo.autocast(chosen, "cpu").policy == chosen
    with pytest.raises(UsageError, match=r"module\.hea\*=fp32"):
        mezzo.autocast(chosen, "cpu")
    apply_module_overrides(other := copy.deepcopy(net), chosen, "cpu")
    assert mezzo.autocast(chosen, "cpu").policy == chosen
    other = copy.deepcopy(other)
    gc.collect()
    assert mezzo.autocast(chosen, "cpu").policy == chosen
    del other
    gc.collect()
    with pytest.raises(UsageError, match=r"module\.hea\*=fp32"):
        mezzo.autocast(chosen, "cpu")


@pytest.mark.parametrize(
    "unused", ["reduce=bf16", "state=int8", "masters=split", "loss_scale=dynamic(init=4,patience=3)"]
)
def test_autocast_says_where_a_setting_belongs_that_it_cannot_apply(unused):
    given = f"{'fp16' if 'loss' in unused else 'bf16'},{unused},op.softmax=lower"
    fix = re.escape(f"mezzo.MixedPrecision(model, optimizer, '{given}')")
    with pytest.warns(UserWarning, match=fix) as caught:
        mezzo.autocast(given, "cpu")
    assert f": {unused.partition('=')[0]}= has no effect" in str(caught[0].message)
    assert caught[0].filename == __file__
    mezzo.autocast(policy(given), "cpu")  # of a MixedPrecision, whose optimizer applies it
    mezzo.autocast(given, "cpu", enabled=False)
    mezzo.autocast("bf16,op.index_reduce=fp32", "cpu")


def test_fp32_modules_get_fp32_inputs_and_others_their_own(net):
    apply_module_overrides(net, policy("bf16,module.head=fp32"), "cpu")
    low, double = X.to(BF16), torch.ones(2, dtype=FP64)
    with mezzo.autocast(policy("bf16,module.head=fp32"), "cpu"):
        _, extra = net.head(low, extra={"a": [low, (double, 3)], "b": torch.arange(2)})
    assert net.head.seen == (FP32, FP32)
    first, (second, number) = extra["a"]
    assert (first.dtype, second.dtype, number, extra["b"].dtype) == (FP32, FP64, 3, torch.int64)


def test_gradients_equal_those_of_the_context_written_by_hand(net):
    other, chosen = copy.deepcopy(net), policy("bf16,module.head=fp32")
    with apply_module_overrides(net, chosen, "cpu"), mezzo.autocast(chosen, "cpu"):
        mine = net(X)
    with mezzo.autocast("bf16", "cpu"):
        hidden = other.blocks(X)
    theirs = other.head(hidden.float())
    mine.sum().backward()
    theirs.sum().backward()
    for mine, theirs in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def test_a_pattern_that_matches_nothing(net):
    with pytest.raises(UnknownNameError, match=r"'heads'.*'head'"):
        apply_module_overrides(net, policy("bf16,module.blocks.0=fp32,module.heads=fp32"), "cpu")
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_overrides_compile_whole(net):
    torch._dynamo.reset()
    chosen = policy("bf16,module.head=fp32")
    apply_module_overrides(net, chosen, "cpu")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for spec in (chosen, "fp32"):
        with mezzo.autocast(spec, "cpu"):
            torch.testing.assert_close(compiled(X), net(X))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_overridden_and_is_its_own(net, duplicate):
    chosen = policy("bf16,module.head=fp32")
    apply_module_overrides(net, chosen, "cpu")
    twin = duplicate(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    with mezzo.autocast(chosen, "cpu"):
        assert twin(X).abs().max() == 0
        assert net(X).abs().max() > 0
    assert twin.products == net.products == [BF16, BF16, FP32]


# Tensors in every kind of container of calls and state dicts are changed in a new one; a given one stays as it is.


LOW = torch.ones(2, dtype=torch.bfloat16)
KEPT = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), None, "text"]
Pair = namedtuple("Pair", "first second")


class Output(OrderedDict):
    """As libraries have it: items are attributes as well."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


@dataclass(frozen=True)
class Frozen:
    value: Any


CONTAINERS: list[Any] = [
    [LOW, 3],
    (LOW, None),
    Pair(LOW, "text"),
    torch.return_types.max([LOW, LOW]),
    {"a": [LOW]},
    OrderedDict(a=LOW, b=1),
    Output(logits=LOW, past=(LOW, [LOW, *KEPT])),
    defaultdict(list, a=[LOW]),
    deque([LOW], maxlen=1),
    Frozen([LOW]),
    SimpleNamespace(a=LOW, b="text"),
    torch.distributions.Normal(LOW, LOW, validate_args=False),
    PackedSequence(LOW, torch.ones(2, dtype=torch.int64)),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_containers_are_new_and_of_their_type(value: Any) -> None:
    def low(value: Any) -> list[bool]:
        return [tensor is LOW for tensor in tensors(value)]

    before, plus_one = low(value), mapped(value, lambda tensor: tensor + 1)
    assert any(before)
    for new, kind, number in ((plus_one, torch.bfloat16, 2.0), (to_fp32(value), torch.float32, 1.0)):
        assert type(new) is type(value)
        assert getattr(new, "maxlen", None) == getattr(value, "maxlen", None)
        changed = [tensor for tensor, was_low in zip(tensors(new), before, strict=True) if was_low]
        assert {tensor.dtype for tensor in changed} == {kind}
        assert {tensor.tolist()[0] for tensor in changed} == {number}
        assert low(value) == before  # the model may keep what it returned
    if isinstance(value, Output):
        assert plus_one.logits is plus_one["logits"]


@pytest.mark.parametrize(
    "same", [*KEPT, KEPT, tuple(KEPT), {"a": KEPT}, Frozen(KEPT), Output(a=KEPT), iter([LOW])]
)
def test_without_a_16_bit_tensor_an_output_is_itself(same: Any) -> None:
    assert to_fp32(same) is same
