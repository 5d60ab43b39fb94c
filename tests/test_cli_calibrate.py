"""`mezzo calibrate` at the command line: what it prints and writes, its exit status, and runs of the real thing."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mezzo.cli.calibrate as verb
from mezzo.cli.main import main
from mezzo.core.policy import policy
from mezzo.core.records import UpdateRecord, read

FAKE = (sys.executable, str(Path(__file__).parent / "children" / "fake_calibration.py"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which runs are pretended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")  # in a pipe nothing is folded
    monkeypatch.setattr(verb, "LAUNCH", FAKE)
    return tmp_path


def script(place: Path, **behaviour: Any) -> str:
    path = place / "train.py"
    path.write_text(json.dumps(behaviour))
    return path.name


def test_it_is_printed_and_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = script(here, activation=1e6, native=["fp16"])
    assert main(["calibrate", name, "--steps", "5", "--", "--epochs", "3"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "Use fp16: it is native here, and bf16 is not.\n",
        "loss scale (dynamic from 2^16, or constant 2^16): the largest gradient is the weight gradient of a.weight",
        "b (returned numbers up to 1e+06, beyond fp16's largest number, 65504)",
        "\nPolicy: fp16,module.b=fp32\n",
        "\n  mezzo compare train.py --precision mezzo-calibrate-train/policy.toml -- --epochs 3\n",
    ):
        assert words in out
    folder = here / "mezzo-calibrate-train"
    assert str(policy(folder / "policy.toml")) == "fp16,module.b=fp32"
    page = (folder / "report.html").read_text()
    assert page.index("Use fp16: it is native here") < page.index("Updates")
    assert "for fp16 keep" not in page  # what the watched tensors show is in the recommendation
    assert "[1/1] fp32: 5 steps" in err
    request = json.loads((here / "train.asked").read_text())
    assert (request["policy"], request["watch"], request["stop_after"]) == ("fp32", 1, 5)
    assert (request["argv"], request["seed_offset"], request["summary"]) == (["--epochs", "3"], None, False)
    assert (request["watch_all"], request["sensitivity"]) == (True, True)
    assert not list((folder / "runs").glob("*.request.json"))
    assert main(["calibrate", script(here), "--precision", "fp16", "--no-check"]) == 0  # of 0.1.0
    assert "Use fp16: as asked." in capsys.readouterr().out
    assert {path.name for path in (folder / "runs").iterdir()} == {"fp32-0.jsonl", "fp32-0.log"}


def test_the_next_command_of_a_demo_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so it has the demo's metric; a script's path would not."""
    demo = replace(verb.DEMOS["digits"], path=here / script(here, native=["fp16"]))
    monkeypatch.setattr(verb, "DEMOS", {"digits": demo})
    assert main(["calibrate", "--demo", "digits", "--steps", "2"]) == 0
    assert "\n  mezzo compare --demo digits --precision " in capsys.readouterr().out


def test_a_loss_that_is_nan_in_fp32_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here, loss="nan"), "--steps", "2"]) == 2
    assert "the loss is nan at step 0" in capsys.readouterr().err
    assert not (here / "mezzo-calibrate-train" / "policy.toml").exists()


CHANGES = {"a": {"bf16": 1e-3, "fp16": 1e-4, "e4m3fn": 2e-3}, "": {"bf16": 0.5, "fp16": None}}


def test_the_modules_are_ranked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here, changes=CHANGES), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "above 0.0071" in out
    assert "0.50%" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert rows[:3] == [
        ["module", "bf16", "fp16"],
        ["(the", "model)", "0.5", "over", "overflows", "in", "mul"],
        ["a", "0.001", "0.0001"],
    ]
    assert main(["calibrate", "train.py", "--steps", "2", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "  0.002\n" in out  # e4m3fn
    assert "Of all gradients fp16 rounds 0% to zero" in out
    found = json.loads((here / "mezzo-calibrate-train" / "calibration.json").read_text())
    ranking = found["recommendation"]["sensitivity"]
    assert [(one["module"], one["lowest"]) for one in ranking["modules"]] == [("", "fp32"), ("a", "e4m3fn")]
    assert ranking["modules"][0]["changes"] == {"bf16": pytest.approx(0.5), "fp16": "inf"}


def test_the_policy_keeps_what_the_table_marks_over_in_fp16(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"a": {"bf16": 1e-3, "fp16": 0.5}, "b": {"bf16": 0.5, "fp16": 1e-3}}
    for precision, kept in (("fp16", "fp16,module.a=fp32"), ("bf16", "bf16")):
        options = ["--steps", "2", "--precision", precision]
        assert main(["calibrate", script(here, changes=changes), *options]) == 0
        out = capsys.readouterr().out
        assert ["a", "0.001", "0.5", "over"] in [line.split() for line in out.splitlines()]
        assert "a (alone changes the loss by more than the limit)" in out
        assert str(policy(here / "mezzo-calibrate-train" / "policy.toml")) == kept
        assert (
            f"--precision {'mezzo-calibrate-train/policy.toml' if precision == 'fp16' else 'bf16'}\n"
        ) in out
        assert ("mezzo calibrate train.py --steps=2 --precision fp16\n" in out) is (precision == "bf16")
        assert ("module.b=fp32" in out) is (precision == "bf16")
        assert "No module has to stay" not in out


def test_over_is_explained_where_a_change_is_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["calibrate", script(here, changes={"a": {"bf16": 1e-3, "e4m3fn": 0.5}}), "--steps", "2"]) == 0
    )
    assert " over" not in capsys.readouterr().out
    assert main(["calibrate", "train.py", "--steps", "2", "--verbose"]) == 0
    assert " over" in capsys.readouterr().out


