"""`mezzo.autocast` in eager mode: which policy is active where, on real tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mezzo
from mezzo.core.errors import BannedOpError, UnknownNameError, UsageError
from mezzo.core.policy import policy
from mezzo.pytorch.autocast import active_policy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = "bf16,op.softmax=lower"  # a second policy of one dtype: softmax in bf16 where the table has FP32


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert active_policy.label() == 0
    assert not torch.is_autocast_enabled("cpu")
    assert not any(torch.is_autocast_enabled(device) for device in active_policy.label_devices())


def probe() -> tuple[torch.dtype, torch.dtype]:
    """The formats of a matrix product and of the softmax of it: which policy is active here."""
    product = torch.ones(2, 4) @ torch.ones(4, 4)
    return product.dtype, torch.softmax(product, -1).dtype


def state(device_type: str) -> str:
    """Whether a policy is active, PyTorch's own table, or neither."""
    if active_policy.current_policy(device_type) is not None:
        return "policy"
    return "torch" if torch.is_autocast_enabled(device_type) else "off"


IN_FP32, IN_BF16, IN_LOW, IN_FP16 = (FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32)
IN_TORCH = (BF16, BF16)  # PyTorch's own table on a CPU does not list softmax


@pytest.mark.parametrize(
    ("spec", "kwargs", "expected"),
    [
        (policy("bf16"), {}, IN_BF16),
        (LOW, {}, IN_LOW),
        ("fp16", {}, IN_FP16),
        ("fp32", {}, IN_FP32),
        ("bf16", {"enabled": False}, IN_FP32),
        ("bf16", {"device_type": "cpu", "cache_enabled": False}, IN_BF16),
        ("bf16,op.matmul=fp32,op.softmax=lower", {}, (FP32, BF16)),
    ],
)
def test_every_way_to_name_a_policy(spec: Any, kwargs: dict[str, Any], expected: Any) -> None:
    with mezzo.autocast(spec, **kwargs) as context:
        assert probe() == expected
        assert active_policy.current_policy("cpu") == context.policy
        assert torch.is_autocast_enabled("cpu") == (context.policy is not None)
    assert probe() == IN_FP32
    assert mezzo.autocast(spec, **kwargs)(probe)() == expected


def test_a_policy_from_a_file_is_read_each_time(tmp_path):
    path = tmp_path / "own.toml"
    for spec, expected in (("bf16", IN_BF16), (LOW, IN_LOW)):
        path.write_text(policy(spec).to_toml())
        for name in (path, str(path)):
            with mezzo.autocast(name):
                assert probe() == expected


def test_nested_contexts():
    with mezzo.autocast("bf16"):
        with mezzo.autocast(LOW):
            with mezzo.autocast("fp16"):
                assert probe() == IN_FP16
            with mezzo.autocast("fp16", enabled=False):
                assert probe() == IN_FP32
                with mezzo.autocast("bf16"):
                    assert probe() == IN_BF16
            assert probe() == IN_LOW
        assert probe() == IN_BF16


@pytest.mark.parametrize("device", sorted({"xpu", "mps", "hpu", "mtia"} & {*active_policy.label_devices()}))
def test_a_disabled_context_of_an_absent_device_changes_nothing(device):
    for ask in (torch.autocast, mezzo.autocast):
        for arguments in ({}, {"dtype": BF16}, {"dtype": FP16, "cache_enabled": False}):
            with ask(device, enabled=False, **arguments):
                assert probe() == IN_FP32
                assert not torch.is_autocast_enabled(device)
    with pytest.raises(UsageError, match=f"no '{device}'"):
        mezzo.autocast(device)
    for op in ("exp", "log", "sum", "prod", "cumsum", "cosh", "sinh", "tan", "acos", "asin"):
        with mezzo.autocast(f"{LOW},op.{op}=lower", "cpu"):  # enough policies for a label on several devices
            before = active_policy.label()
            with mezzo.autocast("auto", device, enabled=False), mezzo.autocast(device, enabled=False):
                assert (active_policy.label(), probe()) == (before, IN_LOW)
    assert any(dtype is not None for _, dtype in active_policy.label_state(before)[2:])


