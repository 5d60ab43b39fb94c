"""The probe: it changes nothing, sees what rounds and what flows where, and what it predicts comes true."""

from __future__ import annotations

import copy
import doctest
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.core import sensitivity
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.policy import Policy
from mezzo.core.sensitivity import EdgeFacts, Rounding, Sensitivities, UnitFacts, expected_square
from mezzo.core.tuning import tune
from mezzo.pytorch.launch.runner import run
from mezzo.pytorch.region.autocast import autocast
from mezzo.pytorch.sensitivity.probe import Probe
from mezzo.pytorch.sensitivity.settings import Settings
from mezzo.pytorch.training.observing import Observing
from mezzo.scripts.request import RunRequest


class Offset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 4096.0) - 4096.0


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        large = 3000.0 * x  # a product, and not a power: that is FP32 in any policy
        return (large * large).mean(-1, keepdim=True).sqrt() / 3000.0 * x


class Compensated(nn.Module):
    """Hands a layer numbers that are too large for fp16, and makes the result small again."""

    def __init__(self, factor: float = 1e5) -> None:
        super().__init__()
        self.inside, self.factor = nn.Linear(16, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x * self.factor) / self.factor
        return out


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.relu(self.inner(self.norm(x))))
        return out


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no 16 bits here\nsecond line")
        return x * 2.0


class Overwrites(nn.Module):
    """Writes to what it gave to another module, which keeps nothing of it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = Offset()

    def forward(self, x: Tensor) -> Tensor:
        scratch = x * 1.0
        out: Tensor = self.offset(scratch)
        scratch.detach().zero_()
        return out + x


class Table(nn.Module):
    """Adds rows of a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.rows((x[:, 0] > 0).long())
        return out


class Wide(nn.Module):
    """Computes in FP64."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x.double() + 1.0).float()
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = nn.Linear(16, 16), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        return out


def around(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 4))


def train(
    model: nn.Module, probe: Probe | None, steps: int = 3, rate: float = 0.05, calls: int = 1
) -> list[float]:
    """Plain SGD; what a loop tells observers is told to the probe."""
    torch.manual_seed(1)
    observing = Observing(model, [probe] if probe is not None else [])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen = []
    for index in range(steps):
        for _ in range(calls):
            x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
            loss = nn.functional.cross_entropy(model(x), y) / calls
            observing.backward_begins(loss, 1.0)
            loss.backward()
            seen.append(loss.item())
        observing.update_begins(optimizer, 1.0)
        optimizer.step()
        observing.update_ended(optimizer, index=index, skipped=False, loss_scale=1.0)
        optimizer.zero_grad()
    observing.undo()
    return seen


def probed(model: nn.Module, fmt: str = "bf16", steps: int = 3, **more: Any) -> dict[str, UnitFacts]:
    return {unit.path: unit for unit in result(model, fmt, steps, **more).units}


def result(model: nn.Module, fmt: str = "bf16", steps: int = 3, first: int = 0, **more: Any) -> Sensitivities:
    probe = Probe(Path("unused.json"), Settings(fmt, steps, first))
    train(model, probe, steps + first, **more)
    return probe.result


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.ReLU(), nn.Linear(16, 16)],
    "statistics": lambda: [nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3)],
    "branch": lambda: [Branch(), Branch()],
    "attention": lambda: [nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 2, 16), nn.Flatten()],
    "checkpoint": lambda: [Checkpointed(False)],
    "reentrant checkpoint": lambda: [Checkpointed(True)],
    "overwrites": lambda: [Overwrites()],
    "sparse": lambda: [Table()],
    "FP64": lambda: [Wide()],
    "refuses": lambda: [Refuses()],
}


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MIDDLES)
def test_nothing_changes(name: str, fmt: str) -> None:
    """Losses, parameters, buffers and random numbers, bit for bit; no hook and no gradient is left behind."""
    plain = around(*MIDDLES[name]())
    watched = copy.deepcopy(plain)
    expected = train(plain, None)
    after = torch.randn(1)
    assert train(watched, Probe(Path("unused.json"), Settings(fmt, 3))) == expected
    assert torch.equal(torch.randn(1), after)
    for mine, theirs in zip(watched.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(mine, theirs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())
    assert all("forward" not in vars(module) for module in watched.modules())


@pytest.mark.parametrize(
    "training",
    ["accumulation", "gradient_penalty", "two_optimizers", "shared_parameters", "reentrant_checkpointing"],
)
def test_a_launched_script_computes_what_it_computes_unwatched(
    training: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each loss and each weight that the script prints, to the last bit; and something was measured."""
    script = str(Path(__file__).parent / "scripts" / "trainings.py")
    place = tmp_path / "sensitivity.json"
    Settings("fp16", 2).write(place)

    def printed(results: Path | None) -> str:
        request = RunRequest(script, ("--only", training), policy="fp32", summary=False, sensitivity=results)
        assert run(request) == 0
        return capsys.readouterr().out

    assert printed(place) == printed(None)
    found = Sensitivities.from_json(place.read_text())
    assert len(found.losses) == 2
    assert sum(bool(unit.roundings) for unit in found.units) >= 2
    assert {unit.failed for unit in found.units} == {""}


