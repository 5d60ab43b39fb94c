"""`mezzo compare` at the command line: what it prints, its exit status, and one run of the real thing."""

from __future__ import annotations

import functools
import io
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mezzo.cli.compare as verb
from commands import Command, in_the_folder  # noqa: F401
from mezzo.cli.arguments import Parser
from mezzo.cli.compare import show
from mezzo.compare.comparison import compare
from mezzo.core.policy import policy
from mezzo.core.records import EMULATED, HAD_TF32
from page_blocks import BASH, PAGES

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def here(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, fake: tuple[str, str]) -> Path:
    """The working directory of the commands, in which runs are pretended."""
    monkeypatch.setattr(verb, "compare", functools.partial(compare, command=fake))
    return tmp_path


def script(place: Path, behaviour: dict[str, Any]) -> str:
    path = place / "train.py"
    path.write_text(json.dumps(behaviour))
    return path.name


COMMANDS = dict.fromkeys(
    line
    for page in PAGES
    for block in BASH.findall(page.read_text(encoding="utf-8"))
    for line in re.findall(r"^mezzo compare .*$", block, re.MULTILINE)
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_on_a_page_asks_for_a_comparison(here: Path, line: str) -> None:
    """Its precisions, policies, margins and patterns are accepted, and its script's arguments are found."""
    script(here, {})
    (here / "mezzo-calibrate-train").mkdir()
    (here / "mezzo-calibrate-train" / "policy.toml").write_text(policy("nvfp4,module.head=bf16").to_toml())
    _, _, *words = shlex.split(line, comments=True)
    parser = Parser("mezzo compare", "")
    verb.configure(parser)
    request, remarks = verb.request_of(parser.parse_with_script(words, owns_rest=False))
    assert remarks == []
    assert request.precisions
    assert request.argv == (("--epochs", "3") if "--epochs 3" in line else ())


def test_a_comparison_is_printed_and_written(here: Path, command: Command) -> None:
    name = script(here, {"bf16": {"seconds": 0.005, "memory": 600}, "*": {"metric": 97.0}})
    ran = command(f"compare {name} --precision bf16 --metric", "accuracy: ([0-9.]+)", "--", "--epochs", "3")
    assert ran.status == 0
    first, use = ran.out.splitlines()[1], "mezzo run --precision bf16 train.py --epochs 3"
    assert first.startswith(
        "bf16: proven equal within ±0.2 points in accuracy and ±0.5 % in loss (3 pairs), accuracy 97"
    )
    assert first.endswith("accuracy 97.01 % (FP32 97.01 %). 40 % less memory, 2.0x faster.")
    for words in (
        "  verdict        equivalent\n  accuracy       97.01 %   (FP32 97.01 %)\n",
        "  metric margin  ±0.2\n",
        "peak memory    0.60x (",
        "Report: mezzo-compare-train/report.html",
    ):
        assert words in ran.out
    assert "Final loss" not in ran.out  # the statistics are in the report, and printed with --verbose
    assert ran.out.endswith(f"\nNext: use bf16:\n  {use}\n")
    assert ran.out.count("mezzo run") == 1
    assert "7 runs: 3 FP32, 3 bf16 (3 pairs: the same seed), 1 FP32 as noise check" in ran.err
    assert "[7/7] bf16-2: 40 steps" in ran.err
    page = (Path(__file__).parent.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r'IFrame\("([^"]+)"', page)
    assert (here / shown).read_text().startswith("<!")
    asked = json.loads((here / "mezzo-compare-train" / "comparison.json").read_text())
    assert asked["argv"] == ["--epochs", "3"]


@pytest.mark.parametrize(
    ("precision", "device", "native", "told"),
    [
        ("bf16", "cpu", [], "bf16: bf16 is emulated on this CPU: stored in"),
        ("fp16,module.a=bf16", "cpu", ["bf16"], "fp16,module.a=bf16: fp16 is emulated"),
        ("fp8", "cpu", ["bf16"], "fp8: fp8 is emulated on this CPU (fp8 products need more): inputs"),
        ("nvfp4", "cpu", ["bf16"], "(nvfp4 products need more): inputs of a product are rounded to nvfp4"),
        ("fp8", "cuda", ["bf16", "fp8"], None),
    ],
)
def test_a_format_that_the_machine_only_stores_is_told(
    here: Path, command: Command, precision: str, device: str, native: list[str], told: str | None
) -> None:
    notes = [f"{EMULATED}cpu: {precision} products need more."] * ("products" in str(told))
    name = script(here, {"*": {"machine": {"device_type": device, "native_formats": native}, "notes": notes}})
    out = command(f"compare {name} --precision {precision} --seeds 1").out
    report = (here / "mezzo-compare-train" / "report.html").read_text()
    if told is None:
        assert "emulated" not in out + report
    else:
        assert out.count(told) == out.lower().count("emulated") == 1
        assert told.removeprefix(f"{precision}: ") in report
        assert ". Same memory, " in out


def test_what_holds_for_all_candidates_is_printed_once(here: Path, command: Command) -> None:
    name = script(here, {"*": {"notes": [HAD_TF32]}})
    offered = "mezzo compare train.py --precision tf32,bf16,fp16 --seeds 1 --out mezzo-compare-train-tf32"
    assert command(f"compare {name} --seeds 1").out.count(f"{offered}\n") == 1
    name = script(here, {"*": {"seedless": True}})
    out = command(f"compare {name} --seeds 3 --out seedless").out
    assert out.count("1 distinct FP32 run") == out.count("bf16, fp16: 2 seeds gave 1 distinct FP32 run") == 1


def test_json_is_all_that_stdout_gets(here: Path, command: Command) -> None:
    name = script(here, {"bf16": {"shift": 0.3}})
    ran = command(f"compare {name} --precision bf16 --seeds 1 --margin 1% --out there --json")
    assert (ran.status, ran.err) == (1, "")
    found = json.loads(ran.out)
    assert found == json.loads((here / "there" / "verdict.json").read_text())
    assert found["candidates"]["bf16"]["parity"] == "divergent"
    assert found["request"]["margin"] == pytest.approx(0.01)


def test_an_interrupt_says_how_to_go_on(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "compare", stop)
    ran = command(f"compare {script(here, {})}")
    assert ran.status == 130
    assert "mezzo-compare-train. To continue, give the same command" in ran.err


def test_a_report_that_cannot_be_made_loses_no_verdict(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device", str(folder / "report.html"))

    monkeypatch.setattr(verb, "build", full)
    ran = command(f"compare {script(here, {})} --precision bf16")
    assert ran.status == 0
    assert "bf16: proven equal" in ran.out
    assert "Report:" not in ran.out
    assert "mezzo-compare-train/report.html: No space left on device" in ran.err
    assert ran.err.endswith(": mezzo report mezzo-compare-train\n")


@pytest.fixture
def found(here: Path, command: Command) -> dict[str, Any]:
    """The verdict of a comparison whose bf16 fails with a message that looks like markup."""
    name = script(here, {"bf16": {"crash": "[bold]ValueError[/]: [red]x"}, "*": {"metric": 0.9}})
    command(f"compare {name} --seeds 1")
    verdict: dict[str, Any] = json.loads((here / "mezzo-compare-train" / "verdict.json").read_text())
    return verdict


@pytest.mark.parametrize(("width", "terminal"), [(40, True), (80, True), (160, True), (80, False)])
def test_every_width_shows_every_number(found: dict[str, Any], width: int, terminal: bool) -> None:
    note = "a long remark of many words, each of which is worth reading, up to and including the last one"
    next(iter(found["candidates"].values()))["notes"].append(note)
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    show(console, found, Path("r.html"))
    text = file.getvalue()
    joined = "".join(text.split())
    assert "".join(note.split()) in joined
    assert "[bold]ValueError[/]:[red]x" in joined  # the script's words are not markup
    assert "fp16:quicklook,noharmfound(1pair,notproof)" in joined
    assert "Final loss" not in text
    assert joined.count("Nextforbf16:") == joined.count("mezzorun") == 1
    assert joined.count("Nextforfp16:") == joined.count("mezzocompare") == 1
    for one in ("divergent", "speed", "peak", "lossmargin"):
        assert one in joined
    assert "power" not in joined  # one pair has none
    assert "±-" not in joined
    plain = [line for line in text.splitlines() if "quick look" in line]
    assert all(len(line) <= width for line in plain) or not terminal
    assert ("┃" in text) is (terminal and width >= 80)


TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.randn(256, 16)
    labels = (data[:, :4].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(30):
        rows = torch.randint(0, 256, (64,))
        loss = nn.functional.cross_entropy(model(data[rows]), labels[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(data).argmax(1) == labels).float().mean()
    print(f"accuracy: {100 * right:.2f} %")
"""


@pytest.mark.heavy
def test_the_real_thing(tmp_path: Path, command: Command) -> None:
    """An ordinary script, child processes, bf16: no harm is found, and everything is measured."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    words = "compare train.py --precision bf16 --seeds 1 --json --metric"
    ran = command(words, "accuracy: ([0-9.]+)")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    one = found["candidates"]["bf16"]
    assert (one["parity"], one["steps"]) == ("consistent", 30), one["reason"]
    assert one["peak_memory_ratio"] is not None
    assert 0 < one["noise_floor"] < 0.01  # the one-ulp twin left the FP32 run
    assert one["final_metric"] > 80
    assert abs(one["loss_gap"]) < 0.02
    assert found["machine"]["torch"]
    assert "consistent" in (tmp_path / "mezzo-compare-train" / "report.html").read_text()


@pytest.mark.nightly
def test_a_script_with_calls_of_mezzo_is_compared_as_own(tmp_path: Path, command: Command) -> None:
    moved = TRAINING
    for old, new in (
        ("for step", "mp = __import__('mezzo').MixedPrecision(model, optimizer, 'fp16')\n    for step"),
        ("    optimizer.step()", ""),
        ("loss.backward()", "mp.step(loss)"),
        ("        loss =", "        with mp.autocast(): loss ="),
    ):
        moved = moved.replace(old, new)
    (tmp_path / "moved.py").write_text(textwrap.dedent(moved))
    ran = command("compare moved.py --precision own --seeds 1 --json")
    assert ran.status == 0
    found = json.loads(ran.out)
    assert found["own"] == "mezzo.MixedPrecision(fp16)"
    own = found["candidates"]["own"]
    assert (own["parity"], own["steps"]) == ("consistent", 30), own["reason"]
