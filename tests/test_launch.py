"""Scripts under `mezzo run` that start other processes, which train: by mp.spawn, subprocess and launchers.

A script that only starts processes runs in this one, which spares an import of PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from mezzo.cli.main import main
from mezzo.core.records import OverflowRecord, RangesRecord, UpdateRecord, read
from mezzo.pytorch.hardware import ASSUME_NATIVE

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]

# A model, the training of one rank, or of a process by itself, and the end of a rank, which leaves no thread of gloo:
# one that waits for the GIL when Python ends would abort the process.
TRAIN = """
import gc, os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.gain = nn.Linear(4, 8), nn.Linear(8, 2), 1.0

    def forward(self, x):
        x = self.one(x)
        x = x.mul(self.gain)
        self.seen = x.dtype
        return self.two(x)

def leave():
    gc.collect()  # a DistributedDataParallel is part of a reference cycle
    dist.destroy_process_group()
    deadline = time.monotonic() + 10  # Linux lists a joined thread a moment longer
    while "gloo" in (names := " ".join(threads())):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)

def threads():
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                yield file.read()
        except OSError:  # it has ended since
            pass

def train(rank, plant=(), wrap=nn.parallel.DistributedDataParallel, steps=4):
    torch.manual_seed(0)
    net = Net()
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 2, (16,), generator=generator)
    for step in range(steps):
        net.gain = 1e6 if (step, rank) == plant else 1.0
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    say(rank, net.seen, sum(p.double().sum() for p in model.parameters()).item().hex())
    net.rank = rank
    return net
"""

SPAWN = """
import sys
from train import dist, leave, mp, train

