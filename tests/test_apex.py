"""`mezzo.apex`: amp's levels against the same loops by hand, and its semantics one by one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo
from faults.models import linear, net
from mezzo.apex import amp, normalization, optimizers, parallel
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from trainers import batches, network, refused, same

START = 2.0**16
INF = float("inf")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    amp.reset()
    assert not torch.is_autocast_enabled("cpu")


def made(level: str = "O2", **options: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def backward(model: Any, optimizer: Any, **options: Any) -> None:
    x, y = batches(1)[0]
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer, **options) as scaled:
        scaled.backward()


def overflow(optimizer: Any, **options: Any) -> None:
    """A backward pass whose first gradient is infinite."""
    first = next(amp.master_params(optimizer))
    weight = next((w for w, master in optimizer._amp_stash.masters().items() if master is first), first)
    with amp.scale_loss(torch.ones(()), optimizer, **options):
        weight.grad = torch.full_like(weight, INF)


def grads(optimizer: Any) -> list[torch.Tensor]:
    return [param.grad.clone() for param in amp.master_params(optimizer)]


def scales() -> list[float]:
    return [saved["loss_scale"] for saved in amp.state_dict().values()]


def by_hand(level: str) -> list[torch.Tensor]:
    """The weights after five steps without amp."""
    model = network()
    if level == "O3":
        model = model.half()
    if level == "O2":
        for layer in (model[0], model[3]):
            layer.half()
    masters = [nn.Parameter(p.detach().clone().float()) for p in network().parameters()]
    own = masters if level == "O2" else [*model.parameters()]
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    scaler = mezzo.GradScaler(enabled=level == "O1")
    for x, y in batches(5):
        optimizer.zero_grad()
        with mezzo.autocast("fp16", "cpu", enabled=level == "O1"):
            out = model(x.half() if level in ("O2", "O3") else x)
            loss = F.cross_entropy(out.float() if level != "O1" else out, y)
        if level != "O2":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            continue
        model.zero_grad()
        (loss * START).backward()
        for master, weight in zip(masters, model.parameters()):
            master.grad = weight.grad.float() / START
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters()):
                weight.copy_(master)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_level_trains_to_the_same_bits_as_the_loop_by_hand(level: str) -> None:
    expected = by_hand(level)
    model, optimizer = made(level)
    for x, y in batches(5):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    same([param.detach() for param in model.parameters()], expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_is_read_on_entry_and_moved_at_the_end_of_the_block(level: str) -> None:
    model, optimizer = made(level)
    x, y = batches(1)[0]
    loss = F.cross_entropy(model(x), y)
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled.item() == loss.item() * START
        scaled.backward()
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
        assert scales() == [2.0**10]
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**11, "unskipped": 0}}
    reference = network()
    F.cross_entropy(reference(x), y).backward()
    for grad, exact in zip(grads(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(grad, exact.grad, rtol=0.02, atol=2e-3)
    with amp.scale_loss(torch.tensor(100.0, dtype=torch.float16), optimizer) as scaled:
        assert scaled.item() == 100.0 * 2.0**11  # in FP32


@pytest.mark.parametrize(("level", "scale"), [("O1", "dynamic"), ("O2", "dynamic"), ("O1", "128.0")])
def test_an_overflow_skips_one_step(level: str, scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A constant scale stays."""
    model, optimizer = made(level, loss_scale=scale)
    amp._amp_state.verbosity = 1
    before = [param.detach().clone() for param in model.parameters()]
    overflow(optimizer)
    after = START / 2 if scale == "dynamic" else 128.0
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": after, "unskipped": 0}}
    assert ("32768" in capsys.readouterr().out) is (scale == "dynamic")
    assert optimizer.step() is None
    same(before, [param.detach() for param in model.parameters()])
    assert all("momentum_buffer" not in entry for entry in optimizer.state.values())
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": after, "unskipped": 1}}
    assert not torch.equal(before[0], model[0].weight)
    assert all(param.isfinite().all() for param in model.parameters())


def test_bounds_of_the_scale() -> None:
    _, optimizer = made(max_loss_scale=2.0**12, min_loss_scale=2.0**11)
    scaler = amp._amp_state.loss_scalers[0]
    assert scales() == [2.0**12]
    scaler._unskipped = 1999
    scaler.update()
    assert scales() == [2.0**12]
    for _ in range(3):
        overflow(optimizer)
    assert scales() == [2.0**11]
    scaler._pure = dataclasses.replace(scaler._pure, stuck=49)
    with pytest.raises(LossScaleCollapseError):
        overflow(optimizer)
    assert optimizer._amp_stash.skips


