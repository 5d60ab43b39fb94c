"""What a training with Keras says of its machine: versions by what was used, GPUs by backend, formats by device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mezzo.keras import hardware


def framework(**parts: Any) -> Any:
    return SimpleNamespace(__version__="9.9", **parts)


def without(monkeypatch: pytest.MonkeyPatch, **present: Any) -> None:
    """Of the frameworks, these alone are imported."""
    for name in ("keras", "tensorflow", "jax", "torch", "tf_keras"):
        if name in present:
            monkeypatch.setitem(sys.modules, name, present[name])
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)


def torch_with(capability: tuple[int, int] | None) -> Any:
    return framework(
        cuda=SimpleNamespace(
            is_available=lambda: capability is not None,
            get_device_name=lambda: "NVIDIA T4",
            get_device_capability=lambda: capability,
        )
    )


def jax_with(platform: str, **told: Any) -> Any:
    return framework(
        local_devices=lambda: [SimpleNamespace(platform=platform, device_kind="NVIDIA A100", **told)]
    )


def tensorflow_with(*details: dict[str, Any]) -> Any:
    return framework(
        config=SimpleNamespace(
            list_physical_devices=lambda kind: list(range(len(details))) if kind == "GPU" else ["CPU"],
            experimental=SimpleNamespace(get_device_details=lambda device: details[device]),
        )
    )


GPUS = [
    ("torch", torch_with(None), None, None),
    ("torch", torch_with((7, 5)), "NVIDIA T4", ["fp16"]),
    ("torch", torch_with((6, 1)), "NVIDIA T4", []),
    ("torch", torch_with((7, 0)), "NVIDIA T4", ["fp16"]),
    ("torch", torch_with((8, 0)), "NVIDIA T4", ["bf16", "fp16"]),
    ("jax", jax_with("cpu"), None, None),
    ("jax", jax_with("gpu", compute_capability="7.5"), "NVIDIA A100", ["fp16"]),
    ("jax", jax_with("tpu"), "NVIDIA A100", ["bf16", "fp16"]),
    ("jax", jax_with("gpu", compute_capability="gfx90a"), "NVIDIA A100", ["bf16", "fp16"]),
    ("tensorflow", tensorflow_with(), None, None),
    (
        "tensorflow",
        tensorflow_with({"device_name": "L4", "compute_capability": (8, 9)}),
        "L4",
        ["bf16", "fp16"],
    ),
    ("tensorflow", tensorflow_with({"compute_capability": (7, 5)}), "GPU", ["fp16"]),
    (
        "",
        tensorflow_with({"compute_capability": (8, 9)}),
        None,
        None,
    ),  # Keras was not imported: nobody is asked
]


@pytest.mark.parametrize(("backend", "module", "gpu", "formats"), GPUS)
def test_the_gpu_and_its_formats(
    backend: str, module: Any, gpu: str | None, formats: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu", lambda: ("a CPU", {"fma", "amx_bf16"}))
    without(monkeypatch, **{backend or "tensorflow": module})
    told = hardware.describe(backend)
    assert json.loads(json.dumps(told)) == told
    assert told["gpu"] == gpu
    assert told["device_type"] == ("cpu" if gpu is None else "gpu")
    assert told["native_formats"] == (["bf16"] if formats is None else formats)
    assert (told["cpu"], told["backend"]) == ("a CPU", backend)


@pytest.mark.parametrize(
    ("backend", "used", "versions"),
    [
        ("torch", True, {"keras", "tensorflow", "torch", "tf_keras"}),
        ("jax", True, {"keras", "tensorflow", "jax", "torch", "tf_keras"}),
        ("torch", False, {"tensorflow", "torch", "tf_keras"}),
    ],
)
def test_versions_of_what_was_used(
    backend: str, used: bool, versions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = dict.fromkeys(("keras", "tensorflow", "tf_keras"), framework())
    without(monkeypatch, jax=jax_with("cpu"), torch=torch_with(None), **parts)
    told = hardware.describe(backend, used=used)
    names = {"keras", "tensorflow", "jax", "torch", "tf_keras"}
    assert {name: told[name] for name in names & told.keys()} == dict.fromkeys(versions, "9.9")
    without(monkeypatch)
    assert not names & hardware.describe("").keys()


CPUINFO = """\
processor\t: 0
model name\t: Some CPU @ 2.00GHz
flags\t\t: {flags}

processor\t: 1
model name\t: Another
flags\t\t: none
"""


@pytest.mark.parametrize(
    ("flags", "formats"),
    [("fpu sse2", []), ("amx_bf16 avx512_fp16", ["bf16", "fp16"]), ("asimdhp", ["fp16"])],
)
@pytest.mark.parametrize("key", ["flags", "Features"])
def test_the_cpu(key: str, flags: str, formats: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = CPUINFO.format(flags=flags).replace("flags", key)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    told = hardware.describe("")
    assert told["cpu"] == "Some CPU @ 2.00GHz"
    assert told["native_formats"] == formats


def test_a_machine_without_proc_or_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path, **_: Any) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(hardware.platform, "processor", lambda: "arm64")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    told = hardware.describe("")
    assert (told["cpu"], told["native_formats"], told["usable_cores"]) == ("arm64", [], 7)
    assert hardware.resident() is None


PEAKS = {
    "torch": framework(
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            reset_peak_memory_stats=lambda: None,
            max_memory_allocated=lambda: 5,
        )
    ),
    "tensorflow": framework(
        config=SimpleNamespace(
            list_logical_devices=lambda kind: [SimpleNamespace(name="GPU:0")],
            experimental=SimpleNamespace(
                reset_memory_stats=lambda name: None, get_memory_info=lambda name: {"peak": 5}
            ),
        )
    ),
    "jax": jax_with("gpu", memory_stats=lambda: {"peak_bytes_in_use": 5}),
}


@pytest.mark.parametrize("backend", PEAKS)
def test_peak_memory_of_a_gpu_is_its_allocators(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, **{backend: PEAKS[backend]})
    record = hardware.peak_memory(backend, 0)()
    assert record is not None
    assert record.peak_bytes == 5
    assert "allocator" in record.how
