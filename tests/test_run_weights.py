"""Weights and states stored as a policy says, in scripts that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezzo.core.errors import UsageError
from mezzo.core.policy import policy
from run_scripts import Ran

HEAD = """
import copy, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3))
x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
def loss_of(out):
    return nn.functional.cross_entropy(out, y)
def train(optimizer, steps=6, forward=None):
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of((forward or model)(x))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss
def show(*parameters):
    print(*(str(p.dtype).removeprefix("torch.") for p in parameters))
def bits(*parameters):
    for p in parameters:
        print(p.detach().double().sum().item().hex(), p.detach().double().square().sum().item().hex())
"""
LOWERED = "bfloat16 bfloat16 float32 float32 bfloat16 bfloat16"
FP32 = " ".join(["float32"] * 6)


@pytest.fixture
def launch(launch: Callable[..., Ran]) -> Callable[..., Ran]:
    return lambda source, **keywords: launch(HEAD + source, **keywords)


PLAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train(optimizer)
show(*model.parameters())
bits(*model.parameters())
"""

STORED = [
    # policy, dtypes of the weights, of Adam's first moment, what the summary says
    ("bf16", FP32, "float32", None),
    ("bf16,masters=split", LOWERED, "float32",
     "weights bf16 (4 of 6 parameters), masters split, state fp32; FP32: 2 of LayerNorm (normalization)"),
    ("bf16,masters=split8,state=int8", LOWERED, "uint8",
     "weights bf16 (4 of 6 parameters), masters split8, state int8"),
    ("bf16,masters=none,state=bf16", LOWERED, "bfloat16", "masters none, state bf16"),
    ("fp16,state=int8", FP32, "uint8", "weights fp32, state int8"),
    ("bf16,params=bf16,module.3=fp32", "bfloat16 bfloat16 float32 float32 float32 float32", "float32",
     "; FP32: 2 of LayerNorm (normalization), 2 of Linear (the policy's format)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "weights", "state", "told"), STORED)
def test_weights_and_states_are_stored_as_the_policy_says(
    launch: Any, text: str, weights: str, state: str, told: str | None
) -> None:
    source = PLAIN + "print(optimizer.state[model[0].weight]['exp_avg'].dtype, type(optimizer).__name__)"
    ran = launch(source, policy=text).ok
    assert ran.lines[0] == weights
    assert ran.lines[-1] == f"torch.{state} AdamW"
    assert [(u.moved, u.optimizer) for u in ran.of("update")] == [(True, 0)] * 6
    assert ran.records[0].policy == str(policy(text))
    assert ("weights stay FP32" in ran.err) == (weights == FP32)
    if told is None:
        assert ran.of("end")[0].notes == []
    else:
        assert told in ran.notes
        assert f"mezzo: {ran.of('end')[0].notes[-1]}" in ran.err


def test_patterns_name_the_modules_inside_a_compiled_part(launch: Any) -> None:
    source = "model = nn.Sequential(torch.compile(model, backend='eager'))" + PLAIN
    ran = launch(source, policy="bf16,params=bf16,module.0.3=fp32").ok
    assert ran.lines[0] == STORED[-1][1]
    assert STORED[-1][3] in ran.notes


def plain(optimizer: str, before: str = "") -> str:
    """A script that makes an optimizer, trains with it and shows the weights' formats."""
    return f"{before}\noptimizer = {optimizer}\ntrain(optimizer)\nshow(*model.parameters())"


LATE_OPTIMIZER = """
with torch.no_grad():
    model(x)
show(*model.parameters())
loss = loss_of(model(x))
optimizer = torch.optim.AdamW(model.parameters())
loss.backward()
optimizer.step()
show(*model.parameters())
train(optimizer, 2)
show(*model.parameters())
print(int(optimizer.state[model[0].weight]["step"]))
"""
TWO_OPTIMIZERS = """
head = nn.Linear(3, 3)
optimizers = torch.optim.AdamW(model.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(3):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(head(model(x))).backward()
    for optimizer in optimizers:
        optimizer.step()
show(*model.parameters(), *head.parameters())
"""
OWN_AUTOCAST = """
optimizer = torch.optim.AdamW(model.parameters())
train(optimizer, 2)
with torch.autocast("cpu", torch.bfloat16):
    show(model(x))
train(optimizer, 2)
show(*model.parameters())
"""
DATA_PARALLEL = """
from torch import distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
train(optimizer, forward=wrapped)
model(x)  # an evaluation, without the wrapper
show(*model.parameters())
distributed.destroy_process_group()
"""
SAVED = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
train(optimizer, 3)
saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
train(optimizer, 2)
bits(*model.parameters())
model.load_state_dict(saved[0])
optimizer.load_state_dict(saved[1])
train(optimizer, 2)
bits(*model.parameters())
"""
ACCUMULATION = """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    loss_of(model(x)).backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
show(*model.parameters())
"""
CLOSURE = """
twin = copy.deepcopy(model)
def closure():
    optimizer.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    return loss
for model, in_step in ((model, True), (twin, False)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for _ in range(4):
        optimizer.step(closure) if in_step else (closure(), optimizer.step())
        scheduler.step()
    bits(*model.parameters())
"""
LAST = "float32 float32 float32 float32 bfloat16 bfloat16"
# Scripts of other shapes: (lines, what is printed, what is noted).
SHAPES = {
    "an optimizer after the first call": (LATE_OPTIMIZER, [FP32, FP32, LOWERED, "3"], "4 of 6 parameters"),
    "two optimizers": (TWO_OPTIMIZERS, [f"{LOWERED} bfloat16 bfloat16"], "6 of 8 parameters"),
    "two optimizers, one with a closure": (CLOSURE, "halves", "8 of 12 parameters"),
    "one part is trained": (plain("torch.optim.AdamW(model[3].parameters())"), [LAST],
                          "2 of Linear (no optimizer that Mezzo replaces)"),
    "an autocast of its own": (OWN_AUTOCAST, ["bfloat16", LOWERED], "it uses torch.autocast itself"),
    "data parallelism": (DATA_PARALLEL, [FP32], "first mezzo.lower_weights(model)"),
    "data parallelism after a test of the model": (
        DATA_PARALLEL.replace("train(", "model(x)\ntrain(", 1), [FP32], "first mezzo.lower_weights(model)"),
    "a saved state goes back": (SAVED, "halves", "4 of 6 parameters"),
    "a foreign optimizer": (plain("torch.optim.RMSprop(model.parameters())"), [FP32], "states of RMSprop stay FP32"),
    "Mezzo's optimizer": (plain("AdamW(model.parameters())", "from mezzo.optim import AdamW"), [FP32],
                          "AdamW is one of Mezzo's optimizers"),
    "accumulation": (ACCUMULATION, [LOWERED], "12 backward passes for 3 optimizer steps"),
}  # fmt: skip


@pytest.mark.parametrize("row", SHAPES)
def test_scripts_of_all_shapes(launch: Any, row: str) -> None:
    lines, printed, noted = SHAPES[row]
    ran = launch(lines, policy="bf16,masters=split").ok
    if printed == "halves":
        assert ran.lines[: len(ran.lines) // 2] == ran.lines[len(ran.lines) // 2 :]
        assert len(ran.lines) == 12
    else:
        assert ran.lines == printed
    assert noted in ran.notes
    lowered = any("bfloat16" in line for line in ran.lines)
    assert ("weights bf16 (" in ran.notes) == lowered or printed == "halves"
    assert {u.optimizer for u in ran.of("update")} == ({0, 1} if row.startswith("two optimizers") else {0})
    assert "mezzo: this script ran as it is" not in ran.err


def test_auto_with_a_state_times_its_steps_and_keeps_the_state(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PLAIN.replace("(optimizer)", "(optimizer, 24)")
    source += "print(optimizer.state[model[0].weight]['exp_avg'].dtype)"
    for native, calls in [("bf16", "24 calls of Sequential"), ("", "24 calls of Sequential in fp32")]:
        monkeypatch.setenv("MEZZO_ASSUME_NATIVE", native)
        ran = launch(source, policy="auto,state=int8").ok
        assert (ran.lines[0], ran.lines[-1]) == (FP32, "torch.uint8")
        assert calls in ran.err
        assert "weights fp32, state int8" in ran.notes


VETOED = [
    ("AdamW", "fp16,state=int8,loss_scale=dynamic(init=2**14)"),
    ("Adagrad", "bf16,masters=fp32,loss_scale=1024"),  # separate masters under the optimizer's own step
]


@pytest.mark.parametrize(("optimizer", "text"), VETOED)
def test_an_overflow_vetoes_the_adopted_step(launch: Any, optimizer: str, text: str) -> None:
    ran = launch(
        f"""
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-2)
for step in range(6):
    optimizer.zero_grad()
    (loss_of(model(x)) * ({"1e3" if "fp16" in text else "1e38"} if step == 2 else 1.0)).backward()
    optimizer.step()
print(int(optimizer.state[model[0].weight]["step"]))
""",
        policy=text,
    )
    assert ran.status == 0, ran.err
    assert [u.moved for u in ran.of("update")] == [True, True, False, True, True, True]
    assert {u.optimizer for u in ran.of("update")} == {0}
    assert ran.lines == ["5"]


BY_HAND = """
from mezzo.optim import lower_weights, with_masters
twin = copy.deepcopy(model)
def closure():
    optimizer.zero_grad(); loss = loss_of(model(x)); loss.backward(); return loss
for by_hand in (False, True):
    if by_hand:
        lower_weights(model)
    optimizer = torch.optim.{made}(model.parameters())
    optimizer = with_masters(optimizer) if by_hand else optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for _ in range(4):
        {step}
        scheduler.step()
    show(*model.parameters())
    bits(*model.parameters())
    model = twin
"""


@pytest.mark.parametrize("made", ["RMSprop", "Adagrad", "LBFGS"])
def test_fp32_masters_go_under_any_optimizer(launch: Any, made: str) -> None:
    step = "optimizer.step(closure)" if made == "LBFGS" else "train(optimizer, 1)"
    ran = launch(BY_HAND.format(made=made, step=step), policy="bf16,masters=fp32").ok
    half = len(ran.lines) // 2
    assert ran.lines[0] == LOWERED
    assert ran.lines[:half] == ran.lines[half:]
    assert "weights bf16 (4 of 8 parameters), masters fp32, state fp32" in ran.notes
    assert len(ran.of("update")) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fp16,params=fp16", "mezzo.MixedPrecision.*masters='fp32'"),
        ("fp32,params=bf16", "only if compute is bf16 too. Use bf16,params=bf16"),
    ],
)
def test_what_a_script_can_not_be_run_with(launch: Any, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        launch(f"open({str(tmp_path / 'ran')!r}, 'w')", policy=text)
    assert not (tmp_path / "ran").exists()