def test_torch_contexts_inside_and_around():
    with mezzo.autocast("bf16"):
        with torch.autocast("cpu", enabled=False):
            assert probe() == IN_FP32
        with torch.autocast("cpu", dtype=FP16):  # another dtype than the policy's: PyTorch's own table
            assert state("cpu") == "torch"
            assert torch.softmax(torch.ones(4, dtype=FP16), -1).dtype is FP16
        with torch.autocast("cpu", dtype=BF16):
            assert probe() == IN_BF16
    with torch.autocast("cpu", dtype=BF16):
        assert state("cpu") == "torch"
        with mezzo.autocast("bf16"):
            assert probe() == IN_BF16
        assert probe() == IN_TORCH


def test_decorator_on_functions_and_methods():
    @mezzo.autocast(LOW)
    def function():
        """Its own docstring."""
        return probe()

    class Model(torch.nn.Module):
        @mezzo.autocast("bf16")
        def forward(self):
            return probe(), function(), probe()

    assert function.__doc__ == "Its own docstring."
    assert Model()() == (IN_BF16, IN_LOW, IN_BF16)
    with pytest.raises(UsageError, match="received int"):
        mezzo.autocast("bf16")(3)


def test_one_object_many_times_nested_and_in_threads():
    context = mezzo.autocast("bf16")
    seen, both = [], threading.Barrier(2)

    def work():
        with context:
            both.wait(5)  # two threads are inside the one object at once
            seen.append(probe())

    with context, context:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work) for _ in range(2)]:
                done.result()
        assert probe() == IN_BF16
    assert seen == [IN_BF16] * 2


class _Product(torch.autograd.Function):
    """A user's Function, by the book: formats of its forward and backward are noted."""

    seen: dict[str, object] = {}  # noqa: RUF012

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        _Product.seen["forward"] = probe(), state("cpu")
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        _Product.seen["backward"] = probe(), state("cpu")
        return grad @ b.T, a.T @ grad


def test_custom_functions():
    a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with mezzo.autocast("bf16"):
        out = _Product.apply(a, b)
    assert out.dtype is BF16
    out.sum().backward()
    # custom_bwd opens a torch.autocast of the forward's dtype and knows of no policy: PyTorch's own table.
    assert _Product.seen == {"forward": (IN_BF16, "policy"), "backward": (IN_TORCH, "torch")}
    forward = torch.amp.custom_fwd(_Product.forward.__wrapped__, device_type="cpu", cast_inputs=FP32)
    in_fp32 = type("InFP32", (_Product,), {"forward": staticmethod(forward)})
    with mezzo.autocast("bf16"):
        assert in_fp32.apply(a.to(BF16), b).dtype is FP32
    assert _Product.seen["forward"] == (IN_FP32, "off")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch.func.jvp's own
