"""This computer's hardware, and the 16-bit formats in which its devices train at full speed.

No import queries a device, and queries make no CUDA context, which would break a script that forks afterwards or sets
``CUDA_VISIBLE_DEVICES``. So an NVIDIA GPU is read from ``nvidia-smi`` until the process has a context.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mezzo.core.errors import unknown_name
from mezzo.core.hardware import TENSOR_CORES_FROM, cpu, cuda_formats, output, system
from mezzo.core.policy import Policy

ASSUME_NATIVE = "MEZZO_ASSUME_NATIVE"
"""Environment variable that overrides `native_formats` for every device: ``""`` for none, or ``"bf16,fp16"``."""

SIXTEEN_BITS = ("bf16", "fp16")

# CPU instruction sets, any one of which multiplies bf16 pairs into FP32 (avx_ne_convert only converts).
CPU_BF16_BY = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")

# The names of cpuinfo that matter for floating-point speed.
ISA_SHOWN = (
    *("f16c", "fma3", "avx", "avx2", "avx_vnni", "avx_ne_convert", "avx512_f", "avx512_bw", "avx512_vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10_1", "avx10_2", "amx_tile", "amx_int8", "amx_bf16"),
    *("amx_fp16", "neon", "fp16_arith", "bf16", "i8mm", "dot", "sve", "sve2", "sve_bf16", "sme", "sme2"),
)


@dataclass(frozen=True)
class Gpu:
    """The GPU that PyTorch would use first; ``capability`` is CUDA's, None on other devices."""

    name: str
    capability: tuple[int, int] | None
    memory_bytes: int
    count: int
    kind: str = "cuda"


def describe() -> dict[str, Any]:
    """The hardware and software as plain JSON values, for run records and `mezzo doctor`. Makes no CUDA context."""
    has = capabilities()
    device = gpu()
    capability = None if device is None or device.capability is None else "{}.{}".format(*device.capability)
    logical = os.cpu_count() or 1
    return {
        **system(),
        "torch": torch.__version__,
        "isa": [name for name in ISA_SHOWN if has.get(name) is True],
        "cores": int(has.get("num_physical_cores") or logical),
        "logical_cores": logical,
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "gpu": None if device is None else {**asdict(device), "capability": capability},
    }


def native_formats(device_type: str) -> frozenset[str]:
    """The 16-bit formats in which a device trains natively and fast (a CPU never in fp16: ``docs/dev/log.md``)."""
    assumed = os.environ.get(ASSUME_NATIVE)
    if assumed is not None:
        names = frozenset(filter(None, (word.strip() for word in assumed.split(","))))
        if unknown := sorted(names.difference(SIXTEEN_BITS)):
            where = f"{ASSUME_NATIVE}={assumed!r}: "
            raise unknown_name("16-bit format", unknown[0], SIXTEEN_BITS, where=where)
        return names
    if device_type == "cpu":
        return frozenset({"bf16"}) if cpu_trains_in_bf16(capabilities()) else frozenset()
    device = gpu()
    if device is None or device.kind != device_type:
        return frozenset()
    if device.capability is not None:
        return cuda_formats(device.capability)
    return frozenset(SIXTEEN_BITS)


def has_tf32(device_type: str) -> bool:
    """Whether a device's matrix units read TF32: CUDA devices from compute capability 8.0."""
    if os.environ.get(ASSUME_NATIVE) is not None or device_type != "cuda":
        return False
    device = gpu()
    return device is not None and (device.capability or (0, 0)) >= TENSOR_CORES_FROM["tf32"]


# PyTorch's switch for TF32: off under the policy fp32, on under tf32 if the device has it. It is one switch for the
# whole process, which each product reads when it runs, in backward too, outside of any context. So it is not restored.


