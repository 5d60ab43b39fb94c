"""A skipped step: the report on it, its cost, and that tracing has no side effects.

That faults of many kinds are named by the right module is tested by the corpus: tests/test_faults.py.
"""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from alive import bytes_alive
from faults.models import Net as Computes
from faults.models import linear
from faults.runs import policies as quoted
from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.overflow import OUTSIDE, OverflowReport
from mezzo.core.records import OverflowRecord, RecordWriter, read
from mezzo.pytorch.monitor import overflow_tracer
from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer
from trainers import stepped

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

LOW = 2.0**6  # a loss scale that nothing here overflows by itself


def faulty(fault: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Two layers with BatchNorm and dropout, and a place for a fault between them."""
    torch.manual_seed(0)
    return Computes(
        lambda self, x: self.last(self.place(self.first(x))),
        first=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)),
        place=partial(Computes, lambda self, x: self.fault(x) if self.fault else x, fault=lambda: fault),
        last=linear(8, 3),
    )


def trainer(net: nn.Module, scale: float = LOW, **options: Any) -> mezzo.MixedPrecision:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    options.setdefault("loss_scale", mezzo.DynamicLossScale(init=scale))
    return mezzo.MixedPrecision(net, optimizer, "fp16", **options)


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(5, 6, generator=drawn), torch.randint(3, (5,), generator=drawn)


def step(mp: mezzo.MixedPrecision, number: int = 0, loss: Callable[..., Tensor] = F.cross_entropy) -> Any:
    x, y = batch(number)
    return stepped(mp, lambda: loss(mp.model(x), y))


def found(mp: mezzo.MixedPrecision, *args: Any) -> OverflowReport:
    result = step(mp, *args)
    assert result.skipped
    assert result.finding is not None
    return result.finding


def grows(x: Tensor) -> Tensor:
    return x * 300 * 300


def root_of_nothing(x: Tensor) -> Tensor:
    return x + torch.sqrt(x * 0)


def test_a_finding_tells_where_from_what_and_what_to_do() -> None:
    net = faulty()
    mp = trainer(net)
    net.place.fault = grows
    told = found(mp)
    assert (told.cause, told.module, told.op) == ("overflow", "place", "mul")
    assert (told.direction, told.how) == ("forward", "replay")
    assert re.fullmatch(r"test_provenance.py:\d+: return x \* 300 \* 300", told.line)
    assert [fact.format for fact in told.inputs] == ["fp16"]
    assert told.inputs[0].finite
    assert 65504 / 300 < told.inputs[0].largest < 65504
    assert told.outputs[0].infinities > 0
    assert told.outputs[0].shape == [5, 8]
    assert told.propagators == ["last: linear"]
    # In FP32 alone the product would overflow in the next layer's fp16: only what was tried and mends is told.
    assert quoted(told) == ["fp16,module.place=fp32,module.last=fp32", "bf16"]
    assert told.seconds > 0
    assert told.kept_bytes > batch(0)[0].nbytes
    assert told.alarms
    assert mp.findings == [told]


def _grows_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x *= 300
    x.mul_(300)
    x.mul_(2)
    return x


def _written_at_places(x: Tensor) -> Tensor:
    x = x * 300
    whole = torch.zeros_like(x)
    whole[:] = x.float() * 300
    return whole


def _gate(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(x * 0 + 200))  # backward does not absorb the infinity


@pytest.mark.parametrize(
    ("fault", "line"),
    [(_grows_in_place, "x.mul_(300)"), (_written_at_places, "whole[:] ="), (_gate, "torch.exp(")],
)
def test_an_overflow_is_named_where_it_was_made(fault: Callable[[Tensor], Tensor], line: str) -> None:
    told = found(trainer(faulty(fault)))
    assert (told.cause, told.module, told.direction) == ("overflow", "place", "forward")
    assert line in told.line
    assert all(fact.finite for fact in told.inputs)
    assert told.outputs[0].infinities > 0
    assert told.op != "exp" or "88" in told.remedies[0]


def test_an_infinite_number_as_a_factor_is_not_called_an_overflow_of_finite_inputs() -> None:
    told = found(trainer(faulty(lambda x: (x.abs() + 1) * float("inf"))))
    assert (told.cause, told.module, told.op) == ("invalid", "place", "mul")


def log_of_nothing(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + torch.log(out[0, 0] * 0)


def _infinite_factor(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out * float("inf"), y)


def _beyond_fp16(out: Tensor, y: Tensor) -> Tensor:
    return (out[0, 0] * 0 + 300.0) * 300.0  # only the loss scale makes its gradients infinite


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (log_of_nothing, "log"),
        (_infinite_factor, "cross_entropy_loss|log_softmax|nll_loss|mul"),
        (lambda out, y: F.cross_entropy(out, y) + out.sum() * float("inf"), "mul"),
        (_beyond_fp16, ""),
    ],
)
def test_the_first_report_on_a_loss_names_the_first_bad_slope(loss: Callable[..., Tensor], op: str) -> None:
    told = found(trainer(faulty(), 2.0**14), 0, loss)
    assert told.cause == "loss"
    assert (
        re.search(rf"in backward, ({op}) is the first", told.note) if op else "in backward" not in told.note
    )
    assert "the next steps are traced" in told.note


def test_a_loss_is_watched_live_after_its_first_finding_for_fifty_steps() -> None:
    mp = trainer(faulty())
    for number in range(2):
        first, second = found(mp, number, log_of_nothing), found(mp, number + 1, log_of_nothing)
        assert (first.cause, first.module, first.op + first.line, first.alarms) == ("loss", OUTSIDE, "", True)
        assert (second.cause, second.op, second.how) == ("invalid", "log", "live")
        assert not mp._observing.watches_live
    found(mp, 0, log_of_nothing)
    seen = 0
    while mp._observing.watches_live:
        assert not step(mp).skipped
        seen += 1
    assert seen == 50


def _square_beyond_fp16(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + ((out * 9000) * (out * 9000)).mean() * 1e-9


def _root_of_zero(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + (out - out.detach()).square().sum().sqrt()


def _multiplied(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) * 1e9


# A loss function on a clean batch, the operation at fault, and whether the second step is skipped as the first is.
LOSSES: list[tuple[Callable[..., Tensor], str, bool]] = [
    (log_of_nothing, "log", True),
    (_root_of_zero, "sqrt", True),
    (_multiplied, "cross_entropy_loss", True),
    (_square_beyond_fp16, "mul", False),  # infinite, and its gradients are finite at a smaller scale
]


@pytest.mark.parametrize(("loss", "op", "skips"), LOSSES, ids=lambda one: getattr(one, "__name__", None))
def test_a_second_warning_names_the_line_that_the_first_could_not(
    loss: Callable[..., Tensor], op: str, skips: bool, recwarn: Any
) -> None:
    warnings.simplefilter("always")
    mp = trainer(faulty(), 2.0**16)
    results = [step(mp, number, loss) for number in range(6)]
    first, second = (one.finding for one in results[:2])
    assert results[0].skipped
    assert results[1].skipped is skips
    assert not first.line
    assert second.op == op
    assert second.line.startswith("test_provenance.py:")
    assert second.remedies
    assert not any("conversion" in remedy for remedy in first.remedies), "the loss has none"
    told = [str(one.message) for one in recwarn if "MixedPrecision" in str(one.message)]
    assert len(told) == 2
    assert first.sentence in told[0]
    assert second.line in told[1]
    assert mp.findings[:2] == [first, second]


def test_arithmetic_between_two_models_is_outside_of_both() -> None:
    """The generator's loss comes through the discriminator's call."""
    maker, critic = nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 1)
    makes, judges = trainer(maker), trainer(critic)
    for _ in range(2):
        x, _y = batch(0)
        assert not stepped(judges, lambda x: critic(x).mean() - critic(maker(x).detach()).mean(), x).skipped
        told = stepped(makes, lambda x: -critic(root_of_nothing(maker(x))).mean(), x).finding
    assert told is not None
    assert (told.op, told.direction, told.module) == ("sqrt", "backward", OUTSIDE)


def twice() -> nn.Module:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return h, self.b(h)

    torch.manual_seed(0)
    model = Computes(forward, a=linear(4, 4), b=linear(4, 4))
    nn.init.eye_(model.b.weight)
    return model


# each use is finite in fp16 at the scale, and not the sum: the loss, the scale, cause, module
USES: list[tuple[Callable[[tuple[Tensor, Tensor]], Tensor], float, str, str]] = [
    (lambda y: y[1].sum() * 4e4 + y[1].sum() * 4e4, 1.0, "overflow", OUTSIDE),
    (lambda y: y[1].sum() * 2.5 + y[1].sum() * 2.5, 2.0**14, "loss scale", OUTSIDE),
    (lambda y: (y[0].float().sum() + y[1].float().sum()) * 4e4, 1.0, "overflow", "a"),
    (lambda y: (y[0].float().sum() + y[1].float().sum()) * 2.5, 2.0**14, "loss scale", "a"),
]


@pytest.mark.parametrize(("loss", "scale", "cause", "module"), USES)
def test_finite_gradients_of_several_uses_of_an_output_that_sum_to_more_than_fits(
    loss: Callable[[tuple[Tensor, Tensor]], Tensor], scale: float, cause: str, module: str
) -> None:
    mp = trainer(twice(), loss_scale=scale)
    told = stepped(mp, lambda: loss(mp.model(torch.ones(1, 4)))).finding
    assert told is not None
    assert (told.cause, told.module, told.direction) == (cause, module, "backward")
    assert told.op == "sum of gradients"
    if module == OUTSIDE:
        assert not told.outputs[0].finite
        assert not any("autocast" in remedy for remedy in told.remedies)


@pytest.mark.parametrize("constant", [True, False])
def test_a_loss_scale_that_is_too_large_has_the_remedies_of_its_kind(constant: bool) -> None:
    mp = trainer(twice(), loss_scale=2.0**14 if constant else f"dynamic(init={2.0**14!r})")
    told = stepped(mp, lambda: USES[1][0](mp.model(torch.ones(1, 4)))).finding
    assert told is not None
    remedies = "\n".join(told.remedies)
    assert 'precision="fp16,loss_scale=1024"' in remedies if constant else "nothing: " in remedies
    assert ("growth_interval" in remedies) is not constant
    assert len(told.remedies) == 2


def test_a_fault_of_the_model_behind_a_sum_outside_that_the_loss_scale_overflows() -> None:
    told = found(trainer(faulty(root_of_nothing), 2.0**14), 0, lambda y, _: y.sum() * 2.5 + y.sum() * 2.5)
    assert (told.cause, told.module, told.op) == ("invalid", "place", "sqrt")


LARGE = Computes(lambda self, x: torch.tanh(x.float()) * 1e6)  # which FP32 holds


def layers(place: nn.Module, *after: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), place, nn.ReLU(), nn.Linear(6, 6), *after, nn.Linear(6, 2))


def result(model: nn.Module, precision: str, others: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    dynamic = "fp16" in precision and "loss_scale" not in precision
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = mezzo.DynamicLossScale(init=1.0) if dynamic else None
    mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=scale, trace=True)
    made = stepped(mp, lambda: others(model(batch(1)[0])).float().mean() * 1e-3)
    mp.close()
    return made


# model, policy -> some of the policies that are offered
CASES: list[tuple[Callable[[], nn.Module], str, set[str]]] = [
    (lambda: layers(LARGE, Computes(lambda self, x: x * 1e-6)), "fp16,module.1=fp32",
     {"fp16,module.1=fp32,module.3=fp32", "fp16,op.linear=fp32,module.1=fp32", "bf16"}),
    (lambda: layers(LARGE, nn.Linear(6, 6)), "fp16,module.1=fp32,loss_scale=1",
     {"fp16,loss_scale=1,module.1=fp32,module.3=fp32,module.4=fp32,module.5=fp32", "bf16"}),
    (lambda: layers(Computes(lambda self, x: torch.exp(x.clamp(-1, 1) + 14.0))), "fp16",
     {"fp16,module.3=fp32,module.4=fp32", "bf16"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "precision", "some"), CASES, ids=["one reader", "several", "by rule"])
def test_policies_that_are_offered_help_and_add_to_the_runs_policy(
    make: Callable[[], nn.Module], precision: str, some: set[str]
) -> None:
    told = result(make(), precision).finding
    assert (told.cause, told.module, told.op) == ("overflow", "3", "linear")
    assert "does not fit fp16" in str(told)
    policies = quoted(told)
    assert some <= set(policies), policies
    assert precision not in policies
    kept = [text for text in policies if text.startswith("fp16")]
    assert all(set(mezzo.policy(precision).modules) <= set(mezzo.policy(text).modules) for text in kept)
    for text in policies:
        assert result(make(), text).stepped, text


@pytest.mark.parametrize("native", ["", "fp16"])
@pytest.mark.parametrize(
    ("call", "loss", "scale", "gradient", "size"),
    [
        (lambda layer: layer(torch.full((64, 8), 2000.0)), 5.0, 1.0, "gradient of weight", 6.4e5),
        (lambda layer: layer(torch.full((64, 8), 4000.0)), 0.5, 1024.0, "gradient of weight", 1.28e5),
        (lambda layer: layer(torch.full((70_000, 8), 0.1)), 2.0, 1.0, "gradient of bias", 1.4e5),
        (lambda layer: layer(torch.ones(2, 8)), 1e5, 64.0, "gradient of input 0", 1e5),
    ],
    ids=["weight", "scaled", "bias", "input"],
)
def test_the_gradient_that_does_not_fit_is_named_and_unscaled(
    call: Any,
    loss: float,
    scale: float,
    gradient: str,
    size: float,
    native: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On hardware with fp16, its operation itself makes it infinite; emulated, the cast to fp16 does."""
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    mp = mezzo.MixedPrecision(
        model, optimizer, "fp16", loss_scale=mezzo.DynamicLossScale(init=scale), trace=True
    )
    told = stepped(mp, lambda: (call(model).float() * loss).sum()).finding
    mp.close()
    assert (told.cause, told.direction) == ("overflow", "backward")
    assert gradient in told.sentence
    assert "earlier operation" not in told.sentence
    (bad,) = (one for one in told.outputs if not one.finite)
    assert (bad.name, bad.format) == (gradient, "fp16")
    if native and "input" not in gradient:
        assert max(one.largest for one in told.inputs if one.name == "gradient of output") == loss
    else:
        assert f"{size:.4g} without the loss scale" in told.sentence
        assert told.inputs[0].largest == pytest.approx(size, rel=2e-3)


def test_a_gradient_that_an_earlier_operation_made_is_put_down_to_that() -> None:
    model = Computes(lambda self, x: self.linear(x).float() * 1e6 * 1e-6, linear=linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=1.0, trace=True)
    told = stepped(mp, lambda: model(batch(0)[0]).sum() * 1e6).finding
    mp.close()
    assert (told.direction, told.op) == ("backward", "float")
    assert "gradient of output is 1e+06" in told.sentence
    assert "An earlier operation produced it" in told.sentence


def test_a_result_is_shown_with_its_cause_and_without_remedies() -> None:
    net = faulty()
    mp = trainer(net)
    net.place.fault = grows
    result = step(mp)
    told = result.finding
    assert told.remedies
    assert told.sentence in repr(result)
    assert "Try:" not in repr(result)
    assert "bf16" not in repr(result)
    assert told.advice in result.reason
    assert told.advice in str(told)
    assert "Try:" in result._repr_html_()


def absorbing(size: float) -> nn.Module:
    """A linear layer's numbers of this size, which tanh takes, and then a product that overflows fp16."""

    def forward(self: Any, x: Tensor) -> Tensor:
        z = torch.tanh(self.large(x) / size) * 300
        return self.head((z * z).mean(1, keepdim=True).sqrt() / 300 * x)

    torch.manual_seed(0)
    model = Computes(forward, large=linear(6, 6), head=linear(6, 2))
    with torch.no_grad():
        model.large.weight.mul_(size).clamp_(-6e4, 6e4)
    return model


@pytest.mark.parametrize(("size", "left"), [(2e5, True), (1.0, False)])
def test_a_remedy_that_leaves_an_infinity_which_is_absorbed_says_so(size: float, left: bool) -> None:
    told = result(absorbing(size), "fp16").finding
    assert (told.cause, told.op) == ("overflow", "mul")
    assert quoted(told) == ["fp16,op.mul=fp32", "bf16"]
    assert ["large: linear still overflows" in text for text in told.remedies] == [left, False]


def energy() -> nn.Module:
    """The product overflows fp16, and so does the linear layer that reads it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(x))
        return self.head(torch.tanh(self.energy(hidden * 200_000) / 100_000))

    torch.manual_seed(0)
    return Computes(forward, hidden=linear(6, 6), energy=linear(6, 6), head=linear(6, 2))


@pytest.mark.parametrize(("native", "instead"), [("", "bf16"), ("fp16", "fp32")])
def test_remedies_that_only_move_the_overflow_are_combined(
    native: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without bf16 on the GPU, FP32 is offered."""
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
    told = result(energy(), "fp16").finding
    assert (told.module, told.op) == ("", "mul")
    assert quoted(told) == ["fp16,op.mul=fp32,module.energy=fp32", instead]
    assert any("operation mul and module energy in FP32" in one for one in told.remedies)
    for text in quoted(told):
        assert result(energy(), text).stepped, text
    assert result(energy(), "fp16,op.mul=fp32").finding.module == "energy"


def test_a_remedy_in_another_model_is_for_that_models_policy() -> None:
    large = Computes(lambda self, x: x * 7e6 / 7e6)
    critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), large, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(critic.parameters())
    of_critic = mezzo.MixedPrecision(critic, optimizer, "fp16,op.gelu=fp32", loss_scale=1.0, trace=True)
    told = result(nn.Sequential(nn.Linear(6, 4)), "fp16", lambda x: critic(x).square()).finding
    of_critic.close()
    assert told.module == "2"
    named = [one for one in told.remedies if "module." in one]
    assert named
    assert all("the model with that module (Sequential)" in one for one in named)
    assert all("op.gelu=fp32" in policy for policy in quoted(told) if policy.startswith("fp16"))