def test_functorch_transforms():
    weight, x = torch.randn(4, 4), torch.randn(3, 4)

    def loss(x):
        hidden = x @ weight
        return torch.sum(torch.cat([torch.softmax(hidden, -1), hidden]).exp())

    inside = mezzo.autocast("bf16")(loss)
    expected = torch.autograd.grad(inside(y := x.clone().requires_grad_()), y)[0]
    torch.testing.assert_close(torch.func.grad(inside)(x), expected, rtol=0, atol=0)
    with mezzo.autocast("bf16"):
        torch.testing.assert_close(torch.func.grad(loss)(x), expected, rtol=0, atol=0)
        batched = torch.func.vmap(loss)(x[:, None])
        one_by_one = torch.stack([loss(row[None]) for row in x])
        _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(batched, one_by_one, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(tangent, expected.sum(), rtol=2e-2, atol=2e-2)


WHOLE, DOUBLE, HALF = torch.arange(4), torch.ones(4, 4, dtype=FP64), torch.full((4, 4), 0.25, dtype=BF16)
OUT, F = torch.empty(4, 4, dtype=BF16), torch.nn.functional
# Call -> its format, under bf16 if no other policy is named.
CALLS: list[tuple[Any, torch.dtype, str]] = [
    # left alone: FP64, integers, complex numbers, `out=` and in-place ops
    (lambda: DOUBLE @ DOUBLE, FP64, "bf16"),
    (lambda: torch.softmax(DOUBLE, -1), FP64, "bf16"),
    (lambda: torch.cat([DOUBLE, DOUBLE]), FP64, "bf16"),
    (lambda: torch.exp(HALF, out=OUT), BF16, "bf16"),
    (lambda: HALF.clone().exp_(), BF16, "bf16"),
    (lambda: torch.exp(torch.ones(2, dtype=torch.complex64)), torch.complex64, "bf16"),
    (lambda: WHOLE @ WHOLE, torch.int64, "fp16"),
    # a dtype that the caller gives is respected
    (lambda: torch.softmax(HALF, -1, dtype=BF16), BF16, "bf16"),
    (lambda: torch.softmax(HALF, dim=-1, dtype=FP64), FP64, "bf16"),
    (lambda: torch.cumsum(HALF, 0, dtype=BF16), BF16, "bf16"),
    (lambda: torch.cumsum(HALF, dim=0), FP32, "bf16"),
    # the widest input, where torch.autocast raises
    (lambda: torch.cat([HALF, HALF.half()]), FP32, "bf16"),
    (lambda: torch.cat(tensors=[HALF.half()], dim=0), FP16, "bf16"),
    # banned ops pass FP32, and a rule of the policy allows them
    (lambda: F.binary_cross_entropy(HALF.float(), HALF.float()), FP32, "bf16"),
    (lambda: F.binary_cross_entropy(HALF, HALF.float()), FP32, "bf16,op.binary_cross_entropy=fp32"),
]


@pytest.mark.parametrize(("call", "expected", "spec"), CALLS)
def test_the_format_of_a_call(call: Any, expected: torch.dtype, spec: str) -> None:
    with mezzo.autocast(spec):
        assert call().dtype is expected


def test_banned() -> None:
    fix = r"binary_cross_entropy.*bf16.*with_logits"
    with mezzo.autocast("bf16"), pytest.raises(BannedOpError, match=fix):
        F.binary_cross_entropy(HALF, HALF.float())
    with mezzo.autocast("bf16,op.tanh=banned"), pytest.raises(BannedOpError, match=r"tanh.*op\.tanh=fp32"):
        torch.tanh(HALF)


@pytest.mark.parametrize(
    ("spec", "device", "error", "words"),
    [
        ("bf61", None, UnknownNameError, "bf61.*'bf16'"),
        ("bf16", "gpu", UsageError, "'gpu'.*mean 'cuda'"),
        ("gpu", None, UsageError, "'gpu'.*mean 'cuda'"),
        ("cuda:x", None, UsageError, "'cuda:x'.*mean 'cuda'"),
        (None, None, UsageError, r"autocast\(\).*one precision.*autocast\('bf16', 'cuda'\)"),
        ("bf16", torch.bfloat16, UsageError, r"policy='bf16'.*one precision.*dtype=torch\.bfloat16"),
        ("bf16", "mtia", UsageError, "'mtia'"),
        ("bf16,op.nolib::op=fp32", None, UsageError, "'nolib::op'.*Import"),
    ],
)
def test_wrong_names(spec: str, device: str | None, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mezzo.autocast(spec, device).__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a computer without CUDA")
def test_an_absent_device_leaves_no_policy():
    for words in ("bf16", "cuda"), ("bf16", "cuda"), ("cuda", torch.float16), ("cuda",):
        with pytest.warns(UserWarning, match="CUDA is not available") as told:
            context = mezzo.autocast(*words)
        assert [one.filename for one in told] == [__file__]
        with context:
            assert active_policy.current_policy("cuda") is None
            assert active_policy.label() == 0


def test_rules_for_another_librarys_op():
    with torch.library._scoped_library("mezzotest", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
        for spec, expected in (("bf16,op.mezzotest::double=fp32", FP32), ("bf16", BF16)):
            with mezzo.autocast(spec):
                assert torch.ops.mezzotest.double(HALF).dtype is expected
