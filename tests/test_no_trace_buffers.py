"""A skipped step leaves no trace in buffers: each normalisation, and modules that keep averages of their own.

The rows write into their buffers in every way that modules in the wild do: in place, through `.data`, with `out=`,
and by putting another tensor there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from bad_steps import INF, RUNS, is_finite, same
from mezzo.pytorch.training.buffers_before import SMALL
from mezzo.pytorch.training.running_statistics import RunningStatistics
from training_steps import nobody_owns_anything, who_decides  # noqa: F401

RUN = [*RUNS, "ggggbgbbg"]


class Averages(nn.Module):
    """What VQ layers, EMA normalisers and centred losses do: an average of what was seen, moved by each forward."""

    def __init__(
        self, write: Callable[[nn.Module, Tensor], None], *, persistent: bool = True, **buffers: Any
    ) -> None:
        super().__init__()
        self._write = write
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self._write(self, x.detach().float())
        return x - self.mean


def in_place(module: Any, x: Tensor) -> None:
    module.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


def through_data(module: Any, x: Tensor) -> None:
    module.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


def lerp_foreach(module: Any, x: Tensor) -> None:
    torch._foreach_lerp_([module.mean], [x.mean(0)], 0.1)


def with_out(module: Any, x: Tensor) -> None:
    torch.add(module.mean * 0.9, x.mean(0), alpha=0.1, out=module.mean)


def replaced(module: Any, x: Tensor) -> None:
    module.mean = module.mean * 0.9 + x.mean(0) * 0.1


def written_then_replaced(module: Any, x: Tensor) -> None:
    module.mean.mul_(0.5)
    module.mean = module.mean + x.mean(0)


def counted(module: Any, x: Tensor) -> None:
    module.count += 1
    module.mean += (x.mean(0) - module.mean) / module.count


def counter_replaced(module: Any, x: Tensor) -> None:
    module.count = module.count + 1
    in_place(module, x / module.count)


def codebook(module: Any, x: Tensor) -> None:
    """k-means of a VQ layer: data-dependent init, cluster sizes, sums, codes; all through `.data`."""
    if not module.ready:
        module.codes.data.copy_(x[:3])
        module.sums.data.copy_(x[:3])
        module.ready.data.copy_(torch.tensor(True))
    nearest = torch.cdist(x, module.codes).argmin(1)
    taken = nn.functional.one_hot(nearest, 3).float()
    module.sizes.data.mul_(0.9).add_(taken.sum(0), alpha=0.1)
    module.sums.data.mul_(0.9).add_(taken.t() @ x, alpha=0.1)
    module.codes.data.copy_(module.sums / module.sizes.clamp(min=0.1)[:, None])


def queue(module: Any, x: Tensor) -> None:
    """The memory bank of a contrastive loss, with its pointer."""
    at = int(module.pointer)
    module.bank[at] = x.mean(0)
    module.pointer[()] = (at + 1) % len(module.bank)


def last_seen(module: Any, x: Tensor) -> None:
    """A buffer that is None until there is something to remember."""
    module.mean = x.mean(0) if module.last is None else module.last * 0.5
    module.last = x.mean(0)


def expanded(module: Any, x: Tensor) -> None:
    """Several elements of it are one number in memory, which can't be written to."""
    module.mean = (module.mean[0] * 0.9 + x.mean() * 0.1).expand(4)


def grows(module: Any, x: Tensor) -> None:
    module.seen = torch.cat([module.seen, x.mean()[None]])
    module.mean.fill_(module.seen.sum())


def bf16(module: Any, x: Tensor) -> None:
    module.low.mul_(0.5).add_(x.mean(0).bfloat16())


def eight_bits(module: Any, x: Tensor) -> None:
    module.low.copy_((x.mean(0)).to(module.low.dtype))


def late(module: Any, x: Tensor) -> None:
    """Warm-up: the average begins to move in the fourth forward."""
    module.count += 1
    if module.count > 3:
        in_place(module, x)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


