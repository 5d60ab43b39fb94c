"""RangeWatch counts what the step computed, and does not change it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from faults.models import Net, linear, net
from mezzo.core.errors import UsageError
from mezzo.core.ranges import BINS, NAN, WHAT, ZERO, Histogram, RangeRow
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.module_paths import opaque_part, parameter_paths, paths
from mezzo.pytorch.monitor.ranges import RangeWatch
from trainers import stepped

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


def histogram(*tensors: Tensor, scale: float = 1.0) -> Histogram:
    """Of all elements of some tensors together, divided by a power of two."""
    every = torch.cat([t.detach().float().flatten() for t in tensors]) / scale
    finite = every[every.isfinite()].abs()
    field = (every.view(torch.int32) >> 23) & 255  # the exponent's, which is the index of a bin
    index = torch.where(every == 0, ZERO, torch.where(every.isnan(), NAN, field))
    bins = torch.bincount(index, minlength=BINS)
    return Histogram.from_bins(bins.tolist(), float(finite.max()) if finite.numel() else 0.0)


@net(weight=lambda: nn.Parameter(torch.randn(8, 2)), softplus=nn.Softplus)
def head(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, of which one has no use, and a parameter of its own beside a module."""
    return self.softplus(x @ self.weight), torch.arange(3)


@net(
    first=linear(6, 8),
    block=lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    norm=lambda: nn.BatchNorm1d(8),
    drop=lambda: nn.Dropout(0.2),
    head=head,
)
def made(self: Any, x: Tensor) -> dict[str, Any]:
    """A block that is run twice, a normalisation, dropout, and an output in a dict."""
    x = self.block(self.block(self.first(x)))
    return {"out": self.head(self.drop(self.norm(x)))[0], "count": 3}


SEEN = ["first", "block.0", "block.1", "norm", "drop", "head", "head.softplus"]
"""Paths of the modules of `made` whose outputs are looked at, in the order of their calls."""


