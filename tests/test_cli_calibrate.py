"""`mezzo calibrate` at the command line: what it prints and writes, its exit status, and runs of the real thing."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import mezzo.cli.calibrate as verb
from mezzo.cli.main import main
from mezzo.core.errors import UsageError
from mezzo.core.policy import policy
from mezzo.core.records import UpdateRecord, read
from mezzo.pytorch.launch.runner import run
from mezzo.scripts.runner import RunRequest
from mezzo.verify.calibrate import calibrate_script

PAGE = Path(__file__).parents[1] / "docs" / "monitoring.md"
FAKE = (sys.executable, str(Path(__file__).parent / "children" / "fake_calibration.py"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which runs are pretended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "calibrate_script", functools.partial(calibrate_script, command=FAKE))
    return tmp_path


def script(place: Path, **behaviour: Any) -> str:
    path = place / "train.py"
    path.write_text(json.dumps(behaviour))
    return path.name


def test_it_is_printed_and_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "calibrate",
        script(here, activation=1e6, native=["fp16"]),
        "--steps",
        "5",
        "--",
        "--epochs",
        "3",
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "format       fp16: it is native here, and bf16 is not\n" in out
    assert "loss scale   fp16: dynamic from 2^17, or constant 2^16\n" in out
    assert "keep in fp32 b: returned up to 1e+06, beyond fp16's largest number, 65504\n" in out
    assert "             2^-2 |█▃| 2^-1, in fp16: all kept\n" in out
    assert "policy       fp16,loss_scale=dynamic(init=131072),module.b=fp32\n" in out
    assert "checked      5 steps under this policy: no step skipped, every loss finite\n" in out
    folder = here / "mezzo-calibrate-train"
    assert "Use it:      mezzo run --policy mezzo-calibrate-train/policy.toml train.py --epochs 3\n" in out
    assert str(policy(folder / "policy.toml")) == "fp16,loss_scale=dynamic(init=131072),module.b=fp32"
    assert (folder / "report.html").read_text().startswith("<!")
    assert "[1/2] fp32: 5 steps" in err
    assert "[2/2] recommended: 5 steps" in err
    watched, tried = map(json.loads, (here / "train.asked").read_text().splitlines())
    assert (watched["policy"], watched["watch"], watched["stop_after"]) == ("fp32", 1, 5)
    assert (watched["argv"], watched["seed_offset"], watched["summary"]) == (["--epochs", "3"], None, False)
    assert (watched["watch_all"], tried["watch_all"]) == (True, False)
    assert (watched["sensitivity"], tried["sensitivity"]) == (True, False)
    assert (tried["policy"], tried["watch"], tried["trace"]) == (str(folder / "policy.toml"), 0, True)
    assert not list((folder / "runs").glob("*.request.json"))


CHANGES = {
    "a": {"bf16": 1e-3, "fp16": 1e-4, "e4m3fn": 2e-3},
    "b": {"bf16": 0.5, "fp16": None},
    "": {"bf16": 1e-4, "fp16": 2e-5},
}


def test_the_modules_are_ranked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each where it is piped; all of it in the JSON and in the file."""
    assert main(["calibrate", script(here, changes=CHANGES), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    lines = out[
        out.index("sensitivity  change of the loss by each module, most sensitive first") :
    ].splitlines()
    assert "at most 0.006 each (0.5% of 2 over the root of 3)" in lines[0]
    assert lines[1:4] == [
        "             b: fp32 (bf16 0.5, fp16 overflow in mul, e5m2 -, e4m3fn -)",
        "             a: e4m3fn (bf16 0.001, fp16 0.0001, e5m2 -, e4m3fn 0.002)",
        "             (the model): fp16 (bf16 0.0001, fp16 2e-05, e5m2 -, e4m3fn -)",
    ]
    found = json.loads((here / "mezzo-calibrate-train" / "calibration.json").read_text())
    ranking = found["recommendation"]["sensitivity"]
    assert [(one["module"], one["lowest"]) for one in ranking["modules"]] == [
        ("b", "fp32"),
        ("a", "e4m3fn"),
        ("", "fp16"),
    ]
    assert ranking["modules"][0]["changes"] == {"bf16": pytest.approx(0.5), "fp16": None}
    assert ranking["steps"] == 2


def test_where_nothing_was_measured_nothing_is_ranked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]["sensitivity"] is None


def test_a_module_is_used_as_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train").write_text("{}")
    assert main(["calibrate", "-m", "train", "--", "--epochs", "3"]) == 0
    used = "Use it:      mezzo run --policy mezzo-calibrate-train/policy.toml -m train --epochs 3\n"
    assert used in capsys.readouterr().out


def test_json_is_all_that_stdout_gets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here), "--json", "--out", "there", "--headroom", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    data = json.loads(out)
    assert data == json.loads((here / "there" / "calibration.json").read_text())
    assert (data["recommendation"]["format"], data["recommendation"]["constant"]) == ("bf16", 2.0**14)
    expected = {"steps": 20, "skipped": 0, "loss_finite": True, "scale": 1.0, "alarms": False, "findings": []}
    assert data["check"] == {**expected, "remedies": [], "modules": {}, "holds": True}