def test_without_tracing_nothing_is_on_the_model() -> None:
    net = faulty()
    mp = trainer(net, trace=False)
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
    net.place.fault = grows
    assert step(mp).finding is None
    assert mp.findings == []
    # Without a loss scale no step is skipped, and none is looked at by default.
    net = faulty()
    mezzo.MixedPrecision(net, torch.optim.AdamW(net.parameters()), "bf16")
    assert not net._forward_pre_hooks


@pytest.mark.parametrize("fault", [None, grows, root_of_nothing])
def test_nothing_that_is_kept_outlives_the_step(fault: Callable[[Tensor], Tensor] | None) -> None:
    """Bytes alive after a step, with tracing and without; with it, the batch is alive until then."""
    left = []
    for trace in (False, False, True):  # the first may release what other tests left in caches
        net = faulty()
        mp = trainer(net, trace=trace)
        step(mp)
        net.place.fault = fault
        before = bytes_alive()
        for number in range(3):
            step(mp, number)
        gc.collect()
        left.append(bytes_alive() - before)
        tracers = [one for one in mp._observing._observers if isinstance(one, OverflowTracer)]
        assert not any(tracer.calls for tracer in tracers)
        mp.close()
        del net, mp
    assert left[1] == left[2]


def test_calls_without_a_backward_are_let_go() -> None:
    net = faulty()
    mp = trainer(net)
    (tracer,) = (one for one in mp._observing._observers if isinstance(one, OverflowTracer))
    for number in range(5):
        with mp.autocast():
            net(batch(number)[0])
        assert len(tracer.calls) <= 1
    with mp.autocast():
        kept = net(batch(0)[0])
    assert len(tracer.calls) == 1
    del kept
    step(mp)
    assert not tracer.calls


