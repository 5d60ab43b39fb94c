"""MixedPrecision: a step with torch.amp's beside it, one pass over gradients, accumulation, several optimizers."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import mezzo
from alive import bytes_alive
from mezzo.core.errors import CallOrderError, UsageError
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from mezzo.pytorch.training import mixed_precision
from mezzo.pytorch.weights.stored_parameters import lower_weights
from training_steps import INF, NAN, OPTIMIZERS, batch, everything, network, peak_bytes, run, same, training

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


def from_zero(size: int, optimizer: Any, precision: str, dtype: Any = None, **arguments: Any) -> Any:
    model = nn.Linear(size, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    mp = mezzo.MixedPrecision(model, optimizer(model.parameters(), lr=1.0), precision, **arguments)
    return mp, model.weight


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

    scale = mezzo.DynamicLossScale(init=2.0**10, growth_interval=2)
    mp = training(name, "fp16", clip_norm=0.1, accumulate=2, loss_scale=scale)
    results = [run(mp, index, factor) for index, factor in enumerate(factors)]
    assert [i for i, result in enumerate(results) if result.stepped] == [1, 5, 9, 11]
    assert [i for i, result in enumerate(results) if result.skipped] == [3, 7]
    assert same(list(mp.model.parameters()), list(model.parameters()))
    assert mp.loss_scale == scales[-1]
    assert [str(result.grad_norm) for result in results[1::2]] == list(map(str, norms))


def test_fp32_is_the_plain_loop_to_the_last_bit() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    for index in range(3):
        x, y = batch(index)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    mp = training("adamw-fused", "fp32")
    for index in range(3):
        assert run(mp, index).stepped
    assert same(list(mp.model.parameters()), list(model.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_loss_scale_nothing_is_looked_at(precision: str) -> None:
    result = run(training("sgd", precision), factor=NAN)
    assert (result.stepped, result.skipped, result.reason) == (True, False, "")
    assert result.loss_scale == 1.0
    assert result.grad_norm is None  # measuring would read every gradient once more
    assert math.isnan(run(training("sgd", precision, clip_norm=math.inf), factor=NAN).grad_norm)


@pytest.mark.filterwarnings("ignore:MixedPrecision. the model's parameters are complex64")
@pytest.mark.parametrize("params", ["fp32", "fp16", "complex"])
@pytest.mark.parametrize(
    ("clips", "expected"),
    [
        ({}, [3.0, -4.0]),
        ({"clip_value": 3.5}, [3.0, -3.5]),
        ({"clip_norm": 1.0}, [0.6, -0.8]),
        ({"clip_norm": 10.0}, [3.0, -4.0]),
        ({"clip_value": 3.5, "clip_norm": math.inf}, [3.0, -3.5]),
        ({"clip_value": 1.0, "clip_norm": 1.0}, [0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_value_is_clipped_before_norm_and_the_norm_told_is_the_gradients_own(
    clips: dict[str, float], expected: list[float], params: str
) -> None:
    """In FP32 also for fp16 weights: unscaled in fp16, some gradients would be subnormal."""
    is_complex = params == "complex"  # clipped as two numbers
    how: dict[str, Any] = {"dtype": torch.complex64} if is_complex else {"params": params}
    mp, weight = from_zero(2 - is_complex, torch.optim.SGD, "fp16", loss_scale=2.0**10, **how, **clips)
    numbers = torch.view_as_real(weight) if is_complex else weight
    result = mp.step((numbers.float() * torch.tensor([[3.0, -4.0]])).sum())
    if "clip_norm" in clips:
        assert result.grad_norm == 5.0
    elif params != "fp16":
        assert result.grad_norm is None
    tolerance = 1e-3 if params == "fp16" else 1e-5
    assert (-numbers.detach()).flatten().tolist() == pytest.approx(expected, rel=tolerance)


def test_a_sparse_gradient_s_norm_is_of_the_sums_by_index() -> None:
    model = nn.Embedding(5, 1, sparse=True)
    nn.init.zeros_(model.weight)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", clip_norm=1.0)
    result = mp.step(model(torch.tensor([1, 1, 1, 3, 3, 3, 3])).sum())
    assert result.grad_norm == 5.0
    assert model.weight.detach().flatten().tolist() == pytest.approx([0, -0.6, 0, -0.8, 0], rel=1e-5)


@pytest.mark.parametrize(("precision", "low"), [("fp32", 0), ("bf16", 1), ("fp16", 0), ("fp16", 1)])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_no_gradient_is_written(precision: str, low: int, factor: float, decides: str) -> None:
    model = network()
    if low:
        lower_weights(model, precision)
    mp = mezzo.MixedPrecision(model, AdamW(model.parameters(), lr=0.05), precision, clip_norm=0.1)
    seen: list[tuple[Tensor, Tensor, int]] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad, p.grad.clone(), p.grad._version)))
    for _ in range(2):
        run(mp, factor=factor)
    assert len(seen) == 2 * len(list(model.parameters()))
    for grad, before, version in seen:
        assert grad._version == version
        assert torch.equal(grad.nan_to_num(7.0), before.nan_to_num(7.0))


def test_finite_gradients_whose_squares_overflow_fp32_are_no_overflow() -> None:
    mp, weight = from_zero(2, SGD, "fp32", loss_scale=1.0, clip_norm=1.0)
    result = mp.step((weight * 2.0**100).sum())
    assert result.stepped
    assert result.grad_norm == pytest.approx(math.sqrt(2) * 2.0**100)
    assert weight.detach().flatten().tolist() == pytest.approx([-(0.5**0.5)] * 2)


def test_small_fp16_gradients_are_unscaled_in_fp32() -> None:
    """2**-30 is zero in fp16: unscaled where it lies it would be lost, and the master would not move."""
    mp, weight = from_zero(1, torch.optim.SGD, "fp16", params="fp16", loss_scale=2.0**16)
    result = mp.step((weight.float() * 2.0**-30).sum())
    assert result.grad_norm == 2.0**-30
    assert float(mp.optimizer.master(weight)) == -(2.0**-30)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 1, sparse=True)
    mp = mezzo.MixedPrecision(model, SGD(model.parameters(), lr=1.0), "fp32", clip_norm=1.0)
    with pytest.raises(UsageError, match="sparse"):
        mp.step(model(torch.tensor([1, 3])).sum())
    assert mp._window.seen == 0
    assert model.weight.grad is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("seen", [1, 2, 3])
def test_flush_moves_by_the_mean_of_the_losses_that_were_seen(precision: str, seen: int) -> None:
    weights = []
    for accumulate in (4, seen):
        mp, weight = from_zero(2, torch.optim.SGD, precision, accumulate=accumulate)
        for index in range(seen):
            waits = mp.step((weight * float(2 * index)).sum())
        if accumulate == 4:
            assert (waits.stepped, waits.reason) == (False, f"{seen} of 4 losses accumulated")
            result = mp.flush()
            assert result.stepped
            nothing = mp.flush()
            assert nothing.reason == "nothing accumulated since the last step"
            assert (nothing.updated, nothing.loss) == (False, None)
            assert repr(nothing) == f"StepResult(no step: {nothing.reason})"
        weights.append(weight.detach())
    assert torch.allclose(*weights, rtol=1e-6)
    assert torch.allclose(weights[0], torch.full((1, 2), -float(seen - 1)), rtol=1e-6)


def _resume(mp: Any) -> None:
    saved = mp.state_dict()
    mp.optimizer.zero_grad()
    mp.load_state_dict(saved)


# What a loop does between two losses of a window, and whether their sums are lost by it.
BETWEEN_LOSSES: dict[str, tuple[Any, bool]] = {
    "optimizer.zero_grad": (lambda mp: mp.optimizer.zero_grad(), True),
    "model.zero_grad": (lambda mp: mp.model.zero_grad(), True),
    "gradients set to 0": (lambda mp: mp.optimizer.zero_grad(set_to_none=False), True),
    "nothing": (lambda mp: None, False),
    "one gradient dropped": (lambda mp: setattr(mp.model[0].weight, "grad", None), False),
    "gradients halved": (lambda mp: [p.grad.mul_(0.5) for p in mp.model.parameters()], False),
    "window saved and loaded": (_resume, False),
}


@pytest.mark.parametrize("ending", ["step", "flush"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16,masters=split"])
@pytest.mark.parametrize("row", BETWEEN_LOSSES)
def test_gradients_cleared_inside_a_window_are_an_error(row: str, precision: str, ending: str) -> None:
    between, is_lost = BETWEEN_LOSSES[row]
    mp = training("adamw", precision, accumulate=3)
    run(mp, 0)
    between(mp)

    def go_on() -> None:
        mp.flush() if ending == "flush" else run(mp, 1)

    if not is_lost:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "MixedPrecision: gradients were changed in place")
            go_on()
        return
    before = everything(mp)
    with pytest.raises(CallOrderError, match=r"Remove optimizer\.zero_grad\(\)"):
        go_on()
    assert same([p.detach() for p in mp.model.parameters()], before[: len(list(mp.model.parameters()))])
    assert [run(mp, index).stepped for index in range(3)] == [False, False, True]  # in a new window


# How an optimizer is stepped by the loop itself.
OWN_STEPS: dict[str, Any] = {
    "step": lambda mp: mp.optimizer.step(),
    "step with a closure": lambda mp: mp.optimizer.step(lambda: torch.zeros(())),
    "step that a scheduler wraps": lambda mp: (StepLR(mp.optimizer, 100), mp.optimizer.step()),
}


@pytest.mark.parametrize("own", OWN_STEPS)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("sgd", "fp32"),
        ("adamw-foreach", "fp16"),
        ("adamw", "bf16,masters=split"),
        ("adagrad-fused", "fp16,masters=fp32"),
    ],
)
def test_an_optimizer_step_inside_a_window_is_an_error(optimizer: str, precision: str, own: str) -> None:
    mp, fresh = (training(optimizer, precision, accumulate=2) for _ in range(2))
    mp.optimizer.step()  # no window is open
    assert [run(each, seed).stepped for each in (mp, fresh) for seed in (0, 1)] == [False, True] * 2
    mp.optimizer.step()  # after a window: there are no gradients
    run(mp, 2)
    run(fresh, 2)
    before = everything(mp)
    with pytest.raises(CallOrderError, match=r"Remove optimizer\.step\(\)"):
        OWN_STEPS[own](mp)
    assert same(everything(mp), before), "nothing was changed"
    assert mp.flush().stepped
    assert fresh.flush().stepped
    assert same([*mp.model.parameters()], [*fresh.model.parameters()])
    run(mp, 3)
    with pytest.warns(UserWarning, match=r"1 of 2 losses .*mp\.flush\(\)"):
        mp.close()
    mp.optimizer.step()  # the loop's own again
    assert same([*mp.model.parameters()], [*fresh.model.parameters()]), "scaled gradients were left"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_accumulation_an_optimizer_step_of_the_loop_changes_nothing(optimizer: str) -> None:
    mp, fresh = (training(optimizer, "fp16") for _ in range(2))
    for seed in range(3):
        assert run(mp, seed).stepped
        mp.optimizer.step()
        assert run(fresh, seed).stepped
    assert same(everything(mp), everything(fresh))


def _own_step(mp: Any, loss: Tensor) -> None:
    loss.backward()
    mp.optimizer.step()
    mp.optimizer.zero_grad()


def _then(line: Callable[[Any], Any], *, if_stepped: bool = False) -> Callable[[Any, Tensor], None]:
    """The lines of an old loop: a step, and one more line, after each step or after those that were taken."""

    def lines(mp: Any, loss: Tensor) -> None:
        if mp.step(loss).stepped or not if_stepped:
            line(mp)

    return lines


def _schedule(mp: Any) -> None:
    mp.scheduler.step()


def _average(mp: Any) -> None:
    mp._average.__self__.update_parameters(mp.model)


_clipped = _then(lambda mp: nn.utils.clip_grad_norm_(mp.model.parameters(), 1.0))


class _Counter:
    """A scheduler that does not tell where it is."""

    def step(self) -> None:
        pass


def _step(mp: Any, loss: Tensor) -> None:
    mp.step(loss)


def _backward_twice(mp: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    mp.step(loss)


def _scaled(mp: Any, loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=100.0)
    mp.step(scaler.scale(loss))


Line = Callable[[Any, Tensor], Any]
# Lines of an old loop that stayed: the precision, MixedPrecision's arguments, the lines, and what is said of them once.
LEFT_OVER: dict[str, tuple[str, dict[str, Any], Line, str]] = {
    "own step": (
        "fp16",
        {},
        _own_step,
        r"optimizer\.step\(\).*'s loss scale\. Replace .* by mp\.step\(loss\)",
    ),
    "own step that a scheduler wraps": (
        "fp16",
        {},
        lambda mp, loss: (StepLR(mp.optimizer, 100), _own_step(mp, loss)),
        r"by mp\.step\(loss\)",
    ),
    "own step, 16-bit weights": ("fp16,masters=fp32", {}, _own_step, r"by mp\.step\(loss\)"),
    "own step, released gradients": ("fp16", {"release_gradients": True}, _own_step, r"by mp\.step\(loss\)"),
    "own step, accumulation": ("fp16", {"accumulate": 2}, _own_step, r"by mp\.step\(loss\)"),
    "division": ("bf16", {"accumulate": 3}, lambda mp, loss: mp.step(loss / 3), "accumulate=3.*remove it"),
    "scaled": ("bf16", {}, lambda mp, loss: mp.step(65536 * loss), "multiplied by 65536.*remove it"),
    "scaled by a tensor": ("bf16", {}, lambda mp, loss: mp.step(loss * torch.tensor(1024.0)), "by 1024"),
    "scaled by a scaler of a small scale": ("fp16", {}, _scaled, "multiplied by 100.*remove it"),
    "backward before": ("bf16", {}, _backward_twice, r"gradients before .*Remove loss\.backward"),
    "own step, clipping in bf16": ("bf16", {"clip_norm": 1.0}, _own_step, r"'s clipping\. Replace"),
    "average": ("bf16", {"ema": AveragedModel}, _then(_average), r"update_parameters\(\).*Remove that line"),
    "average at each update": (
        "bf16",
        {"ema": AveragedModel, "accumulate": 2},
        _then(_average, if_stepped=True),
        "Remove",
    ),
    "average at each loss": ("bf16", {"ema": AveragedModel, "accumulate": 2}, _then(_average), "Remove"),
    "clipping": ("fp16", {"accumulate": 3}, _clipped, "loss scale.*clip_norm="),
    "clipping of a masters' gradients": ("fp16,masters=fp32", {"accumulate": 3}, _clipped, "clip_norm="),
    "scheduler": ("fp32", {"scheduler": StepLR}, _then(_schedule), r"scheduler\.step\(\).*Remove that line"),
    "scheduler at each update": (
        "fp32",
        {"scheduler": StepLR, "accumulate": 2},
        _then(_schedule, if_stepped=True),
        "Remove",
    ),
    "scheduler at each loss": (
        "fp16",
        {"scheduler": StepLR, "accumulate": 3},
        _then(_schedule),
        "Remove that line",
    ),
}
SCALED = (
    "fp16",
    "fp16,masters=fp32",
    "bf16,masters=split,loss_scale=8",
    "bf16,masters=none,state=int8,loss_scale=8",
)
WITH = {
    "accumulate": 2,
    "clip_value": 1.0,
    "scheduler": StepLR,
    "release_gradients": True,
    "ema": AveragedModel,
}
# What is right, though it looks alike.
RIGHT: dict[str, tuple[str, dict[str, Any], Line]] = {
    **{f"{mode}, {name}": (mode, {name: WITH[name]}, _step) for mode in ("fp32", *SCALED) for name in WITH},
    "step of a precision that is being chosen": ("auto", {"loss_scale": 8}, _step),
    "own step without a loss scale": ("bf16", {"accumulate": 2}, _own_step),
    "own step after close": ("fp16", {}, lambda mp, loss: (mp.close(), _own_step(mp, loss))),
    "own step of zeros": ("fp16", {}, lambda mp, loss: _own_step(mp, loss * 0.0)),
    "product with the reciprocal": ("bf16", {"accumulate": 2}, lambda mp, loss: mp.step(0.5 * loss)),
    "division by another number": ("bf16", {"accumulate": 3}, lambda mp, loss: mp.step(loss / 4)),
    "division of a sum": ("bf16", {"accumulate": 3}, lambda mp, loss: mp.step(loss / 3 + loss / 3)),
    "product of two losses": (
        "bf16",
        {"accumulate": 3},
        lambda mp, loss: mp.step(loss * (loss * 0.0 + 1 / 3)),
    ),
    "a small weight": ("bf16", {}, lambda mp, loss: mp.step(loss * torch.tensor(100.0))),
    "division by 1": ("bf16", {}, lambda mp, loss: mp.step(loss / 1)),
    "clipping without a loss scale": ("bf16", {"accumulate": 3}, _clipped),
    "a scheduler without last_epoch": ("fp32", {"scheduler": _Counter()}, _then(_schedule)),
}


def _old_loop(precision: str, arguments: dict[str, Any], lines: Line) -> Any:
    """Eight losses, or until closed; before them an FP32 step of the loop's own."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if arguments.get("scheduler") is StepLR:
        arguments = {**arguments, "scheduler": StepLR(optimizer, 9)}
    if arguments.get("ema") is AveragedModel:
        arguments = {**arguments, "ema": AveragedModel(model).float()}
    mp: Any = mezzo.MixedPrecision(model, optimizer, precision, **arguments)
    if mp.policy.params == "fp32":
        _own_step(mp, model(batch()[0]).square().mean())
    for seed in range(8):
        x, y = batch(seed)
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        lines(mp, loss)
        if mp not in mixed_precision._ALIVE:
            break
    return mp


