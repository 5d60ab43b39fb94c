"""The comparison: which runs are made, in which order, what is kept, what is refused, and what is written."""

from __future__ import annotations

import html
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mezzo.compare import folder as folder_module
from mezzo.compare.answer import answer, next_steps, unclear_speed
from mezzo.compare.comparison import compare, planned_runs, schedule
from mezzo.compare.judgement import _overflow
from mezzo.compare.measure import LESS_AS_WORDS, LESS_IS_BETTER, Metric
from mezzo.compare.progress import Watcher
from mezzo.compare.request import Request, candidates
from mezzo.compare.runs import read_run, run_child
from mezzo.core import records
from mezzo.core.errors import MezzoError, ScriptError, UnknownNameError, UnsupportedPrecisionError, UsageError
from mezzo.core.overflow import OverflowReport
from mezzo.core.records import HAD_TF32, IN_NO_LAYER, NOTHING_RAN
from mezzo.report import build
from mezzo.runner.lifecycle import RunRequest

CONTRACT = {
    "speedup", "speedup_interval", "peak_memory_ratio", "parity", "seeds", "margin", "loss_gap", "final_loss",
    "final_metric", "steps", "skipped_steps", "reason",
}  # fmt: skip


class Case:
    """A script of a fake child, a folder, and the runs that were called for."""

    def __init__(self, place: Path, command: tuple[str, str]) -> None:
        self.command = command
        self.script = place / "train.json"
        self.out = place / "out"

    def write(self, behaviour: dict[str, Any]) -> None:
        self.script.write_text(json.dumps(behaviour), encoding="utf-8")

    def request(self, **changes: Any) -> Request:
        return Request(**{"target": str(self.script), "precisions": ("bf16",), "seeds": 1, **changes})

    def compare(self, **changes: Any) -> dict[str, Any]:
        keep = {key: changes.pop(key) for key in ("fresh", "watcher") if key in changes}
        return compare(self.request(**changes), self.out, command=self.command, **keep)

    @property
    def calls(self) -> list[str]:
        path = self.script.with_suffix(".calls")
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def forget_calls(self) -> None:
        self.script.with_suffix(".calls").unlink()

    @property
    def files(self) -> set[str]:
        return {str(p.relative_to(self.out)) for p in self.out.rglob("*") if p.is_file()}

    def candidate(self, name: str = "bf16", **changes: Any) -> dict[str, Any]:
        """What the verdict says of a candidate."""
        found: dict[str, Any] = self.compare(precisions=(name,), **changes)["candidates"][name]
        return found


@pytest.fixture
def case(tmp_path: Path, fake: tuple[str, str]) -> Case:
    made = Case(tmp_path, fake)
    made.write({"bf16": {"seconds": 0.005, "memory": 600}})
    return made


# Which runs, in which order.


