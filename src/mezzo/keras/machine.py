"""What a training with Keras says of the machine that it ran on, as plain JSON values.

Nothing is imported that the script has not imported.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from mezzo.core.version import VERSION

# CPU flags, as Linux names them, of which any one multiplies bf16 pairs into FP32; and likewise for fp16.
_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}
# First CUDA compute capability whose tensor cores take the format.
_CUDA_FROM = {"fp16": (7, 0), "bf16": (8, 0)}


def describe(backend: str, *, used: bool = True) -> dict[str, Any]:
    """What ran where. TensorFlow imports Keras and JAX for itself, so neither is told for being imported.

    Args:
        backend: Keras's backend; empty where Keras was not imported.
        used: whether the script made anything of Keras's.

    Keys: os, python, the version of each framework imported (jax: as the backend), mezzo, backend, device_type, cpu,
    usable_cores, gpu, native_formats (those of bf16 and fp16 that the device multiplies itself).
    """
    versions: dict[str, Any] = {
        name: str(getattr(sys.modules[name], "__version__", ""))
        for name in ("keras", "tensorflow", "jax", "torch", "tf_keras")
        if name in sys.modules and (name != "jax" or backend == "jax") and (name != "keras" or used)
    }
    gpu, capability = _gpu(backend) if backend else (None, None)
    name, flags = _cpu()
    if gpu is None:
        native = [fmt for fmt, by in _CPU_FLAGS.items() if not flags.isdisjoint(by)]
    else:
        native = [fmt for fmt, first in _CUDA_FROM.items() if capability is None or capability >= first]
    return {
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "mezzo": VERSION,
        "backend": backend,
        "device_type": "cpu" if gpu is None else "gpu",
        "cpu": name,
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": gpu,
        "native_formats": sorted(native),
    }


def _cpu() -> tuple[str, set[str]]:
    name, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass
    return name, flags


def _gpu(backend: str) -> tuple[str | None, tuple[int, int] | None]:
    """The GPU that the backend uses, and its CUDA compute capability where it has one; None for a CPU."""
    if backend == "torch":
        import torch

        if not torch.cuda.is_available():
            return None, None
        return torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if backend == "jax":
        import jax

        device: Any = jax.local_devices()[0]
        if device.platform == "cpu":
            return None, None
        told = str(getattr(device, "compute_capability", ""))
        return str(device.device_kind), _numbers(told)
    import tensorflow

    config: Any = tensorflow.config
    devices = config.list_physical_devices("GPU")
    if not devices:
        return None, None
    details = config.experimental.get_device_details(devices[0])
    return str(details.get("device_name", "GPU")), details.get("compute_capability")


def _numbers(text: str) -> tuple[int, int] | None:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