@pytest.mark.parametrize("row", LEFT_OVER)
def test_a_line_of_an_old_loop_is_told_once(row: str) -> None:
    *how, expected = LEFT_OVER[row]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _old_loop(*how)
    (one,) = told
    assert re.search(expected, str(one.message))
    assert one.filename == __file__, "the line of the loop"


@pytest.mark.parametrize("row", ["division", "scaled"])
def test_a_factor_with_another_reason_is_silenced_as_its_warning_says(row: str) -> None:
    precision, arguments, lines, _ = LEFT_OVER[row]
    with pytest.warns(UserWarning, match="the loss was") as told:
        _old_loop(precision, arguments, lines)
    (call,) = re.findall(r"warnings\.filterwarnings\(.*\)", str(told[0].message))
    with warnings.catch_warnings():
        exec(call, {"warnings": warnings})
        _old_loop(precision, arguments, lines)


@pytest.mark.parametrize("row", RIGHT)
def test_nothing_is_told_of_a_loop_that_is_right(row: str) -> None:
    _old_loop(*RIGHT[row])


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def _head_replaced(model: Any) -> list[nn.Parameter]:
    trained = [*model.parameters()]
    model[-1] = nn.Linear(model[-1].in_features, 2)
    return trained


def _in_complex(model: Any) -> list[nn.Parameter]:
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            setattr(module, name, nn.Parameter(param.detach().to(torch.complex64)))
    return list(model.parameters())


