"""RangeWatch: what it counts is what the step computed, and the step does not know that it was watched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.core.ranges import WHAT
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.monitor.ranges import RangeWatch
from watched_training import SEEN, Net, batches, by_key, everything, histogram, hooks, trained, watch_of

TRAININGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "accumulated": {"accumulate": 3},
    "clipped": {"clip_norm": 0.1, "clip_value": 0.05},
    "skipping": {"spike": 1},
    "split": {"precision": "bf16", "weights": "split"},
    "masters, the first step skipped": {"weights": "masters", "spike": 0},
    "released": {"precision": "bf16", "release_gradients": True, "optimizer": mezzo.optim.AdamW},
    "released in two passes": {"release_gradients": True, "optimizer": mezzo.optim.AdamW, "clip_norm": 0.1},
    "sgd": {"optimizer": torch.optim.SGD},
}


@pytest.mark.parametrize("name", list(TRAININGS))
def test_a_watched_training_is_bit_for_bit_the_same(name: str) -> None:
    plain = everything(*trained(**TRAININGS[name]))
    watched = everything(*trained(**TRAININGS[name], watch=1))
    assert len(plain) == len(watched)
    for one, other in zip(plain, watched):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_kind_is_what_a_loop_by_hand_sees(precision: str) -> None:
    """The same step, with `retain_grad` on what the modules return."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scale = 2.0**10
    outputs: dict[str, list[Tensor]] = {path: [] for path in SEEN}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            tensor.retain_grad()
            outputs[path].append(tensor)

        return hook

    for path in SEEN:
        model.get_submodule(path).register_forward_hook(keep(path))
    (x,) = batches(1)
    with mezzo.autocast(precision):
        loss = model(x)["out"].float().square().mean()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    factor = scale if precision == "fp16" else 1.0
    (loss * factor).backward()
    gradients = {name: param.grad / factor for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.grad = gradients[name].clone()
    optimizer.step()

    options = {"loss_scale": scale} if precision == "fp16" else {}
    _, mp, _ = trained(
        precision, 1, lambda params, lr: torch.optim.SGD(params, lr=0.5), watch=True, **options
    )
    rows = by_key(mp.ranges)

    # `head` hands on what its last module returned, whose gradient arrives at both.
    for path in SEEN:
        row = rows["activation", path, ""]
        assert row.histogram == histogram(*outputs[path]), path
        assert row.format == name_of(outputs[path][0].dtype)
        got = rows["activation gradient", path, ""]
        assert got.histogram == histogram(*(t.grad.double() for t in outputs[path]), scale=factor), path
    for name, param in model.named_parameters():
        path, _, own = name.rpartition(".")
        assert rows["weight", path, own].histogram == histogram(before[name])
        assert rows["weight gradient", path, own].histogram == histogram(gradients[name])
        ratio = (param.detach() - before[name]).abs() / before[name].abs()
        ratio[param.detach() == before[name]] = 0
        assert rows["update ratio", path, own].histogram == histogram(ratio), name
        assert rows["update ratio", path, own].format == "fp32"
    count = len(list(model.parameters()))
    assert len(rows) == 2 * len(SEEN) + 3 * count


def test_without_watch_there_is_no_hook_and_no_row() -> None:
    model, mp, _ = trained(updates=1, trace=False)
    assert hooks(model) == 0
    assert mp.ranges == []
    with mp.autocast():
        loss = model(next(batches(1)))["out"].sum()
    assert hooks(model) == 0
    mp.step(loss)


def test_hooks_are_on_the_modules_in_watched_updates_only() -> None:
    torch.manual_seed(0)
    model = Net()
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters()), "fp32", watch=3, trace=False)
    own = hooks(model)  # the two that tell of calls
    during, rows = [], []
    for x in batches(7):
        with mp.autocast():
            loss = model(x)["out"].sum()
        during.append(hooks(model) > own)
        mp.step(loss)
        assert hooks(model) == own
        rows.append(mp.ranges)
    assert during == [True, False, False, True, False, False, True]
    assert [rows[i] == rows[i - 1] for i in range(1, 7)] == [True, True, False, True, True, False]
    assert [record.update for record in watch_of(mp).drain()] == [0, 3, 6]
    assert watch_of(mp).drain() == []
    assert mp.ranges == rows[-1]


def test_the_window_adds_up_and_is_shown_without_loss_scale_and_window() -> None:
    one = by_key(trained(updates=1, watch=1, loss_scale=16.0)[1].ranges)
    four = by_key(trained(updates=1, watch=1, loss_scale=16.0, accumulate=4)[1].ranges)
    assert set(one) == set(four)
    for (what, module, name), row in four.items():
        seen = one[what, module, name].histogram
        times = 4 if what.startswith("activation") else 1
        assert row.histogram.elements == times * seen.elements
        if what.startswith("activation") and row.histogram.largest:
            # Four batches of one distribution: within a binade or two, where scale or window left in are 16 or 2.
            assert abs(math.log2(row.histogram.largest / seen.largest)) < 1.9, (what, module)


def test_weight_gradients_are_those_before_clipping() -> None:
    rows = [
        row
        for options in ({}, {"clip_norm": 1e-6, "clip_value": 1e-7})
        for row in trained("fp32", 1, watch=1, **options)[1].ranges
        if row.what == "weight gradient"
    ]
    half = len(rows) // 2
    assert half
    assert rows[:half] == rows[half:]


