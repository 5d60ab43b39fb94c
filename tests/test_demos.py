"""The demos run on their own, print the metric that the table says, and know nothing of Mezzo."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.cli.main import main
from mezzo.demos import DEMOS, find
from mezzo.demos.text_lstm import windows

_TEXT = "--steps 3 --width 16 --characters 20000 --context"
SMALL = {
    "digits": "--epochs 1 --width 8",
    "text-gpt": f"{_TEXT} 16 --layers 1",
    "text-lstm": f"{_TEXT} 8",
    "transfer": "--pretrain-epochs 1 --epochs 1 --width 4 --image-size 8",
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(DEMOS))
def test_demo_runs_as_a_plain_script_and_prints_its_metric(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = find(name)
    monkeypatch.setattr(sys, "argv", [str(demo.path), *SMALL[name].split()])
    runpy.run_path(str(demo.path), run_name="__main__")
    (value,) = re.findall(demo.metric, capsys.readouterr().out)
    assert 0 < float(value) <= 100
    assert "mezzo" not in demo.path.read_text().lower()


def test_a_wrong_name_is_told_the_nearest_right_one() -> None:
    with pytest.raises(LookupError, match=r"unknown demo 'digit'.*digits, text-gpt.*Did you mean 'digits'\?"):
        find("digit")


def test_the_windows_of_a_stream_are_its_text_in_order() -> None:
    """A hidden state that is carried on must find, in its own lane, the character after the last one."""
    text = torch.arange(103)
    seen = list(windows(text, streams=4, context=6))
    assert len(seen) == 4  # 25 characters a stream: four whole windows, and one character left over
    inputs = torch.cat([window for window, _ in seen])
    targets = torch.cat([window for _, window in seen])
    assert inputs.shape == (24, 4)
    for lane in range(4):
        assert inputs[:, lane].tolist() == list(range(25 * lane, 25 * lane + 24))
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_lstms_state_leaves_a_call_in_fp32_and_may_come_back(precision: str, launch: Any) -> None:
    ran = launch(
        """
        import torch
        from mezzo.demos.text_lstm import CharacterLSTM, detached
        torch.manual_seed(0)
        model = CharacterLSTM(16, 2, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens, state = torch.randint(97, (4, 8, 3)), None
        for window in tokens:
            logits, state = model(window, state)
            state = detached(state)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), window.flatten()).backward()
            optimizer.step()
        print(logits.dtype, *(part.dtype for part in state), *(tuple(part.shape) for part in state))
        carried = model(window, tuple(part.to(torch.float16) for part in state))[0]
        print((carried - model(window)[0]).abs().max().item() > 1e-3)
        """,
        policy=f"{precision},hidden=fp32",
    )
    assert ran.status == 0, ran.err
    assert ran.lines == ["torch.float32 torch.float32 torch.float32 (2, 3, 16) (2, 3, 16)", "True"]


@pytest.mark.heavy
def test_a_comparison_of_the_lstm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "compare --demo text-lstm --precision bf16 --seeds 1 --json -- --steps 40 --width 32"
    status = main([*words.split(), "--characters", "60000", "--context", "16"])
    out, err = capsys.readouterr()
    assert status == 0, err
    one = json.loads(out)["candidates"]["bf16"]
    assert one["parity"] == "consistent", one["reason"]
    assert one["steps"] == 40
    assert abs(one["loss_gap"]) < 0.02
    assert 1 < one["final_metric"] < 5  # nats a character: ln 97 is 4.57