def switch_off_tf32() -> bool:
    """Compute matmuls, convolutions and RNNs in true FP32, on GPUs and CPUs; whether the script had asked for less."""
    backends: Any = torch.backends
    switches = (backends, backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    asked = any(one.fp32_precision not in ("ieee", "none") for one in switches)
    backends.fp32_precision = backends.cudnn.fp32_precision = backends.mkldnn.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    return asked


def switch_on_tf32() -> None:
    """Let FP32 matmuls, convolutions and RNNs read TF32 factors, on GPUs that can."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def leaves_autocast_off(policy: Policy, device_type: str) -> bool:
    """Whether a policy needs no autocast: FP32, and TF32 by the device's own matrix units."""
    return policy.compute == "fp32" or (policy.compute == "tf32" and has_tf32(device_type))


def cpu_trains_in_bf16(facts: Mapping[str, Any]) -> bool:
    """Whether a CPU with these capabilities multiplies bf16 itself (by oneDNN), and no slower than FP32.

    Intel cores that have AVX512-FP16 and whose AMX is hidden (as in many virtual machines) ran bf16 matmul at about
    half of FP32's rate (``docs/dev/log.md``). Instructions decide, because a measurement would depend on the load.
    """
    onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call,unused-ignore]
    has = {name for name, value in facts.items() if value is True}
    is_intel = str(facts.get("cpu_name", "")).startswith("Intel")
    slow = is_intel and {"avx512_bf16", "avx512_fp16"} <= has and "amx_bf16" not in has
    return onednn and not slow and not has.isdisjoint(CPU_BF16_BY)


@functools.lru_cache(maxsize=1)
def capabilities() -> Mapping[str, Any]:
    """PyTorch's table of this CPU's capabilities; empty in a release that has none."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def gpu() -> Gpu | None:
    """The GPU that PyTorch would use first, or None. Makes no CUDA context."""
    has_context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call,unused-ignore]
    if torch.version.cuda is not None and not has_context:
        listing = _nvidia_smi()
        if listing is not None:
            return visible_gpu(listing, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # AMD's numbers look like NVIDIA's and mean something else, so they decide nothing here.
        capability = None if torch.version.hip else (properties.major, properties.minor)
        return Gpu(properties.name, capability, properties.total_memory, torch.cuda.device_count())
    if torch.xpu.is_available():
        xpu = torch.xpu.get_device_properties(torch.xpu.current_device())
        return Gpu(xpu.name, None, xpu.total_memory, torch.xpu.device_count(), kind="xpu")
    if torch.backends.mps.is_available():
        return Gpu(cpu()[0], None, _memory_bytes() or 0, 1, kind="mps")
    return None


@functools.lru_cache(maxsize=1)
def _nvidia_smi() -> str | None:
    query = ["--query-gpu=index,uuid,compute_cap,memory.total,name", "--format=csv,noheader,nounits"]
    return output(["nvidia-smi", *query])


def visible_gpu(listing: str, visible: str | None) -> Gpu | None:
    """The first listed GPU (index, uuid, compute capability, MiB, name) that ``CUDA_VISIBLE_DEVICES`` shows."""
    rows = [
        [cell.strip() for cell in line.split(",", 4)] for line in listing.splitlines() if line.count(",") >= 4
    ]
    if visible is not None:
        chosen = []
        for entry in (word.strip() for word in visible.split(",")):
            # The listing lacks the names of parts of GPUs (MIG); on one computer these GPUs are alike.
            part = entry.startswith("MIG-")
            match = [row for row in rows if entry and (part or row[0] == entry or row[1].startswith(entry))]
            if not match:
                break
            chosen.append(match[0])
        rows = chosen
    if not rows:
        return None
    _, _, capability, memory, name = rows[0]
    major, _, minor = capability.partition(".")
    # "[N/A]" where the GPU shares the system's memory
    memory_bytes = int(memory) << 20 if memory.isdecimal() else _memory_bytes() or 0
    return Gpu(name, (int(major), int(minor or 0)), memory_bytes, len(rows))


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
