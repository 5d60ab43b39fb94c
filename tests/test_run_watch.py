"""Observers of a launched script get the calls of `StepObserver`, and live watching does not change the script."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from mezzo.core.overflow import OverflowReport
from mezzo.core.records import OverflowRecord
from mezzo.pytorch.monitor.observer import StepObserver
from mezzo.pytorch.run import observers

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
for step in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    model.eval(); model(x); model.train()
"""


class Told(Mock):
    def __init__(self, **others: Any) -> None:
        super().__init__(spec=StepObserver, finding=None, **others)
        self.update_ended.side_effect = self.diagnose
        self.drain.side_effect = lambda: [self.record.pop()] if self.record else []
        self.record: list[OverflowRecord] = []

    def _get_child_mock(self, **kw: Any) -> Mock:
        return Mock(**kw)

    def diagnose(self, optimizer: Any, *, index: int, number: int, skipped: bool, loss_scale: float) -> None:
        if skipped:
            self.finding = OverflowReport("overflow", module="2", op="linear")
            self.record.append(OverflowRecord(index, number, 0.0, loss_scale, self.finding))

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.method_calls if call[0] != "drain"]

    def given(self, name: str, place: int = 1) -> list[Any]:
        return [call.args[place] for call in getattr(self, name).call_args_list]


CALL = ["call_begins", "call_ended"]
UPDATE = ["update_begins", "update_ended"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    one = Told()
    monkeypatch.setattr(observers, "watchers_for", lambda session: [one])
    monkeypatch.setattr(observers, "tracer_for", lambda session, model: None)
    return one


PLANS = [("fp32", "float32", 1.0), ("bf16", "bfloat16", 1.0), ("fp16", "float16", 65536.0)]


@pytest.mark.parametrize(("policy", "seen", "scale"), PLANS)
def test_a_plain_loop_is_told_in_order(launch: Any, told: Told, policy: str, seen: str, scale: float) -> None:
    ran = launch(TRAIN, policy=policy, watch=1)
    assert ran.status == 0, ran.err
    assert told.names == [*CALL, "backward_begins", *UPDATE] * 4 + ["step_dropped"]
    assert {type(model).__name__ for model in told.given("call_begins", 0)} == {"Sequential"}
    assert {str(output.dtype) for output in told.given("call_ended")} == {f"torch.{seen}"}
    assert told.given("backward_begins") == [scale] * 4
    assert told.given("update_begins") == [1.0] * 4
    for index, call in enumerate(told.update_ended.call_args_list):
        assert call.kwargs == {"index": index, "number": 0, "skipped": False, "loss_scale": scale}


def test_the_script_is_ended_after_so_many_updates(launch: Any) -> None:
    source = TRAIN.replace("for step", "try:\n  for step").replace("\n    ", "\n      ")
    source += "  print('not reached')\nfinally:\n  print('finally')\n"
    ran = launch(source, policy="fp16", stop_after=3)
    assert (ran.status, ran.lines) == (0, ["finally"]), ran.err
    assert len(ran.of("update")) == len(ran.of("loss")) == 3
    ran = launch(NAN.replace("LOOPS", "7"), policy="fp16", stop_after=3)
    assert [u.skipped for u in ran.of("update")] == [True] * 3  # skipped steps count


SETUP = """
import threading, torch
from torch import nn
from torch.nn.functional import mse_loss
torch.manual_seed(0)
model, other = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
second = torch.optim.SGD(other.parameters(), lr=1e-2)
x = torch.randn(16, 4)

def loss_of(net, x=x):
    return net(x).square().mean()
"""

LOOPS: dict[str, tuple[str, list[str]]] = {
    "accumulation": ("for _ in range(2): loss_of(model).backward()\noptimizer.step()", [*CALL, "backward_begins",
     *CALL, "backward_begins", *UPDATE]),
    "two losses at once": ("torch.autograd.backward([loss_of(model), loss_of(other)])\noptimizer.step()", [*CALL,
     *CALL, "backward_begins", "backward_begins", *UPDATE]),
    "a penalty by autograd.grad": (
        "z = x.clone().requires_grad_()\n"
        "(slope,) = torch.autograd.grad(loss_of(model, z), [z], create_graph=True)\n"
        "slope.square().sum().backward(); optimizer.step()", [*CALL, "backward_begins", *UPDATE]),
    "evaluation in training mode without gradients": (
        "with torch.no_grad(): loss_of(model)\nwith torch.inference_mode(): loss_of(model)", []),
    "a call that raises": (
        "try: model(torch.ones(3, 5))\nexcept RuntimeError: pass\nloss_of(model).backward(); optimizer.step()",
        ["call_begins", "step_dropped", *CALL, "backward_begins", *UPDATE]),
    "a backward that raises": (
        "loss = loss_of(model); loss.backward()\ntry: loss.backward()\nexcept RuntimeError: pass",
        [*CALL, "backward_begins", "backward_begins", "step_dropped"]),
    "a step that raises": (
        "class Bad(torch.optim.SGD):\n  def step(self): raise KeyError\n"
        "bad = Bad(model.parameters(), lr=1)\nloss_of(model).backward()\n"
        "try: bad.step()\nexcept KeyError: pass",
        [*CALL, "backward_begins", "update_begins", "step_dropped"]),
    "another thread": (
        "loss_of(model)\nthread = threading.Thread(target=lambda: loss_of(other).backward())\n"
        "thread.start(); thread.join()",
        CALL),
    "a step with a closure": (
        "loss_of(model)\nlbfgs = torch.optim.LBFGS(model.parameters())\n"
        "def closure():\n  lbfgs.zero_grad(); loss = loss_of(model); loss.backward(); return loss\n"
        "lbfgs.step(closure)\nloss_of(model).backward(); optimizer.step()",
        [*CALL, "step_dropped", *CALL, "backward_begins", *UPDATE]),
    "a script that begins to do it itself": (
        "loss_of(model)\nwith torch.autocast('cpu', torch.bfloat16): loss_of(model).backward()\noptimizer.step()",
        [*CALL, "step_dropped"]),
    "no optimizer alive": ("del optimizer, second\nloss_of(model).backward()", []),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LOOPS))
