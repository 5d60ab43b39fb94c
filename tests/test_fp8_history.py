"""Delayed scales: what enters a history, who owns it, and what is said when a tensor outgrows it."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from collections import deque
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.fp8 import Fp8Scaling
from mezzo.pytorch.kernels.fp8 import history, widen
from mezzo.pytorch.kernels.fp8.history import (
    Fp8SaturationWarning,
    WeightHistory,
    history_state,
    load_history_state,
    name_weights,
)
from mezzo.pytorch.kernels.fp8.linear import fp8_linear

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4: 448.0, E5: 57344.0}
DELAYED = Fp8Scaling(history=3)
quiet = pytest.mark.filterwarnings("ignore::mezzo.pytorch.kernels.fp8.history.Fp8SaturationWarning")


@pytest.fixture(autouse=True)
def _no_histories() -> Iterator[None]:
    yield
    gc.collect()
    assert not len(history._HISTORIES), "a test left a history behind"
    assert not len(history._NAMES)


def naive_scale(amax: float, dtype: torch.dtype, margin: int) -> float:
    exponent = 0
    while amax * 2.0**exponent > LARGEST[dtype]:
        exponent -= 1
    while amax * 2.0 ** (exponent + 1) <= LARGEST[dtype]:
        exponent += 1
    return float(2.0 ** (exponent - margin))


@quiet
@settings(max_examples=60, deadline=None)
@given(
    amaxes=st.lists(st.sampled_from([0.0, 0.001, 0.9, 1.0, 3.5, 7.1, 500.0, 1e6]), max_size=12),
    length=st.integers(1, 4),
    margin=st.integers(0, 2),
    role=st.sampled_from(history.ROLES),
)
def test_the_scale_is_that_of_the_largest_of_the_last_uses(
    amaxes: list[float], length: int, margin: int, role: str
) -> None:
    weight = torch.zeros(2, 2)
    past = WeightHistory(weight)
    recorded: deque[float] = deque(maxlen=length)
    was_ever, last = False, math.nan
    dtype = E5 if role == "gradient" else E4
    for amax in amaxes:
        if any(recorded):
            last = naive_scale(max(recorded), dtype, margin)
        elif not was_ever:
            last = naive_scale(amax, dtype, margin) if amax else 1.0
        x = torch.tensor([[amax, -amax / 2]])
        codes, scale = past.quantize(role, x, dtype, Fp8Scaling(history=length, margin=margin))
        assert float(scale) == last, (amax, recorded)
        cut = (x * last).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
        assert torch.equal(codes.view(torch.uint8), cut.view(torch.uint8))
        recorded.append(amax)
        was_ever = was_ever or amax > 0


def test_nan_and_infinities_never_enter() -> None:
    weight = torch.zeros(2, 2)
    past = history.of(weight)
    for bad in (math.nan, math.inf, -math.inf):
        past.quantize("gradient", torch.tensor([[bad, 2.0]]), E5, DELAYED)
        past.quantize("input", torch.tensor([[bad, bad]]), E4, DELAYED)
    assert past.tracks["gradient"].amaxes.tolist() == [2.0, 2.0, 2.0]
    assert past.tracks["input"].amaxes.tolist() == [0.0, 0.0, 0.0]


class Two(nn.Module):
    def __init__(self, scaling: Fp8Scaling = DELAYED) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.scaling = nn.Linear(32, 48), nn.Linear(48, 32), scaling

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(fp8_linear(x, self.up.weight, self.up.bias, scaling=self.scaling))
        return fp8_linear(h, self.down.weight, self.down.bias, scaling=self.scaling)


def batch(step: int) -> Tensor:
    """Amaxes that rise and fall between steps."""
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1.0, 4.0, 0.0)[step % 3]


def train(model: nn.Module, steps: int, mode: str = "plain") -> list[Tensor]:
    found = []
    for step in range(steps):
        x = batch(step).requires_grad_()
        if mode == "plain":
            y = model(x)
        else:
            y = checkpoint(model, x, use_reentrant=mode == "reentrant")
        y.float().square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                found.append(p.grad)
                p -= 0.1 * p.grad
                p.grad = None
    return found


@quiet
def test_a_step_records_each_tensor_once() -> None:
    model = Two()
    train(model, 2)
    state = history_state(model.named_parameters())
    assert list(state) == ["up.weight", "down.weight"]
    for roles in state.values():
        assert sorted(roles) == ["gradient", "input", "weight"]
        assert all(amaxes[0] == 0 and (amaxes[1:] > 0).all() for amaxes in roles.values())
    assert state["up.weight"]["input"][1:].tolist() == [float(batch(step).abs().max()) for step in range(2)]


@quiet
@pytest.mark.parametrize("mode", ["reentrant", "again"])
@pytest.mark.parametrize("length", [1, 3])
def test_recomputation_neither_records_twice_nor_changes_a_number(mode: str, length: int) -> None:
    plain, again = (Two(Fp8Scaling(history=length)) for _ in range(2))
    for one, other in zip(train(plain, 5), train(again, 5, mode)):
        assert torch.equal(one, other)
    states = [history_state(model.named_parameters()) for model in (plain, again)]
    for name in states[0]:
        for role in history.ROLES:
            assert torch.equal(states[0][name][role], states[1][name][role]), (name, role)


@quiet
def test_evaluation_uses_a_history_and_leaves_it() -> None:
    model = Two()
    train(model, 3)
    before = copy.deepcopy(history_state(model.named_parameters()))
    big = batch(0) * 1000
    with torch.no_grad():
        low = model(big)
        other = Two()
        other.load_state_dict(model.state_dict())
        dynamic = other(big)
    assert not torch.equal(low, dynamic), "the history's scale cuts what the own scale does not"
    after = history_state(model.named_parameters())
    for name, roles in before.items():
        assert all(torch.equal(after[name][role], amaxes) for role, amaxes in roles.items())


@quiet
def test_a_history_dies_with_its_model_and_is_no_part_of_it() -> None:
    model = Two()
    keys = list(model.state_dict())
    train(model, 2)
    name_weights(model)
    assert len(history._HISTORIES) == 2
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not history_state(twin.named_parameters())
    y = model(batch(0))  # a graph holds the history, and no more of the model than it holds anyway
    del model, twin
    gc.collect()
    del y
    gc.collect()
    assert not len(history._HISTORIES)


@quiet
def test_a_saved_history_goes_on_where_it_was() -> None:
    one_use = Fp8Scaling(history=1)
    whole, first = Two(one_use), Two(one_use)
    expected = train(whole, 5)[-4:]
    train(first, 4)
    state = pickle.loads(pickle.dumps(history_state(first.named_parameters())))
    second, forgetful = Two(one_use), Two(one_use)
    for model in (second, forgetful):
        model.load_state_dict(first.state_dict())
    load_history_state(second.named_parameters(), state)
    saved = history_state(second.named_parameters())
    assert all(torch.equal(saved[n][r], state[n][r]) for n in state for r in state[n])

    def fifth(model: nn.Module) -> list[Tensor]:
        model(batch(4)).float().square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(one, other) for one, other in zip(expected, fifth(second)))
    assert not all(torch.equal(one, other) for one, other in zip(expected, fifth(forgetful)))
    load_history_state(second.named_parameters(), {})
    assert not history_state(second.named_parameters())


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"up.weigth": {}}, r"unknown parameter 'up.weigth'.*Did you mean 'up.weight'"),
        (
            {"up.weight": {"inputs": torch.zeros(3)}},
            r"unknown role of a tensor 'inputs'.*gradient, input, weight",
        ),
        (
            {"up.weight": {"input": torch.full((3,), torch.nan)}},
            "its input is no 1-D tensor of finite amaxes",
        ),
        ({"up.weight": {"input": torch.full((3,), -1.0)}}, "finite amaxes"),
        ({"up.weight": {"input": torch.full((3,), torch.inf)}}, "finite amaxes"),
        ({"up.weight": {"input": [1.0]}}, "finite amaxes"),
    ],
)
@quiet
def test_a_wrong_state_is_refused_whole(state: dict[str, dict[str, Tensor]], match: str) -> None:
    model = Two()
    train(model, 1)
    with pytest.raises(UsageError, match=match) as caught:
        load_history_state(model.named_parameters(), state)
    assert isinstance(caught.value, UnknownNameError) == ("unknown" in match)
    assert len(history_state(model.named_parameters())) == 2


def test_another_length_keeps_the_newest() -> None:
    weight = torch.zeros(2, 2)
    past = WeightHistory(weight)
    for amax in (8.0, 2.0, 1.0):
        past.quantize("input", torch.tensor([[amax]]), E4, Fp8Scaling(history=3))
    past.quantize("input", torch.tensor([[1.0]]), E4, Fp8Scaling(history=2))
    assert past.tracks["input"].amaxes.tolist() == [1.0, 1.0]
    past.quantize("input", torch.tensor([[1.0]]), E4, Fp8Scaling(history=4))
    assert past.tracks["input"].amaxes.tolist() == [0.0, 1.0, 1.0, 1.0]


def outgrown(past: WeightHistory, role: str, uses: int = 1) -> None:
    """Uses of amax 1, then `uses` of 0.9 but for three values of 4."""
    dtype = E5 if role == "gradient" else E4
    past.quantize(role, torch.ones(10, 10), dtype, DELAYED)
    x = torch.full((10, 10), 0.9)
    x[0, :3] = 4.0
    for _ in range(uses):
        past.quantize(role, x, dtype, DELAYED)


SAID = {"input": "the input", "weight": "the weight", "gradient": "the gradient of the output"}


@pytest.mark.parametrize("role", history.ROLES)
def test_a_tensor_that_outgrows_its_scale_is_named_once(role: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    name_weights(model)
    past = history.of(model[1].weight)
    allowed = LARGEST[E5 if role == "gradient" else E4] / naive_scale(
        1.0, E5 if role == "gradient" else E4, 0
    )
    with pytest.warns(Fp8SaturationWarning) as caught:
        outgrown(past, role, uses=6)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(f"fp8: 3 of 100 values of {SAID[role]} of layer '1' were beyond")
    assert f"the largest was 4, allowed was {allowed:.4g}." in text
    assert "Use scaling=tensorwise, which measures" in text
    assert "scaling=tensorwise(history=3,margin=2)." in text, "4 is 2.3 times 1.75"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        past.quantize(role, torch.full((1, 1), 1e4), E4, DELAYED)


def test_a_layer_without_a_name_is_known_by_its_shape_and_a_root_by_its_class() -> None:
    weight = torch.zeros(48, 32)
    with pytest.warns(Fp8SaturationWarning, match=r"the linear layer with a weight of \[48, 32\]"):
        outgrown(history.of(weight), "input")
    root = nn.Linear(2, 2)
    name_weights(root)
    assert history.of(root.weight).label() == "layer 'Linear'"
    past = history.of(weight)
    del weight
    assert past.label() == "a linear layer that is gone"


def test_enough_margin_is_quiet() -> None:
    past = WeightHistory(torch.zeros(2, 2))
    scaling = Fp8Scaling(history=3, margin=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for amax in (1.0, 4.0, 1.0, 0.0, 7.0):
            past.quantize("input", torch.tensor([[amax]]), E4, scaling)


def three_steps(model: nn.Module, x: Tensor) -> None:
    """The second one's gradients and the third one's inputs are a thousand times larger."""
    for of_x, of_y in ((1, 1), (1, 1000), (1000, 1)):
        (model(x * of_x).float() * of_y).sum().backward()


def test_a_layer_of_a_model_warns_by_name_in_forward_and_backward() -> None:
    model = Two()
    name_weights(model)
    x = batch(0)
    with pytest.warns(Fp8SaturationWarning) as caught:
        three_steps(model, x)
    said = [str(w.message) for w in caught]
    for tensor, layer in (
        ("the gradient of the output", "up"),
        ("the gradient of the output", "down"),
        ("the input", "up"),
    ):
        assert any(f"{tensor} of layer '{layer}'" in text for text in said)
    assert len(said) == len(set(said))


def test_a_gpu_s_counters_are_looked_at_every_hundred_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors, with a GPU's rhythm: nothing is read in between."""
    weight = torch.zeros(2, 2)
    past = history.of(weight)
    past.look_every = 5
    reads: list[int] = []
    uses = 0

    def noticed(self: Tensor) -> float:
        reads.append(uses)
        return float(self.detach().numpy())

    def use(x: Tensor) -> None:
        nonlocal uses
        uses += 1
        past.quantize("input", x, E4, DELAYED)

    monkeypatch.setattr(Tensor, "__float__", noticed)
    monkeypatch.setattr(Tensor, "__bool__", lambda self: bool(noticed(self)))
    monkeypatch.setattr(Tensor, "__int__", lambda self: int(noticed(self)))
    small, big = torch.ones(10, 10), torch.full((10, 10), 100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in [small] * 7 + [big] + [small] * 2:  # cut at the eighth use, noticed at the tenth
            use(x)
        for x in [small] * 4:  # from here on cut values are counted
            use(x)
    assert set(reads) == {5, 10}
    with pytest.warns(Fp8SaturationWarning, match=r"100 of 600 values.*largest was 100"):
        use(big)
    assert set(reads) == {5, 10, 15}


@quiet
def test_under_transforms_scales_are_dynamic() -> None:
    model = Two()
    train(model, 2)
    before = copy.deepcopy(history_state(model.named_parameters()))
    w, b, x = model.up.weight.detach(), model.up.bias.detach(), batch(7) * 50

    def total(w: Tensor, scaling: Fp8Scaling) -> Tensor:
        return fp8_linear(x, w, b, scaling=scaling).float().sum()

    assert torch.equal(torch.func.grad(total)(w, DELAYED), torch.func.grad(total)(w, Fp8Scaling()))
    after = history_state(model.named_parameters())
    assert all(torch.equal(after[n][r], before[n][r]) for n in before for r in before[n])


def test_values_within_the_scale_are_as_exact_as_dynamic_ones() -> None:
    """With a steady tensor a delayed scale is the dynamic one."""
    weight = torch.zeros(2, 2)
    past = WeightHistory(weight)
    x = torch.randn(8, 8)
    first, scale = past.quantize("input", x, E4, DELAYED)
    again, same = past.quantize("input", x, E4, DELAYED)
    assert torch.equal(scale, same)
    assert torch.equal(first.view(torch.uint8), again.view(torch.uint8))
    assert torch.allclose(widen(again, 1 / same, torch.float32), x, rtol=2**-4, atol=float(2**-10 / same))