F8 = torch.float8_e4m3fn
OWN: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Averages(in_place),
    "not persistent": lambda: Averages(in_place, persistent=False),
    "through .data": lambda: Averages(through_data),
    "foreach": lambda: Averages(lerp_foreach),
    "out=": lambda: Averages(with_out),
    "replaced": lambda: Averages(replaced),
    "written, then replaced": lambda: Averages(written_then_replaced),
    "counted": lambda: Averages(counted, count=torch.zeros((), dtype=torch.long)),
    "counter replaced": lambda: Averages(counter_replaced, count=torch.zeros(())),
    "codebook": lambda: Averages(
        codebook, codes=zeros(3, 4), sums=zeros(3, 4), sizes=zeros(3), ready=torch.tensor(False)
    ),
    "queue": lambda: Averages(queue, bank=zeros(5, 4), pointer=torch.zeros((), dtype=torch.long)),
    "None at first": lambda: Averages(last_seen, last=None),
    "expanded": lambda: Averages(expanded),
    "grows": lambda: Averages(grows, seen=zeros(1)),
    "bf16": lambda: Averages(bf16, low=torch.zeros(4, dtype=torch.bfloat16)),
    "fp8": lambda: Averages(eight_bits, low=torch.zeros(4).to(F8)),
    "FP64": lambda: Averages(in_place, wide=torch.zeros(3, dtype=torch.float64)),
    "late": lambda: Averages(late, count=torch.zeros((), dtype=torch.long)),
    "beside a mask of -inf": lambda: Averages(in_place, mask=torch.full((4, 4), -INF).triu(1)),
    "beside expanded positions": lambda: Averages(in_place, positions=torch.arange(1).expand(4)),
}


def image(dims: int) -> nn.Module:
    """From [16, 4] to a picture of so many dimensions, with 4 channels."""
    return nn.Unflatten(1, (4, *[1] * dims)) if dims else nn.Identity()


def spread(dims: int) -> nn.Module:
    return nn.Sequential(image(dims), nn.Upsample(scale_factor=2))


class Old:
    """Normalisations of weights in the form of a hook, which newer PyTorch calls deprecated."""

    @staticmethod
    def weight_norm() -> nn.Module:
        with pytest.warns(FutureWarning, match="weight_norm"):
            layer: nn.Module = nn.utils.weight_norm(nn.Linear(4, 4))
        return layer


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "BatchNorm1d, not affine": lambda: nn.BatchNorm1d(4, affine=False),
    "BatchNorm1d, no statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "BatchNorm2d": lambda: nn.Sequential(image(2), nn.BatchNorm2d(4), nn.Flatten()),
    "BatchNorm3d": lambda: nn.Sequential(image(3), nn.BatchNorm3d(4), nn.Flatten()),
    "SyncBatchNorm": lambda: nn.Sequential(image(2), nn.SyncBatchNorm(4), nn.Flatten()),
    "LazyBatchNorm1d": lambda: nn.LazyBatchNorm1d(affine=False),
    "LazyBatchNorm2d": lambda: nn.Sequential(image(2), nn.LazyBatchNorm2d(affine=False), nn.Flatten()),
    "LazyBatchNorm3d": lambda: nn.Sequential(image(3), nn.LazyBatchNorm3d(affine=False), nn.Flatten()),
    "InstanceNorm1d": lambda: nn.Sequential(
        spread(1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.MaxPool1d(2), nn.Flatten()
    ),
    "InstanceNorm2d": lambda: nn.Sequential(
        spread(2), nn.InstanceNorm2d(4, track_running_stats=True), nn.MaxPool2d(2), nn.Flatten()
    ),
    "InstanceNorm3d": lambda: nn.Sequential(
        spread(3), nn.InstanceNorm3d(4, track_running_stats=True), nn.MaxPool3d(2), nn.Flatten()
    ),
    "LazyInstanceNorm1d": lambda: nn.Sequential(
        spread(1),
        nn.LazyInstanceNorm1d(affine=False, track_running_stats=True),
        nn.MaxPool1d(2),
        nn.Flatten(),
    ),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LocalResponseNorm": lambda: nn.Sequential(image(1), nn.LocalResponseNorm(2), nn.Flatten()),
    "spectral_norm, hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight_norm, hook": Old.weight_norm,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
}


def network(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2))


