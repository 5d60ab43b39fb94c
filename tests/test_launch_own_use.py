"""A script that uses Mezzo itself runs as it is under `mezzo run`, and is told so with what to do."""

from __future__ import annotations

from typing import Any

import pytest

import mezzo
from launching import launcher


@pytest.fixture
def launch(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    return launcher(tmp_path, capsys)


SCRIPT = """
import torch
import mezzo
torch.manual_seed(0)
model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss_of(x):
    return model(x).float().square().mean()
{}
print(loss_of(x).item().hex())
"""

OWN = {
    "MixedPrecision": """
mp = mezzo.MixedPrecision(model, optimizer, "bf16")
for _ in range(2):
    with mp.autocast():
        loss = loss_of(x)
    mp.step(loss)
""",
    "autocast": """
for _ in range(2):
    with mezzo.autocast("bf16"):
        loss = loss_of(x)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "GradScaler": """
scaler = mezzo.GradScaler()
scaler.scale(torch.zeros(1))
for _ in range(2):
    loss = loss_of(x)
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "calibrate": """
found = mezzo.calibrate(model, lambda model, x: loss_of(x), [x], optimizer=optimizer, format="fp16", steps=1)
print(found.policy)
""",
}
NOT_OWN = {
    "a region that is off": "with mezzo.autocast('bf16', enabled=False):\n    loss_of(x)",
    "a region in FP32": "with mezzo.autocast('fp32'):\n    loss_of(x)",
    "a scaler that is off": "mezzo.GradScaler(enabled=False).scale(loss_of(x))",
    "only imported": "from mezzo import MixedPrecision, autocast, calibrate\nscaler = mezzo.GradScaler()",
}


@pytest.mark.parametrize("name", OWN)
def test_a_script_that_uses_mezzo_itself_is_left_alone(launch: Any, name: str) -> None:
    source = SCRIPT.format(OWN[name])
    ran = launch(source, policy="fp16")
    assert ran.status == 0, ran.err
    assert ran.lines == launch(source, policy="fp32").lines
    assert "mezzo: this script ran as it is; Mezzo changed nothing: fp16 was not applied\n" in ran.err
    assert f"mezzo: left alone: it uses mezzo.{name} itself (script.py line 1" in ran.err
    assert f"Or take mezzo.{name} out, and mezzo run does it" in ran.err
    assert "no model was called" not in ran.err
    assert ("watch= and records=" in ran.err) == (name == "MixedPrecision")


def test_a_loss_that_its_scaler_scales_is_not_scaled_again(launch: Any) -> None:
    body = """
scaler = mezzo.GradScaler(init_scale=1024.0)
for _ in range(2):
    with mezzo.autocast("fp16"):
        out = model(x)
        out.register_hook(lambda g: print(float(g.abs().max()) < 100))
        loss = out.float().square().mean()
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""
    assert launch(SCRIPT.format(body), policy="fp16").lines[:2] == ["True", "True"]


def test_calls_before_the_first_use_are_told(launch: Any) -> None:
    ran = launch(SCRIPT.format("loss_of(x)\nmezzo.GradScaler().scale(loss_of(x))"), policy="fp16")
    assert "mezzo: this script ran as it is from there on; 2 calls before that ran in fp16\n" in ran.err


@pytest.mark.parametrize("name", NOT_OWN)
def test_what_is_no_use_of_it(launch: Any, name: str) -> None:
    ran = launch(SCRIPT.format(NOT_OWN[name]), policy="bf16")
    assert ran.status == 0, ran.err
    assert "left alone" not in ran.notes
    assert "mezzo: policy bf16" in ran.err


@pytest.mark.heavy
def test_a_region_in_a_compiled_function_is_noticed_and_breaks_no_graph(launch: Any) -> None:
    body = """
def step(x):
    with mezzo.autocast("bf16"):
        return loss_of(x)
step = torch.compile(step, backend="aot_eager", fullgraph=True)
for _ in range(2):
    loss = step(x)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    ran = launch(SCRIPT.format(body), policy="fp16")
    assert ran.status == 0, ran.err
    assert "left alone: it uses mezzo.autocast itself (in a compiled function)" in ran.notes


def test_the_names_are_put_back(launch: Any) -> None:
    from mezzo.pytorch.region.autocast import autocast

    before = vars(mezzo.MixedPrecision)["__init__"], vars(mezzo.GradScaler)["scale"]
    launch(SCRIPT.format(OWN["MixedPrecision"]), policy="bf16")
    assert mezzo.autocast is autocast
    assert (vars(mezzo.MixedPrecision)["__init__"], vars(mezzo.GradScaler)["scale"]) == before


TORCHS = {
    "with torch.autocast('cpu', torch.bfloat16):\n    loss_of(x)": "its own mixed precision switched off",
    "torch.amp.GradScaler('cpu').scale(loss_of(x))": "its own mixed precision switched off",
    "model.bfloat16(); model(x.bfloat16()); model.float()": "keep the model in FP32",
}


@pytest.mark.parametrize("body", TORCHS)
def test_what_to_do_is_said_of_every_other_mixed_precision(launch: Any, body: str) -> None:
    ran = launch(SCRIPT.format(body), policy="bf16")
    assert "left alone: " in ran.err
    assert TORCHS[body] in ran.err
