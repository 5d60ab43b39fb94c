"""`mezzo calibrate` at the command line: what it prints and writes, its exit status, and runs of the real thing."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mezzo.cli.calibrate as verb
from commands import Command, in_the_folder  # noqa: F401
from mezzo.cli import run
from mezzo.cli.arguments import Parser
from mezzo.compare.request import split_precisions
from mezzo.core.policy import policy
from mezzo.core.records import UpdateRecord, read
from mezzo.demos import DEMOS

pytestmark = pytest.mark.usefixtures("forked")

FAKE = (sys.executable, str(Path(__file__).parent / "children" / "fake_calibration.py"))


@pytest.fixture
def here(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands, in which runs are pretended."""
    monkeypatch.setenv("COLUMNS", "40")  # in a pipe nothing is folded
    monkeypatch.setattr(verb, "LAUNCH", FAKE)
    return tmp_path


def script(place: Path, **behaviour: Any) -> str:
    path = place / "train.py"
    path.write_text(json.dumps(behaviour))
    return path.name


def test_it_is_printed_and_written(here: Path, command: Command) -> None:
    name = script(here, activation=1e6, native=["fp16"])
    ran = command(f"calibrate {name} --steps 5 -- --epochs 3")
    assert ran.status == 0
    for words in (
        "Use fp16: it is native here, and bf16 is not.\n",
        "loss scale (dynamic from 2^16, or constant 2^16): the largest gradient is the weight gradient of a.weight",
        "b (returned numbers up to 1e+06, beyond fp16's largest number, 65504)",
        "\nPolicy: fp16,module.b=fp32\n",
        "\n  mezzo compare train.py --precision mezzo-calibrate-train/policy.toml -- --epochs 3\n",
    ):
        assert words in ran.out
    folder = here / "mezzo-calibrate-train"
    assert str(policy(folder / "policy.toml")) == "fp16,module.b=fp32"
    (here / "mezzo-compare-train").mkdir()  # of other precisions
    again = command(f"calibrate {name} --steps 5 -- --epochs 3").out
    assert "/policy.toml --out mezzo-compare-train-calibrated -- --epochs 3\n" in again
    page = (folder / "report.html").read_text()
    assert page.index("Use fp16: it is native here") < page.index("Updates")
    assert "for fp16 keep" not in page  # what the watched tensors show is in the recommendation
    assert "[1/1] fp32: 5 steps" in ran.err
    request = json.loads((here / "train.asked").read_text())
    asked = {"policy": "fp32", "watch": 1, "stop_after": 5, "argv": ["--epochs", "3"], "seed_offset": None}
    assert request.items() >= {**asked, "summary": False, "watch_all": True, "sensitivity": True}.items()
    assert not list((folder / "runs").glob("*.request.json"))
    ran = command(f"calibrate {script(here)} --precision fp16")
    assert "Use fp16: as asked." in ran.out
    assert {path.name for path in (folder / "runs").iterdir()} == {"fp32-0.jsonl", "fp32-0.log"}


def test_the_next_command_of_a_demo_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """And so it has the demo's metric; a script's path would not."""
    demo = replace(DEMOS["digits"], path=here / script(here, native=["fp16"]))
    monkeypatch.setattr("mezzo.cli.arguments.DEMOS", {"digits": demo})
    ran = command("calibrate --demo digits --steps 2")
    assert "\n  mezzo compare --demo digits --precision " in ran.out


CHANGES = {"a": {"bf16": 1e-3, "fp16": 1e-4, "e4m3fn": 2e-3}, "": {"bf16": 0.5, "fp16": None}}


def test_the_modules_are_ranked(here: Path, command: Command) -> None:
    words = f"calibrate {script(here, changes=CHANGES)} --steps 2"
    out = command(words).out
    assert "above 0.0071" in out
    assert "0.50%" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert rows[:3] == [
        ["module", "bf16", "fp16"],
        ["(the", "model)", "0.5", "over", "overflows", "in", "mul"],
        ["a", "0.001", "0.0001"],
    ]
    out = command(f"{words} --verbose").out
    assert "  0.002\n" in out  # e4m3fn
    found = json.loads((here / "mezzo-calibrate-train" / "calibration.json").read_text())
    ranking = found["recommendation"]["sensitivity"]
    assert [(one["module"], one["lowest"]) for one in ranking["modules"]] == [("", "fp32"), ("a", "e4m3fn")]
    assert ranking["modules"][0]["changes"] == {"bf16": pytest.approx(0.5), "fp16": "inf"}


@pytest.mark.parametrize(
    ("precision", "kept", "file"),
    [("fp16", "fp16,module.a=fp32", "mezzo-calibrate-train/policy.toml"), ("bf16", "bf16", "bf16")],
)
def test_the_policy_keeps_what_the_table_marks_over_in_fp16(
    precision: str, kept: str, file: str, here: Path, command: Command
) -> None:
    name = script(here, changes={"a": {"bf16": 1e-3, "fp16": 0.5}, "b": {"bf16": 0.5, "fp16": 1e-3}})
    out = command(f"calibrate {name} --steps 2 --precision {precision}").out
    assert ["a", "0.001", "0.5", "over"] in [line.split() for line in out.splitlines()]
    assert "a (alone changes the loss by more than the limit)" in out
    assert str(policy(here / "mezzo-calibrate-train" / "policy.toml")) == kept
    assert f"--precision {file}\n" in out
    assert ("mezzo calibrate train.py --steps=2 --precision fp16\n" in out) is (precision == "bf16")
    assert ("module.b=fp32" in out) is (precision == "bf16")
    assert "No module has to stay" not in out