# What is done to a model, which parameters the optimizer gets, the precision, what is told.
DOUBTFUL: dict[str, tuple[Callable[[Any], list[nn.Parameter]], str, str]] = {
    "replaced": (_head_replaced, "bf16", r"lacks 3\.weight, 3\.bias and.*create the optimizer after"),
    "replaced, frozen": (lambda m: _head_replaced(m.requires_grad_(False)), "fp16", r"lacks 3\.weight, 3\.bias and"),
    "most": (lambda m: [*m.parameters()][:1] + one(), "bf16", r"lacks 0\.bias, 1\.weight, 1\.bias, \.\.\. and"),
    "FP64": (lambda m: [*m.double().parameters()], "bf16", r"are fp64, so .* in bf16.*precision='fp32'.*model\.float"),
    "complex": (_in_complex, "fp16", "are complex64, so nothing runs in fp16"),
    # Neither alone is a mistake.
    "several optimizers": (lambda m: [*m[0].parameters()], "bf16", ""),
    "criterion": (lambda m: [*m.parameters(), *one()], "bf16", ""),
    "criterion, frozen": (lambda m: [*m.requires_grad_(False)[3].requires_grad_().parameters(), *one()], "bf16", ""),
    "FP64 in FP32": (lambda m: [*m.double().parameters()], "fp32", ""),
    "FP64 in part": (lambda m: [m[0].double() and p for p in m.parameters()], "bf16", ""),
}  # fmt: skip