def test_what_is_told(launch: Any, told: Told, name: str) -> None:
    source, expected = LOOPS[name]
    ran = launch(SETUP + source, policy="fp16", watch=1)
    assert ran.status == 0, ran.err
    assert told.names == [*expected, *(["step_dropped"] if expected else [])]
    ended = [(how["index"], how["number"]) for _, how in told.update_ended.call_args_list]
    updates = [(r.index, r.optimizer) for r in ran.of("update")]
    assert [pair for pair in updates if pair in ended] == ended
    assert ("closure (LBFGS) are not watched" in ran.notes) == ("closure" in name)


def test_a_backward_that_is_run_again_is_told_with_each_scale(launch: Any, told: Told) -> None:
    source = "z = x.clone().requires_grad_(); (1000 * loss_of(model, z)).backward(); optimizer.step()"
    ran = launch(SETUP + source, policy="fp16", watch=1)
    scales = told.given("backward_begins")
    assert scales[0] == 65536.0
    assert len(scales) > 1
    assert scales == [65536.0 / 2**n for n in range(len(scales))]
    # Gradients that were counted already are no gradients of the step.
    assert told.names.count("step_dropped") == len(scales)
    assert told.names[-4:] == ["backward_begins", *UPDATE, "step_dropped"]
    assert ran.of("update")[0].moved


NAN = f"""{SETUP}
for step in range(LOOPS):
    optimizer.zero_grad()
    (loss_of(model) * float('nan')).backward()
    optimizer.step()
"""


def test_a_skipped_step_is_told_and_named_where_the_scale_collapses(launch: Any, told: Told) -> None:
    ran = launch(NAN.replace("LOOPS", "100"), policy="fp16,loss_scale=1024", watch=1)
    assert ran.status == 1
    updates = ran.of("update")
    assert [u.skipped for u in updates] == [True] * len(updates)
    assert all(u.observed for u in updates)  # looking takes its time
    assert [o.update for o in ran.of("overflow")] == list(range(len(updates)))
    kinds = [r.kind for r in ran.records if r.kind in ("update", "overflow")]
    assert kinds == ["update", "overflow"] * len(updates)  # the last one's too, whose error ends the script
    assert "LossScaleCollapseError" in ran.err
    assert "Cause: forward of linear in 2: " in ran.err
    assert f"mezzo: update 0 skipped, and {len(updates) - 1} later ones: forward of linear in 2" in ran.err