def test_the_state_of_more_or_fewer_losses_loads_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    made(num_losses=3)
    for number, scaler in enumerate(amp._amp_state.loss_scalers):
        scaler._loss_scale, scaler._unskipped = 2.0**number, number
    saved = amp.state_dict()
    assert [*saved] == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    made(num_losses=2)
    amp._amp_state.verbosity = 1
    amp.load_state_dict(saved)
    assert "3" in capsys.readouterr().out
    assert amp.state_dict() == {name: saved[name] for name in ("loss_scaler0", "loss_scaler1")}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}})
    assert scales() == [8.0, 2.0]


def test_results_have_the_shape_of_what_was_given() -> None:
    for lists in itertools.product((False, True), repeat=2):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = tuple([one] if as_list else one for one, as_list in zip((model, optimizer), lists))
        assert amp.initialize(*given, opt_level="O0", verbosity=0) == given
    model = nn.Linear(2, 2)
    assert amp.initialize(model, opt_level="O1", verbosity=0) is model
    assert amp.initialize([model], opt_level="O3", verbosity=0) == [model]
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_each_loss_has_its_own_scale() -> None:
    model, optimizer = made(num_losses=2)
    backward(model, optimizer, loss_id=0)
    overflow(optimizer, loss_id=1)
    first, second = amp.state_dict().values()
    assert first == {"loss_scale": START, "unskipped": 1}
    assert second == {"loss_scale": START / 2, "unskipped": 0}
    assert optimizer._amp_stash.skips


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_of_several_backward_passes_add_up(level: str, delay: bool) -> None:
    model, optimizer = made(level, loss_scale=256.0)
    backward(model, optimizer)
    once = grads(optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, delay_unscale=delay)
    if delay:
        with pytest.raises(CallOrderError, match="delay_unscale"):
            optimizer.step()
    else:
        amp._amp_state.loss_scalers[0]._loss_scale = 16.0
    backward(model, optimizer)
    for one, two in zip(once, grads(optimizer), strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=2e-3, atol=1e-5)
    optimizer.step()


def test_clipping_the_weights_of_param_groups_is_noticed() -> None:
    model, optimizer = made()
    backward(model, optimizer)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    with pytest.warns(UserWarning, match=r"no effect.*amp\.master_params\(optimizer\)"):
        optimizer.step()


def test_a_delayed_check_finds_the_overflow_later() -> None:
    model, optimizer = made()
    overflow(optimizer, delay_overflow_check=True)
    assert scales() == [START]
    backward(model, optimizer)
    assert scales() == [START / 2]
    assert optimizer._amp_stash.skips


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_an_exception_in_the_block_training_goes_on(level: str) -> None:
    model, optimizer = made(level)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(model(torch.ones(4, 8)).sum(), optimizer) as scaled:
        scaled.backward(1 / 0)
    assert torch.is_autocast_enabled("cpu") is (level == "O1")
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()


def test_masters_of_o2() -> None:
    exact = [param.detach().clone() for param in network().parameters()]
    model, optimizer = made()
    masters = [*amp.master_params(optimizer)]
    same([master.detach() for master in masters], exact)
    dtypes = [param.dtype for param in model.parameters()]
    assert dtypes == [dtype for dtype in (torch.half, torch.float, torch.half) for _ in range(2)]
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    optimizer.step()  # as some scripts do, before the schedule
    same([master.detach() for master in masters], exact)
    backward(model, optimizer)
    assert model[0].weight.grad.dtype is torch.half
    torch.testing.assert_close(model[0].weight.grad.float() / START, masters[0].grad, rtol=1e-3, atol=1e-6)
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    optimizer.step()
    assert torch.equal(model[0].weight, masters[0].half())
    assert masters[0].grad is None
    assert all(state["momentum_buffer"].dtype is torch.float32 for state in optimizer.state.values())
    saved = [state["master"] for state in optimizer.state_dict()["state"].values() if "master" in state]
    same(saved, [master.detach() for master in (*masters[:2], *masters[4:])])
    model.load_state_dict(network().state_dict())
    optimizer.step()
    assert torch.equal(masters[0].half(), exact[0].half())
    backward(model, optimizer)
    optimizer.zero_grad()
    assert model[0].weight.grad is masters[0].grad is None
    assert made("O2", keep_batchnorm_fp32="False")[0][1].weight.dtype is torch.half


