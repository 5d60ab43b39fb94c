"""fp16 scales without the script's knowing: what it sees are true gradients, and no step uses one that overflowed."""

from __future__ import annotations

import json
from textwrap import dedent, indent
from typing import Any

import pytest
import torch

HEAD = """
import json, math, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
x = torch.randn(8, 6)
def show(*tensors):
    print(json.dumps([None if t is None else t.detach().double().flatten().tolist() for t in tensors]))
def show_all():
    show(*[t.grad for t in (x, *model.parameters()) if t.requires_grad])
"""


# Each prints tensors that must come out as in FP32, up to fp16's rounding. A forgotten scale is a factor of 65536.
TRUE = {
    "hooks on leaves": """
        seen, inputs = [], []
        x.requires_grad_()
        x.register_hook(lambda g: inputs.append(g.clone()))
        model[0].weight.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        model(x).square().mean().backward()
        def refuse(g):
            raise ValueError("no")
        handle = model[2].bias.register_hook(refuse)
        try:
            model(x).sum().backward()
        except ValueError as error:
            handle.remove()
        for tensor in (x, *model.parameters()):
            tensor.grad = None
        seen.clear(), inputs.clear()
        model(x).square().mean().backward()  # the hooks come in the same order again, and ours are gone
        show(*seen, *inputs, model[0].weight.grad, model[2].bias.grad)
    """,
    "autograd.grad": """
        x.requires_grad_()
        model[0].bias.register_hook(lambda g: 3 * g)
        out = model(x)
        hidden = out.tanh()
        loss = hidden.square().mean()
        inputs = [x, hidden, *model.parameters()]
        show(*torch.autograd.grad(loss, inputs, retain_graph=True))
        show(*torch.autograd.grad(hidden, [x], torch.full_like(hidden, 0.01), retain_graph=True))
        show(*torch.autograd.grad([loss, out], [out], [None, torch.ones_like(out)], retain_graph=True))
        show(*torch.autograd.grad(loss, [x, torch.ones(1, requires_grad=True)], allow_unused=True))
        print(json.dumps([p.grad is None for p in model.parameters()]))
    """,
    "double backward": """
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        slope.square().sum().backward()
        show(slope)
        show_all()
        (second,) = torch.autograd.grad(
            torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].sum(), x
        )
        show(second)
    """,
    "accumulated, and part of the leaves": """
        x.requires_grad_()
        for part in (x[:4], x[4:]):
            model(part).square().mean().backward()
        out = model(x)
        torch.autograd.backward([out.mean(), out], [None, torch.full_like(out, 0.1)], inputs=[x, model[2].weight])
        show_all()
    """,
    "fp64": """
        model.double()
        model(x.double()).square().mean().backward()
        show_all()
    """,
    "another default dtype": """
        torch.set_default_dtype(torch.float64)
        try:
            model(x).square().mean().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        show_all()
    """,
    "torch.func": """
        from torch.func import functional_call, grad, vmap
        def loss(params, x, factor=1e-6):
            return factor * functional_call(model, params, (x,)).square().mean()
        params = {name: p.detach() for name, p in model.named_parameters()}
        show(*(g * 1e6 for g in grad(loss)(params, x).values()))
        show(*(g * 1e6 for g in vmap(grad(loss), (None, 0))(params, x).values()))
        show(*grad(loss)(dict(model.named_parameters()), x, 1.0).values())
        show(torch.autograd.functional.jacobian(lambda v: model(v).sum(0), x))
    """,
    "a batch of gradients": """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # whose overflows are traced
        seeds = 0.01 * torch.eye(24).view(24, 8, 3)
        show(*torch.autograd.grad(model(x), list(model.parameters()), seeds, is_grads_batched=True))
    """,
    "a traced module": """
        import warnings
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        model = torch.jit.trace(model, x, check_trace=False)
        model(x).square().mean().backward()
        show_all()
    """,
    "backward inside": """
        class Block(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                ctx.save_for_backward(value)
                with torch.no_grad():
                    return model[0](value)
            @staticmethod
            def backward(ctx, grad):
                (value,) = ctx.saved_tensors
                with torch.enable_grad():
                    value = value.detach().requires_grad_()
                    model[0](value).backward(grad)
                return value.grad
        x.requires_grad_()
        Block.apply(x).square().mean().backward()
        show(x.grad, model[0].weight.grad)
    """,
    "autograd.grad inside": """
        class Block(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value, *parameters):
                ctx.save_for_backward(value, *parameters)
                with torch.no_grad():
                    return model(value)
            @staticmethod
            def backward(ctx, grad):
                value, *parameters = ctx.saved_tensors
                with torch.enable_grad():
                    value = value.detach().requires_grad_()
                    return torch.autograd.grad(model(value), [value, *parameters], grad)
        x.requires_grad_()
        Block.apply(x, *model.parameters()).square().mean().backward()
        show_all()
    """,
    "reentrant inside, and its parameters in the loss": """
        from torch.utils.checkpoint import checkpoint
        x.requires_grad_()
        loss = checkpoint(model, x, use_reentrant=True).square().mean()
        (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        show_all()
    """,
}