@pytest.mark.parametrize("moment", ["call_begins", "backward_begins", "update_ended", "drain", "finish"])
def test_the_script_goes_on_whatever_becomes_of_those_who_look(
    launch: Any, told: Told, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    if moment == "finish":
        told.mock_add_spec([*dir(StepObserver), "finish"])
    monkeypatch.setattr(told, moment, Mock(side_effect=MemoryError("no room")))
    ran = launch(TRAIN, policy="fp16", watch=1)
    assert ran.status == 0
    assert len(ran.of("update")) == 4
    assert "Told stopped after an error: MemoryError: no room" in ran.notes
    assert told.names[-1] == "step_dropped"


@pytest.mark.usefixtures("tensors_only")
def test_the_observed_step_is_not_watched(launch: Any) -> None:
    """What observers compute is not taken for the script's."""
    gc.collect()  # tensors of other tests count, and must not go in between
    plain = launch(TRAIN, policy="fp16", trace=False, observe=True)
    ran = launch(TRAIN, policy="fp16", watch=1, observe=True)
    assert ran.of("ops") == plain.of("ops")
    (before, after) = (one.of("memory")[0].peak_bytes for one in (plain, ran))
    assert abs(after - before) < 2000  # the first script's own tensors are still there
    assert [r.update for r in ran.of("ranges")] == [0, 1, 3]


LIVE = """
import random, threading, warnings
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
torch.manual_seed(0); random.seed(0); np.random.seed(0)
model, other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
second = torch.optim.AdamW(other.parameters(), lr=1e-2)
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))

class Counts(TorchFunctionMode):
    seen = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))

def faulty(out):
    return torch.log(out.sum() * 0)

def state():
    hooks = torch.nn.modules.module
    return (
        len(_get_current_function_mode_stack()), torch.autograd.Function.__dict__["apply"],
        len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks), F.has_torch_function,
        list(warnings.filters), warnings.showwarning, torch.is_grad_enabled(), torch.get_default_device(),
    )

def train(body, steps=8, bad=(3, 5)):
    before = state()
    for step in range(steps):
        optimizer.zero_grad(); second.zero_grad()
        body(step, step in bad)
        optimizer.step()
        assert state() == before, (step, state(), before)
        held = [*model.state_dict().values(), *other.state_dict().values(), torch.rand(2), *map(torch.tensor, (
            random.random(), float(np.random.rand())))]
        print(step, *(t.double().sum().item().hex() for t in held))
"""

OVERFLOWS = """
class Gain(nn.Module):
    def forward(self, x):
        return x.mul(self.gain)

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Gain(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def body(step, bad):
    model[3].gain = 1e5 if bad else 1.0
    (64 * F.cross_entropy(model(x), y)).backward()
train(body, bad=[6])
"""


def test_a_skipped_step_is_looked_into_and_nothing_is_changed(launch: Any) -> None:
    """An overflow in the forward pass of step 6, and a loss scale that is too large at first."""
    policy = "fp16,loss_scale=dynamic(init=2**22)"
    plain, ran = (launch(LIVE + OVERFLOWS, policy=policy, **how) for how in ({"trace": False}, {"watch": 1}))
    assert ran.lines == plain.lines
    assert len(set(ran.lines)) == 8
    skipped = [u.index for u in ran.of("update") if u.skipped]
    assert skipped == [u.index for u in plain.of("update") if u.skipped]
    found = {record.update: record.finding for record in ran.of("overflow")}
    assert list(found) == skipped
    culprit, line = found.pop(6), "script.py:44: return x.mul(self.gain)"
    assert {finding.cause for finding in found.values()} == {"loss scale"}
    assert (culprit.cause, culprit.op, culprit.direction) == ("overflow", "mul", "forward")
    assert (culprit.how, culprit.line) == ("replay", line)
    assert f"mezzo: update 6 skipped: forward of mul in 3 ({line}): " in ran.err
    assert plain.of("overflow") == plain.of("ranges") == []
    assert [r.update for r in ran.of("ranges")] == list(range(8))


PLAIN = """
def body(step, bad):
    out = model(x)
    loss = F.cross_entropy(out, y)
    if bad:
        loss = loss + faulty(out)
    loss.backward()
train(body)
"""

IN_A_STEP: dict[str, str] = {
    "a plain loss": PLAIN,
    "a default device for the loss": PLAIN.replace(
        "    loss = F.", "    with torch.device('meta'):\n        assert torch.ones(2).is_meta\n    loss = F."
    ),
    "a mode of the script's for the call": PLAIN.replace(
        "    out = model(x)\n",
        "    with Counts() as counts:\n        out = model(x)\n    seen = counts.seen; out + 1\n"
        "    assert counts.seen == seen > 0\n",
    ),
    "two models and two optimizers": PLAIN.replace("= model(x)", "= other(model(x))").replace(
        "backward()\n", "backward(); second.step()\n"
    ),
    "a loss that raises": PLAIN.replace(
        "    loss.backward()\n",
        "    try:\n        if step == 4: F.cross_entropy(model(x), y[:3])\n    except ValueError: print('raised')\n"
        "    loss.backward()\n",
    ),
    "a loss scale that is too large in between": PLAIN.replace(
        "    loss.backward()\n", "    (loss * (2e5 if step == 4 else 1.0)).backward()\n"
    ),
    "a penalty on slopes": PLAIN.replace("x)\n", "leaf)\n", 1)
    .replace("    out =", "    leaf = x.clone().requires_grad_()\n    out =", 1)
    .replace(
        "    loss.backward()\n",
        "    (slope,) = torch.autograd.grad(out.sum(), [leaf], create_graph=True)\n"
        "    (loss + slope.square().mean()).backward()\n",
    ),
}


@pytest.mark.parametrize("name", list(IN_A_STEP))
def test_what_replay_cannot_explain_is_caught_as_it_happens(launch: Any, name: str) -> None:
    """The second time by its line; and the training is bit for bit that of nobody who looks."""
    plain = launch(LIVE + IN_A_STEP[name], policy="fp16,loss_scale=16", trace=False)
    assert plain.status == 0, plain.err
    ran = launch(LIVE + IN_A_STEP[name], policy="fp16,loss_scale=16")
    assert ran.status == 0, ran.err
    assert ran.lines == plain.lines
    assert ran.notes == plain.notes
    every = [r.finding for r in ran.of("overflow")]
    found = [finding for finding in every if finding.alarms]
    assert len(every) - len(found) == ("loss scale" in name)
    line = "script.py:21: return torch.log(out.sum() * 0)"
    told = list(dict.fromkeys((f.cause, f.op, f.line) for f in found))
    assert told == [("loss", "", ""), ("invalid", "log", line)]
    assert {(f.module, f.how) for f in found} == {("(outside the model)", "live")}


def test_a_script_may_end_while_it_is_watched(launch: Any) -> None:
    before = torch.autograd.Function.__dict__["apply"]
    thread = "threading.Thread(target=model, args=(x,)).start()"
    for ending in ("raise SystemExit(3)", "raise KeyError('mine')", thread):
        source = LIVE + PLAIN.replace("    if bad:\n", f"    if step == 4: {ending}\n    if bad:\n")
        source = source.replace("assert state()", "state()")
        ran = launch(source, policy="fp16,loss_scale=16")
        assert ran.of("end")
        assert _get_current_function_mode_stack() == []
        assert torch.autograd.Function.__dict__["apply"] is before
        assert not torch.nn.modules.module._global_forward_hooks


def test_a_script_with_compiled_functions_is_not_watched(launch: Any) -> None:
    compiled = PLAIN.replace("train(body)", "model = torch.compile(model, backend='eager')\ntrain(body)")
    compiled = compiled.replace("assert state()", "state()")
    plain = launch(LIVE + compiled, policy="fp16,loss_scale=16", trace=False)
    torch._dynamo.reset()  # of the first script, whose compiled code would serve the second
    ran = launch(LIVE + compiled, policy="fp16,loss_scale=16")
    assert plain.status == 0, plain.err
    assert ran.lines == plain.lines
    assert "the script has compiled functions" in ran.notes
    assert all(r.finding.cause == "loss" for r in ran.of("overflow"))


def test_a_mode_of_the_script_s_changes_no_gradient(launch: Any) -> None:
    """PyTorch shows `autograd.grad` to a function mode, and then calls it a second time: it is scaled once."""
    slopes = IN_A_STEP["a penalty on slopes"]
    under = slopes.replace("train(body)", "with Counts(): train(body)")
    plain, ran = (launch(LIVE + one, policy="fp16,loss_scale=16", trace=False) for one in (slopes, under))
    assert ran.lines == plain.lines


@pytest.mark.parametrize("every_module", [False, True])
def test_what_a_module_around_others_returns_is_watched_if_asked(launch: Any, every_module: bool) -> None:
    source = """
class Around(nn.Sequential):
    def forward(self, x):
        return self[0](x) * 3.0
model = nn.Sequential(nn.Sequential(Around(model)), other)
loss_of(model).backward(); second.step()
"""
    ran = launch(SETUP + source, policy="fp32", watch=1, watch_all=every_module)
    seen = [row.module for row in ran.of("ranges")[0].rows if row.what == "activation"]
    around = ["0.0"] if every_module else []  # "0", and the model, hand on what a module in them returned
    assert seen == ["0.0.0", *around, "1"]