def test_units_are_the_modules_that_round_themselves() -> None:
    units = probed(
        around(
            nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(16), Branch(), nn.Unflatten(1, (2, 8)), nn.Flatten()
        )
    )
    assert list(units) == ["0", "3", "4.norm", "4.inner", "4.outer", "4", "7"]
    assert units["4"].inner == ["4.norm", "4.inner", "4.outer"]
    assert units["4"].ops == ["add"]
    assert units["0"].kind == "Linear"


def test_the_flow_of_data_goes_through_what_only_selects() -> None:
    found = result(around(nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Flatten(), Branch()))
    edges = {(edge.producer, edge.consumer): edge for edge in found.edges}
    assert ("0", "3") in edges
    assert edges["0", "3"].elements == 32 * 16
    assert edges["0", "3"].casts
    assert edges["3", "5.norm"].casts is False  # a normalisation takes what comes
    assert ("3", "5") in edges  # the residual
    assert ("5.inner", "5.outer") in edges
    assert expected_square(edges["0", "3"].roundings) > 0.0
    assert expected_square(edges["3", "5.norm"].roundings) == 0.0


@pytest.mark.parametrize(("fmt", "mantissa"), [("bf16", 8), ("fp16", 11)])
def test_a_products_rounding_is_what_it_is_by_hand(fmt: str, mantissa: int) -> None:
    """One linear layer whose loss is the sum of weighted outputs: both sums, against the plain arithmetic."""
    torch.manual_seed(0)
    layer, weights = nn.Linear(8, 4), torch.randn(32, 4)
    probe = Probe(Path("unused.json"), Settings(fmt, 1))
    observing, still = Observing(layer, [probe]), torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(32, 8)
    loss = (layer(x) * weights).sum()
    observing.backward_begins(loss, 1.0)
    loss.backward()
    observing.update_begins(still, 1.0)
    (unit,) = probe.result.units
    exact = layer(x).detach().double()
    with autocast(fmt, "cpu"):
        errors = weights.double() * (layer(x).detach().double() - exact)
    (rounding,) = unit.roundings
    assert rounding.signed == pytest.approx(float(errors.sum()), rel=1e-4)
    assert rounding.squares == pytest.approx(float(errors.square().sum()), rel=1e-4)
    assert rounding.absolute == pytest.approx(float(errors.abs().sum()), rel=1e-4)
    assert 0.0 < unit.gradient_errors[0] < 2.0 ** (1 - mantissa)
    assert probe.result.losses == [pytest.approx(loss.item())]


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_what_is_predicted_comes_true(fmt: str) -> None:
    """The loss of a model with a fragile layer, lowered: within a factor of two of the expected change."""
    model = around(Offset())
    found = result(model, fmt, rate=0.0)
    units = {unit.path: unit for unit in found.units}
    predicted = math.sqrt(sum(expected_square(unit.roundings) for unit in units.values()))
    changes = []
    for seed in range(8):
        torch.manual_seed(100 + seed)
        x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        with torch.no_grad():
            exact = nn.functional.cross_entropy(model(x), y)
            with autocast(Policy(fmt), "cpu"):
                changes.append(float(nn.functional.cross_entropy(model(x), y) - exact))
    actual = math.sqrt(sum(one**2 for one in changes) / len(changes))
    assert 0.5 < actual / predicted < 2.0
    others = [unit for path, unit in units.items() if path != "1"]
    assert expected_square(units["1"].roundings) > 100 * sum(expected_square(u.roundings) for u in others)


def test_an_overflow_inside_is_found_where_it_is_and_nowhere_else() -> None:
    units = probed(around(Square()), "fp16")
    assert {path: unit.overflow for path, unit in units.items()} == {"0": "", "1": "output", "2": ""}
    assert units["1"].seconds == []
    assert all(unit.gradient_errors[-1] < 0.01 for path, unit in units.items() if path != "1")
    assert {unit.overflow for unit in probed(around(Square()), "bf16").values()} == {""}


def test_a_number_too_large_between_two_modules_is_held_against_both() -> None:
    """Both of the inner layer's runs would be NaN on a rounded input, and the block's with a lowered layer inside."""
    units = probed(around(Compensated()), "fp16")
    assert {p: u.overflow for p, u in units.items()} == {"0": "", "1.inside": "input", "1": "output", "2": ""}
    assert all(math.isfinite(error) for path in ("0", "2") for error in units[path].gradient_errors)
    assert {unit.overflow for unit in probed(around(Compensated()), "bf16").values()} == {""}


