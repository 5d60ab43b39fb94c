"""Which formats `mezzo run` computes in: module patterns, calls without a 16-bit kernel, ops that are left alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.records import read
from mezzo.pytorch.hardware import ASSUME_NATIVE

SCRIPT = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return self.deep(x * times) / times

times = 1.0 if sys.argv[1:] else 1e5

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
seen = []
model[1].deep[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
x = torch.randn(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def loss_of(x):
    return model(x).square().mean()

if sys.argv[1:] == ["model"]:
    model = torch.compile(model, backend="aot_eager")
if sys.argv[1:] == ["step"]:
    loss_of = torch.compile(loss_of, backend="aot_eager")
for _ in range(3):
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(seen[0] if seen else "unseen", repr(loss.item()))
"""


# policy -> formats of the inner layer's input and output
INSIDE = {"fp16": "(torch.float16, torch.float16)", "fp16,module.1=fp32": "(torch.float32, torch.float32)"}


@pytest.mark.parametrize("policy", INSIDE)
def test_modules_inside_an_overridden_one_follow_it(policy: str, launch: Any) -> None:
    ran = launch(SCRIPT, policy=policy).ok
    assert ran.lines[-1].startswith(INSIDE[policy])
    assert any(update.skipped for update in ran.of("update")) == (policy == "fp16")  # what overflows inside


# Patterns of the policy -> what the summary says of the modules that they match.
IN_THE_SUMMARY = {
    "module.2=fp32": ", 2 in fp32;",
    "module.1.deep.*=fp32": ", 1.deep.0 in fp32, 1.deep.1 in fp32;",
    "module.**=fp32": ", 0 in fp32, 1 in fp32, 1.deep in fp32 and 3 more;",
    "module.0=fp32,module.2=fp16": ", 0 in fp32, 2 in fp16;",
}


@pytest.mark.parametrize("patterns", IN_THE_SUMMARY)
def test_the_summary_names_the_modules_in_another_format(patterns: str, launch: Any) -> None:
    says = f"3 calls of Sequential in bf16 on cpu{IN_THE_SUMMARY[patterns]}"
    assert says in launch(SCRIPT, policy=f"bf16,{patterns}").err


@pytest.mark.heavy
def test_compiled_is_as_eager(launch: Any) -> None:
    losses = [
        launch(SCRIPT, *argv, policy="fp16,module.1=fp32").lines[-1].split()[-1]
        for argv in (("eager",), ("model",), ("step",))
    ]
    assert len(set(losses)) == 1


TWO = """
import sys
import torch
from torch import nn

class Large(nn.Module):
    def forward(self, x):
        return x * 7e6 / 7e6

torch.manual_seed(0)
one = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
two = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Large(), nn.Linear(4, 1))
seen = set()
two[3].register_forward_hook(lambda module, args, out: seen.add(out.dtype))
if sys.argv[1:] == ["unused"]:
    unused, two = two, nn.Sequential(nn.Linear(4, 1))
optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    two(one(torch.randn(8, 4))).square().mean().backward()
    optimizer.step()
print(seen)
"""


def test_patterns_name_modules_of_any_model_that_is_called(launch: Any) -> None:
    bare = launch(TWO, policy="fp16")
    remedies = " ".join(text for one in bare.of("overflow") for text in one.finding.remedies)
    policies = set(re.findall(r"--precision (fp16,[^ ]*)", remedies))
    of_modules = [text for text in policies if "module.2=fp32" in text]
    assert of_modules
    for text in (*of_modules, "fp16,module.2=fp32,module.3=fp32"):
        ran = launch(TWO, policy=text)
        assert ran.status == 0, (text, ran.err)
        assert not [one.finding for one in ran.of("overflow") if one.finding.alarms], text
    assert ran.lines == ["{torch.float32}"]
    assert (
        "'3' matches nothing in Sequential, the first model that is called; it was kept for later" in ran.err
    )


