"""Collectives per training step: PyTorch's own, and what Mezzo adds, under DistributedDataParallel and fully_shard.

``python benchmarks/collectives.py`` runs each contender on 2 and 4 gloo ranks of this machine, counts the collectives
of one step on rank 0 by a dispatch mode, and writes ``results/collectives.json`` with the time that the formula below
gives for 8 to 16,384 ranks. No time is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).parent
OUT = HERE / "results" / "collectives.json"
WRAPPERS = ("DDP", "FSDP2")
KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allgather_": "all-gather of a list",
    "broadcast_": "broadcast",
}
# name -> what it is compared with (None: a baseline) and the policy of `mezzo run` under which it runs
CONTENDERS: dict[str, tuple[str | None, str | None]] = {
    "torch bf16": (None, None),
    "torch bf16, clip": (None, None),
    "torch fp16": (None, None),
    "torch fp16, clip": (None, None),
    "MixedPrecision bf16": ("torch bf16", None),
    "MixedPrecision bf16, clip": ("torch bf16, clip", None),
    "MixedPrecision fp16": ("torch fp16", None),
    "MixedPrecision fp16, clip": ("torch fp16, clip", None),
    "GradScaler fp16": ("torch fp16", None),
    "GradScaler fp16, clip": ("torch fp16, clip", None),
    "mezzo run bf16": ("torch bf16", "bf16"),
    "mezzo run bf16, clip": ("torch bf16, clip", "bf16"),
    "mezzo run fp16": ("torch fp16", "fp16"),
    "mezzo run fp16, clip": ("torch fp16, clip", "fp16"),
}
# NCCL's own model of the time of a small all-reduce in seconds (NVIDIA/nccl, src/graph/tuning.cc at commit 01afd20,
# protocol LL): `baseLat`, then `hwLat` of NVLink within a node and of the network between nodes, for trees and rings.
NCCL = {"tree": (4.4e-6, 0.52e-6, 5.0e-6), "ring": (3.6e-6, 0.47e-6, 2.7e-6)}
GPUS = 8
"""GPUs per node."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RANKS = (8, 64, 512, 1024, 4096, 16384)


def added(contender: str, wrapper: str) -> tuple[int, int]:
    """The formula: all-reduces of Mezzo in a step and their bytes, on any number of ranks and for any model."""
    clips, scales = contender.endswith("clip"), "fp16" in contender
    if contender.startswith("MixedPrecision"):
        runs, norms = scales or clips, int(clips)
    elif contender.startswith("GradScaler"):  # under DDP a NaN or infinity reaches each rank in the average
        runs, norms = scales and wrapper == "FSDP2", int(clips)
    else:
        return (1, 8 * 4) if scales else (0, 0)
    return (1, 8 * (5 + norms)) if runs else (0, 0)


