"""The plan, and the kernels that carry it out, op by op: on the CPU with values, on CUDA with FakeTensors."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import autocast_samples as samples
import mezzo
import mezzo.pytorch.autocast.context  # registers the kernels, also for a test that enters no region before
from mezzo.core.errors import BannedOpError, UsageError
from mezzo.core.policy import policy
from mezzo.core.rules import RULES, Rule
from mezzo.pytorch.autocast import active_policy, dispatch
from mezzo.pytorch.autocast.plan import own_table, plan
from mezzo.pytorch.dtypes import dtype_of, name_of

# Each warns once per process, so in whichever test calls it first.
pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings(r"ignore:torch\.chain_matmul is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta:UserWarning"),
]

# Formats of a sample's arguments, and of the second of each kind.
MIXES = {"cpu": ["fp32", "low", "fp32 low", "low fp32"], "cuda": ["low", "fp32 low"]}


@pytest.fixture
def both_native(monkeypatch):
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,fp16")


@pytest.fixture(scope="module")
def fresh(forked) -> dict:
    """What a process says in which Mezzo was never imported."""
    command = [sys.executable, samples.__file__]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert not any(name.startswith("mezzo") for name in told["modules"])
    return told


@pytest.mark.heavy
def test_pytorchs_own_autocast_does_what_the_plan_says_of_it(fresh):
    """Formats of each sample in a plain `torch.autocast`, in a process in which Mezzo was never imported."""
    formats = {Rule.LOWER: "bfloat16", Rule.FP32: "float32"}
    checked = Counter()
    for device, dtype in itertools.product(("cpu", "cuda"), ("float32", "bfloat16")):
        for name, rule in own_table(device).items():
            told = fresh["outcomes"].get(f"{device} {name} torch.{dtype} None", "").partition(" ")[0]
            if told and rule in formats:
                first = told.partition(",")[0].replace("complex64", "float32")
                assert first == formats[rule], (device, name, dtype, told)
                checked[device, rule.value] += 1
    for device, fp32 in (("cpu", 100), ("cuda", 60)):
        assert checked[device, "lower"] > 30
        assert checked[device, "fp32"] > fp32


@pytest.mark.heavy
def test_a_plain_torch_autocast_computes_what_it_always_did(fresh, both_native):
    """Bit for bit on the CPU, with every kernel registered that three very different policies need."""
    everything = ",".join(f"op.{op}=fp32" for op in RULES if op.replace("_", "").isalnum())
    for spec in ("bf16", "fp16", f"bf16,{everything}"):
        with mezzo.autocast(spec):
            pass
        active_policy.successor(0, "cuda", policy(spec))
    for device in ("cpu", "cuda"):
        assert sum(registered == device for _, registered in dispatch._actions) > 200
    torch.set_num_threads(1)
    now = samples.under_torch_autocast()
    assert now.keys() == fresh["outcomes"].keys()
    different = {name: (now[name], was) for name, was in fresh["outcomes"].items() if now[name] != was}
    assert not different


# Normalisations refuse 16-bit parameters beside FP32 activations or statistics, with or without autocast.
REFUSED = {"group_norm", "native_group_norm", "batch_norm"}


def _departures(device: str, spec: str) -> list[str]:
    """The samples whose output format is not the planned one, with a line on each."""
    chosen = policy(spec)
    plans = plan(chosen, device)
    dtypes = {"fp32": torch.float32, "low": dtype_of(chosen.activations)}
    wrong = []
    for name in samples.SAMPLES:
        op = name.partition(".")[0]
        op_plan = plans.get(op)
        if op_plan is None or op_plan.how == "absent" or (device == "cuda" and name in samples.NOT_FAKEABLE):
            continue
        for mix in MIXES[device]:
            first, other = (*(dtypes[word] for word in mix.split()), None)[:2]
            function, args, kwargs = samples.sample(name, first, device, other)
            given = samples.formats_of((args, kwargs))
            inputs = [name_of(dtype) for dtype in given if not dtype.is_complex]
            planned = op_plan.output(inputs)
            try:
                observed = [name_of(dtype) for dtype in samples.formats_of(function(*args, **kwargs))]
            except BannedOpError:
                observed = ["fp32"] if op_plan.how == "banned" and set(inputs) != {"fp32"} else ["banned"]
            except Exception as error:  # told with the op's name
                observed = [planned] if op in REFUSED and len(set(inputs)) > 1 else [str(error)[:60]]
            shown = [fmt.replace("complex64", "fp32") for fmt in observed]
            # A recurrent layer's output and its states may have two formats; of others the first result counts.
            told = "+".join(dict.fromkeys(shown)) if "+" in planned else "".join(shown[:1])
            if told != planned and inputs and observed:
                wrong.append(f"{name}({', '.join(inputs)}) -> {observed}, planned {planned} ({op_plan.how})")
    return wrong


@pytest.mark.heavy
@pytest.mark.parametrize("spec", ["bf16", "fp16", "fp8", "tf32", "fp16,hidden=fp32"])
def test_every_op_gives_the_planned_format_on_the_cpu(spec):
    with mezzo.autocast(spec, "cpu"):
        assert _departures("cpu", spec) == []


@pytest.mark.heavy
@pytest.mark.parametrize("spec", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_every_op_gives_the_planned_format_on_cuda(spec, both_native):
    code = active_policy.successor(0, "cuda", policy(spec))
    with FakeTensorMode(), samples.cuda_autocast(dtype_of(spec)), active_policy.rebound(code):
        assert _departures("cuda", spec) == []


def test_every_class_of_ops_has_a_sample():
    sampled = {name.partition(".")[0] for name in samples.SAMPLES}
    assert {row.reason for row in RULES.values()} == {RULES[op].reason for op in sampled}


@pytest.mark.parametrize("spec", ["bf16", "fp16", "fp8", "bf16,hidden=fp32"])
def test_cpu_and_cuda_follow_one_table(spec, both_native):
    """The same rule and the same formats everywhere, whoever's kernel computes."""
    cpu, cuda = plan(policy(spec), "cpu"), plan(policy(spec), "cuda")
    assert cpu.keys() == cuda.keys()
    for op, here in cpu.items():
        there = cuda[op]
        assert here.rule == there.rule, op
        if "absent" not in (here.how, there.how):
            assert here.format_out == there.format_out, op


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("spec", ["bf16", "fp16"])
def test_the_hot_path_is_left_to_pytorch_where_the_format_is_native(spec, device, both_native):
    plans = plan(policy(spec), device)
    hot = "linear matmul mm bmm addmm conv1d conv2d conv3d scaled_dot_product_attention"
    for op in hot.split():
        assert plans[op].how == "pytorch", plans[op]
        assert plans[op].overloads == ()
    assert plans["add"].how == plans["mul"].how == plans["relu"].how == "pytorch"


