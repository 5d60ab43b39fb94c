"""The description of the hardware for Keras: versions by use, GPUs by backend, formats by device; and peak memory."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mezzo.keras import hardware

NAMES = {"keras", "tensorflow", "jax", "torch", "tf_keras"}


def framework(**parts: Any) -> Any:
    return SimpleNamespace(__version__="9.9", **parts)


def only(monkeypatch: pytest.MonkeyPatch, **present: Any) -> None:
    """Of the frameworks, these alone are imported."""
    for name in NAMES:
        if name in present:
            monkeypatch.setitem(sys.modules, name, present[name])
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)


def torch_with(capability: tuple[int, int] | None) -> Any:
    cuda = SimpleNamespace(
        is_available=lambda: capability is not None,
        is_initialized=lambda: True,
        get_device_name=lambda: "NVIDIA T4",
        get_device_capability=lambda: capability,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: 5,
    )
    return framework(cuda=cuda)


def jax_with(platform: str, **told: Any) -> Any:
    stats = {"peak_bytes_in_use": 5}
    device = SimpleNamespace(platform=platform, device_kind="NVIDIA A100", memory_stats=lambda: stats, **told)
    return framework(local_devices=lambda: [device])


def tensorflow_with(*details: dict[str, Any]) -> Any:
    config = SimpleNamespace(
        list_physical_devices=lambda kind: list(range(len(details))) if kind == "GPU" else ["CPU"],
        list_logical_devices=lambda kind: [SimpleNamespace(name="GPU:0")] * len(details),
        get_device_details=lambda device: details[device],
        reset_memory_stats=lambda name: None,
        get_memory_info=lambda name: {"peak": 5},
    )
    config.experimental = config
    return framework(config=config)


BOTH = ["bf16", "fp16"]
GPUS = [
    ("torch", torch_with(None), None, None),
    ("torch", torch_with((7, 0)), "NVIDIA T4", ["fp16"]),
    ("torch", torch_with((6, 1)), "NVIDIA T4", []),
    ("jax", jax_with("cpu"), None, None),
    ("jax", jax_with("gpu", compute_capability="7.5"), "NVIDIA A100", ["fp16"]),
    ("jax", jax_with("gpu", compute_capability="gfx90a"), "NVIDIA A100", BOTH),
    ("tensorflow", tensorflow_with({"device_name": "L4", "compute_capability": (8, 9)}), "L4", BOTH),
    ("tensorflow", tensorflow_with({"compute_capability": (7, 5)}), "GPU", ["fp16"]),
    ("", tensorflow_with({"compute_capability": (8, 9)}), None, None),  # Keras was not imported
]


@pytest.mark.parametrize(("backend", "module", "gpu", "formats"), GPUS)
def test_the_gpu_and_its_memory(backend: str, module: Any, gpu: Any, formats: Any, monkeypatch: Any) -> None:
    for place in ("mezzo.core.hardware.cpu", "mezzo.keras.hardware.cpu"):
        monkeypatch.setattr(place, lambda: ("a CPU", frozenset({"fma", "amx_bf16"})))
    only(monkeypatch, **{backend or "tensorflow": module})
    told = hardware.describe(backend)
    assert json.loads(json.dumps(told)) == told
    assert told["gpu"] == gpu
    assert told["device_type"] == ("cpu" if gpu is None else "gpu")
    assert told["native_formats"] == (["bf16"] if formats is None else formats)
    assert (told["cpu"], told["backend"]) == ("a CPU", backend)
    if gpu is not None:
        record: Any = hardware.peak_memory(backend, 0)()
        assert record.peak_bytes == 5
        assert "allocator" in record.how


def test_versions_of_what_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dict.fromkeys(("keras", "tensorflow", "tf_keras"), framework())
    only(monkeypatch, jax=jax_with("cpu"), torch=torch_with(None), **parts)
    for backend, used, unused in (("jax", True, set()), ("torch", False, {"keras", "jax"})):
        told = hardware.describe(backend, used=used)
        assert {name: told[name] for name in NAMES & told.keys()} == dict.fromkeys(NAMES - unused, "9.9")
