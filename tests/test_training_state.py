"""MixedPrecision: what is saved, loaded, recorded, dropped and refused."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import mezzo
from mezzo.core.errors import CallOrderError, UsageError
from training_steps import OPTIMIZERS, Broken, batch, everything, network, run, same, training

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


def test_states_of_grad_scalers_load() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=5)
    mp = training("sgd", "fp16")
    for state in (theirs.state_dict(), mezzo.GradScaler(init_scale=2.0**9, growth_interval=5).state_dict()):
        mp.load_state_dict(state)
        assert mp.loss_scale == 2.0**9
        assert mp.state_dict()["loss_scale"]["growth_interval"] == 5
    training("sgd", "bf16").load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    with pytest.warns(UserWarning, match="no dynamic loss scale"):
        training("sgd", "bf16").load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: "checkpoint.pt", "type str.*torch.load"),
        (lambda state: None, "type NoneType"),
        (lambda state: {"a": 1}, "not the state of a MixedPrecision: its keys are a"),
        (lambda state: {}, "not the state of a MixedPrecision: it is empty"),
        (lambda state: state | {"schema": 99}, "schema 99"),
        (lambda state: state | {"accumulate": 5}, "same accumulate"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Callable[[Any], Any], message: str) -> None:
    mp = training("sgd", "fp16", accumulate=3)
    run(mp)
    with pytest.raises(UsageError, match=message):
        mp.load_state_dict(change(mp.state_dict()))


def test_a_backward_that_raises_drops_its_window() -> None:
    weights = []
    for fails in (True, False):
        model = network()
        mp = training("sgd", "fp16", model, accumulate=2)
        if fails:
            run(mp, 5)
            x = torch.tanh(model[0](batch(6)[0]))
            with pytest.raises(RuntimeError, match="out of memory"):
                mp.step(model[3](x).sum() + model[3](Broken.apply(x)).sum())
        assert not run(mp, 0).stepped
        assert run(mp, 1).stepped
        weights.append([p.detach() for p in model.parameters()])
    assert same(*weights)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.0, "has type float"),
        (torch.ones(2, requires_grad=True), "loss.mean"),
        (torch.ones(()), "require a gradient"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "real floating"),
        (torch.ones((), requires_grad=True) * 2, "no parameter of this optimizer"),
    ],
)
def test_losses_that_backward_can_not_start_from(loss: Any, message: str) -> None:
    mp = training("sgd", "fp16")
    with pytest.raises(UsageError, match=message):
        mp.step(loss)
    assert run(mp).stepped


def test_parameters_of_another_models_training_are_refused_until_it_is_closed_or_gone() -> None:
    model = network()
    first = training("sgd", "fp16", torch.nn.Sequential(model))
    with pytest.raises(UsageError, match="already has some of these parameters"):
        training("sgd", "fp16", model)
    first.close()
    second = training("sgd", "fp16", model)
    del second
    training("sgd", "fp16", torch.nn.Sequential(model))


@pytest.mark.parametrize("same_optimizer", [True, False])
@pytest.mark.parametrize("policy", ["fp16", "bf16", "bf16,masters=split"])
def test_a_cell_that_is_run_again_replaces_the_training(same_optimizer: bool, policy: str) -> None:
    first = training("sgd", "fp16", accumulate=2)
    run(first)  # half an accumulation: the gradients are scaled
    model, optimizer = first.model, first.optimizer
    if not same_optimizer:
        optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.warns(UserWarning, match="its 1 accumulated losses were dropped") as told:
        second = mezzo.MixedPrecision(model, optimizer, policy)
    assert [one.filename for one in told] == [__file__], "close() does not warn again"
    with pytest.raises(CallOrderError, match="closed"):
        run(first)
    fresh = training("sgd", policy)
    assert run(second).stepped
    assert run(fresh).stepped
    assert same([*model.parameters()], [*fresh.model.parameters()])


# What the new MixedPrecision is given, and what its error names.
NOT_MADE: dict[str, tuple[str, dict[str, Any], str]] = {
    "argument out of range": ("fp16", {"clip_norm": -1.0}, "clip_norm"),
    "pattern of no module": ("fp16,module.foo=fp32", {}, "foo"),
    "optimizer without a kernel": ("bf16,masters=split", {}, "Adagrad"),
    "records that cannot be written": ("fp16", {"records": "no/such/folder/run.jsonl"}, "records"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", NOT_MADE)
def test_an_error_does_not_replace_the_training(row: str) -> None:
    precision, arguments, named = NOT_MADE[row]
    first, fresh = (training("adagrad-fused", "fp16,module.0=fp32", accumulate=2) for _ in range(2))
    run(first)
    run(fresh)
    with pytest.raises(UsageError, match=named) as told:
        mezzo.MixedPrecision(first.model, first.optimizer, precision, **arguments)
    assert "adopt" not in str(told.value), "a function that the loop did not call"
    assert [run(first, seed).stepped for seed in range(3)] == [run(fresh, seed).stepped for seed in range(3)]
    assert same(everything(first), everything(fresh)), "gradients, overrides and masters are those of before"
    first.close()
    assert "forward" not in vars(first.model[0])


def test_gradients_of_torch_func_are_not_scaled_and_a_warning_says_so() -> None:
    mp = training("sgd", "fp16", torch.nn.Linear(4, 2))
    params = dict(mp.model.named_parameters())

    def loss(params: dict[str, Any]) -> Any:
        with mp.autocast():
            return torch.func.functional_call(mp.model, params, (batch()[0],)).float().square().mean()

    with pytest.warns(UserWarning, match=r"precision='bf16'.*step\(loss\)"):
        torch.func.grad(loss)(params)
    assert mp.step(loss(params)).stepped  # the fix that it names


def test_calls_at_the_wrong_time_are_errors() -> None:
    mp = training("sgd", "fp16")
    with pytest.raises(CallOrderError, match=r"mp\.step\(loss\)"):
        mp.flush()
    loss = mp.model(batch()[0]).mean()
    mp.step(loss)
    with pytest.raises(CallOrderError, match=r"was freed.*one step\(\).*remove loss\.backward.*retain_graph"):
        mp.step(loss)
    mp.close()
    for call in (lambda: mp.step(loss), mp.autocast):
        with pytest.raises(CallOrderError, match="closed"):
            call()


@pytest.mark.parametrize("factor", [0.25, 65536.0, torch.tensor(3.0)])
def test_a_first_loss_whose_graph_was_freed_is_an_error(factor: Any) -> None:
    mp = training("sgd", "bf16", accumulate=4)
    with mp.autocast():
        loss = factor * mp.model(batch()[0]).square().mean()
    loss.backward()
    mp.optimizer.zero_grad()
    with pytest.raises(CallOrderError, match="was freed"):
        mp.step(loss)


def test_an_error_of_the_loop_closes_an_open_window_without_a_warning() -> None:
    mp = training("sgd", "fp16", accumulate=2)
    run(mp)
    with pytest.raises(KeyError), closing(mp):
        raise KeyError
    assert all(param.grad is None for param in mp.model.parameters())


OUTSIDE: dict[str, tuple[str, dict[str, Any], bool]] = {  # precision, arguments, whether it is told
    "bf16": ("bf16", {}, True),
    "fp16": ("fp16", {}, True),
    "fp32": ("fp32", {}, False),
    "tf32": ("tf32", {}, False),
    "bf16 in a module": ("fp32,module.3=bf16", {}, True),
    "16-bit weights": ("bf16", {"masters": "split"}, False),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_loss_outside_autocast_is_told_once(name: str, recwarn: pytest.WarningsRecorder) -> None:
    precision, given, told = OUTSIDE[name]
    warnings.simplefilter("always")

    def train(context: Any = None) -> list[str]:
        model, x = network(), batch()[0]
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **given)
        x = x.to(model[0].weight.dtype)
        recwarn.clear()
        for _ in range(2):
            with nullcontext() if context is None else mp.autocast() if context == "mp" else context:
                loss = model(x).float().mean()
            mp.step(loss)
        mp.close()
        return [f"{one.filename} {one.message}" for one in recwarn if "outside" in str(one.message)]

    warned = train()
    assert len(warned) == told
    words = (f"{__file__} ", f"ran in {precision[-4:]}. ", "with mp.autocast")
    assert all(word in one for one in warned for word in words)
    assert train("mp") == []
    assert len(train(mezzo.autocast("bf16"))) == (told and precision != "bf16")  # of another format
    assert len(train(torch.autocast("cpu", torch.bfloat16))) == told


@pytest.mark.parametrize(
    "precision",
    ["bf16,module.3=fp32", "fp16,module.0=fp32,module.3=bf16", "bf16,masters=split,module.3=fp32"],
)
def test_module_patterns_that_a_foreign_autocast_ignores_are_told_once(precision: str) -> None:
    def train(autocast: Any) -> list[str]:
        model, (x, _) = network(), batch()
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(x)  # an evaluation of its own
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                with autocast(mp):
                    loss = model(x).float().mean()
                mp.step(loss)
        mp.close()
        assert {one.filename for one in told} <= {__file__}
        return [str(one.message) for one in told]

    (told,) = train(lambda mp: torch.autocast("cpu", torch.bfloat16))
    assert re.search(r"format of .*\b3 had no effect\. Replace torch\.autocast by mp\.autocast", told)
    for right in (lambda mp: mp.autocast(), lambda mp: mezzo.autocast(mp.policy, "cpu")):
        assert train(right) == []


@pytest.mark.parametrize("precision", ["fp16", "fp16,op.softmax=lower", "bf16,op.linear=fp32"])
def test_a_foreign_autocast_is_told_where_this_training_entered_no_context(
    precision: str, tmp_path: Path
) -> None:
    """Also after a training in the process, or another thread, that did; the last policy runs nothing in 16 bits."""
    file = tmp_path / "mine.toml"
    file.write_text(mezzo.policy(precision).to_toml())
    contexts = (
        lambda mp: mezzo.autocast(mp.policy, "cpu"),
        lambda mp: mezzo.autocast(file),
        lambda mp: mp.autocast(),
    )

    def evaluate() -> None:
        with mezzo.autocast(precision, "cpu"):
            network()(batch()[0])

    with ThreadPoolExecutor(1) as other:
        other.submit(evaluate).result()
    for right in (*contexts, None):
        model, (x, _) = network(), batch()
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                with right(mp) if right else torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).float().square().mean()
                mp.step(loss)
        mp.close()
        words = "Replace torch.autocast by mp.autocast: with mp.autocast():"
        assert [words in str(one.message) for one in told] == [True] * (right is None)


def test_frozen_parameters_are_an_error_and_thawed_ones_train() -> None:
    model = network()
    mp = training("sgd", "fp16", model)
    x = torch.ones(2, 4, requires_grad=True)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        mp.step(model(x).sum())
    model[3].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    assert mp.step(model(x).sum()).stepped
    assert not torch.equal(before["3.bias"], model[3].bias)
    assert torch.equal(before["0.bias"], model[0].bias)
    assert x.grad is None


def test_a_loss_scale_may_be_written_as_a_policy_writes_it() -> None:
    made = (training("sgd", "fp16", loss_scale=text) for text in ("dynamic(init=1024)", "2**10"))
    dynamic, constant = (mp._resolved.scaler.on_host() for mp in made)
    assert (dynamic, constant) == (mezzo.DynamicLossScale(init=1024.0), mezzo.StaticLossScale(1024.0))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_weight_decay_is_not_in_the_states_of_no_step(kind: type[torch.optim.Optimizer]) -> None:
    """A checkpoint before the first step continues as new. Previously PyTorch's step had put the decay into it."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, mezzo.MixedPrecision]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.5)  # type: ignore[call-arg]
        return model, optimizer, mezzo.MixedPrecision(model, optimizer, "bf16")

    def trained(model: nn.Module, mp: mezzo.MixedPrecision) -> Tensor:
        for _ in range(2):
            with mp.autocast():
                loss = model(torch.ones(3, 4)).float().pow(2).sum()
            mp.step(loss)
        return model.weight.detach().clone()

    model, _, mp = training()
    expected = trained(model, mp)
    model, optimizer, mp = training()
    saved = get_optimizer_state_dict(model, optimizer)
    assert not any(entry["exp_avg"].any() for entry in saved["state"].values())
    assert torch.equal(trained(model, mp), expected)
    model, optimizer, mp = training()
    set_optimizer_state_dict(model, optimizer, saved)
    assert torch.equal(trained(model, mp), expected)