def ended(run: str, make: Callable[[], nn.Module], **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model after a run, and everything that it and the optimizer hold. A bad batch is one of large numbers."""
    model = network(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=128, **arguments)
    good, moved = 0, []
    for event in run:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(good))
        with mp.autocast():
            loss = model(x * (INF if event == "b" else 1.0)).float().square().mean()
        moved.append(mp.step(loss).moved)
        good += event == "g"
    assert moved == [event == "g" for event in run]
    mp.close()
    state = {
        "parameters": dict(model.named_parameters()),
        "buffers": {name: b for m, module in model.named_modules() for name, b in _buffers(m, module)},
        "optimizer": optimizer.state_dict(),
    }
    return model, state


def _buffers(prefix: str, module: nn.Module) -> list[tuple[str, Any]]:
    return [(f"{prefix}.{name}", buffer) for name, buffer in module._buffers.items()]


@pytest.mark.parametrize("run", RUN)
@pytest.mark.parametrize("name", [*NORMS, *OWN])
def test_no_trace(name: str, run: str, decides: str) -> None:
    make = {**NORMS, **OWN}[name]
    _, ours = ended(run, make)
    _, clean = ended(run.replace("b", ""), make)
    for part in clean:
        assert same(ours[part], clean[part]), part
    del clean["buffers"]
    assert is_finite(clean)


class Ops(TorchDispatchMode):
    """The ops that ran, and the bytes of what copies of each shape took."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copied: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names.append(name)
        if name in ("clone", "cat", "copy_", "_to_copy"):
            source = args[0][0] if name == "cat" else args[0]
            self.copied.append(tuple(source.shape))
        return func(*args, **(kwargs or {}))


def steps_of(statistics: RunningStatistics, forward: Callable[[], Any], number: int) -> None:
    for _ in range(number):
        statistics.remember()
        forward()
        statistics.restore(False)


def test_what_holds_still_is_not_copied_any_more() -> None:
    model = nn.Sequential(Averages(in_place, mask=zeros(7, 7), large=zeros(SMALL)), nn.BatchNorm1d(4))
    statistics = RunningStatistics(model)
    steps_of(statistics, lambda: model(torch.randn(8, 4)), 2)
    with Ops() as ops:
        statistics.remember()
        statistics.restore(False)
    assert (7, 7) not in ops.copied
    assert (SMALL,) not in ops.copied
    assert ops.names.count("cat") == 2  # FP32 and the counter of BatchNorm
    kept = {each.place.name: each.copy is not None for each in statistics._still._kept}
    assert kept == {"mask": True, "large": False}


def test_a_model_whose_buffers_hold_still_costs_no_op_at_all() -> None:
    model = nn.Sequential(*[Averages(lambda module, x: None, mask=zeros(3, 3)) for _ in range(5)])
    statistics = RunningStatistics(model)
    steps_of(statistics, lambda: model(torch.randn(8, 4)), 2)
    with Ops() as ops:
        steps_of(statistics, lambda: None, 3)
    assert [name for name in ops.names if name not in ("detach",)] == []


@pytest.mark.parametrize("layers", [1, 20])
def test_batch_normalisation_alone_costs_two_copies_a_step_and_no_learning(layers: int) -> None:
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(layers)])
    statistics = RunningStatistics(model)
    with Ops() as ops:
        statistics.remember()
        statistics.restore(False)
    assert [name for name in ops.names if name not in ("view", "_unsafe_view", "reshape")] == ["cat", "cat"]


def test_a_layer_in_evaluation_mode_is_not_copied() -> None:
    model = nn.BatchNorm1d(4).eval()
    statistics = RunningStatistics(model)
    with Ops() as ops:
        statistics.remember()
    assert ops.names == []


