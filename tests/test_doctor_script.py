"""`mezzo doctor SCRIPT` reads where a script makes 16-bit weights or mixed precision, and does not run it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import Command, in_the_folder  # noqa: F401
from mezzo.runner.script_text import MIXED, WEIGHTS, findings

LOADED = "AutoModelForCausalLM.from_pretrained('name'{})"
ROWS: dict[str, list[str]] = {  # code -> kinds of what it makes
    "model = Net().half()": [WEIGHTS],
    "model = nn.Sequential(nn.Linear(2, 2)).cuda().bfloat16()": [WEIGHTS],
    "model = Net()\nmodel.to('cuda', torch.bfloat16)": [WEIGHTS],
    "def train(self):\n    self.net = self.net.to(dtype=torch.float16)\n    self.net(x)": [WEIGHTS],
    "low = torch.bfloat16\nmodel = Net()\nmodel.to(low)": [WEIGHTS],
    "torch.set_default_dtype(torch.bfloat16)": [WEIGHTS],
    f"model = {LOADED.format('')}": [WEIGHTS],
    LOADED.format(", dtype='auto'"): [WEIGHTS],
    LOADED.format(", dtype='bfloat16'"): [WEIGHTS],
    LOADED.format(", torch_dtype=torch.float16"): [WEIGHTS],
    "BertModel.from_config(config, dtype=torch.bfloat16)": [WEIGHTS],
    "with torch.autocast('cuda', dtype=torch.bfloat16): pass": [MIXED],
    "with torch.cuda.amp.autocast(): pass": [MIXED],
    "scaler = GradScaler()": [MIXED],
    "Accelerator(mixed_precision='fp16')": [MIXED],
    "Trainer(model, args=TrainingArguments('out', bf16=True))": [MIXED],
    "L.Trainer(precision='bf16-mixed')\nFabric(precision='16-true')": [MIXED, MIXED],
    f"model = {LOADED.format('')}\nSFTConfig(fp16=True)": [WEIGHTS, MIXED],
    # None of it:
    "x = torch.randn(3).half()\nnet(x.bfloat16(), y.to(torch.bfloat16))": [],
    "Net().to('cuda').float().half_open()": [],
    "reference = Net().half().requires_grad_(False)": [],
    f"reference = {LOADED.format('')}\nreference.requires_grad_(False)": [],
    LOADED.format(", dtype=torch.float32"): [],
    "AutoTokenizer.from_pretrained('name')\nPeftModel.from_pretrained(model, 'name')": [],
    "model = Net().bfloat16()\noptimizer = mezzo.optim.AdamW(model.parameters())": [],
    "with torch.autocast('cuda', enabled=False): pass\nGradScaler(enabled=False)": [],
    "TrainingArguments('out', bf16=False)\nAccelerator(mixed_precision='no')\nTrainer(precision='32-true')": [],
    "with mezzo.autocast('bf16'): pass": [],
}


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version that seems to be installed."""

    def installed(version: str) -> None:
        found = [SimpleNamespace(version=version)] if version else []
        monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(found))

    installed("5.0.1")
    return installed


@pytest.mark.parametrize("code", ROWS)
def test_what_is_found(code: str) -> None:
    found = findings(f"import torch\n{code}\n", "train.py")
    assert [kind for _, kind, _ in found] == ROWS[code]
    assert all(one in code.replace('"', "'") for _, _, one in found)


def test_before_transformers_5_the_default_was_fp32(transformers: Any) -> None:
    transformers("")
    assert findings(LOADED.format(""), "train.py")
    transformers("4.57.6")
    assert findings(LOADED.format(""), "train.py") == []
    assert findings(LOADED.format(", dtype=torch.bfloat16"), "train.py")


def test_the_lines_and_the_commands(tmp_path: Path, command: Command) -> None:
    for name, text in (
        ("my train", "raise SystemExit\n\nmodel = Net().half()\nscaler = GradScaler()\n"),
        ("fine", "GradScaler()"),
        ("none", "print(1)"),
        ("bad", "a b"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    ran = command("doctor", "my train.py")
    assert ran.status == 1
    assert "my train.py:3: 16-bit weights without masters: Net().half()\n" in ran.out
    assert "my train.py:4: mixed precision of its own: GradScaler()\n" in ran.out
    for words in ("run", "run --masters split", "compare", "run --own off --precision bf16"):
        assert f": mezzo {words} 'my train.py'\n" in ran.out
    assert len({line.partition(":")[0] for line in ran.out.splitlines()[2:]}) == 4
    ran = command("doctor --json", "my train.py")
    assert (ran.status, [one["line"] for one in json.loads(ran.out)["findings"]]) == (1, [3, 4])
    statuses = {"fine.py": 0, "none.py": 0, "bad.py": 2, "absent.py": 2, "none.py --gpu T4": 2}
    assert {words: command(f"doctor {words}").status for words in statuses} == statuses
    assert "bad.py is not Python" in command("doctor bad.py").err
