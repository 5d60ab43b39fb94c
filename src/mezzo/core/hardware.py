"""What every framework's description of the hardware shares: the system, the CPU, and what CUDA's capabilities mean."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from mezzo.core.version import VERSION

# First compute capability whose tensor cores multiply the format: CUDA C++ Programming Guide, table "Feature Support
# per Compute Capability" and section "Element Types and Matrix Sizes"; Transformer Engine, "Datatype and hardware
# support matrix" (fp8 from 8.9, nvfp4 from 10.0).
TENSOR_CORES_FROM = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9), "nvfp4": (10, 0)}


def system() -> dict[str, Any]:
    """os, python, mezzo, cpu and usable_cores (those that this process may use), as plain JSON values."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "mezzo": VERSION,
        "cpu": cpu()[0],
        "usable_cores": usable,
    }


def cpu() -> tuple[str, frozenset[str]]:
    """The CPU's name (or the architecture), and its instruction flags as Linux names them (else none)."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^model name\s*:\s*(.*)", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)", text, re.MULTILINE)
    told = name[1].strip() if name else ""
    if platform.system() == "Darwin":
        told = output(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""
    return told or platform.processor() or platform.machine(), frozenset(flags[1].split() if flags else ())


def cuda_formats(capability: tuple[int, int]) -> frozenset[str]:
    """The 16-bit formats whose matrix products run on tensor cores at this compute capability.

    >>> sorted(cuda_formats((7, 5))), sorted(cuda_formats((9, 0)))
    (['fp16'], ['bf16', 'fp16'])
    """
    return frozenset(name for name in ("fp16", "bf16") if capability >= TENSOR_CORES_FROM[name])


def output(command: list[str]) -> str | None:
    """What a command prints; None if it is absent, fails or takes ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
