"""A policy's `bf16_from`: linear layers multiply in bf16 from an update on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import UsageError
from run_scripts import launcher


def switching(steps: int, text: str) -> tuple[list[Tensor], mezzo.MixedPrecision]:
    """The weights after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
    weights = []
    for _ in range(steps):
        with mp.autocast():
            loss = model(torch.randn(32, 64)).square().mean()
        mp.step(loss)
        weights.append(model[0].weight.detach().clone())
    return weights, mp


@pytest.mark.parametrize(
    "text", ["mxfp8", "bf16,module.2=mxfp8", "nvfp4,recipe=nvfp4-plain", "fp8,scaling=rowwise"]
)
def test_linear_layers_multiply_in_bf16_from_an_update_on(text: str) -> None:
    whole, plain = switching(4, text)
    changed, mp = switching(4, f"{text},bf16_from=2")
    assert torch.equal(whole[1], changed[1])
    assert not torch.equal(whole[2], changed[2])
    assert mp.policy.computed == {"bf16"}
    # A checkpoint goes on where it was: before the switch, or after it.
    mp.load_state_dict(plain.state_dict() | {"updates": 1})
    assert mp.policy == plain.policy
    mp.load_state_dict(plain.state_dict())
    assert mp.policy.computed == {"bf16"}


def test_a_run_switches_to_bf16_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            print(model[1].weight.sum().item())
    """
    run = launcher(tmp_path, capsys)
    for text in ("mxfp8", "bf16,module.1=mxfp8"):
        whole, changed = (run(script, policy=f"{text}{end}") for end in ("", ",bf16_from=2"))
        assert whole.lines[:2] == changed.lines[:2]
        assert whole.lines[2] != changed.lines[2]
        assert "bf16 from update 2 on" in changed.err
        assert "bf16_from" not in whole.err
        late = run(script, policy=f"{text},bf16_from=9")
        assert late.lines == whole.lines
        assert "bf16_from=9 was not reached: 4 updates" in late.err


WRONG_SWITCHES = [
    ("bf16,bf16_from=9", "nvfp4"),
    ("nvfp4,bf16_from=10%", "bf16_from=900"),
    ("nvfp4,bf16_from=0", "'0'"),
]


@pytest.mark.parametrize(("text", "part"), WRONG_SWITCHES)
def test_a_switch_that_cannot_be(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        mezzo.policy(text)
    with pytest.raises(UsageError, match="MixedPrecision or mezzo run"):
        mezzo.autocast("nvfp4,bf16_from=9", "cpu")
    assert "mxfp8 in 1 linear layer" in str(
        mezzo.explain(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)),
            torch.ones(2, 64),
            precision="mxfp8,bf16_from=9",
        )
    )