@pytest.mark.parametrize(("steps", "fits", "start"), [(5, 2.0**15, 2.0**15), (1, 2.0**15, 2.0**15)])
def test_a_scale_that_is_too_large_is_lowered_and_tried_again(
    here: Path, capsys: pytest.CaptureFixture[str], steps: int, fits: float, start: float
) -> None:
    words = ["calibrate", script(here, fits=fits), "--precision", "fp16", "--steps", str(steps), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recommendation"]["start"], found["recommendation"]["constant"]) == (start, start)
    assert found["check"]["holds"]
    assert "overflowed: the scale is what it then was, 2^15" in found["recommendation"]["notes"][0]
    written = policy(here / "mezzo-calibrate-train" / "policy.toml")
    assert str(written) == f"fp16,loss_scale=dynamic(init={start:.0f})" == found["recommendation"]["policy"]


def test_it_is_not_tried_for_ever(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", script(here, fits=1.0), "--precision", "fp16", "--steps", "2"]
    assert main(words) == 1
    assert "2 of 2 steps skipped" in capsys.readouterr().out
    assert len((here / "train.asked").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (
            {"skips": 2},
            ["2 of 4 steps skipped, every loss finite", "2 steps: forward of mul in b: finite numbers"],
        ),
        ({"nan": True}, ["no step skipped, a loss that is not finite"]),
    ],
)
def test_a_recommendation_that_does_not_hold_is_a_finding(
    here: Path, capsys: pytest.CaptureFixture[str], behaviour: dict[str, Any], words: list[str]
) -> None:
    assert main(["calibrate", script(here, **behaviour), "--steps", "4"]) == 1
    out = capsys.readouterr().out
    for each in words:
        assert each in out
    assert "Use it:" not in out
    assert "mezzo-calibrate-train/policy.toml failed its trial" in out
    written = (here / "mezzo-calibrate-train" / "policy.toml").read_text()
    assert written.startswith("# FAILED ITS TRIAL")
    assert words[0] in written
    assert "# Recommended" not in written


@pytest.mark.parametrize(
    ("modules", "runs", "kept"),
    [(["c"], 3, ["c"]), (["c", "d"], 4, ["c", "d"])],
)
def test_a_module_that_overflows_in_the_trial_is_kept_and_tried_again(
    here: Path, capsys: pytest.CaptureFixture[str], modules: list[str], runs: int, kept: list[str]
) -> None:
    assert main(["calibrate", script(here, overflows=modules), "--precision", "fp16", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert len((here / "train.asked").read_text().splitlines()) == runs
    for name in kept:
        assert f"keep in fp32 {name}: overflowed in the trial" in out
    assert "checked      2 steps under this policy: no step skipped, every loss finite\n" in out
    assert "Use it: " in out
    file = here / "mezzo-calibrate-train" / "policy.toml"
    assert [path for path, _ in policy(file).modules] == kept
    assert file.read_text().startswith("# Recommended by mezzo calibrate from 2 steps in FP32")
    assert '"c" = "fp32"  # overflowed in the trial' in file.read_text()


@pytest.mark.parametrize(
    ("modules", "runs", "kept"),
    [
        (["c", "d", "e"], 4, ["c", "d"]),
        (["(outside the model)"], 2, []),
        ([""], 2, []),
        (["with space"], 2, []),
    ],
)
def test_modules_that_still_overflow_are_not_recommended(
    here: Path, capsys: pytest.CaptureFixture[str], modules: list[str], runs: int, kept: list[str]
) -> None:
    assert main(["calibrate", script(here, overflows=modules), "--precision", "fp16", "--steps", "3"]) == 1
    out = capsys.readouterr().out
    assert len((here / "train.asked").read_text().splitlines()) == runs
    assert out.count("finite numbers went in") == 1
    assert "             3 steps: forward of mul" in out
    assert out.index("this module in FP32: `") < out.index("mul in FP32: `fp16,op.mul=fp32`")
    assert "holds what each of them returns" not in out
    assert "Use it:" not in out
    file = here / "mezzo-calibrate-train" / "policy.toml"
    assert file.read_text().startswith("# FAILED ITS TRIAL")
    assert [path for path, _ in policy(file).modules] == kept


@pytest.mark.parametrize(
    ("cause", "runs", "told"),
    [("invalid", 3, "keep in fp32 c: made NaN or infinity in the trial"), ("state", 2, "failed its trial")],
)
def test_a_module_is_kept_where_its_format_is_the_cause(
    here: Path, capsys: pytest.CaptureFixture[str], cause: str, runs: int, told: str
) -> None:
    words = ["calibrate", script(here, overflows=["c"], cause=cause), "--precision", "fp16", "--steps", "2"]
    assert main(words) == (0 if runs == 3 else 1)
    assert told in capsys.readouterr().out
    assert len((here / "train.asked").read_text().splitlines()) == runs


def test_only_fp16_is_helped_by_modules_in_fp32(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here, overflows=["c"]), "--precision", "bf16", "--steps", "3"]) == 1
    assert len((here / "train.asked").read_text().splitlines()) == 2
    capsys.readouterr()


@pytest.mark.parametrize("words", [["--no-check"], []])
def test_a_policy_that_was_not_tried_says_so(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    behaviour = {} if words else {"crash": "recommended"}
    assert main(["calibrate", script(here, **behaviour), *words, "--steps", "1"]) == (0 if words else 2)
    head = (here / "mezzo-calibrate-train" / "policy.toml").read_text().splitlines()[0]
    assert head == "# Recommended by mezzo calibrate from 1 step in FP32; not tried."
    capsys.readouterr()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({}, ["20 updates were made, and none of them was looked at", "takes a closure (LBFGS)"]),
        ({"updates": False}, ["no optimizer's step was seen", "mezzo.calibrate(model, loss_fn, batches)"]),
        ({"say": "Compiled."}, ["Compiled."]),
    ],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_nothing_looked_at_is_told(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    behaviour: dict[str, Any],
    words: list[str],
    json_too: bool,
) -> None:
    assert main(["calibrate", script(here), "--no-check"]) == 0
    capsys.readouterr()
    name = script(here, ranges=False, **behaviour)
    assert main(["calibrate", name, *(["--json"] if json_too else [])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for each in (*words, "mezzo calibrate: train.py: nothing to calibrate with", "mezzo.calibrate(model"):
        assert each in err
    assert not (here / "mezzo-calibrate-train" / "policy.toml").exists()


def test_without_a_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here, skips=2), "--no-check", "--precision", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "format       fp16: as asked" in out
    assert "checked" not in out
    assert len((here / "train.asked").read_text().splitlines()) == 1


def test_an_earlier_calibration_is_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here)]) == 0
    assert main(["calibrate", script(here), "--no-check"]) == 0
    assert json.loads((here / "mezzo-calibrate-train" / "calibration.json").read_text())["check"] is None
    assert {p.name for p in (here / "mezzo-calibrate-train" / "runs").iterdir()} == {
        "fp32-0.jsonl",
        "fp32-0.log",
    }


