"""MixedPrecision: a step's order, what a skip leaves, windows, several optimizers, what is refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.core import records
from mezzo.core.errors import (
    CallOrderError,
    LossScaleCollapseError,
    UnknownNameError,
    UnsupportedPrecisionError,
    UsageError,
)
from mezzo.pytorch import training

INF, NAN = float("inf"), float("nan")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.fixture(autouse=True)
def _nobody_owns_anything() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    for mp in list(training._ALIVE):
        mp.close()


@pytest.fixture(params=["host", "device"])
def decides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who knows of a skip first: "device" makes the CPU an accelerator, which must not be waited for."""
    if request.param == "device":
        monkeypatch.setattr(training, "_reading_is_free", lambda tensor: False)
    name: str = request.param
    return name


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def batch(seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 2, (size,), generator=generator)


def run(mp: Any, seed: int = 0, factor: float = 1.0, size: int = 16) -> Any:
    x, y = batch(seed, size)
    with mp.autocast():
        loss = nn.functional.cross_entropy(mp.model(x), y)
    return mp.step(loss * factor)


def everything(mp: Any) -> list[Tensor]:
    """Parameters, buffers and the optimizer's state, copied."""
    state = mp.optimizer.state_dict()["state"]
    kept = [value for key in sorted(state) for _, value in sorted(state[key].items())]
    tensors = (*mp.model.parameters(), *mp.model.buffers(), *kept)
    return [t.detach().clone() for t in tensors if t is not None]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


# ------------------------------------------------------------------- a step beside torch.amp


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_loop_written_by_hand_with_torch_amp(name: str, decides: str) -> None:
    """fp16 with accumulation, clipping and overflows: same weights to the last bit, same scales."""
    factors = [1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0, NAN, 1.0, 1.0, 1.0, 1.0]
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, norms = [], []
    for index, factor in enumerate(factors):
        x, y = batch(index)
        with mezzo.autocast("fp16", "cpu"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * factor / 2).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())

    twin = network()
    mp = mezzo.MixedPrecision(
        twin,
        OPTIMIZERS[name](twin.parameters()),
        "fp16",
        clip_norm=0.1,
        accumulate=2,
        loss_scale=mezzo.DynamicLossScale(init=2.0**10, growth_interval=2),
    )
    results = [run(mp, index, factor) for index, factor in enumerate(factors)]
    assert [r.moved for r in results] == [False, True, False, False, False, True] + [False, False] + [
        False,
        True,
    ] * 2
    assert [r.skipped for r in results] == [i in (3, 7) for i in range(12)]
    assert same([p.detach() for p in twin.parameters()], [p.detach() for p in model.parameters()])
    assert mp.loss_scale == scales[-1]
    assert torch.equal(
        torch.tensor([r.grad_norm for r in results[1::2]]).nan_to_num(7.0),
        torch.tensor(norms).nan_to_num(7.0),
    )


def test_fp32_is_the_plain_loop_to_the_last_bit() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    for index in range(3):
        x, y = batch(index)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = network()
    mp = mezzo.MixedPrecision(twin, OPTIMIZERS["adamw-fused"](twin.parameters()), "fp32")
    for index in range(3):
        assert run(mp, index).moved
    assert same(list(twin.parameters()), list(model.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_loss_scale_nothing_is_looked_at(precision: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), precision)
    result = run(mp, factor=NAN)
    assert (result.moved, result.skipped, result.reason) == (True, False, "")
    assert result.loss_scale == 1.0
    assert result.grad_norm is not None
    assert result.grad_norm != result.grad_norm


def test_clipping_comes_after_unscaling(decides: str) -> None:
    """True norm 2: a clip of scaled gradients would read 131072, and shrink the update by the scale."""
    for precision in ("fp32", "fp16"):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        mp = mezzo.MixedPrecision(
            model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), precision, clip_norm=1.0
        )
        result = mp.step(model(torch.ones(1, 4)).sum())
        assert result.grad_norm == 2.0
        assert model.weight.detach().flatten().tolist() == pytest.approx([-0.05] * 4, rel=1e-5)


