"""The region in eager mode: what is in force where, on real tensors."""

from __future__ import annotations

import threading

import pytest
import torch

import mezzo
from mezzo.core.errors import BannedOpError, UnknownNameError, UsageError
from mezzo.core.policy import policy
from mezzo.pytorch.autocast import active_policy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = "bf16,op.softmax=lower"  # a second policy of one dtype: softmax in bf16 where the table has FP32


@pytest.fixture(autouse=True)
def _one_thread_and_nothing_left():
    torch.manual_seed(0)
    yield
    assert active_policy.label() == 0
    assert not torch.is_autocast_enabled("cpu")
    assert not any(torch.is_autocast_enabled(device) for device in active_policy.label_devices())


def probe() -> tuple[torch.dtype, torch.dtype]:
    """The formats of a matrix product and of the softmax of it: which policy is in force here."""
    product = torch.ones(2, 4) @ torch.ones(4, 4)
    return product.dtype, torch.softmax(product, -1).dtype


def state(device_type: str) -> str:
    """Whether a policy is in force, PyTorch's own table, or neither."""
    if active_policy.current_policy(device_type) is not None:
        return "policy"
    return "torch" if torch.is_autocast_enabled(device_type) else "off"


IN_FP32, IN_BF16, IN_LOW, IN_FP16 = (FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32)
# PyTorch's own table on a CPU does not list softmax.
IN_TORCH = (BF16, BF16)


def test_a_region_and_after_it():
    with mezzo.autocast("bf16") as region:
        assert probe() == IN_BF16
        assert active_policy.current_policy("cpu") == policy("bf16") == region.policy
        assert state("cpu") == "policy"
        assert torch.is_autocast_enabled("cpu")
    assert probe() == IN_FP32
    assert state("cpu") == "off"


@pytest.mark.parametrize(
    ("spec", "kwargs", "expected"),
    [
        ("bf16", {}, IN_BF16),
        (policy("bf16"), {}, IN_BF16),
        (LOW, {}, IN_LOW),
        ("fp16", {}, IN_FP16),
        ("fp32", {}, IN_FP32),
        ("bf16", {"enabled": False}, IN_FP32),
        ("bf16", {"device_type": "cpu", "cache_enabled": False}, IN_BF16),
        ("bf16,op.matmul=fp32,op.softmax=lower", {}, (FP32, BF16)),
    ],
)
def test_every_way_to_name_a_policy(spec, kwargs, expected):
    with mezzo.autocast(spec, **kwargs):
        assert probe() == expected


def test_a_policy_from_a_file_is_read_each_time(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(policy("bf16").to_toml())
    with mezzo.autocast(str(path)):
        assert probe() == IN_BF16
    path.write_text(policy(LOW).to_toml())
    with mezzo.autocast(path):
        assert probe() == IN_LOW


def test_nested_regions_take_turns():
    with mezzo.autocast("bf16"):
        with mezzo.autocast(LOW):
            assert probe() == IN_LOW
            with mezzo.autocast("fp16"):
                assert probe() == IN_FP16
            with mezzo.autocast("fp16", enabled=False):
                assert probe() == IN_FP32
                with mezzo.autocast("bf16"):
                    assert probe() == IN_BF16
            assert probe() == IN_LOW
        assert probe() == IN_BF16


def test_torch_regions_inside():
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
        assert probe() == IN_TORCH
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

    assert function() == IN_LOW
    assert function.__doc__ == "Its own docstring."
    assert Model()() == (IN_BF16, IN_LOW, IN_BF16)
    assert mezzo.autocast("bf16", enabled=False)(probe)() == IN_FP32
    with pytest.raises(UsageError, match="needs a callable, received int"):
        mezzo.autocast("bf16")(3)


def test_one_region_object_many_times_nested_and_in_threads():
    region = mezzo.autocast("bf16")
    seen, both = [], threading.Barrier(2)

    def work():
        with region:
            both.wait(5)  # two threads are inside the one object at once
            seen.append(probe())
        seen.append(probe())

    threads = [threading.Thread(target=work) for _ in range(2)]
    with region, region:
        assert probe() == IN_BF16
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, seen)) == sorted(map(str, [IN_BF16, IN_FP32] * 2))


