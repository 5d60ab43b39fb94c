"""`mezzo tune`: what it writes, prints and returns, with pretended runs; and the real thing on planted layers."""

from __future__ import annotations

import argparse
import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mezzo.cli.tune as verb
from mezzo.cli.main import main
from mezzo.core.policy import policy
from mezzo.core.sensitivity import Sensitivities
from mezzo.core.tuning import tune
from mezzo.verify.tune.table import show
from mezzo.verify.tune.tune import Outcome, tune_script

FAKE = (sys.executable, str(Path(__file__).parent / "children" / "fake_tune.py"))
PLANTED = Path(__file__).parent / "scripts" / "planted.py"
OUT = "mezzo-tune-train"
TUNED = f"{OUT}/policy.toml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which runs are pretended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "tune_script", functools.partial(tune_script, command=FAKE))
    return tmp_path


def unit(path: str, change: float = 1e-4, saves: float = 1e-3, **more: Any) -> dict[str, Any]:
    return {
        "path": path,
        "kind": "Linear",
        "seconds": [[2e-3, 2e-3 - saves]] * 6,
        "roundings": [{"signed": 0.0, "squares": change**2, "absolute": change}],
        **more,
    }


FRAGILE = {"losses": [2.0], "units": [unit("a"), unit("odd", change=0.5)]}
SOUND = {"losses": [2.0], "units": [unit("a")]}
SLOW = {"losses": [2.0], "units": [unit("a", saves=-1e-3)]}


def script(place: Path, sensitivity: dict[str, Any] | None = None, **behaviour: Any) -> str:
    path = place / "train.py"
    path.write_text(json.dumps({**behaviour, **({"sensitivity": sensitivity} if sensitivity else {})}))
    return path.name


def calls(place: Path) -> list[str]:
    return [line.split()[0] for line in (place / "train.calls").read_text().splitlines()]


