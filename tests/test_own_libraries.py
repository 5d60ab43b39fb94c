"""The mixed precision of Accelerate, Transformers and Lightning: switched off, it is the script in FP32, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mezzo.core.errors import UsageError
from mezzo.core.records import SWITCHED_OFF, read

pytestmark = pytest.mark.heavy
VARIABLES = ("ACCELERATE_MIXED_PRECISION", "LT_PRECISION", "PL_TRAINER_PRECISION")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each script starts without the state and the variables of the one before."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        yield


ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
torch.manual_seed(0)
accelerator = Accelerator({setting}cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for _ in range(6):
    x = torch.randn(8, 64)
    with accelerator.autocast():
        loss = (model(x).float() - x[:, :1]).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print([float(p.detach().double().sum()).hex() for p in model.parameters()])
"""

LLAMA = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
folder = {folder!r}
LlamaForCausalLM(config).requires_grad_(False).bfloat16().save_pretrained(folder)
model = {model}
data = [dict(input_ids=torch.randint(0, 64, (16,))) for _ in range(16)]
data = [dict(row, labels=row["input_ids"]) for row in data]
"""
TRAINER = (
    LLAMA
    + """
args = TrainingArguments(folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True, learning_rate=1e-3, logging_strategy="no", {setting})
sys.stdout, out = sys.stderr, sys.stdout
Trainer(model, args, train_dataset=data).train()
sys.stdout = out
print([float(p.detach().double().sum()).hex() for p in model.parameters()], model.dtype)
"""
)
LOOP = (
    LLAMA
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for start in range(0, 16, 4):
    ids = torch.stack([row["input_ids"] for row in data[start : start + 4]])
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print([float(p.detach().double().sum()).hex() for p in model.parameters()], model.dtype)
"""
)
PRETRAINED = "AutoModelForCausalLM.from_pretrained(folder{})"
CONFIGURED = "AutoModelForCausalLM.from_config(config{})"

LIGHTNING = """
import torch
import {package} as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    def training_step(self, batch, index):
        return (self.model(batch).float() - batch[:, :1].float()).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
torch.manual_seed(0)
module, data = Module(), torch.utils.data.DataLoader(torch.randn(48, 64), batch_size=8)
trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir={folder!r}, {setting})
trainer.fit(module, data)
print([float(p.detach().double().sum()).hex() for p in module.parameters()], module.model[0].weight.dtype)
"""
FABRIC = """
import os, torch
from {package} import Fabric
torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1, {setting})
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for _ in range(6):
    x = torch.randn(8, 64)
    loss = (model(x).float() - x[:, :1]).square().mean()
    optimizer.zero_grad(); fabric.backward(loss); optimizer.step()
print([float(p.detach().double().sum()).hex() for p in model.parameters()])
"""
PLUGIN = "plugins=[L.pytorch.plugins.MixedPrecision('bf16-mixed', 'cpu')]"

