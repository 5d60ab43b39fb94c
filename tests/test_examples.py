"""The examples and the demos: each runs as it stands, small, and prints what it should."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from mezzo.demos import DEMOS
from mezzo.pytorch.training import mixed_precision

EXAMPLES = Path(__file__).parent.parent / "examples"

# Example, its options beside --steps, steps, what its last line must be.
RUNS = [
    ("cnn.py", ["--precision", "fp16"], 12, r"fp16: [0-9.]+% of unseen digits right"),
    ("transformer.py", [], 6, r"bf16,masters=split: [0-9,]+ weights, last loss \d\.\d+"),
    (
        "transformer.py",
        ["--precision", "fp8"],
        6,
        r"fp8,masters=split,.*: [0-9,]+ weights, last loss \d\.\d+",
    ),
    ("recurrent.py", ["--precision", "fp16,hidden=fp32"], 6, r"fp16,hidden=fp32: .* states torch.float32 and .*"),
    ("gan.py", ["--generator", "bf16", "--discriminator", "fp32"], 30, r"\d of 8 clusters reached, \d+% of .*"),
    ("fine_tuning.py", [], 20, r"\{'torch.float32'\} to save; the model has .*'torch.bfloat16'.*"),
    ("accumulation_and_clipping.py", [], 8, r"fp16: 3 updates from 10 batches, last loss .*"),
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "given", "steps", "last"), RUNS, ids=[f"{row[0]} {' '.join(row[1])}" for row in RUNS]
)
def test_an_example_runs(
    name: str,
    given: list[str],
    steps: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--steps", str(steps), *given])
    state = torch.get_rng_state()
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        torch.set_rng_state(state)
        for mp in list(mixed_precision._ALIVE):
            mp.close()
    out = capsys.readouterr().out
    assert re.fullmatch(last, out.strip().splitlines()[-1]), out


def test_every_example_is_run_and_has_a_page() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("keras_")}
    assert {row[0] for row in RUNS} == names
    docs = EXAMPLES.parent / "docs"
    pages = "".join((docs / page).read_text(encoding="utf-8") for page in ("policies.md", "training.md"))
    assert [name for name in names if f"`examples/{name}`" not in pages] == []


SMALL = {
    "digits": "--epochs 1 --width 8",
    "text-gpt": "--steps 3 --width 16 --characters 20000 --context 16 --layers 1",
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(DEMOS))
def test_a_demo_is_a_plain_script_and_prints_its_metric(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = DEMOS[name]
    monkeypatch.setattr(sys, "argv", [str(demo.path), *SMALL[name].split()])
    runpy.run_path(str(demo.path), run_name="__main__")
    (value,) = re.findall(demo.metric, capsys.readouterr().out)
    assert 0 < float(value) <= 100
    assert "mezzo" not in demo.path.read_text().lower()
