"""A skipped step leaves no trace: a run with bad batches ends bit for bit where the run without them does.

In a script that `mezzo run` runs, a scheduler and an average of the weights are left out: the script isn't told of a
skip, since it must stay unchanged.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mezzo
from bad_steps import CLOSURES, OPTIMIZERS, RUNS, Make, batches, is_finite, network, same
from mezzo.core.masters import MASTERS
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from moving_buffers import NORMS, OWN
from run_scripts import Ran
from training_steps import nobody_owns_anything, who_decides  # noqa: F401
from two_networks import LAST

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

SCALE = 128.0


def trained(
    run: str, make: Make, model: nn.Module, precision: str = "fp16", *, follows: bool = True, **arguments: Any
) -> dict[str, Any]:
    """Everything after a run; `follows`: with a scheduler and an average, so that the host decides."""
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ema = AveragedModel(copy.deepcopy(model), use_buffers=True) if follows else None
    if follows:
        arguments |= {"scheduler": scheduler, "ema": ema}
    mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=SCALE, **arguments)
    results = []
    for x, y in batches(run):
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        results.append(mp.step(loss))
    assert [result.stepped for result in results] == [event == "g" for event in run]
    mp.close()
    modules = model.named_modules()
    return {
        "model": model.state_dict(),
        "buffers": {f"{path}.{name}": b for path, m in modules for name, b in m._buffers.items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "ema": None if ema is None else ema.state_dict(),
        "masters": mezzo.master_state_dict(model, optimizer),
    }


def without_bad(run: str) -> str:
    return run.replace("b", "")


def holds(run: str, make: Make, kind: str, precision: str = "fp16", **arguments: Any) -> None:
    ours = trained(run, make, network(kind), precision, **arguments)
    clean = trained(without_bad(run), make, network(kind), precision, **arguments)
    for name in clean:
        assert same(ours[name], clean[name]), name
    assert is_finite(ours)


def test_every_optimizer_of_torch_has_a_row() -> None:
    known = {name.split()[0] for name in (*OPTIMIZERS, *CLOSURES)}
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    assert kinds - {"Optimizer"} == known


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(name: str, run: str) -> None:
    holds(run, OPTIMIZERS[name], name)


# A step that waits for nobody: without scheduler and average, the kernel itself must hold still.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("fused")])
def test_torch_optimizers_whose_kernel_skips(name: str, run: str, decides: str) -> None:
    holds(run, OPTIMIZERS[name], name, follows=False)


OURS: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "AdamW": (lambda p: AdamW(p, lr=0.05), "fp16", {}),
    "SGD": (lambda p: SGD(p, lr=0.1), "fp16", {}),
    "SGD momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True), "fp16", {}),
    "AdamW bf16 state": (lambda p: AdamW(p, lr=0.05, state="bf16"), "bf16", {}),
    "AdamW int8 state": (lambda p: AdamW(p, lr=0.05, state="int8"), "bf16", {}),
    "split": (lambda p: torch.optim.AdamW(p, lr=0.05), "bf16", {"masters": "split"}),
    "split8": (lambda p: torch.optim.AdamW(p, lr=0.05), "bf16", {"masters": "split8"}),
    "split8 int8": (lambda p: torch.optim.Adam(p, lr=0.05), "bf16", {"masters": "split8", "state": "int8"}),
    "none": (lambda p: torch.optim.AdamW(p, lr=0.05), "bf16", {"masters": "none"}),
    "masters fp16": (lambda p: torch.optim.AdamW(p, lr=0.05), "fp16", {"masters": "fp32"}),
    "with masters": (lambda p: torch.optim.RMSprop(p, lr=0.01), "fp16", {"masters": "fp32"}),
    "clipped": (lambda p: torch.optim.AdamW(p, lr=0.05), "fp16", {"clip_value": 0.01, "clip_norm": 0.1}),
    "one pass, clipped": (lambda p: AdamW(p, lr=0.05), "fp16", {"clip_norm": 0.1}),
    "release": (lambda p: AdamW(p, lr=0.05), "fp16", {"release_gradients": True}),
    "release split8": (
        lambda p: torch.optim.AdamW(p, lr=0.05),
        "bf16",
        {"release_gradients": True, "masters": "split8"},
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("row", OURS)
def test_mezzo_s_optimizers_and_every_way_to_store_weights(row: str, run: str, decides: str) -> None:
    make, precision, arguments = OURS[row]
    holds(run, make, row, precision, follows=decides == "host", **arguments)
    assert {each.get("masters", "auto") for _, _, each in OURS.values()} == {"auto", *MASTERS}


# With mezzo.GradScaler. It is handed optimizers, not models, so it can put back no buffer: no BatchNorm here.


def scaled(run: str, make: Make, kind: str) -> dict[str, Any]:
    model = network(kind, statistics=False)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = mezzo.GradScaler(init_scale=SCALE, hysteresis=10**6)
    for (x, y), event in zip(batches(run), run):

        def closure() -> Any:
            optimizer.zero_grad()
            with mezzo.autocast("fp16"):
                loss = nn.functional.cross_entropy(model(x), y)  # noqa: B023
            scaler.scale(loss).backward()
            return loss

        if kind in CLOSURES:
            scaler.step(optimizer, closure)
        else:
            closure()
            scaler.step(optimizer)
        scaler.update()
        assert scaler.was_skipped(optimizer) == (event == "b")
        if not scaler.was_skipped(optimizer):
            scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


SCALED: dict[str, Make] = {
    **OPTIMIZERS,
    **CLOSURES,
    **{f"Mezzo {row}": OURS[row][0] for row in ("AdamW", "SGD momentum", "AdamW int8 state")},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", SCALED)
def test_grad_scaler(name: str, run: str) -> None:
    ours, clean = scaled(run, SCALED[name], name), scaled(without_bad(run), SCALED[name], name)
    for part in clean:
        assert same(ours[part], clean[part]), part
    assert is_finite(ours)


def test_a_window_of_which_the_last_loss_is_bad_is_skipped_whole() -> None:
    def end(windows: str) -> dict[str, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        mp = mezzo.MixedPrecision(model, optimizer, "fp16", accumulate=3, loss_scale=SCALE)
        (good_x, _), *_ = batches("g")
        for x, y in batches(windows):
            for each in (good_x, good_x, x):
                with mp.autocast():
                    loss = nn.functional.cross_entropy(model(each), y)
                mp.step(loss)
        mp.close()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    for run in RUNS:
        assert same(end(run), end(without_bad(run))), run


@pytest.mark.parametrize("run", ["bg", "ggggbgbbg"])
@pytest.mark.parametrize("name", [*NORMS, *OWN])
def test_every_kind_of_buffer(name: str, run: str, decides: str) -> None:
    ends = []
    for each in (run, without_bad(run)):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), {**NORMS, **OWN}[name](), nn.Linear(4, 2))
        ends.append(trained(each, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), model, follows=False))
    for part in ends[0]:
        assert same(ends[0][part], ends[1][part]), part


# A script under `mezzo run`.

SCRIPT = """
import sys
from torch import nn
from bad_steps import CLOSURES, OPTIMIZERS, batches, network
from two_networks import LAST
kind, run = sys.argv[1:]
model = network(kind)
optimizer = {**OPTIMIZERS, **CLOSURES}[kind](model.parameters())
for x, y in batches(run):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    if kind in CLOSURES:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
LAST.update(model=model.state_dict(), optimizer=optimizer.state_dict())
"""
STORED = ("bf16,masters=split", "bf16,masters=split8,state=int8")


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "fp16") for kind in (*OPTIMIZERS, *CLOSURES)), *(("AdamW fused", policy) for policy in STORED)],
)
def test_under_mezzo_run(kind: str, policy: str, launch: Callable[..., Ran]) -> None:
    def ended(run: str) -> dict[str, Any]:
        ran = launch(SCRIPT, kind, run, policy=f"{policy},loss_scale=128")
        assert ran.status == 0, ran.err
        assert [update.moved for update in ran.of("update")] == [event == "g" for event in run]
        return dict(LAST)

    ours = ended("bgbbgbg")
    assert is_finite(ours)
    assert same(ours, ended("ggg"))
