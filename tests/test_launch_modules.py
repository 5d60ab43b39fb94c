"""`mezzo run` with module patterns: what runs inside a module in FP32 follows it, however deep, compiled or not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import Ran, launcher
from mezzo.core.errors import UnknownNameError

SCRIPT = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return self.deep(x * times) / times

times = 1.0 if sys.argv[1:] else 1e5

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
seen = []
model[1].deep[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
x = torch.randn(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def loss_of(x):
    return model(x).square().mean()

if sys.argv[1:] == ["model"]:
    model = torch.compile(model, backend="aot_eager")
if sys.argv[1:] == ["step"]:
    loss_of = torch.compile(loss_of, backend="aot_eager")
for _ in range(3):
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(seen[0] if seen else "unseen", repr(loss.item()))
"""

Launch = Callable[..., Ran]


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    return launcher(tmp_path, capsys)


# policy -> formats of the inner layer's input and output
INSIDE = {
    "fp16": "(torch.float16, torch.float16)",
    "fp16,module.1=fp32": "(torch.float32, torch.float32)",
    "bf16,module.1=fp32": "(torch.float32, torch.float32)",
    "fp16,module.*=fp32": "(torch.float32, torch.float32)",
}


@pytest.mark.parametrize("policy", INSIDE)
def test_what_runs_inside_follows(policy: str, launch: Launch) -> None:
    ran = launch(SCRIPT, policy=policy)
    assert ran.status == 0
    assert ran.lines[-1].startswith(INSIDE[policy])


def test_a_policy_for_a_module_mends_what_overflows_inside_of_it(launch: Launch) -> None:
    assert any(update.skipped for update in launch(SCRIPT, policy="fp16").of("update"))
    assert not any(update.skipped for update in launch(SCRIPT, policy="fp16,module.1=fp32").of("update"))


@pytest.mark.heavy
def test_compiled_is_as_eager(launch: Launch) -> None:
    losses = [
        launch(SCRIPT, *argv, policy="fp16,module.1=fp32").lines[-1].split()[-1]
        for argv in (("eager",), ("model",), ("step",))
    ]
    assert len(set(losses)) == 1


TWO = """
import sys
import torch
from torch import nn

class Large(nn.Module):
    def forward(self, x):
        return x * 7e6 / 7e6

torch.manual_seed(0)
one = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
two = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Large(), nn.Linear(4, 1))
if sys.argv[1:] == ["first"]:
    one, two[2] = nn.Sequential(nn.Linear(4, 4), Large()), nn.Identity()
seen = set()
two[3].register_forward_hook(lambda module, args, out: seen.add(out.dtype))
if sys.argv[1:] == ["unused"]:
    unused, two = two, nn.Sequential(nn.Linear(4, 1))
optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    two(one(torch.randn(8, 4))).square().mean().backward()
    optimizer.step()
print(seen)
"""


def test_patterns_name_modules_of_any_model_that_is_called(launch: Launch) -> None:
    bare = launch(TWO, policy="fp16")
    told = [one.finding for one in bare.of("overflow")]
    policies = {
        found for one in told for remedy in one.remedies for found in re.findall(r"`(fp16,[^`]*)`", remedy)
    }
    of_modules = [text for text in policies if "module.2=fp32" in text]
    assert of_modules
    for text in (*of_modules, "fp16,module.2=fp32,module.3=fp32"):
        ran = launch(TWO, policy=text)
        assert ran.status == 0, (text, ran.err)
        assert not [one.finding for one in ran.of("overflow") if one.finding.alarms], text
    assert ran.lines == ["{torch.float32}"]
    assert (
        "'3' matches nothing in Sequential, the first model that is called; it waits for another one"
        in ran.err
    )


def test_a_pattern_that_no_model_has_is_refused_before_the_first_step(launch: Launch) -> None:
    # A number would match a model that another test left alive: the pattern waits for any model of the process.
    with pytest.raises(UnknownNameError, match="'nowhere' matches no module of the model"):
        launch(TWO, policy="fp16,module.2=fp32,module.nowhere=fp32")


def test_a_pattern_whose_model_was_never_called_is_told_at_the_end(launch: Launch) -> None:
    with pytest.raises(UnknownNameError, match=r"'3' matches no module of what was called \(Sequential\)"):
        launch(TWO, "unused", policy="fp16,module.3=fp32")


def test_a_pattern_of_one_model_hides_no_remedy_for_another(launch: Launch) -> None:
    ran = launch(TWO, "first", policy="fp16,module.3=fp32")
    told = [remedy for one in ran.of("overflow") for remedy in one.finding.remedies]
    assert any("module.1=fp32" in remedy and "module.3=fp32" in remedy for remedy in told), told
