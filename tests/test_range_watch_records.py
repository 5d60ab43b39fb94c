"""RangeWatch: several models and optimizers, records, notes, paths, and what goes wrong."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core import records
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.finding import OUTSIDE
from mezzo.core.ranges import BINS, Histogram
from mezzo.pytorch.monitor.module_paths import parameter_paths, paths
from mezzo.pytorch.monitor.operations import tensors
from mezzo.pytorch.monitor.ranges import KEPT, RangeWatch
from mezzo.pytorch.monitor.watched_parameters import ratios
from watched_training import SEEN, Net, batches, by_key, hooks, trained, watch_of


def test_two_optimizers_of_one_loop_see_their_own() -> None:
    """A GAN: each has its own model and interval; the discriminator's gradients in the other's step are not its own."""
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 1))
    mps = [
        mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", watch=every)
        for model, every in ((judge, 1), (maker, 2))
    ]
    for _ in range(3):
        noise, real = torch.randn(5, 3), torch.randn(5, 4)
        with mps[0].autocast():
            loss = judge(maker(noise).detach()).float().mean() - judge(real).float().mean()
        mps[0].step(loss)
        with mps[1].autocast():
            loss = -judge(maker(noise)).float().mean()
        mps[1].step(loss)
    of_judge, of_maker = (watch_of(mp).drain() for mp in mps)
    assert [record.update for record in of_judge] == [0, 1, 2]
    assert [record.update for record in of_maker] == [0, 2]
    assert {row.module for record in of_maker for row in record.rows} == {"0", "1"}
    for record in of_judge:
        rows = by_key(record.rows)
        assert rows["activation gradient", "0", ""].histogram.elements == 10
        # d mean / d out is 1/5, whatever the loss scale is
        assert rows["activation gradient", "0", ""].histogram.lowest == -3


def test_any_optimizer_and_any_model_where_none_is_named() -> None:
    """What a launched script has: models that are called, and optimizers that step."""
    torch.manual_seed(0)
    models = [nn.Linear(2, 2), nn.Linear(2, 3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    stray = nn.Parameter(torch.ones(2))
    optimizers[1].add_param_group({"params": [stray]})
    watch = RangeWatch(None, None, every=2, clock=lambda: 1.5)
    index = 0
    for _ in range(3):
        for number, (model, optimizer) in enumerate(zip(models, optimizers)):
            x = torch.ones(1, 2)
            watch.call_begins(model, (x,), {})
            out = model(x)
            watch.call_ended(model, out)
            loss = out.sum() + stray.sum()
            watch.backward_begins(loss, 4.0)
            (loss * 4).backward()
            watch.update_begins(optimizer, 4.0)
            optimizer.step()
            watch.update_ended(optimizer, index=index, number=number, skipped=False, loss_scale=4.0)
            optimizer.zero_grad()
            index += 1
    found = watch.drain()
    assert [(r.update, r.optimizer, r.loss_scale, r.at) for r in found] == [
        (0, 0, 4.0, 1.5),
        (1, 1, 4.0, 1.5),
        (4, 0, 4.0, 1.5),
        (5, 1, 4.0, 1.5),
    ]
    assert {row.module for row in found[2].rows} == {""}
    last = by_key(found[3].rows)
    assert {module for _, module, _ in last} == {"Linear", OUTSIDE}
    assert last["activation gradient", "Linear", ""].histogram == Histogram(0, [3], largest=1.0)
    assert last["weight gradient", OUTSIDE, "parameter 2"].histogram.lowest in (0, 1)
    assert watch.finding is None


def test_parts_that_are_called_themselves_keep_their_paths_and_notes_go_where_they_are_wanted() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1))
    other, optimizer = nn.Linear(1, 1), torch.optim.SGD(model.parameters())
    notes: list[str] = []
    watch = RangeWatch(model, None, every=1, kinds=("activation",), note=notes.append)
    for index in range(2):
        for part, x in (
            (model[0], torch.ones(1, 2)),
            (other, torch.ones(1, 1)),
            (nn.Linear(1, 1), torch.ones(1, 1)),
        ):
            watch.call_begins(part, (x,), {})
            watch.call_ended(part, part(x))
        watch.update_ended(optimizer, index=index, number=0, skipped=False, loss_scale=1.0)
        assert [row.module for row in watch.rows] == ["0.0", "Linear", "Linear2"]
    for index in range(2):
        watch.update_begins(optimizer, 1.0)
        watch.update_ended(optimizer, index=index, number=0, skipped=False, loss_scale=1.0)
    assert len(notes) == 1
    assert notes == watch.notes


def test_sparse_gradients_are_seen_by_their_values() -> None:
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True))
    mp = mezzo.MixedPrecision(model, torch.optim.SparseAdam(model.parameters()), "fp32", watch=1)
    with mp.autocast():
        loss = model(torch.tensor([3, 3, 7])).sum()
    mp.step(loss)
    rows = by_key(mp.ranges)
    assert rows["weight gradient", "0", "weight"].histogram == Histogram(0, [4, 4], largest=2.0)
    assert rows["weight", "0", "weight"].histogram.elements == 400
    assert rows["update ratio", "0", "weight"].histogram.zeros == 392


def test_a_backward_that_raises_leaves_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    mp = mezzo.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=1, trace=False
    )
    own = hooks(model)
    (x,) = batches(1)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    with mp.autocast():
        out = model(x)
    out.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        mp.step(out.sum())
    assert hooks(model) == own
    assert mp.ranges == []
    with mp.autocast():
        loss = model(x).sum()
    mp.step(loss)
    rows = by_key(mp.ranges)
    assert rows["activation", "0", ""].histogram.elements == 48
    assert [record.update for record in watch_of(mp).drain()] == [0]
    with mp.autocast():
        model(x)
    mp.close()
    assert hooks(model) == 0


def test_records_are_written_beside_the_updates(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = records.RecordWriter(path)
    _, mp, _ = trained(updates=5, watch=2, records=writer)
    mp.close()
    writer.close()
    read = list(records.read(path))
    updates = [r for r in read if isinstance(r, records.UpdateRecord)]
    ranges = [r for r in read if isinstance(r, records.RangesRecord)]
    assert [r.update for r in ranges] == [0, 2, 4]
    assert [r.loss_scale for r in ranges] == [updates[r.update].loss_scale for r in ranges]
    assert ranges[-1].rows == mp.ranges
    assert all(r.at > 0 for r in ranges)


def test_only_the_last_records_wait_for_a_reader() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    watch = RangeWatch(model, optimizer, every=1, kinds=("weight",))
    for index in range(KEPT + 5):
        watch.update_begins(optimizer, 1.0)
        watch.update_ended(optimizer, index=index, number=0, skipped=False, loss_scale=1.0)
    assert [record.update for record in watch.drain()] == list(range(5, KEPT + 5))
    assert [row.what for row in watch.rows] == ["weight", "weight"]


def test_what_only_the_device_knows_is_read_when_somebody_asks() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watch = RangeWatch(model, optimizer, every=1, kinds=("weight gradient", "update ratio"))
    for skipped in (True, False):
        model.weight.grad = torch.full((1, 2), 64.0)
        scale = torch.tensor(16.0)
        watch.update_begins(optimizer, scale)
        optimizer.step()
        watch.update_ended(optimizer, index=0, number=0, skipped=torch.tensor(skipped), loss_scale=scale)
        scale.zero_()  # whoever owns it may go on with it
        (record,) = watch.drain()
        assert record.loss_scale == 16.0
        rows = by_key(record.rows)
        assert rows["weight gradient", "", "weight"].histogram == Histogram(2, [2], largest=4.0)
        assert (("update ratio", "", "weight") in rows) is not skipped


def test_ratios_by_blocks() -> None:
    before = torch.tensor([1.0, -2.0, 0.0, 0.0, math.inf, 4.0]).repeat(100_000)
    after = torch.tensor([1.5, -1.0, 0.0, 3.0, 1.0, 4.0]).repeat(100_000)
    found = torch.cat(list(ratios(before, after)))
    assert torch.equal(
        found[:6].nan_to_num(nan=-1.0, posinf=-2.0), torch.tensor([0.5, 0.5, 0.0, -2.0, -1.0, 0.0])
    )
    assert torch.equal(found.nan_to_num(nan=-1.0), found[:6].nan_to_num(nan=-1.0).repeat(100_000))
    (low,) = ratios(torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([258.0], dtype=torch.bfloat16))
    assert low.dtype is torch.float32
    assert low.item() == 2 / 256


def test_compiled_insides_are_left_out_and_said_so_once() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(4, 2))
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in batches(2):
            with mp.autocast():
                loss = model(x).sum()
            mp.step(loss)
    assert len([w for w in caught if str(w.message).startswith("watch:")]) == 1
    assert "the modules of 0 are compiled into one graph" in watch_of(mp).notes[0]
    rows = by_key(mp.ranges)
    assert {module for what, module, _ in rows if what == "activation"} == {"0", "1"}
    assert {module for what, module, _ in rows if what == "weight gradient"} == {"0.0", "1"}


def test_a_model_that_is_never_called_is_said_to_be() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=1)
    for x in batches(2):
        with mp.autocast():
            loss = model[0](x).sum()
        if watch_of(mp).notes:
            mp.step(loss)
        else:
            with pytest.warns(UserWarning, match="no call of the model was seen"):
                mp.step(loss)
    assert len(watch_of(mp).notes) == 1
    assert {row.what for row in mp.ranges} == {"weight", "weight gradient", "update ratio"}


def test_paths_are_those_of_the_model_without_its_wrappers() -> None:
    net = Net()
    wrapped = nn.DataParallel(torch.compile(net, backend="eager"))
    assert parameter_paths(wrapped) == parameter_paths(net)
    assert parameter_paths(net)[id(net.block[0].bias)] == ("block.0", "bias")
    assert list(paths(wrapped).seen) == [""]
    assert paths(wrapped).compiled == [""]
    assert list(paths(nn.DataParallel(net)).seen) == SEEN
    holder = nn.Module()
    holder.module = net  # not everything of this name is a wrapper
    assert next(iter(paths(holder).seen)) == "module.first"
    net.block.compile(backend="eager")
    assert paths(net).compiled == ["block"]
    assert "block.0" not in paths(net).seen


def test_tensors_are_found_in_whatever_a_module_returns() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    found = list(tensors({"a": [torch.ones(1), (torch.ones(2, 2), None)], "b": packed}))
    assert [t.shape[0] for t in found if t.is_floating_point()] == [1, 2, 5]


BAD = {
    "interval of -1": ({"every": -1}, UsageError, "watch=-1"),
    "interval of 0.5": ({"every": 0.5}, UsageError, "watch=0.5"),
    "first of -1": ({"first": -1}, UsageError, "first=-1"),
    "kind": ({"kinds": ("weigth",)}, UnknownNameError, "Did you mean 'weight'"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_arguments(name: str) -> None:
    options, error, words = BAD[name]
    model = nn.Linear(1, 1)
    with pytest.raises(error, match=words):
        RangeWatch(model, torch.optim.SGD(model.parameters()), **options)


def test_nothing_is_lost_of_a_histogram_that_is_read_through_json() -> None:
    _, mp, _ = trained(updates=1, watch=1)
    record = watch_of(mp).drain()[0]
    assert records.from_line(records.to_line(record)) == record
    assert sum(row.histogram.elements for row in record.rows) > BINS
