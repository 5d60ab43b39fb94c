"""Cases of several gloo ranks: optimizers over shards beside those over whole parameters, and their checkpoints.

A further argument is the folder for checkpoints: two ranks write them, and any number of ranks loads them.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import training_cases
from cases import RANK, WORLD, compare, copied, full, run, same
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mezzo
from mezzo.optim import SGD, Adam, AdamW, Muon, with_masters
from mezzo.pytorch.training.release import GradientRelease

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FOLDER = Path(sys.argv[4])

# Even, uneven, of one element per row, with no row for the second rank, and of rows that are whole groups of 64.
SHAPES = [(8, 10), (7, 3), (5,), (1, 64), (7, 128), (3, 4, 4, 4), (2,)]


def random(shape: Any, *seeds: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seeds) % (1 << 31))
    return torch.randn(shape, generator=generator)


def spread(whole: Tensor, mesh: Any, placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def give_gradients(params: Any, step: int, scale: float = 1.0) -> None:
    for index, param in enumerate(params):
        grad = (scale * random(param.shape, 1, step, index)).to(param.dtype)
        param.grad = spread(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad


def trained_further(params: Any, optimizer: Any, *steps: int, scale: float = 1.0, **how: Any) -> None:
    params = list(params)
    for step in steps:
        give_gradients(params, step, scale)
        optimizer.step(**how)


def pair(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Any:
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = [nn.Parameter(random(shape, 2, i).to(dtype)) for i, shape in enumerate(shapes)]
    return whole, [nn.Parameter(spread(p.detach(), mesh, [Shard(0)])) for p in whole]


def same_bits(make: Callable[..., Any], dtype: torch.dtype, state: str, masters: str) -> None:
    # 8-bit states exist over shards where a row is whole groups, and Muon's are of matrices.
    shapes = [shape for shape in SHAPES if state != "int8" or math.prod(shape[1:]) % 64 == 0]
    shapes = [shape for shape in shapes if make is not Muon or len(shape) == 2]
    whole, shards = pair(dtype, shapes)
    one, other = (make(params, state=state, masters=masters) for params in (whole, shards))
    for step in range(3):
        trained_further(whole, one, step)
        trained_further(shards, other, step, found_inf=torch.zeros(()))
    other.step(found_inf=torch.ones(()))
    for index, (p, q) in enumerate(zip(whole, shards)):
        same(q, p, f"parameter {index}")
        same(other.master(q), one.master(p), f"master {index}")
        mine, wanted = other.state[q], one.state[p]
        assert mine.keys() == wanted.keys()
        for key, value in wanted.items():
            if key.endswith("_scale"):
                value = value.view(full(mine[key]).shape)
            same(mine[key], value, f"{key} {index}")
            assert key == "step" or mine[key].placements == q.placements
        fresh = random(q.shape, 3, index)
        other.set_master(q, spread(fresh, q.device_mesh, q.placements))
        one.set_master(p, fresh)
        same(other.master(q), one.master(p), f"set master {index}")
    compare_for_torch(one, other)


def compare_for_torch(one: Any, other: Any) -> None:
    whole, shards = one.torch_state_dict()["state"], other.torch_state_dict()["state"]
    for key, entry in whole.items():
        for name, value in entry.items():
            same(shards[key][name], value, f"{name} {key} for torch")


def any_optimizer(make: Callable[..., Any], dtype: torch.dtype) -> None:
    whole, shards = pair(dtype)
    one, other = with_masters(make(whole)), with_masters(make(shards))
    for step in range(3):
        one.grad_scale = other.grad_scale = torch.tensor(8.0)
        trained_further(whole, one, step, scale=8.0)
        trained_further(shards, other, step, scale=8.0)
    other.found_inf = torch.ones(())
    other.step()
    for index, (p, q) in enumerate(zip(whole, shards)):
        same(q, p, f"parameter {index}")
        same(other.master(q), one.master(p), f"master {index}")
        with torch.no_grad():
            p.mul_(2.0)
            q.mul_(2.0)
        same(other.master(q), one.master(p), f"master {index} of an edited weight")
        other.set_master(q, torch.ones(p.shape))
        same(q, torch.ones_like(p), f"set master {index}")


def meshes() -> None:
    """Several meshes and placements, and a plain parameter, in one optimizer."""
    flat, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    how = [(flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()])]
    how += [(grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Replicate()])]
    whole = [nn.Parameter(random((6, 256), 4, i)) for i in range(6)]
    shards: list[nn.Parameter] = [nn.Parameter(spread(p.detach(), *each)) for p, each in zip(whole, how)]
    shards.append(nn.Parameter(whole[5].detach().clone()))
    for state in ("fp32", "int8"):
        one, other = AdamW(whole, lr=0.01, state=state), AdamW(shards, lr=0.01, state=state)
        for step in range(2):
            trained_further(whole, one, step)
            trained_further(shards, other, step)
        for index, (p, q) in enumerate(zip(whole, shards)):
            if state == "fp32" or index != 1:  # noise is numbered along rows of the whole parameter
                same(q, p, f"{state}, parameter {index}")
            int8 = torch.bfloat16 if index == 1 else torch.uint8  # index 1 is cut through its rows
            assert other.state[q]["exp_avg"].dtype is (int8 if state == "int8" else torch.float32)


def model(seed: int, dtype: str = "fp32", *, shards: bool = True, **how: Any) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 12), nn.LayerNorm(12), nn.Linear(12, 3, bias=False))
    if dtype == "fp32, columns":
        how["shard_placement_fn"] = lambda param: Shard(param.dim() - 1)
    elif dtype != "fp32":
        mezzo.lower_weights(net, dtype)
    if not shards:
        return net
    fully_shard(net[1], **how)  # FSDP2 wants one dtype per group
    return fully_shard(net, **how)


def trained(dtype: str, **how: Any) -> None:
    """Real gradients of FSDP2; the same gradients in a whole copy."""
    net = model(0, dtype, **how)
    whole = [nn.Parameter(full(p).clone()) for p in net.parameters()]
    masters = "split" if dtype == "bf16" else "fp32"
    one = AdamW(whole, lr=0.01, state="bf16", masters=masters)
    other = AdamW(net.parameters(), lr=0.01, state="bf16", masters=masters)
    for step in range(3):
        other.zero_grad()
        net(random((4, 64), 5, step, RANK)).square().mean().backward()
        for p, q in zip(whole, net.parameters()):
            p.grad = full(q.grad)
        one.step()
        other.step()
    for index, (p, q) in enumerate(zip(whole, net.parameters())):
        same(q, p, f"parameter {index}")
        assert dtype == "fp32" or p.dim() == 1 or "remainder" in other.state[q]


def released(make: Callable[[Any], Any], **how: Any) -> None:
    """A step within FSDP2's backward, and after it."""
    results = []
    for release, clip in ((True, True), (False, True), (False, False)):
        net = model(0)
        params = list(net.parameters())
        optimizer = make(params)
        for step in range(3):
            loss = net(random((4, 64), 5, step, RANK)).square().mean()
            if release:
                GradientRelease(optimizer).backward(loss, None, params, **how)
                assert all(p.grad is None for p in params)
                continue
            loss.backward()
            if how and clip:
                nn.utils.clip_grad_norm_(params, how["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
        results.append([full(p) for p in params])
    mine, wanted, unclipped = results
    for index, (one, other) in enumerate(zip(mine, wanted)):
        if how:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            assert not torch.allclose(one, unclipped[index], rtol=1e-4), f"parameter {index} was not clipped"
        else:
            same(one, other, f"parameter {index}")


def groups_of(params: Any) -> list[dict[str, Any]]:
    params = list(params)
    return [
        {"params": [p for p in params if (p.dim() == 2) is use], "use_muon": use} for use in (True, False)
    ]


OPTIMIZERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int8, split": ("bf16", lambda params: AdamW(params, lr=0.01, state="int8", masters="split")),
    "bf16, split8": ("bf16", lambda params: AdamW(params, lr=0.01, state="bf16", masters="split8")),
    "int8": ("fp32", lambda params: Adam(params, lr=0.01, weight_decay=0.1, state="int8")),
    # 64 columns, of which a rank holds a whole group on one rank only.
    "columns, int8": ("fp32, columns", lambda params: AdamW(params, lr=0.01, state="int8")),
    "momentum": (
        "fp32",
        lambda params: SGD(params, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1, state="bf16"),
    ),
    "Muon": ("bf16", lambda params: Muon(groups_of(params), masters="split", state="bf16")),
    "with_masters": ("bf16", lambda params: with_masters(torch.optim.NAdam(params, lr=0.01))),
    "with_masters, SGD": (
        "bf16",
        lambda params: with_masters(torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1)),
    ),
}