def batches(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(12, 6, generator=generator)


def squared(model: nn.Module, x: Tensor, factor: float = 1.0) -> Tensor:
    loss: Tensor = model(x)["out"].float().square().mean()
    return loss if factor == 1.0 else loss * factor


def trained(
    precision: str = "fp16",
    updates: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    spike: int = -1,
    **options: Any,
) -> tuple[nn.Module, mezzo.MixedPrecision, list[Tensor]]:
    torch.manual_seed(0)
    model = made()
    mp = mezzo.MixedPrecision(model, optimizer(model.parameters(), lr=1e-2), precision, **options)
    losses = []
    for number, x in enumerate(batches(updates * mp.accumulate)):
        factor = 1e30 if number == spike else 1.0
        losses.append(stepped(mp, squared, model, x, factor).loss_tensor)
    return model, mp, losses


def everything(model: nn.Module, mp: mezzo.MixedPrecision, losses: list[Tensor]) -> list[Any]:
    state = mp.optimizer.state_dict()["state"]
    held = [value for one in state.values() for value in one.values()]
    return [*model.state_dict().values(), *losses, *held, torch.get_rng_state(), torch.tensor(mp.loss_scale)]


def by_key(rows: list[RangeRow]) -> dict[tuple[str, str, str], RangeRow]:
    found = {(row.what, row.module, row.name): row for row in rows}
    assert len(found) == len(rows)
    return found


def watch_of(mp: mezzo.MixedPrecision) -> RangeWatch:
    (watch,) = (one for one in mp._observing._observers if isinstance(one, RangeWatch))
    return watch


def hooks(model: nn.Module) -> int:
    held = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
    held += [
        hooks for p in model.parameters() for hooks in (p._post_accumulate_grad_hooks, p._backward_hooks)
    ]
    return sum(len(hooks or ()) for hooks in held)


TRAININGS: dict[str, dict[str, Any]] = {
    "accumulated and clipped, skipping": {"accumulate": 3, "clip_norm": 0.1, "clip_value": 0.05, "spike": 1},
    "split": {"precision": "bf16", "masters": "split"},
    "masters, the first step skipped": {"masters": "fp32", "spike": 0},
    "released in two passes": {"release_gradients": True, "optimizer": mezzo.optim.AdamW, "clip_norm": 0.1},
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
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scale = 2.0**10
    outputs: dict[str, list[Tensor]] = {path: [] for path in SEEN}

    def keep(path: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.retain_grad()
        outputs[path].append(tensor)

    for path in SEEN:
        model.get_submodule(path).register_forward_hook(partial(keep, path))
    (x,) = batches(1)
    with mezzo.autocast(precision):
        loss = model(x)["out"].float().square().mean()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    factor = scale if precision == "fp16" else 1.0
    (loss * factor).backward()
    gradients = {}
    for name, param in model.named_parameters():
        gradients[name] = param.grad / factor
        param.grad = gradients[name].clone()
    optimizer.step()

    options = {"loss_scale": scale} if precision == "fp16" else {}
    sgd = partial(torch.optim.SGD, lr=0.5)
    rows = by_key(trained(precision, 1, lambda params, lr: sgd(params), watch=True, **options)[1].ranges)
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


def test_hooks_are_on_the_modules_in_watched_updates_only() -> None:
    model = made()
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
    one, four = (by_key(trained(updates=1, watch=1, loss_scale=16.0, accumulate=n)[1].ranges) for n in (1, 4))
    assert set(one) == set(four)
    for key, row in four.items():
        is_activation = key[0].startswith("activation")
        assert row.histogram.elements == (4 if is_activation else 1) * one[key].histogram.elements
        if is_activation and row.histogram.largest:
            # Four batches of one distribution: within a binade or two, where scale or window left in are 16 or 2.
            assert abs(math.log2(row.histogram.largest / one[key].histogram.largest)) < 1.9, key


def test_weight_gradients_are_those_before_clipping() -> None:
    plain, clipped = (
        [row for row in trained("fp32", 1, watch=1, **options)[1].ranges if row.what == "weight gradient"]
        for options in ({}, {"clip_norm": 1e-6, "clip_value": 1e-7})
    )
    assert plain == clipped != []


def test_a_skipped_update_has_no_ratios_and_shows_the_infinities() -> None:
    scale = mezzo.DynamicLossScale(2.0**4)
    _, mp, _ = trained(updates=3, watch=1, spike=1, loss_scale=scale)
    first, skipped, last = (by_key(record.rows) for record in watch_of(mp).drain())
    assert {what for what, _, _ in skipped} == set(WHAT) - {"update ratio"}
    bad = skipped["weight gradient", "first", "weight"].histogram
    assert bad.infinities or bad.nans
    assert set(first) == set(last)
    weights = [rows["weight", "first", "weight"].histogram for rows in (first, skipped, last)]
    assert weights[0] != weights[1] == weights[2]


def test_masters_are_what_weights_are() -> None:
    model, mp, _ = trained("bf16", 2, watch=2, masters="split", optimizer=torch.optim.SGD)
    before = mezzo.master_state_dict(model, mp.optimizer)["first.weight"]
    stepped(mp, squared, model, next(batches(1, seed=7)))
    after = mezzo.master_state_dict(model, mp.optimizer)["first.weight"]
    rows = by_key(mp.ranges)
    row, ratio = rows["weight", "first", "weight"], rows["update ratio", "first", "weight"]
    assert (row.histogram, row.format) == (histogram(before), "bf16")
    moved = (after - before).abs()
    assert ratio.histogram == histogram(torch.where(moved == 0, 0, moved / before.abs()))
    assert ratio.format == "fp32"
    assert ratio.histogram.zeros < 48  # a bf16 weight would hardly have moved


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_released_gradients_are_seen_from_the_second_update(clip_norm: float | None) -> None:
    options: dict[str, Any] = {"optimizer": mezzo.optim.AdamW, "clip_norm": clip_norm, "watch": 1}
    kept = watch_of(trained("fp32", 3, **options)[1]).drain()
    released = watch_of(trained("fp32", 3, release_gradients=True, **options)[1]).drain()
    assert [record.update for record in released] == [1, 2]
    for one, other in zip(kept[1:], released):
        assert by_key(one.rows) == by_key(other.rows)


def checkpointed(how: bool | None) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.outer(x)
        return self.inner(x) if how is None else checkpoint(self.inner, x, use_reentrant=how)

    inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    return Net(forward, outer=linear(6, 8), inner=lambda: inner)


@pytest.mark.parametrize("how", [False, True], ids=["not reentrant", "reentrant"])
def test_what_a_checkpoint_repeats_is_counted_once(how: bool) -> None:
    found = []
    for kind in (None, how):
        torch.manual_seed(0)
        model = checkpointed(kind)
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", watch=1)
        for x in batches(2):
            stepped(mp, lambda x, model=model: model(x).float().square().mean(), x)
        found.append(by_key(mp.ranges))
        mp.close()
    assert found[0] == found[1]


def test_evaluation_penalties_and_parts_called_alone_are_not_counted() -> None:
    expected = by_key(trained("fp32", 1, torch.optim.SGD, watch=1)[1].ranges)
    torch.manual_seed(0)
    model = made()
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-2), "fp32", watch=1)
    (x,) = batches(1)

    def evaluate() -> None:
        model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            model(x)
        model.train()

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


def test_two_optimizers_of_one_loop_see_their_own() -> None:
    """A GAN: each has its own model and interval; the discriminator's gradients in the other's step are not its own."""
    maker, judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 1))
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (judge, maker)]
    pairs = zip((judge, maker), sgd, (1, 2))
    mps = [mezzo.MixedPrecision(model, one, "fp16", watch=every) for model, one, every in pairs]
    for _ in range(3):
        fake, real = maker(torch.randn(5, 3)), torch.randn(5, 4)
        stepped(mps[0], lambda x, y: judge(x).float().mean() - judge(y).float().mean(), fake.detach(), real)
        stepped(mps[1], lambda x: -judge(maker(x)).float().mean(), torch.randn(5, 3))
    of_judge, of_maker = (watch_of(mp).drain() for mp in mps)
    assert [record.update for record in of_judge] == [0, 1, 2]
    assert [record.update for record in of_maker] == [0, 2]
    assert {row.module for record in of_maker for row in record.rows} == {"0", "1"}
    for record in of_judge:
        seen = by_key(record.rows)["activation gradient", "0", ""].histogram
        # d mean / d out is 1/5, whatever the loss scale is
        assert (seen.elements, seen.lowest) == (10, -3)