def test_threads_have_their_own_policy():
    seen, both = {}, threading.Barrier(3)

    def work(spec):
        before = probe()
        with mezzo.autocast(spec):
            both.wait(5)
            seen[spec] = before, probe()
            both.wait(5)

    threads = [threading.Thread(target=work, args=(spec,)) for spec in ("bf16", LOW, "fp16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"bf16": (IN_FP32, IN_BF16), LOW: (IN_FP32, IN_LOW), "fp16": (IN_FP32, IN_FP16)}


def test_many_threads_meet_new_policies_at_once():
    specs = [
        f"bf16,op.{op}=lower" for op in ("tan", "sinh", "cosh", "asin", "acos", "expm1", "log1p", "log2")
    ]
    start, wrong = threading.Barrier(len(specs)), []

    def work(spec, op):
        start.wait(5)
        with mezzo.autocast(spec):
            got = getattr(torch, op)(torch.full((4,), 0.5, dtype=BF16)).dtype
            other = torch.exp(torch.ones(4, dtype=BF16)).dtype
        if (got, other) != (BF16, FP32):
            wrong.append((spec, got, other))

    threads = [threading.Thread(target=work, args=(spec, spec[8:-6])) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


class _CastProduct(_Product):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        _Product.seen["forward"] = probe(), state("cpu")
        return a @ b


def test_custom_functions():
    a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with mezzo.autocast("bf16"):
        out = _Product.apply(a, b)
    assert out.dtype is BF16
    out.sum().backward()
    # custom_bwd opens a torch.autocast of the forward's dtype and knows of no policy: PyTorch's own table.
    assert _Product.seen == {"forward": (IN_BF16, "policy"), "backward": (IN_TORCH, "torch")}
    with mezzo.autocast("bf16"):
        assert _CastProduct.apply(a.to(BF16), b).dtype is FP32
    assert _Product.seen["forward"] == (IN_FP32, "off")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch.func.jvp's own
def test_functorch_transforms_meet_the_rules_again():
    weight = torch.randn(4, 4)

    def loss(x):
        hidden = x @ weight
        probabilities = torch.softmax(hidden, -1)
        return torch.sum(torch.cat([probabilities, hidden]).exp())

    def in_region(spec):
        def inside(x):
            with mezzo.autocast(spec):
                return loss(x)

        return inside

    x = torch.randn(3, 4)
    with mezzo.autocast("bf16"):
        expected = torch.autograd.grad(loss(y := x.clone().requires_grad_()), y)[0]
        got = torch.func.grad(loss)(x)
        batched = torch.func.vmap(loss)(x[:, None])
        one_by_one = torch.stack([loss(row[None]) for row in x])
        value, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.func.grad(in_region("bf16"))(x), expected, rtol=0, atol=0)
    assert batched.dtype is one_by_one.dtype is value.dtype is FP32
    torch.testing.assert_close(batched, one_by_one, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(tangent, expected.sum(), rtol=2e-2, atol=2e-2)
    jacobian = torch.func.jacrev(in_region(LOW))(x)
    assert jacobian.shape == x.shape


def test_what_autocast_leaves_alone():
    whole, double = torch.arange(4), torch.ones(4, 4, dtype=FP64)
    with mezzo.autocast("bf16"):
        assert torch.sum(whole).dtype is torch.int64
        assert (double @ double).dtype is FP64
        assert torch.softmax(double, -1).dtype is FP64
        assert torch.cat([double, double]).dtype is FP64
        out = torch.empty(4, 4, dtype=BF16)
        torch.exp(torch.ones(4, 4, dtype=BF16), out=out)
        low = torch.ones(4, dtype=BF16)
        assert low.exp_().dtype is BF16
        assert torch.exp(torch.ones(2, dtype=torch.complex64)).dtype is torch.complex64
    with mezzo.autocast("fp16"):
        assert (double @ double).dtype is FP64
        assert (whole @ whole).dtype is torch.int64


def test_dtype_arguments_are_respected():
    x = torch.randn(3, 4, dtype=BF16)
    with mezzo.autocast("bf16"):
        assert torch.softmax(x, -1).dtype is FP32
        assert torch.softmax(x, -1, dtype=BF16).dtype is BF16
        assert torch.softmax(x, dim=-1, dtype=FP64).dtype is FP64
        assert torch.cumsum(x, 0, dtype=BF16).dtype is BF16
        assert torch.cumsum(x, dim=0).dtype is FP32
        torch.testing.assert_close(torch.softmax(x, -1), torch.softmax(x.float(), -1))


def test_widest_input_wins_where_torch_raises():
    halves = [torch.ones(2, dtype=FP16), torch.ones(2, dtype=BF16)]
    with (
        torch.autocast("cpu", dtype=BF16),
        pytest.raises(RuntimeError, match="Unexpected floating ScalarType"),
    ):
        torch.cat(halves)
    for spec in ("bf16", "fp16"):
        with mezzo.autocast(spec):
            assert torch.cat(halves).dtype is torch.stack(halves).dtype is FP32
            assert torch.cat(tensors=halves[:1], dim=0).dtype is FP16


def test_banned():
    probability = torch.full((3,), 0.25)
    with mezzo.autocast("bf16"):
        loss = torch.nn.functional.binary_cross_entropy(probability, probability)
        assert loss.dtype is FP32
        with pytest.raises(
            BannedOpError, match=r"binary_cross_entropy is banned with bf16 inputs.*with_logits"
        ):
            torch.nn.functional.binary_cross_entropy(probability.to(BF16), probability)
    with mezzo.autocast("bf16,op.binary_cross_entropy=fp32"):
        assert torch.nn.functional.binary_cross_entropy(probability.to(BF16), probability).dtype is FP32
    with mezzo.autocast("bf16,op.tanh=banned"), pytest.raises(BannedOpError, match="tanh is banned"):
        torch.tanh(probability.to(BF16))


def test_wrong_names():
    with pytest.raises(UnknownNameError, match=r"bf61.*Did you mean 'bf16'"):
        mezzo.autocast("bf61")
    with pytest.raises(UsageError, match="autocast knows no device type 'gpu'"):
        mezzo.autocast("bf16", "gpu")
    with pytest.raises(UsageError, match="no 'mtia' device"):
        mezzo.autocast("bf16", "mtia")
    with (
        pytest.raises(UsageError, match="'nolib::op' is not registered"),
        mezzo.autocast("bf16,op.nolib::op=fp32"),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens on a machine without CUDA")
def test_an_absent_device_leaves_no_policy():
    for _ in range(2):
        with pytest.warns(UserWarning, match="CUDA is not available"):
            context = mezzo.autocast("bf16", "cuda")
        with context:
            assert active_policy.current_policy("cuda") is None
            assert active_policy.label() == 0


def test_rules_for_another_librarys_op():
    with torch.library._scoped_library("mezzotest", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
        x = torch.ones(2, dtype=BF16)
        with mezzo.autocast("bf16,op.mezzotest::double=fp32"):
            assert torch.ops.mezzotest.double(x).dtype is FP32
        with mezzo.autocast("bf16"):
            assert torch.ops.mezzotest.double(x).dtype is BF16


def test_a_change_of_the_native_formats_is_noticed(monkeypatch):
    """The variable is for tests, which run in one process: what another one assumed must not stick."""
    x = torch.randn(2, 4, 4)
    for assumed in ("bf16", "", "bf16"):
        monkeypatch.setenv("MEZZO_ASSUME_NATIVE", assumed)
        with mezzo.autocast("bf16"):
            out = torch.bmm(x.requires_grad_(), x)
        native = out.grad_fn.name() == "BmmBackward0"
        assert native == (assumed == "bf16"), (assumed, out.grad_fn.name())
