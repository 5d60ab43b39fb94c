"""fp16 under `mezzo run`: gradients that reach `.grad` in any way, with an overflow in one batch and without.

Each row is a training loop. With a bad batch its weights end where they end without that batch, to the bit, and the
step is counted as skipped. Without one they are those of plain PyTorch, up to fp16's rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from textwrap import indent
from typing import Any

import pytest
import torch

from run_scripts import Ran

HEAD = """
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
def project(a, b):  # PCGrad
    dot = sum((p * q).sum() for p, q in zip(a, b))
    return [p - torch.where(dot < 0, dot / sum((q * q).sum() for q in b), 0) * q for p, q in zip(a, b)]
def tasks(x, y):  # the gradients of two losses, the second one good
    found = []
    for loss in (loss_of(x, y), loss_of(y.repeat(1, 2), x[:, :2].clamp(-1, 1))):
        optimizer.zero_grad()
        loss.backward()
        found.append([p.grad.clone() for p in params])
    optimizer.zero_grad()
    return found
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
    "two backwards": (
        "",
        "optimizer.zero_grad(); loss_of(x[:4], y[:4]).backward(); loss_of(y.repeat(1, 2), y).backward()\n"
        "optimizer.step()",
    ),
    "saved, cleared, put back": (
        "",
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "saved = [p.grad.clone() for p in params]\noptimizer.zero_grad(); put(saved); optimizer.step()",
    ),
    "PCGrad": (
        "",
        "a, b = tasks(x, y); put([p + q for p, q in zip(project(a, b), project(b, a))]); optimizer.step()",
    ),
    "autograd.grad assigned": ("", "put(torch.autograd.grad(loss_of(x, y), params)); optimizer.step()"),
    "views of one flat tensor": (
        "flat = torch.zeros(sum(p.numel() for p in params))\nat = 0\n"
        "for p in params: p.grad = flat[at : at + p.numel()].view_as(p); at += p.numel()",
        "flat.copy_(torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(x, y), params)]))\n"
        "optimizer.step(); flat.zero_()",
    ),
    "gradients with a graph": (
        "",
        "put(torch.autograd.grad(loss_of(x, y), params, create_graph=True)); optimizer.step()",
    ),
    "MAML": (
        "",
        "optimizer.zero_grad(); names = dict(model.named_parameters())\n"
        "inner = mse_loss(torch.func.functional_call(model, names, (x[:4],)), y[:4])\n"
        "slopes = torch.autograd.grad(inner, list(names.values()), create_graph=True)\n"
        "fast = {n: p - 0.1 * g for (n, p), g in zip(names.items(), slopes)}\n"
        "mse_loss(torch.func.functional_call(model, fast, (x[4:],)), y[4:]).backward(); optimizer.step()",
    ),
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
    "one element of the last parameter": (
        "",
        "optimizer.zero_grad(); loss_of(y.repeat(1, 2) if bad else x, y).backward()\n"
        "params[-1].grad[-1] *= -INF if bad else 1.0\noptimizer.step()",
    ),
    "nan_to_num_": (
        "",
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "for p in params: p.grad.nan_to_num_(0.0, 1.0, -1.0)\noptimizer.step()",
    ),
    "clamped by a hook": (
        "for p in params: p.register_hook(lambda g: g.nan_to_num(0.0).clamp(-1, 1))",
        "optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step()",
    ),
    "clipped, and read by two optimizers": (
        "optimizer = SGD(params, lr=0.01); second = Adam(params, lr=0.01)",
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "for p in params: p.grad.nan_to_num_(0.0, 0.5, -0.5)\noptimizer.step(); second.step()",
    ),
    "two optimizers, a part each": (
        "optimizer = SGD(params[:2], lr=0.01); second = Adam(params[2:], lr=0.01)",
        "model.zero_grad(); put(torch.autograd.grad(loss_of(x, y), params)); optimizer.step(); second.step()",
    ),
    "stepped in backward": (
        "own = {p: SGD([p], lr=0.05) for p in params}\n"
        "def now(p):\n    own[p].step(); own[p].zero_grad()\n"
        "for p in params: p.register_post_accumulate_grad_hook(now)",
        "loss_of(x, y).backward()",
    ),
    "SAM": (
        "",
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "norm = torch.stack([p.grad.norm() for p in params]).norm()\n"
        "before = [p.detach().clone() for p in params]\n"
        "with torch.no_grad():\n    for p in params: p += 0.05 * p.grad / norm\n"
        "optimizer.zero_grad(); loss_of(x, y).backward()\n"
        "with torch.no_grad():\n    for p, b in zip(params, before): p.copy_(b)\noptimizer.step()",
    ),
    "fused": (
        "optimizer = torch.optim.AdamW(params, lr=0.01, fused=True)",
        "put(torch.autograd.grad(loss_of(x, y), params)); optimizer.step()",
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
    "closure of a finite loss": (
        "",
        "def closure():\n    loss = loss_of(y.repeat(1, 2) if bad else x, y)\n"
        "    put(torch.autograd.grad(loss, params)); params[0].grad.mul_(INF if bad else 1.0)\n"
        "    return loss\noptimizer.step(closure)",
    ),
    "closure, bad at its third evaluation": (
        "optimizer = torch.optim.LBFGS(params, lr=0.01, max_iter=3)",
        "calls = 0\ndef closure():\n    global calls\n    calls += 1\n"
        "    loss = loss_of(y.repeat(1, 2) * (1e30 if bad and calls >= 3 else 1.0) if bad else x, y)\n"
        "    put(torch.autograd.grad(loss, params)); return loss\noptimizer.step(closure)",
    ),
}  # fmt: skip
OPTIMIZERS_A_STEP = {
    "clipped, and read by two optimizers": 2,
    "two optimizers, a part each": 2,
    "stepped in backward": 4,
}
POLICY = "fp16,loss_scale=128"