@pytest.mark.parametrize(
    ("words", "expected", "remarks"),
    [
        (["bf16,fp16"], ("bf16", "fp16"), ""),
        (["bf16", "compute=bf16"], ("bf16",), "compute=bf16 is the same as bf16; it runs once."),
        (["bf16,bf16"], ("bf16",), "bf16 was named twice; it runs once."),
        (
            ["fp32,bf16"],
            ("bf16",),
            "fp32 is the baseline, which always runs; it is not listed as a candidate.",
        ),
        (["bf16,masters=split8,state=int8,fp16"], ("bf16,masters=split8,state=int8", "fp16"), ""),
        (["fp32,state=int8"], ("fp32,state=int8",), ""),
        ([" bf16 , fp16,"], ("bf16", "fp16"), ""),
        (["own,bf16,own,masters=split"], ("own", "bf16", "own,masters=split"), ""),
    ],
)
def test_candidates_are_read_from_the_command_line(
    words: list[str], expected: tuple[str, ...], remarks: str
) -> None:
    found, said = candidates(words)
    assert found == expected
    assert "".join(said) == remarks


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["bf16,op.sofmax=fp32"], UnknownNameError, "softmax"),
        (["fp32"], UsageError, "nothing to compare with fp32"),
        (["bf16", "fp16,masters=fp32"], UsageError, "'fp16,masters=fp32': .*can't train fp16 weights"),
        (["bf16,masters=fp32,params=fp32", "fp16,masters=split"], UsageError, "Use bf16, or masters=fp32 in mezzo.Mix"),
        (["own,params=bf16"], UsageError, "'own,params=bf16'.* Use own, or own,masters=split, own,masters=split8"),
    ],
)  # fmt: skip
def test_wrong_candidates(words: list[str], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        candidates(words)


# What is written.


def test_a_comparison_writes_its_folder(case: Case) -> None:
    found = case.compare(seeds=3)
    one = found["candidates"]["bf16"]
    assert case.calls == [run.name for run in schedule(case.request(seeds=3))]
    names = case.calls
    runs = {f"runs/{name}{suffix}" for name in names for suffix in (".jsonl", ".log")}
    assert case.files == {"comparison.json", "verdict.json", *runs}
    assert json.loads((case.out / "verdict.json").read_text()) == found
    assert found["schema"] == 1
    assert found["baseline"] == "fp32"
    assert found["machine"]["cpu"] == "a fake one"
    assert set(one) >= CONTRACT
    assert one["parity"] == "equivalent", one["reason"]
    assert one["speedup"] == pytest.approx(2.0, rel=0.05)
    assert one["speedup_interval"][0] > 1
    assert one["peak_memory_ratio"] == pytest.approx(0.6)
    assert (one["seeds"], one["steps"], one["skipped_steps"], one["final_metric"]) == (3, 40, 0, None)
    assert one["margin"] == pytest.approx(0.005 * one["fp32_loss"])
    assert one["final_loss"] - one["fp32_loss"] == pytest.approx(one["loss_gap"])
    assert "faster" in one["reason"]
    pages = (Path(__file__).parent.parent / "docs").glob("*.md")
    page = "".join(one.read_text(encoding="utf-8") for one in pages)
    assert [key for key in (*found, *one, *one["pairs"][0]) if f"`{key}`" not in page] == []


def test_the_place_of_an_overflow_is_in_the_answer(case: Case) -> None:
    one = {**case.candidate(), "overflow": "forward of mul in head (train.py:6)"}
    assert "forward of mul in head (train.py:6)." in answer("bf16", one, case.request(), case.out)["plain"]
    found = [
        OverflowReport("loss scale", op="mul"),
        OverflowReport("overflow", "head", "mul", line="t.py:6: x * y"),
    ]
    lines = [records.to_line(records.OverflowRecord(0, 0, 0.0, 1.0, report)) for report in found]
    (case.out / "runs" / "odd.jsonl").write_text("\n".join([*lines, ""]))
    assert _overflow([read_run(case.out / "runs", "odd")]) == "forward of mul in head (t.py:6)"


AUTOCAST = ["left alone: it uses torch.autocast itself (t.py line 3)", "to have Mezzo do it, switch it off"]
OWN: dict[str, Any] = {"losses": 0, "status": 2, "notes": AUTOCAST}
QUICK, MORE, RUN = "quick look, ", "mezzo compare ", "mezzo run --precision bf16 "


@pytest.mark.parametrize(
    ("behaviour", "parity", "says", "plain", "command"),
    [
        ({"bf16": {"shift": 0.2}}, "divergent", "pairs need to show it", "worse (1 pair), loss ",
         " --precision bf16"),
        ({"bf16": {"shift": 0.02}}, "inconclusive", "harm is not established", f"{QUICK}too few runs", MORE),
        ({}, "consistent", "within the margin", f"{QUICK}no harm found (1 pair, not proof), loss ", MORE),
        ({"bf16": {"losses": 25}}, "divergent", "25 losses and 25 updates with seed 0; FP32 recorded 40 losses",
         "worse: it recorded 25 losses", "mezzo calibrate "),
        ({"fp16": {"nan": 30}}, "divergent", "its loss is nan from step 30", "worse: with",
         "mezzo run --precision fp16 "),
        ({"bf16": {"crash": "OSError: no kernel"}}, "divergent", "OSError: no kernel", "failed: run bf16-0", RUN),
        ({"bf16": {"crash": "MezzoError: no scale. Cause: mul. Try: fp32"}}, "divergent", "Try: fp32",
         "failed: run bf16-0 ended with exit status 1, FP32's did not (output: runs/bf16-0.log): MezzoError: no scale.",
         RUN),
        ({"bf16": {"notes": [f"no model was called{NOTHING_RAN}bf16"]}}, "inconclusive", "within the margin",
         f"{QUICK}can't tell: no model was called, so nothing ran in bf16", ""),
        ({"bf16": {"signal": 11}}, "divergent", "was killed or crashed", "failed: run bf16-0 was killed", RUN),
    ],
)  # fmt: skip
def test_what_a_candidate_is_called(
    case: Case, behaviour: dict[str, Any], parity: str, says: str, plain: str, command: str
) -> None:
    case.write(behaviour)
    (name,) = behaviour or ["bf16"]
    one = case.candidate(name)
    assert one["parity"] == parity, one["reason"]
    assert says in one["reason"]
    assert one["plain"].startswith(plain)
    assert "Try:" not in one["plain"]
    assert command in one["command"]


def test_a_candidate_that_failed_is_not_run_again_and_the_others_go_on(case: Case) -> None:
    case.write({"bf16-0": {"crash": "ValueError: x", "status": 3}})
    found = case.compare(seeds=2, precisions=("bf16", "fp16"))["candidates"]
    assert "bf16-1" not in case.calls
    assert found["bf16"]["exit_status"] == 3
    assert found["bf16"]["failed"] is True
    assert found["fp16"]["failed"] is False
    assert found["fp16"]["seeds"] == 2


@pytest.mark.parametrize(
    "behaviour",
    [
        {"crash": "ValueError: x"},
        {"notes": [f"no model was called{NOTHING_RAN}bf16"]},
        {"notes": [f"nvfp4{IN_NO_LAYER}."]},
    ],
)
def test_no_more_runs_are_made_once_they_would_tell_no_more(case: Case, behaviour: dict[str, Any]) -> None:
    case.write({"bf16": behaviour})
    one = case.candidate(seeds=3)
    assert case.calls == ["fp32-0", "bf16-0"]
    assert one["cause"]
    assert [note for note in one["notes"] if "emulated" in note] == []
    case.forget_calls()
    case.candidate(seeds=3)
    assert case.calls == (["bf16-0"] if one["failed"] else [])
    case.compare(seeds=3, precisions=("bf16", "fp16"), fresh=True)
    assert {"fp32-2", "fp16-2"} <= {*case.calls}
    assert "bf16-1" not in case.calls


def test_a_metric_is_read_and_judged(case: Case) -> None:
    case.write({"*": {"metric": 97.0}, "bf16": {"metric": 91.0}})
    one = case.candidate(seeds=3, metric=r"accuracy: ([0-9.]+)")
    assert one["metric_margin"] == pytest.approx(0.2)
    assert one["final_metric"] == pytest.approx(91.01)
    assert one["loss_parity"] == "equivalent"
    assert one["parity"] == "divergent"


def test_a_model_that_was_trained_before_another_one_is_judged_too(case: Case) -> None:
    case.write({"*": {"early": 0.0}, "bf16": {"early": 3.0}})
    for seeds in (1, 3):
        one = case.candidate(seeds=seeds)
        assert one["parity"] == "inconclusive", one["reason"]
        assert "Phase 1 of 2 ended worse" in one["plain"]
        assert "script of its own" in one["advice"]
        assert (one["command"], one["proof"]) == ("", "")
        assert "</svg>can't tell</span>" in html.unescape(build(case.out).read_text(encoding="utf-8"))
        assert (one["steps"], [read_run(case.out / "runs", f"fp32-{k}").steps for k in range(seeds)]) == (
            40,
            [40] * seeds,
        )
    assert one["loss_parity"] == "equivalent"


def test_harm_that_was_over_at_the_end_is_in_the_answer(case: Case) -> None:
    one = {**case.candidate(seeds=3), "parity": "consistent", "departed": "Between 50% and 60% it was higher"}
    told = answer("bf16", one, case.request(seeds=3), case.out)
    assert "Between 50% and 60% it was higher." in told["plain"]
    assert told["unproven"] == "Between 50% and 60% it was higher"
    assert told["proof"] == ""
    assert "would probably do" not in told["advice"]


def test_the_losses_of_a_gan_are_no_measure(case: Case) -> None:
    case.write({"*": {"turns": True, "metric": 98.0}})
    one = case.candidate()
    assert (one["steps"], sum("as in a GAN" in note for note in one["notes"])) == (20, 1)
    measured = case.candidate(fresh=True, metric=r"accuracy: ([0-9.]+)")
    assert [note for note in measured["notes"] if "GAN" in note] == []


def test_a_script_that_is_not_reproducible_is_named(case: Case) -> None:
    case.write({"*": {"spread": 2.0}, "fp32-ulp-0": {"first": 9.0}})
    one = case.candidate(seeds=3)
    assert one["parity"] == "inconclusive", one["reason"]
    assert "had the losses" in one["notes"][0]
    assert one["advice"].startswith("make the script reproducible")
    case.write({"fp32-0": {"first": 2.5}, "fp32-ulp-0": {"first": 2.501}})
    one = case.candidate(fresh=True)
    assert one["parity"] == "consistent", one["reason"]
    assert "2.5 and 2.501 in step 0" in one["notes"][0]
    assert one["advice"].startswith("make the script reproducible")
    assert one["proof"] == ""
    case.write({"fp32-0": {"first": 2.5}, "fp32-ulp-0": {"first": 2.50001}})
    assert [note for note in case.candidate(fresh=True)["notes"] if "losses" in note] == []


def test_what_is_slower_and_saves_nothing_is_not_recommended(case: Case) -> None:
    one = case.candidate(seeds=3)
    for memory, word, command in ((0.97, "stay with FP32", "mezzo doctor"), (0.6, "use bf16", "mezzo run")):
        slower = {**one, "speed_word": "slower", "peak_memory_ratio": memory}
        told = answer("bf16", slower, case.request(seeds=3), case.out)
        assert word in told["advice"]
        assert told["command"].startswith(command)
    assert told["advice"] == "use bf16 (it saves memory, but is slower here)"
    emulated = {**slower, "notes": ["bf16 is emulated on this CPU"]}
    assert (
        "hardware with bf16 may be faster"
        in answer("bf16", emulated, case.request(seeds=3), case.out)["advice"]
    )


def test_a_percent_of_memory_is_no_reason_to_use_it(case: Case) -> None:
    case.write({"bf16": {"memory": 990}})
    one = {**case.candidate(seeds=3), "speed_word": "not told apart"}
    assert answer("bf16", one, case.request(seeds=3), case.out)["command"] == "mezzo doctor"


def test_what_gains_nothing_is_not_called_harmless_without_proof(case: Case) -> None:
    case.write({"bf16": {"seconds": 0.02, "spread": 0.006}})
    one = case.candidate(seeds=3)
    assert (one["parity"], one["speed_word"]) == ("consistent", "slower"), one["reason"]
    assert "No harm was found, without proof. The interval of the loss reaches 0.013, beyond" in one["advice"]
    assert "does no harm" not in one["advice"]


@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("shift", [0.0, 0.02])
def test_no_more_pairs_are_made_or_offered_where_the_script_ignores_its_seeds(
    case: Case, seeds: int, shift: float
) -> None:
    case.write({"*": {"seedless": True}, "bf16": {"seconds": 0.005, "shift": shift}})
    told: list[str] = []
    watcher = Watcher()
    watcher.say = told.append  # type: ignore[method-assign]
    one = case.candidate(seeds=seeds, watcher=watcher)
    assert case.calls == [run.name for run in schedule(case.request(seeds=2))]
    assert any("ignores its seed" in line and "last 2 runs" in line for line in told) is (seeds == 3)
    assert (one["parity"], one["seeds"]) == ("inconclusive" if shift else "consistent", 1), one["reason"]
    assert "Every seed gave the same FP32 run, so more pairs prove nothing. Draw " in one["advice"]
    assert (one["command"].startswith("mezzo run "), one["proof"]) == (not shift, "")
    assert "pairs can prove" not in one["reason"]
    assert "pairs of runs" not in one["advice"]


LOW = "fp16,op.softmax=lower"


def test_each_candidate_has_a_next_step_and_equal_ones_are_told_once(case: Case) -> None:
    case.write({"bf16": {"memory": 600, "spread": 0.006}, "fp16": {"shift": 0.2}, LOW: {"shift": 0.2}})
    found = case.compare(seeds=3, precisions=("bf16", "fp16", LOW))["candidates"]
    lines = next_steps(found)
    assert [line.partition(":")[0] for line in lines if line.startswith("Next")] == [
        "Next for bf16",
        f"Next for fp16 and {LOW}",
    ]
    commands = [line.strip() for line in lines if line.startswith("  ")]
    assert commands == [found["bf16"]["command"], found["bf16"]["proof"], found["fp16"]["command"]]
    assert next_steps({"fp16": found["fp16"]})[0].startswith("Next: ")
    first, _, reasons, *_ = lines
    assert (
        first == "Next for bf16: use bf16, without proof:"
    )  # the command follows what to do, and the reasons that
    assert reasons.startswith("The interval of the loss reaches")
    page = html.unescape(build(case.out).read_text(encoding="utf-8"))
    assert f"without proof: <code>{found['bf16']['command']}</code>. {reasons}</p>" in page
    both = {**found["bf16"], "metric_margin": 0.2, "metric_gap_interval": [-0.5, 0.5]}
    told = answer("bf16", both, case.request(seeds=3), case.out)["advice"].split(". ")
    assert [one.partition(" of the ")[2][:6] for one in told if "reaches" in one] == ["metric", "loss r"]


@pytest.mark.parametrize(
    ("word", "memory", "first"),
    [("faster", (0.5, 0.9), "fp16"), ("not told apart", (0.5, 0.9), "bf16"), ("not told apart", (0.5, 0.5), "bf16"),
     ("not told apart", (0.9, 0.5), "fp16")],
)  # fmt: skip
def test_next_steps_are_in_the_order_of_speeds_that_are_known_then_of_memory(
    case: Case, word: str, memory: tuple[float, float], first: str
) -> None:
    speeds = zip(("bf16", "fp16"), (1.2, 1.9), memory)
    one = case.candidate(seeds=3)
    found = {
        name: {**one, "advice": name, "speedup": speed, "speed_word": word, "peak_memory_ratio": share}
        for name, speed, share in speeds
    }
    assert next_steps(found)[0].startswith(f"Next for {first}")


def test_a_longer_comparison_of_a_candidate_has_a_folder_of_its_own(case: Case) -> None:
    case.write({"bf16": {"spread": 0.006}})
    found = case.compare(seeds=3, precisions=("bf16", "fp16"))["candidates"]
    assert found["bf16"]["proof"].endswith(f" --out {case.out}-bf16-16-seeds")


@pytest.mark.parametrize(
    ("spread", "seeds", "says", "proof"),
    [
        (0.006, 3, "use bf16, without proof. The interval of the loss reaches 0.013, beyond its margin of 0.0052.", 16),
        (0.02, 3, "about 161 pairs of runs, or fewer longer ones, would", 161),
        (1.0, 3, "train longer, or judge by a metric (--metric). With this script more than 10,000 pairs", 0),
        (0.0, 3, "use bf16", 0),
        (0.006, 1, "One pair shows no spread", 0),
    ],
)  # fmt: skip
def test_what_is_not_proven_says_how_many_pairs_would_do(
    case: Case, spread: float, seeds: int, says: str, proof: int
) -> None:
    case.write({"bf16": {"seconds": 0.005, "spread": spread}})
    one = case.candidate(seeds=seeds)
    assert says in one["advice"]
    assert ("without proof" in one["advice"]) is bool(proof)
    assert (f" --seeds {proof} " in one["proof"]) is bool(proof)
    smaller = {**one, "margin": 1.0, "loss_gap_interval": [-0.9, 0.9]}
    assert "proof" not in answer("bf16", smaller, case.request(seeds=seeds), case.out)["advice"]
    keras = case.request(seeds=seeds, framework="keras")
    assert ("without proof" in answer("bf16", one, keras, case.out)["advice"]) is bool(proof)


def test_a_speed_whose_interval_is_wide_is_unclear(case: Case) -> None:
    one = case.candidate()  # a pair alone does not show how the machine's speed differs between runs
    assert one["speedup_interval"][0] > 1.5
    assert one["speed_word"] == "not told apart"
    assert one["plain"].endswith("speed unclear (1 pair).")
    assert unclear_speed(one) == "unclear (1 pair)"
    page = html.unescape(build(case.out).read_text(encoding="utf-8"))
    assert re.search("unclear</b><span>1 pair, [12]", page)
    assert "Speed of a training step" not in page
    one = case.candidate(seeds=2)
    assert one["plain"].endswith("about 2x faster.")
    assert unclear_speed({**one, "speedup_interval": (0.5, 4.9)}) == ""
    unclear = {**one, "speedup_interval": (0.38, 7.42), "speed_word": "not told apart"}
    told = answer("bf16", unclear, case.request(), case.out)["plain"]
    assert "0.38x to 7.42x" in told
    assert unclear_speed({**one, "speedup_interval": (0.0, 8e9)}) == "unclear"


@pytest.mark.parametrize(
    ("note", "candidates"),
    [
        (AUTOCAST[0], ["own", "bf16"]),
        (AUTOCAST[0].replace("autocast", "set_autocast_enabled"), ["own", "bf16"]),
        ("left alone: Net has bfloat16 parameters: the script chooses", ["own", "own,masters=split", "bf16"]),
        ("left alone: Net has frozen bfloat16 parameters: the script chooses", ["own", "bf16"]),
        (f"{AUTOCAST[0]}, and trains 16-bit parameters", ["own", "own,masters=split", "bf16"]),
    ],
)
def test_a_script_with_its_own_precision_begins_again_without_it(
    case: Case, note: str, candidates: list[str]
) -> None:
    off = {"notes": ["switched off: torch.autocast bfloat16", "switched off: GradScaler", "something else"]}
    case.write({"refuse": {**OWN, "notes": [note, "fix"]}, "off": off, "record": {"shift": 0.2}})
    told: list[str] = []
    watcher = Watcher()
    watcher.say = told.append  # type: ignore[method-assign]
    found = case.compare(watcher=watcher)
    runs = [f"{name.replace(',', '-').replace('=', '-')}-0" for name in candidates]
    assert case.calls == ["fp32-0", "fp32-0", *runs, "fp32-ulp-0"]
    assert list(found["candidates"]) == candidates
    assert found["own"] == "torch.autocast bfloat16, GradScaler"
    assert found["request"]["own"] == note.removeprefix("left alone: ")
    assert any("has its own mixed precision" in line and "candidate own" in line for line in told)
    own, bf16 = found["candidates"]["own"], found["candidates"]["bf16"]
    assert (own["parity"], own["command"]) == ("divergent", "")
    assert bf16["notes"][-1] == "something else"
    assert not any("switched off" in line for line in bf16["notes"])
    case.forget_calls()
    assert case.compare() == found  # the same command finds its own precision in the folder
    assert case.calls == []
    assert list(case.compare(seeds=3)["candidates"]) == candidates
    assert case.calls.count("own-1") == 1
    assert list(case.compare(fresh=True)["candidates"]) == candidates


def test_what_to_do_with_own_and_the_others(case: Case) -> None:
    case.write({"refuse": {**OWN, "notes": ["left alone: Net has bfloat16 parameters", ""]}})
    found = case.compare(seeds=3, precisions=("bf16",))["candidates"]
    assert {name: one["parity"] for name, one in found.items()} == dict.fromkeys(found, "equivalent")
    smaller = {**found["own"], "peak_memory_ratio": 0.5}
    asked = case.request(seeds=3).with_own("Net has bfloat16 parameters")
    commands = {name: answer(name, smaller, asked, case.out)["command"] for name in found}
    assert commands["own"] == ""
    assert commands["own,masters=split"].startswith("mezzo run --masters split ")
    assert commands["bf16"].startswith("mezzo run --own off --precision bf16 ")


@pytest.mark.parametrize("precisions", [("bf16", "fp16"), ("tf32", "bf16")])
def test_a_script_that_switches_tf32_on_is_told_how_to_compare_with_it(
    case: Case, precisions: tuple[str, ...]
) -> None:
    case.write({"*": {"notes": [f"{HAD_TF32}; it is off"]}})
    found = case.compare(precisions=precisions)
    (note,) = found["notes"]
    assert ("--precision tf32,bf16,fp16 " in note) is ("tf32" not in precisions)
    assert (f"--out {case.out}-tf32" in note) is ("tf32" not in precisions)
    assert not any(HAD_TF32 in text for one in found["candidates"].values() for text in one["notes"])
    assert note in html.unescape(build(case.out).read_text(encoding="utf-8"))
    case.write({})
    assert case.compare(fresh=True)["notes"] == []


@pytest.mark.parametrize(
    ("note", "is_judged"),
    [
        (f"nvfp4{IN_NO_LAYER}. Linear layers of fitting sizes multiply in nvfp4", False),
        (f"mxfp8 and nvfp4{IN_NO_LAYER}.", False),
        ("nvfp4 in 2 linear layers: 0, 2.", True),
        ("recipe mine.toml in 1 linear layer: 0.", True),
        ("Products are emulated on this cpu", True),
    ],
)
def test_a_format_that_no_layer_ran_in_has_no_verdict(case: Case, note: str, is_judged: bool) -> None:
    case.write({"nvfp4": {"notes": [note]}})
    one = case.candidate("nvfp4")
    assert (one["parity"] == "consistent") is is_judged
    assert bool(one["cause"]) is not is_judged
    assert (" --precision bf16 " in one["command"]) is not is_judged
    # A second, small model of the script has none: the first has some.
    case.write({"nvfp4": {"notes": [note, "nvfp4 in 4 linear layers: 0, 2, 4, 6."]}})
    assert case.candidate("nvfp4", fresh=True)["parity"] == "consistent"


def test_a_speed_that_needs_more_steps_says_how_many(case: Case) -> None:
    case.write({"*": {"losses": 11}})
    assert case.candidate()["speedup"] is not None
    case.write({"*": {"losses": 10}})
    one = case.candidate(fresh=True)
    assert (one["speedup"], one["steps"]) == (None, 10)
    assert "11" in one["plain"].rpartition("speed")[2]


# Resuming.


def test_finished_runs_are_kept(case: Case) -> None:
    first = case.compare()
    case.forget_calls()
    (case.out / "runs" / "bf16-0.jsonl").unlink()
    (case.out / "verdict.json").unlink()
    assert case.compare() == first
    assert case.calls == ["bf16-0"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"margin": 0.01}, "margin was 0.005 and is now 0.01"),
        ({"seeds": 4}, "--seeds was 3 and is now 4. Choose"),
        ({"argv": ("--epochs", "3")}, "the script's argument list was none and is now --epochs 3.\n"),
        (
            {"argv": ("3", "--fresh", "--seeds=3")},
            "(--fresh --seeds after -- is passed to the script) was none",
        ),
        ({"precisions": ("fp16",)}, "--precision was bf16 and is now fp16.\n"),
        ({"metric_margin": 2.0}, "--metric-margin was none and is now 2.0.\n"),
    ],
)
def test_another_declaration_is_refused_once_a_candidate_ran(
    case: Case, changes: dict[str, Any], names: str
) -> None:
    case.compare(seeds=3)
    before = (case.out / "verdict.json").read_text()
    changes = {"seeds": 3, **changes}
    with pytest.raises(UsageError) as caught:
        case.compare(**changes)
    for words in (names, f"--out {case.out}-", f"--out {case.out} --fresh"):
        assert words in str(caught.value)
    assert (case.out / "verdict.json").read_text() == before
    case.forget_calls()
    case.compare(**changes, fresh=True)
    assert case.calls[0] == "fp32-0"


