"""Numba loops without branches on formats: a template module, written to a cache with other bound names.

In a template the assignments marked ``# bound`` vary; machine code is cached next to the written module. The cache
(`MEZZO_CACHE_DIR`, else ``mezzo`` in `XDG_CACHE_HOME` or ``~/.cache``) is executed, so others must not write to it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding
import numba
import torch

from mezzo.core.errors import MezzoError
from mezzo.core.version import VERSION

CACHE = "MEZZO_CACHE_DIR"  # environment variable that names the cache folder

_numba: Any = numba  # its annotations cover a part of it, and another part in each release
_BOUND = re.compile(r"^(\w+) = (\S+)  # bound$", re.MULTILINE)


class KernelError(MezzoError, RuntimeError):
    """Numba could not compile a kernel on this machine."""


class Kernel(NamedTuple):
    """A C function ``void main(int64_t *job)``, and whether it was loaded from the cache, not compiled."""

    address: int
    from_cache: bool


# dtype -> the suffix of its functions in `cpu`, and the type behind a pointer to its elements.
_DTYPES: Mapping[torch.dtype, tuple[str, str]] = MappingProxyType(
    {torch.float32: ("fp32", "float32"), torch.bfloat16: ("bf16", "int16"), torch.float16: ("fp16", "int16")}
)


def elements(dtype: torch.dtype, **names: str) -> dict[str, str]:
    """Bindings for a tensor's elements: name of the function in `cpu` without its dtype (or ``at``) -> bound name."""
    name, element = _DTYPES[dtype]
    return {
        bound: f"cpu.{element}_at" if verb == "at" else f"cpu.{verb}_{name}" for verb, bound in names.items()
    }


_kernels: dict[tuple[str, str, tuple[tuple[str, str], ...]], Kernel] = {}
_keep_alive: list[Any] = []


def kernel(template: ModuleType, bindings: Mapping[str, str], main: str = "main") -> Kernel:
    """A template's function ``main(job)`` with other values of bound names; KernelError if it can't be compiled."""
    key = (template.__name__, main, tuple(sorted(bindings.items())))
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = _compiled(*_written(template, bindings), main)
    return found


def _written(template: ModuleType, bindings: Mapping[str, str]) -> tuple[str, Path]:
    """The written module's name and file; an existing file is used again."""
    text = inspect.getsource(template)
    names = {match[1] for match in _BOUND.finditer(text)}
    if unknown := set(bindings) - names:
        raise ValueError(
            f"{template.__name__} has no bound {', '.join(sorted(unknown))}; it has {sorted(names)}"
        )

    def bind(match: re.Match[str]) -> str:
        return f"{match[1]} = {bindings.get(match[1], match[2])}"

    text = _BOUND.sub(bind, text)
    place = "_".join(template.__name__.split(".")[-2:])
    name = f"{place}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = _folder() / f"{name}.py"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the cache may have been cleared
    if not file.exists():  # a new file has a new date, and that would make Numba compile again
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, file)
    return name, file


def _compiled(name: str, file: Path, main: str) -> Kernel:
    module_name = f"mezzo_kernels.{name}.{main}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # Numba looks functions up by their module's name
    try:
        spec.loader.exec_module(module)
        compiled = entry(getattr(module, main))
    except Exception as error:
        del sys.modules[module_name]
        raise KernelError(
            f"Numba {numba.__version__} could not compile {file}: {type(error).__name__}: {error}. To "
            "continue without it, set MEZZO_KERNELS=reference: the same results, many times slower."
        ) from error
    _keep_alive.append(compiled)
    return Kernel(compiled.address, compiled.cache_hits > 0)


def entry(main: Callable[[Any], None]) -> Any:
    """Compile ``void main(int64_t *job)``, or load it from the cache next to its source; Numba's object for it."""
    types = _numba.types
    return _numba.cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")(main)