def test_after_the_learning_steps_a_skip_that_only_the_device_knows_of_is_not_waited_for() -> None:
    model = nn.Sequential(Averages(in_place, mask=zeros(3, 3)), Averages(replaced), nn.BatchNorm1d(4))
    statistics = RunningStatistics(model)
    forward = lambda: model(torch.randn(8, 4))  # noqa: E731
    steps_of(statistics, forward, 2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics.remember()
    forward()
    with Ops() as ops:
        statistics.restore(torch.ones(()))
    assert "_local_scalar_dense" not in ops.names
    assert same(dict(model.named_buffers()), before)
    statistics.remember()
    forward()
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics.restore(torch.zeros(()))
    assert same(dict(model.named_buffers()), after)
    assert not same(after, before)


@pytest.mark.parametrize("size", [4, SMALL])
def test_what_moves_between_two_steps_is_not_undone(size: int) -> None:
    """A checkpoint that is loaded, a mask that the loop replaces: no forward pass did that."""
    module = Averages(lambda module, x: None, mask=zeros(size), other=zeros(size))
    statistics = RunningStatistics(module)
    forward = lambda: module(torch.randn(8, 4))  # noqa: E731
    steps_of(statistics, forward, 3)
    module.mask.fill_(5.0)
    module.other = torch.full((size,), 7.0)
    statistics.remember()
    forward()
    statistics.restore(True)
    assert module.mask.eq(5.0).all()
    assert module.other.eq(7.0).all()


def test_a_large_buffer_that_is_replaced_late_is_put_back_without_a_copy() -> None:
    module = Averages(lambda module, x: None, large=zeros(SMALL))
    statistics = RunningStatistics(module)
    steps_of(statistics, lambda: module(torch.randn(8, 4)), 3)
    before = module.large
    statistics.remember()
    module.large = torch.ones(SMALL)
    statistics.restore(True)
    assert module.large is before
    assert before.eq(0).all()


def test_a_layer_that_is_added_later_is_found_at_the_next_skip() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    statistics = RunningStatistics(model)
    steps_of(statistics, lambda: model(torch.randn(8, 4)), 3)
    model.append(nn.BatchNorm1d(4))
    statistics.remember()
    statistics.restore(True)
    statistics.remember()
    model(torch.full((8, 4), math.nan))
    statistics.restore(True)
    assert is_finite(model.state_dict())


def best_so_far(module: Any, x: Tensor) -> None:
    module.mean[1:] += x.mean(0)[1:]


def test_what_was_infinite_before_is_not_spoiled() -> None:
    """A running maximum that has seen nothing yet is -inf."""
    model = Averages(best_so_far)
    model.mean[0] = -INF
    statistics = RunningStatistics(model)
    steps_of(statistics, lambda: model(torch.randn(8, 4)), 3)
    statistics.remember()
    model(torch.randn(8, 4))
    after = model.mean.clone()
    for found_inf in (True, torch.ones(())):
        statistics.mend(found_inf)
        assert torch.equal(model.mean, after)


def test_another_network_s_skip_mends_what_it_spoiled_and_leaves_the_rest() -> None:
    """A mask of -inf is no spoiled statistic."""
    model = nn.Sequential(Averages(in_place, mask=torch.full((2, 2), -INF)), Averages(replaced))
    for steps in (0, 3):
        statistics = RunningStatistics(model)
        steps_of(statistics, lambda: model(torch.randn(8, 4)), steps)
        statistics.remember()
        model(torch.randn(8, 4))
        good = {name: buffer.clone() for name, buffer in model.named_buffers()}
        statistics.mend(True)
        statistics.mend(torch.ones(()))
        assert same(dict(model.named_buffers()), good)
        model(torch.full((8, 4), INF))
        statistics.mend(torch.zeros(()))
        assert not is_finite(model[0].mean)
        statistics.mend(torch.ones(()))
        assert is_finite([model[0].mean, model[1].mean])


def adversaries(accumulate: int = 1) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(0)
    maker = nn.Linear(4, 4)
    judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Averages(in_place), nn.Linear(4, 1))
    making, judging = (
        mezzo.MixedPrecision(
            each,
            torch.optim.AdamW(each.parameters(), fused=True),
            "fp16",
            loss_scale=128,
            trace=False,
            accumulate=losses,
        )
        for each, losses in ((maker, accumulate), (judge, 1))
    )
    return maker, judge, making, judging


def judged(judge: nn.Module, region: Any, made: Callable[[], Tensor], factor: float = 1.0) -> Tensor:
    with region.autocast():
        return judge(made() * factor).float().square().mean()