@pytest.mark.parametrize("row", DOUBTFUL)
def test_parameters_that_are_not_trained_or_not_lowered_are_told(row: str) -> None:
    made, precision, expected = DOUBTFUL[row]
    model = network()
    optimizer = torch.optim.AdamW(made(model))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mezzo.MixedPrecision(model, optimizer, precision).close()
    assert len(told) == bool(expected), [str(one.message) for one in told]
    if expected:
        assert re.search(expected, str(told[0].message))
        assert told[0].filename == __file__


def test_losses_that_reach_different_layers_share_a_window() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    mp = training("sgd", "fp32", layers, accumulate=4)
    results = [mp.step(layers[index](torch.ones(1, 2)).sum()) for index in (1, 0, 1, 0)]
    assert results[-1].stepped


@pytest.mark.parametrize("how", ["plain", "reentrant", "released"])
def test_a_gan_each_side_has_its_own_gradients_and_scale(how: str) -> None:
    generator, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    release = how == "released"
    mp_g, mp_d = (
        training("adamw-fused", "fp16", net, release_gradients=release) for net in (generator, judge)
    )
    noise = torch.randn(5, 3)

    def judged(fake: Tensor) -> Tensor:
        return checkpoint(judge, fake, use_reentrant=True) if how == "reentrant" else judge(fake)

    kept = torch.randn(4, 3)
    generator.weight.grad = kept.clone()
    for _ in range(2):
        with mp_d.autocast():
            loss_d = judged(generator(noise)).float().mean() / 4
        assert mp_d.step(loss_d).stepped
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