def initialized(name: str) -> None:
    """What DCP does to an optimizer without a state leaves no trace."""
    dtype, make = OPTIMIZERS[name]
    nets = model(0, dtype), model(0, dtype)
    optimizers = [make(net.parameters()) for net in nets]
    before = [full(p).clone() for p in nets[0].parameters()]
    state = get_state_dict(nets[0], optimizers[0])[1]["state"]
    assert all(float(entry.get("step", 0)) == 0 for entry in state.values()), "a step was counted"
    for p, was in zip(nets[0].parameters(), before):
        same(p, was, "a weight")
    for step in range(2):
        for net, optimizer in zip(nets, optimizers):
            trained_further(net.parameters(), optimizer, step)
    compare(snapshot(nets[0], optimizers[0]), snapshot(nets[1], optimizers[1]))


def snapshot(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    params = list(net.parameters())
    return copied({"model": params, "optimizer": [optimizer.state[p] for p in params]})


def save(name: str) -> None:
    dtype, make = OPTIMIZERS[name]
    net = model(0, dtype)
    optimizer = make(net.parameters())
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**10)
    trained_further(net.parameters(), optimizer, 0, 1)
    weights, state = get_state_dict(net, optimizer)
    dcp.save(
        {"model": weights, "optimizer": state, "scaler": scaler.state_dict()}, checkpoint_id=FOLDER / name
    )
    flat = get_optimizer_state_dict(net, optimizer, options=FLAT)
    plain = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "flat": flat}
    dcp.save(plain, checkpoint_id=FOLDER / f"{name}, plain")
    saved = snapshot(net, optimizer)
    trained_further(net.parameters(), optimizer, 2, 3)
    after = snapshot(net, optimizer)
    if RANK == 0:
        torch.save({"saved": saved, "after": after}, FOLDER / f"{name}.pt")
        dcp_to_torch_save(FOLDER / name, FOLDER / f"{name}, whole.pt")