# A pattern such as 9 would match a model that another test left alive: it waits for any model of the process.
@pytest.mark.parametrize(
    ("words", "pattern", "of"),
    [
        ((), "nowhere", "the model"),  # before the first step
        (("unused",), "3", r"what was called \(Sequential\)"),  # at the end
    ],
)
def test_a_pattern_that_matches_nothing(words: Any, pattern: str, of: str, launch: Any) -> None:
    with pytest.raises(UnknownNameError, match=f"'{pattern}' matches no module of {of}"):
        launch(TWO, *words, policy=f"fp16,module.{pattern}=fp32")


HELD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)
    def training_step(self, x):
        return self.head(self.body(x)).square().mean()

net, seen = Net(), {}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for name in ("body.0", "head"):
    net.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
net.training_step(torch.randn(8, 4)).backward()
optimizer.step()
print(*(name for name, dtype in seen.items() if dtype is torch.float32))
"""


@pytest.mark.parametrize(
    ("kept", "seen"),
    [
        (("body.0",), "body.0"),
        (("body",), "body.0"),
        (("head",), "head"),
        (("0",), "body.0"),  # of the Sequential, which is called
        (("head", "0"), "body.0 head"),
    ],
)
def test_patterns_name_modules_of_one_that_holds_the_called_ones_too(
    kept: Any, seen: str, launch: Any
) -> None:
    """As a LightningModule does: its `training_step` runs without a call of the module."""
    ran = launch(HELD, policy=",".join(["bf16", *(f"module.{name}=fp32" for name in kept)]))
    assert (ran.status, ran.lines) == (0, [seen])
    assert "kept for later" not in ran.err


def test_findings_name_modules_from_the_one_with_a_training_step(launch: Any) -> None:
    ran = launch(HELD.replace("torch.randn(8, 4)", "torch.full((8, 4), 1e6)"), policy="fp16")
    (found,) = ran.of("overflow")
    assert found.finding.module == "body.0"
    assert any("fp16,module.body.0=fp32" in remedy for remedy in found.finding.remedies)


def test_an_operation_that_is_not_registered_ends_the_run_with_the_nearest_name(launch: Any) -> None:
    for policy, fix in (
        ("fp16,op.aten::rlu=fp32", r" Did you mean 'relu'\?"),
        ("fp16,op.mine::rlu=fp32", ""),
    ):
        with pytest.raises(UsageError, match=rf"is not registered with PyTorch\.{fix} Import"):
            launch(TWO, policy=policy)


def test_fp32s_first_call_checks_the_patterns_of_a_comparisons_candidates(
    launch: Any, tmp_path: Path
) -> None:
    assert launch(TWO, policy="fp32", patterns=("3", "2")).status == 0  # 3 is in the second model
    with pytest.raises(UnknownNameError, match="'nowhere' matches no module of the model"):
        launch(TWO, policy="fp32", patterns=("0", "nowhere"))
    assert not [record for record in read(tmp_path / "run.jsonl") if record.kind == "loss"]


TF32 = """
import torch
B = torch.backends
{}
torch.nn.Linear(2, 2)(torch.ones(3, 2)).sum().backward()
print(*(one.fp32_precision for one in (B.cuda.matmul, B.cudnn.conv, B.cudnn.rnn, B.mkldnn.matmul)))
"""


@pytest.mark.parametrize(
    "switch",
    [
        "B.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "B.cuda.matmul.fp32_precision = 'tf32'",
        "B.cudnn.fp32_precision = 'tf32'",
        "B.fp32_precision = 'tf32'",
        "",
    ],
)
def test_tf32_that_a_script_switches_on_is_switched_off_and_noted(switch: str, launch: Any) -> None:
    ran, tf32 = (launch(TF32.format(switch), policy=policy) for policy in ("fp32", "tf32"))
    assert (ran.status, ran.lines) == (0, ["ieee ieee ieee ieee"])
    assert ["TF32" in one.notes for one in (ran, tf32)] == [bool(switch)] * 2
    assert ["emulated" in one.notes for one in (ran, tf32)] == [False, bool(switch)]


def test_pytorchs_own_tf32_setting_is_not_the_scripts(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASSUME_NATIVE, "")
    ran = launch(TF32.format("B.cudnn.allow_tf32 = True  # as it is in a new process"), policy="auto")
    assert "auto chose FP32" in ran.err
    assert (ran.lines, "TF32" in ran.notes) == (["ieee ieee ieee ieee"], False)


# Calls without a 16-bit kernel run in FP32, and the summary lists them. Each row is the body of a model's `forward`, in
# which `h` is a layer's output and has 16 bits.

LAYOUTS = """
import warnings
warnings.simplefilter("ignore")  # sparse and nested tensors say that they are prototypes
import torch
from torch import nn
torch.manual_seed(0)
RING = torch.roll(torch.eye(6), 1, 0)
PLACES = torch.tensor([0, 1, 2, 0, 1, 2])
QAT = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
STEP = torch.tensor([0.01], requires_grad=True), torch.zeros(1, requires_grad=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = self.inner(x)
        {body}

model = Model()
out = model(torch.randn(6, 4))
out.float().pow(2).mean().backward()
print(*out.float().flatten().tolist(), *model.inner.weight.grad.flatten().tolist())
"""

# Body -> ops of which the summary says that they ran in FP32, in bf16 and in fp16 (no CPU computes fp16 itself).
BODIES: dict[str, tuple[str, str]] = {
    "return RING.to_sparse() @ h": ("", "matmul"),
    "return RING.to_sparse_csr() @ h": ("mm", "matmul"),
    "out = torch.zeros(6, 4); out[PLACES[:3]] = h[:3]; return out": ("", ""),
    "return h.masked_fill(RING[:, :4] > 0, -1e9).softmax(-1)": ("", "masked_fill"),
    "return h.masked_fill(RING[:, :4] > 0, torch.finfo(torch.float32).min).softmax(-1)": ("masked_fill",) * 2,
    "return nn.functional.rrelu(QAT(h).to(h.dtype))": ("_fused_moving_avg_obs_fq_helper",) * 2,
    "return torch._fake_quantize_learnable_per_tensor_affine(h, *STEP, -128, 127, 1.0)": ("", ""),
    "return self.inner(torch.nested.as_nested_tensor([h[:2], h[2:]])).to_padded_tensor(0.0)": ("", "linear"),
    "return self.inner(torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, 6]))).values()": ("", "linear"),
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_it_runs_as_in_fp32_and_the_summary_says_what_fell_back(body: str, launch: Any) -> None:
    source = LAYOUTS.format(body=body)
    fp32 = launch(source, policy="fp32")
    expected = [float(word) for word in fp32.out.split()]
    assert len(expected) > 16
    for policy, op in zip(("bf16", "fp16"), BODIES[body]):
        ran = launch(source, policy=policy).ok
        values = [float(word) for word in ran.out.split()]
        assert values == pytest.approx(expected, rel=0.05, abs=0.05)
        assert values != expected
        told = [line for line in ran.err.splitlines() if "in FP32, because" in line]
        assert len(told) == bool(op)
        if op:
            assert f"{op} (" in told[0]
            assert ("torch.finfo(x.dtype).min" in told[0]) == (op == "masked_fill")


ROOT = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    (model(torch.zeros(4, 4)) - model.bias).sum(){}.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_training_that_ends_in_nan_says_so_at_the_end(policy: str, launch: Any) -> None:
    ran = launch(ROOT.format(".sqrt()"), policy=policy)
    assert "the last loss is nan" in ran.notes
    assert f"--precision {policy},loss_scale=1" in ran.notes
    assert "last loss" not in launch(ROOT.format(""), policy=policy).notes


# Whole modules, some of whose ops have no 16-bit kernel or no cast with gradients.
WHOLE = """
import json
import warnings
warnings.simplefilter("ignore")  # prototypes say that they are
import torch
from torch import nn
torch.manual_seed(0)
def show(*tensors):
    print(json.dumps([tensor.flatten().tolist() for tensor in tensors]))
{body}
"""
MODULES = {
    "padded encoder, evaluated": """
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2).eval()
padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
with torch.no_grad():
    show(model(torch.randn(2, 5, 8), src_key_padding_mask=padding))
