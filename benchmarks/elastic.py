"""Kill ranks at random places of a training, and compare the end with that of an undisturbed run, bit for bit.

    python benchmarks/elastic.py                # 50 kills; writes benchmarks/results/elastic.json (15 minutes)
    python benchmarks/elastic.py --kills 4 --no-write

Two ranks of data parallelism train a small model with dropout and momentum, and save a checkpoint after each step. A
random rank kills itself (SIGKILL) in one of the next three steps: before backward, before the optimizer's step, before
the checkpoint, or while it is written. torchrun's elastic agent restarts both from the last checkpoint. The rows:

- mezzo run: an FP32 script under `mezzo run --precision bf16 -m torch.distributed.run`;
- MixedPrecision: fp16 with a loss scale that grows every 3 steps and overflows, saved with the rest.

Exit status 1 if an end differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "elastic.json"
ROWS = {"mezzo run": "bf16", "MixedPrecision": "fp16,loss_scale=dynamic(init=1048576,growth_interval=3)"}
PLACES = ("backward", "step", "save", "half a checkpoint")


def train(folder: Path, kills: int, policy: str | None, *, undisturbed: bool) -> None:
    """One rank, from the last checkpoint to the end; `policy` is that of MixedPrecision, else `mezzo run` has one."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import mezzo

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mp = mezzo.MixedPrecision(model, optimizer, policy) if policy else None
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, **({"mp": mp} if mp else {})}
    kept, begin, skipped = folder / "kept.pt", 0, 0
    if kept.exists():
        saved = torch.load(kept, weights_only=True)
        begin, skipped = saved["step"], saved["skipped"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    draw, deaths = random.Random(attempt), 0 if undisturbed else kills
    victim, at, place = draw.randrange(2), begin + draw.randrange(3), draw.choice(PLACES)

    def perhaps_die(here: str) -> None:
        if attempt < deaths and (rank, step, here) == (victim if here in PLACES[:2] else 0, at, place):
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(begin, 3 * kills + 12):
        torch.manual_seed(2 * step + rank)
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        if mp is None:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            perhaps_die("backward")
            loss.backward()
            perhaps_die("step")
            optimizer.step()
        else:
            with mp.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            perhaps_die("backward")
            skipped += mp.step(loss).skipped
            perhaps_die("step")
        if rank == 0:
            perhaps_die("save")
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step + 1, "skipped": skipped, **state}, folder / "new.pt")
            if attempt < deaths and (step, place) == (at, PLACES[3]):
                os.truncate(folder / "new.pt", 100)
            perhaps_die("half a checkpoint")
            os.replace(folder / "new.pt", kept)
    if rank == 0:
        digest = hashlib.sha256()
        momentum = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
        for tensor in (*model.state_dict().values(), *momentum):
            digest.update(tensor.numpy().tobytes())
        found = {"steps": step + 1, "skipped": skipped, "restarts": attempt, "sha256": digest.hexdigest()}
        (folder / "end.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def launch(row: str, kills: int, of: int) -> dict[str, Any]:
    """The end of a training as long as one with `of` kills, of which `kills` happen."""
    with tempfile.TemporaryDirectory() as name:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words += ["--max-restarts", str(of), __file__, "--train", name, "--kills", str(of)]
        words += [] if kills else ["--undisturbed"]
        mezzo_run = ["-m", "mezzo", "run", "--precision", ROWS[row]]
        words = [*mezzo_run, *words] if row == "mezzo run" else [*words, "--policy", ROWS[row]]
        # Without the last one, ranks may read the addresses of those that were killed (pytorch#135712).
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ran = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"exit status {ran.returncode}:\n{ran.stderr[:4000]}")
        found: dict[str, Any] = json.loads((Path(name) / "end.json").read_text(encoding="utf-8"))
        return found


def main() -> int:
    """Both rows, or one rank of a training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50, help="in all rows together")
    parser.add_argument("--row", choices=tuple(ROWS), action="append")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--undisturbed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.kills, given.policy, undisturbed=given.undisturbed)
        return 0
    rows = []
    names = given.row or list(ROWS)
    for name in names:
        began, kills = time.monotonic(), given.kills // len(names)
        whole, killed = launch(name, 0, kills), launch(name, kills, kills)
        same = whole["sha256"] == killed["sha256"]
        row = {"row": name, "policy": ROWS[name], "kills": killed["restarts"], "steps": whole["steps"]}
        row |= {
            "skipped": whole["skipped"],
            "same_bits": same,
            "minutes": round((time.monotonic() - began) / 60, 1),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    if not given.no_write:
        from mezzo.pytorch.hardware import describe

        given.json.write_text(
            json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return int(not all(row["same_bits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
