"""Peak memory of one training step, as the system or the device's allocator counts it, each under its own name.

On a GPU it is what the backend's allocator had handed out at the worst moment. On a CPU neither TensorFlow nor JAX
counts its tensors, so it is the resident memory of the whole process at the worst moment of the step, less what the
process held when Keras had just been imported. That holds the script's data and the compiler's leavings as well as
tensors, and pages that an allocator keeps for the next step: what the machine must have, not what the tensors take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.core.records import MemoryRecord

RESIDENT = "resident memory of the process, above what it held when Keras had been imported"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): the peak becomes what is resident now


def resident(field: str = "VmRSS") -> int | None:
    """Bytes of a line of ``/proc/self/status``: VmRSS is resident now, VmHWM at the most; None on another system."""
    try:
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


@dataclass(frozen=True)
class PeakMemory:
    """A measurement under way: `stop` ends it, and gives None where it could not be made."""

    stop: Callable[[], MemoryRecord | None]


def peak_memory(backend: str, before: int | None) -> PeakMemory:
    """Begin to measure.

    Args:
        backend: Keras's backend.
        before: bytes that were resident when Keras had been imported.
    """
    start = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[backend]
    return start() or _process(before)


def _process(before: int | None) -> PeakMemory:
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return PeakMemory(lambda: None)

    def stop() -> MemoryRecord | None:
        peak = resident("VmHWM")
        return None if peak is None or before is None else MemoryRecord(max(0, peak - before), RESIDENT)

    return PeakMemory(stop)


def _tensorflow() -> PeakMemory | None:
    import tensorflow

    config: Any = tensorflow.config
    devices = config.list_logical_devices("GPU")
    if not devices:
        return None
    name = devices[0].name
    config.experimental.reset_memory_stats(name)

    def stop() -> MemoryRecord:
        return MemoryRecord(
            int(config.experimental.get_memory_info(name)["peak"]), "TensorFlow's GPU allocator"
        )

    return PeakMemory(stop)


def _jax() -> PeakMemory | None:
    import jax

    device: Any = jax.local_devices()[0]
    if device.platform == "cpu" or not (device.memory_stats() or {}).get("peak_bytes_in_use"):
        return None

    def stop() -> MemoryRecord:
        return MemoryRecord(
            int(device.memory_stats()["peak_bytes_in_use"]), "JAX's device allocator, since the script began"
        )

    return PeakMemory(stop)


def _torch() -> PeakMemory | None:
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return None
    cuda.reset_peak_memory_stats()
    return PeakMemory(lambda: MemoryRecord(int(cuda.max_memory_allocated()), "cuda allocator"))