def test_a_skipped_update_has_no_ratios_and_shows_the_infinities() -> None:
    scale = mezzo.DynamicLossScale(2.0**4)
    _, mp, _ = trained(updates=3, watch=1, spike=1, loss_scale=scale)
    first, skipped, last = (by_key(record.rows) for record in watch_of(mp).drain())
    assert {what for what, _, _ in skipped} == set(WHAT) - {"update ratio"}
    assert skipped["weight gradient", "first", "weight"].histogram.infinities or (
        skipped["weight gradient", "first", "weight"].histogram.nans
    )
    assert set(first) == set(last)
    weights = [rows["weight", "first", "weight"].histogram for rows in (first, skipped, last)]
    assert weights[0] != weights[1] == weights[2]


def test_masters_are_what_weights_are() -> None:
    model, mp, _ = trained("bf16", 1, watch=2, weights="split", optimizer=torch.optim.SGD)
    master = mezzo.master_state_dict(model, mp.optimizer)
    x = next(batches(1, seed=7))
    for _ in range(2):
        with mp.autocast():
            loss = model(x)["out"].float().square().mean()
        master = mezzo.master_state_dict(model, mp.optimizer)
        mp.step(loss)
    rows = by_key(mp.ranges)
    row = rows["weight", "first", "weight"]
    assert row.histogram == histogram(master["first.weight"])
    assert row.format == "bf16"
    after = mezzo.master_state_dict(model, mp.optimizer)["first.weight"]
    ratio = rows["update ratio", "first", "weight"]
    moved = (after - master["first.weight"]).abs()
    assert ratio.histogram == histogram(torch.where(moved == 0, 0, moved / master["first.weight"].abs()))
    assert ratio.format == "fp32"
    assert ratio.histogram.zeros < 48  # a bf16 weight would hardly have moved


def test_weights_without_masters_move_in_their_own_format() -> None:
    model = nn.Sequential(nn.Linear(6, 8)).to(torch.bfloat16)
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-3, masters="none")
    watch = RangeWatch(model, optimizer, every=1, kinds=("update ratio", "weight"))
    for index in range(2):
        model(torch.ones(3, 6, dtype=torch.bfloat16)).sum().backward()
        watch.update_begins(optimizer, 1.0)
        optimizer.step()
        watch.update_ended(optimizer, index=index, number=0, skipped=False, loss_scale=1.0)
    assert {row.format for row in watch.rows} == {"bf16"}
    assert sum(row.histogram.zeros for row in watch.rows) > 10  # and many do not move at all


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_released_gradients_are_seen_from_the_second_update(clip_norm: float | None) -> None:
    options: dict[str, Any] = {"optimizer": mezzo.optim.AdamW, "clip_norm": clip_norm, "watch": 1}
    kept = watch_of(trained("fp32", 3, **options)[1]).drain()
    released = watch_of(trained("fp32", 3, release_gradients=True, **options)[1]).drain()
    assert [record.update for record in released] == [1, 2]
    for one, other in zip(kept[1:], released):
        assert by_key(one.rows) == by_key(other.rows)


class Checkpointed(nn.Module):
    """Two layers with dropout, of which one is run again in backward."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.outer = nn.Linear(6, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        return self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how)


@pytest.mark.parametrize("how", [False, True], ids=["not reentrant", "reentrant"])
def test_what_a_checkpoint_repeats_is_counted_once(how: bool) -> None:
    found = []
    for kind in (None, how):
        torch.manual_seed(0)
        model = Checkpointed(kind)
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", watch=1)
        for x in batches(2):
            with mp.autocast():
                loss = model(x).float().square().mean()
            mp.step(loss)
        found.append(by_key(mp.ranges))
        mp.close()
    assert found[0] == found[1]


def test_evaluation_penalties_and_parts_called_alone_are_not_counted() -> None:
    expected = by_key(trained("fp32", 1, torch.optim.SGD, watch=1)[1].ranges)
    torch.manual_seed(0)
    model = Net()
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-2), "fp32", watch=1)
    (x,) = batches(1)

    def evaluate() -> None:
        state = torch.get_rng_state()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        torch.set_rng_state(state)

    evaluate()
    with mp.autocast():
        out = model(x)["out"]
        loss = out.float().square().mean()
    evaluate()
    model.block(torch.ones(3, 8))
    torch.autograd.grad(out.sum(), model.first.weight, retain_graph=True)
    mp.step(loss)
    evaluate()
    assert by_key(mp.ranges) == expected


def test_a_call_that_raised_and_a_graph_that_is_kept_add_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp = mezzo.MixedPrecision(model, optimizer, "fp32", watch=1, accumulate=2)
    (x,) = batches(1)
    with pytest.raises(RuntimeError), mp.autocast():
        model(torch.ones(3, 5))
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    losses = []
    for _ in range(2):
        with mp.autocast():
            losses.append(model(x).sum())
        if len(losses) == 2:  # a look at the first loss's graph, which is none of the step's backward passes
            torch.autograd.grad(losses[0], model[0].weight)
        mp.step(losses[-1], retain_graph=True)
    rows = by_key(mp.ranges)
    for what in ("activation", "activation gradient"):
        for module in ("0", "1"):
            assert rows[what, module, ""].histogram.elements == 2 * 48