WRONG: list[tuple[dict[str, Any], list[str], str]] = [
    (
        {},
        ["train.py", "--demo", "digits"],
        "give one of SCRIPT, --demo NAME and -m MODULE; received train.py, digits",
    ),
    ({}, [], "received none"),
    ({}, ["trian.py"], "no script 'trian.py' in "),
    ({}, ["."], "'.' is a directory without a __main__.py. Give the path of a Python script."),
    ({}, ["train.py", "--steps", "x"], "--steps: 'x' is not a whole number of updates: write one such as 20"),
    (
        {},
        ["train.py", "--headroom", "x"],
        "--headroom: 'x' is not a whole number of doublings: write one such as 1",
    ),
    ({}, ["--demo", "digit"], "Did you mean 'digits'"),
    ({}, ["train.py", "--steps", "0"], "--steps 0: give how many updates"),
    ({}, ["train.py", "--headroom", "-1"], "--headroom -1"),
    ({}, ["train.py", "--precision", "fp17"], "--precision: unknown format 'fp17'"),
    (
        {"crash": "fp32"},
        ["train.py"],
        "train.py ended with exit status 1 in FP32. Its output ended:\nTraceback",
    ),
    ({"crash": "recommended"}, ["train.py"], "exit status 1 under"),
    (
        {},
        ["train.py", "--headroom", "99"],
        "--headroom 99: give how many doublings the numbers may still make, 0 to 15",
    ),
    ({"largest": 0.0}, ["train.py", "--steps", "1"], "1 step was looked at, and no gradient in it"),
    ({"largest": 0.0}, ["train.py"], "20 steps were looked at, and no gradient in them is finite and not 0"),
]


