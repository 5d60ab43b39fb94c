"""The hardware that a Keras script runs on: its description, true FP32, and the peak memory of a step."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.core.hardware import cpu, cuda_formats, system
from mezzo.core.records import MemoryRecord

# CPU flags, as Linux names them, of which any one multiplies bf16 pairs into FP32; and likewise for fp16.
_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}


def describe(backend: str, *, used: bool = True) -> dict[str, Any]:
    """The hardware, the frameworks that are imported and `native_formats` (of bf16 and fp16), as plain JSON values."""
    versions: dict[str, Any] = {
        name: str(getattr(sys.modules[name], "__version__", ""))
        for name in ("keras", "tensorflow", "jax", "torch", "tf_keras")
        if name in sys.modules and (name != "jax" or backend == "jax") and (name != "keras" or used)
    }
    gpu, capability = _gpu(backend)
    if gpu is None:
        native = frozenset(fmt for fmt, by in _CPU_FLAGS.items() if not cpu()[1].isdisjoint(by))
    else:
        native = cuda_formats(capability) if capability else frozenset(_CPU_FLAGS)
    kind = "cpu" if gpu is None else "gpu"
    device = {"backend": backend, "device_type": kind, "gpu": gpu, "native_formats": sorted(native)}
    return {**system(), **versions, **device}


def _gpu(backend: str) -> tuple[str | None, tuple[int, int] | None]:
    """The GPU that the backend uses, and its CUDA compute capability where it has one; None for a CPU."""
    module: Any = sys.modules.get(backend)
    if backend == "torch" and module.cuda.is_available():
        return module.cuda.get_device_name(), module.cuda.get_device_capability()
    if backend == "jax" and module.local_devices()[0].platform != "cpu":
        device = module.local_devices()[0]
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return str(device.device_kind), (int(found[1]), int(found[2])) if found else None
    if backend == "tensorflow" and (devices := module.config.list_physical_devices("GPU")):
        details = module.config.experimental.get_device_details(devices[0])
        return str(details.get("device_name", "GPU")), details.get("compute_capability")
    return None, None


def switch_off_tf32(backend: str) -> None:
    """Compute FP32 in true FP32: switch TF32, and a CPU's short cuts of the same kind, off."""
    module: Any = sys.modules[backend]
    if backend == "tensorflow":
        module.config.experimental.enable_tensor_float_32_execution(False)
    elif backend == "jax":
        module.config.update("jax_default_matmul_precision", "highest")
    else:
        module.set_float32_matmul_precision("highest")
        module.backends.cudnn.allow_tf32 = False


# On a CPU neither TensorFlow nor JAX counts its tensors, so the peak is the resident memory of the process.

RESIDENT = "resident memory of the process, above what it held when Keras had been imported"
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): the peak becomes what is resident now


def resident(field: str = "VmRSS") -> int | None:
    """Bytes of a line of ``/proc/self/status``: VmRSS is resident now, VmHWM at the most; None on another system."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        found = re.search(rf"^{field}:\s*(\d+)", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def peak_memory(backend: str, before: int | None) -> Callable[[], MemoryRecord | None]:
    """Begin to measure; call the result to end it, which gives None where nothing could be measured."""
    module: Any = sys.modules[backend]
    if backend == "torch" and module.cuda.is_initialized():
        module.cuda.reset_peak_memory_stats()
        return lambda: MemoryRecord(int(module.cuda.max_memory_allocated()), "cuda allocator")
    if backend == "tensorflow" and (devices := module.config.list_logical_devices("GPU")):
        stats, how = module.config.experimental, "TensorFlow's GPU allocator"
        stats.reset_memory_stats(devices[0].name)
        return lambda: MemoryRecord(int(stats.get_memory_info(devices[0].name)["peak"]), how)
    if backend == "jax" and module.local_devices()[0].platform != "cpu":
        device, how = module.local_devices()[0], "JAX's device allocator, since the script began"
        if (device.memory_stats() or {}).get("peak_bytes_in_use"):
            return lambda: MemoryRecord(int(device.memory_stats()["peak_bytes_in_use"]), how)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")

    def stop() -> MemoryRecord | None:
        peak = resident("VmHWM")
        return None if peak is None or before is None else MemoryRecord(max(0, peak - before), RESIDENT)

    return stop