""",
    "jagged attention": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, [2, 4]).transpose(1, 2) for layer in self.layers[:3])
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.layers[3](out.transpose(1, 2).flatten(-2))
model = Model()
out = model(torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=torch.jagged))
out.values().square().mean().backward()
show(out.values(), *[p.grad for p in model.parameters()])
""",
}


@pytest.mark.parametrize("row", MODULES)
def test_a_module_without_16_bit_kernels_computes_as_in_fp32(row: str, launch: Any) -> None:
    ran = [launch(WHOLE.format(body=MODULES[row]), policy=policy).out for policy in ("fp32", "bf16", "fp16")]
    expected, *found = (list(map(torch.tensor, json.loads(out))) for out in ran)
    for tensors in found:
        for ours, exact in zip(tensors, expected, strict=True):
            assert (ours - exact).norm() <= 0.03 * exact.norm() + 0.01


CALLS = """
import threading
import warnings
warnings.simplefilter("ignore")  # TorchScript is deprecated
import torch
from torch import nn
torch.manual_seed(0)
x, seen = torch.randn(8, 4), []

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (x, x * float("inf")):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

model, other = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
{body}
"""
IN_A_THREAD = """
def beside(*_):  # also while the tracer calls the model again, to explain the skipped step
    thread = threading.Thread(target=other, args=(x,))
    thread.start()
    thread.join()

model[0].register_forward_hook(beside)
other[0].register_forward_hook(lambda module, args, out: seen.append(str(out.dtype)))
train(model)
print(*sorted(set(seen)), len(seen) > 2)
"""
JIT = """
model = torch.jit.{how}
train(model)
print(*(int(steps) for name, steps in model.named_buffers() if "tracked" in name))
"""