def test_seeds_that_may_be_added_are_no_reason_to_refuse(case: Case) -> None:
    case.compare(seeds=1)
    with pytest.raises(UsageError, match=r"settings: --precision was bf16 and is now fp16\.\n"):
        case.compare(seeds=3, precisions=("fp16",))


def test_seeds_may_be_added_to_a_quick_look_only(case: Case) -> None:
    """Fewer than three pairs are never called equivalent, so the test for equivalence is still made once."""
    assert case.candidate()["plain"].startswith("quick look, ")
    case.forget_calls()
    assert case.candidate(seeds=3)["parity"] == "equivalent"
    assert case.calls == ["bf16-1", "fp32-1", "fp32-2", "bf16-2"]
    for seeds in (1, 6):
        with pytest.raises(UsageError, match=f"--seeds was 3 and is now {seeds}"):
            case.compare(seeds=seeds)


def test_an_edited_script_is_another_comparison(case: Case) -> None:
    case.compare()
    case.write({"bf16": {"shift": 0.1}})
    with pytest.raises(UsageError, match=r"train.json has changed since"):
        case.compare()
    other = case.script.with_name("tiny.json")
    other.write_text("{}")
    with pytest.raises(UsageError, match=r"train.json and is now .*tiny.json\.\n") as caught:
        case.compare(target=str(other))
    assert "since" not in str(caught.value)
    (case.out / "comparison.json").write_text("{")
    with pytest.raises(UsageError, match=r"not readable.*--fresh"):
        case.compare()