def at_scale(ranks: int) -> dict[str, Any]:
    """Seconds of one all-reduce of a few bytes by NCCL's model, `GPUS` ranks per node."""
    nodes = max(1, ranks // GPUS)
    within, between = ranks // nodes - 1, nodes.bit_length() - 1
    seconds = {}
    for name, (base, intra, inter) in NCCL.items():
        intra *= 1.8 if nodes > 1 else 1.0
        steps = (within, between) if name == "tree" else (ranks - nodes, nodes - 1)
        seconds[f"{name}_s"] = round(base + 2 * (steps[0] * intra + steps[1] * inter), 9)
    return {"ranks": ranks, "nodes": nodes, **seconds}


def training(name: str, wrapper: str) -> Callable[[Tensor], None]:
    """One step of a contender, as a function of the batch."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    if wrapper == "DDP":
        net = DistributedDataParallel(net)
    else:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    clips, precision = name.endswith("clip"), "fp16" if "fp16" in name else "bf16"
    if name.startswith("MixedPrecision"):
        import mezzo

        mp = mezzo.MixedPrecision(net, optimizer, precision, clip_norm=1.0 if clips else None, trace=False)

        def short(x: Tensor) -> None:
            with mp.autocast():
                loss = net(x).square().mean()
            mp.step(loss)

        return short

    by_run = name.startswith("mezzo run")
    scaler: Any = torch.amp.GradScaler("cpu", enabled=precision == "fp16" and not by_run)
    if name.startswith("GradScaler"):
        import mezzo

        scaler = mezzo.GradScaler()

    def context() -> AbstractContextManager[Any]:
        return nullcontext() if by_run else torch.autocast("cpu", DTYPES[precision])

    def long(x: Tensor) -> None:
        optimizer.zero_grad()
        with context():
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        if clips and name.startswith("GradScaler"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif clips:
            scaler.unscale_(optimizer)
            norm: Any = clip_grad_norm_(net.parameters(), 1.0)
            if hasattr(norm, "full_tensor"):
                norm.full_tensor()
        scaler.step(optimizer)
        scaler.update()

    return long


class Collectives(TorchDispatchMode):
    """Counts the calls of `c10d` ops, and the bytes that this rank gives to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor's own code runs the collectives, and is seen next
        kind = KINDS.get(func.__name__.split(".")[0])
        if func.namespace in ("c10d", "_c10d_functional") and kind is not None:
            sent = args[1] if kind in ("all-gather", "reduce-scatter") else args[0]
            self.seen[kind] += 1
            self.bytes[kind] += sum(t.nbytes for t in tree_leaves(sent) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def child(names: str, meeting: str) -> None:
    """One rank: rank 0 prints the collectives of one step of each contender, and the bytes that it sends."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    found = []
    for name, wrapper in itertools.product(names.split(";"), WRAPPERS):
        step, x = training(name, wrapper), torch.randn(8, 64)
        for _ in range(3):
            step(x)
        with Collectives() as counted:
            step(x)
        row = {"ranks": world, "wrapper": wrapper, "contender": name}
        found.append(row | {"collectives": dict(counted.seen), "bytes": dict(counted.bytes)})
    dist.barrier()
    if rank == 0:
        print(json.dumps(found))
        sys.stdout.flush()
    dist.barrier()
    os._exit(0) if "mezzo.pytorch.run" not in sys.modules else dist.destroy_process_group()


def measured(policy: str | None, world: int) -> list[dict[str, Any]]:
    """What `child` prints on rank 0 for the contenders that run in plain Python, or under `mezzo run` in a policy."""
    names = ";".join(name for name, (_, by) in CONTENDERS.items() if by == policy)
    run = ["-m", "mezzo", "run", "--quiet", "--no-trace", "--precision", policy] if policy else []
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *run, __file__, "child", names, str(Path(folder) / "meeting")]
        ranks = [
            subprocess.Popen(
                words,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
            )
            for rank in range(world)
        ]
        try:
            outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{names}, {world} ranks: exit statuses {[r.returncode for r in ranks]}")
    result: list[dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return result


def with_added(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, those of Mezzo with what they have more than PyTorch's (negative: less)."""
    of = {(row["ranks"], row["wrapper"], row["contender"]): row for row in rows}
    for row in rows:
        baseline = CONTENDERS[row["contender"]][0]
        if baseline is not None:
            other = of[row["ranks"], row["wrapper"], baseline]
            row["baseline"] = baseline
            for what in ("collectives", "bytes"):
                kinds = sorted(row[what].keys() | other[what].keys())
                more = {kind: row[what].get(kind, 0) - other[what].get(kind, 0) for kind in kinds}
                row[f"added_{what}"] = {kind: n for kind, n in more.items() if n}
    return rows


def main() -> None:
    rows = [row for world in (2, 4) for policy in (None, "bf16", "fp16") for row in measured(policy, world)]
    rows = with_added(rows)
    for row in rows:
        more = "" if "baseline" not in row else f" added {row['added_collectives']} {row['added_bytes']}"
        print(row["ranks"], row["wrapper"], row["contender"], row["collectives"], row["bytes"], more)
    results = {
        "torch": torch.__version__,
        "steps": rows,
        "nccl_s": NCCL,
        "gpus_per_node": GPUS,
        "at_scale": [at_scale(n) for n in RANKS],
    }
    OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