def test_sparse_gradients_are_seen_by_their_values() -> None:
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True))
    mp = mezzo.MixedPrecision(model, torch.optim.SparseAdam(model.parameters()), "fp32", watch=1)
    stepped(mp, lambda: model(torch.tensor([3, 3, 7])).sum())
    rows = by_key(mp.ranges)
    assert rows["weight gradient", "0", "weight"].histogram == Histogram(0, [4, 4], largest=2.0)
    assert rows["update ratio", "0", "weight"].histogram.zeros == 392


def test_a_backward_that_raises_leaves_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp = mezzo.MixedPrecision(model, optimizer, "fp32", watch=1, trace=False)
    own = hooks(model)
    (x,) = batches(1)
    with mp.autocast():
        out = model(x)
    out.register_hook(lambda gradient: [][0])
    with pytest.raises(IndexError):
        mp.step(out.sum())
    assert hooks(model) == own
    assert mp.ranges == []
    stepped(mp, lambda: model(x).sum())
    assert by_key(mp.ranges)["activation", "0", ""].histogram.elements == 48
    assert [record.update for record in watch_of(mp).drain()] == [0]
    model(x)
    mp.close()
    assert hooks(model) == 0


def watched_step(weight: Tensor, gradient: Tensor, scale: Any, skipped: Any = False) -> RangeWatch:
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watch = RangeWatch(model, optimizer, every=1, note=[].append)
    model.weight.grad = gradient
    watch.update_begins(optimizer, scale)
    optimizer.step()
    watch.update_ended(optimizer, index=0, number=0, skipped=skipped, loss_scale=scale)
    return watch


def test_what_only_the_device_knows_is_read_when_somebody_asks() -> None:
    for skipped in (True, False):
        scale = torch.tensor(16.0)
        watch = watched_step(torch.ones(1, 2), torch.full((1, 2), 64.0), scale, torch.tensor(skipped))
        scale.zero_()  # whoever owns it may go on with it
        (record,) = watch.drain()
        assert record.loss_scale == 16.0
        rows = by_key(record.rows)
        assert rows["weight gradient", "", "weight"].histogram == Histogram(2, [2], largest=4.0)
        assert (("update ratio", "", "weight") in rows) is not skipped


def test_ratios_of_large_parameters_are_zero_where_nothing_moved_and_infinite_from_zero() -> None:
    size = 100_000
    weight, gradient = torch.tensor([[1.0, -2.0, 0.0, 0.0, 4.0], [-0.5, -1.0, 0.0, -3.0, 0.0]]).repeat(
        1, size
    )
    watch = watched_step(weight, gradient, 1.0)
    (row,) = (row for row in watch.rows if row.what == "update ratio")
    assert row.histogram == Histogram(-1, [2 * size], zeros=2 * size, infinities=size, largest=0.5)


def test_ratios_of_complex_weights_are_those_of_their_magnitudes() -> None:
    watch = watched_step(torch.tensor([[3 + 4j]]), torch.tensor([[3j]]), 1.0)
    (row,) = (row for row in watch.rows if row.what == "update ratio")
    assert row.histogram == Histogram(-1, [1], largest=pytest.approx(0.6))


def test_compiled_insides_are_left_out_and_said_so_once() -> None:
    inner = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(4, 2))
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in batches(2):
            stepped(mp, lambda x: model(x).sum(), x)
    assert len([w for w in caught if str(w.message).startswith("watch:")]) == 1
    assert "watch: 0 is compiled" in watch_of(mp).notes[0]
    rows = by_key(mp.ranges)
    assert {module for what, module, _ in rows if what == "activation"} == {"0", "1"}
    assert {module for what, module, _ in rows if what == "weight gradient"} == {"0.0", "1"}


def test_paths_are_those_of_the_model_without_its_wrappers() -> None:
    net = made()
    wrapped = nn.DataParallel(torch.compile(net, backend="eager"))
    assert parameter_paths(wrapped) == parameter_paths(net)
    assert parameter_paths(net)[id(net.block[0].bias)] == ("block.0", "bias")
    assert (list(paths(wrapped)), opaque_part(wrapped)) == ([""], "the model")
    assert list(paths(nn.DataParallel(net))) == SEEN
    holder = nn.ModuleDict({"module": net})  # not everything of this name is a wrapper
    assert next(iter(paths(holder))) == "module.first"
    net.block.compile(backend="eager")
    assert opaque_part(net) == "block"
    assert "block.0" not in paths(net)


@pytest.mark.parametrize("every", [-1, 0.5])
def test_an_interval_that_is_no_number_of_updates(every: Any) -> None:
    with pytest.raises(UsageError, match=f"watch={every}"):
        RangeWatch(None, None, every=every)
