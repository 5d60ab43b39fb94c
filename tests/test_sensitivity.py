"""The sensitivity of modules: measuring changes nothing, sees what rounds, and what it predicts comes true."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.models import Net, linear, net
from mezzo.core.calibration import rank
from mezzo.core.formats import Format, named
from mezzo.core.policy import Policy
from mezzo.core.records import SensitivityRecord
from mezzo.pytorch.autocast.context import autocast
from mezzo.pytorch.sensitivity import Sensitivities
from mezzo.pytorch.training.observers import Observers

offset = net()(lambda self, x: (x + 4096.0) - 4096.0)


@net()
def square(self: Any, x: Tensor) -> Tensor:
    large = 3000.0 * x  # a product, and not a power: that is FP32 in any policy
    return (large * large).mean(-1, keepdim=True).sqrt() / 3000.0 * x


def does(inside: nn.Module, compute: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return Net(lambda self, x: compute(self.inside, x), inside=lambda: inside)


@net(norm=lambda: nn.LayerNorm(16), inner=linear(16, 32), outer=linear(32, 16))
def branch(self: Any, x: Tensor) -> Tensor:
    return x + self.outer(torch.relu(self.inner(self.norm(x))))


def once() -> nn.Module:
    left = iter([2.0])  # what an iterator has given can't be put back

    def forward(self: Any, x: Tensor) -> Tensor:
        for factor in left:
            return x * factor
        raise RuntimeError("only once\nsecond line")

    return Net(forward)


def around(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 4))


def train(model: nn.Module, probe: Sensitivities | None, steps: int = 3, rate: float = 0.05) -> list[float]:
    """Plain SGD; what a loop tells observers is told to the probe."""
    torch.manual_seed(1)
    observing = Observers(model, [probe] if probe is not None else [])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen = []
    for index in range(steps):
        x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        loss = nn.functional.cross_entropy(model(x), y)
        observing.backward_begins(loss, 1.0)
        loss.backward()
        seen.append(loss.item())
        observing.update_begins(optimizer, 1.0)
        optimizer.step()
        observing.update_ended(optimizer, index=index, skipped=False, loss_scale=1.0)
        optimizer.zero_grad()
    observing.undo()
    return seen


def measured(model: nn.Module, *formats: str | Format, **more: Any) -> list[SensitivityRecord]:
    probe = Sensitivities(formats or ("bf16",))
    train(model, probe, **more)
    return [one for one in probe.drain() if isinstance(one, SensitivityRecord)]


def changes(model: nn.Module, format: str | Format, **more: Any) -> dict[str, float]:
    """Path -> expected change of the loss."""
    ranking = rank(measured(model, format, **more), [named(format)])
    assert ranking is not None
    return {one.module: one.changes[str(format)] for one in ranking.modules}


def causes(model: nn.Module, format: str = "fp16") -> dict[str, str]:
    """Path -> the operation that overflows; of the modules whose change is infinite."""
    rows = [row for record in measured(model, format) for row in record.rows if math.isinf(row.squares)]
    return {row.module: row.cause for row in rows}


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "statistics": lambda: [nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3)],
    "branch": lambda: [branch(), branch()],
    "attention": lambda: [nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 2, 16), nn.Flatten()],
    "checkpoint": lambda: [
        does(nn.Linear(16, 16), lambda inside, x: checkpoint(inside, x, use_reentrant=False))
    ],
}


@pytest.mark.parametrize("name", MIDDLES)
def test_every_module_that_computes_is_measured_and_nothing_changes(name: str) -> None:
    """Losses, parameters, buffers and random numbers, bit for bit; no hook and no gradient is left behind."""
    plain = around(*MIDDLES[name]())
    watched, probe = copy.deepcopy(plain), Sensitivities()
    expected = train(plain, None)
    after = torch.randn(1)
    assert train(watched, probe) == expected
    assert torch.equal(torch.randn(1), after)
    for mine, theirs in zip(watched.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(mine, theirs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())
    assert all("forward" not in vars(module) for module in watched.modules())
    records = [one for one in probe.drain() if isinstance(one, SensitivityRecord)]
    assert [record.notes for record in records] == [[], [], []]
    assert all(0.0 <= row.squares < 1.0 for record in records for row in record.rows)
    assert all(row.squares > 0.0 for record in records for row in record.rows if row.module in ("0", "2"))
    inside = {"checkpoint": "1.inside", "attention": "2.self_attn"}
    assert {"0", inside.get(name, "0")} <= {row.module for row in records[-1].rows}


def test_the_modules_are_those_that_compute_themselves() -> None:
    middle = [nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(16), branch(), nn.Unflatten(1, (2, 8)), nn.Flatten()]
    rows = measured(around(*middle), "bf16", "e4m3fn")[0].rows
    kinds = {row.module: row.kind for row in rows}
    assert list(kinds) == ["0", "3", "4.norm", "4.inner", "4.outer", "4", "7"]
    assert kinds["0"] == "Linear"
    # Only those that multiply matrices can run in 8 bits.
    assert [row.module for row in rows if row.format == "e4m3fn"] == ["0", "4.inner", "4.outer", "7"]


def test_the_rounding_of_a_product_is_what_it_is_by_hand() -> None:
    """The loss is a sum of weighted outputs: both sums, against autocast's arithmetic; the step's mask is used."""
    model = does(nn.Linear(8, 4), lambda inside, x: nn.functional.dropout(inside(x), 0.5))
    weights, x = torch.randn(32, 4), torch.randn(32, 8)
    probe = Sensitivities(["bf16"])
    observing, still = Observers(model, [probe]), torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    loss = (model(x) * weights).sum()
    observing.backward_begins(loss, 1.0)
    loss.backward()
    observing.update_begins(still, 1.0)
    (record,) = probe.drain()
    assert isinstance(record, SensitivityRecord)
    torch.manual_seed(1)
    gradient = weights.double() * nn.functional.dropout(torch.ones(32, 4), 0.5)
    exact = model.inside(x).detach().double()
    with autocast("bf16", "cpu"):
        errors = gradient * (model.inside(x).detach().double() - exact)
    row = next(one for one in record.rows if one.module == "inside")
    assert row.signed == pytest.approx(float(errors.sum()), rel=1e-4)
    assert row.squares == pytest.approx(float(errors.square().sum()), rel=1e-4)
    assert record.loss == pytest.approx(loss.item())


@pytest.mark.parametrize(
    ("fmt", "policy", "fragile", "least", "most"),
    [("fp16", "fp16", True, 0.5, 2.0), ("bf16", "bf16", False, 0.5, 2.0), ("e4m3fn", "fp8", False, 0.1, 1.0)],
)
def test_what_is_predicted_comes_true(
    fmt: str, policy: str, fragile: bool, least: float, most: float
) -> None:
    """The measured change of the loss on other batches, as a share of the expected one; fp8's is expected too large."""
    model = around(offset()) if fragile else around(branch(), nn.Linear(16, 16))
    found = changes(model, fmt, rate=0.0)
    predicted = math.sqrt(sum(change**2 for change in found.values()))
    actual = []
    for seed in range(8):
        torch.manual_seed(100 + seed)
        x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        with torch.no_grad():
            exact = nn.functional.cross_entropy(model(x), y)
            with autocast(Policy(policy), "cpu"):
                actual.append(float(nn.functional.cross_entropy(model(x), y) - exact))
    assert least < math.sqrt(sum(one**2 for one in actual) / len(actual)) / predicted < most
    if fragile:
        others = [change for path, change in found.items() if path != "1"]
        assert found["1"] ** 2 > 100 * sum(change**2 for change in others)


