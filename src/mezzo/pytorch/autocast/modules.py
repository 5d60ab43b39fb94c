"""Per-module overrides: the modules that a policy's patterns name run in a format of their own.

A matching module's `forward` becomes a small object that opens a region of the module's own format around the
class's `forward`. It is an attribute of the module and refers to it, so `copy.deepcopy` and `pickle` carry it
over to the copy; the module's class, its hooks and its `state_dict` stay as they are, and Dynamo traces
through it.

An fp8 policy leaves some linear layers in bf16, by patterns that it then shows (`with_heads`). The last layer of a
model makes logits, or a value that a loss reads: factors with 3 bits of mantissa would cost most there and, in one
layer of many, save least. So it stays in bf16, and so does each layer that shares an embedding's weight.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mezzo.core.errors import UnknownNameError
from mezzo.core.policy import Policy
from mezzo.core.policy_text import is_pattern, matches
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.autocast.context import autocast, default_device_type

__all__ = ["ModuleOverrides", "apply_module_overrides", "described", "heads_of", "with_heads"]


class ModuleOverrides:
    """The overrides that `apply_module_overrides` put in place: ``formats`` by module path, until `remove`.

    Also a context manager: leaving it removes them.
    """

    def __init__(self, model: torch.nn.Module, formats: Mapping[str, str]) -> None:
        self.formats = dict(formats)
        self._model = model

    def remove(self) -> None:
        """Give each module its own `forward` back. Safe to call twice."""
        for path in self.formats:
            module = self._model.get_submodule(path)
            override = module.__dict__.get("forward")
            if isinstance(override, _InOwnFormat):
                override.undo()
        self.formats = {}

    def __enter__(self) -> ModuleOverrides:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def apply_module_overrides(
    model: torch.nn.Module, policy: Policy, device_type: str | None = None
) -> ModuleOverrides:
    """Inside the policy's regions, run each module that one of its patterns matches in that pattern's format.

    For such a module it equals ``with mezzo.autocast(replace(policy, compute=format)): module(...)``; for
    ``fp32``, autocast off and every floating argument (in tuples, lists and dicts too) cast to FP32, FP64
    left alone. A 16-bit module where the policy around it computes in FP32 hands its results back in FP32.
    Where no policy is in force, and where autocast is disabled, nothing changes. A module inside an overridden
    one that no pattern matches runs in that one's format. Ops that use a submodule's weights without calling it
    (`nn.MultiheadAttention` with its ``out_proj``) are not reached. Parameters stay as they are: an ``fp32``
    module needs FP32 parameters.

    Args:
        model: the model whose `named_modules` the patterns are matched against.
        policy: its ``modules`` are (pattern, format) pairs; the last pattern that matches a path decides.
        device_type: as for `mezzo.autocast`.

    Raises:
        UnknownNameError: a pattern matches no module; the message names the nearest. Nothing was changed.
    """
    paths = [path for path, _ in model.named_modules()]
    for pattern, _ in policy.modules:
        if not any(matches(pattern, path) for path in paths):
            raise no_such_module(pattern, paths)
    formats = {path: found for path in paths if (found := policy.format_for_module(path)) is not None}
    device = default_device_type() if device_type is None else device_type
    for path, fmt in formats.items():
        module = model.get_submodule(path)
        before = module.__dict__.get("forward")
        if isinstance(before, _InOwnFormat):
            before.undo()
        # The patterns stay: a module inside this one that another pattern matches asks whether they are in
        # force.
        own = replace(
            policy,
            compute=fmt,
            params="fp32",
            masters="auto",
            state="fp32",
            output="fp32",
            loss_scale="none",
        )
        module.forward = _InOwnFormat(module, own, device)
    return ModuleOverrides(model, formats)


class _InOwnFormat:
    """A module's `forward` inside a region of the module's own format."""

    def __init__(self, module: torch.nn.Module, own: Policy, device_type: str) -> None:
        self._module = module
        self._own = own
        self._device_type = device_type
        self._before = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        forward = type(module).forward.__get__(module) if self._before is None else self._before
        if not _in_force(self._device_type):
            return forward(*args, **kwargs)
        if self._own.compute == "fp32":
            args = tuple(_to_fp32(value) for value in args)
            kwargs = {key: _to_fp32(value) for key, value in kwargs.items()}
        lowered_around = torch.is_autocast_enabled(self._device_type)
        with autocast(self._own, self._device_type):
            result = forward(*args, **kwargs)
        # Where autocast is off around, FP32 weights would meet a 16-bit activation.
        return result if lowered_around else _to_fp32(result)

    def undo(self) -> None:
        """Give the module its own `forward` back."""
        if self._before is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.forward = self._before


def _in_force(device_type: str) -> bool:
    """Whether a policy is in force here, or an override of one."""
    return active_policy.current_policy(device_type) is not None


# A constant while tracing (as by torch.compiler.assume_constant_result): Dynamo guards the autocast state it
# reads.
_in_force._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _to_fp32(value: Any) -> Any:
    """Floating tensors in FP32, in tuples, lists and dicts too; FP64 and all else as they are."""
    if isinstance(value, torch.Tensor):
        lower = value.is_floating_point() and value.dtype is not torch.float64
        return value.float() if lower else value
    if isinstance(value, tuple):
        items = [_to_fp32(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_to_fp32(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_fp32(item) for key, item in value.items()}
    return value


def fitting(policy: Policy, model: torch.nn.Module) -> Policy:
    """The policy with those of its patterns that match something in this model, which may be one of several."""
    paths = [path for path, _ in model.named_modules()]
    found = tuple(pair for pair in policy.modules if any(matches(pair[0], path) for path in paths))
    return policy if found == policy.modules else replace(policy, modules=found)


def no_such_module(pattern: str, paths: Iterable[str], of: str = "the model") -> UnknownNameError:
    """The error for a pattern that matches none of these paths.

    Args:
        pattern: as the policy has it.
        paths: of all modules there are.
        of: what they are modules of.
    """
    named = [path for path in paths if path]
    near = difflib.get_close_matches(pattern.replace("*", "0"), named, n=1, cutoff=0.0)
    mend = f" The nearest is {near[0]!r}." if near else " The model has no submodules."
    return UnknownNameError(f"policy: module pattern {pattern!r} matches no module of {of}.{mend}")


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """The paths of a model's heads: its last `nn.Linear` in the order of definition, and those with tied embeddings.

    A model that is a single linear layer has none, and the projection inside an `nn.MultiheadAttention`, which is not
    called as a module, is none.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = list(_linear_layers(model))
    tied = [path for path, layer in layers if id(layer.weight) in embedded]
    return tuple(dict.fromkeys([*tied, *(path for path, _ in layers[-1:])]))