@pytest.mark.parametrize("precision", ["bf16,op.linear=fp32", "fp16,op.linear=fp32", "bf16,module.0=fp32"])
def test_a_step_inside_the_context_is_that_of_one_after_it(precision: str) -> None:
    """Ops in FP32 have FP32 gradients, as without autocast."""
    trained = []
    for around in (nullcontext, mezzo.MixedPrecision.autocast):
        mp = training("sgd", precision, accumulate=2, clip_norm=1.0)
        for seed in range(4):
            with around(mp):
                run(mp, seed)
        assert not torch.is_autocast_enabled("cpu")
        trained.append(everything(mp))
        mp.close()
    assert same(*trained)


def test_module_overrides_of_the_policy_hold_while_it_is_open() -> None:
    model = network()
    mp = training("sgd", "bf16,module.0=fp32", model)
    seen: list[torch.dtype] = []
    for index in (0, 3):
        model[index].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    run(mp)
    assert seen == [torch.float32, torch.bfloat16]
    mp.close()
    with mezzo.autocast("bf16", "cpu"):
        model(batch()[0])
    assert seen[2:] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accumulated_gradients_are_fp32_and_lose_nothing(precision: str) -> None:
    """300 equal gradients of 1: a bf16 sum stops at 256; fp16's would be scaled past its largest number."""
    arguments: dict[str, Any] = {"masters": "fp32", "accumulate": 300, "loss_scale": 2.0**16}
    mp, weight = from_zero(1, torch.optim.SGD, precision, **arguments)
    for _ in range(299):
        mp.step((weight * torch.ones(1, 1, dtype=weight.dtype)).float().sum())
    assert weight.grad.dtype is torch.float32
    result = mp.step(weight.float().sum())
    assert result.stepped
    # 2**16 / 300 is rounded where a 16-bit gradient begins.
    assert result.grad_norm == pytest.approx(1.0, rel=2**-8)
    assert float(mp.optimizer.master(weight)) == pytest.approx(-1.0, rel=2**-8)
    mp.close()
    assert weight.grad_dtype is weight.dtype


