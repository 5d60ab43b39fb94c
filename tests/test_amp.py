"""mezzo.amp and the call forms of torch.amp: one changed import, PyTorch's defaults, and rules of custom ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.amp
from mezzo.core.errors import UsageError
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.hardware import native_formats
from releases import before_torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = "fp16,op.softmax=lower"
autocast, amp = mezzo.autocast, mezzo.amp.autocast

# A call -> the precision that it gives on the CPU. Without a device type, mezzo.autocast takes the accelerator.
FORMS: dict[str, str] = {
    "autocast('cpu')": "bf16",
    "autocast(device_type='cpu')": "bf16",
    "autocast('cpu', torch.float16, True, False)": "fp16",
    "autocast('cpu', 'bfloat16')": "bf16",
    "autocast('cpu', LOW)": LOW,
    "autocast('cpu', dtype=torch.bfloat16, enabled=True, cache_enabled=False)": "bf16",
    "autocast('cpu', dtype=LOW)": LOW,
    "autocast(device_type='cpu', dtype=torch.float16)": "fp16",
    "autocast(None, 'cpu', dtype='float16')": "fp16",
    "autocast('cpu', dtype=torch.bfloat16, enabled=False)": "fp32",
    "autocast('cpu', dtype=torch.float64, enabled=False)": "fp32",
    "autocast('cpu', dtype=torch.float32)": "fp32",
    "autocast('cpu:0')": "bf16",  # the index of a device is left out, as in PyTorch
    "autocast('cpu:0', torch.float16)": "fp16",
    "autocast(device_type='cpu:0', dtype=LOW)": LOW,
    "autocast('bf16', 'cpu:0')": "bf16",
    "amp('cpu:0', dtype=torch.float16)": "fp16",
    "amp('cpu')": "bf16",
    "amp('cpu', torch.float16)": "fp16",
}
# The arguments of torch.cuda.amp.autocast, which has no device type, on a computer without an accelerator.
WITHOUT_DEVICE = {
    "amp()": "bf16",
    "amp(False)": "fp32",
    "amp(True, torch.float16, False)": "fp16",
    "amp(enabled=True, dtype=torch.float16)": "fp16",
    "amp(dtype=LOW)": LOW,
}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert active_policy.label() == 0
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("call", "precision"), (FORMS | WITHOUT_DEVICE).items())
def test_every_form_of_the_call(call: str, precision: str) -> None:
    if call in WITHOUT_DEVICE and torch.accelerator.is_available():
        pytest.skip("about a computer without an accelerator")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context = eval(call)
    assert repr(context) == f"mezzo.autocast({precision!r}, 'cpu')"
    dtype = {"bf16": BF16, "fp16": FP16, "fp32": FP32}[precision[:4]]
    with context:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype
    assert context(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)() is dtype


def test_the_names_of_torch_amp() -> None:
    for name in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        assert getattr(mezzo.amp, name) is getattr(torch.amp, name)
    assert issubclass(mezzo.amp.GradScaler, torch.amp.GradScaler)
    assert mezzo.amp.GradScaler().is_enabled()  # without a device it is not for CUDA only
    with pytest.raises(UsageError, match=r"init_scale=1024\.0"):
        mezzo.amp.GradScaler(1024.0)  # type: ignore[arg-type]
    assert not isinstance(amp("cpu"), torch.amp.autocast)


def test_without_a_dtype_the_dtype_outside_is_kept_as_in_torch() -> None:
    for theirs, ours in ((torch.autocast, torch.autocast), (torch.autocast, autocast), (autocast, autocast)):
        seen = []
        for dtype in (BF16, FP16):
            with theirs("cpu", dtype=dtype), ours("cpu"):
                seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        assert seen == [BF16, FP16]


TRAINING = """
from {package} import autocast, GradScaler
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler("cpu", init_scale=2.0**10, enabled=dtype is torch.float16)
for step in range(20):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    with autocast("cpu", dtype=dtype):
        loss = torch.nn.functional.mse_loss(model(x), x[:, :4].tanh())
    scaler.scale(loss).backward()
    if step == 10 and scaler.is_enabled():
        model[0].weight.grad[0, 0] = torch.inf
    scaler.unscale_(optimizer), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer), scaler.update()