def test_an_edited_policy_is_named(case: Case) -> None:
    files = [case.script.with_name(name) for name in ("a.toml", "b.toml")]
    for file in files:
        file.write_text('compute = "bf16"\nloss_scale = "none"\n')
    files[1].write_text('compute = "fp16"\n')
    case.compare(precisions=tuple(map(str, files)))
    files[1].write_text('compute = "fp16"\nparams = "fp32"\nloss_scale = 4\n')
    with pytest.raises(UsageError, match=rf"other settings: policy {files[1]} has changed since\."):
        case.compare(precisions=tuple(map(str, files)))


def test_a_wrong_metric_can_be_mended_without_running_fp32_again(case: Case) -> None:
    case.write({"*": {"metric": 97.0}})
    for _ in range(2):
        with pytest.raises(UsageError, match=r"does not match.*accuracy: \(\[0-9(?s:.)*accuracy: 97.0 %"):
            case.compare(metric="test acc=([0-9.]+)")
    assert not (case.out / "verdict.json").exists()
    one = case.candidate(metric="accuracy: ([0-9.]+)")
    assert one["final_metric"] == 97.0
    assert case.calls == ["fp32-0", "bf16-0", "fp32-ulp-0"]


def test_of_a_script_that_trains_nothing_the_last_lines_are_shown(case: Case) -> None:
    usage = "\n".join(f"  --option-{number}" for number in range(50))
    case.write({"*": {"losses": 0, "say": f"usage: train.py\n{usage}"}})
    with pytest.raises(ScriptError) as told:
        case.compare()
    assert str(told.value).endswith("--option-49")
    assert "--option-12\n" in str(told.value)
    assert "--option-8\n" not in str(told.value)