def load(name: str, how: str) -> None:
    dtype, make = OPTIMIZERS[name]
    net = model(1, dtype, shards=how != "unsharded")
    optimizer = make(net.parameters())
    wanted = torch.load(FOLDER / f"{name}.pt", weights_only=False)
    if how in ("whole", "unsharded"):
        held = torch.load(FOLDER / f"{name}, whole.pt", weights_only=False)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(net, held["model"], options=options)
        optimizer.load_state_dict(held["optimizer"])
        if how == "unsharded" and name.startswith("int8"):
            one, other = optimizer.state[net[0].weight], wanted["saved"]["optimizer"][0]
            same(one["exp_avg"], other["exp_avg"], "codes")
            same(one["exp_avg_scale"], other["exp_avg_scale"].view(-1), "scales")
            return  # other parameters' states are rounded to 8 bits now
    elif how == "plain":
        plain: dict[str, Any] = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(plain, checkpoint_id=FOLDER / f"{name}, plain")
        net.load_state_dict(plain["model"])
        optimizer.load_state_dict(plain["optimizer"])
    elif how == "flattened":
        plain = {"model": net.state_dict(), "flat": get_optimizer_state_dict(net, optimizer, options=FLAT)}
        dcp.load(plain, checkpoint_id=FOLDER / f"{name}, plain")
        net.load_state_dict(plain["model"])
        set_optimizer_state_dict(net, optimizer, plain["flat"], options=FLAT)
    else:
        scaler = mezzo.GradScaler("cpu")
        weights, state = get_state_dict(net, optimizer)
        held = {"model": weights, "optimizer": state, "scaler": scaler.state_dict()}
        dcp.load(held, checkpoint_id=FOLDER / name)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=held["optimizer"])
        scaler.load_state_dict(held["scaler"])
        assert scaler.get_scale() == 2.0**10
    compare(snapshot(net, optimizer), wanted["saved"])
    if name.startswith("columns"):
        return  # noise is numbered along rows of the whole parameter
    trained_further(net.parameters(), optimizer, 2, 3)
    compare(snapshot(net, optimizer), wanted["after"])


