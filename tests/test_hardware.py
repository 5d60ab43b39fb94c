"""What the machine is: the 16-bit formats by device, the override, and that nothing is touched by asking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mezzo.core.errors import UnknownNameError
from mezzo.pytorch import hardware
from mezzo.pytorch.hardware import Gpu, cuda_formats, native_formats, visible_gpu

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def unassumed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test sees this machine, and leaves no cached answer behind."""
    monkeypatch.delenv(hardware.ASSUME_NATIVE, raising=False)
    yield
    for cached in (hardware.capabilities, hardware._nvidia_smi):
        getattr(cached, "cache_clear", lambda: None)()


def test_describe_is_plain_json_and_complete() -> None:
    described = hardware.describe()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    names = "os python torch mezzo cpu isa cores logical_cores usable_cores threads memory_bytes gpu"
    assert set(described) == set(names.split())
    assert described["torch"] == torch.__version__
    assert described["threads"] == torch.get_num_threads()
    assert min(described["cores"], described["usable_cores"]) >= 1
    assert max(described["cores"], described["usable_cores"]) <= described["logical_cores"]
    assert described["cpu"]
    assert set(described["isa"]) <= set(hardware.ISA_SHOWN)


CPUS = [
    ({"avx512_bf16": True}, {"bf16"}),
    ({"amx_bf16": True, "amx_fp16": True}, {"bf16"}),
    ({"avx_ne_convert": True, "avx2": True}, set()),
    ({"bf16": True, "fp16_arith": True}, {"bf16"}),
    ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": True}, set()),
    ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, {"bf16"}),
    ({"cpu_name": "Intel Xeon", "avx512_bf16": True}, {"bf16"}),
    ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "avx512_fp16": True}, {"bf16"}),
]


@pytest.mark.parametrize(("has", "expected"), CPUS)
def test_a_cpu_has_bf16_by_its_instructions_and_never_fp16(
    has: Any, expected: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(hardware, "capabilities", lambda: has)
    assert native_formats("cpu") == expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert native_formats("cpu") == frozenset()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((6, 1), set()), ((7, 0), {"fp16"}), ((8, 0), {"fp16", "bf16"}), ((12, 0), {"fp16", "bf16"})],
)
def test_a_cuda_device_by_its_capability(capability: Any, expected: set[str], monkeypatch: Patch) -> None:
    assert cuda_formats(capability) == expected
    monkeypatch.setattr(hardware, "gpu", lambda: Gpu("a GPU", capability, 1, 1))
    assert native_formats("cuda") == expected
    assert native_formats("xpu") == frozenset()


@pytest.mark.parametrize("value", ["", "bf16", " bf16, fp16 ", ","])
def test_the_environment_overrides_every_device(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", value)
    expected = {name for name in ("bf16", "fp16") if name in value}
    assert native_formats("cpu") == native_formats("cuda") == expected
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16,f16")
    with pytest.raises(UnknownNameError, match=r"MEZZO_ASSUME_NATIVE='bf16,f16': .*'f16'.*'fp16'"):
        native_formats("cpu")


LISTING = """\
0, GPU-aaaa1111, 8.0, 81920, NVIDIA A100-SXM4-80GB
1, GPU-bbbb2222, 7.5, 15360, Tesla T4, by name with a comma
"""
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 81920 << 20, 2)
T4 = Gpu("Tesla T4, by name with a comma", (7, 5), 15360 << 20, 1)
VISIBLE = [
    (None, A100),
    ("1", T4),
    ("1,0", Gpu(T4.name, T4.capability, T4.memory_bytes, 2)),
    ("GPU-bbbb", T4),
    ("1,7,0", T4),
    ("7", None),
    ("", None),
    ("MIG-89c850dc-38e3-57df-85c7-690c186b68e9", Gpu(A100.name, A100.capability, A100.memory_bytes, 1)),
]


@pytest.mark.parametrize(("visible", "expected"), VISIBLE)
def test_the_gpu_is_the_first_that_this_process_may_see(visible: str | None, expected: Gpu | None) -> None:
    assert visible_gpu(LISTING, visible) == expected


def test_a_gpu_that_shares_the_systems_memory_has_that_much() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = visible_gpu("0, GPU-cccc3333, 12.1, [N/A], NVIDIA GB10\n", None)
    assert found == Gpu("NVIDIA GB10", (12, 1), memory, 1)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, *, has_context: bool, ask: Any) -> None:
    """A build for CUDA, whose driver's tool prints LISTING; `ask` is what PyTorch says of the device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda: LISTING)
    told = {"is_initialized": lambda: has_context, "current_device": lambda: 0, "device_count": lambda: 1}
    for name, value in {**told, "is_available": ask, "get_device_properties": ask}.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_the_drivers_tool_is_asked_before_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("this would make a CUDA context")

    on_a_gpu(monkeypatch, has_context=False, ask=never)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.gpu() == T4


def test_pytorch_is_asked_once_it_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, total_memory=24 << 30)
    on_a_gpu(monkeypatch, has_context=True, ask=lambda *_: properties)
    assert hardware.gpu() == Gpu("NVIDIA L4", (8, 9), 24 << 30, 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert hardware.gpu() == Gpu("NVIDIA L4", None, 24 << 30, 1)


@pytest.mark.usefixtures("forked")
def test_nothing_is_asked_at_import() -> None:
    code = (
        "import subprocess, torch\n"
        "def never(*a, **k): raise AssertionError('asked at import')\n"
        "subprocess.run = never\n"
        "torch.cuda.is_available = torch.cuda.get_device_properties = torch.cuda.device_count = never\n"
        "torch.cpu.get_capabilities = never\n"
        "import mezzo.pytorch.hardware\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
