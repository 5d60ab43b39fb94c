"""NVIDIA's GPUs as data: formats by compute capability, dense datasheet peaks with their source (most datasheets give
twice that, "with sparsity"; fp16 on GeForce and RTX with FP32 accumulation); and the precision to use on each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mezzo.core.errors import UnknownNameError, did_you_mean
from mezzo.core.hardware import TENSOR_CORES_FROM

Capability = tuple[int, int]

# Compute capability -> the architecture, and names of GPUs, without GeForce, GTX and RTX (`30` is the RTX 30 series).
ARCHITECTURES = {
    (5, 0): ("Maxwell", ""),
    (6, 0): ("Pascal", "p100"),
    (6, 1): ("Pascal", "10 1050 1060 1070 1080 p4 p40"),
    (7, 0): ("Volta", "v100"),
    (7, 5): ("Turing", "20 2060 2070 2080 t4"),
    (8, 0): ("Ampere", "a30 a100"),
    (8, 6): ("Ampere", "30 3050 3060 3070 3080 3090 a2 a10 a16 a40"),
    (8, 9): ("Ada Lovelace", "40 4050 4060 4070 4080 4090 l4 l40 l40s"),
    (9, 0): ("Hopper", "h100 h200 gh200"),
    (10, 0): ("Blackwell", "b200 gb200"),
    (12, 0): ("Blackwell", "50 5050 5060 5070 5080 5090"),
}


def architecture(capability: Capability) -> str:
    """The name of the architecture with a compute capability."""
    return [name for first, (name, _) in ARCHITECTURES.items() if capability >= first][-1]


@dataclass(frozen=True)
class GpuModel:
    """One GPU, by its datasheet if it is here; the peaks are by format."""

    name: str
    capability: Capability
    memory_gb: int | None = None
    bandwidth_gb_s: int | None = None
    dense_peak_tflop_s: Mapping[str, float] = field(default_factory=dict)
    tensor_cores: bool = True  # those of its compute capability
    source: str = "NVIDIA, CUDA GPU Compute Capability (developer.nvidia.com/cuda-gpus, /cuda-legacy-gpus)"


# Columns: name, compute capability, GB, GB/s, dense TFLOP/s in fp32, tf32, bf16, fp16, fp8, nvfp4 (- if none), source.
_DATASHEETS = """
V100-PCIE        | 7.0 32 900    14    -    -     112   -     -    | NVIDIA V100 Tensor Core GPU datasheet, 2020
V100-SXM2        | 7.0 32 900    15.7  -    -     125   -     -    | NVIDIA V100 Tensor Core GPU datasheet, 2020
T4               | 7.5 16 320    8.1   -    -     65    -     -    | NVIDIA Turing GPU Architecture, appendix A, 2018
RTX 2080 Ti      | 7.5 11 616    14.2  -    -     56.9  -     -    | NVIDIA Turing GPU Architecture, appendix A, 2018
A100-PCIE-40GB   | 8.0 40 1555   19.5  156  312   312   -     -    | NVIDIA A100 Tensor Core GPU datasheet, 2021
A100-SXM4-40GB   | 8.0 40 1555   19.5  156  312   312   -     -    | NVIDIA A100 Tensor Core GPU datasheet, 2021
A100 80GB PCIe   | 8.0 80 1935   19.5  156  312   312   -     -    | NVIDIA A100 Tensor Core GPU datasheet, 2021
A100-SXM4-80GB   | 8.0 80 2039   19.5  156  312   312   -     -    | NVIDIA A100 Tensor Core GPU datasheet, 2021
A30              | 8.0 24 933    10.3  82   165   165   -     -    | NVIDIA A30 datasheet, 2021
A10              | 8.6 24 600    31.2  62.5 125   125   -     -    | NVIDIA A10 datasheet, 2021
A40              | 8.6 48 696    37.4  74.8 149.7 149.7 -     -    | NVIDIA A40 datasheet, 2021
RTX A6000        | 8.6 48 768    38.7  77.4 154.8 154.8 -     -    | NVIDIA Ampere GA102 GPU Architecture, appendix A, 2021
GeForce RTX 3090 | 8.6 24 936    35.6  35.6 71    71    -     -    | NVIDIA Ampere GA102 GPU Architecture, appendix A, 2021
GeForce RTX 4090 | 8.9 24 1008   82.6  82.6 165.2 165.2 330.3 -    | NVIDIA Ada GPU Architecture, appendix A, 2023
L4               | 8.9 24 300    30.3  60   121   121   242.5 -    | NVIDIA L4 datasheet, 2023
L40              | 8.9 48 864    90.5  90.5 181   181   362   -    | NVIDIA L40 datasheet, 2023
L40S             | 8.9 48 864    91.6  183  362   362   733   -    | NVIDIA L40S datasheet, 2023
H100 PCIe        | 9.0 80 2000   51    378  756   756   1513  -    | NVIDIA H100 Tensor Core GPU datasheet, 2023 (half of its figures with sparsity)
H100 80GB HBM3   | 9.0 80 3350   67    494  989   989   1979  -    | NVIDIA H100 Tensor Core GPU datasheet, 2023 (half of its figures with sparsity)
H200             | 9.0 141 4800  67    494  989   989   1979  -    | NVIDIA H200 Tensor Core GPU datasheet, 2023 (half of its figures with sparsity)
B200             | 10.0 180 8000 80    1100 2250  2250  4500  9000 | NVIDIA Blackwell Architecture Technical Brief, 2024 (HGX B200)
GeForce RTX 5090 | 12.0 32 1792  104.8 104.8 209.5 209.5 419  1676 | NVIDIA RTX Blackwell GPU Architecture, appendix A, 2025
"""  # noqa: E501


def _model(row: str) -> GpuModel:
    name, figures, source = (cell.strip() for cell in row.split("|"))
    capability, memory, bandwidth, *peaks = figures.split()
    major, minor = capability.split(".")
    formats = ("fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4")
    found = {form: float(peak) for form, peak in zip(formats, peaks) if peak != "-"}
    return GpuModel(name, (int(major), int(minor)), int(memory), int(bandwidth), found, source=source)


MODELS = tuple(map(_model, _DATASHEETS.strip().splitlines()))


def formats_at(capability: Capability) -> tuple[str, ...]:
    """The formats that tensor cores multiply at a compute capability, in order of their arrival."""
    return tuple(name for name, first in TENSOR_CORES_FROM.items() if capability >= first)


ALSO = {"h100 sxm": "H100 80GB HBM3", "h100 sxm5": "H100 80GB HBM3", "a100 sxm": "A100-SXM4-80GB"}
"""Names that people use -> the names that the driver reports."""

VARIANTS = r"ti|super|laptop|mobile|maxq|d|pcie|sxm\d?|nvl\d*|hbm\d|\d+gb?"
"""What may follow a name: it changes speed and memory, not the compute capability."""


def find(name: str) -> tuple[GpuModel, ...]:
    """The models of that name, or compute capability; several if the name is a common beginning (``"A100"``)."""
    if number := re.fullmatch(r"([5-9]|1[0-2])\.(\d)", name.strip()):
        name = "any GPU except GTX 16 (mezzo doctor --gpu 'GTX 16')" if number[0] == "7.5" else "any GPU"
        return (GpuModel(name, (int(number[1]), int(number[2])), source="--gpu"),)
    wanted = _words(ALSO.get(" ".join(_words(name)), name))
    joined = "".join(wanted)
    same = tuple(model for model in MODELS if "".join(_words(model.name)) == joined)
    if not same and joined[:1].isalpha():  # an RTX 2080 is not an RTX 2080 Ti
        same = tuple(model for model in MODELS if _words(model.name)[: len(wanted)] == wanted)
    if same:
        return same
    bare = re.fullmatch(r"[5-9]|1[0-2]", name.strip())  # half a compute capability, and not GTX 10
    for capability, (_, names) in ARCHITECTURES.items():
        if names and not bare and re.fullmatch(f"({names.replace(' ', '|')})({VARIANTS})*", joined):
            return (GpuModel(name.strip(), capability),)
    if re.fullmatch(f"(16|1630|1650|1660)({VARIANTS})*", joined):
        return (GpuModel(name.strip(), (7, 5), tensor_cores=False),)
    every = " ".join(names for _, names in ARCHITECTURES.values()).upper().split()
    series = ("GTX 10", "GTX 16", "RTX 20", "RTX 30", "RTX 40", "RTX 50")
    known = [*series, *sorted(word for word in every if not word.isdigit())]
    raise UnknownNameError(
        f"unknown GPU {name!r}.{did_you_mean(name, known, 0.7)} Use NVIDIA's {', '.join(known)},\n"
        f"or the compute capability: mezzo doctor --gpu {f'{bare[0]}.0' if bare else 8.6}\n"
        "On the machine that has the GPU, leave --gpu out: mezzo doctor\ndeveloper.nvidia.com/cuda-gpus has a table. "
        "AMD's GPUs are not listed: PyTorch for ROCm calls them cuda, too, but Mezzo was not tested on them."
    )


def _words(name: str) -> list[str]:
    return re.sub(r"[^a-z0-9.]+|nvidia|tesla|geforce|gpu|series|[gr]tx", " ", name.lower()).split()


@dataclass(frozen=True)
class Recommendation:
    """A precision to ask for (``"fp32"``, ``"bf16"``, ``"fp16"``), and the reasons as sentences."""

    precision: str
    reasons: tuple[str, ...]


FP16_RANGE = "fp16 only represents 6e-8 to 65504, so Mezzo scales the loss and skips steps that overflow."


def from_capability(capability: Capability, tensor_cores: bool = True) -> Recommendation:
    """The precision to use on a CUDA device of this compute capability, without having it."""
    this = "and this is {}.{}.".format(*capability)
    reasons = {
        "bf16": (
            f"bf16: tensor cores support it from compute capability 8.0, {this}",
            "bf16 is preferred to fp16: it is as fast and has fp32's range, so it needs no loss scale.",
        ),
        "fp16": (
            f"fp16: tensor cores support it from compute capability 7.0, {this}",
            f"bf16 needs 8.0. Below that PyTorch runs it without tensor cores, slower than fp32. {FP16_RANGE}",
        ),
        "fp32": (
            f"fp32: GPUs before Volta (compute capability 7.0) and GTX 16 have no tensor cores, {this}",
            "16 bits would save memory there, but no time.",
        ),
    }
    has = formats_at(capability) if tensor_cores else ()
    chosen = next(form for form in reasons if form == "fp32" or form in has)
    narrow = [form for form in ("fp8", "nvfp4") if form in has]
    gain = f"{' and '.join(narrow)}: faster still in linear layers, at most by the ratio of peaks, but less precise."
    compare = f"Compare: --precision {','.join(['bf16', *narrow])}"
    return Recommendation(chosen, (*reasons[chosen], *[f"{gain} {compare}"] * bool(narrow)))