@pytest.mark.parametrize(
    ("clip_value", "clip_norm", "expected"),
    [
        (None, None, [3.0, -4.0]),
        (3.5, None, [3.0, -3.5]),
        (None, 1.0, [0.6, -0.8]),
        (None, 10.0, [3.0, -4.0]),
        (1.0, 1.0, [0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_value_is_clipped_before_norm_and_the_norm_told_is_the_gradients_own(
    clip_value: float | None, clip_norm: float | None, expected: list[float]
) -> None:
    weight = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(weight.weight)
    mp = mezzo.MixedPrecision(
        weight,
        torch.optim.SGD(weight.parameters(), lr=1.0),
        "fp16",
        clip_value=clip_value,
        clip_norm=clip_norm,
    )
    result = mp.step((weight.weight * torch.tensor([[3.0, -4.0]])).sum())
    assert result.grad_norm == 5.0
    assert (-weight.weight.detach()).flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_a_sparse_gradient_s_norm_is_of_the_sums_by_index() -> None:
    model = nn.Embedding(5, 1, sparse=True)
    nn.init.zeros_(model.weight)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", clip_norm=1.0)
    result = mp.step(model(torch.tensor([1, 1, 1, 3, 3, 3, 3])).sum())
    assert result.grad_norm == 5.0
    assert model.weight.detach().flatten().tolist() == pytest.approx([0, -0.6, 0, -0.8, 0], rel=1e-5)


# ------------------------------------------------------------------------- skips


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skip_leaves_no_trace_in_parameters_optimizer_statistics_scheduler_or_average(
    name: str, accumulate: int, decides: str
) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS[name](model.parameters()), "fp16", accumulate=accumulate)
    for index in range(2 * accumulate):
        run(mp, index)
    before = everything(mp)
    for index in range(accumulate):
        x, y = batch(index)
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x * (INF if index == 0 else 1.0)), y)
        result = mp.step(loss)
    assert (result.moved, result.skipped) == (False, True)
    assert "NaN or infinite at loss scale 65536" in result.reason
    assert same(everything(mp), before)
    assert all(p.grad is None for p in model.parameters())
    assert mp.loss_scale == 2.0**15
    for index in range(accumulate):
        result = run(mp, index)
    assert result.moved
    assert not same(everything(mp), before)
    assert all(t.isfinite().all() for t in everything(mp))
    assert int(model[1].num_batches_tracked) == 3 * accumulate


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scheduler_and_average_follow_only_moves(accumulate: int, decides: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ema = AveragedModel(model, use_buffers=True)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", scheduler=scheduler, ema=ema, accumulate=accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for factor in (INF, 1.0, INF, 1.0, 1.0):
            for _ in range(accumulate):
                run(mp, factor=factor)
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert int(ema.n_averaged) == 3
    assert all(t.isfinite().all() for t in ema.buffers())


def test_an_average_may_be_a_function() -> None:
    model, seen = network(), []
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", ema=seen.append)
    run(mp, factor=INF)
    run(mp)
    assert seen == [model]


def test_collapse_is_raised_and_leaves_the_model_as_it_was(decides: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(
        model,
        OPTIMIZERS["adamw-fused"](model.parameters()),
        "fp16",
        loss_scale=mezzo.DynamicLossScale(init=2.0, floor=1.0, patience=4),
    )
    run(mp)
    before = everything(mp)

    def until_it_raises() -> int:
        for index in range(12):
            try:
                run(mp, factor=NAN)
            except LossScaleCollapseError:
                return index + 1
        return 0

    raised_at = until_it_raises()
    # The first skip leads to the floor; there, 4 are borne. The device is asked every 4 updates.
    assert raised_at == (5 if decides == "host" else 7)
    assert same(everything(mp), before)


def test_a_static_scale_skips_and_stays(decides: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw-fused"](model.parameters()), "fp16", loss_scale=128)
    assert run(mp, factor=INF).skipped
    result = run(mp)
    assert result.moved
    assert (result.loss_scale, mp.loss_scale) == (128.0, 128.0)


def test_an_fp16_loss_does_not_overflow_by_its_seed() -> None:
    model = nn.Linear(2, 1)
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16")
    result = mp.step(model(torch.ones(1, 2)).half().mean())
    assert result.moved
    assert result.loss_scale == 2.0**15
    assert result.grad_norm == pytest.approx(3**0.5)


class Waits(TorchDispatchMode):
    """Notes the ops that read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("fused")])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_a_fused_step_in_fp16_waits_for_nothing_until_its_result_is_read(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_reading_is_free", lambda tensor: False)
    model = network()
    mp = mezzo.MixedPrecision(
        model, OPTIMIZERS[name](model.parameters()), "fp16", clip_norm=1.0, accumulate=2
    )
    for index in range(4):
        run(mp, index)
    with Waits() as waits:
        run(mp, 4, factor)
        result = run(mp, 5, factor)
    assert waits.seen == []
    with Waits() as waits:
        assert result.skipped == (factor == INF)
    assert waits.seen == ["_local_scalar_dense"]


# ------------------------------------------------------------------------ windows


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_four_quarters_move_as_their_batch_does(precision: str) -> None:
    def plain() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(4, 2)

    x, y = batch(0, 32)
    large, small = plain(), plain()
    one = mezzo.MixedPrecision(large, torch.optim.SGD(large.parameters(), lr=1.0), "fp32")
    four = mezzo.MixedPrecision(small, torch.optim.SGD(small.parameters(), lr=1.0), precision, accumulate=4)
    with one.autocast():
        loss = nn.functional.cross_entropy(large(x), y)
    one.step(loss)
    results = []
    for quarter, target in zip(x.split(8), y.split(8)):
        with four.autocast():
            loss = nn.functional.cross_entropy(small(quarter), target)
        results.append(four.step(loss))
        assert all(p.grad is None or p.grad.dtype is torch.float32 for p in small.parameters())
    assert [r.moved for r in results] == [False, False, False, True]
    assert [r.reason for r in results] == [f"{i} of 4 losses accumulated" for i in (1, 2, 3)] + [""]
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    for a, b in zip(large.parameters(), small.parameters()):
        assert torch.allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("seen", [1, 2, 3])
def test_flush_moves_by_the_mean_of_the_losses_that_were_seen(precision: str, seen: int) -> None:
    weights = []
    for accumulate in (4, seen):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        mp = mezzo.MixedPrecision(
            model, torch.optim.SGD(model.parameters(), lr=1.0), precision, accumulate=accumulate
        )
        for index in range(seen):
            mp.step((model.weight * float(2 * index)).sum())
        if accumulate == 4:
            result = mp.flush()
            assert result.moved
            assert result.loss != result.loss
            assert mp.flush().reason == "nothing accumulated since the last step"
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, rtol=1e-6)
    assert torch.allclose(weights[0], torch.full((1, 2), -float(seen - 1)), rtol=1e-6)


# ------------------------------------------------------------- several optimizers, other leaves


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gan_each_side_has_its_own_gradients_and_scale(reentrant: bool) -> None:
    generator, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mp_g = mezzo.MixedPrecision(generator, OPTIMIZERS["adamw-fused"](generator.parameters()), "fp16")
    mp_d = mezzo.MixedPrecision(judge, OPTIMIZERS["adamw-fused"](judge.parameters()), "fp16")
    noise = torch.randn(5, 3)

    def judged(fake: Tensor) -> Tensor:
        out = checkpoint(judge, fake, use_reentrant=True) if reentrant else judge(fake)
        assert isinstance(out, Tensor)
        return out

    kept = torch.randn(4, 3)
    generator.weight.grad = kept.clone()
    for _ in range(2):
        with mp_d.autocast():
            loss_d = judged(generator(noise)).float().mean() / 4
        assert mp_d.step(loss_d).moved
        assert torch.equal(generator.weight.grad, kept)
        assert generator.bias.grad is None
    generator.weight.grad = None
    before = [p.detach().clone() for p in judge.parameters()]
    with mp_g.autocast():
        loss_g = -judged(generator(noise)).float().mean()
    assert mp_g.step(loss_g * INF).skipped
    assert (mp_g.loss_scale, mp_d.loss_scale) == (2.0**15, 2.0**16)
    assert same([p.detach() for p in judge.parameters()], before)
    assert all(p.grad is None for p in judge.parameters())


def test_two_optimizers_on_one_loss_with_a_retained_graph() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(body, head)
    one = mezzo.MixedPrecision(model, torch.optim.SGD(body.parameters(), lr=0.1), "bf16")
    # The head's weights must not move before the body's gradients have been computed.
    two = mezzo.MixedPrecision(model, torch.optim.SGD(head.parameters(), lr=0.1), "bf16", accumulate=2)
    with one.autocast():
        loss = model(torch.ones(1, 2)).float().sum()
    assert not two.step(loss, retain_graph=True).moved
    assert one.step(loss).moved
    assert two.flush().moved


# ------------------------------------------------------------------------- state


def resumed(mp: Any, **arguments: Any) -> Any:
    """A new process: model and optimizer from their own states, MixedPrecision from its file."""
    file = io.BytesIO()
    torch.save([mp.model.state_dict(), mp.optimizer.state_dict(), mp.state_dict()], file)
    file.seek(0)
    model_state, optimizer_state, state = torch.load(file, weights_only=True)
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    new = mezzo.MixedPrecision(model, optimizer, **arguments)
    new.load_state_dict(state)
    return new


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("after", [4, 5])
@pytest.mark.parametrize("next_factor", [1.0, INF])
def test_a_resumed_run_goes_on_bit_by_bit(
    precision: str, after: int, next_factor: float, decides: str
) -> None:
    if next_factor == INF and precision != "fp16":
        next_factor = 2.0
    arguments: dict[str, Any] = {"precision": precision, "accumulate": 2, "clip_norm": 0.5}
    if precision == "fp16":
        arguments["loss_scale"] = mezzo.DynamicLossScale(growth_interval=3, init=2.0**8)
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw-fused"](model.parameters()), **arguments)
    for index in range(after):
        run(mp, index, INF if index == 2 and precision == "fp16" else 1.0)
    twin = resumed(mp, **arguments)
    for index in range(after, after + 6):
        for each in (mp, twin):
            run(each, index, next_factor if index == after else 1.0)
    assert same(everything(mp), everything(twin))
    assert mp.loss_scale == twin.loss_scale


def test_states_of_grad_scalers_load() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=5)
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16")
    for state in (theirs.state_dict(), mezzo.GradScaler(init_scale=2.0**9, growth_interval=5).state_dict()):
        mp.load_state_dict(state)
        assert mp.loss_scale == 2.0**9
        assert mp.state_dict()["loss_scale"]["growth_interval"] == 5
    mp.load_state_dict({})
    assert mp.loss_scale == 2.0**9
    mp.close()
    bf16 = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "bf16")
    with pytest.warns(UserWarning, match="no dynamic loss scale"):
        bf16.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"a": 1}, "no state of MixedPrecision"),
        (lambda state: state | {"schema": 99}, "schema 99"),
        (lambda state: state | {"accumulate": 5}, "same accumulate"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Callable[[Any], Any], message: str) -> None:
    model = network()
    mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", accumulate=3)
    run(mp)
    with pytest.raises(UsageError, match=message):
        mp.load_state_dict(change(mp.state_dict()))


def test_a_backward_that_raises_drops_its_window() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError("out of memory")

    weights = []
    for fails in (True, False):
        model = network()
        mp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", accumulate=2)
        if fails:
            run(mp, 5)
            x = torch.tanh(model[0](batch(6)[0]))
            with pytest.raises(RuntimeError, match="out of memory"):
                mp.step(model[3](x).sum() + model[3](Fails.apply(x)).sum())
        assert not run(mp, 0).moved
        assert run(mp, 1).moved
        weights.append([p.detach() for p in model.parameters()])
    assert same(*weights)


def test_records_tell_of_every_loss_and_update(tmp_path: Path) -> None:
    writer = records.RecordWriter(tmp_path / "run.jsonl")
    model = network()
    mp = mezzo.MixedPrecision(
        model, OPTIMIZERS["sgd"](model.parameters()), "fp16", accumulate=2, records=writer
    )
    for factor in (1.0, 1.0, 1.0, INF):
        run(mp, factor=factor)
    writer.close()
    found = list(records.read(tmp_path / "run.jsonl"))
    losses = [record.index for record in found if isinstance(record, records.LossRecord)]
    updates = [record for record in found if isinstance(record, records.UpdateRecord)]
    assert losses == [0, 1, 2, 3]
    assert [(u.index, u.moved, u.skipped, u.loss_scale) for u in updates] == [
        (0, True, False, 65536.0),
        (1, False, True, 65536.0),
    ]
    assert "NaN or infinite" in updates[1].reason


# ------------------------------------------------------------------------ refusals


def make(
    model: nn.Module | None = None, optimizer: Any = None, precision: str = "fp16", **arguments: Any
) -> Any:
    model = network() if model is None else model
    optimizer = OPTIMIZERS["sgd"](model.parameters()) if optimizer is None else optimizer(model)
    return mezzo.MixedPrecision(model, optimizer, precision, **arguments)


STRANGER = nn.Linear(2, 2)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no parameters": (
        {"model": nn.Tanh(), "optimizer": lambda m: OPTIMIZERS["sgd"](STRANGER.parameters())},
        UsageError,
        "no parameters",
    ),
    "no module": (
        {"model": 3, "optimizer": lambda m: OPTIMIZERS["sgd"](STRANGER.parameters())},
        UsageError,
        "give a torch.nn.Module",
    ),
    "no optimizer": (
        {"optimizer": lambda m: [OPTIMIZERS["sgd"](m.parameters())]},
        UsageError,
        "give a torch.optim.Optimizer",
    ),
    "another's optimizer": (
        {"optimizer": lambda m: OPTIMIZERS["sgd"](STRANGER.parameters())},
        UsageError,
        "belongs to this",
    ),
    "lbfgs": ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, UsageError, "mezzo.GradScaler"),
    "half model": ({"model": nn.Linear(2, 2).half()}, UsageError, "keep the model FP32"),
    "unknown precision": ({"precision": "f16"}, UnknownNameError, "Did you mean"),
    "16-bit parameters": (
        {"precision": "params=bf16,compute=bf16"},
        UnsupportedPrecisionError,
        "split masters",
    ),
    "clip_norm": ({"clip_norm": 0.0}, UsageError, "clip_norm is 0.0"),
    "clip_value": ({"clip_value": NAN}, UsageError, "clip_value is nan"),
    "accumulate": ({"accumulate": 0}, UsageError, "accumulate is 0"),
    "accumulate float": ({"accumulate": 2.0}, UsageError, "accumulate is 2.0"),
    "scheduler": ({"scheduler": 3}, UsageError, "has no step"),
    "ema": ({"ema": 3}, UsageError, "update_parameters"),
    "loss scale": ({"loss_scale": -1.0}, UsageError, "scale is -1"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_can_not_be_trained_is_refused_with_its_mend(row: str) -> None:
    arguments, error, message = REFUSED[row]
    with pytest.raises(error, match=message):
        make(**arguments)


def test_a_plateau_scheduler_is_refused() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(UsageError, match=r"result\.moved"):
        mezzo.MixedPrecision(
            model, optimizer, "fp16", scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.0, "is a float"),
        (torch.ones(2, requires_grad=True), "reduce it to one number"),
        (torch.ones(()), "needs no gradient"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "real floating"),
        (torch.ones((), requires_grad=True) * 2, "depends on no parameter"),
    ],
)
def test_losses_that_backward_can_not_start_from(loss: Any, message: str) -> None:
    mp = make()
    with pytest.raises(UsageError, match=message):
        mp.step(loss)
    assert run(mp).moved


def test_shared_parameters_are_refused_until_the_other_is_closed_or_gone() -> None:
    model = network()
    first = make(model)
    with pytest.raises(UsageError, match="already has some of these parameters"):
        make(model)
    first.close()
    second = make(model)
    del second
    make(model)


def test_flush_before_any_step_is_an_error() -> None:
    with pytest.raises(CallOrderError, match=r"mp\.step\(loss\)"):
        make().flush()


def test_frozen_parameters_are_an_error_and_thawed_ones_train() -> None:
    model = network()
    mp = make(model)
    x = torch.ones(2, 4, requires_grad=True)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        mp.step(model(x).sum())
    model[3].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    assert mp.step(model(x).sum()).moved
    assert not torch.equal(before["3.bias"], model[3].bias)
    assert torch.equal(before["0.bias"], model[0].bias)
    assert x.grad is None


# ------------------------------------------------------------------------ module overrides


def test_module_overrides_of_the_policy_hold_while_it_is_open() -> None:
    model = network()
    mp = make(model, precision="bf16,module.0=fp32")
    seen: list[torch.dtype] = []
    for index in (0, 3):
        model[index].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    run(mp)
    assert seen == [torch.float32, torch.bfloat16]
    mp.close()
    with mezzo.autocast("bf16", "cpu"):
        model(batch()[0])
    assert seen[2:] == [torch.bfloat16, torch.bfloat16]


def test_a_pattern_that_matches_no_module_is_refused_and_owns_nothing() -> None:
    model = network()
    with pytest.raises(UnknownNameError, match="matches no module"):
        make(model, precision="bf16,module.head=fp32")
    make(model)