def test_a_policy_is_found_written_and_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = script(here, FRAGILE)
    words = ["tune", name, "--precision", "fp16", "--budget", "4", "--first", "2", "--", "--epochs", "3"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert str(policy(TUNED)) == "fp16,module.odd=fp32"
    assert "odd: fp32: would change the loss by about 0.5, more than the margin of 0.01" in out
    assert "a: fp16: changes the loss by about 0.0001; saves 1 ms a step" in out
    assert f"Policy: {TUNED}" in out
    assert f"{TUNED} is equivalent." in out
    assert f"Report: {OUT}/comparison/report.html" in out
    assert out.endswith(f"\nUse it: mezzo run --policy {TUNED} {name} --epochs 3\n")
    assert "--precision fp16 --precision mezzo-tune-train/policy.toml --seeds 3" in out
    assert "[1/1] calibration: 40 steps" in err
    declared = json.loads((here / OUT / "comparison" / "comparison.json").read_text())
    assert declared["precisions"] == ["fp16", TUNED]
    assert declared["argv"] == ["--epochs", "3"]
    written = json.loads((here / OUT / "tuning.json").read_text())
    assert written["policy"] == "fp16,module.odd=fp32"
    assert [one["format"] for one in written["modules"]] == ["fp16", "fp32"]
    left = sorted(p.name for p in (here / OUT).iterdir())
    assert left == ["comparison", "policy.toml", "runs", "sensitivity.json", "tuning.json"]
    assert main([*words[:2], "--no-compare", *words[2:]]) == 0  # an older tuning is replaced
    assert calls(here).count("calibration") == 2


def test_a_report_that_cannot_be_made_loses_no_policy(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device", str(folder / "report.html"))

    monkeypatch.setattr("mezzo.cli.tune.build", full)
    assert main(["tune", script(here, FRAGILE), "--precision", "fp16", "--budget", "4", "--first", "2"]) == 0
    out, err = capsys.readouterr()
    assert f"{TUNED} is equivalent." in out
    assert f"Once that is mended: mezzo report {OUT}/comparison\n" in err


def test_its_own_report_is_no_other_file(here: Path) -> None:
    words = ["tune", script(here, SOUND), "--precision", "bf16", "--no-compare"]
    assert main(words) == 0
    assert main(["report", OUT]) == 0
    assert (here / OUT / "report.html").exists()
    assert main(words) == 0


def test_json_is_all_that_stdout_gets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = script(here, {**FRAGILE, "units": [*FRAGILE["units"], unit("worse", overflow="output")]})
    assert main(["tune", name, "--precision", "fp16", "--seeds", "1", "--json", "--out", "there"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((here / "there" / "tuning.json").read_text())
    assert json.loads(out)["modules"][2]["change"] is None
    assert err == ""


def test_the_preset_is_not_run_twice_and_fp32_not_at_all(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", script(here, SOUND), "--precision", "bf16", "--seeds", "1"]) == 0
    assert policy(TUNED) == policy("bf16")
    assert sorted(calls(here)) == ["bf16-0", "calibration", "fp32-0", "fp32-ulp-0"]
    (here / "train.calls").unlink()
    capsys.readouterr()
    assert main(["tune", script(here, SLOW), "--precision", "bf16"]) == 0
    assert policy(TUNED).is_fp32
    assert calls(here) == ["calibration"]
    out = capsys.readouterr().out
    assert "FP32 it is" in out
    assert "Use it:" not in out


def test_a_module_is_used_as_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(script(here, SOUND)).rename(here / "train")
    assert main(["tune", "-m", "train", "--precision", "bf16", "--no-compare", "--", "--epochs", "3"]) == 0
    assert capsys.readouterr().out.endswith(f"\nUse it: mezzo run --policy {TUNED} -m train --epochs 3\n")


def test_no_compare_and_goals(here: Path) -> None:
    name = script(here, SLOW)
    assert main(["tune", name, "--precision", "bf16", "--no-compare", "--goal", "memory"]) == 0
    assert policy(TUNED) == policy("bf16")
    assert calls(here) == ["calibration"]


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ({"shift": 0.3}, {}, "the tuned policy is divergent. "),
        (
            {"seconds": 0.02},
            {"seconds": 0.005},
            "the tuned policy is slower than fp16: 0.50x of FP32's speed",
        ),
        ({"seconds": 0.005}, {"seconds": 0.02}, ""),
        ({"seconds": 0.02}, {"seconds": 0.005, "shift": 0.3}, ""),
    ],
)
def test_the_comparison_has_the_last_word(
    here: Path, capsys: pytest.CaptureFixture[str], mine: Any, theirs: Any, told: str
) -> None:
    name = script(here, FRAGILE, **{TUNED: mine, "fp16": theirs})
    assert main(["tune", name, "--precision", "fp16", "--seeds", "1"]) == int(bool(told))
    out = capsys.readouterr().out
    assert told in out
    assert ("the tuned policy is" in out) is bool(told)
    assert (f"Use it: mezzo run --policy {TUNED} {name}\n" in out) is not bool(told)


@pytest.mark.parametrize(
    ("behaviour", "words", "told"),
    [
        ({"*": {"crash": "KeyError: 'x'"}}, [], "with exit status 1 in FP32, without mixed precision"),
        (
            {"sensitivity": {"losses": [], "units": []}, "*": {"losses": 8}},
            [],
            "made 8 updates, and the first 10 are not",
        ),
        ({"sensitivity": {"losses": [], "units": []}}, [], "nothing could be measured. A module's call"),
        ({}, [], "nothing could be measured. A module's call"),
        ({}, ["--budget", "0"], "--budget 0: give 1 or more"),
        ({}, ["--budget", "x"], "--budget: 'x' is no whole number of steps: write one such as 6"),
        ({}, ["--margin", "-1%"], "--margin -0.01: give a share"),
        ({}, ["--first", "-1"], "--first -1: give"),
        ({}, ["--margin", "0"], "--margin 0: give a share"),
        ({}, ["--margin", "nan"], "--margin nan: give a share"),
        ({}, ["--goal", "spped"], "unknown goal 'spped'. Use one of memory, time"),
        ({}, ["--precision", "fp8"], "unknown preset to tune 'fp8'. Use one of bf16, fp16"),
        ({}, ["--demo", "digits"], "received train.py, digits"),
        ({}, ["--out", "other"], "--out other: holds other files (mine.txt)"),
    ],
)
def test_what_cannot_be_done_is_said_with_status_2(
    here: Path, capsys: pytest.CaptureFixture[str], behaviour: Any, words: list[str], told: str
) -> None:
    (here / "other").mkdir()
    (here / "other" / "mine.txt").write_text("")
    name = script(here, **behaviour)
    assert main(["tune", name, *(["--precision", "bf16"] if "--precision" not in words else []), *words]) == 2
    assert told in capsys.readouterr().err


def test_auto_is_what_the_machine_is_good_at(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = script(here, SOUND)
    assert main(["tune", name, "--no-compare"]) == 0
    assert "note: bf16: this cpu device multiplies bf16 in hardware" in capsys.readouterr().err
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")
    assert main(["tune", name, "--no-compare"]) == 0
    assert "no fast 16-bit format" in capsys.readouterr().err


def test_on_a_terminal_it_is_a_table_that_takes_no_text_for_markup() -> None:
    failed = unit("odd", failed="RuntimeError: [torch.FloatTensor [32, 16]] [/red]", seconds=[])
    data = {"format": "bf16", "edges": [], "losses": [2.0], "units": [unit("a"), failed]}
    tuned = tune(Sensitivities.from_json(json.dumps(data)))
    console = Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None)
    show(console, Outcome(tuned, Path("policy.toml"), None, "bf16", "policy.toml"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "it fails in bf16: RuntimeError: [torch.FloatTensor [32, 16]] [/red]" in text
    assert "│ a " in text


def test_every_option_is_on_the_page() -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    page = (Path(__file__).parent.parent / "docs" / "tune.md").read_text()
    names = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    assert "--budget" in names
    assert [name for name in names if name not in page and name not in ("--help", "--demo")] == []


def real(place: Path, *words: str) -> tuple[int, str]:
    """`mezzo tune` in a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "mezzo", "tune", *words]
    ran = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("preset", "kind", "reason"),
    [
        ("bf16", "offset", "would change the loss by about 0."),
        ("fp16", "square", "its output is not finite in fp16, and is in FP32"),
    ],
)
def test_a_planted_fragile_layer_stays_in_fp32_and_the_rest_does_not(
    tmp_path: Path, preset: str, kind: str, reason: str
) -> None:
    words = ["--precision", preset, "--budget", "3", "--goal", "memory", "--no-compare", "--out", "found"]
    status, told = real(tmp_path, str(PLANTED), *words, "--", kind)
    assert status == 0, told
    assert str(policy(tmp_path / "found" / "policy.toml")) == f"{preset},module.planted=fp32"
    assert f'"planted" = "fp32"  # {reason}' in (tmp_path / "found" / "policy.toml").read_text()


COMPENSATED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(64, 64)

    def forward(self, x):
        return self.c(x * 1e5) * 1e-5


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), Block(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(60):
    x = torch.randn(32, 16)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final", loss.item())
"""


@pytest.mark.heavy
def test_a_number_too_large_inside_a_block_keeps_both_its_ends_and_the_policy_trains(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(COMPENSATED)
    words = ["--precision", "fp16", "--budget", "3", "--goal", "memory", "--no-compare", "--out", "found"]
    status, told = real(tmp_path, "large.py", *words)
    assert status == 0, told
    assert "1.c: fp32: an input of it is not finite in fp16" in told
    found = policy(tmp_path / "found" / "policy.toml")
    assert found == policy("fp16,module.1=fp32")
    command = [sys.executable, "-m", "mezzo", "run", "--policy", "found/policy.toml", "large.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert float(ran.stdout.split("final")[1]) < 2.0
    skipped = re.search(r"60 optimizer steps, (\d+) skipped", ran.stderr)
    assert skipped is None or int(skipped[1]) < 10


@pytest.mark.heavy
def test_a_sound_model_gets_the_preset_and_a_comparison(tmp_path: Path) -> None:
    words = ["--precision", "bf16", "--budget", "2", "--first", "1", "--goal", "memory", "--seeds", "1"]
    status, told = real(tmp_path, str(PLANTED), *words, "--out", "found", "--", "none", "20")
    assert status == 0, told
    assert policy(tmp_path / "found" / "policy.toml") == policy("bf16")
    assert (tmp_path / "found" / "comparison" / "report.html").exists()


@pytest.mark.heavy
def test_a_compiled_model_is_measured_eagerly(tmp_path: Path) -> None:
    """Its paths are those of the model inside, as a policy's patterns name them."""
    source = PLANTED.read_text().replace(
        "optimizer = torch", "model = torch.compile(model)\noptimizer = torch"
    )
    (tmp_path / "compiled.py").write_text(source)
    words = ["--precision", "bf16", "--budget", "2", "--goal", "memory", "--no-compare", "--out", "found"]
    status, told = real(tmp_path, "compiled.py", *words)
    assert status == 0, told
    assert str(policy(tmp_path / "found" / "policy.toml")) == "bf16,module.planted=fp32"
