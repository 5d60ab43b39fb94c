"""Measure what a contender compiles at its first step and how long it takes, with empty and with full caches.

python benchmarks/first_step.py "mezzo split/fp32"       # one process; prints JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

CACHES = ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MEZZO_CACHE_DIR")
LONGEST = 300  # seconds of one process


def measure(name: str, device: str) -> dict[str, float | None]:
    """Seconds of the first and third step in this process, and the compilation time that Mezzo reports."""
    import torch

    from contenders import CONTENDERS
    from shapes import parameters

    contender = CONTENDERS[name]
    params = parameters("1M", "one", contender.dtype, device)
    with contender.environment():
        optimizer = contender.build(params)
        took = []
        for _ in range(3):
            begun = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - begun)
    jit = sys.modules.get("mezzo.pytorch.kernels.jit")
    compiling = None if jit is None else sum(kernel.seconds for kernel in jit._kernels.values())
    return {"first": took[0], "third": took[2], "compiling": compiling}


def _child(name: str, device: str, caches: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), name, "--device", device]
    environment = os.environ | {variable: str(caches / variable.lower()) for variable in CACHES}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment)
    except subprocess.TimeoutExpired:
        return {"raised": f"not finished after {LONGEST} s"}
    if done.returncode:
        return {"raised": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def both_starts(names: list[str], device: str, console: Console) -> dict[str, Any]:
    """Each contender's first step at 1 M parameters in one tensor: ``empty`` caches, then ``full`` ones."""
    found: dict[str, Any] = {}
    for name in names:
        console.print(f"first step: {name}")
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {key: _child(name, device, Path(folder)) for key in ("empty", "full")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.contender, arguments.device)))


if __name__ == "__main__":
    main()