# Script -> policy -> what is printed: the format of each call, or the batches that a scripted module counted.
CALLED: dict[str, tuple[str, dict[str, str]]] = {
    "in another thread": (IN_A_THREAD, {"fp16": "torch.float16 True"}),
    # (TorchScript's own backward of autocast on a CPU is in bf16 only: scripted models fail in fp16, as in PyTorch.)
    "scripted": (JIT.format(how="script(model)"), {"fp32": "2", "bf16": "2", "bf16,loss_scale=8": "1"}),
    "traced": (JIT.format(how="trace(model, x, check_trace=False)"),
               {"fp32": "3", "bf16": "3", "fp16,loss_scale=8": "2"}),
}  # fmt: skip


@pytest.mark.parametrize("row", CALLED)
def test_modules_are_called_in_other_threads_and_as_torchscript(row: str, launch: Any) -> None:
    body, printed = CALLED[row]
    for policy, expected in printed.items():
        ran = launch(CALLS.format(body=body), policy=policy).ok
        assert ran.out.strip() == expected


def test_the_kernels_of_a_run_are_gone_after_it(launch: Any) -> None:
    body = "return RING.to_sparse_csr() @ h"
    assert launch(LAYOUTS.format(body=body), policy="bf16").status == 0
    ring = torch.eye(4, dtype=torch.bfloat16).to_sparse_csr()
    with pytest.raises(NotImplementedError):
        ring @ torch.ones(4, 4, dtype=torch.bfloat16)


def test_lazy_layers_are_described_with_the_sizes_of_their_first_call(launch: Any) -> None:
    lines = """
        import torch
        from torch import nn
        model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 1))
        x = torch.randn(32, 64)
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().mean().backward()
        optimizer.step()
    """
    ran = launch(lines, policy="mxfp8").ok
    assert "mxfp8 in 2 linear layers: 0, 2." in ran.notes
    assert "0 inputs" not in ran.notes


def test_a_block_format_of_no_layer_is_not_what_calls_ran_in(launch: Any) -> None:
    ran = launch(TF32.format(""), policy="mxfp8").ok
    assert "1 call of Linear in bf16 on cpu" in ran.err
    assert "mxfp8 in no layer of this model" in ran.err
