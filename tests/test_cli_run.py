"""`mezzo run`: its options end where the script begins, what it writes where, and what it refuses."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import pytest

from mezzo.cli import run as verb
from mezzo.cli.main import main
from mezzo.core import records
from mezzo.core.commands import run_command
from mezzo.runner import journal

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
Output = pytest.CaptureFixture[str]

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
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def first(path: Path) -> records.RunStarted:
    found = next(iter(records.read(path)))
    assert isinstance(found, records.RunStarted)
    return found


def test_a_pattern_that_matches_no_module_is_wrong_usage(tmp_path: Path, capsys: Output) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\nmodel(torch.ones(1, 2))\nprint('on')\n"
    )
    assert main(["run", "--precision", "bf16,module.haed=fp32", str(script)]) == 2
    captured = capsys.readouterr()
    assert "haed" in captured.err
    assert ("Traceback" in captured.err, captured.out) == (False, "")
    assert main(["run", "--precision", "bf16,module.0=fp32", str(script)]) == 0


def test_every_option_is_on_the_page_and_the_help_has_the_facts(capsys: Output) -> None:
    from mezzo.pytorch.monitor.ranges import DEFAULT_EVERY

    parser = argparse.ArgumentParser()
    verb.configure(parser)
    page = PAGE.read_text(encoding="utf-8")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = {option for action in shown for option in action.option_strings} - {"-h", "--help"}
    assert [option for option in options if f"`{option}" not in page] == []
    assert f"default {DEFAULT_EVERY}" in page
    assert main(["run", "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"default {DEFAULT_EVERY}" in printed
    assert "Exit status" in printed


def test_the_summary_is_folded_on_a_terminal_except_for_its_commands(
    train: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    here, words = Path.cwd(), ["run", "--precision", "fp16,loss_scale=1073741824", train]
    assert main(words) == 3
    piped = capsys.readouterr().err
    assert all(line.startswith("mezzo: ") for line in piped.splitlines())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.chdir(here)  # the script changes it
    assert main(words) == 3
    shown = capsys.readouterr().err
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
    options: list[str], folder: str, watched: list[int], train: str, tmp_path: Path, capsys: Output
) -> None:
    # The script's own:
    words = ["--precision", "fp16", "--watch", "7", "--watch=8", "-m", "-h", "--", "--out", "x"]
    assert main(["run", *options, train, *words]) == 3
    captured = capsys.readouterr()
    assert captured.out == f"{words}\n"
    file = tmp_path / folder / "runs" / "run.jsonl"
    assert [r.update for r in records.read(file) if isinstance(r, records.RangesRecord)] == watched
    page = (tmp_path / folder / "report.html").absolute()
    assert page.stat().st_size > 1000
    quiet = "--quiet" in options
    assert (f"mezzo: report: {page}\n" in captured.err, captured.err.count("\n") == 1) == (not quiet, quiet)
    kept = " ".join(word for word in options if word in ("--quiet", "--no-trace"))
    fixed = f"mezzo run {kept} --precision fp16 --watch=8 --out x train.py -- 7 -m -h --".replace("  ", " ")
    assert fixed in captured.err  # those were meant for Mezzo, as the script does not mention them
    assert first(file).argv == words
    assert not (tmp_path / "elsewhere" / "mezzo-run").exists()


@pytest.mark.parametrize("file", ["mine.toml", "MINE.TOML"])
def test_records_without_a_report_and_a_policy_file(file: str, train: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text('compute = "bf16"\n')
    assert main(["run", "--quiet", "--watch", "--policy", file, "--records", "r.jsonl", train]) == 3
    started, *_, ended = records.read(tmp_path / "r.jsonl")
    assert isinstance(started, records.RunStarted)
    assert isinstance(ended, records.RunEnded)
    assert (started.policy, started.script, ended.status) == ("bf16", "train.py", 3)
    assert not (tmp_path / "mezzo-run").exists()


@pytest.mark.parametrize(("mentioned", "told"), [("", True), ("# --precision", False)])
def test_an_option_that_the_script_does_not_know_is_told(
    mentioned: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(f"import sys; print(sys.argv[1:]) {mentioned}")
    assert main(["run", "--quiet", "t.py", "--precision", "bf16", "--lr", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "['--precision', 'bf16', '--lr', '1']\n"
    assert (
        ("mezzo run --quiet --precision bf16 t.py --lr 1\n" in captured.err) == (captured.err != "") == told
    )


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
    words: str,
    offered: str,
    left_out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("import sys; print(sys.argv[1:])")
    assert main(["run", "--quiet", *words.split()]) == 0
    said = capsys.readouterr().err
    if not offered:
        assert "To give it to Mezzo" not in said
        return
    without = f", without {left_out}" if left_out else ""
    assert f"To give it to Mezzo{without}: mezzo run --quiet {offered}\n" in said
    assert main(["run", "--quiet", *offered.split()]) == 0
    out, said = capsys.readouterr()
    assert out == f"{offered.replace(' -- ', ' ', 1).partition('t.py')[2].split()}\n"
    assert "To give it to Mezzo" not in said


def test_code_has_records_and_its_command_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    assert main(["run", "--quiet", "--records", "r.jsonl", "-c", TRAIN, "--precision", "bf16"]) == 3
    assert first(tmp_path / "r.jsonl").script == "-c"
    assert (
        capsys.readouterr().err.count("mezzo run --quiet --records r.jsonl --precision bf16 -c '\nimport os")
        == 1
    )
    command = run_command({"target": "-c", "source": "1 + 1", "argv": ["x"]}, "--precision", "fp16")
    assert command == "mezzo run --precision fp16 -c '1 + 1' x"


def test_commands_offered_under_torchrun_begin_with_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Without it a script that calls `init_process_group()` lacks its rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torchrun = "torchrun --standalone --nproc-per-node 2 --no-python mezzo run"
    Path("t.py").write_text("import torch\nwith torch.autocast('cpu', torch.bfloat16): pass")
    assert main(["run", "--precision", "fp16", "t.py"]) == 0
    assert f": {torchrun} --own off --precision fp16 t.py\n" in capsys.readouterr().err
    assert main(["run", "--quiet", "t.py", "--no-trace"]) == 0
    assert f": {torchrun} --quiet --no-trace t.py\n" in capsys.readouterr().err


def test_a_keras_script_gets_the_way_for_keras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    Path("t.py").write_text("import keras")
    assert main(["run", "--precision", "fp16", "t.py"]) == 0
    said = capsys.readouterr().err
    assert "mezzo.keras.set_policy('fp16')" in said
    assert "mezzo compare --framework keras --precision fp16 t.py" in said
    assert "backward" not in said


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
    ],
)
def test_refusals(options: list[str], why: str, train: str, tmp_path: Path, capsys: Output) -> None:
    if "--tensorboard" in options[0]:
        pytest.importorskip("tensorboard")
    (tmp_path / "full").mkdir()
    (tmp_path / "book.ipynb").write_text("{}")
    (tmp_path / "full" / "comparison.json").write_text("{}")
    assert main(["run", *options, train]) == 2
    captured = capsys.readouterr()
    assert why in captured.err.replace("\n", " ")
    assert (captured.out, "Traceback" in captured.err) == ("", False)
    assert (tmp_path / "train.py").read_text() == TRAIN


def test_each_process_of_torchrun_has_records_of_its_own(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert (
        main(["run", "--watch", "--precision", "bf16,op.sigmoid=lower", "--tensorboard", "events", train])
        == 3
    )
    assert [p.name for p in (tmp_path / "mezzo-run").rglob("*.*")] == ["run-rank1.jsonl"]
    assert not (tmp_path / "events").exists()
    assert capsys.readouterr().err == ""


def test_records_go_to_tensorboard_too(train: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["run", "--quiet", "--watch=3", "--precision", "fp16", "--tensorboard", "events", "--out", "here"]
    assert main([*words, train]) == 3
    losses = [r.loss for r in records.read(tmp_path / "here" / "runs" / "run.jsonl") if r.kind == "loss"]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == [pytest.approx(loss) for loss in losses]
    assert [e.value for e in events.Scalars("loss_scale")] == [65536.0] * 4
    assert any("activation" in tag for tag in events.Tags()["histograms"])


def test_tensorboard_is_missed_before_the_script_runs(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, journal.WRITER, None)
    assert main(["run", "--tensorboard=events", "--out", "here", train]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("Install it: pip install tensorboard\n")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert not (tmp_path / "here").exists()


def test_watched_runs_never_overwrite_one_another(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    for policy, folder in (("bf16", "mezzo-run"), ("fp32", "mezzo-run-2"), ("fp16", "mezzo-run-3")):
        monkeypatch.chdir(tmp_path)  # the script has left it
        assert main(["run", "--watch", "--precision", policy, train]) == 3
        assert first(tmp_path / folder / "runs" / "run.jsonl").policy == policy
        said = capsys.readouterr().err
        assert f"mezzo: report: {tmp_path / folder / 'report.html'}\n" in said
        assert (f"this run is in {folder}\n" in said) == (folder != "mezzo-run")


def test_processes_of_one_run_share_a_folder_and_leave_each_other_s_records(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "mezzo-run" / "runs"
    runs.mkdir(parents=True)
    for name in ("run-rank1.jsonl", "run-rank2.jsonl"):  # the last one of an earlier run, on more processes
        (runs / name).write_text("")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["run", "--quiet", "--watch", train]) == 3
    assert {path.name for path in runs.iterdir()} == {"run.jsonl", "run-rank1.jsonl"}


def test_a_run_that_is_replaced_is_named_and_leaves_nothing(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    said = f"mezzo: this run replaces the one in {tmp_path / 'here'}"
    for already in (False, True):
        monkeypatch.chdir(tmp_path)
        assert main(["run", "--out", "here", train]) == 3
        assert (said in capsys.readouterr().err) == already
        (tmp_path / "here" / "runs" / "run-rank1.jsonl").write_text("of a run on two processes")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--quiet", "--out", "here", train]) == 3
    assert [p.name for p in (tmp_path / "here" / "runs").iterdir()] == ["run.jsonl"]
    before = {p: p.read_bytes() for p in (tmp_path / "here").rglob("*.*")}
    for wrong in (["--precision", "bf17", "train.py"], ["nowhere.py"]):  # what can't run replaces nothing
        monkeypatch.chdir(tmp_path)
        assert main(["run", "--out", "here", *wrong]) == 2
        assert {p: p.read_bytes() for p in (tmp_path / "here").rglob("*.*")} == before


def test_a_report_that_cannot_be_made_leaves_the_script_its_status(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device", str(folder / "report.html"))

    monkeypatch.setattr("mezzo.report.build_run", full)
    assert main(["run", "--out", "here", train]) == 3
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert f"mezzo report {tmp_path / 'here'}\n" in said


@pytest.mark.parametrize("others", [["--precision", "bf16"], ["--own", "off"]])
def test_masters_keep_the_precision_of_the_script(
    others: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.py").write_text("print('ran')")
    assert main(["run", "--masters", "split", *others, str(tmp_path / "t.py")]) == 2
    out, err = capsys.readouterr()
    assert "ran" not in out
    assert "--own off --precision bf16,masters=split" in err
    assert main(["run", "--masters", "split", "--watch", str(tmp_path / "t.py")]) == 2
    assert f": mezzo run --masters split {tmp_path / 't.py'}\n" in capsys.readouterr().err