def test_a_number_close_to_the_largest_is_seen_on_its_edge() -> None:
    found = result(around(Compensated(1e4)), "fp16")
    assert {unit.overflow for unit in found.units} == {""}
    numbers = {(edge.producer, edge.consumer): edge.largest for edge in found.edges}
    assert 5e3 < numbers["1", "1.inside"] < 65504.0
    assert numbers["0", "1"] < 10.0


def test_what_a_mask_hides_is_no_number_too_large() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            scores = (x * 2.0).masked_fill(x > 0.5, -math.inf)
            out: Tensor = x + self.softmax(scores)
            return out

    found = result(around(Masked()), "fp16")
    assert {unit.overflow for unit in found.units} == {""}
    assert all(math.isfinite(expected_square(unit.roundings)) for unit in found.units)
    assert all(edge.largest < 100.0 for edge in found.edges)


class Residual(nn.Module):
    """Adds to what it got what a layer and a fragile module make of it; `offset`: and is as fragile itself."""

    def __init__(self, inner: nn.Module, offset: float = 0.0) -> None:
        super().__init__()
        self.mix, self.inner, self.offset = nn.Linear(16, 16), inner, offset

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        made: Tensor = self.inner(x)
        if self.offset:
            made = (made + self.offset) - self.offset
        return x + made.float() if self.offset else x + made


@pytest.mark.parametrize(("inner", "fmt"), [(Offset, "bf16"), (Offset, "fp16"), (Square, "fp16")])
def test_a_parent_is_not_charged_for_what_a_module_inside_it_does(inner: type[nn.Module], fmt: str) -> None:
    """The inner module only adds and multiplies: beside a parent in FP32 it would compute in FP32."""
    one, nested = around(Residual(inner())), around(Residual(nn.Sequential(nn.Tanh(), Residual(inner()))))
    for model, culprit in ((one, "1.inner"), (nested, "1.inner.1.inner")):
        tuned = tune(result(model, fmt), margin=0.02, goal="memory")
        assert tuned.policy == Policy(fmt, modules=((culprit, "fp32"),))


@pytest.mark.parametrize("inner", [nn.Identity, nn.Tanh, Offset])
def test_a_parent_is_charged_for_what_it_does_with_a_modules_numbers(inner: type[nn.Module]) -> None:
    """They come in 16 bits, as the lowered module hands them out, also where that module computes in FP32."""
    unit = probed(around(Residual(inner(), 4096.0)))["1"]
    assert expected_square(unit.roundings) > 1e-4
    assert expected_square(probed(around(Residual(inner())))["1"].roundings) < 1e-5


def test_what_is_no_number_is_infinite() -> None:
    for odd in (math.nan, math.inf, -math.inf):
        assert expected_square([Rounding(), Rounding(odd, 0.0, 0.0)]) == math.inf
        assert expected_square([Rounding(0.0, odd, 0.0)]) == math.inf


