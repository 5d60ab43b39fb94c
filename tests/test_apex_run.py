"""`mezzo run --apex`: a script's own `from apex import amp` imports `mezzo.apex`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mezzo.apex import imports
from mezzo.apex.imports import provided
from mezzo.cli.main import main

pytestmark = pytest.mark.usefixtures("forked")

Output = pytest.CaptureFixture[str]

SCRIPT = """
import sys
import torch
from apex import amp
from apex.normalization.fused_layer_norm import FusedLayerNorm
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, convert_syncbn_model

level, enabled = sys.argv[1], sys.argv[2:] != ["--off"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), FusedLayerNorm(16), torch.nn.Linear(16, 3))
optimizer = FusedAdam(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level=level, enabled=enabled)
for _ in range(3):
    out = model(torch.randn(16, 8))
    with amp.scale_loss(out.square().mean(), optimizer) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(out.dtype, model[0].weight.dtype, list(amp.state_dict()))
"""


def imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "apex"]


def forget() -> None:
    for name in imported():
        del sys.modules[name]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    yield "train.py"
    forget()


# Options of `mezzo run`, the script's, what it prints, what the summary says.
RUNS = [
    ([], ["O1"], "torch.float16 torch.float32 ['loss_scaler0']", "train.py line 13"),
    ([], ["O2"], "torch.float32 torch.float16 ['loss_scaler0']", "--apex --precision bf16"),
    (["--precision", "bf16"], ["O2"], "torch.float32 torch.float32 []", "in bf16"),
    ([], ["O1", "--off"], "torch.float32 torch.float32 []", "calls of Sequential"),
    (["--precision", "fp16"], ["O1", "--off"], "torch.float32 torch.float32 []", "in fp16"),
]


@pytest.mark.parametrize("row", RUNS)
def test_the_level_is_the_scripts_unless_a_precision_is_given(script: str, row: Any, capsys: Output) -> None:
    options, words, printed, summary = row
    before = torch.nn.Module.__call__
    assert main(["run", "--apex", *options, script, *words]) == 0
    captured = capsys.readouterr()
    assert printed in captured.out
    assert summary in captured.err
    assert torch.nn.Module.__call__ is before
    assert not torch.is_autocast_enabled("cpu")
    assert not imported()
    assert sys.modules["mezzo.apex.amp"].__spec__.name == "mezzo.apex.amp"  # type: ignore[union-attr]
    assert not imports.replaced_by


@pytest.mark.parametrize(
    "line",
    ["from apex import amp", "import apex", "raise ImportError('Please install apex from its repository')"],
)
def test_a_script_without_apex_gets_a_hint(script: str, line: str, capsys: Output) -> None:
    Path(script).write_text(line)
    assert main(["run", script, "--epochs", "3"]) == 1
    assert "mezzo run --apex train.py --epochs 3" in capsys.readouterr().err


def test_other_failures_get_none(script: str, capsys: Output) -> None:
    Path(script).write_text("import apexes_of_leaves")
    assert main(["run", script]) == 1
    assert "--apex" not in capsys.readouterr().err


def test_what_is_missing_is_named(script: str, capsys: Output) -> None:
    Path(script).write_text("from apex import fp16_utils")
    assert main(["run", "--apex", script]) == 1
    err = capsys.readouterr().err
    assert "apex.fp16_utils" in err
    assert "apex.amp" in err
    assert err.count("mezzo run --apex") == 1  # and no hint to add it


def test_an_installed_apex_is_replaced_only_with_the_option(script: str, capsys: Output) -> None:
    Path("apex").mkdir()
    Path("apex/__init__.py").write_text("")
    Path("apex/amp.py").write_text("initialize = None")
    Path(script).write_text("from apex import amp\nprint(amp.__name__)")
    for options, name in ([], "apex.amp"), (["--apex"], "mezzo.apex.amp"), ([], "apex.amp"):
        forget()
        assert main(["run", *options, script]) == 0
        assert capsys.readouterr().out == f"{name}\n"


def test_torch_is_not_imported_before_the_script_does() -> None:
    code = "import sys; from mezzo.apex.imports import provided\nwith provided('bf16'): import apex\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_imported_apex_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    before = sys.modules["apex"]
    with provided():
        assert importlib.import_module("apex") is not before
    assert sys.modules["apex"] is before


STARTER = """
import multiprocessing, subprocess, sys

def work(how):
    from apex import amp  # before torch
    import torch
    net = torch.nn.Linear(8, 3)
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    for _ in range(2):
        out = net(torch.randn(16, 8))
        with amp.scale_loss(out.float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    print(how, out.dtype, amp.state_dict()["loss_scaler0"]["unskipped"], flush=True)

if __name__ == "__main__":
    if sys.argv[1:]:
        work("subprocess")
    else:
        child = multiprocessing.get_context("spawn").Process(target=work, args=("spawn",))
        child.start()
        started = subprocess.run([sys.executable, __file__, "child"], check=True)
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.mark.heavy
def test_processes_that_the_script_starts_import_it_too(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(STARTER)
    words = [sys.executable, "-m", "mezzo", "run", "--apex", "start.py"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["spawn torch.float16 2", "subprocess torch.float16 2"]