@pytest.mark.parametrize("run", RUNS)
def test_a_generator_s_skipped_step_leaves_no_trace_in_its_discriminator(run: str, decides: str) -> None:
    """The generator's loss comes through the discriminator, in the generator's region alone."""

    def end(run: str) -> dict[str, Any]:
        maker, judge, making, judging = adversaries()
        good = 0
        for event in run:
            noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(good))
            if event == "g":
                assert judging.step(judged(judge, judging, lambda: maker(noise))).moved  # noqa: B023
            factor = INF if event == "b" else 1.0
            result = making.step(judged(judge, making, lambda: maker(noise), factor))  # noqa: B023
            assert result.skipped == (event == "b")
            good += event == "g"
        making.close()
        judging.close()
        return {"judge": judge.state_dict(), "maker": maker.state_dict()}

    assert same(end(run), end(run.replace("b", "")))


def test_what_the_other_network_did_itself_meanwhile_stays() -> None:
    """A window of two losses of the generator, between which the discriminator takes a step of its own."""
    maker, judge, making, judging = adversaries(accumulate=2)
    noise = torch.randn(8, 4)
    for _ in range(4):
        making.step(judged(judge, making, lambda: maker(noise)))
    making.step(judged(judge, making, lambda: maker(noise)))
    assert judging.step(judged(judge, judging, lambda: maker(noise).detach())).moved
    bad = judged(judge, making, lambda: maker(noise)) * INF
    after = {name: buffer.clone() for name, buffer in judge.named_buffers()}
    assert making.step(bad).skipped
    assert same(dict(judge.named_buffers()), after)

    # What is no longer finite goes back as far as it must.
    making.step(judged(judge, making, lambda: maker(noise)))
    assert judging.step(judged(judge, judging, lambda: maker(noise).detach())).moved
    assert making.step(judged(judge, making, lambda: maker(noise), INF)).skipped
    assert is_finite(dict(judge.named_buffers()))


@pytest.mark.parametrize("steps", [0, 3])
def test_an_open_window_s_copies_are_saved_and_loaded(steps: int) -> None:
    """`MixedPrecision.state_dict` in the middle of a window: the copies are of its start."""

    def made() -> tuple[nn.Module, RunningStatistics]:
        torch.manual_seed(0)
        model = nn.Sequential(Averages(in_place, mask=zeros(3, 3)), nn.BatchNorm1d(4), Averages(replaced))
        return model, RunningStatistics(model)

    model, statistics = made()
    steps_of(statistics, lambda: model(torch.randn(8, 4)), steps)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics.remember()
    model(torch.randn(8, 4))
    state = statistics.state()
    assert all(isinstance(value, Tensor) for value in state.values())

    again, other = made()
    again.load_state_dict(model.state_dict())
    other.load(state)
    again(torch.full((8, 4), INF))
    other.restore(True)
    assert same(dict(again.named_buffers()), before)

    other.load({"0.mean": torch.zeros(5)})  # of another model
    assert not other.remembers
    other.load([torch.zeros(3)])  # as an older Mezzo wrote them
    assert not other.remembers


def test_it_holds_no_model_alive() -> None:
    model = nn.BatchNorm1d(4)
    statistics = RunningStatistics(model)
    statistics.remember()
    alive = weakref.ref(model)
    del model
    assert alive() is None
    statistics.restore(True)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "policy", ["fp8,scaling=tensorwise(history=4)", "fp8,scaling=tensorwise(history=16,margin=1)"]
)
def test_the_histories_of_fp8_scales(policy: str, run: str, decides: str) -> None:
    """An overflowed step's finite amaxes would set the scales of the steps to come."""
    from mezzo.pytorch.kernels.fp8.history import history_state

    def end(run: str) -> dict[str, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        mp = mezzo.MixedPrecision(model, optimizer, policy, loss_scale=128, trace=False)
        good = 0
        for event in run:
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(good))
            with mp.autocast():
                loss = model(x * (0.02 if event == "b" else 1.0)).float().square().mean()
            mp.step(loss * (INF if event == "b" else 1.0))
            good += event == "g"
        mp.close()
        histories = history_state(model.named_parameters())
        assert histories
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "histories": histories}

    assert same(end(run), end(run.replace("b", "")))