def from_whole() -> None:
    """A state of whole parameters, whose 8-bit states bf16 holds too."""
    whole, shards = pair()
    one, other = AdamW(whole, state="int8"), AdamW(shards, state="int8")
    trained_further(whole, one, 0, 1)
    other.load_state_dict(one.state_dict())
    compare_for_torch(one, other)


def from_whole_checkpoint() -> None:
    """The 8-bit codes of whole parameters are not copied into the bf16 states of shards, of any shape."""
    for shape, name in (((8, 10), "bf16_instead_of_int8"), ((7, 128), "exp_avg_scale")):
        whole, shards = pair(shapes=[shape])
        one, other = AdamW(whole, state="int8"), AdamW(shards, state="int8")
        trained_further(whole, one, 0)
        trained_further(shards, other, 0)
        dcp.save(one.state_dict(), checkpoint_id=FOLDER / f"whole {shape}")
        with pytest.raises(dcp.api.CheckpointException, match=name):
            dcp.load(other.state_dict(), checkpoint_id=FOLDER / f"whole {shape}")


def masters() -> None:
    """FP32 weights into a model of 16-bit shards, and out of it."""
    wanted = {name: random(p.shape, 6, p.numel()) for name, p in model(0, shards=False).named_parameters()}
    net = model(0, "bf16")
    optimizer = AdamW(net.parameters(), masters="split")
    mezzo.load_master_state_dict(net, optimizer, wanted)
    for name, value in mezzo.master_state_dict(net, optimizer).items():
        same(value, wanted[name], name)
    new = model(1, "bf16")
    mezzo.load_master_state_dict(
        new, [], mezzo.master_state_dict(net, optimizer)
    )  # kept until an optimizer takes it
    for name, value in mezzo.master_state_dict(new, AdamW(new.parameters(), masters="split")).items():
        same(value, wanted[name], name)