def test_o2_keeps_the_state_of_an_optimizer_that_has_stepped_and_adds_groups() -> None:
    model, head = network(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    optimizer.step()
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    (model, head), optimizer = amp.initialize([model, head], optimizer, opt_level="O2", verbosity=0)
    same([state["exp_avg"] for state in optimizer.state.values()], moments)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
    assert all(param.dtype is torch.float32 for param in amp.master_params(optimizer))
    before = head.weight.detach().clone()
    backward(nn.Sequential(model, head), optimizer)
    optimizer.step()
    assert not torch.equal(head.weight, before)


@net(layer=linear(2, 2))
def named(self: Any, batch: Any, scale: Any = None) -> Any:
    self.seen = [batch["x"].dtype, batch["ids"].dtype, scale[0].dtype]
    return {"out": self.layer(batch["x"])}


@pytest.mark.parametrize("outputs", [None, torch.bfloat16])
def test_o2_and_o3_cast_inputs_and_outputs_also_of_a_copy(outputs: torch.dtype | None) -> None:
    given = {"x": torch.ones(1, 2), "ids": torch.ones(1, dtype=torch.long)}
    options: Any = {"cast_model_outputs": outputs, "verbosity": 0}
    model, inside = named(), []
    model.register_forward_hook(lambda module, args, output: inside.append(output["out"].dtype))
    model = amp.initialize(model, opt_level="O3", cast_model_type=torch.bfloat16, **options)
    for one in (model, copy.deepcopy(model)):
        with torch.no_grad():
            one.layer.weight.zero_()
        result = one(given, scale=[torch.ones(1, dtype=torch.float64)])
        assert one.seen == [torch.bfloat16, torch.int64, torch.bfloat16]
        assert result["out"].dtype is inside.pop() is (outputs or torch.float32)
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", **options)
    assert model(torch.ones(1, 2)).dtype is (outputs or torch.float16)


def test_o1_casts_functions_until_it_is_deactivated() -> None:
    _, optimizer = made("O1")
    x, w = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
    assert (x @ x).dtype is torch.float16
    assert torch.exp(x.half()).dtype is torch.float32
    with amp.disable_casts(), amp.disable_casts():
        assert (x @ x).dtype is torch.float32
    with amp.scale_loss(x.sum(), optimizer):
        assert (x @ x).dtype is torch.float32
        with pytest.raises(CallOrderError, match="after the scale_loss"):
            optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: setattr(w, "grad", w @ w))
    optimizer.step()
    assert w.grad is not None
    for _ in range(2):  # 16-bit copies of weights are not kept over a step, nor over an evaluation
        assert (x @ w).sum() == 2 * w.detach().sum()
        with torch.no_grad():
            assert (x @ w).sum() == 2 * w.detach().sum()
            w += 1.0
    amp._amp_state.handle._deactivate()
    assert (x @ x).dtype is torch.float32


def test_registered_functions() -> None:
    def dtypes(*tensors: torch.Tensor) -> list[torch.dtype]:
        return [tensor.dtype for tensor in tensors]

    library = types.SimpleNamespace(half=dtypes, full=dtypes, widest=dtypes)
    library.__dict__["__name__"] = "library"
    amp.register_half_function(library, "half")
    amp.register_float_function(library, "full")
    amp.register_promote_function(library, "widest")
    amp.register_half_function(torch, "softmax")
    original, decorated = torch.softmax, amp.half_function(dtypes)
    half, full = torch.ones(1, dtype=torch.half), torch.ones(1)
    assert decorated(full) == [torch.float32]
    handle = amp.init()
    assert decorated(full, half) == library.half(full, half) == [torch.half] * 2
    assert library.full(full, half) == library.widest(full, half) == [torch.float] * 2
    assert library.widest(half, half) == [torch.half] * 2
    assert torch.softmax(full, 0).dtype is torch.half  # which autocast alone runs in FP32
    with amp.disable_casts():
        assert library.half(full) == [torch.float32]
    handle._deactivate()
    assert library.half is dtypes
    assert torch.softmax is original
    with pytest.raises(AttributeError, match="'nothing'"):
        amp.register_float_function(torch, "nothing")


def test_init_allows_or_refuses_binary_cross_entropy() -> None:
    p = torch.full((2,), 0.5, dtype=torch.float16)
    amp.init()
    with pytest.raises(mezzo.BannedOpError):
        F.binary_cross_entropy(p, p)
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(p, p).dtype is torch.float32
    assert not amp.init(enabled=False).is_active()


def test_disabled_it_does_nothing() -> None:
    model, optimizer = nn.Linear(2, 2), object()
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O9") == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = torch.ones(())
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})


