"""`mezzo run`: its options end where the script begins, what it writes where, and what it refuses."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import pytest

from commands import Command, in_the_folder  # noqa: F401
from mezzo.cli import run as verb
from mezzo.core import records
from mezzo.core.commands import run_command
from mezzo.runner import journal

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"

TRAIN = """
import os, sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
os.chdir("elsewhere")
for step in range(4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.ones(8, 4)), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
print(sys.argv[1:])
sys.exit(3)
"""


@pytest.fixture
def train(tmp_path: Path, command: Command) -> str:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    return "train.py"


def first(path: Path) -> records.RunStarted:
    found = next(iter(records.read(path)))
    assert isinstance(found, records.RunStarted)
    return found


def test_every_option_is_on_the_page_and_the_help_has_the_facts(command: Command) -> None:
    from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY

    parser = argparse.ArgumentParser()
    verb.configure(parser)
    page = PAGE.read_text(encoding="utf-8")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = {option for action in shown for option in action.option_strings} - {"-h", "--help"}
    assert [option for option in options if f"`{option}" not in page] == []
    printed = command("run --help").out
    assert f"default {DEFAULT_EVERY}" in page
    assert f"default {DEFAULT_EVERY}" in printed
    assert "Exit status" in printed


def test_the_summary_is_folded_on_a_terminal_except_for_its_commands(
    train: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = "run --precision fp16,loss_scale=1073741824 train.py"
    piped = command(words).err
    assert all(line.startswith("mezzo: ") for line in piped.splitlines())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = command(words).err
    assert shown.split() == piped.split()
    long = [line.strip() for line in shown.splitlines() if len(line) > 40]
    commands = [line.partition(": mezzo run ")[2] for line in piped.splitlines() if ": mezzo run " in line]
    assert len(commands) == 2
    assert long == [f"mezzo run {command.partition(' (')[0]}" for command in commands]


@pytest.mark.parametrize(
    ("options", "folder", "watched"),
    [
        (["--watch"], "mezzo-run", [0]),
        (["--watch=2"], "mezzo-run", [0, 2]),
        (["--quiet", "--watch", "--precision", "bf16", "--out", "here/run"], "here/run", [0]),
        (["--out=here"], "here", []),
        (["--precision", "fp16", "--watch=3", "--no-trace"], "mezzo-run", [0, 3]),
    ],
)
def test_a_watched_run_leaves_records_and_a_report(
    options: list[str], folder: str, watched: list[int], train: str, tmp_path: Path, command: Command
) -> None:
    # The script's own:
    words = ["--precision", "fp16", "--watch", "7", "--watch=8", "-m", "-h", "--", "--out", "x"]
    ran = command("run", *options, train, *words)
    assert (ran.status, ran.out) == (3, f"{words}\n")
    file = tmp_path / folder / "runs" / "run.jsonl"
    assert [r.update for r in records.read(file) if isinstance(r, records.RangesRecord)] == watched
    page = (tmp_path / folder / "report.html").absolute()
    assert page.stat().st_size > 1000
    quiet = "--quiet" in options
    assert (f"mezzo: report: {page}\n" in ran.err, ran.err.count("\n") == 1) == (not quiet, quiet)
    kept = " ".join(word for word in options if word in ("--quiet", "--no-trace"))
    fixed = f"mezzo run {kept} --precision fp16 --watch=8 --out x train.py -- 7 -m -h --".replace("  ", " ")
    assert fixed in ran.err  # those were meant for Mezzo, as the script does not mention them
    assert first(file).argv == words
    assert not (tmp_path / "elsewhere" / "mezzo-run").exists()


@pytest.mark.parametrize("file", ["mine.toml", "MINE.TOML"])
def test_records_without_a_report_and_a_policy_file(
    file: str, train: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / file).write_text('compute = "bf16"\n')
    assert command(f"run --quiet --watch --policy {file} --records r.jsonl {train}").status == 3
    started, *_, ended = records.read(tmp_path / "r.jsonl")
    assert (started.policy, started.script, ended.status) == ("bf16", "train.py", 3)
    assert not (tmp_path / "mezzo-run").exists()


@pytest.mark.parametrize(("mentioned", "told"), [("", True), ("# --precision", False)])
def test_an_option_that_the_script_does_not_know_is_told(
    mentioned: str, told: bool, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "t.py").write_text(f"import sys; print(sys.argv[1:]) {mentioned}")
    ran = command("run --quiet t.py --precision bf16 --lr 1")
    assert (ran.status, ran.out) == (0, "['--precision', 'bf16', '--lr', '1']\n")
    assert ("mezzo run --quiet --precision bf16 t.py --lr 1\n" in ran.err) == (ran.err != "") == told


# Words after `mezzo run --quiet`; the words that are offered instead; the options that these leave out.
MISPLACED: list[tuple[str, str, str]] = [
    ("--precision bf16 t.py --precision bf16", "--precision bf16 t.py", ""),
    ("--precision bf16 t.py --lr 1 --precision fp16", "--precision fp16 t.py --lr 1", "`--precision bf16`"),
    ("--policy=bf16 t.py --precision fp16", "--precision fp16 t.py", "`--policy=bf16`"),
    ("t.py --precision bf16 --precision fp16", "--precision fp16 t.py", "`--precision bf16`"),
    ("t.py -- --watch --watch=8", "--watch=8 t.py", "`--watch`"),
    ("t.py y --no-trace -- x", "--no-trace t.py -- y -- x", ""),
    ("--masters split t.py --precision bf16", "--precision bf16 t.py", "`--masters split`"),
    ("--own off --watch t.py --masters split", "--masters split t.py", "`--own off` and `--watch`"),
    ("--out a t.py --records b", "--records b t.py", "`--out a`"),
    ("t.py --precision", "", ""),  # lacks its value
    ("t.py --precision --lr 1", "", ""),
    ("t.py -c config.yaml -m x", "", ""),  # any script may have these
]


@pytest.mark.parametrize(("words", "offered", "left_out"), MISPLACED)
def test_the_command_that_is_offered_works_and_has_each_option_once(
    words: str, offered: str, left_out: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "t.py").write_text("import sys; print(sys.argv[1:])")
    ran = command(f"run --quiet {words}")
    assert ran.status == 0
    if not offered:
        assert "To give it to Mezzo" not in ran.err
        return
    without = f", without {left_out}" if left_out else ""
    assert f"To give it to Mezzo{without}: mezzo run --quiet {offered}\n" in ran.err
    ran = command(f"run --quiet {offered}")
    assert (ran.status, ran.out) == (
        0,
        f"{offered.replace(' -- ', ' ', 1).partition('t.py')[2].split()}\n",
    )
    assert "To give it to Mezzo" not in ran.err


def test_code_has_records_and_its_command_can_be_pasted(tmp_path: Path, command: Command) -> None:
    (tmp_path / "elsewhere").mkdir()
    ran = command("run --quiet --records r.jsonl -c", TRAIN, "--precision", "bf16")
    assert ran.status == 3
    assert first(tmp_path / "r.jsonl").script == "-c"
    assert ran.err.count("mezzo run --quiet --records r.jsonl --precision bf16 -c '\nimport os") == 1
    pasted = run_command({"target": "-c", "source": "1 + 1", "argv": ["x"]}, "--precision", "fp16")
    assert pasted == "mezzo run --precision fp16 -c '1 + 1' x"


def test_commands_offered_under_torchrun_begin_with_torchrun(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a script that calls `init_process_group()` lacks its rank."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torchrun = "torchrun --standalone --nproc-per-node 2 --no-python mezzo run"
    (tmp_path / "t.py").write_text("import torch\nwith torch.autocast('cpu', torch.bfloat16): pass")
    for words, offered in (
        ("--precision fp16 t.py", "--own off --precision fp16 t.py"),
        ("--quiet t.py --no-trace", "--quiet --no-trace t.py"),
    ):
        ran = command(f"run {words}")
        assert ran.status == 0
        assert f": {torchrun} {offered}\n" in ran.err


def test_a_keras_script_gets_the_way_for_keras(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    (tmp_path / "t.py").write_text("import keras")
    ran = command("run --precision fp16 t.py")
    assert ran.status == 0
    assert "mezzo.keras.set_policy('fp16')" in ran.err
    assert "mezzo compare --framework keras --precision fp16 t.py" in ran.err
    assert "backward" not in ran.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--watch=0"], "'0'"),
        (["--watch", "5"], "--watch=5"),
        (["--presicion", "bf16"], "Did you mean --precision? Every option"),
        (["--records", "."], "can't write records to '.'"),
        (["--policy", "absent.toml"], "TOML file"),
        (["-m", "absent.module"], "dotted name of a module"),
        (["--out", "full"], "comparison.json"),
        (["--out", "train.py"], "is a file"),
        (["nowhere.py"], "no script 'nowhere.py'"),
        (["elsewhere"], "__main__.py"),
        (["book.ipynb"], "jupyter nbconvert --to script book.ipynb"),
        (["-m", "-c"], "not allowed with argument -m"),
        (["--policy", "train.py"], "'train.py'. Use one of"),
        (["--tensorboard=train.py"], "/train.py: is a file"),
        (["--precision", "bf16,module.haed=fp32"], "haed"),  # found in the script's first call of its model
    ],
)
def test_refusals(options: list[str], why: str, train: str, tmp_path: Path, command: Command) -> None:
    if "--tensorboard" in options[0]:
        pytest.importorskip("tensorboard")
    (tmp_path / "full").mkdir()
    (tmp_path / "book.ipynb").write_text("{}")
    (tmp_path / "full" / "comparison.json").write_text("{}")
    ran = command("run", *options, train)
    assert why in ran.err.replace("\n", " ")
    assert (ran.status, ran.out, "Traceback" in ran.err) == (2, "", False)
    assert (tmp_path / "train.py").read_text() == TRAIN


def test_each_process_of_torchrun_has_records_of_its_own(
    train: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    ran = command(f"run --watch --precision bf16,op.sigmoid=lower --tensorboard events {train}")
    assert (ran.status, ran.err) == (3, "")
    assert [p.name for p in (tmp_path / "mezzo-run").rglob("*.*")] == ["run-rank1.jsonl"]
    assert not (tmp_path / "events").exists()


def test_records_go_to_tensorboard_too(train: str, tmp_path: Path, command: Command) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command(f"run --quiet --watch=3 --precision fp16 --tensorboard events --out here {train}")
    losses = [r.loss for r in records.read(tmp_path / "here" / "runs" / "run.jsonl") if r.kind == "loss"]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == [pytest.approx(loss) for loss in losses]
    assert [e.value for e in events.Scalars("loss_scale")] == [65536.0] * 4
    assert any("activation" in tag for tag in events.Tags()["histograms"])


def test_tensorboard_is_missed_before_the_script_runs(
    train: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, journal.WRITER, None)
    ran = command(f"run --tensorboard=events --out here {train}")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.endswith("Install it: pip install tensorboard\n")
    assert not (tmp_path / "here").exists()


def test_watched_runs_never_overwrite_one_another(train: str, tmp_path: Path, command: Command) -> None:
    for policy, folder in (("bf16", "mezzo-run"), ("fp32", "mezzo-run-2"), ("fp16", "mezzo-run-3")):
        said = command(f"run --watch --precision {policy} {train}").err
        assert first(tmp_path / folder / "runs" / "run.jsonl").policy == policy
        assert f"mezzo: report: {tmp_path / folder / 'report.html'}\n" in said
        assert (f"this run is in {folder}\n" in said) == (folder != "mezzo-run")


def test_processes_of_one_run_share_a_folder_and_leave_each_other_s_records(
    train: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "mezzo-run" / "runs"
    runs.mkdir(parents=True)
    for name in ("run-rank1.jsonl", "run-rank2.jsonl"):  # the last one of an earlier run, on more processes
        (runs / name).write_text("")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert command(f"run --quiet --watch {train}").status == 3
    assert {path.name for path in runs.iterdir()} == {"run.jsonl", "run-rank1.jsonl"}


def test_a_run_that_is_replaced_is_named_and_leaves_nothing(
    train: str, tmp_path: Path, command: Command
) -> None:
    here = tmp_path / "here"
    for already in (False, True):
        said = command(f"run --out here {train}").err
        assert (f"mezzo: this run replaces the one in {here}" in said) == already
        (here / "runs" / "run-rank1.jsonl").write_text("of a run on two processes")
    assert command(f"run --quiet --out here {train}").status == 3
    assert [p.name for p in (here / "runs").iterdir()] == ["run.jsonl"]
    before = {p: p.read_bytes() for p in here.rglob("*.*")}
    for wrong in ("--precision bf17 train.py", "nowhere.py"):  # what can't run replaces nothing
        assert command(f"run --out here {wrong}").status == 2
        assert {p: p.read_bytes() for p in here.rglob("*.*")} == before


def test_a_report_that_cannot_be_made_leaves_the_script_its_status(
    train: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device", str(folder / "report.html"))

    monkeypatch.setattr("mezzo.report.build_run", full)
    ran = command(f"run --out here {train}")
    assert ran.status == 3
    assert "No space left on device" in ran.err
    assert f"mezzo report {tmp_path / 'here'}\n" in ran.err
