"""A script that brings its own mixed precision, PyTorch's or Mezzo's, runs as it is, and is told so with what to do."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

import mezzo
from mezzo.core.errors import UsageError
from mezzo.core.records import read

SCRIPT = """
import torch
import mezzo
torch.manual_seed(0)
model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss_of(x):
    return model(x).float().square().mean()
{}
print(loss_of(x.to(model.weight.dtype)).item().hex())
"""
SWITCH_OFF = "mezzo run --own off --precision "

STEP = "optimizer.zero_grad(); loss.backward(); optimizer.step()"
OWN: dict[str, str] = {  # whose use is told -> lines
    "mezzo.MixedPrecision": """
mp = mezzo.MixedPrecision(model, optimizer, "bf16")
for _ in range(2):
    with mp.autocast():
        loss = loss_of(x)
    mp.step(loss)
""",
    "mezzo.autocast": f"""
for _ in range(2):
    with mezzo.autocast("bf16"):
        loss = loss_of(x)
    {STEP}
""",
    "mezzo.GradScaler": """
scaler = mezzo.GradScaler()
scaler.scale(torch.zeros(1))
for _ in range(2):
    loss = loss_of(x)
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "mezzo.accelerate": """
accelerator = mezzo.accelerate.Accelerator("bf16", cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
""",
    "mezzo.calibrate": """
found = mezzo.calibrate(model, lambda model, x: loss_of(x), [x], optimizer=optimizer, format="fp16", steps=1)
print(found.policy)
""",
    "mezzo.apex.amp": """
from mezzo.apex import amp
amp.initialize(model, optimizer, verbosity=0)
with amp.scale_loss(loss_of(x), optimizer) as scaled:
    scaled.backward()
optimizer.step()
amp.reset()
""",
    "torch.autocast": "with torch.autocast('cpu', torch.bfloat16):\n    loss_of(x)",
    "torch.autocast, a decorator": "torch.autocast('cpu', torch.bfloat16)(loss_of)(x)",
    "GradScaler": "torch.amp.GradScaler('cpu', init_scale=2.0).scale(torch.zeros(1))",
    "torch.set_autocast_enabled":
        "torch.set_autocast_enabled('cpu', True); loss_of(x); torch.set_autocast_enabled('cpu', False)",
    "bfloat16 parameters": "model.bfloat16(); loss_of(x.bfloat16()); model.float()",
    "frozen bfloat16 parameters": "model.requires_grad_(False).bfloat16(); loss_of(x.bfloat16()); model.float()",
}  # fmt: skip
NOT_OWN = {
    "autocast switched on again": "switch = torch.set_autocast_enabled\n"
    "model.register_forward_hook(lambda *_: switch('cpu', False) or switch('cpu', True))\nloss_of(x)",
    "autocast switched off": "torch.set_autocast_enabled('cpu', False)\nloss_of(x)",
    "a context that is off": "with mezzo.autocast('bf16', enabled=False):\n    loss_of(x)",
    "a context in FP32": "with mezzo.autocast('fp32'):\n    loss_of(x)",
    "a scaler that is off": "mezzo.GradScaler(enabled=False).scale(loss_of(x))",
    "FP32": "mp = mezzo.MixedPrecision(model, optimizer, 'fp32', clip_norm=1.0)\nmp.step(loss_of(x))",
    "only imported": "from mezzo import MixedPrecision, autocast, calibrate\nscaler = mezzo.GradScaler()\n"
    "from torch.amp import autocast, GradScaler\nGradScaler('cpu')",
    "torch's off": "with torch.autocast('cpu', enabled=False):\n    loss_of(x)\n"
    "torch.amp.GradScaler('cpu', enabled=False).scale(loss_of(x))",
}


@pytest.mark.parametrize("name", OWN)
def test_a_script_that_does_it_itself_is_left_alone(launch: Any, name: str) -> None:
    source = SCRIPT.format(OWN[name])
    ran = launch(source, policy="fp16").ok
    assert ran.lines == launch(source, policy="fp32").lines
    assert "Mezzo changed nothing: fp16 was not applied\n" in ran.err
    (note,) = [line for line in ran.err.splitlines() if "left alone: " in line]
    word = name.partition(",")[0]
    assert word in note
    assert word.endswith("bfloat16 parameters") or f"it uses {word} itself (script.py line " in note
    assert (f"or remove {name}" if "mezzo" in name else SWITCH_OFF) in ran.err


