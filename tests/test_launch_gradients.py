"""fp16 scales without the script's knowing: what it sees are true gradients, and no step uses one that overflowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import Ran, launcher
from mezzo.pytorch.launch.backward import leaves_of

HEAD = """
import json, math, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
x = torch.randn(8, 6)
def show(*tensors):
    print(json.dumps([None if t is None else t.detach().double().flatten().tolist() for t in tensors]))
"""


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return launcher(tmp_path, capsys)


# Each prints tensors that must come out as in FP32, up to fp16's rounding. A forgotten scale is a factor of 65536.
TRUE = {
    "leaves of backward": """
        x.requires_grad_()
        model(x).square().mean().backward()
        show(x.grad, *[p.grad for p in model.parameters()])
    """,
    "hooks on leaves": """
        seen, inputs = [], []
        x.requires_grad_()
        x.register_hook(lambda g: inputs.append(g.clone()))
        model[0].weight.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for _ in range(2):  # the hooks come in the same order the second time
            model(x).square().mean().backward()
        show(*seen, *inputs, model[0].weight.grad)
    """,
    "hook that raises an error": """
        def refuse(g):
            raise ValueError("no")
        handle = x.requires_grad_().register_hook(refuse)
        try:
            model(x).sum().backward()
        except ValueError as error:
            print(json.dumps(str(error)))
        handle.remove()
        model.zero_grad()
        x.grad = None
        model(x).square().mean().backward()
        show(x.grad, model[2].bias.grad)
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
        show(slope, x.grad, *[p.grad for p in model.parameters()])
        (second,) = torch.autograd.grad(
            torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].sum(), x
        )
        show(second)
    """,
    "create_graph in backward": """
        import warnings
        warnings.simplefilter("ignore")
        x.requires_grad_()
        model(x).square().mean().backward(create_graph=True)
        first = x.grad
        x.grad = None
        first.square().sum().backward()
        show(first, x.grad)
    """,
    "functions of torch.func": """
        parameters = dict(model.named_parameters())
        def loss(p):
            return torch.func.functional_call(model, p, x).square().mean()
        show(*torch.func.grad(loss)(parameters).values())
        show(torch.autograd.functional.jacobian(lambda v: model(v).sum(0), x))
    """,
    "batched": """
        x.requires_grad_()
        out = model(x)
        show(*torch.autograd.grad(out, x, torch.eye(24).view(24, 8, 3), is_grads_batched=True))
    """,
    "accumulated, and part of the leaves": """
        x.requires_grad_()
        for part in (x[:4], x[4:]):
            model(part).square().mean().backward()
        out = model(x)
        torch.autograd.backward([out.mean(), out], [None, torch.full_like(out, 0.1)], inputs=[x, model[2].weight])
        show(x.grad, *[p.grad for p in model.parameters()])
    """,
    "sparse": """
        table = nn.Embedding(10, 6, sparse=True)
        model(table(torch.tensor([1, 1, 7]))).square().mean().backward()
        show(table.weight.grad.to_dense())
    """,
    "leaf alone": """
        weight = torch.ones((), requires_grad=True)
        weight.backward()
        (weight * 3).backward()
        show(weight.grad)
    """,
    "fp64": """
        model.double()
        model(x.double()).square().mean().backward()
        show(*[p.grad for p in model.parameters()])
    """,
    "reentrant inside": """
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
}


@pytest.mark.parametrize("row", TRUE)
def test_the_script_sees_true_gradients(launch: Any, row: str) -> None:
    from textwrap import dedent

    source = HEAD + dedent(TRUE[row])
    plain, ours = launch(source, policy="fp32"), launch(source, policy="fp16")
    assert plain.status == ours.status == 0, ours.err
    assert len(plain.lines) == len(ours.lines) >= 1
    if row not in ("leaf alone", "fp64"):
        assert plain.lines != ours.lines  # it did run in fp16
    for expected, found in zip(map(json.loads, plain.lines), map(json.loads, ours.lines)):
        if isinstance(expected, str) or isinstance(expected[0], bool):
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
    "no_grad": """loss.backward()
    with torch.no_grad():
        for p in weights:
            p -= 0.1 / {factor} * p.grad
            p.grad = None""",
    "zero_": """loss.backward()
    for p in weights:
        p.data.sub_(p.grad, alpha=0.1 / {factor})
        p.grad.zero_()""",
    "autograd.grad": """grads = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for p, g in zip(weights, grads):
            p.sub_(g, alpha=0.1 / {factor})""",
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
    assert "run again at a smaller one" in ours.err
    assert json.loads(ours.lines[0])[0][-1] < json.loads(ours.lines[0])[0][0] / 2


