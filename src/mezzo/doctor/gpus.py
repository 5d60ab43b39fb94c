"""What NVIDIA's GPUs offer, as data: formats by compute capability, and datasheet peaks with their source.

Peaks are the dense figures. Datasheets mark most of theirs "with sparsity", which is twice as much and
which no training sees; and on GeForce and RTX cards fp16 is given here with FP32 accumulation, which is
what PyTorch asks for, at half the rate of fp16 accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mezzo.core.errors import UsageError, unknown_name

Capability = tuple[int, int]

# First compute capability whose tensor cores multiply the format. CUDA Programming Guide, compute
# capabilities; Transformer Engine, "Datatype and hardware support matrix" (fp8 from 8.9, fp4 from 10.0).
TENSOR_CORES_FROM: Mapping[str, Capability] = MappingProxyType(
    {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
)

ARCHITECTURES: Mapping[Capability, str] = MappingProxyType(
    {
        **dict.fromkeys([(5, 0), (5, 2), (5, 3)], "Maxwell"),
        **dict.fromkeys([(6, 0), (6, 1), (6, 2)], "Pascal"),
        **dict.fromkeys([(7, 0), (7, 2)], "Volta"),
        (7, 5): "Turing",
        **dict.fromkeys([(8, 0), (8, 6), (8, 7)], "Ampere"),
        (8, 9): "Ada Lovelace",
        (9, 0): "Hopper",
        **dict.fromkeys([(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], "Blackwell"),
    }
)


@dataclass(frozen=True)
class GpuModel:
    """One GPU by its datasheet.

    Args:
        name: as `nvidia-smi` and the datasheet agree on it, without "NVIDIA".
        capability: its CUDA compute capability.
        memory_gb: memory in 10^9 bytes, as sold.
        bandwidth: memory bandwidth in 10^9 bytes a second.
        peaks: dense matrix peaks in 10^12 operations a second, by format; fp32 is without tensor cores.
        source: the document that gives these figures, and its year.
    """

    name: str
    capability: Capability
    memory_gb: int
    bandwidth: int
    peaks: Mapping[str, float]
    source: str


def _model(
    name: str, capability: Capability, memory_gb: int, bandwidth: int, source: str, **peaks: float
) -> GpuModel:
    return GpuModel(name, capability, memory_gb, bandwidth, MappingProxyType(peaks), source)


_TURING = "NVIDIA Turing GPU Architecture, appendix A, 2018"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet, 2020"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet, 2021"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, appendix A, 2021"
_ADA = "NVIDIA Ada GPU Architecture, appendix A, 2023"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, 2023 (half of its figures with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, 2023 (half of its figures with sparsity)"
_B200 = "NVIDIA Blackwell Architecture Technical Brief, 2024 (HGX B200)"
_RTX50 = "NVIDIA RTX Blackwell GPU Architecture, appendix A, 2025"

MODELS = (
    _model("V100-PCIE", (7, 0), 32, 900, _V100, fp32=14, fp16=112),
    _model("V100-SXM2", (7, 0), 32, 900, _V100, fp32=15.7, fp16=125),
    _model("T4", (7, 5), 16, 320, _TURING, fp32=8.1, fp16=65),
    _model("RTX 2080 Ti", (7, 5), 11, 616, _TURING, fp32=14.2, fp16=56.9),
    _model("A100-PCIE-40GB", (8, 0), 40, 1555, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312),
    _model("A100-SXM4-40GB", (8, 0), 40, 1555, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312),
    _model("A100 80GB PCIe", (8, 0), 80, 1935, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312),
    _model("A100-SXM4-80GB", (8, 0), 80, 2039, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312),
    _model("A30", (8, 0), 24, 933, "NVIDIA A30 datasheet, 2021", fp32=10.3, tf32=82, bf16=165, fp16=165),
    _model("A10", (8, 6), 24, 600, "NVIDIA A10 datasheet, 2021", fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    _model(
        "A40", (8, 6), 48, 696, "NVIDIA A40 datasheet, 2021", fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7
    ),
    _model("RTX A6000", (8, 6), 48, 768, _GA102, fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8),
    _model("GeForce RTX 3090", (8, 6), 24, 936, _GA102, fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    _model(
        "GeForce RTX 4090", (8, 9), 24, 1008, _ADA, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3
    ),
    _model(
        "L4", (8, 9), 24, 300, "NVIDIA L4 datasheet, 2023", fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5
    ),
    _model(
        "L40",
        (8, 9),
        48,
        864,
        "NVIDIA L40 datasheet, 2023",
        fp32=90.5,
        tf32=90.5,
        bf16=181,
        fp16=181,
        fp8=362,
    ),
    _model(
        "L40S",
        (8, 9),
        48,
        864,
        "NVIDIA L40S datasheet, 2023",
        fp32=91.6,
        tf32=183,
        bf16=362,
        fp16=362,
        fp8=733,
    ),
    _model("H100 PCIe", (9, 0), 80, 2000, _H100, fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513),
    _model("H100 80GB HBM3", (9, 0), 80, 3350, _H100, fp32=67, tf32=494, bf16=989, fp16=989, fp8=1979),
    _model("H200", (9, 0), 141, 4800, _H200, fp32=67, tf32=494, bf16=989, fp16=989, fp8=1979),
    _model("B200", (10, 0), 180, 8000, _B200, fp32=80, tf32=1100, bf16=2250, fp16=2250, fp8=4500, fp4=9000),
    _model(
        "GeForce RTX 5090",
        (12, 0),
        32,
        1792,
        _RTX50,
        fp32=104.8,
        tf32=104.8,
        bf16=209.5,
        fp16=209.5,
        fp8=419,
        fp4=1676,
    ),
)

# How people also call them.
ALSO = {"H100 SXM": "H100 80GB HBM3", "H100 SXM5": "H100 80GB HBM3", "A100 SXM": "A100-SXM4-80GB"}


def formats_at(capability: Capability) -> tuple[str, ...]:
    """The formats that tensor cores multiply at a compute capability, in order of their arrival.

    >>> formats_at((7, 5)), formats_at((8, 9))
    (('fp16',), ('fp16', 'tf32', 'bf16', 'fp8'))
    """
    return tuple(name for name, first in TENSOR_CORES_FROM.items() if capability >= first)


def parse_capability(text: str) -> Capability:
    """The compute capability written as ``"8.9"``.

    Raises:
        UsageError: not two numbers with a dot, or one that no GPU has; the message names the nearest.
    """
    match = re.fullmatch(r"\s*(\d+)\.(\d)\s*", text)
    known = ["{}.{}".format(*one) for one in ARCHITECTURES]
    if match is None:
        raise UsageError(
            f"{text!r} is no compute capability: write major.minor, one of {', '.join(known)} "
            "(`nvidia-smi --query-gpu=name,compute_cap --format=csv` tells a GPU's)"
        )
    if text.strip() not in known:
        raise unknown_name("compute capability", text.strip(), known)
    return int(match[1]), int(match[2])


def find(name: str) -> tuple[GpuModel, ...]:
    """The models of that name; several where the name leaves the form open (``"A100"``).

    Case, spaces, dashes and the words NVIDIA, Tesla and GeForce do not matter.

    Raises:
        UnknownNameError: none; the message names the nearest.
    """
    wanted = _plain(name)
    for other, model in ALSO.items():
        if _plain(other) == wanted:
            wanted = _plain(model)
    same = tuple(model for model in MODELS if _plain(model.name) == wanted)
    if same or not wanted:
        found = same
    else:
        found = tuple(model for model in MODELS if _words(model.name)[: len(_words(name))] == _words(name))
    if not found:
        raise unknown_name("GPU", name, [model.name.removeprefix("GeForce ") for model in MODELS])
    return found


def _words(name: str) -> list[str]:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return [word for word in words if word not in ("nvidia", "tesla", "geforce", "gpu")]


def _plain(name: str) -> str:
    return "".join(_words(name))
