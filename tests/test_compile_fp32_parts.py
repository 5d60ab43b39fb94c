"""What a policy keeps in FP32 stays there under torch.compile, backward too, where numbers lie beyond fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.pytorch.autocast import compiling

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


class Large(nn.Module):
    """A linear layer whose input lies beyond fp16's largest number."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        with torch.no_grad():
            self.deep[0].weight.mul_(1e-6)  # so that tanh has a slope

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(x.float() * 1e6)


def trained(precision: str, compiled: bool) -> list[Any]:
    """Whether each of three steps was skipped, its loss, and the weights after all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=1e-13), precision, loss_scale=1024.0)
    model = torch.compile(net, backend="aot_eager") if compiled else net
    told: list[Any] = []
    for _ in range(3):
        with mp.autocast():
            loss = model(x).square().mean()
        told.append((mp.step(loss).skipped, float(loss.detach()).hex()))
    mp.close()
    return [*told, *(param.detach().clone() for param in net.parameters())]


@pytest.mark.parametrize("precision", ["fp16,module.1=fp32", "fp16,op.linear=fp32", "bf16,module.1=fp32"])
def test_a_compiled_backward_pass_keeps_it_in_fp32(precision: str) -> None:
    torch._dynamo.reset()
    eager, compiled = trained(precision, False), trained(precision, True)
    assert [skipped for skipped, _ in eager[:3]] == [False] * 3
    assert compiled[:3] == eager[:3]
    assert all(torch.equal(one, other) for one, other in zip(compiled[3:], eager[3:], strict=True))


def test_a_setting_of_the_users_stays() -> None:
    from torch._functorch import config

    for before, after in (
        ([{"device_type": "cpu"}], [{"device_type": "cpu"}]),
        ("off", "off"),
        ("same_as_forward", "off"),
    ):
        with config.patch(backward_pass_autocast=before):
            compiling.begin()
            assert config.backward_pass_autocast == after
            compiling.end()
            assert config.backward_pass_autocast == before