def compensated() -> nn.Module:
    """Hands a layer numbers that are too large for fp16, and makes the result small again."""
    return does(nn.Linear(16, 16), lambda inside, x: inside(x * 1e5) / 1e5)


def test_an_overflow_is_found_where_it_is_and_one_between_two_modules_is_held_against_both() -> None:
    for module, found in ((square(), {"1": "mul"}), (compensated(), {"1": "mul", "1.inside": "linear"})):
        assert causes(around(module)) == found
        assert causes(around(module), "bf16") == {}


def numbers_of(size: float) -> Callable[[Tensor], Tensor]:
    """Makes numbers of this size on the way, and small ones again."""
    return lambda x: (x.tanh() * 0.0 + 1.0) * size * (x - x.detach() + 1.0) / size * x


def masked(x: Tensor) -> Tensor:
    away = torch.zeros_like(x).index_fill_(-1, torch.tensor([3]), -40000.0)
    return (x + away).softmax(-1) * x


@pytest.mark.parametrize(
    ("then", "cause", "near"),
    [
        (numbers_of(70000.0), "mul", False),
        (numbers_of(40000.0), "mul", True),
        (numbers_of(32000.0), "", False),
        (masked, "", False),
    ],
)
def test_a_number_on_the_way_counts_where_the_loss_depends_on_it(
    then: Callable[[Tensor], Tensor], cause: str, near: bool
) -> None:
    """One doubling below the format's largest is headroom, since later steps are not seen; a mask hides a number."""
    model = around(does(nn.Linear(16, 16), lambda inside, x: then(inside(x))))
    assert causes(model) == ({"1": cause} if cause else {})
    assert causes(model, "bf16") == {}
    assert {row.module for row in measured(model, "fp16")[0].rows if row.near} == ({"1"} if near else set())