"""


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_one_changed_import_trains_as_torch_amp(dtype: torch.dtype) -> None:
    runs = []
    for package in ("torch.amp", "mezzo.amp"):
        names: dict[str, Any] = {"dtype": dtype}
        exec(TRAINING.format(package=package), names)
        runs.append((names["model"], names["scaler"].get_scale(), names["loss"].item()))
    (theirs, scale, loss), (ours, our_scale, our_loss) = runs
    assert our_scale == scale == (2.0**9 if dtype is FP16 else 1.0)
    # A format that is not native here is computed in FP32 between casts, and by PyTorch's own kernels otherwise.
    bound = 0 if name_of(dtype) in native_formats("cpu") else 2e-3
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=bound)
    assert our_loss == pytest.approx(loss, rel=10 * bound)


# A wrong call -> its error, and what the message has: what was received, and what to write.
WRONG: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: autocast("bf16", dtype=FP16), UsageError, r"'bf16'.*float16.*one precision.*\('cuda', dtype="),
    (lambda: autocast("bf16", "cpu", dtype=FP16), UsageError, r"'bf16'.*'cpu'.*float16.*one precision"),
    (lambda: autocast("cdua", dtype=FP16), UsageError, "'cdua'.*mean 'cuda'"),
    (lambda: autocast("cdua"), UsageError, "unknown device type 'cdua'.*mean 'cuda'"),
    (lambda: autocast("cuda", "cpu"), UsageError, "'cuda'.*'cpu'.*one device type"),
    (lambda: autocast("cpu", dtype=FP64), UsageError, r"torch\.float64.*torch\.bfloat16"),
    (lambda: autocast("cpu", dtyp=BF16), TypeError, "'dtyp'.*mean 'dtype'"),
    (lambda: amp(enable=True), TypeError, "'enable'.*mean 'enabled'"),
    (lambda: amp(True, enabled=False), TypeError, "enabled"),
    (lambda: autocast("mtia"), UsageError, "no 'mtia'.*Use"),
    (lambda: autocast("gpu"), (UsageError, RuntimeError), "'gpu'.*mean 'cuda'"),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_wrong_calls(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda autocast: autocast(device_type="nodevice"),
        lambda autocast: autocast(torch.device("cpu")),
        lambda autocast: autocast(device_type="cpu")(3),
    ],
)
def test_errors_are_of_the_types_that_torch_raises(call: Callable[[Any], Any]) -> None:
    before_torch(2, 12, "its autocast wraps what cannot be called, without an error")
    with pytest.raises((RuntimeError, ValueError, TypeError)) as theirs:
        call(torch.amp.autocast)
    with pytest.raises(theirs.type) as ours:
        call(amp)
    assert isinstance(ours.value, UsageError)


@pytest.fixture(scope="module")
def custom() -> Iterator[Any]:
    """An op without a rule; in bf16; in FP32; and one of the older kind, in fp16."""

    def halved(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    for name in ("plain", "low", "wide"):
        op = torch.library.custom_op(f"mezzoamp::{name}", halved, mutates_args=())
        op.register_autograd(lambda ctx, grad: (grad * 0.5, None))
    torch.library.register_autocast("mezzoamp::low", "cpu", BF16)
    torch.library.register_autocast("mezzoamp::wide", "cpu", FP32)
    with torch.library._scoped_library("mezzoamp", "FRAGMENT") as library:
        library.define("older(Tensor x) -> Tensor")
        library.impl("older", torch.sin, "CompositeExplicitAutograd")
        torch.library.register_autocast("mezzoamp::older", "cpu", FP16, lib=library)
        yield torch.ops.mezzoamp


class Layers(nn.Module):
    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.ops, self.linear, self.head = ops, nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for name in ("plain", "low", "wide"):
            x = getattr(self.ops, name)(x, torch.full((4,), 0.5, dtype=x.dtype))
            self.seen[name] = x.dtype
        return self.head(x)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_registered_rules_apply_as_under_torch(custom: Any, dtype: torch.dtype) -> None:
    model, x = Layers(custom), torch.randn(2, 4)
    seen = []
    for call in (torch.amp.autocast, autocast):
        with call("cpu", dtype=dtype):
            model(x).sum().backward()
            older = custom.older(x).dtype
        seen.append((dict(model.seen), older))
    assert seen[0] == seen[1] == ({"plain": dtype, "low": BF16, "wide": FP32}, FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    mp = mezzo.MixedPrecision(model, optimizer, "bf16" if dtype is BF16 else "fp16")
    with mp.autocast():
        loss = model(x).square().mean()
    assert mp.step(loss).stepped
    assert model.seen == seen[0][0]


SCRIPT = """
import torch
from mezzo import amp
from test_amp import Layers
model, x = Layers(torch.ops.mezzoamp), torch.randn(2, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with amp.autocast("cpu", enabled={own}):
    loss = model(x).float().square().mean()
loss.backward()
optimizer.step()
print(model.seen["low"])
"""


def test_a_run_honours_registered_rules_but_not_beside_mezzo_amp(custom: Any, launch: Any) -> None:
    for precision in ("bf16", "fp16"):
        ran = launch(SCRIPT.format(own=False), policy=precision)
        assert (ran.status, ran.lines[0]) == (0, "torch.bfloat16")
        assert "itself" not in ran.notes
    ran = launch(SCRIPT.format(own=True), policy="bf16")
    assert "it uses mezzo.autocast itself" in ran.notes