def test_over_is_explained_where_a_change_is_over(here: Path, command: Command) -> None:
    words = f"calibrate {script(here, changes={'a': {'bf16': 1e-3, 'e4m3fn': 0.5}})} --steps 2"
    assert " over" not in command(words).out
    assert "0.50% (the root of the sum of the squares" in command(f"{words} --verbose").out


@pytest.mark.parametrize(
    ("activation", "options", "kept"),
    [
        (1e6, "", ""),
        (1e6, "--steps 7 --margin 0.01", "--steps=7 --margin=0.01 "),
        (1e6, "--precision fp16", None),
        (1.0, "", None),
    ],
)
def test_the_command_that_writes_the_fp16_policy_is_named(
    activation: float, options: str, kept: str | None, here: Path, command: Command
) -> None:
    out = command(f"calibrate {script(here, activation=activation)} {options} -- --epochs 3").out
    use = f"\n  mezzo calibrate train.py {kept or ''}--precision fp16 -- --epochs 3\n"
    assert (use in out) is (kept is not None)


def test_linear_layers_of_a_block_format_are_ranked_for_a_margin(here: Path, command: Command) -> None:
    name = script(here, changes={"a": {"nvfp4": 2e-3}, "b": {"nvfp4": 8e-3}})
    out = command(f"calibrate {name} --precision nvfp4 --margin 0.3%").out
    file = "mezzo-calibrate-train/policy.toml"
    assert "0.30% (the root of the sum of the squares" in out
    for words in ("Use nvfp4", "b (alone", "\nPolicy: nvfp4,module.b=bf16\n"):
        assert words in out
    (options,) = re.findall(r"\n  mezzo compare train\.py( --precision .*)\n", out)
    assert split_precisions(options.split()[1::2]) == ["nvfp4", file]
    pasted = Parser("mezzo run", "")
    run.configure(pasted)
    precision = pasted.parse_with_script([*options.split(), name], owns_rest=True).precision
    assert str(policy(here / precision)) == "nvfp4,module.b=bf16"
    assert [line.split() for line in out.splitlines() if line.startswith("  b")] == [["b", "0.008", "over"]]
    assert str(policy(here / file)) == "nvfp4,module.b=bf16"
    assert json.loads((here / "train.asked").read_text())["ranked"] == ["nvfp4"]


def test_json_is_all_that_stdout_gets(here: Path, command: Command) -> None:
    ran = command(f"calibrate {script(here)} --json --out there")
    assert (ran.status, ran.err) == (0, "")
    data = json.loads(ran.out)
    assert data == json.loads((here / "there" / "calibration.json").read_text())
    assert (data["recommendation"]["format"], data["recommendation"]["constant"]) == ("bf16", 2.0**16)
    assert data["recommendation"]["sensitivity"] is None


WRONG: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "--demo digits", ["-m MODULE; received train.py, digits"]),
    ({}, "--margin 200%", ["--margin: '200%' is not a share"]),
    ({}, "--precision nvfp5", ["Did you mean 'nvfp4'"]),
    ({"loss": "nan"}, "--steps 2", ["the loss is nan at step 0"]),
    ({"crash": True}, "", ["exit status 1 in FP32. Its output ended:\nTraceback"]),
    ({"largest": 0.0}, "--steps 1", ["in 1 watched step no gradient was finite and not 0"]),
    ({"ranges": False, "say": "Compiled."}, "--json",
     ["the script made 20 updates", "not LBFGS", "mezzo.calibrate(", "Compiled."]),
]  # fmt: skip


@pytest.mark.parametrize(("behaviour", "words", "told"), WRONG)
def test_what_is_wrong_is_told_and_leaves_no_policy(
    here: Path, command: Command, behaviour: dict[str, Any], words: str, told: list[str]
) -> None:
    command(f"calibrate {script(here)} --steps 2")  # whose policy is gone after a run that fails
    ran = command(f"calibrate {script(here, **behaviour)} {words}")
    assert (ran.status, ran.out) == (2, "")
    assert all(word in ran.err for word in told)
    assert (here / "mezzo-calibrate-train" / "policy.toml").exists() == (not behaviour)


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
    tmp_path: Path, command: Command
) -> None:
    """Between modules: by the ranges in FP32. Inside a module: by the emulation."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PLANTED))
    ran = command("calibrate train.py --steps 4 --precision fp16 --json")
    assert ran.status == 0
    found = json.loads(ran.out)["recommendation"]
    assert [one["module"] for one in found["kept"]] == ["2", "5"]
    assert found["kept"][1]["why"] == "its operation mul overflows in fp16"
    ranking = {one["module"]: one for one in found["sensitivity"]["modules"]}
    assert (ranking["2"]["changes"]["fp16"], ranking["2"]["causes"]["fp16"]) == ("inf", "mul")
    file = "mezzo-calibrate-train/policy.toml"
    assert command(f"run --precision {file} --records run.jsonl train.py").status == 0
    updates = [one for one in read(tmp_path / "run.jsonl") if isinstance(one, UpdateRecord)]
    assert updates
    assert not any(update.skipped for update in updates)
