"""Muon: torch's bits in FP32, exact masters, skipped steps, AdamW's groups beside Muon's, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.optim import AdamW, Muon, adopt, muon_groups, with_masters
from optimizer_steps import MODES, assert_same, everything, parameters, run, saved_and_loaded, weights

SHAPES = ((5, 13), (64, 64), (65, 3), (1, 1), (40, 90))
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.02},
    "no nesterov": {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    "short momentum": {"lr": 0.02, "momentum": 0.3, "ns_steps": 2, "eps": 0.5, "weight_decay": 0.0},
    "cubic": {"lr": 0.1, "ns_coefficients": (1.5, -0.5, 0.0), "adjust_lr_fn": "original", "momentum": 0.0},
}


def matrices(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return parameters(dtype, SHAPES)


@pytest.mark.parametrize("kernels", ["numba", "reference"])
@pytest.mark.parametrize("row", SETTINGS)
def test_every_bit_is_torch_s(row: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", kernels)
    made = [matrices(torch.float32) for _ in range(3)]
    theirs, ours = torch.optim.Muon(made[0], **SETTINGS[row]), Muon(made[1], **SETTINGS[row])
    for optimizer, params in ((theirs, made[0]), (ours, made[1])):
        run(optimizer, params, range(3))
    assert_same([*made[0], *map(momentum_of(theirs), made[0])], [*made[1], *map(momentum_of(ours), made[1])])
    assert not torch.equal(made[0][1], made[2][1])
    back, other = torch.optim.Muon(made[1]), Muon(made[0])
    back.load_state_dict(saved_and_loaded(ours.torch_state_dict()))
    other.load_state_dict(saved_and_loaded(theirs.state_dict()))
    for optimizer in (back, other):
        run(optimizer, weights(optimizer), range(3, 5))
    assert_same(made[0], made[1])
    fresh = Muon(low := matrices(), masters="split")
    fresh.set_master(low[0], torch.ones(5, 13))
    back.load_state_dict(fresh.torch_state_dict())
    run(back, made[1], range(1))


def momentum_of(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], torch.Tensor]:
    return lambda param: optimizer.state[param]["momentum_buffer"]


@pytest.mark.parametrize(("masters", "state"), MODES)
def test_16_bit_weights_follow_fp32_ones(masters: str, state: str) -> None:
    low, wide = matrices(), matrices(torch.float32)
    lean, exact = Muon(low, 0.02, masters=masters, state=state), Muon(wide, 0.02)
    for optimizer in (lean, exact):
        run(optimizer, weights(optimizer), range(4))
    for start, weight, expected in zip(matrices(torch.float32), low, wide):
        if (masters, state) in (("fp32", "fp32"), ("split", "fp32")):
            assert torch.equal(lean.master(weight), expected)
        moved, off = (expected - start).norm(), (lean.master(weight) - expected).norm()
        assert off <= 0.35 * moved + 0.004 * start.norm()
    assert {entry["momentum_buffer"].dtype for entry in lean.state.values()} == {
        {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[state]
    }


class Net(nn.Module):
    """A tied embedding, a table of positions, a norm, hidden layers, a frozen one, a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.frozen, self.norm, self.conv = nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1)
        self.tied, self.head = nn.Linear(8, 11, bias=False), nn.Linear(8, 3)
        self.tied.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens) + self.positions)
        x = self.conv((x + self.down(self.up(x).relu())).mT).mT
        return self.tied(self.frozen(x)).logsumexp(-1).mean() + self.head(x).square().mean()


def test_groups_are_those_that_users_write() -> None:
    net = Net()
    names = {id(param): name for name, param in net.named_parameters()}
    groups = muon_groups(net, {"lr": 0.02}, {"lr": 3e-4, "betas": (0.9, 0.95)}, exclude=["pos*"])
    found = [[names[id(param)] for param in group.pop("params")] for group in groups]
    assert found[0] == ["up.weight", "down.weight"]
    assert len(set(found[1])) == len(found[1]) == 9
    assert {"positions", "embed.weight", "head.weight", "conv.weight", "up.bias"} < set(found[1])
    assert groups == [{"use_muon": True, "lr": 0.02}, {"use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95)}]
    assert id(net.positions) in map(id, muon_groups(net)[0]["params"])
    assert id(net.positions) not in map(id, muon_groups(net, exclude="pos*")[0]["params"])
    assert len(muon_groups(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Embedding(2, 4).requires_grad_(False),
                                         nn.Linear(4, 4).requires_grad_(False)))) == 1  # fmt: skip


def give_gradients(net: Net, step: int) -> None:
    for index, param in enumerate(param for param in net.parameters() if param.requires_grad):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def test_one_optimizer_of_both_groups_is_two_optimizers_to_the_bit() -> None:
    together, apart = Net(), Net()
    apart.load_state_dict(together.state_dict())
    for net in (together, apart):
        mezzo.optim.lower_weights(net, "bf16")
    both = Muon(muon_groups(together, {"lr": 0.02}), masters="split")
    assert {name: both.param_groups[1][name] for name in ("lr", "eps")} == {"lr": 1e-3, "eps": 1e-8}
    first, second = muon_groups(apart, {"lr": 0.02})
    two = [Muon([first], masters="split"), AdamW([second], masters="split")]
    for step in range(4):
        if step == 2:
            state = saved_and_loaded(both.state_dict())
            both.state.clear()
            both = Muon(muon_groups(together), masters="split")
            both.load_state_dict(state)
            with pytest.raises(UsageError, match=r"use_muon=False.*state_dict\(\)"):
                both.torch_state_dict()
        give_gradients(together, step)
        give_gradients(apart, step)
        for optimizer in (both, *two):
            optimizer.step()
    assert_same(everything(both), [*everything(two[0]), *everything(two[1])])


def test_training_engines_take_it() -> None:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    final = []
    for release in (False, True):
        torch.manual_seed(0)
        net = Net()
        mp = mezzo.MixedPrecision(
            net,
            Muon(muon_groups(net, {"lr": 0.02}), masters="split", state="bf16"),
            "bf16,masters=split,state=bf16",
            release_gradients=release,
        )
        losses = []
        for _ in range(6):
            with mp.autocast():
                loss = net(tokens)
            losses.append(float(mp.step(loss).loss))
        assert losses[-1] < losses[0]
        final.append([param.detach().clone() for param in net.parameters()])
    assert_same(*final)


def test_torch_s_is_adopted_and_has_separate_masters_too() -> None:
    kept, low, wide = matrices(), matrices(), matrices()
    made = adopt(torch.optim.Muon(kept, 0.02), masters="split", state="fp32")
    own, separate = Muon(low, 0.02, masters="split"), with_masters(torch.optim.Muon(wide, 0.02))
    assert isinstance(made, Muon)
    for optimizer in (made, own, separate):
        run(optimizer, weights(optimizer), range(3))
    assert_same(everything(made), everything(own))
    assert {entry["momentum_buffer"].dtype for entry in separate.state.values()} == {torch.float32}
    assert_same(list(map(separate.master, wide)), list(map(own.master, low)))