FULL = ", dtype=torch.float32"
LOADED = ("", ", dtype=torch.bfloat16", ", torch_dtype='bfloat16'")
AUTOCAST, DEFAULT = "torch.autocast bfloat16", "torch.set_default_dtype(torch.bfloat16) by "
# The script, its setting, that of FP32, and what is switched off. A setting in capitals is an environment variable.
ROWS: list[tuple[str, dict[str, str], dict[str, str], list[str]]] = [
    (ACCELERATE, {"setting": "True, False, 'bf16', "}, {}, [AUTOCAST]),
    (ACCELERATE, {"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, [AUTOCAST]),
    (
        TRAINER,
        {"model": PRETRAINED.format(""), "setting": "bf16=True, bf16_full_eval=True"},
        {"model": PRETRAINED.format(FULL)},
        [f"{DEFAULT}transformers", AUTOCAST],
    ),
    *(
        (LOOP, {"model": PRETRAINED.format(how)}, {"model": PRETRAINED.format(FULL)}, [f"{DEFAULT}transformers"])
        for how in LOADED
    ),
    (LOOP, {"model": CONFIGURED.format(LOADED[1])}, {"model": CONFIGURED.format(FULL)}, [f"{DEFAULT}transformers"]),
    *(
        (LIGHTNING, {"package": package, "setting": f"precision={how!r}"}, {}, off)
        for package in ("lightning", "pytorch_lightning")
        for how, off in (("bf16-mixed", [AUTOCAST]), ("bf16-true", ["Module in bfloat16", DEFAULT + package]))
    ),
    (LIGHTNING, {"setting": PLUGIN}, {}, [AUTOCAST]),
    (LIGHTNING, {"PL_TRAINER_PRECISION": "bf16-mixed"}, {}, [AUTOCAST]),
    *(
        (FABRIC, {"package": f"{package}fabric", "setting": f"precision={how!r}"}, {}, off)
        for package, name in (("lightning.", "lightning"), ("lightning_", "lightning_fabric"))
        for how, off in (("bf16-mixed", [AUTOCAST]), ("bf16-true", ["Sequential in bfloat16", DEFAULT + name]))
    ),
    (FABRIC, {"LT_PRECISION": "bf16-mixed", "package": "lightning.fabric"}, {}, [AUTOCAST]),
]  # fmt: skip


PLAIN: dict[str, Any] = {}  # runs of scripts in FP32, which rows share


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_the_fp32_run_is_that_of_the_script_in_fp32(
    launch: Any, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, theirs, fp32, settings = ROWS[row]
    given = {"folder": str(tmp_path / "model"), "package": "lightning", "setting": ""}
    package = theirs.get("package", "lightning").partition(".")[0]
    for library in ("accelerate", "transformers", package):
        if f"from {library}" in source or (library == package and "{package}" in source):
            pytest.importorskip(library)
    plain_source = source.format_map({**given, **theirs, "setting": "", **fp32})
    key = plain_source.replace(given["folder"], "")
    if key not in PLAIN:
        PLAIN[key] = launch(plain_source, policy="fp32").ok
    plain = PLAIN[key]
    for variable in filter(str.isupper, theirs):
        monkeypatch.setenv(variable, theirs[variable])
    mixed = source.format_map({**given, **theirs})
    lines: list[str] = []
    exec(mixed, {"__name__": "__main__", "print": lambda *values: lines.append(" ".join(map(str, values)))})
    own = launch(mixed, policy="fp32", own="record").ok
    assert own.lines == lines != plain.lines  # recording changes nothing, and the setting matters
    assert len(own.of("update")) == len(own.of("loss")) == len(plain.of("loss"))
    off = launch(mixed, policy="fp32", own="off").ok
    assert off.lines == plain.lines
    notes = [note for note in off.of("end")[-1].notes if note.startswith(SWITCHED_OFF)]
    assert sorted(notes) == sorted(f"{SWITCHED_OFF}{what}" for what in settings)
    with pytest.raises(UsageError):  # so a comparison begins again with the candidate `own`
        launch(mixed, policy="fp32", own="refuse")
    assert list(read(tmp_path / "run.jsonl"))[-1].notes[0].startswith("left alone: ")


def test_masters_under_trainer(launch: Any, tmp_path: Path) -> None:
    """Its fused AdamW, its schedule, its checkpoint: which plain Transformers resumes."""
    pytest.importorskip("transformers")
    folder = str(tmp_path / "model")
    source = TRAINER.format(folder=folder, model=PRETRAINED.format(""), setting="bf16=True").replace(
        'save_strategy="no"', 'save_strategy="steps", save_steps=2'
    )
    keywords = {"policy": "fp32", "own": "record", "masters": "split"}
    whole = launch(source, **keywords).ok
    assert "split masters under AdamW: 12 weights" in whole.notes
    assert whole.lines != launch(source, policy="fp32", own="record").lines
    resume = source.replace(".train()", f".train(resume_from_checkpoint={folder + '/checkpoint-2'!r})")
    launch(source, **keywords)
    assert launch(resume, **keywords).lines == whole.lines
    assert launch(resume, policy="fp32", own="keep").status == 0