@pytest.mark.parametrize("row", TRUE)
def test_the_script_sees_true_gradients(launch: Any, row: str) -> None:
    source = HEAD + dedent(TRUE[row])
    plain, ours = launch(source, policy="fp32"), launch(source, policy="fp16")
    assert plain.status == ours.status == 0, ours.err
    assert len(plain.lines) == len(ours.lines) >= 1
    assert ("torch.func.vmap" in ours.notes) == (row == "torch.func")
    if row != "fp64":
        assert plain.lines != ours.lines  # it did run in fp16
    for expected, found in zip(map(json.loads, plain.lines), map(json.loads, ours.lines)):
        if isinstance(expected[0], bool):
            assert found == expected
            continue
        for a, b in zip(expected, found, strict=True):
            if a is None:
                assert b is None
                continue
            a, b = torch.tensor(a), torch.tensor(b)
            assert (a - b).norm() <= 0.01 * a.norm() + 1e-7


def test_a_hook_inside_the_graph_sees_the_scaled_gradient(launch: Any) -> None:
    """The one place where the script can notice; the documentation says so."""
    source = HEAD + (
        "out = model(x)\nout.register_hook(lambda g: show(g))\nout.mean().backward()\nshow(model[2].bias.grad)\n"
    )
    plain, ours = launch(source, policy="fp32"), launch(source, policy="fp16")
    inside = [torch.tensor(json.loads(ran.lines[0])) for ran in (plain, ours)]
    assert torch.equal(inside[0] * 65536, inside[1])


BY_HAND = """
losses = []
weights = list(model.parameters())
target = x[:, :3].sin()
for step in range(30):
    loss = {factor} * (model(x) - target).square().mean()
    {update}
    losses.append(loss.item() / {factor})
show(torch.tensor(losses), *weights)
"""
UPDATES = {
    "p.data": """model.zero_grad()
    loss.backward()
    for p in weights:
        p.data.add_(p.grad.data, alpha=-0.1 / {factor})""",
    "autograd.grad": """grads = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for p, g in zip(weights, grads):
            p.sub_(g, alpha=0.1 / {factor})""",
    "torch.func.grad": """def of(params):
        return {factor} * (torch.func.functional_call(model, params, (x,)) - target).square().mean()
    grads = torch.func.grad(of)({{n: p.detach() for n, p in model.named_parameters()}})
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.sub_(grads[n], alpha=0.1 / {factor})""",
}


@pytest.mark.parametrize("row", UPDATES)
def test_a_hand_written_update_never_meets_an_infinite_gradient(launch: Any, row: str) -> None:
    """Nobody can veto it, so an overflowing backward is run again at S/2 before its gradients are seen."""
    factor = 2.0**10  # at S = 65536 this overflows in fp16
    source = HEAD + BY_HAND.format(factor=factor, update=UPDATES[row].format(factor=factor))
    plain, ours = launch(source, policy="fp32"), launch(source, policy="fp16")
    assert ours.status == 0, ours.err
    for a, b in zip(json.loads(plain.lines[0]), json.loads(ours.lines[0])):
        assert (torch.tensor(a) - torch.tensor(b)).norm() <= 0.02 * torch.tensor(a).norm()
    assert "run again at a smaller scale" in ours.err
    assert json.loads(ours.lines[0])[0][-1] < json.loads(ours.lines[0])[0][0] / 2
    assert "infinite at loss scale 1" not in ours.notes
    beyond = HEAD + BY_HAND.format(factor=2.0**40, update=UPDATES[row].format(factor=2.0**40))
    assert "infinite at loss scale 1" in launch(beyond, policy="fp16").notes