def test_an_adversarial_input_is_finite_and_the_models_step_is_taken(launch: Any) -> None:
    ran = launch(
        HEAD
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
delta = torch.zeros_like(x, requires_grad=True)
for step in range(3):
    (1e4 * model(x + delta).square().mean()).backward()
    assert delta.grad.isfinite().all()
    delta.data += 0.01 * delta.grad.sign()
    delta.grad.zero_()
    optimizer.zero_grad()
    model(x + delta.detach()).square().mean().backward()
    optimizer.step()
""",
        policy="fp16",
    )
    assert ran.status == 0, ran.err
    assert [u.moved for u in ran.of("update")] == [True] * 3


VETO = """
import warnings
class Own(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.data.mul_(1.0)  # crashes if gradients were hidden
        return super().step(closure)
optimizer = {optimizer}(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
before = [p.detach().clone() for p in model.parameters()]
for step in range({steps}):
    {clear}
    loss = (2.0**20 if step == 0 else 1.0) * model(x).square().mean()
    loss.backward()
    {edit}
    optimizer.step()
    scheduler.step()
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    print(json.dumps([moved, len(optimizer.state), all(p.isfinite().all().item() for p in model.parameters())]))
"""
CLEARS = {
    "zero_grad": "optimizer.zero_grad()",
    "zero_grad in place": "optimizer.zero_grad(set_to_none=False)",
    "model": "model.zero_grad()",
    "by hand": "[p.grad.zero_() for p in model.parameters() if p.grad is not None]",
    "data by hand": "[p.grad.data.zero_() for p in model.parameters() if p.grad is not None]",
    "none": "for p in model.parameters(): p.grad = None",
}
EDITS = {
    "nothing": "pass",
    "clip by value": "nn.utils.clip_grad_value_(model.parameters(), 0.1)",
    "clip by norm": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    "nan_to_num": "[p.grad.nan_to_num_(0.0, 0.0, 0.0) for p in model.parameters()]",
}


@pytest.mark.parametrize(
    ("clear", "edit", "optimizer"),
    [
        *((clear, "nothing", "torch.optim.Adam") for clear in CLEARS),
        *(("zero_grad", edit, "torch.optim.Adam") for edit in EDITS),
        ("zero_grad", "nothing", "Own"),
        ("zero_grad in place", "clip by value", "Own"),
    ],
)
def test_an_overflowing_step_is_not_taken_and_the_next_one_is(
    launch: Any, clear: str, edit: str, optimizer: str
) -> None:
    source = VETO.format(optimizer=optimizer, clear=CLEARS[clear], edit=EDITS[edit], steps=3)
    ran = launch(HEAD + source, policy="fp16")  # warnings are errors here, and a scheduler's would be one
    assert ran.status == 0, ran.err
    assert [json.loads(line)[0] for line in ran.lines] == [False, True, True]
    assert [json.loads(line)[2] for line in ran.lines] == [True] * 3
    assert json.loads(ran.lines[0])[1] == 0
    updates = ran.of("update")
    assert [(u.moved, u.skipped, u.loss_scale) for u in updates] == [
        (False, True, 65536.0),
        (True, False, 32768.0),
        (True, False, 32768.0),
    ]
    assert updates[0].reason == "a gradient was not finite"
    assert "3 optimizer steps, 1 skipped" in ran.err
    assert "loss scale 2^15 at the end" in ran.err


def test_accumulation_one_overflow_vetoes_the_window_and_only_that(launch: Any) -> None:
    ran = launch(
        HEAD
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in range(3):
    for part in range(3):
        ((2.0**20 if (window, part) == (0, 1) else 1.0) * model(x).square().mean()).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
""",
        policy="fp16",
    )
    assert [u.moved for u in ran.of("update")] == [False, True, True]
    assert len(ran.of("loss")) == 9


def test_gradients_that_are_not_cleared_stay_vetoed(launch: Any) -> None:
    """The script goes on adding to the gradient that overflowed: it is as infinite at the next step."""
    source = VETO.format(optimizer="torch.optim.Adam", clear="pass", edit="pass", steps=3)
    ran = launch(HEAD + source, policy="fp16")
    assert [u.moved for u in ran.of("update")] == [False, False, False]


def test_an_overflow_vetoes_only_the_optimizer_whose_parameters_got_it(launch: Any) -> None:
    ran = launch(
        HEAD
        + """
other = nn.Linear(3, 1)
optimizers = [torch.optim.Adam(m.parameters()) for m in (model, other)]
for step in range(2):
    for o in optimizers: o.zero_grad()
    features = model(x)
    other(features.detach()).square().mean().backward()
    ((2.0**20 if step == 0 else 1.0) * features.square().mean()).backward()
    for o in optimizers: o.step()
""",
        policy="fp16",
    )
    assert [(u.optimizer, u.moved) for u in ran.of("update")] == [(0, False), (1, True), (0, True), (1, True)]


def test_a_vetoed_step_leaves_batch_norm_as_it_was(launch: Any) -> None:
    ran = launch(
        """
import json, torch
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
nn.init.ones_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    images = torch.linspace(-1, 1, 16).view(4, 1, 2, 2) * (1e6 if step == 0 else 1.0)  # over fp16's largest number
    model(images).square().mean().backward()
    optimizer.step()
    norm = model[1]
    print(json.dumps([norm.running_mean.tolist(), norm.running_var.tolist(), norm.num_batches_tracked.item()]))
""",
        policy="fp16",
    )
    assert ran.status == 0, ran.err
    assert [u.moved for u in ran.of("update")] == [False, True, True]
    assert json.loads(ran.lines[0]) == [[0.0, 0.0], [1.0, 1.0], 0]
    assert json.loads(ran.lines[2])[2] == 2


def test_a_closure_is_run_again_until_its_gradients_are_finite(launch: Any) -> None:
    ran = launch(
        HEAD
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-21)
calls = []
def closure():
    optimizer.zero_grad()
    loss = 2.0**20 * model(x).square().mean()
    loss.backward()
    calls.append(all(p.grad.isfinite().all().item() for p in model.parameters()))
    return loss
print(torch.is_tensor(optimizer.step(closure)))
print(calls)
""",
        policy="fp16",
    )
    assert ran.status == 0, ran.err
    calls = json.loads(ran.lines[1].lower())
    assert calls[-1] is True
    assert calls[:-1] == [False] * (len(calls) - 1)
    assert len(calls) > 3
    (update,) = ran.of("update")
    assert update.moved
    assert update.loss_scale == 65536.0 / 2 ** (len(calls) - 1)
    assert f"run again {len(calls) - 1} times" in update.reason


def test_a_loss_that_is_not_finite_skips_and_ends_in_an_error_that_says_so(launch: Any) -> None:
    source = HEAD + (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n    optimizer.zero_grad()\n"
        "    (model(x).sum() * float('nan')).backward()\n    optimizer.step()\n"
    )
    ran = launch(source, policy="fp16,loss_scale=dynamic(init=2,floor=1)")
    assert ran.status == 1
    assert "LossScaleCollapseError" in ran.err
    assert "optimizer.step()" in ran.err
    assert not any(u.moved for u in ran.of("update"))


def test_leaves_of_a_graph() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    shared = a * b
    root = (shared + shared.sin()).sum() + (a.detach() * b).sum()
    assert {id(t) for t in leaves_of([root])} == {id(a), id(b)}
    assert len(leaves_of([root, root])) == 2
    assert leaves_of([torch.ones(2)]) == []
    edge = torch.autograd.graph.get_gradient_edge(root)
    assert len(leaves_of([edge])) == 2