@pytest.mark.parametrize(("behaviour", "words", "told"), WRONG)
def test_what_is_wrong_is_told(
    here: Path, capsys: pytest.CaptureFixture[str], behaviour: dict[str, Any], words: list[str], told: str
) -> None:
    script(here, **behaviour)
    assert main(["calibrate", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "report.html"), UsageError("report.html: no room.")]
)
def test_a_report_that_cannot_be_made_loses_no_result(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    json_too: bool,
) -> None:
    def fails(folder: Path) -> Path:
        raise error

    monkeypatch.setattr(verb, "build_run", fails)
    assert main(["calibrate", script(here), *(["--json"] if json_too else [])]) == 0
    out, err = capsys.readouterr()
    assert "mezzo: no report: report.html: " in err
    assert ". Once that is mended: mezzo report mezzo-calibrate-train\n" in err
    assert "Report:" not in out
    assert json.loads(out)["check"]["holds"] if json_too else "\nUse it:      mezzo run --policy" in out


def test_a_folder_that_can_not_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert main(["calibrate", script(here), "--out", "file"]) == 2
    assert "Name a folder that can be written with --out" in capsys.readouterr().err


def test_every_option_is_on_the_page() -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    page = PAGE.read_text(encoding="utf-8")
    for action in parser._actions:
        for option in action.option_strings:
            if option not in ("-h", "--help"):
                assert f"`{option}" in page, option


PLANTED = """
    import torch
    from torch import nn

    class Times(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.big = Times(1e6)
            self.small = Times(1e-6)
            self.last = nn.Linear(16, 2)

        def forward(self, x):
            return self.last(self.small(self.big(torch.tanh(self.first(x)))))

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(100):
        x = torch.randn(32, 8)
        loss = nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.heavy
def test_a_planted_overflow_is_found_and_the_recommendation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(PLANTED))
    assert main(["calibrate", "train.py", "--steps", "6", "--precision", "fp16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = data["recommendation"]
    assert [one["module"] for one in found["kept"]] == ["big", "small"]
    assert found["steps"] == 6
    ranking = {one["module"]: one for one in found["sensitivity"]["modules"]}
    assert next(iter(ranking)) == "big"
    assert ranking["big"]["changes"]["fp16"] is None
    assert ranking["big"]["causes"]["fp16"] == "mul"
    assert data["check"]["holds"]
    # Without what it recommends, fp16 makes no step.
    file = tmp_path / "plain.jsonl"
    assert (
        run(RunRequest("train.py", policy="fp16", records=file, stop_after=4, summary=False, trace=False))
        == 0
    )
    assert all(one.skipped for one in read(file) if isinstance(one, UpdateRecord))


INSIDE = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            return self.inner(x) * 1e6 * 1e-6

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(100):
        x = torch.randn(32, 8)
        loss = nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.heavy
def test_what_overflows_inside_a_module_is_found_by_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(INSIDE))
    assert main(["calibrate", "train.py", "--steps", "4", "--precision", "fp16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    kept = [(one["module"], one["why"]) for one in data["recommendation"]["kept"]]
    assert kept == [("1", "overflowed in the trial")]
    assert data["check"]["holds"]


@pytest.mark.heavy
def test_the_scale_of_a_demo_is_the_largest_that_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", "--demo", "digits", "--steps", "4", "--precision", "fp16", "--json", "--no-check"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)["recommendation"]
    assert found["kept"] == []
    # Weight gradients are the larger ones there: a scale from those of activations alone overflows in each step.
    assert found["gradient"]["what"] == "weight gradient"
    assert found["gradient"]["histogram"]["largest"] * found["constant"] < 65504
    assert found["gradient"]["histogram"]["largest"] * found["constant"] * 8 > 65504