def test_what_is_not_native_is_emulated(monkeypatch):
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")
    plans, long = plan(policy("bf16"), "cpu"), plan(policy("bf16,hidden=fp32"), "cpu")
    for op in ("linear", "conv2d", "scaled_dot_product_attention", "lstm"):
        assert (plans[op].how, plans[op].format_out) == ("emulated", "bf16")
    assert (long["lstm"].how, long["lstm"].format_out) == ("kernel", "bf16+fp32")


def test_a_plan_prints_computes_outputs_and_needs_a_format_and_a_device():
    plans = plan(policy("bf16,op.softmax=internal_fp32,op.add=lower"), "cpu")
    assert str(plans["linear"]).split()[:2] == ["linear", "lower"]
    assert "the policy says op.add=lower" in plans["add"].reason
    for op, inputs, output in (
        ("cat", ["fp16", "bf16"], "fp32"),
        ("cat", ["bf16", "bf16"], "bf16"),
        ("linear", ["fp32"], "bf16"),
        ("linear", ["fp64", "fp64"], "fp64"),
        ("add", ["fp32", "bf16"], "bf16"),
    ):
        assert plans[op].output(inputs) == output
    for spec, device, words in (("auto", "cpu", "auto"), ("bf16", "tpu", "'tpu'.*cuda")):
        with pytest.raises(UsageError, match=words):
            plan(policy(spec), device)


@pytest.mark.parametrize("rule", ["lower", "fp32", "promote", "internal_fp32"])
def test_numbers_stand_where_the_schema_has_tensors(rule):
    """`x * 0.1` reaches the kernel of mul.Tensor with a plain number."""
    x = torch.full((3,), 0.5, dtype=torch.bfloat16)
    expected = torch.float32 if rule == "fp32" else torch.bfloat16
    ops = ["add", "sub", "mul", "div", "where", "maximum"]
    with mezzo.autocast("bf16," + ",".join(f"op.{op}={rule}" for op in ops)):
        for result in (x + 1, x - 1, 1 - x, 2 * x, x * 0.5, x / 2, x.double() * 2, torch.add(x, 2, alpha=3)):
            assert result.dtype in (expected, torch.float64), result
        assert (x * x).dtype is expected
        assert torch.where(x > 0, x, 0.25).dtype is expected
        assert torch.where(x > 0, 2, x).tolist() == [2.0] * 3
        assert (x * 2).tolist() == [1.0] * 3
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the kernels are there, and no policy is
        assert (x * 2).dtype is torch.bfloat16
        assert torch.where(x > 0, x, 0.25).dtype is torch.bfloat16
    assert (x * 2).dtype is torch.bfloat16


def test_nothing_is_registered_that_no_policy_needs():
    code = """
import mezzo
from mezzo.pytorch.autocast.dispatch import _actions as registered
with mezzo.autocast('fp32', 'cpu'): pass
assert not registered
with mezzo.autocast('bf16', 'cpu'): pass
assert ('sigmoid', 'cpu') in registered, sorted(registered)
assert not {'linear', 'add.Tensor', 'relu'} & {op for op, _ in registered}
assert {device for _, device in registered} == {'cpu'}
"""
    env = {**os.environ, "MEZZO_ASSUME_NATIVE": "bf16"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=env)
