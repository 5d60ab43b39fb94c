"""`mezzo migrate`: what a script becomes, what is left alone and why, and that it trains as before."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo.cli.main import main
from mezzo.migrate import NAMES, migrate

Output = pytest.CaptureFixture[str]

CHANGES = """
# torch.amp
-from torch.amp import autocast, GradScaler
+from mezzo.amp import autocast, GradScaler
 with autocast('cuda', torch.float16): GradScaler('cuda')
# several lines and comments
-from torch.cuda.amp import (  # both
+from mezzo.amp import (  # both
     GradScaler,  # scales

     autocast as ac,
 )
# torch.cuda.amp
-from torch.cuda.amp import autocast
+from mezzo.amp import autocast
 @autocast()
 def f():
     autocast(use, torch.half); autocast( enabled = use , **more)
# custom functions
-from torch.amp import custom_bwd, custom_fwd
+from mezzo.amp import custom_bwd, custom_fwd
 @custom_fwd(device_type="cuda")
 def f(): pass
# custom functions that have no device type
-import torch.cuda.amp as amp
-from torch.cuda.amp import custom_fwd as fwd, GradScaler
+import mezzo.amp as amp
+from mezzo.amp import custom_fwd as fwd, GradScaler
+import mezzo.amp
 import torch
-@amp.custom_fwd
+@amp.custom_fwd(device_type="cuda")
 @amp.autocast()
 def f(): GradScaler(init_scale=2.)
-@fwd ( )
+@fwd ( device_type="cuda")
-@torch.cuda.amp.custom_fwd(cast_inputs = torch.half,)
-@torch.cuda.amp.custom_bwd
+@mezzo.amp.custom_fwd(cast_inputs = torch.half, device_type="cuda",)
+@mezzo.amp.custom_bwd(device_type="cuda")
 def g(): pass
-amp.custom_bwd((g)); GradScaler(1., **more); amp.GradScaler(*a)
-getattr(torch.cuda.amp, 'GradScaler'); map(fwd, x)
+amp.custom_bwd((g), device_type="cuda"); GradScaler("cuda", 1., **more); amp.GradScaler("cuda", *a)
+getattr(mezzo.amp, 'GradScaler'); map(fwd(device_type="cuda"), x)
# full names
+import mezzo.amp
 import torch  # first
-scaler = torch.cuda.amp.GradScaler(enabled=True)
-with torch.autocast('cuda'), torch.cuda.amp.autocast(True):
-    x = torch . amp . GradScaler ()
+scaler = mezzo.amp.GradScaler(enabled=True)
+with mezzo.amp.autocast('cuda'), mezzo.amp.autocast(True):
+    x = mezzo.amp.GradScaler ()
# mezzo is there
 import torch, mezzo
-with torch.autocast('cpu'): pass
+with mezzo.amp.autocast('cpu'): pass
# inside a function, and on one line
 def f():
+\timport mezzo.amp
 \timport torch
-\treturn torch.autocast('cpu')
-if x: import torch
-torch.autocast('cpu')
+\treturn mezzo.amp.autocast('cpu')
+if x: import mezzo.amp; import torch
+mezzo.amp.autocast('cpu')
 def g():
-    import torch; return torch.autocast('cpu')
+    import mezzo.amp; import torch; return mezzo.amp.autocast('cpu')
# called by functools.partial
+import mezzo.amp
 import functools, torch
-context = functools.partial(torch.autocast, 'cuda', dtype=torch.float16)
+context = functools.partial(mezzo.amp.autocast, 'cuda', dtype=torch.float16)
# the module
-import torch.cuda.amp as amp, os
+import mezzo.amp as amp, os
 with amp.autocast(): amp.GradScaler(init_scale=1.)
# the module from its package
-from torch.cuda import amp
-from torch import amp as new, nn
+from mezzo import amp
+from mezzo import amp as new
+from torch import nn
 getattr(amp, 'autocast')(); new.autocast('cuda')
# an import of the module with torch
+import mezzo.amp
 import torch
 import torch.cuda.amp
-torch.cuda.amp.autocast()
+mezzo.amp.autocast()
# submodules
-from torch.cuda.amp.grad_scaler import GradScaler
-from torch.amp.autocast_mode import autocast
-from apex.normalization.fused_layer_norm import FusedLayerNorm
+from mezzo.amp import GradScaler
+from mezzo.amp import autocast
+from mezzo.apex.normalization import FusedLayerNorm
 autocast('cpu')
# several modules in one import
-from torch import Tensor, autocast, cuda, amp
+from mezzo import amp
+from mezzo.amp import autocast
+from torch import Tensor, cuda
 autocast('cpu'); cuda.is_available()
# one of two imports
 try:
-    from torch.amp import autocast, GradScaler
+    from mezzo.amp import autocast, GradScaler
 except ImportError:
-    from torch.cuda.amp import autocast, GradScaler
+    from mezzo.amp import autocast, GradScaler
 autocast(enabled=True); GradScaler(); GradScaler('cpu', enabled=False)
# apex
 try:
-    from apex import amp, optimizers
-    from apex.parallel import DistributedDataParallel as DDP
+    from mezzo.apex import amp, optimizers
+    from mezzo.apex.parallel import DistributedDataParallel as DDP
 except ImportError:
     amp = None
 if amp is not None and amp:
     model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
 with amp.scale_loss(loss, optimizers.FusedAdam(p)) as scaled: scaled.backward()
 if 'state_dict' in amp.__dict__: amp.state_dict()
# import apex
-import apex, os
-from apex import amp
+import mezzo.apex as apex, os
+from mezzo.apex import amp
 model = apex.parallel.convert_syncbn_model(model)
 amp.master_params(apex.amp.init())
# nothing of torch.amp
 import torch
 from mine import amp, autocast
 autocast(); amp.initialize()
 def f(torch): torch.autocast('cpu')
 class A:
     autocast = 1
     def autocast(self): self.torch.autocast()
"""
"""Under each title the lines of a script: those that go away with -, and the new ones with +."""


def rows() -> dict[str, tuple[str, str]]:
    found = {}
    for row in re.split(r"\n# ", CHANGES)[1:]:
        title, *lines = row.rstrip("\n").split("\n")
        found[title] = tuple("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
    return found


ROWS = rows()


@pytest.mark.parametrize("title", ROWS)
def test_a_script_becomes(title: str) -> None:
    before, after = ROWS[title]
    for end in ("\n", "\r\n"):
        made = migrate(before.replace("\n", end).encode(), "t.py")
        assert made.after.decode() == after.replace("\n", end)
        assert made.left == ()
        assert bool(made.diff("t.py")) == (after != before)
        again = migrate(made.after, "t.py")
        assert (again.after, again.left) == (made.after, ())


LEFT = [  # a script, the line, what the reason and the fix mention
    ("from torch.cuda.amp import autocast\ndef autocast(): pass\nautocast()\n", 3, ["autocast", "line 2", "rename"]),
    ("from torch.amp import autocast\nfor autocast in x: autocast()\n", 2, ["line 2"]),
    ("import torch\ntorch = fake(torch)\ntorch.autocast('cpu')\n", 3, ["torch", "line 2"]),
    ("from mine import autocast\nfrom torch.amp import autocast\nautocast('cpu')\n", 3, ["different imports"]),
    ("from torch.cuda.amp import *\nautocast()\n", 1, ["names that the script uses"]),
    ("from torch.amp import autocast\nisinstance(x, autocast)\n", 2, ["function"]),
    ("import torch\nclass Mine(torch.amp.GradScaler): pass\n", 2, ["another class"]),
    ("from apex.contrib import xentropy\n", 1, ["mezzo.apex", "optimizers"]),
    ("import apex\napex.amp.frobnicate()\n", 2, ["mezzo.apex.amp", "scale_loss"]),
    ("try: from torch.amp import GradScaler\nexcept E: from torch.cuda.amp import GradScaler\nGradScaler(1.)\n", 3,
     ['torch.amp.GradScaler("cuda")']),
    ("import torch\ntorch.set_autocast_enabled('cpu', True)\n", 2, ["torch.amp.autocast(device_type)"]),
    ("from torch.cpu.amp import autocast\nautocast()\n", 2, ["torch.amp.autocast(device_type)"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "line", "said"), LEFT)
def test_what_is_left_alone_and_why(source: str, line: int, said: list[str]) -> None:
    made = migrate(source.encode(), "t.py")
    assert made.after == made.before
    (one,) = made.left
    assert one.line == line
    assert one.code in source
    assert [word for word in said if word not in f"{one.reason}; {one.fix}"] == []


def test_other_names_change_where_one_is_left_alone() -> None:
    source = "from apex import amp, contrib\nimport torch\ncontext = Lazy(torch.autocast, 'cpu')\n"
    made = migrate(f"{source}torch.cuda.amp.autocast(*a)\n".encode(), "t.py")
    imports = "from apex import contrib\nfrom mezzo.apex import amp\nimport mezzo.amp\nimport torch\n"
    after = f"{imports}context = Lazy(torch.autocast, 'cpu')\nmezzo.amp.autocast(*a)\n"
    assert made.after.decode() == after
    assert [one.line for one in made.left] == [1, 3]


def test_each_use_that_stays_is_listed_with_the_line_that_keeps_it() -> None:
    source = "import torch.cuda.amp as amp\n@amp.custom_fwd\ndef f(): amp.GradScaler(1.)\nx = amp.autocast\n"
    made = migrate(source.encode(), "t.py")
    assert made.after == made.before
    left = [(one.line, one.code, "line 4" in one.reason) for one in made.left]
    assert left == [(2, "amp.custom_fwd", True), (3, "amp.GradScaler", True), (4, "amp.autocast", False)]


TESTED = """
import torch, torch.cuda.amp as amp
from torch.cuda.amp import autocast, GradScaler
with torch.autocast("cuda"): amp.GradScaler()
with autocast() as c, amp.autocast(): GradScaler()
isinstance(c, (type(None), torch.autocast))
"""


def test_no_autocast_changes_where_its_class_is_tested() -> None:
    """The contexts of a script that was changed in part would no longer be of that class."""
    made = migrate(TESTED.encode(), "t.py")
    before, after = "from torch.cuda.amp import autocast, GradScaler", "from mezzo.amp import GradScaler\n"
    assert made.after.decode() == TESTED.replace(before, f"{after}from torch.cuda.amp import autocast")
    autocasts = [(4, "torch.autocast"), (5, "autocast"), (5, "amp.autocast"), (6, "torch.autocast")]
    left = [(one.line, one.code) for one in made.left]
    assert sorted(left) == sorted(
        [*autocasts, (4, "amp.GradScaler")]
    )  # which needs the import of amp.autocast
    assert {one.reason.partition(" tests")[0] for one in made.left if "autocast" in one.code} == {"line 6"}


ENCODED = [
    "# coding: latin-1\nfrom torch.amp import autocast\nname = 'é'".encode("latin-1"),
    "\ufefffrom torch.amp import autocast\nname = 'é \u2028'".encode(),
]


@pytest.mark.parametrize("source", ENCODED)
def test_the_encoding_and_a_last_line_without_an_end_stay(
    source: bytes, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = tmp_path / "t.py"
    script.write_bytes(source)
    assert main(["migrate", str(script)]) == 1
    *_, last, end, _ = capsysbinary.readouterr().out.split(b"\n")
    assert (last, end) == (b" " + source.splitlines()[-1], b"\\ No newline at end of file")
    assert main(["migrate", "--write", str(script)]) == 0
    assert script.read_bytes() == source.replace(b"torch.amp", b"mezzo.amp")


def test_every_name_is_in_mezzo() -> None:
    modules = {name: importlib.import_module(name) for name in NAMES}
    assert [(m, n) for m, names in NAMES.items() for n in names.split() if not hasattr(modules[m], n)] == []


def test_the_diff_is_what_write_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = ROWS["several lines and comments"]
    for name in ("one.py", "two.py", "other.py"):
        Path(name).write_text(before if name != "other.py" else "import os\n")
    assert main(["migrate", "one.py", "other.py"]) == 1
    shown = capsys.readouterr()
    assert Path("one.py").read_text() == before
    assert "1 of 2 files" in shown.err
    assert "mezzo migrate --write one.py\n" in shown.err
    if shutil.which("patch"):
        subprocess.run(["patch", "-p0"], input=shown.out, text=True, check=True, capture_output=True)
        assert Path("one.py").read_text() == after
    assert main(["migrate", "two.py", "--write", "other.py"]) == 0
    assert Path("two.py").read_text() == after
    assert main(["migrate", "two.py"]) == 0
    assert "nothing to change" in capsys.readouterr().err


NOTED = [
    ("from torch.cuda.amp import autocast\nwith autocast(): pass\nwith autocast(dtype=d): pass\n", [2, 3]),
    ("import torch\nwith torch.cuda.amp.autocast(): pass\nwith torch.autocast('cuda'): pass\n", [2]),
    ("from torch.amp import autocast\nwith autocast('cpu'): pass\n", []),
    ("from torch.cuda.amp import autocast\nx = autocast\nwith autocast(): pass\n", []),  # left alone
]


@pytest.mark.parametrize(("source", "lines"), NOTED)
def test_an_autocast_that_is_off_without_cuda_until_it_is_mezzos_is_noted(
    source: str, lines: list[int], tmp_path: Path, capsys: Output
) -> None:
    script = tmp_path / "t.py"
    script.write_text(source)
    main(["migrate", "--json", str(script)])
    (one,) = json.loads(capsys.readouterr().out)["files"]
    assert one["on_cpu"] == lines
    main(["migrate", str(script)])
    noted = [told for told in capsys.readouterr().err.splitlines() if "torch.cuda.is_available()" in told]
    assert len(noted) == bool(lines)
    assert [int(line) for told in noted for line in re.findall(r"(?:py:|lines? |, )(\d+)", told)] == lines


def test_a_reason_is_told_once_with_all_its_lines(tmp_path: Path, capsys: Output) -> None:
    script = tmp_path / "t.py"
    uses = "with torch.autocast('cuda'), torch.autocast('cpu'): pass\n" * 2
    script.write_text(f"import torch\nisinstance(x, torch.autocast)\n{uses}f = torch.set_autocast_enabled\n")
    main(["migrate", str(script)])
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{script}:2: left alone: torch.autocast: line 2 tests for its class")
    assert first.endswith(" (also lines 3, 4)")
    assert second.startswith(f"{script}:5: left alone: ")
    assert "nothing to change" in last


def test_json_and_what_is_left_alone_on_stderr(tmp_path: Path, capsys: Output) -> None:
    script = tmp_path / "t.py"
    script.write_text("from torch.amp import autocast\nfrom torch.cuda.amp import *\n")
    assert main(["migrate", "--json", str(script)]) == 1
    printed = json.loads(capsys.readouterr().out)
    (one,) = printed["files"]
    told = (printed["schema"], printed["written"], one["file"], one["changed"])
    assert told == (1, False, str(script), True)
    assert "+from mezzo.amp import autocast" in one["diff"]
    types = {key: type(value) for key, value in one["left"][0].items()}
    assert types == {"line": int, "code": str, "reason": str, "fix": str}
    assert main(["migrate", str(script)]) == 1
    assert f"{script}:2: left alone: from torch.cuda.amp import *: " in capsys.readouterr().err


WRONG = [
    ("t.py", "x = 1\nprint 'old'\n", ["t.py", "line 2", "Python"]),
    ("t.ipynb", "{}", ["t.ipynb", "jupyter nbconvert --to script"]),
    ("absent.py", None, ["absent.py", "No such file"]),
    (".", None, ["directory"]),
]


@pytest.mark.parametrize("row", WRONG, ids=[row[0] for row in WRONG])
def test_wrong_usage_changes_no_file(
    row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    name, content, said = row
    monkeypatch.chdir(tmp_path)
    Path("good.py").write_text("from torch.amp import autocast\n")
    if content is not None:
        Path(name).write_text(content)
    assert main(["migrate", "--write", "good.py", name]) == 2
    shown = capsys.readouterr().err
    assert [word for word in said if word not in shown] == []
    assert "torch" in Path("good.py").read_text()


def test_without_libcst_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.delitem(sys.modules, "mezzo.migrate", raising=False)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["migrate", str(tmp_path)]) == 2
    assert "pip install libcst" in capsys.readouterr().err


TRAINING = """
import torch
from torch.cuda.amp import GradScaler
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
unused: GradScaler | None = None
losses = []
for _ in range(20):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""


def test_a_migrated_script_trains_as_before() -> None:
    made = migrate(TRAINING.encode(), "t.py")
    assert made.after.count(b"mezzo.amp.") == 2
    before, after = {}, {}  # type: ignore[var-annotated]
    exec(made.before, before)
    exec(made.after, after)
    assert before["losses"][0] > 2 * before["losses"][-1]
    assert after["losses"] == pytest.approx(before["losses"], rel=0.02)