def test_a_model_that_the_script_drops_is_not_kept() -> None:
    """Under `mezzo run` one tracer sees all models of a script: those of a search, say."""
    tracer, net = OverflowTracer(enter=nullcontext), faulty()
    x, _ = batch(0)
    tracer.call_begins(net, (x,), {})
    tracer.call_ended(net, net(x))
    tracer.step_dropped()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_a_limit_to_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place counts; a repeat counts little, so that it leaves findings for other places."""
    monkeypatch.setattr(overflow_tracer, "ALARMS", 2)
    mp = trainer(faulty(), 2.0**24)
    faults = [root_of_nothing] * 12 + [grows] * 6
    told = []
    for number, mp.model.place.fault in enumerate(faults):
        told.append(step(mp, number).finding)
    assert [one and one.op for one in told] == ["sqrt"] * 12 + ["mul"] + [None] * 5
    assert mp.findings == told[:13]


def test_a_model_that_can_not_be_called_again_is_told_of_and_training_goes_on() -> None:
    queue = iter([1, 2])  # what an iterator has given can't be put back

    def twice(x: Tensor) -> Tensor:
        for one in queue:
            return x * one
        raise RuntimeError("the queue of batches is empty\nand more")

    net = faulty(twice)
    mp = trainer(net)
    assert not step(mp).skipped
    net.last.weight.data.fill_(6e4)
    told = found(mp)
    assert told.cause == "unknown"
    assert told.alarms
    assert "RuntimeError: the queue of batches is empty" in told.note
    assert "and more" not in told.note


BREAKS = {
    "call_begins": "overflow_tracer.SavedCall",
    "call_ended": "replay.SideEffects.learn",
    "backward_begins": "overflow_tracer.watch_loss",
    "investigate": "overflow_tracer.investigate",
    "live": "forward_trace.ForwardTrace._explain",
}


@pytest.mark.parametrize("broken", list(BREAKS))
def test_a_tracer_that_fails_does_not_end_the_training(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mp = trainer(faulty())
    if broken == "live":
        found(mp, 0, log_of_nothing)
    fails = Mock(side_effect=ValueError("broken on purpose"))
    monkeypatch.setattr(f"mezzo.pytorch.monitor.{BREAKS[broken]}", fails)
    told = found(mp, 1, log_of_nothing)
    assert broken == "live" or "broken on purpose" in told.note
    monkeypatch.undo()
    assert not step(mp).skipped


def test_a_collapse_names_the_culprit_and_findings_are_records(tmp_path: Path) -> None:
    with_records = RecordWriter(tmp_path / "run.jsonl")
    scale = mezzo.DynamicLossScale(init=1.0, floor=1.0, patience=2)
    mp = trainer(faulty(root_of_nothing), loss_scale=scale, records=with_records)
    told = found(mp, 0)
    with pytest.raises(LossScaleCollapseError, match="backward of sqrt in place") as raised:
        step(mp, 1)
    assert told.remedies[0].partition(":")[0] in str(raised.value)
    assert "PATTERN" not in str(raised.value)  # the general advice
    mp.close()
    with_records.close()
    record = next(one for one in read(tmp_path / "run.jsonl") if isinstance(one, OverflowRecord))
    assert (record.update, record.optimizer, record.loss_scale, record.finding) == (0, 0, 1.0, told)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part"])
def test_a_compiled_model_is_run_again_as_it_was_written(whole: bool, fresh_compiler: None) -> None:
    net = faulty()
    net.place.fault = root_of_nothing
    if not whole:
        net.place = torch.compile(net.place, backend="aot_eager")  # type: ignore[assignment]
    model = torch.compile(net, backend="aot_eager") if whole else net
    mp = trainer(model)
    told = found(mp)
    assert (told.module, told.op, told.direction) == ("place", "sqrt", "backward")
    assert ("compiled" in told.note) == whole
    net.first[0].weight.data.fill_(6e4)
    assert found(mp).module == "first.0"