@functools.cache
def _folder() -> Path:
    """The cache folder of these sources, compilers and processor."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    sources = (source for each in ("cpu*.py", "__init__.py", "formulas.py") for source in root.rglob(each))
    for source in sorted(sources):
        digest.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    cpu = llvmlite.binding.get_host_cpu_name()
    features = llvmlite.binding.get_host_cpu_features().flatten()
    for word in (VERSION, numba.__version__, llvmlite.__version__, sys.version, cpu, features):
        digest.update(b"\0" + word.encode())
    name = digest.hexdigest()[:16]
    parent = _cache()
    if parent is not None:
        with contextlib.suppress(OSError):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = (parent / name).resolve()
            folder.mkdir(mode=0o700, exist_ok=True)
            why = _unsafe(folder)
            if not why:
                with tempfile.TemporaryFile(dir=folder):
                    return folder
            warnings.warn(
                f"Mezzo compiles its kernels again in each process, as the kernel cache is not safe: {why}. Delete "
                f"{folder} and run `chmod 700 {folder.parent}`, or set {CACHE} to a folder that belongs to you.",
                UserWarning,
                stacklevel=2,
            )
    temporary = Path(tempfile.mkdtemp(prefix="mezzo-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _unsafe(folder: Path) -> str:
    """Why other users could change what is executed from the folder, or ""; its parent may be sticky, as /tmp is."""
    if not hasattr(os, "getuid"):  # Windows: access lists, which a user's own folders inherit
        return ""
    for place, forbidden in ((folder.parent, 0o022), (folder, 0o077)):
        found = place.lstat()
        if place == folder.parent and found.st_mode & stat.S_ISVTX:
            continue
        if found.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to user {found.st_uid}, not to you (user {os.getuid()})"
        if found.st_mode & forbidden:
            return f"other users have access to {place} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _cache() -> Path | None:
    if CACHE in os.environ:
        return Path(os.environ[CACHE])
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "mezzo"
    except RuntimeError:  # a user without a home
        return None


# A second pool of threads would contend with PyTorch's, which spin for a while after each operation. GNU's, Intel's and
# LLVM's OpenMP libraries all have `GOMP_parallel`, and PyTorch has loaded one of them: a parallel region costs
# microseconds. On macOS and Windows, and in a forked process, whose OpenMP threads are gone, Python's threads serve.

_forked = False


def parallel(address: int, data: int) -> None:
    """Call ``void f(void *data)`` on each of PyTorch's threads, which share the work by an atomic counter in data."""
    threads = torch.get_num_threads()
    if threads == 1:
        _function(address)(data)
    elif has_openmp():
        _openmp()(address, data, threads, 0)
    else:
        others = [_pool(threads - 1).submit(_function(address), data) for _ in range(threads - 1)]
        _function(address)(data)
        for other in others:
            other.result()


def alone(address: int, data: int) -> None:
    """Call a C function ``void f(void *data)`` on this thread."""
    _function(address)(data)


ALONE = 1 << 15  # elements up to which one thread is done before a second has begun


def run(address: int, job: ctypes.Array[ctypes.c_int64], elements: int) -> None:
    """Call a kernel on a job over so many elements, on this thread or on all."""
    (alone if elements <= ALONE else parallel)(address, ctypes.addressof(job))


def shared(count: int) -> int:
    """The pieces that a thread takes at once: a fourth of its part, because neighbors disturb prefetching."""
    return -(-count // (4 * torch.get_num_threads()))


def has_openmp() -> bool:
    """Whether `parallel` uses PyTorch's threads, and not Python's."""
    return not _forked and _openmp() is not None


@functools.cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@functools.cache
def _openmp() -> Any:
    # First what interposes on PyTorch's own calls (a preloaded library), then what libtorch is linked to.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with contextlib.suppress(OSError, AttributeError, TypeError):
            gomp = ctypes.CDLL(library).GOMP_parallel
            gomp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            gomp.restype = None
            return gomp
    return None


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mezzo-kernels")


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
