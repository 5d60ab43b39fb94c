"""The modules that can be looked at, by their paths in the model without wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

# A wrapper keeps what it wraps under one of these names: torch.compile, FSDP, torch's CheckpointWrapper.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def joined(path: str, name: str) -> str:
    """A path and a name below it; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def paths(model: nn.Module, *, every: bool = False) -> dict[str, nn.Module]:
    """Modules whose outputs can be looked at, by path: leaves, those that hold parameters directly, or `every` one."""
    found: dict[str, nn.Module] = {}
    for path, module in walk(model):
        own = any(p is not None for p in module._parameters.values())
        # What `Module.compile()` compiles includes its hooks; what `torch.compile` wraps has them outside.
        hooks_run = module._compiled_call_impl is None
        if hooks_run and (is_opaque(module) or every or own or not any(True for _ in module.children())):
            found[path] = module
    return found


def opaque_part(model: nn.Module) -> str:
    """The first module whose inside can't be looked at: its path, or "the model"; "" if there is none."""
    return next((path or "the model" for path, module in walk(model) if is_opaque(module)), "")


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
    for name, child in module.named_children():
        wraps = name in _WRAPPED or (name == "module" and isinstance(module, _PARALLEL))
        yield from walk(child, path if wraps else joined(path, name), visited, inside=inside)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrappers of `torch.compile` and of data parallelism."""
    while True:
        if "_orig_mod" in model._modules:  # a scripted module's have no `get`
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, _PARALLEL):
            model = model.module
        else:
            return model


def unwrapped_path(path: str) -> str:
    """A path, or a parameter's name, without the names of wrappers, except for data parallelism's."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


@contextmanager
def around_calls(
    modules: Iterable[nn.Module],
    before: Callable[..., None],
    after: Callable[..., Any],
    *,
    prepend: bool = False,
) -> Iterator[None]:
    """Call `before(module, args, kwargs)` and `after(module, args, output)` around each call, also of one that raises.

    `prepend`: before the modules' own hooks.
    """
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(before, prepend=prepend, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after, always_call=True))
        yield