@pytest.mark.parametrize("first", [False, True])
def test_schedulers_made_before_or_after(first: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if first else None
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1)
    overflow(optimizer)
    optimizer.step()
    scheduler.step()  # a warning is an error
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "received", "fix"),
    [
        ({"opt_level": "02"}, "'02'", "'O2'"),
        ({"opt_level": "O1", "cast_model_type": torch.half}, "float16", "O2"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "True", "O2"),
        ({"opt_level": "O1", "master_weights": True}, "True", "O2"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "O2", "O1"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, "int8", "float16"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "'yes'", "True"),
        ({"loss_scale": "dynamc"}, "'dynamc'", "'dynamic'"),
        ({"loss_scale": 0.0}, "0.0", "128"),
        ({"num_losses": 0}, "0", "1"),
        ({"min_loss_scale": 2.0**20}, "floor=2^20", "2^16"),
        ({"max_loss_scale": "high"}, "'high'", "1024"),
        ({"opt_lvl": "O1"}, "'opt_lvl'", "'opt_level'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], received: str, fix: str) -> None:
    model = network()
    with refused(UsageError, received, fix):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert all(param.dtype is torch.float32 for param in model.parameters())


@pytest.mark.parametrize(
    ("level", "options"), [("O3", {}), ("O2", {"master_weights": False}), ("O2", {}), ("O0", {})]
)
def test_an_eps_that_is_0_in_fp16_warns_without_masters(level: str, options: dict[str, Any]) -> None:
    def trained(eps: float) -> bool:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), eps=eps)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        for x, y in batches(3):
            optimizer.zero_grad()
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return all(bool(param.isfinite().all()) for param in model.parameters())

    if level == "O3" or options:
        with pytest.warns(UserWarning, match=r"eps=1e-08.*fp16.*eps=1e-4"):
            assert not trained(1e-8)
    else:
        assert trained(1e-8)
    assert trained(1e-4)  # a warning is an error


def test_wrong_models_optimizers_and_calls_are_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.ones(())
    with refused(CallOrderError, "amp.initialize"), amp.scale_loss(loss, optimizer):
        pass
    for wrong, part in (
        (nn.DataParallel(nn.Linear(1, 1)), "DataParallel"),
        (nn.Linear(1, 1).half(), "float16"),
    ):
        with refused(UsageError, part):
            amp.initialize(wrong, opt_level="O2")
    amp.initialize(model, optimizer, verbosity=0)
    amp.initialize(network(), opt_level="O1", verbosity=0)
    with refused(UsageError, "loss_id", "num_losses"), amp.scale_loss(loss, optimizer, 1):
        pass
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with refused(CallOrderError, "amp.initialize"), amp.scale_loss(loss, [optimizer, other]):
        pass
    with pytest.raises(UsageError, match="GradScaler"):
        optimizer.step(lambda: None)


def test_fused_optimizers_are_pytorchs() -> None:
    w = torch.tensor([1.0, -2.0])

    def stepped(make: Any, **options: Any) -> torch.Tensor:
        param = nn.Parameter(w.clone())
        optimizer = make([param], lr=0.1, weight_decay=0.5, **options)
        for _ in range(3):
            param.grad = param.detach() + 1
            optimizer.step()
        return param.detach()

    assert torch.equal(stepped(optimizers.FusedAdam), stepped(torch.optim.AdamW))
    assert torch.equal(stepped(optimizers.FusedAdam, adam_w_mode=False), stepped(torch.optim.Adam))
    in_order = optimizers.FusedAdam([nn.Parameter(w)], 0.1, True, (0.5, 0.9), 1e-4, False, 0.25).defaults
    by_name = torch.optim.Adam([nn.Parameter(w)], 0.1, (0.5, 0.9), 1e-4, 0.25).defaults
    assert in_order == by_name
    sgd = stepped(optimizers.FusedSGD, momentum=0.9, materialize_master_grads=False)
    assert torch.equal(sgd, stepped(torch.optim.SGD, momentum=0.9))
    with pytest.raises(UsageError, match="bias_correction is False"):
        optimizers.FusedAdam([nn.Parameter(w)], bias_correction=False)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_fused_normalizations_are_pytorchs_with_the_eps_of_apex(name: str) -> None:
    x = torch.full((2, 4), 1e-3)
    for ours in (f"Fused{name}", f"MixedFused{name}"):
        assert torch.equal(getattr(normalization, ours)(4)(x), getattr(nn, name)(4, eps=1e-5)(x))


def test_parallel_is_pytorchs() -> None:
    model = parallel.convert_syncbn_model(network())
    assert isinstance(model[1], parallel.SyncBatchNorm)
    with pytest.raises(UsageError, match="gradient_average"):
        parallel.DistributedDataParallel(model, gradient_average=False)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, optimizer = made("O2")
        wrapped = parallel.DistributedDataParallel(model, 10_000_000, delay_allreduce=True)
        assert wrapped.find_unused_parameters
        backward(wrapped, optimizer)
        optimizer.step()
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    finally:
        torch.distributed.destroy_process_group()