def test_small_gradients_are_measured_under_a_loss_scale() -> None:
    """Without one they would all be zero in fp16."""

    class Faint(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.0

    model = around(Faint())
    model[1].register_full_backward_hook(lambda module, into, out: tuple(g * 1e-6 for g in into))
    units = probed(model, "fp16")
    assert all(unit.gradient_errors[-1] < 0.01 for unit in units.values())
    assert units["0"].scale_exponent > 4


def test_what_16_bits_refuse_is_said_with_the_modules_own_words() -> None:
    units = probed(around(Refuses()))
    assert units["1"].failed == "RuntimeError: no 16 bits here"
    assert not units["0"].failed


@pytest.mark.parametrize("name", ["attention", "sparse", "FP64", "statistics"])
def test_what_16_bits_can_do_does_not_fail(name: str) -> None:
    found = result(around(*MIDDLES[name]()))
    assert {unit.path: unit.failed for unit in found.units if unit.failed} == {}
    assert found.notes == []
    assert all(unit.roundings and unit.seconds and unit.gradient_errors[-1] < 0.05 for unit in found.units)


def test_an_input_that_is_written_to_is_copied_from_the_next_step_on() -> None:
    units = probed(around(Overwrites()), steps=3)
    assert len(units["1.offset"].roundings) == 2
    assert len(units["1"].roundings) == 3


@pytest.mark.parametrize(("reentrant", "unseen"), [(False, False), (True, True)])
def test_checkpoints_are_measured_where_gradients_can_be_seen(reentrant: bool, unseen: bool) -> None:
    units = probed(around(Checkpointed(reentrant)))
    assert units["1.inside"].unseen is unseen
    assert (expected_square(units["1.inside"].roundings) > 0.0) is not unseen


def test_calls_of_one_step_add_up() -> None:
    """A window of four quarter losses: each module was called four times, and the loss is their sum."""
    found = result(around(), steps=2, calls=4)
    assert {unit.calls for unit in found.units} == {4}
    assert found.losses == pytest.approx([1.4, 1.4], abs=0.4)


def test_more_calls_than_are_kept_are_taken_to_be_alike() -> None:
    few, many = result(around(), steps=1, rate=0.0, calls=4), result(around(), steps=1, rate=0.0, calls=8)
    assert many.units[0].calls == 8
    # Half the weight each, twice as many: half the variance.
    ratio = many.units[0].roundings[0].squares / few.units[0].roundings[0].squares
    assert ratio == pytest.approx(0.5, rel=0.2)


def test_only_the_steps_asked_for_are_looked_at() -> None:
    probe = Probe(Path("unused.json"), Settings("bf16", 2, 3))
    losses = train(around(), probe, 7)
    assert probe.result.losses == pytest.approx(losses[3:5])
    assert len(probe.result.units[0].roundings) == 2


def test_gradients_of_several_losses_over_one_call_add_up() -> None:
    """Two backward passes before the update are one of the losses' sum."""

    def once(apart: bool) -> Rounding:
        model = around()
        probe = Probe(Path("unused.json"), Settings("bf16", 1))
        observing, still = Observing(model, [probe]), torch.optim.SGD(model.parameters(), lr=0.0)
        torch.manual_seed(1)
        out = model(torch.randn(32, 8))
        losses = [out.square().mean(), out.exp().mean()]
        for loss in losses if apart else [losses[0] + losses[1]]:
            observing.backward_begins(loss, 1.0)
            loss.backward(retain_graph=True)
        observing.update_begins(still, 1.0)
        return probe.result.units[0].roundings[0]

    assert once(True).squares == pytest.approx(once(False).squares, rel=1e-4)


def test_a_second_model_is_left_alone_and_said() -> None:
    one, other = around(), nn.Linear(8, 4)
    probe = Probe(Path("unused.json"), Settings("bf16", 2))
    train(one, probe, 1)
    train(other, probe, 1)
    assert {unit.path for unit in probe.result.units} == {"0", "1"}
    assert "Linear is a second model" in probe.result.notes[0]


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    model = around(Fails())
    probe = Probe(Path("unused.json"), Settings("bf16", 2))
    with pytest.raises(KeyError, match="mine"):
        train(model, probe, 1)
    probe.step_dropped()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    inner = [module for module in model.modules() if module is not model]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in inner)


def test_the_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    place = tmp_path / "sensitivity.json"
    Settings("fp16", 2, 1).write(place)
    probe = Probe(place)
    train(around(Square()), probe, 4)
    probe.finish()
    read = Sensitivities.from_json(place.read_text())
    assert read.format == "fp16"
    assert (read.model, read.device) == ("Sequential", "cpu")
    assert len(read.losses) == 2
    assert [unit.path for unit in read.units] == ["0", "1", "2"]
    assert isinstance(read.units[0].roundings[0], Rounding)
    assert isinstance(read.edges[0], EdgeFacts)
    assert Sensitivities.from_json(read.to_json()) == read


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": "bf16", "units": 3, "edges": []})])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a sensitivity measurement"):
        Sensitivities.from_json(text)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown format 'fp8'\. Use one of bf16, fp16"):
        Settings("fp8")
    with pytest.raises(UsageError, match="0 steps after 0"):
        Settings(steps=0)


def test_saved_time_that_noise_could_be_is_none() -> None:
    noisy = [[1.0, 0.9], [1.0, 1.2], [1.0, 0.8], [1.0, 1.1]]
    assert UnitFacts("a", "A", seconds=noisy).saved_seconds == 0.0
    # A clear median, and a third of the pairs against it.
    bursts = [[1.0, 1.5], [1.0, 1.51], [1.0, 1.49], [1.0, 1.5], [1.0, 0.9], [1.0, 0.5]]
    assert UnitFacts("a", "A", seconds=bursts).saved_seconds == 0.0
    clear = [[1.0, 0.5], [1.0, 0.52], [1.0, 0.49], [1.0, 0.5]]
    assert UnitFacts("a", "A", seconds=clear, calls=3).saved_seconds == pytest.approx(1.5)
    assert UnitFacts("a", "A", seconds=clear[:2]).saved_seconds == 0.0  # two pairs agree by chance
    assert UnitFacts("a", "A").saved_seconds == 0.0


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_there_are_enough_pairs_however_few_the_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.sensitivity.measure.SECONDS", 0.0)
    assert {len(unit.seconds) for unit in result(around(), steps=steps).units} == {6}


def test_the_examples_hold() -> None:
    assert doctest.testmod(sensitivity).failed == 0
