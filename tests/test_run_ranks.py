"""`mezzo run` on two ranks of data parallelism: one overflows, and both skip, look into it and stay equal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo.core.records import OverflowRecord, RangesRecord, UpdateRecord, read
from ranks import processes

SCRIPT = """
import gc, os, sys
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)
        self.gain = 1.0

    def forward(self, x):
        x = self.one(x)
        x = x.mul(self.gain)
        return self.two(x)

net = Net()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 2, (16,), generator=generator)
for step in range(4):
    net.gain = 1e6 if (step, rank) == (2, 1) else 1.0
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print(*(p.double().sum().item().hex() for p in model.parameters()))
del model, optimizer
gc.collect()  # or DDP's cycle keeps gloo's threads into the interpreter's end, which aborts now and then
dist.destroy_process_group()
"""


UNUSED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(8, 8), nn.Linear(8, 1), 1.0

    def forward(self, x):
        hidden = self.a(x * self.gain)
        return {"loss": self.b(hidden).pow(2).mean(), "hidden": hidden}

net = Net()
model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    net.gain = 1e30 if step == 1 else 1.0
    optimizer.zero_grad()
    model(torch.randn(4, 8))["loss"].backward()
    optimizer.step()
print(all(bool(p.isfinite().all()) for p in model.parameters()))
dist.destroy_process_group()
"""


@pytest.mark.heavy
def test_an_output_that_the_loss_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNUSED)
    words = ["-m", "mezzo", "run", "--precision", "fp16", "script.py", str(tmp_path / "meeting")]
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.stdout == "True\n", ran.stderr
    assert "3 updates due, 1 skipped" in ran.stderr


EVERYWHERE = {  # optimizers that both ranks have, in the order of their first steps -> the step that they skip
    "hand_cleaned": 2,  # before the first sharded model, from which on no step is traced
    "hand_flat": 2,
    "fsdp": 2,
    "fsdp_input": 2,
    "fsdp_penalty": None,
    "fsdp_accumulated": 1,
    "fsdp_and_plain": 2,
    "slow": 2,
    "only_here": None,
}
CASES = [*EVERYWHERE, "ddp_joined", "without_gradients"]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[dict[str, list[str]], str]]]:
    """The folder of a run of all cases of ``scripts/several_ranks.py``; its results and messages on each rank."""
    folder = tmp_path_factory.mktemp("several")
    script = str(Path(__file__).parent / "scripts" / "several_ranks.py")
    words = ["-m", "mezzo", "run", "--precision", "fp16", "--records=run{rank}.jsonl", script]
    told = processes([*words, str(folder / "meeting"), *CASES], folder, seconds=200)
    return folder, [(json.loads(out), err) for out, err in told]


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_no_overflow_of_one_rank_parts_the_ranks(
    case: str, several: tuple[Path, list[tuple[dict[str, list[str]], str]]]
) -> None:
    (first, _), (second, _) = several[1]
    assert first[case] == second[case]
    assert all(math.isfinite(float.fromhex(x)) for x in first[case])


@pytest.mark.heavy
def test_scales_and_skips_are_the_same_on_all_ranks(several: Any) -> None:
    folder, _ = several
    of_ranks = []
    for rank in range(2):
        updates = [r for r in read(folder / f"run{rank}.jsonl") if isinstance(r, UpdateRecord)]
        of_ranks.append([[r for r in updates if r.optimizer == n] for n in range(len(EVERYWHERE))])
    for (case, skipped), first, second in zip(EVERYWHERE.items(), *of_ranks):
        assert [r.skipped for r in first] == [r.skipped for r in second], case
        assert [i for i, r in enumerate(first) if r.skipped] == ([] if skipped is None else [skipped]), case
        # A copy of the gradients is not recognized: infinity reaches each rank, which skips by itself.
        if case != "hand_flat":
            assert all("rank 1" in r.reason for r in (*first, *second) if r.skipped), case
        # The other optimizer of "only_here" lowers the scale of one rank, until the next common step.
        since = -1 if case == "only_here" else 0
        assert [r.loss_scale for r in first[since:]] == [r.loss_scale for r in second[since:]], case


@pytest.mark.heavy
def test_what_is_not_done_with_several_ranks_is_said(several: Any) -> None:
    folder, ((_, first), (_, quiet)) = several
    assert not quiet  # only rank 0 prints
    notes = ["\n".join(list(read(folder / f"run{rank}.jsonl"))[-1].notes) for rank in range(2)]
    for said in notes:
        assert "no optimizer owns" in said
        assert "not traced" in said
    assert "on rank 1" in notes[1]
    assert "call backward() on every rank" in notes[1]
    assert "call backward() on every rank" not in notes[0]
    for alone in ("no optimizer owns", "on rank 1 an optimizer's step()"):
        assert first.count(alone) == 1  # what both ranks noted, and what rank 1 alone did


@pytest.mark.heavy
def test_rank_0_prints_what_only_rank_1_could_explain(several: Any) -> None:
    first = several[1][0][1]
    (line,) = [line for line in first.splitlines() if "because of rank 1" in line]
    assert "several_ranks.py" in line


@pytest.mark.heavy
def test_all_ranks_skip_a_step_or_none_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "mezzo", "run", "--precision", "fp16", "--watch=1", "script.py", str(tmp_path / "meeting")]
    told = processes(words, tmp_path, seconds=150)
    assert told[0][0] == told[1][0]
    assert "nan" not in told[0][0]
    for name in ("run.jsonl", "run-rank1.jsonl"):
        records = list(read(tmp_path / "mezzo-run" / "runs" / name))
        assert [r.skipped for r in records if isinstance(r, UpdateRecord)] == [False, False, True, False]
        (found,) = [r for r in records if isinstance(r, OverflowRecord)]
        assert (found.update, found.finding.op, found.finding.cause) == (2, "mul", "overflow")
        assert sum(isinstance(r, RangesRecord) for r in records) == 4
    assert (tmp_path / "mezzo-run" / "report.html").exists()


GATHERED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
net = fully_shard(nn.Linear(4, 2), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(3, 4)).float().sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.heavy
def test_parameters_that_are_gathered_in_16_bits_are_the_scripts_own_precision(tmp_path: Path) -> None:
    """Else Mezzo would unscale fp16 gradients in fp16."""
    (tmp_path / "script.py").write_text(GATHERED)
    words = ["-m", "mezzo", "run", "--precision", "fp16", "script.py", str(tmp_path / "meeting")]
    ran = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=150, env=os.environ
    )
    assert ran.returncode == 0, ran.stderr
    assert "left alone: Linear has fully_shard(mp_policy=" in ran.stderr.replace("FSDPLinear", "Linear")
    assert "float16" in ran.stderr
