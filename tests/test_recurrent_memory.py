"""Why the state between steps is FP32: what a step adds to a state 256 times larger is lost in bf16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mezzo.pytorch.kernels import recurrent

STEPS = 4000
GROWTH = 2.0**-10  # of an LSTM's cell a step: more than half an ulp of bf16 up to 0.25, of fp16 up to 2
RATE = 2.0**-11  # of the way to 1 that a GRU's state goes a step


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def logit(p: float) -> float:
    return float(torch.tensor(p, dtype=torch.float64).logit())


def counter(kind: str) -> nn.RNNBase:
    """A layer of one unit that adds at each step, whatever comes in."""
    module = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_relu": nn.RNN}[kind](1, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        if kind == "lstm":  # c + GROWTH: input gate open as far as that, forget gate wide open, candidate 1
            module.bias_ih_l0.copy_(torch.tensor([logit(GROWTH), 30.0, 10.0, 0.0]))
        elif kind == "gru":  # h + RATE * (1 - h): reset gate of no matter, update gate, candidate 1
            module.bias_ih_l0.copy_(torch.tensor([0.0, logit(1 - RATE), 10.0]))
        else:  # h + GROWTH
            module.weight_hh_l0.fill_(1.0)
            module.bias_ih_l0.fill_(GROWTH)
    return module


def counted(kind: str, compute: torch.dtype, hidden_fp32: bool, steps: int = STEPS) -> float:
    """The state after so many steps."""
    module = counter(kind)
    zero = torch.zeros(1, 1, 1)
    args = (module._flat_weights, True, 1, 0.0, False, False, False)
    x = torch.zeros(steps, 1, 1)
    how = {"compute": compute, "hidden_fp32": hidden_fp32}
    if kind == "lstm":
        return float(recurrent.lstm(x, [zero, zero], *args, **how)[2].detach())
    return float(getattr(recurrent, kind)(x, zero, *args, **how)[1].detach())


# Kind -> where it is after STEPS steps by arithmetic, and where a bf16 and an fp16 state stop on the way: at the
# binade in which a step's growth is half an ulp (ties to even), for the GRU with the growth that is left there.
ROWS = {
    "lstm": (STEPS * GROWTH, 0.25, 2.0),
    "gru": (1 - (1 - RATE) ** STEPS, 0.125, 0.5),
}


@pytest.mark.parametrize("kind", ROWS)
def test_an_fp32_state_counts_on(kind: str) -> None:
    expected = ROWS[kind][0]
    for compute in (torch.bfloat16, torch.float16):
        assert counted(kind, compute, True) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ROWS)
def test_a_rounded_state_sticks(kind: str) -> None:
    expected, *stops = ROWS[kind]
    for compute, stop in zip((torch.bfloat16, torch.float16), stops):
        reached = counted(kind, compute, False)
        assert reached == counted(kind, compute, False, 2 * STEPS)  # for good
        assert reached == pytest.approx(stop, rel=0.3)
        assert reached < 0.7 * expected


def test_pytorchs_own_bf16_layer_sticks() -> None:
    """It's the arithmetic that a plain torch.autocast has on a CPU."""
    module = counter("lstm")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, (_, c) = module(torch.zeros(STEPS, 1, 1))
    assert float(c) < 0.5


@pytest.mark.parametrize("hidden_fp32", [True, False])
def test_a_plain_rnn_hears_of_its_state_through_the_product_alone(hidden_fp32: bool) -> None:
    """So rounding the factor rounds the state: no format of the state helps, and the op belongs in FP32."""
    assert counted("rnn_relu", torch.bfloat16, hidden_fp32) == pytest.approx(0.25, rel=0.3)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_loop_of_cells_counts_as_the_layer_does(kind: str) -> None:
    module = counter(kind)
    steps = 600
    for hidden_fp32 in (True, False):
        how = {"compute": torch.bfloat16, "hidden_fp32": hidden_fp32}
        h = c = torch.zeros(1, 1)
        with torch.no_grad():
            for _ in range(steps):
                x = torch.zeros(1, 1)
                if kind == "lstm":
                    h, c = recurrent.lstm_cell(x, [h, c], *module._flat_weights, **how)
                else:
                    h = recurrent.gru_cell(x, h, *module._flat_weights, **how)
        reached = float(c if kind == "lstm" else h)
        assert reached == counted(kind, torch.bfloat16, hidden_fp32, steps)
        by_arithmetic = steps * GROWTH if kind == "lstm" else 1 - (1 - RATE) ** steps
        assert (reached == pytest.approx(by_arithmetic, rel=1e-3)) is hidden_fp32


def share(steps: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Zeros and ones [steps, batch, 1], and which share of a sequence are ones [batch, 1]."""
    chance = torch.rand(1, batch, 1, generator=generator)
    x = (torch.rand(steps, batch, 1, generator=generator) < chance).float()
    return x, x.mean(0)


def trained(hidden_fp32: bool, seed: int, steps: int = 1000, width: int = 16, updates: int = 80) -> float:
    """What an LSTM that has learnt to say the share of ones leaves unexplained, of 1: on other data, as trained.

    It starts as one that is to remember for so many steps: forget gates 1 - 1/T and input gates 1/T, T up to `steps`
    (Tallec and Ollivier, "Can recurrent neural networks warp time?", arXiv 1804.11188, section 2).
    """
    torch.manual_seed(seed)
    lstm, head = nn.LSTM(1, width), nn.Linear(width, 1)
    with torch.no_grad():
        times = (torch.rand(width) * (steps - 2) + 1).log()
        lstm.bias_hh_l0.zero_()
        lstm.bias_ih_l0.zero_()
        lstm.bias_ih_l0[:width], lstm.bias_ih_l0[width : 2 * width] = -times, times
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    def said(x: Tensor) -> Tensor:
        zeros = torch.zeros(1, x.shape[1], width)
        args = (x, [zeros, zeros], lstm._flat_weights, True, 1, 0.0, True, False, False)
        output = recurrent.lstm(*args, compute=torch.bfloat16, hidden_fp32=hidden_fp32)[0]
        answer: Tensor = head(output[-1].float())
        return answer

    data = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        x, y = share(steps, 32, data)
        loss = (said(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        x, y = share(steps, 256, torch.Generator().manual_seed(99))
        return float((said(x) - y).square().mean() / y.var())


@pytest.mark.heavy
def test_training_with_a_rounded_state_ends_worse() -> None:
    """Two seeds; the same start, data and order, and only the format of what goes from step to step differs."""
    kept, rounded = ([trained(hidden_fp32, seed) for seed in (0, 1)] for hidden_fp32 in (True, False))
    assert max(kept) < 0.02, kept
    assert min(rounded) > 1.5 * max(kept), (kept, rounded)
    assert sum(rounded) > 3 * sum(kept), (kept, rounded)