def test_the_command_that_writes_the_fp16_policy_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for activation, options, kept in (
        (1e6, [], ""),
        (1e6, ["--steps", "7", "--margin", "0.01"], "--steps=7 --margin=0.01 "),
        (1e6, ["--precision", "fp16"], None),
        (1.0, [], None),
    ):
        name = script(here, activation=activation)
        use = f"\n  mezzo calibrate train.py {kept or ''}--precision fp16 -- --epochs 3\n"
        assert main(["calibrate", name, *options, "--", "--epochs", "3"]) == 0
        assert (use in capsys.readouterr().out) is (kept is not None)


def test_linear_layers_of_a_block_format_are_ranked_for_a_margin(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = script(here, changes={"a": {"nvfp4": 2e-3}, "b": {"nvfp4": 8e-3}})
    assert main(["calibrate", name, "--precision", "nvfp4", "--margin", "0.3%"]) == 0
    out = capsys.readouterr().out
    file = "mezzo-calibrate-train/policy.toml"
    for words in ("Use nvfp4", "b (alone", "\nPolicy: nvfp4,module.b=bf16\n", f"--precision nvfp4,{file}\n"):
        assert words in out
    assert [line.split() for line in out.splitlines() if line.startswith("  b")] == [["b", "0.008", "over"]]
    assert str(policy(here / file)) == "nvfp4,module.b=bf16"
    assert json.loads((here / "train.asked").read_text())["ranked"] == ["nvfp4"]
    for words, told in (
        (["--margin", "2"], "--margin 2"),
        (["--precision", "nvfp5"], "Did you mean 'nvfp4'"),
    ):
        assert main(["calibrate", name, *words]) == 2
        assert told in capsys.readouterr().err


def test_json_is_all_that_stdout_gets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here), "--json", "--out", "there"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    data = json.loads(out)
    assert data == json.loads((here / "there" / "calibration.json").read_text())
    assert (data["recommendation"]["format"], data["recommendation"]["constant"]) == ("bf16", 2.0**16)
    assert data["recommendation"]["sensitivity"] is None


def test_nothing_looked_at_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", script(here)]) == 0
    capsys.readouterr()
    assert main(["calibrate", script(here, ranges=False, say="Compiled."), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("the script made 20 updates", "not LBFGS", "mezzo.calibrate(", "Compiled."):
        assert words in err
    assert not (here / "mezzo-calibrate-train" / "policy.toml").exists()


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "train.py --demo digits", "-m MODULE; received train.py, digits"),
    ({"crash": True}, "train.py", "exit status 1 in FP32. Its output ended:\nTraceback"),
    ({"largest": 0.0}, "train.py --steps 1", "in 1 watched steps no gradient was finite and not 0"),
]


@pytest.mark.parametrize(("behaviour", "words", "told"), WRONG)
def test_what_is_wrong_is_told(
    here: Path, capsys: pytest.CaptureFixture[str], behaviour: dict[str, Any], words: str, told: str
) -> None:
    script(here, **behaviour)
    assert main(["calibrate", *words.split()]) == 2
    assert told in capsys.readouterr().err


PLANTED = """
    import torch
    from torch import nn

    class Times(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    class Block(nn.Module):
        def forward(self, x):
            return torch.tanh(x) * 1e6 * 1e-6

    torch.manual_seed(0)
    middle = nn.Tanh(), Times(1e6), Times(1e-6), nn.Linear(16, 16), Block()
    net = nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(100):
        x = torch.randn(32, 8)
        loss = nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.heavy
def test_planted_overflows_are_kept_in_fp32_and_the_recommendation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between modules: by the ranges in FP32. Inside a module: by the emulation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(PLANTED))
    assert main(["calibrate", "train.py", "--steps", "4", "--precision", "fp16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recommendation"]
    assert [one["module"] for one in found["kept"]] == ["2", "5"]
    assert found["kept"][1]["why"] == "its operation mul overflows in fp16"
    ranking = {one["module"]: one for one in found["sensitivity"]["modules"]}
    assert (ranking["2"]["changes"]["fp16"], ranking["2"]["causes"]["fp16"]) == ("inf", "mul")
    file = str(tmp_path / "mezzo-calibrate-train" / "policy.toml")
    assert main(["run", "--precision", file, "--records", "run.jsonl", "train.py"]) == 0
    updates = [one for one in read(tmp_path / "run.jsonl") if isinstance(one, UpdateRecord)]
    assert updates
    assert not any(update.skipped for update in updates)