@pytest.mark.parametrize("row", UPDATES)
def test_only_backward_counts_as_a_backward_pass(launch: Any, row: str) -> None:
    ran = launch(HEAD + BY_HAND.format(factor=1, update=UPDATES[row].format(factor=1)), policy="bf16")
    told = [name in ran.notes for name in ("never called backward", "autograd.grad", "torch.func")]
    assert told == [row != "p.data"] * 3


# how the model is called, the cause in the first report, and in that of the next step, which is watched
OF_ROW = "torch.func.functional_call(model, w, (x,)).square().mean()"
TRANSFORMED = {
    "jvp": ("torch.func.jvp(model, (x,), (torch.ones_like(x),))[0].square().mean().backward()", "loss", "overflow"),
    "vmap": ("torch.func.vmap(model)(x).square().mean().backward()", "loss", "overflow"),
    "vmap over matrices": ("torch.func.vmap(model)(x.view(2, 4, 6)).square().mean().backward()", "loss", "overflow"),
    "vmap, an operation without a result":
        ("torch.func.vmap(lambda row: (model(row / x.max()) * 0 - 1).sqrt())(x).mean().backward()", "loss", "invalid"),
    "grad": (f"grads = torch.func.grad(lambda w: {OF_ROW})(dict(weights))\n"
             "for name, weight in weights:\n    weight.grad = grads[name]", "unknown", "unknown"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch.func.jvp calls it
@pytest.mark.parametrize("row", TRANSFORMED)
def test_an_overflow_inside_a_transform_is_explained_in_the_next_step(launch: Any, row: str) -> None:
    """The next step is watched, and names the operation and the format in which it was computed."""
    step, cause, next_cause = TRANSFORMED[row]
    source = HEAD + (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = x * 1e30\n"
        "weights = list(model.named_parameters())\n" + 2 * f"{step}\noptimizer.step()\n"
    )
    found, later = launch(source, policy="fp16").of("overflow")
    assert found.finding.cause == cause
    assert "inside torch.func (vmap, jvp, grad)" in found.finding.note
    assert all(word not in found.finding.note for word in ("tracing failed", "were finite"))
    assert later.finding.cause == next_cause
    if next_cause == "overflow":
        assert (later.finding.module, later.finding.op) == ("0", "linear")
        assert {facts.format for facts in later.finding.outputs} == {"fp16"}
        assert not any("FP32's largest" in remedy for remedy in later.finding.remedies)


CLOSURE = """
class Own(torch.optim.SGD):
    def step(self, closure{needed}):
        closure()
        return super().step()
optimizer = {optimizer}(model.parameters(), lr=0.1)
calls = 0
def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (model({x}) * {factor}).square().mean()
    loss.backward()
    {end}
"""


@pytest.mark.parametrize(("kind", "evaluation"), [("SGD", 1), ("LBFGS", 1), ("LBFGS", 3)])
def test_an_overflow_in_a_closure_is_explained_and_the_step_returns_the_loss(
    launch: Any, kind: str, evaluation: int
) -> None:
    bad = f"x * (1e30 if calls == {evaluation} else 1.0)"
    source = CLOSURE.format(needed="", optimizer=f"torch.optim.{kind}", x=bad, factor=1.0, end="return loss")
    ran = launch(f"{HEAD}{source}print(optimizer.step(closure).isfinite().item(), calls)", policy="fp16").ok
    assert ran.lines == [f"False {evaluation}"]
    [found] = ran.of("overflow")
    assert (found.update, found.finding.module, found.finding.op) == (0, "0", "linear")


@pytest.mark.parametrize(
    ("needed", "factor", "evaluations"),
    [("", "math.inf", 3), ("", "1e12", 26 + 25 + 24), ("=None", "math.inf", 3), ("=None", "1e12", 3)],
)
def test_each_step_of_a_closure_that_returns_nothing_is_explained_once(
    launch: Any, needed: str, factor: str, evaluations: int
) -> None:
    """No scale helps an infinite loss: one evaluation. A finite one's gradients are tried down to the floor, 2^-14.

    An optimizer that also steps without its closure evaluates it once, and skips.
    """
    source = CLOSURE.format(needed=needed, optimizer="Own", x="x", factor=factor, end="")
    steps = "for step in range(3):\n    optimizer.step(closure)\nprint(calls)"
    ran = launch(f"{HEAD}{source}{steps}", policy="fp16,loss_scale=dynamic(init=2048)").ok
    assert ran.lines == [str(evaluations)]
    found = ran.of("overflow")
    assert [one.update for one in found] == [0, 1, 2]
    causes = {"invalid"} if factor == "math.inf" else {"loss", "overflow"}
    assert {one.finding.cause for one in found} - {"loss"} <= causes


TWO = """
import torch
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x * x.abs()

torch.manual_seed(0)
bad, good = nn.Sequential(nn.Linear(4, 8), Square(), nn.Linear(8, 1)), nn.Linear(4, 1)
of_bad, of_good = torch.optim.Adam(bad.parameters(), lr=1e-3), torch.optim.SGD(good.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(8, 4)
    of_good.zero_grad()
    good(x).square().mean().backward()
    of_good.step()
    of_bad.zero_grad()
    bad(x * 3e3).square().mean().backward()
    of_bad.step()
print("through")
"""
PATIENT = {"dynamic": "loss_scale=dynamic(init=2**4,floor=2**2,patience=6)", "static": "loss_scale=16"}


@pytest.mark.parametrize("name", PATIENT)
def test_an_optimizer_that_never_moves_is_not_hidden_by_another_one_that_does(name: str, launch: Any) -> None:
    ran = launch(TWO, policy=f"fp16,{PATIENT[name]}")
    assert ran.status == 1
    assert ran.lines == []
    said = ran.err.partition("LossScaleCollapseError: ")[2]
    assert said.startswith("optimizer 1 (Adam; ")
    assert "Cause: " in said
    assert "mul in 1" in said
    mine = [update.skipped for update in ran.of("update") if update.optimizer == 1]
    assert all(mine)
    patience = 50 if name == "static" else 6
    assert len(mine) == patience + (2 if name == "dynamic" else 0)
    assert not any(update.skipped for update in ran.of("update") if update.optimizer == 0)


# Two parts of a model, each with an optimizer. `scales` gets the loss scale of each iteration's first backward pass.
PARTS = """
import json, math, sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
parts = entry, end = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)
weights = [entry.weight, end.weight]
a, b = (torch.optim.SGD([weight], lr=1e-3) for weight in weights)
x, scales, cleared = torch.randn(8, 4), [], weights
def loss(out):
    value = out.square().mean()
    value.register_hook(lambda grad: seen.append(grad.item()))
    return value
def both():
    return loss(end(entry(x)))
def alone(part):
    return loss(part(x))
def spoil(*which):
    for weight, event in zip(weights, events):
        if event == "b" and (not which or any(weight is part.weight for part in which)):
            weight.grad = weight.grad * math.inf
{before}
for events in sys.argv[1].split(","):
    seen = []
{step}
    scales.append(seen[0])
    for weight in cleared:
        weight.grad = None
print(json.dumps(scales))
"""
# Whether the gradients of `entry`, and of `end`, are finite in an iteration: g for good, b for bad.
EVENTS = "gg,gg,gb,gg,gg,bg,gg,gg,gg,bb,gg,gb,bg,gg,gg,gg,gg"

# name -> an iteration
SHARED = {
    "one loss": "both().backward(); spoil(); a.step(); b.step()",
    "one loss, the other order": "both().backward(); spoil(); b.step(); a.step()",
    "two losses added up": "both().backward(); both().backward(); spoil(); a.step(); b.step()",
    "one of two losses is for one part": "alone(end).backward(); both().backward(); spoil(); b.step(); a.step()",
    "three losses, each step uses two":
        "alone(entry).backward(); alone(end).backward(); both().backward(); spoil(); a.step(); b.step()",
    "one part in a reentrant checkpoint":
        "loss(checkpoint(end, entry(x), use_reentrant=True)).backward(); spoil(); a.step(); b.step()",
    "gradients that autograd.grad returned":
        "entry.weight.grad, end.weight.grad = torch.autograd.grad(both(), weights); spoil(); a.step(); b.step()",
    "gradients set to zero and kept":
        "[one.zero_grad(set_to_none=False) for one in (a, b)]; both().backward(); spoil(); a.step(); b.step()",
    "one optimizer steps twice": "both().backward(); spoil(); a.step(); a.step(); b.step()",
    "each steps when its gradient is there": "both().backward()",
    "a loss for each": "alone(entry).backward(); spoil(entry); a.step(); alone(end).backward(); spoil(end); b.step()",
    "a loss for each, the steps after both":
        "alone(entry).backward(); alone(end).backward(); spoil(); a.step(); b.step()",
    "the second loss goes through both":
        "alone(entry).backward(); spoil(entry); a.step(); both().backward(); spoil(end); b.step()",
}  # fmt: skip
BEFORE = {  # the loop
    "gradients set to zero and kept": "cleared = []",
    "each steps when its gradient is there": (
        "def now(weight):\n    spoil(*(part for part in parts if part.weight is weight))\n"
        "    (a if weight is weights[0] else b).step()\n"
        "for weight in weights: weight.register_post_accumulate_grad_hook(now)"
    ),
}
EACH_HAS_A_LOSS = [
    "a loss for each", "a loss for each, the steps after both", "the second loss goes through both"
]  # fmt: skip


def scales_of_torch(*, updates: int) -> list[float]:
    """The scale of each iteration with torch.amp's scaler and so many calls of `update` after two steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    scaler.scale(torch.ones(()))
    weights, scales = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], []
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for events in EVENTS.split(","):
        scales.append(scaler.get_scale())
        for number, event in enumerate(events, start=1):
            weights[number - 1].grad = torch.full((1,), 0.0 if event == "g" else torch.inf)
            scaler.step(optimizers[number - 1])
            if number == 2 or updates == 2:
                scaler.update()
    return scales


@pytest.mark.parametrize("row", SHARED)
def test_one_backward_pass_changes_the_scale_once_for_all_optimizers(launch: Any, row: str) -> None:
    """As GradScaler's one `update` does; each step is skipped by itself."""
    source = PARTS.format(before=BEFORE.get(row, ""), step=indent(SHARED[row], "    "))
    ran = launch(source, EVENTS, policy="fp16,loss_scale=dynamic(init=2**8,growth_interval=3)").ok
    assert json.loads(ran.lines[-1]) == scales_of_torch(updates=1 + (row in EACH_HAS_A_LOSS))
    skipped = sorted(sum(u.skipped for u in ran.of("update") if u.optimizer == n) for n in range(2))
    assert skipped == ([3, 6] if row == "one optimizer steps twice" else [3, 3])


def test_an_optimizer_that_is_gone_gives_its_number_to_nobody(launch: Any) -> None:
    """One optimizer a stage: counting the optimizers that are left would give a number twice."""
    ran = launch(
        "import gc, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "for stage in range(3):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    gc.collect()\n",
        policy="fp32",
    )
    assert [update.optimizer for update in ran.of("update")] == [0, 1, 2]


CHECKPOINTED = """
import sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    x = torch.randn(16, 4, requires_grad=True)
    how = sys.argv[1]
    out = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=how == "reentrant")
    out.square().sum().backward()
    optimizer.step()
    print(out.dtype, *(p.double().sum().item().hex() for p in (x.grad, *model.parameters())))
"""


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", ["bf16", "fp16,loss_scale=2**20"])
def test_a_checkpointed_call_is_the_plain_call(policy: str, how: str, launch: Any) -> None:
    ran = launch(CHECKPOINTED, how, policy=policy).ok
    assert ran.lines == launch(CHECKPOINTED, "plain", policy=policy).lines
    assert "mezzo: 3 calls of Sequential" in ran.err  # a recomputation is no call of the script's


# Each row is a training loop. With a bad batch its weights end where they end without that batch, to the bit, and the
# step is counted as skipped. Without one they are those of plain PyTorch, up to fp16's rounding.

LOOP = """
import copy, json, sys, warnings
import torch
from torch import nn
from torch.nn.functional import mse_loss
warnings.simplefilter("ignore")
torch.manual_seed(0)
INF = float("inf")
def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
model = net()
params = list(model.parameters())
SGD, Adam = torch.optim.SGD, torch.optim.Adam
def loss_of(x, y, model=model):
    return mse_loss(model(x), y)
def steps():
    good = 0
    for event in sys.argv[1]:
        g = torch.Generator().manual_seed(good)
        x, y = torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)
        good += event == "g"
        yield event == "b", x * (1e30 if event == "b" else 1.0), y
def put(grads):
    for p, g in zip(params, grads):
        p.grad = g
"""
END = """
print(json.dumps([p.flatten().tolist() for p in params]))
"""

# name -> what comes before the loop, and a step of it. `bad` tells that the batch overflows.
WAYS: dict[str, tuple[str, str]] = {
    "backward": ("", "optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step()"),
    "cleared by hand, clipped, gradients read as data": (
        "class Own(SGD):\n    def step(self, closure=None):\n"
        "        for p in params: p.grad.data.mul_(1.0)  # crashes if gradients were hidden\n"
        "        return super().step(closure)\n"
        "optimizer = Own(params, lr=0.1); scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        "for p in params:\n    if p.grad is not None: p.grad.data.zero_()\n"
        "loss_of(x, y).backward(); nn.utils.clip_grad_value_(params, 0.1); optimizer.step()\n"
        "scheduler.step() if not bad else None",
    ),
    "saved, cleared, put back": (
        "",
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "saved = [p.grad.clone() for p in params]\noptimizer.zero_grad(); put(saved); optimizer.step()",
    ),
    "PCGrad": (
        "def tasks(x, y):  # the gradients of two losses, the second one good\n    found = []\n"
        "    for loss in (loss_of(x, y), loss_of(y.repeat(1, 2), x[:, :2].clamp(-1, 1))):\n"
        "        optimizer.zero_grad(); loss.backward(); found.append([p.grad.clone() for p in params])\n"
        "    optimizer.zero_grad()\n    return found\n"
        "def project(a, b):\n    dot = sum((p * q).sum() for p, q in zip(a, b))\n"
        "    return [p - torch.where(dot < 0, dot / sum((q * q).sum() for q in b), 0) * q for p, q in zip(a, b)]",
        "a, b = tasks(x, y); put([p + q for p, q in zip(project(a, b), project(b, a))]); optimizer.step()",
    ),
    "MAML": (
        "",
        "optimizer.zero_grad(); names = dict(model.named_parameters())\n"
        "inner = loss_of(x[:4], y[:4], lambda v: torch.func.functional_call(model, names, (v,)))\n"
        "slopes = torch.autograd.grad(inner, list(names.values()), create_graph=True)\n"
        "fast = {n: p - 0.1 * g for (n, p), g in zip(names.items(), slopes)}\n"
        "loss_of(x[4:], y[4:], lambda v: torch.func.functional_call(model, fast, (v,))).backward(); optimizer.step()",
    ),
    "autograd.grad assigned": ("", "put(torch.autograd.grad(loss_of(x, y), params)); optimizer.step()"),
    "all_reduce by hand": (
        "",
        "optimizer.zero_grad(); loss_of(y.repeat(1, 2) if bad else x, y).backward()\n"
        "for p in params: p.grad.add_(INF if bad else 0.0).div_(2)  # what another process had\noptimizer.step()",
    ),
    "all_reduce in a step hook": (
        "def reduce(optimizer, args, kwargs):\n    for p in params: p.grad.mul_(INF if bad else 1.0)\n"
        "optimizer.register_step_pre_hook(reduce)",
        "optimizer.zero_grad(); loss_of(y.repeat(1, 2) if bad else x, y).backward(); optimizer.step()",
    ),
    "all_reduce in a subclass's step": (
        "class Reduced(Adam):\n    def step(self, closure=None):\n"
        "        for p in params: p.grad.mul_(INF if bad else 1.0)\n        return super().step(closure)\n"
        "optimizer = Reduced(params, lr=0.01)",
        "optimizer.zero_grad(); loss_of(y.repeat(1, 2) if bad else x, y).backward(); optimizer.step()",
    ),
    "clipped, and read by two optimizers": (
        "optimizer = SGD(params, lr=0.01); second = Adam(params, lr=0.01)",
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "for p in params: p.grad.nan_to_num_(0.0, 0.5, -0.5)\noptimizer.step(); second.step()",
    ),
    "stepped in backward": (
        "own = {p: SGD([p], lr=0.05) for p in params}\n"
        "def now(p):\n    own[p].step(); own[p].zero_grad()\n"
        "for p in params: p.register_post_accumulate_grad_hook(now)",
        "loss_of(x, y).backward()",
    ),
    "four gradients summed by hand": (
        "",
        "total = [torch.zeros_like(p) for p in params]\nfor k in range(4):\n"
        "    optimizer.zero_grad(set_to_none=False); loss_of(x[2 * k : 2 * k + 2], y[2 * k : 2 * k + 2]).backward()\n"
        "    total = [a + p.grad / 4 for a, p in zip(total, params)]\n"
        "optimizer.zero_grad(set_to_none=False)\nfor p, g in zip(params, total): p.grad.copy_(g)\noptimizer.step()",
    ),
    "gradients of another model": (
        "other = net()",
        "other.load_state_dict(model.state_dict()); other.zero_grad(); loss_of(x, y, other).backward()\n"
        "put([p.grad.clone() for p in other.parameters()]); optimizer.step()",
    ),
    "sparse": (
        "table = nn.Embedding(16, 4, sparse=True); params = [table.weight]\n"
        "optimizer = torch.optim.SparseAdam(params, lr=0.01)",
        "optimizer.zero_grad(); mse_loss(model(table(torch.arange(8)) * x), y).backward()\n"
        "saved = table.weight.grad.clone()\noptimizer.zero_grad(); table.weight.grad = saved; optimizer.step()",
    ),
    "closure": (
        "",
        "def closure():\n    loss = loss_of(x, y); put(torch.autograd.grad(loss, params)); return loss\n"
        "optimizer.step(closure).detach()",
    ),
    "closure, bad at its third evaluation": (
        "optimizer = torch.optim.LBFGS(params, lr=0.01, max_iter=3)",
        "calls = 0\ndef closure():\n    global calls\n    calls += 1\n"
        "    loss = loss_of(y.repeat(1, 2) * (1e30 if bad and calls >= 3 else 1.0) if bad else x, y)\n"
        "    put(torch.autograd.grad(loss, params)); return loss\noptimizer.step(closure)",
    ),
}  # fmt: skip
EACH = {"clipped, and read by two optimizers": 2, "stepped in backward": 4}
POLICY = "fp16,loss_scale=128"


def script(way: str) -> str:
    before, step = WAYS[way]
    start = "optimizer = Adam(params, lr=0.01)\n"
    return f"{LOOP}{start}{before}\nfor bad, x, y in steps():\n{indent(step, '    ')}{END}"


def weights(ran: Any) -> list[float]:
    assert ran.status == 0, ran.err
    return [number for numbers in json.loads(ran.lines[-1]) for number in numbers]


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_batch_is_left_out_and_good_ones_count(way: str, launch: Any) -> None:
    source, each = script(way), EACH.get(way, 1)
    bad = launch(source, "gbg", policy=POLICY)
    good = launch(source, "gg", policy=POLICY)
    assert weights(bad) == weights(good)
    assert [update.skipped for update in bad.of("update")] == [False] * each + [True] * each + [False] * each
    assert f"{3 * each} updates due, {each} skipped" in bad.err
    assert f"{2 * each} updates, 0 skipped" in good.err
    expected, found = (torch.tensor(weights(ran)) for ran in (launch(source, "gg", policy="fp32"), good))
    assert (expected - found).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("way", ["autograd.grad assigned", "all_reduce by hand"])
def test_the_loss_scale_backs_off_once(way: str, launch: Any) -> None:
    """Also where Mezzo has tried smaller scales, none of which helped: the overflow was in forward."""
    ran = launch(script(way), "gbg", policy="fp16,loss_scale=dynamic(init=256)")
    assert weights(ran)
    updates = ran.of("update")
    assert [(u.skipped, u.loss_scale) for u in updates] == [(False, 256.0), (True, 256.0), (False, 128.0)]
    assert updates[1].reason == "a gradient was not finite"


def test_a_gradient_that_is_large_but_finite_is_stepped_with(launch: Any) -> None:
    """Its square overflows, and so does its norm."""
    step = "optimizer.zero_grad(); model(x).sum().backward(); params[0].grad.fill_(1e30); optimizer.step()"
    ran = launch(
        f"{LOOP}optimizer = Adam(params)\nfor bad, x, y in steps():\n    {step}\n{END}", "gg", policy=POLICY
    )
    assert [update.skipped for update in ran.of("update")] == [False, False], ran.err