Launch = Callable[..., Ran]


def script(way: str) -> str:
    before, step = WAYS[way]
    start = "optimizer = Adam(params, lr=0.01)\n"
    return f"{HEAD}{start}{before}\nfor bad, x, y in steps():\n{indent(step, '    ')}{END}"


def weights(ran: Ran) -> list[float]:
    assert ran.status == 0, ran.err
    return [number for numbers in json.loads(ran.lines[-1]) for number in numbers]


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_batch_is_left_out_and_good_ones_count(way: str, launch: Launch) -> None:
    source, each = script(way), OPTIMIZERS_A_STEP.get(way, 1)
    bad = launch(source, "gbg", policy=POLICY)
    good = launch(source, "gg", policy=POLICY)
    assert weights(bad) == weights(good)
    assert [update.skipped for update in bad.of("update")] == [False] * each + [True] * each + [False] * each
    assert f"{3 * each} optimizer steps, {each} skipped" in bad.err
    assert f"{2 * each} optimizer steps, 0 skipped" in good.err
    expected, found = (torch.tensor(weights(ran)) for ran in (launch(source, "gg", policy="fp32"), good))
    assert (expected - found).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("way", ["PCGrad", "autograd.grad assigned", "all_reduce by hand"])
def test_the_loss_scale_backs_off_once(way: str, launch: Launch) -> None:
    """Also where Mezzo has tried smaller scales, none of which helped: the overflow was in forward."""
    ran = launch(script(way), "gbg", policy="fp16,loss_scale=dynamic(init=256)")
    assert weights(ran)
    assert [(u.skipped, u.loss_scale) for u in ran.of("update")] == [
        (False, 256.0),
        (True, 256.0),
        (False, 128.0),
    ]


def test_a_gradient_that_is_large_but_finite_is_stepped_with(launch: Launch) -> None:
    """Its square overflows, and so does its norm."""
    step = "optimizer.zero_grad(); model(x).sum().backward(); params[0].grad.fill_(1e30); optimizer.step()"
    ran = launch(
        f"{HEAD}optimizer = Adam(params)\nfor bad, x, y in steps():\n    {step}\n{END}", "gg", policy=POLICY
    )
    assert [update.skipped for update in ran.of("update")] == [False, False], ran.err


def test_without_a_loss_scale_nothing_is_looked_at(launch: Launch) -> None:
    ran: Any = launch(script("all_reduce by hand"), "gb", policy="bf16")
    assert [update.skipped for update in ran.of("update")] == [False, False]