def with_heads(policy: Policy, model: nn.Module) -> Policy:
    """The policy for this model: under fp8 with a pattern ``module.PATH=bf16`` for each head.

    A head for which the policy has a pattern of its own, or for a module around it, is as that pattern says.
    """
    if policy.compute != "fp8":
        return policy
    heads = [path for path in heads_of(model) if is_pattern(path) and policy.format_inside(path) is None]
    if not heads:
        return policy
    return replace(policy, modules=(*((path, "bf16") for path in heads), *policy.modules))


def described(policy: Policy, model: nn.Module) -> list[str]:
    """For `explain`: which linear layers multiply in fp8 and which stay in bf16, and why; empty without fp8."""
    if "fp8" not in policy.computed:
        return []
    from mezzo.pytorch.kernels.fp8 import misfit

    lower: list[str] = []
    apart: list[str] = []
    for path, layer in _linear_layers(model):
        fmt = policy.format_inside(path) or policy.compute
        why = misfit(layer.in_features, layer.out_features) if fmt == "fp8" else f"the policy says {fmt}"
        if why:
            apart.append(f"{path} ({why})")
        else:
            lower.append(path)
    count = f"{len(lower)} linear layer{'s' if len(lower) > 1 else ''}"
    notes = [f"fp8 in {count}: {', '.join(_together(lower))}." if lower else _NOTHING]
    return notes + ([f"Not in fp8: {'; '.join(_together(apart))}."] if apart else [])


def _together(paths: list[str]) -> list[str]:
    """Layers of repeated blocks as one: ``blocks.0.up`` and ``blocks.1.up`` are ``blocks.*.up``."""
    return list(dict.fromkeys(re.sub(r"([^\d.][^.]*)\.\d+(?=\.)", r"\1.*", path) for path in paths))


_NOTHING = (
    "fp8 in no layer of this model: only linear layers multiply in fp8 (not convolutions, recurrent layers or "
    "attention), and not the head; the rest is as under bf16."
)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    attention = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    for path, module in model.named_modules():
        if path and isinstance(module, nn.Linear) and id(module) not in attention:
            yield path, module