def within(large: float) -> nn.Module:
    """A layer's numbers of this size, divided by it outside of the layer."""
    layer = linear(16, 16)()
    with torch.no_grad():
        layer.weight.mul_(large)
    return does(layer, lambda inside, x: inside(x) / large)


absorbing = Net(lambda self, x: (x * 1e6).tanh() * x)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (within(1e6), {"1": "overflows in module 1.inside", "1.inside": "overflows in linear"}),
        (within(1.0), {}),
        (compensated(), {"1": "overflows in mul", "1.inside": "overflows in linear"}),
        (absorbing, {"1": "overflows in mul"}),
        (Net(lambda self, x: masked(x)), {}),
    ],
)
def test_a_format_in_which_a_modules_numbers_overflow_has_no_change_in_the_table(
    module: nn.Module, told: dict[str, str]
) -> None:
    ranking = rank(measured(around(module), "fp16"), [named("fp16")])
    assert ranking is not None
    cells = {path: cell for path, cell in ranking.table(["fp16"])[1:] if cell.startswith("overflows")}
    assert cells == told


def residual(inner: nn.Module, offset: float = 0.0) -> nn.Module:
    """Adds to what it got what a layer and a fragile module make of it; `offset`: and is as fragile itself."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        made = self.inner(x)
        return x + ((made + offset) - offset).float() if offset else x + made

    return Net(forward, mix=linear(16, 16), inner=lambda: inner)


@pytest.mark.parametrize(("inner", "fmt"), [(offset, "bf16"), (square, "fp16")])
def test_a_parent_is_not_charged_for_what_a_module_inside_it_does(inner: Any, fmt: str) -> None:
    one, nested = around(residual(inner())), around(residual(nn.Sequential(nn.Tanh(), residual(inner()))))
    for model, culprit in ((one, "1.inner"), (nested, "1.inner.1.inner")):
        ranking = rank(measured(model, fmt), [named(fmt)], margin=0.02)
        assert ranking is not None
        assert [one.module for one in ranking.modules if not one.bears] == [culprit]
        assert ranking.modules[0].module == culprit


@pytest.mark.parametrize("inner", [nn.Identity, offset])
def test_a_parent_is_charged_for_what_it_does_with_a_modules_numbers(inner: Any) -> None:
    """They come in 16 bits, as the lowered module hands them on, also where that module computes in FP32."""
    assert changes(around(residual(inner(), 4096.0)), "bf16")["1"] > 1e-2
    assert changes(around(residual(inner())), "bf16")["1"] < 3e-3


OVERWRITES = does(offset(), lambda inside, x: (inside(x), x.zero_())[0])
NOT_MEASURED = [
    (once(), [], "the model could not be run again: RuntimeError: only once"),
    (OVERWRITES, ["0", "2"], "1.inside: not measured, because its input is overwritten later"),
]


@pytest.mark.parametrize(("middle", "left", "note"), NOT_MEASURED)
def test_what_cannot_be_measured_is_said(middle: nn.Module, left: list[str], note: str) -> None:
    (record,) = measured(around(middle), steps=1)
    assert [row.module for row in record.rows] == left
    assert record.notes == [note]
    assert (rank([record], [named("bf16")]) is None) is (left == [])


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    model = around(does(nn.Identity(), lambda inside, x: {}["mine"]))
    probe = Sensitivities()
    with pytest.raises(KeyError, match="mine"):
        train(model, probe, 1)
    probe.step_dropped()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    inner = [module for module in model.modules() if module is not model]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in inner)