@pytest.mark.parametrize("name", OWN)
def test_a_comparison_ends_it_at_the_first_use(
    launch: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the script catches every error."""
    what_to_do = f"remove {name}, or put it behind an option" if "mezzo" in name else SWITCH_OFF
    caught = f"try:\n{indent(OWN[name].strip(), ' ')}\nexcept Exception: pass"
    for lines in (OWN[name], caught):
        with pytest.raises(UsageError, match=re.escape(what_to_do)):
            launch(SCRIPT.format(lines) + "print('the end')", policy="fp32", own="refuse")
        assert "left alone: " in " ".join(list(read(tmp_path / "run.jsonl"))[-1].notes)
        assert lines == caught or "the end" not in capsys.readouterr().out


def test_a_use_in_a_library_is_told_with_the_lines_that_led_to_it(launch: Any) -> None:
    ran = launch(
        """
        import types, torch
        library = types.ModuleType("library")
        step = "import torch\\ndef step():\\n    with torch.autocast('cpu', torch.bfloat16): pass"
        exec(compile(step, "/lib/loop.py", "exec"), vars(library))
        arguments = dict(bf16=True)
        library.step()
        """,
        policy="bf16",
    )
    assert "(script.py line 7, through library, loop.py line 3)" in ran.notes


@pytest.mark.parametrize("name", NOT_OWN)
def test_what_is_no_use_of_it(launch: Any, name: str) -> None:
    ran = launch(SCRIPT.format(NOT_OWN[name]), policy="bf16").ok
    assert "left alone" not in ran.notes
    assert "mezzo: policy bf16" in ran.err


@pytest.mark.usefixtures("forked")
def test_mezzo_may_be_imported_before_torch(tmp_path: Path) -> None:
    """In a process of its own: here torch is imported already."""
    script = tmp_path / "script.py"
    imports = "from mezzo import autocast, GradScaler, MixedPrecision\nimport torch\n"
    script.write_text(imports + SCRIPT.format("GradScaler()"))
    words = [sys.executable, "-m", "mezzo", "run", "--precision", "bf16", str(script)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    assert "mezzo: 1 call of Linear in bf16" in ran.stderr


def test_calls_before_the_first_use_are_counted_and_names_restored(launch: Any) -> None:
    from mezzo.pytorch.autocast.context import autocast

    before = vars(mezzo.MixedPrecision)["__init__"], vars(mezzo.GradScaler)["scale"]
    ran = launch(SCRIPT.format("loss_of(x)\nmezzo.GradScaler().scale(loss_of(x))"), policy="fp16")
    first, then = [line for line in ran.err.splitlines() if line.startswith("mezzo: ")][:2]
    assert first.startswith("mezzo: left alone: it uses mezzo.GradScaler itself (script.py line ")
    assert "fp16 was not applied" in then
    assert "2 calls began in fp16" in then
    assert mezzo.autocast is autocast
    assert (vars(mezzo.MixedPrecision)["__init__"], vars(mezzo.GradScaler)["scale"]) == before


@pytest.mark.heavy
def test_a_context_in_a_compiled_function_breaks_no_graph(launch: Any) -> None:
    body = f"""
def step(x):
    with mezzo.autocast("bf16"):
        return loss_of(x)
step = torch.compile(step, backend="aot_eager", fullgraph=True)
for _ in range(2):
    loss = step(x)
    {STEP}
"""
    ran = launch(SCRIPT.format(body), policy="fp16").ok
    assert len(ran.of("update")) == 2
    assert "not left alone, though it uses mezzo.autocast in a compiled function (script.py line" in ran.notes


def test_a_run_whose_updates_are_measured_ends_at_fit_of_keras(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras: Any = types.ModuleType("keras")
    keras.Model = type("Model", (), {"fit": lambda self: print("fit")})
    monkeypatch.setitem(sys.modules, "keras", keras)
    source = "import keras\nkeras.Model().fit()\nprint('end')"
    assert launch(source, stop_after=3, policy="fp32").lines == []
    monkeypatch.delitem(sys.modules, "mezzo.keras", raising=False)  # else the script uses it
    ran = launch(source, policy="bf16")
    assert ran.lines == ["fit", "end"]
    assert "mezzo.keras.set_policy('bf16')" in ran.notes
    assert "mezzo compare --framework keras --precision bf16" in ran.notes


LIBRARIES = {
    "deepspeed": "initialize",
    "transformer_engine.pytorch": "fp8_autocast",
    "torchao.float8": "convert_to_float8_training",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_not_of_pytorch_is_not_switched_off(
    library: str, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType(library)
    monkeypatch.setitem(sys.modules, library, module)
    source = f"import sys, torch\nsys.modules[{library!r}].{LIBRARIES[library]}()"
    launch("import torch", policy="fp32", own="off")  # another version, without it
    setattr(module, LIBRARIES[library], lambda: None)
    with pytest.raises(UsageError, match=f"not switch this off: it uses {library} itself"):
        launch(source, policy="fp32", own="off")