def full_disk() -> None:
    """A rank's disk is full while a checkpoint is written: the last complete one is found, and loads."""
    root = FOLDER / "steps"
    net = model(0)
    optimizer = AdamW(net.parameters(), state="int8")
    for step in (1, 2):
        trained_further(net.parameters(), optimizer, step)
        weights, state = get_state_dict(net, optimizer)
        if step == 1:
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=root / f"{step:08}")
            wanted = snapshot(net, optimizer)
            continue
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if RANK == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            with pytest.raises(dcp.api.CheckpointException) as failed:
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=root / f"{step:08}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(failed.value.failures) == [1]
        assert any((root / f"{step:08}").iterdir())
    complete = sorted(file.parent for file in root.glob("*/.metadata"))
    assert [folder.name for folder in complete] == ["00000001"]
    weights, state = get_state_dict(net, optimizer)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=complete[-1])
    set_state_dict(net, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    compare(snapshot(net, optimizer), wanted)


def torch_muon() -> None:
    """PyTorch's Muon with masters trains a model of shards nearly as whole matrices."""
    # Gradients of full rank: Newton-Schulz takes what rounding leaves of a zero singular value up to 480 times as far.
    net = nn.Sequential(nn.Linear(64, 7, bias=False), nn.Linear(7, 32, bias=False)).bfloat16()
    fully_shard(net)
    whole = [nn.Parameter(full(p).clone()) for p in net.parameters()]
    start = [p.detach().float() for p in whole]
    one = with_masters(torch.optim.Muon(whole, 0.02))
    other = with_masters(torch.optim.Muon(net.parameters(), 0.02))
    for step in range(3):
        net(random((128, 64), 5, step, RANK).bfloat16()).square().mean().backward()
        for p, q in zip(whole, net.parameters()):
            p.grad = full(q.grad)
        one.step()
        other.step()
        other.zero_grad()
    for p, q, was in zip(whole, net.parameters(), start):
        # Products in bf16, summed in another order. One bf16 rounding of the gradients gives up to 0.018.
        off = (full(other.master(q)) - one.master(p)).norm() / (one.master(p) - was).norm()
        assert off < 0.05, f"off by {off:.3f} of the update"


CASES: dict[str, Callable[[], Any]] = {}
HOW = {
    1: ("set_state_dict", "whole", "unsharded"),
    2: ("set_state_dict", "plain", "whole"),
    3: ("set_state_dict", "flattened"),
    4: ("set_state_dict",),
}
# Precision, losses before the checkpoint, of 4 per update, and a name in `training_cases.WAYS`.
WINDOWS = [("bf16", 6, "SGD"), ("fp16", 6, "SGD"), ("bf16", 4, "SGD"), ("bf16", 2, "dampened")]
WINDOWS += [("bf16", 6, "split"), ("bf16", 2, "split"), ("bf16", 2, "masters"), ("fp16", 6, "skipped")]
ALIKE = [
    (AdamW, torch.float32, "fp32", "fp32"),
    (AdamW, torch.float32, "bf16", "fp32"),
    (Adam, torch.float32, "int8", "fp32"),
    (AdamW, torch.bfloat16, "int8", "split"),
    (AdamW, torch.bfloat16, "bf16", "split8"),
    (AdamW, torch.bfloat16, "fp32", "none"),
    (AdamW, torch.float16, "fp32", "fp32"),
    (Muon, torch.float32, "fp32", "fp32"),
    (Muon, torch.bfloat16, "int8", "split"),
]
if WORLD == 2:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    CASES |= {f"same bits: {row}": lambda row=row: same_bits(*row) for row in ALIKE}
    CASES |= {
        "same bits: SGD": lambda: same_bits(
            lambda params, **how: SGD(params, 0.1, 0.9, nesterov=True, **how), torch.bfloat16, "bf16", "fp32"
        ),
        "any optimizer: NAdam": lambda: any_optimizer(torch.optim.NAdam, torch.bfloat16),
        "any optimizer: RMSprop": lambda: any_optimizer(torch.optim.RMSprop, torch.float16),
        "meshes": meshes,
        "torch Muon": torch_muon,
        "trained: FP32": lambda: trained("fp32"),
        "trained: MixedPrecisionPolicy": lambda: trained("fp32", mp_policy=half),
        "trained: offload": lambda: trained("fp32", offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "trained: bf16": lambda: trained("bf16", mp_policy=half),
        "released": lambda: released(lambda params: AdamW(params, lr=0.01, state="bf16")),
        "released: Muon": lambda: released(lambda params: Muon(groups_of(params))),
        "released: clipped": lambda: released(lambda params: SGD(params, lr=0.1), clip_norm=0.01),
        "from whole": from_whole,
        "from whole: checkpoint": from_whole_checkpoint,
        "masters": masters,
        "full disk": full_disk,
    }
    CASES |= {f"initialized: {name}": lambda name=name: initialized(name) for name in OPTIMIZERS}
    CASES |= {f"save: {name}": lambda name=name: save(name) for name in OPTIMIZERS}
    CASES |= training_cases.CASES
    CASES |= {
        f"save: window {each}": lambda each=each: training_cases.save(FOLDER, *each) for each in WINDOWS
    }
CASES |= {f"load: window {each}": lambda each=each: training_cases.load(FOLDER, *each) for each in WINDOWS}
CASES |= {
    f"load: {name}, {how}": lambda name=name, how=how: load(name, how)
    for name in OPTIMIZERS
    for how in HOW[WORLD]
    # FSDP2 cuts columns into equal parts only, and whole parameters have 8-bit states.
    if not (name.startswith("columns") and (WORLD == 3 or how == "unsharded"))
}


if __name__ == "__main__":
    run(CASES)