@pytest.mark.parametrize("tied", [False, True])
def test_peak_of_gradient_accumulation(tied: bool) -> None:
    """Split SGD: 2 weight, 2 remainder, 2 gradient; or 4 for FP32 sums and 6 for the layer that arrives.

    Eight layers of 256 x 256, of which the last four are the first four again where tied.
    """

    def measured(accumulate: int) -> float:
        others = bytes_alive()
        layers = [nn.Linear(256, 256, bias=False) for _ in range(4 if tied else 8)]
        model = nn.Sequential(
            *(part for index in range(8) for part in (layers[index % len(layers)], nn.Tanh()))
        )
        size = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mp = mezzo.MixedPrecision(model, optimizer, "bf16", accumulate=accumulate, masters="split")
        found = peak_bytes(mp, torch.randn(2, 256), accumulate) - others / size
        mp.close()
        return found

    layer = 1 / (4 if tied else 8)
    spare = 0.25  # activations and seeds
    # A tied weight's first gradient waits for its second in the engine, which casts it to FP32 first.
    assert 6.0 <= measured(1) <= 6.0 + (4 * layer if tied else 0.0) + spare
    assert 8.0 <= measured(4) <= 8.0 + (4 + 8 * layer if tied else 6 * layer) + spare


@pytest.mark.parametrize("bad", [None, -1], ids=["finite", "the last is bad"])
@pytest.mark.parametrize(("accumulate", "seen"), [(1, 1), (3, 2), (3, 3)])
def test_every_result_has_the_last_loss_of_its_window(accumulate: int, seen: int, bad: int | None) -> None:
    mp, weight = from_zero(2, torch.optim.SGD, "fp16", accumulate=accumulate)
    losses = [weight.float().sum() * 0.0 + 1.5 * (index + 1) for index in range(seen)]
    if bad is not None:
        losses[bad] = losses[bad] * INF
    given = [float(loss.detach()) for loss in losses]
    results = [mp.step(loss) for loss in losses]
    if seen < accumulate:
        state = mp.state_dict()
        mp, _ = from_zero(2, torch.optim.SGD, "fp16", accumulate=accumulate)
        mp.load_state_dict(state)
        results.append(mp.flush())
        given.append(given[-1])
    assert [r.loss for r in results] == given
    assert (results[-1].stepped, results[-1].skipped) == (bad is None, bad is not None)


def test_a_loss_in_fp16_does_not_overflow_at_once(decides: str) -> None:
    """Multiplied by 65536 it would."""
    model = nn.Linear(2, 1)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", clip_norm=math.inf)
    result = mp.step(model(torch.ones(1, 2)).half().mean())
    assert result.stepped
    assert result.grad_norm == pytest.approx(3**0.5)
