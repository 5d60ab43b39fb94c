"""Which implementation of the kernels a device uses: Triton's on a GPU, Numba's on a CPU, or the reference.

The table of operations (`mezzo.core.rules`) says which op has a kernel of Mezzo's, and on which devices. A kernel for
an op takes the op's own arguments, with a 16-bit first tensor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mezzo.core.errors import UsageError, unknown_name

KERNELS = "MEZZO_KERNELS"  # environment variable that forces one implementation for every device

# Implementation -> its file in a kernel's folder.
_FILES = {"reference": "reference", "numba": "cpu", "triton": "triton"}

# Device type -> the compiler that its kernels need, and how to get it.
_COMPILED = {"cpu": ("numba", "pip install numba"), "cuda": ("triton", "pip install triton")}


def implementation(device_type: str) -> str:
    """``"triton"`` or ``"numba"``; ``"reference"`` without the compiler (one warning per process) and elsewhere."""
    forced = os.environ.get(KERNELS)
    if forced:
        if forced not in _FILES:
            raise unknown_name("implementation", forced, tuple(_FILES), where=f"{KERNELS}={forced!r}: ")
        is_interpreted = forced == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        runs_on = {"reference": device_type, "numba": "cpu", "triton": "cpu" if is_interpreted else "cuda"}
        if device_type != runs_on[forced]:
            raise UsageError(
                f"{KERNELS}={forced!r}: these kernels cannot run on {device_type!r}. Set {KERNELS}=reference, or unset "
                f"{KERNELS}, and Mezzo chooses for each device."
            )
        return forced
    if device_type not in _COMPILED:
        return "reference"
    compiler, install = _COMPILED[device_type]
    if is_installed(compiler):
        return compiler
    _warn_once(device_type, compiler, install)
    return "reference"


def load(package: str, device_type: str) -> ModuleType:
    """The module of a kernel's package that serves a device type: its reference.py, cpu.py or triton.py."""
    return importlib.import_module(f"{package}.{_FILES[implementation(device_type)]}")


@functools.cache
def cpu_loops(module: str, forced: str | None) -> ModuleType | None:
    """A module of this package with Numba's loops, if there is Numba; `forced` is MEZZO_KERNELS."""
    return importlib.import_module(f"{__package__}.{module}") if implementation("cpu") == "numba" else None


def kernel(path: str) -> Callable[..., Any]:
    """The function ``module:function`` of this package; the module is imported now."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


def serves_custom_kernels(device_type: str) -> bool:
    """Whether the kernels can run on a device type: on a CPU always (as reference without Numba), on CUDA by Triton."""
    has_triton = bool(os.environ.get(KERNELS)) or is_installed("triton")
    return device_type == "cpu" or (device_type == "cuda" and has_triton)


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def _warn_once(device_type: str, compiler: str, install: str) -> None:
    warnings.warn(
        f"{compiler} is not installed, so Mezzo's kernels on {device_type} run as plain PyTorch operations: the same "
        f"results, many times slower. For compiled kernels: {install}",
        UserWarning,
        stacklevel=4,
    )
