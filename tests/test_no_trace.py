"""A skipped step leaves no trace: a run with bad batches ends bit for bit where the run without them does.

In a script that `mezzo run` runs, a scheduler and an average of the weights are left out: the script isn't told of a
skip, since it must stay unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import mezzo
from bad_steps import CLOSURES, INF, OPTIMIZERS, RUNS, Make, batches, is_finite, network, same
from mezzo.core.masters import MASTERS
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from mezzo.pytorch.training.networks import SMALL, MovingBuffers
from run_scripts import Ran
from training_steps import Ops
from two_networks import LAST

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

SCALE = 128.0


def trained(
    run: str, make: Make, model: nn.Module, precision: str = "fp16", *, follows: bool = True, **arguments: Any
) -> dict[str, Any]:
    """Everything after a run; `follows`: with a scheduler and an average, so that the host decides."""
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ema = AveragedModel(copy.deepcopy(model), use_buffers=True) if follows else None
    if follows:
        arguments |= {"scheduler": scheduler, "ema": ema}
    mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=SCALE, **arguments)
    results = []
    (good, _), *_ = batches("g")
    for x, y in batches(run):
        for each in (*[good] * (arguments.get("accumulate", 1) - 1), x):  # the last is the bad one
            with mp.autocast():
                loss = nn.functional.cross_entropy(model(each), y)
            result = mp.step(loss)
        results.append(result)
    assert [result.stepped for result in results] == [event == "g" for event in run]
    mp.close()
    modules = model.named_modules()
    return {
        "model": model.state_dict(),
        "buffers": {f"{path}.{name}": b for path, m in modules for name, b in m._buffers.items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "ema": None if ema is None else ema.state_dict(),
        "masters": mezzo.master_state_dict(model, optimizer),
    }


def without_bad(run: str) -> str:
    return run.replace("b", "")


def holds(run: str, make: Make, kind: str, precision: str = "fp16", **arguments: Any) -> None:
    ours = trained(run, make, network(kind), precision, **arguments)
    clean = trained(without_bad(run), make, network(kind), precision, **arguments)
    for name in clean:
        assert same(ours[name], clean[name]), name
    assert is_finite(ours)


def test_every_optimizer_of_torch_has_a_row() -> None:
    known = {name.split()[0] for name in (*OPTIMIZERS, *CLOSURES)}
    kinds = {
        n for n, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    assert kinds - {"Optimizer"} == known


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(name: str, run: str) -> None:
    holds(run, OPTIMIZERS[name], name)


# A step that waits for nobody: without scheduler and average, the kernel itself must hold still.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("fused")])
def test_torch_optimizers_whose_kernel_skips(name: str, run: str, decides: str) -> None:
    holds(run, OPTIMIZERS[name], name, follows=False)


ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=0.05)  # noqa: E731
OURS: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "AdamW": (lambda p: AdamW(p, lr=0.05), "fp16", {}),
    "SGD": (lambda p: SGD(p, lr=0.1), "fp16", {}),
    "SGD momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True), "fp16", {}),
    "AdamW bf16 state": (lambda p: AdamW(p, lr=0.05, state="bf16"), "bf16", {}),
    "AdamW int8 state": (lambda p: AdamW(p, lr=0.05, state="int8"), "bf16", {}),
    "split": (ADAMW, "bf16", {"masters": "split"}),
    "split8": (ADAMW, "bf16", {"masters": "split8"}),
    "split8 int8": (lambda p: torch.optim.Adam(p, lr=0.05), "bf16", {"masters": "split8", "state": "int8"}),
    "none": (ADAMW, "bf16", {"masters": "none"}),
    "masters fp16": (ADAMW, "fp16", {"masters": "fp32"}),
    "with masters": (lambda p: torch.optim.RMSprop(p, lr=0.01), "fp16", {"masters": "fp32"}),
    "clipped": (ADAMW, "fp16", {"clip_value": 0.01, "clip_norm": 0.1}),
    "one pass, clipped": (lambda p: AdamW(p, lr=0.05), "fp16", {"clip_norm": 0.1}),
    "release": (lambda p: AdamW(p, lr=0.05), "fp16", {"release_gradients": True}),
    "release split8": (ADAMW, "bf16", {"release_gradients": True, "masters": "split8"}),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("row", OURS)
def test_mezzo_s_optimizers_and_every_way_to_store_weights(row: str, run: str, decides: str) -> None:
    make, precision, arguments = OURS[row]
    holds(run, make, row, precision, follows=decides == "host", **arguments)
    assert {each.get("masters", "auto") for _, _, each in OURS.values()} == {"auto", *MASTERS}


# With mezzo.GradScaler. It is handed optimizers, not models, so it can put back no buffer: no BatchNorm here.


def scaled(run: str, make: Make, kind: str) -> list[Any]:
    model = network(kind, statistics=False)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = mezzo.GradScaler(init_scale=SCALE, hysteresis=10**6)
    for (x, y), event in zip(batches(run), run):

        def closure() -> Any:
            optimizer.zero_grad()
            with mezzo.autocast("fp16"):
                loss = nn.functional.cross_entropy(model(x), y)  # noqa: B023
            scaler.scale(loss).backward()
            return loss

        if kind in CLOSURES:
            scaler.step(optimizer, closure)
        else:
            closure()
            scaler.step(optimizer)
        scaler.update()
        assert scaler.was_skipped(optimizer) == (event == "b")
        if not scaler.was_skipped(optimizer):
            scheduler.step()
    return [each.state_dict() for each in (model, optimizer, scheduler)]


SCALED: dict[str, Make] = {
    **OPTIMIZERS,
    **CLOSURES,
    **{f"Mezzo {row}": OURS[row][0] for row in ("AdamW", "SGD momentum", "AdamW int8 state")},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", SCALED)
def test_grad_scaler(name: str, run: str) -> None:
    ours, clean = scaled(run, SCALED[name], name), scaled(without_bad(run), SCALED[name], name)
    assert same(ours, clean)
    assert is_finite(ours)


@pytest.mark.parametrize("run", RUNS)
def test_a_window_of_which_the_last_loss_is_bad_is_skipped_whole(run: str) -> None:
    holds(run, OPTIMIZERS["AdamW foreach"], "", follows=False, accumulate=3)


SCRIPT = """
import sys
from torch import nn
from bad_steps import CLOSURES, OPTIMIZERS, batches, network
from two_networks import LAST
kind, run = sys.argv[1:]
model = network(kind)
optimizer = {**OPTIMIZERS, **CLOSURES}[kind](model.parameters())
for x, y in batches(run):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    if kind in CLOSURES:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
LAST.update(model=model.state_dict(), optimizer=optimizer.state_dict())
"""
STORED = ("bf16,masters=split", "bf16,masters=split8,state=int8")


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "fp16") for kind in (*OPTIMIZERS, *CLOSURES)), *(("AdamW fused", policy) for policy in STORED)],
)
def test_under_mezzo_run(kind: str, policy: str, launch: Callable[..., Ran]) -> None:
    def ended(run: str) -> dict[str, Any]:
        ran = launch(SCRIPT, kind, run, policy=f"{policy},loss_scale=128")
        assert ran.status == 0, ran.err
        assert [update.moved for update in ran.of("update")] == [event == "g" for event in run]
        return dict(LAST)

    ours = ended("bgbbgbg")
    assert is_finite(ours)
    assert same(ours, ended("ggg"))


class Averages(nn.Module):
    """What VQ layers, EMA normalisers and centred losses do: an average of what was seen, moved by each forward."""

    def __init__(self, write: Any, *, persistent: bool = True, **buffers: Any) -> None:
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


def replaced(module: Any, x: Tensor) -> None:
    module.mean = module.mean * 0.9 + x.mean(0) * 0.1


def written_then_replaced(module: Any, x: Tensor) -> None:
    module.mean.mul_(0.5)
    module.mean = module.mean + x.mean(0)


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


def eight_bits(module: Any, x: Tensor) -> None:
    module.low.copy_((x.mean(0)).to(module.low.dtype))


OWN: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Averages(in_place),
    "not persistent": lambda: Averages(in_place, persistent=False),
    "through .data": lambda: Averages(through_data),
    "replaced": lambda: Averages(replaced),
    "written, then replaced": lambda: Averages(written_then_replaced),
    "codebook": lambda: Averages(
        codebook,
        codes=torch.zeros(3, 4),
        sums=torch.zeros(3, 4),
        sizes=torch.zeros(3),
        ready=torch.tensor(False),
    ),
    "queue": lambda: Averages(queue, bank=torch.zeros(5, 4), pointer=torch.zeros((), dtype=torch.long)),
    "None at first": lambda: Averages(last_seen, last=None),
    "expanded": lambda: Averages(expanded),
    "grows": lambda: Averages(grows, seen=torch.zeros(1)),
    "fp8": lambda: Averages(eight_bits, low=torch.zeros(4).to(torch.float8_e4m3fn)),
    "with a mask of -inf": lambda: Averages(in_place, mask=torch.full((4, 4), -INF).triu(1)),
}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, no statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.SyncBatchNorm(4), nn.Flatten()),
    "LazyBatchNorm1d": lambda: nn.LazyBatchNorm1d(affine=False),
    "InstanceNorm1d": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 1)),
        nn.Upsample(scale_factor=2),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.MaxPool1d(2),
        nn.Flatten(),
    ),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "spectral_norm, hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("run", ["bg", "ggggbgbbg"])
@pytest.mark.parametrize("name", [*NORMS, *OWN])
def test_every_kind_of_buffer(name: str, run: str, decides: str) -> None:
    ends = []
    for each in (run, without_bad(run)):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), {**NORMS, **OWN}[name](), nn.Linear(4, 2))
        ends.append(trained(each, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), model, follows=False))
    for part in ends[0]:
        assert same(ends[0][part], ends[1][part]), part


def steps_of(statistics: MovingBuffers, forward: Callable[[], Any], number: int) -> None:
    for _ in range(number):
        statistics.remember()
        forward()
        statistics.restore(False)


def test_a_large_buffer_that_does_not_move_is_not_copied_after_the_learning_steps() -> None:
    still = Averages(through_data, large=torch.zeros(SMALL), codes=torch.zeros(SMALL, 4))

    def forward() -> None:
        still(torch.randn(8, 4))
        still.codes.data.add_(1.0)

    statistics = MovingBuffers(still)
    steps_of(statistics, forward, 2)
    with Ops() as ops:
        statistics.remember()
    names = [name.split(".")[1] for name in ops.names]
    assert names.count("cat") == 1
    assert not {"clone", "_to_copy"} & set(names)
    before = still.codes.clone()
    forward()
    assert {name.rpartition(".")[2] for name in statistics.state()} == {"mean", "codes"}
    statistics.restore(True)
    assert torch.equal(still.codes, before)


@pytest.mark.parametrize("write", [in_place, replaced])
def test_a_large_buffer_that_begins_to_move_late_is_copied_from_the_next_step_on(write: Any) -> None:
    model = Averages(write, mean=torch.zeros(SMALL))
    statistics = MovingBuffers(model)
    steps_of(statistics, lambda: None, 3)
    steps_of(statistics, lambda: model(torch.randn(8, SMALL)), 1)
    before = model.mean.clone()
    statistics.remember()
    model(torch.randn(8, SMALL))
    assert not same(model.mean, before)
    statistics.restore(True)
    assert same(model.mean, before)


def test_batch_normalisation_alone_costs_two_copies_a_step_and_no_learning() -> None:
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(20)])
    statistics = MovingBuffers(model)
    with Ops() as ops:
        statistics.remember()
        statistics.restore(False)
    names = [name.split(".")[1] for name in ops.names]
    assert [name for name in names if name not in ("view", "_unsafe_view", "reshape")] == ["cat", "cat"]


@pytest.mark.parametrize("size", [4, SMALL])
def test_what_moves_between_two_steps_is_not_undone(size: int) -> None:
    """A checkpoint that is loaded, a mask that the loop replaces: no forward pass did that."""
    module = Averages(lambda module, x: None, mask=torch.zeros(size), other=torch.zeros(size))
    statistics = MovingBuffers(module)
    forward = lambda: module(torch.randn(8, 4))  # noqa: E731
    steps_of(statistics, forward, 3)
    module.mask.fill_(5.0)
    module.other = torch.full((size,), 7.0)
    statistics.remember()
    forward()
    statistics.restore(True)
    assert module.mask.eq(5.0).all()
    assert module.other.eq(7.0).all()


def test_an_infinite_mask_of_the_script_stays_beside_another_network() -> None:
    """Copies outlive the step then. Only what a forward pass made infinite goes back to them."""
    trained = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), Averages(in_place, mask=torch.zeros(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained.append((model, mezzo.MixedPrecision(model, optimizer, "fp16", trace=False)))
    for step in range(4):
        for model, mp in trained:
            if step == 2:
                model[1].mask[1] = -math.inf
            with mp.autocast():
                loss = model(torch.randn(8, 4)).square().mean()
            mp.step(loss)
    assert all(model[1].mask[1] == -math.inf for model, _ in trained)
