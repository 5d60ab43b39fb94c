"""Which implementation of the kernels a device uses: Triton's on a GPU, Numba's on a CPU, or the reference.

Which op has a kernel of Mezzo's, and on which devices, is in the table of operations (`mezzo.core.rules`). A kernel for
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

KERNELS = "MEZZO_KERNELS"
"""Environment variable that forces one implementation for every device."""

IMPLEMENTATIONS = ("reference", "numba", "triton")

# Device type -> the compiler that its kernels need, and how to get it.
_COMPILED = {"cpu": ("numba", 'pip install "mezzo[cpu]"'), "cuda": ("triton", "pip install triton")}


def implementation(device_type: str) -> str:
    """``"triton"``, ``"numba"`` or ``"reference"``, for a device type such as ``"cpu"`` or ``"cuda"``.

    A CPU's kernels are compiled by Numba and a CUDA device's by Triton, where they are installed; otherwise,
    and on other devices, the reference serves: the same numbers from PyTorch operations, many times
    slower. The first such fallback of a process warns. The environment's ``MEZZO_KERNELS`` overrides this.
    Neither compiler is imported here.

    Raises:
        UnknownNameError: ``MEZZO_KERNELS`` names none of the three.
        UsageError: it names one that would read this device's addresses where they mean nothing: Numba off the
            CPU, Triton off CUDA (but for its interpreter, which runs on a CPU: ``TRITON_INTERPRET=1``).
    """
    forced = os.environ.get(KERNELS)
    if forced:
        if forced not in IMPLEMENTATIONS:
            raise unknown_name("implementation", forced, IMPLEMENTATIONS, where=f"{KERNELS}={forced!r}: ")
        if forced != "reference" and not _runs_on(forced, device_type):
            raise UsageError(
                f"{KERNELS}={forced!r}: its kernels cannot run on {device_type!r}. Use {KERNELS}=reference, or unset "
                "it to let each device have its own."
            )
        return forced
    if device_type not in _COMPILED:
        return "reference"
    compiler, install = _COMPILED[device_type]
    if is_installed(compiler):
        return compiler
    _warn_once(device_type, compiler, install)
    return "reference"


def _runs_on(compiler: str, device_type: str) -> bool:
    interpreted = compiler == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return device_type == "cpu" if interpreted else _COMPILED.get(device_type, ("",))[0] == compiler


# Implementation -> the file that has it in each kernel's folder.
_FILES = {"reference": "reference", "numba": "cpu", "triton": "triton"}


def load(package: str, device_type: str) -> ModuleType:
    """The module of a kernel's package that serves a device type: its reference.py, cpu.py or triton.py.

    A kernel without a triton.py runs its reference on CUDA.
    """
    module = f"{package}.{_FILES[implementation(device_type)]}"
    if module.endswith(".triton") and not is_installed(module):
        module = f"{package}.reference"
    return importlib.import_module(module)


def kernel(path: str) -> Callable[..., Any]:
    """What ``module:function`` names in this package; the module is imported now."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


def serves_custom_kernels(device_type: str) -> bool:
    """Whether the kernels can run on a kind of device: on CUDA they need Triton, on a CPU nothing.

    Without Numba a CPU runs their reference, in FP32 all the same.
    """
    if device_type == "cpu":
        return True
    forced = os.environ.get(KERNELS)
    return device_type == "cuda" and (bool(forced) or is_installed("triton"))


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def _warn_once(device_type: str, compiler: str, install: str) -> None:
    warnings.warn(
        f"{compiler} is not installed, so Mezzo's kernels on {device_type} are plain PyTorch operations: the "
        f"same numbers, many times slower. To compile them: {install}",
        UserWarning,
        stacklevel=4,
    )