def work(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    train(rank, plant=(2, 1))
    leave()

if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


Ran = subprocess.CompletedProcess[str]
TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
SLOWLY = *TORCHRUN, "--monitor-interval", "2"  # torchrun ends the other ranks: not before they have said why


def environment() -> dict[str, str]:
    whole_lines = {"PYTHONUNBUFFERED": ""}  # the processes share their output
    return {**os.environ, **whole_lines, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def mezzo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """A `mezzo` command in this process, in the test's folder; its output includes that of its children."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def call(*words: str) -> Ran:
        capfd.readouterr()
        return Ran(words, main(list(words)), *capfd.readouterr())

    return call


def process(*words: str, at: Path) -> Ran:
    """The command `python -m WORDS` in a process of its own."""
    command, texts = [sys.executable, "-m", *words], {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=at, env=environment(), timeout=280, **texts)


def script(folder: Path, name: str, source: str) -> Path:
    (folder / "train.py").write_text(dedent(TRAIN))
    (folder / name).write_text(dedent(source))
    return folder / name


def ranks(folder: Path, source: str, precision: str, *argv: str, by: tuple[str, ...] = TORCHRUN) -> Ran:
    """`mezzo run -m` of a launcher that starts a script on two ranks."""
    words = "mezzo", "run", "--precision", precision, "-m", *by, script(folder, "rank.py", source).name, *argv
    return process(*words, at=folder)


def updates(file: Path) -> list[bool]:
    """Whether each update of a run was skipped; the run must have ended well."""
    records = list(read(file))
    assert (records[0].kind, records[-1].kind, records[-1].status) == ("run", "end", 0)
    return [record.skipped for record in records if isinstance(record, UpdateRecord)]


@pytest.mark.parametrize("how", ["spawn", pytest.param("fork", marks=pytest.mark.nightly)])
def test_spawned_ranks_skip_together_and_rank_0_tells(
    how: str, mezzo: Callable[..., Ran], tmp_path: Path
) -> None:
    script(tmp_path, "spawn.py", SPAWN)
    words = "--precision", "fp16", "--watch=1", "--out", "out", "spawn.py"
    if how == "spawn":
        ran = mezzo("run", *words, str(tmp_path / "meeting"), how)
    else:  # not from this process, which has threads
        ran = process("mezzo", "run", *words, str(tmp_path / "meeting"), how, at=tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in sorted(ran.stdout.splitlines())]
    assert [line[:2] for line in lines] == [["0", "torch.float16"], ["1", "torch.float16"]]
    assert lines[0][2] == lines[1][2]
    assert "nan" not in lines[0][2]
    assert ran.stderr.count("mezzo: policy fp16") == 1
    assert "2 ranks" in ran.stderr
    assert ran.stderr.count("update 2 skipped: ") == 1  # at once
    assert ran.stderr.count("update 2 skipped, because of rank 1") == 1
    assert "no model was called" not in ran.stderr
    runs = tmp_path / "out" / "runs"
    assert sorted(file.name for file in runs.iterdir()) == ["run-rank1.jsonl", "run.jsonl"]
    for file in runs.iterdir():
        assert updates(file) == [False, False, True, False]
        (found,) = [record for record in read(file) if isinstance(record, OverflowRecord)]
        assert (found.update, found.finding.op, found.finding.cause) == (2, "mul", "overflow")
        assert sum(isinstance(record, RangesRecord) for record in read(file)) == 4
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "run-rank1" in page


STARTER = """
import os, subprocess, sys
utility = "import sys, torch; print('utility', torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype)"
running = [
    subprocess.Popen([sys.executable, "alone.py"], env={**os.environ, "PYTHONPATH": "elsewhere"}),
    subprocess.Popen([sys.executable, "-c", utility]),
    subprocess.Popen([sys.executable, "-c", "import sys; print('cheap', 'mezzo' in sys.modules)"]),
]
sys.exit(sum(one.wait() for one in running))
"""

ALONE = """
from train import nn, torch, train

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.full((1,), float(i))

if __name__ == "__main__":
    for how in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=how)
        assert [float(x) for x in loader] == [0.0, 1.0]
    train(0, wrap=nn.Sequential)
"""


def test_a_subprocess_trains_under_the_policy_and_helpers_are_left_alone(
    mezzo: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZZO_TEST_FORK", "0")  # the start of Python is what this looks at
    script(tmp_path, "alone.py", ALONE)
    script(tmp_path, "starter.py", STARTER)
    ran = mezzo("run", "--precision", "bf16", "--records", "r.jsonl", "starter.py")
    assert ran.returncode == 0, ran.stderr
    told = sorted(ran.stdout.splitlines())
    assert told[0].startswith("0 torch.bfloat16")
    assert told[1:] == ["cheap False", "utility torch.float32"]
    assert ran.stderr.count("mezzo: policy") == ran.stderr.count("mezzo: policy bf16\n") == 1
    assert "no model was called" not in ran.stderr
    assert [file.name for file in tmp_path.glob("*.jsonl")] == ["r.jsonl"]
    assert updates(tmp_path / "r.jsonl") == [False] * 4


def test_a_mistake_that_a_subprocess_finds_ends_the_run(mezzo: Callable[..., Ran], tmp_path: Path) -> None:
    script(tmp_path, "alone.py", "from train import nn, train\ntrain(0, wrap=nn.Sequential)\n")
    start = "import subprocess, sys\nsubprocess.run([sys.executable, 'alone.py'], check=True)\n"
    script(tmp_path, "starter.py", start)
    ran = mezzo("run", "--precision", "bf16,module.haed=fp32", "starter.py")
    assert ran.returncode == 2
    assert all("haed" in line for line in ran.stderr.splitlines())
    assert ran.stdout == ""


RANK = """
import os, sys
from train import dist, leave, train
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1 and sys.argv[1:] == ["fail"]:
    raise ValueError("planted on rank 1")
train(rank)
leave()
"""
ACCELERATE = "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"
ACCELERATE += "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"

# The first rank finds bf16 twice as fast as FP32, the other twice as slow.
TIMED = """
from mezzo.pytorch.auto import TimedTrial
from train import Net, dist, leave, say, train
dist.init_process_group("gloo")
rank, now, formats = dist.get_rank(), 0.0, ""

def tick(trial):
    global now
    now += 1.0 if (trial.precision == "bf16") == (rank == 0) else 2.0
    return now

class Noted(Net):
    def forward(self, x):
        global formats
        result = super().forward(x)
        formats += str(self.seen)[6]
        return result

TimedTrial._now = tick
train.__globals__["Net"] = Noted
train(rank, steps=24)
say("formats", formats)
leave()
"""


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun"),
        pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.nightly),
    ],
)
def test_a_launcher_as_the_module_and_one_decision_of_auto(
    launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(launcher[0].partition(".")[0])
    monkeypatch.setenv(ASSUME_NATIVE, "bf16")
    ran = ranks(tmp_path, TIMED, "auto", by=launcher)
    assert ran.returncode == 0, ran.stderr
    one, other = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("formats")]
    assert one == other
    assert sorted(one[:20]) == ["b"] * 10 + ["f"] * 10
    assert one[20:] == "bbbb"
    assert ran.stderr.count("mezzo: policy bf16; auto chose bf16") == 1
    assert "2 ranks" in ran.stderr
    assert not list(tmp_path.glob("*.jsonl"))


GROUPS = """
import gc, os, sys
from train import dist, nn, say, torch

def once():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    grad = model.module.weight.grad
    assert grad.equal(grad.bfloat16().float()), grad  # the sum of two halves, in bf16 as reduce=bf16 says
    dist.destroy_process_group()  # the model holds the group, and frees it with the GIL

for number in range(20):
    meeting = f"file://{sys.argv[1]}{number}"
    dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
    once()
    gc.collect()
say("ended")
"""


def test_groups_that_end_do_not_wait_for_threads_that_wait_for_them(tmp_path: Path) -> None:
    ran = ranks(tmp_path, GROUPS, "bf16,reduce=bf16", str(tmp_path / "meeting"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["ended"] * 2


def test_the_summary_of_a_launcher_names_the_comparison_of_its_script(tmp_path: Path) -> None:
    ran = ranks(tmp_path, RANK, "fp16", "--epochs", "3")
    assert ran.stderr.endswith(": mezzo compare rank.py --precision fp16 --nproc 2 -- --epochs 3\n"), (
        ran.stderr
    )


def test_the_summary_of_a_launcher_tells_of_ranks_that_were_left_alone(tmp_path: Path) -> None:
    """Neither losses nor updates are counted there."""
    own = "from torch import autocast, bfloat16\nautocast('cpu', bfloat16).__enter__()\ntrain(rank)\n"
    ran = ranks(tmp_path, RANK.replace("train(rank)\n", own), "bf16")
    assert ran.returncode == 0, ran.stderr
    first, second, *_ = [line for line in ran.stderr.splitlines() if line.startswith("mezzo: ")]
    assert first.startswith("mezzo: left alone: it uses torch.autocast")
    assert "bf16 was not applied" in second
    assert ran.stderr.count("left alone: ") == 1


def test_a_rank_that_raises_ends_the_others_with_its_message(tmp_path: Path) -> None:
    ran = ranks(tmp_path, RANK, "fp16", "fail", by=SLOWLY)
    assert ran.returncode == 1
    assert "ValueError: planted on rank 1" in ran.stderr
    assert (
        "RuntimeError: this rank cannot continue without the others: rank 1 raised ValueError" in ran.stderr
    )
    assert ran.stdout == ""


def test_ranks_with_different_policies_end_with_one_sentence_each(tmp_path: Path) -> None:
    script(tmp_path, "rank.py", RANK)
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "mezzo", "run", "--precision", policy, "rank.py"],
            cwd=tmp_path,
            env={**environment(), **together, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, policy in enumerate(("fp16", "bf16"))
    ]
    for one in running:
        _, told = one.communicate(timeout=200)
        assert one.returncode == 2
        (sentence,) = [line for line in told.splitlines() if line.startswith("mezzo run: ")]
        assert "rank 0 has `--precision fp16`, rank 1 has `--precision bf16`" in sentence
        assert "Traceback" not in told


GATHERED = """
from train import dist, leave, torch, train
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
dist.init_process_group("gloo")
low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
train(dist.get_rank(), wrap=lambda net: fully_shard(net, mp_policy=low))
leave()
"""


def test_a_mistake_of_every_rank_is_told_once(tmp_path: Path) -> None:
    """Previously once for each rank."""
    script(tmp_path, "rank.py", GATHERED)
    command = "mezzo", "run", "--precision", "bf16", "--own", "off", "rank.py"
    ran = process(*TORCHRUN, "--no-python", sys.executable, "-m", *command, at=tmp_path)
    assert ran.returncode == 1
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("mezzo run: ")]
    assert "mp_policy" in said


WITHOUT = """
from train import dist, leave, nn, torch
from mezzo.pytorch.run import ranks
ranks.SECONDS_FOR_GRADIENTS = 3
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(3):
    optimizer.zero_grad()
    lacks = (step, dist.get_rank()) == (1, 1)
    loss = model(torch.ones(2, 4)).sum()
    if not lacks:
        loss.backward()
    optimizer.step()
    del loss
print("ended")
del model, optimizer
leave()
"""


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_a_rank_without_gradients_ends_all(precision: str, tmp_path: Path) -> None:
    """Previously the others waited for it until the timeout of the process group."""
    ran = ranks(tmp_path, WITHOUT, precision, by=SLOWLY)
    assert ran.returncode != 0
    assert "ended" not in ran.stdout
    said = [line for line in ran.stderr.splitlines() if line.startswith("mezzo run: ")]
    assert any("rank 1" in line and "0.0 * model(" in line for line in said), ran.stderr
    assert "without the others: rank 1 raised UsageError: on rank 1 an optimizer's step()" in ran.stderr


def test_rank_0_names_the_rank_without_gradients_before_its_own_patience_ends(tmp_path: Path) -> None:
    """Where each rank has a run of its own, whose process group waits for 12 seconds instead of 30 minutes."""
    group = 'dist.init_process_group("gloo", timeout=timedelta(seconds=12))'
    source = WITHOUT.replace('dist.init_process_group("gloo")', group).replace(
        "GRADIENTS = 3", "GRADIENTS = 300"
    )
    named = script(tmp_path, "rank.py", "from datetime import timedelta\n" + source).name
    ran = process(*SLOWLY, "-m", "mezzo", "run", "--precision", "bf16", named, at=tmp_path)
    assert "without the others: rank 1 raised UsageError: on rank 1 an optimizer's step()" in ran.stderr
    assert "within 6 seconds" in ran.stderr


LASTING = """
import os, subprocess, sys, time

def lasting(*_):
    from train import nn, train
    while True:
        train(0, wrap=nn.Sequential)
        open(f"{os.getpid()}.pid", "w").close()
        time.sleep(0.1)

if __name__ == "__main__":
    if sys.argv[1] == "child":
        lasting()
    elif sys.argv[1] == "spawn":  # whose processes end with this one
        from torch import multiprocessing
        multiprocessing.spawn(lasting)
    else:
        subprocess.Popen([sys.executable, __file__, "child"])
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "status", "how"),
    [
        (signal.SIGTERM, -signal.SIGTERM, "subprocess"),
        (signal.SIGTERM, -signal.SIGTERM, "spawn"),
        pytest.param(signal.SIGINT, 130, "subprocess", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_the_first_process_ends_all(
    number: signal.Signals, status: int, how: str, tmp_path: Path
) -> None:
    words = ["run", "--precision", "bf16", str(script(tmp_path, "lasting.py", LASTING))]
    first = subprocess.Popen(
        [sys.executable, "-m", "mezzo", *words, how],
        cwd=tmp_path,
        env={**environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert wait_for(lambda: any(tmp_path.glob("*.pid")), 120)
    child = int(next(tmp_path.glob("*.pid")).stem)
    first.send_signal(number)  # to this process alone
    try:
        assert first.wait(60) == status
        assert wait_for(lambda: not running(child), 60)
        assert not list(tmp_path.glob("mezzo-run-*"))
    finally:
        for pid in (child, first.pid):
            if running(pid):
                os.kill(pid, signal.SIGKILL)


def wait_for(fact: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (holds := fact()) and time.monotonic() < end:
        time.sleep(0.2)
    return holds


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


LIGHTNING = """
import logging, warnings
import lightning as L
from train import Net, leave, nn, say, torch
warnings.simplefilter("ignore")

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)

def main():
    L.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    off = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **off)
    model = Lit()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    total = sum(p.double().sum() for p in model.parameters()).item().hex()
    say("rank", trainer.global_rank, model.net.seen, total)

if __name__ == "__main__":
    main()
    leave()
"""


@pytest.mark.nightly
def test_lightning_starts_the_second_rank_itself(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script(tmp_path, "lit.py", LIGHTNING)
    ran = process("mezzo", "run", "--precision", "fp16", "--out", "out", "lit.py", at=tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = sorted(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("rank "))
    assert [line[:2] for line in lines] == [["0", "torch.float16"], ["1", "torch.float16"]]
    assert lines[0][2] == lines[1][2]
    assert ran.stderr.count("mezzo: policy fp16") == 1
    runs = tmp_path / "out" / "runs"
    assert updates(runs / "run.jsonl") == updates(runs / "run-rank1.jsonl") == [False] * 4


TRAINER = """
import sys
from train import Net, leave, nn, say, torch
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = Net(), 0

    def forward(self, x, labels):
        rank = torch.distributed.get_rank()
        self.net.gain = 1e6 if (self.calls, rank) == (1, 1) and self.training else 1.0
        self.calls += self.training
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "labels": i % 2}

def main():
    resume, steps = sys.argv[1] == "resume", 3 if sys.argv[1] == "first" else 6
    settings = {"use_cpu": True, "report_to": [], "save_steps": 3, "logging_steps": 1, "disable_tqdm": True}
    settings |= {"max_steps": steps, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant"}
    torch.manual_seed(0)
    model = Model()
    trainer = Trainer(model=model, args=TrainingArguments("kept", **settings), train_dataset=Data())
    trainer.train(resume_from_checkpoint=resume)
    total = sum(p.double().sum() for p in model.parameters()).item().hex()
    say("rank", trainer.args.process_index, trainer.state.global_step, model.net.seen, total)

main()
leave()
"""


@pytest.mark.nightly
def test_the_trainer_of_transformers_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script(tmp_path, "hf.py", TRAINER)
    run = [*TORCHRUN, "--no-python", sys.executable, "-m", "mezzo", "run", "--precision", "fp16", "hf.py"]
    for part, steps in (("first", "3"), ("resume", "6")):
        ran = process(*run, part, at=tmp_path)
        assert ran.returncode == 0, ran.stderr
        lines = sorted(line.split() for line in ran.stdout.splitlines() if line.startswith("rank "))
        assert [line[1:4] for line in lines] == [[rank, steps, "torch.float16"] for rank in "01"]
        assert lines[0][4] == lines[1][4]
        assert "nan" not in lines[0][4]
        assert "3 updates due, 1 skipped" in ran.stderr
        assert ran.stderr.count("mezzo: policy fp16") == 1
        assert "update 1 skipped, because of rank 1" in ran.stderr


COMPARED = """
import random
from train import dist, leave, say, torch, train
dist.init_process_group("gloo")
drawn = random.random(), *map(int, torch.utils.data.DataLoader(range(6), shuffle=True))
net = train(dist.get_rank())
say("drawn", dist.get_rank(), *drawn)
leave()
if "float16" in str(net.seen) and "b" not in str(net.seen) and net.rank:
    raise ValueError("planted on rank 1")
"""


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_compare_runs_a_script_on_two_ranks(fails: bool, mezzo: Callable[..., Ran], tmp_path: Path) -> None:
    script(tmp_path, "ddp.py", COMPARED)
    precision = "fp16" if fails else "bf16"
    words = ["--nproc", "2", "--seeds", "1", "--precision", precision, "--out", "out", "--json"]
    ran = mezzo("compare", *words, "ddp.py")
    verdict = json.loads(ran.stdout)
    logs = {file.name: file.read_text() for file in (tmp_path / "out" / "runs").glob("*.log")}
    assert ran.returncode == fails, (verdict["candidates"], logs)
    assert verdict["request"]["nproc"] == 2
    found = verdict["candidates"][precision]
    assert (found["parity"] == "divergent", found["failed"]) == (fails, fails)
    if fails:  # rank 0 ended well
        assert "ValueError: planted on rank 1" in found["cause"]
    else:
        assert found["steps"] == 4
        assert "torchrun" in found["command"] or "--nproc 2" in found["command"]
    names = {f"{precision}-0", "fp32-0", "fp32-ulp-0"}
    assert {file.stem for file in (tmp_path / "out" / "runs").glob("*.jsonl")} == names
    drawn = {
        tuple(sorted(line for line in logs[f"{name}.log"].splitlines() if line[:5] == "drawn"))
        for name in names
    }
    assert len(drawn) == 1  # the same on each run
    (first, second), *_ = drawn
    assert first.split()[2] != second.split()[2]


@pytest.mark.nightly
def test_killed_ranks_are_restarted_and_end_at_the_same_bits(tmp_path: Path) -> None:
    benchmark = Path(__file__).parents[1] / "benchmarks" / "elastic.py"
    words = ["--kills", "2", "--row", "mezzo run", "--json", str(tmp_path / "elastic.json")]
    command, texts = [sys.executable, str(benchmark), *words], {"capture_output": True, "text": True}
    ran = subprocess.run(command, env=environment(), timeout=400, **texts)
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads((tmp_path / "elastic.json").read_text())["rows"]
    assert (row["kills"], row["same_bits"]) == (2, True)
