"""The modules that can be looked at, by their paths in the model without wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

# A wrapper keeps what it wraps under one of these names: torch.compile, FSDP, torch's CheckpointWrapper.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass
class Paths:
    """Modules whose outputs can be looked at, by path, and paths of compiled ones, whose inside cannot be."""

    seen: dict[str, nn.Module] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)


def paths(model: nn.Module, *, every: bool = False) -> Paths:
    """The modules of a model that are leaves or hold parameters directly, or `every` one."""
    found = Paths()
    for path, module in walk(model):
        opaque = is_opaque(module)
        if opaque:
            found.compiled.append(path)
        own = any(p is not None for p in module._parameters.values())
        # What `Module.compile()` compiles includes its hooks; what `torch.compile` wraps has them outside.
        hooks_run = module._compiled_call_impl is None
        if hooks_run and (opaque or every or own or not any(True for _ in module.children())):
            found.seen[path] = module
    return found


def parameter_paths(model: nn.Module) -> dict[int, tuple[str, str]]:
    """id of a parameter -> path of its first module, and its name there."""
    found: dict[int, tuple[str, str]] = {}
    for path, module in walk(model, inside=True):
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), (path, name))
    return found


def path_of(part: nn.Module, model: nn.Module) -> str | None:
    """The path of a module in a model; None if it is not in it."""
    return next((path for path, module in walk(model, inside=True) if module is part), None)


def joined(path: str, name: str) -> str:
    """A path and a name below it; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def is_opaque(module: nn.Module) -> bool:
    """Whether a module's call does not call its submodules in Python: it is compiled, or a script."""
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or isinstance(module, torch.jit.ScriptModule)
    )


def walk(
    module: nn.Module, path: str = "", visited: set[int] | None = None, *, inside: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Modules not in `visited` (ids) with their paths, each once, parents first; `inside`: compiled modules too."""
    visited = set() if visited is None else visited
    if id(module) in visited:
        return
    visited.add(id(module))
    yield path, module
    if is_opaque(module) and not inside:
        return
    for name, child in module._modules.items():
        if child is not None:
            wraps = name in _WRAPPED or (name == "module" and isinstance(module, _PARALLEL))
            below = path if wraps else joined(path, name)
            yield from walk(child, below, visited, inside=inside)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrappers of `torch.compile` and of data parallelism."""
    while True:
        children = model._modules  # a traced module's has no `get`
        wrapped = children["_orig_mod"] if "_orig_mod" in children else None  # noqa: SIM401
        if wrapped is None and isinstance(model, _PARALLEL):
            wrapped = model.module
        if wrapped is None:
            return model
        model = wrapped