def test_an_interrupt_ends_the_child_and_keeps_what_finished(case: Case) -> None:
    class Stop(Watcher):
        """Interrupts when the second run has done a step, as Ctrl-C would."""

        def steps(self, done: int) -> None:
            if done and self._name.endswith(" bf16-0"):
                raise KeyboardInterrupt

    case.write({"bf16": {"hang": True}})
    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        case.compare(watcher=Stop())
    assert time.monotonic() - since < 30  # it hangs for sixty
    assert case.files == {"comparison.json", "runs/fp32-0.jsonl", "runs/fp32-0.log"}
    pid = int(case.script.with_suffix(".calls").read_text().splitlines()[-1].split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# What is refused.


@pytest.mark.parametrize(
    ("behaviour", "changes", "error", "says"),
    [
        ({"fp32": {"status": 7}}, {}, ScriptError, "FP32 run, exit status 7"),
        ({"fp32": {"crash": "ValueError: x"}}, {}, ScriptError,
         r'File "train.py", line 3, in <module>\nValueError: x'),
        ({"fp32": {"nan": 5}}, {}, ScriptError, r"the loss is nan at step 5 \(run fp32-0\)"),
        ({"refuse": {"losses": 0, "notes": ["left alone: it uses deepspeed itself (t.py)", "fix it"]}}, {}, ScriptError,
         r"it uses deepspeed itself \(t.py\), which mezzo compare can't switch off.*; fix it"),
        ({"refuse": OWN, "off": OWN}, {}, ScriptError, "itself .*can't switch off"),
        ({"refuse": OWN, "off": {"crash": "RuntimeError: dtypes.", "notes": ["switched off: Net in bfloat16"]}}, {},
         ScriptError, r"own mixed precision \(Net in bfloat16\) switched off: RuntimeError: dtypes\. .*\.dtype\)"),
        ({"fp32": {"crash": "EOFError: EOF when reading a line"}}, {}, ScriptError, "standard input"),
        ({"fp32": {"crash": "ModuleNotFoundError: No module named 'apex'"}}, {}, ScriptError, "Remove Apex's amp"),
        ({}, {"precisions": ("own", "bf16")}, UsageError, "no mixed precision of its own, so .* Leave own out"),
        ({"*": {"say": "accelerate"}}, {"precisions": ("own", "bf16")}, UsageError, "of its own .*='fp16'"),
        ({"fp32": {"losses": 0}}, {}, ScriptError, r"never called backward\(\)"),
        ({"bf16": {"signal": 9}}, {}, MezzoError, "killed by signal 9"),
        ({"bf16": {"refuse": "no kernel here"}}, {}, UnsupportedPrecisionError, "bf16 cannot run here: no kernel"),
        # A pattern that matches no module: found at the script's end, or by an error that its records end with.
        ({"bf16": {"mistake": "no module haed"}}, {}, UnsupportedPrecisionError, "cannot run here: no module haed"),
        ({"bf16": {"mistake": "no haed", "status": 1}}, {}, UnsupportedPrecisionError, "cannot run here: no haed"),
        ({"bf16": {"crash": "OSError: [Errno 28] No space left on device"}}, {}, UsageError, "no space left"),
        ({"*": {"say": "accuracy: high"}}, {"metric": "accuracy: (.*)"}, UsageError, "'high', which is no"),
    ],
)  # fmt: skip
def test_what_ends_a_comparison(
    case: Case, behaviour: dict[str, Any], changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    case.write(behaviour)
    with pytest.raises(error, match=says):
        case.compare(**changes)
    assert not (case.out / "verdict.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": 0}, "--seeds 0 is below the minimum of 1"),
        ({"precisions": ("a/p.toml", "a-p.toml")}, "would both write"),
        ({"precisions": ("fp32",)}, "would both write"),
        ({"metric": "accuracy"}, "has no group"),
        ({"metric": "(a)", "metric_margin": -1.0}, "above 0"),
    ],
)
def test_a_request_that_makes_no_sense(case: Case, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        case.request(**changes)


def test_a_folder_of_other_files_is_left_alone(case: Case) -> None:
    case.out.mkdir()
    (case.out / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds other files \(thesis.tex\)"):
        case.compare(fresh=True)
    assert case.files == {"thesis.tex"}


def test_a_folder_that_cannot_be_made(tmp_path: Path, case: Case) -> None:
    case.out.write_text("a file")
    with pytest.raises(UsageError, match="is a file"):
        case.compare()
    with pytest.raises(UsageError, match="Not a directory"):
        compare(case.request(), case.out / "out", command=case.command)


@pytest.mark.parametrize("at", ["comparison.json", "verdict.json"])
def test_a_full_disk_leaves_no_half_file(case: Case, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if target.name == at:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(folder_module.os, "replace", full)
    with pytest.raises(UsageError, match="no space left on the disk"):
        case.compare()
    assert at not in case.files
    assert not [name for name in case.files if name.startswith(".")]
    monkeypatch.undo()
    case.compare()


# The parts.


def test_a_child_has_no_input_and_both_streams_in_order(tmp_path: Path) -> None:
    code = (
        "import sys; print('out'); print('err', file=sys.stderr); print(repr(sys.stdin.read())); sys.exit(5)"
    )
    request = RunRequest("nothing.py", records=tmp_path / "run.jsonl")
    assert run_child((sys.executable, "-c", code), request) == 5
    assert (tmp_path / "run.log").read_text().splitlines() == ["out", "err", "''"]


def test_lines_for_pipes(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "said"
    with path.open("w") as file:
        for _ in range(2):
            case.compare(watcher=Watcher(Console(file=file)))
    said = path.read_text().splitlines()
    assert said[1].startswith("3 runs: 1 FP32, 1 bf16 (1 pair: the same seed), 1 FP32 as noise check")
    assert said[2].startswith("[1/3] fp32-0: 40 steps, ")
    assert said[2].endswith(" s left")
    assert said[4].endswith(" s")  # nothing is left
    assert len(said) == 8
    assert str(case.out) in said[7]


@pytest.mark.parametrize(
    ("pattern", "how", "said"),
    [
        ("validation RMSE: (.*)", "auto", "\nvalidation RMSE: lower is better"),
        ("accuracy: (.*)", "auto", "\naccuracy: higher is better"),
        ("loss: (.*)", "higher", "\nloss: higher is better"),
        (r"test_WER\s+(.*)", "auto", "lower is better"),
        ("answer confidence: (.*)", "auto", "higher is better"),
        (None, "auto", " for a quick look"),
    ],
)
def test_the_plan_says_which_metric_is_better(pattern: str | None, how: str, said: str) -> None:
    plan = planned_runs(Request("train", is_module=True, metric=pattern, metric_better=how))
    assert plan.endswith(said)


def test_the_page_names_the_words_that_make_a_lower_metric_better() -> None:
    page = (Path(__file__).parents[1] / "docs" / "compare.md").read_text(encoding="utf-8")
    sentence = page.partition("Lower is better if")[2].partition("otherwise")[0]
    assert re.findall("`(.*?)`", sentence) == [*LESS_IS_BETTER.split(), *LESS_AS_WORDS.split()]


def test_a_bar_on_a_terminal(case: Case) -> None:
    case.write({"bf16-0": {"crash": "ValueError: [red]x"}})
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    case.compare(watcher=Watcher(console, quiet=True))
    said = file.getvalue()
    assert "[1/3] fp32-0" in said
    assert "40/40" in said
    assert "failed with exit status 1" in said


def test_a_run_that_mezzo_refuses_has_not_failed(case: Case) -> None:
    case.write({"fp32-0": {"mistake": "policy 'bf16,module.haed=fp32': no module haed"}})
    file = io.StringIO()
    with pytest.raises(UsageError, match="no module haed"):
        case.compare(watcher=Watcher(Console(file=file, width=80)))
    assert "fp32-0: stopped by Mezzo, for the reason below" in file.getvalue()
    assert "failed" not in file.getvalue()
    assert "left" not in file.getvalue().splitlines()[-1]  # no time left: the comparison ends


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"acc ([0-9.]+)", "acc 1\nacc 97.5 %\n", (97.5, True, 1)),
        (r"acc (\S+)", "acc 97.50%", (97.5, True, 2)),
        (r"acc ([0-9.]+)", "nothing", None),
        (r"^loss (\S+)$", "x loss 9\nloss 1e-3\n", (0.001, False, 3)),
        (r"n (\S+)", "n nan", (pytest.approx(float("nan"), nan_ok=True), False, 0)),
    ],
)
def test_the_last_match_counts(pattern: str, text: str, expected: tuple[Any, bool, int] | None) -> None:
    assert Metric(pattern).read(text) == expected


@pytest.mark.parametrize(
    ("metric", "percent", "margin", "higher", "relative"),
    [
        (Metric("accuracy (.)"), True, 0.2, True, False),
        (Metric("accuracy (.)"), False, 0.002, True, False),
        (Metric("Validation Loss (.)"), False, 0.005, False, True),
        (Metric("error rate (.)"), True, 0.005, False, True),
        (Metric("loss (.)", better="higher"), False, 0.002, True, False),
        (Metric("loss (.)", margin=3.0), False, 3.0, False, False),
    ],
)
def test_direction_and_margin_of_a_metric(
    metric: Metric, percent: bool, margin: float, higher: bool, relative: bool
) -> None:
    found = metric.margins(0.005, percent)
    assert (found.metric, found.metric_higher, found.metric_relative) == (margin, higher, relative)
