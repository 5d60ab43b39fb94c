"""Per-module overrides: modules that a policy's patterns name run in the format that the policy gives them.

A module's `forward` becomes a small object with a context around the class's `forward`: an attribute that refers to the
module, so `copy.deepcopy` and `pickle` copy it too, and Dynamo traces through it.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from mezzo.core.compute import QUANTIZED
from mezzo.core.errors import UnknownNameError, UsageError, did_you_mean
from mezzo.core.policy import Policy
from mezzo.core.policy_text import is_pattern, matches
from mezzo.core.recipes import recipe_of
from mezzo.core.records import EMULATED, IN_NO_LAYER
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.autocast.context import applied, context_of, default_device_type
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.module_paths import joined, walk
from mezzo.pytorch.nested import changed


class ModuleOverrides(AbstractContextManager["ModuleOverrides"]):
    """The overrides that `apply_module_overrides` set: ``formats`` by module path. Leaving it removes them."""

    def __init__(self, modules: Mapping[str, nn.Module], formats: Mapping[str, str]) -> None:
        self.formats = dict(formats)
        self._overridden = [modules[path] for path in formats]

    def remove(self) -> None:
        """Restore each module's own `forward`. Safe to call twice."""
        for module in self._overridden:
            _remove_override(module)
        self.formats, self._overridden = {}, []

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def apply_module_overrides(
    model: nn.Module, policy: Policy, device_type: str | None = None
) -> ModuleOverrides:
    """Inside the policy's contexts, run each module that one of its patterns matches in that pattern's format."""
    modules: dict[str, nn.Module] = {}
    for path, module in walk(model, inside=True):
        modules.setdefault(path, module)  # a wrapper comes before what it wraps
    for pattern, _ in policy.modules:
        if not any(matches(pattern, path) for path in modules):
            raise no_such_module(pattern, modules)
    formats = {path: found for path in modules if (found := policy.format_for_module(path)) is not None}
    device = default_device_type() if device_type is None else device_type
    for path, fmt in formats.items():
        _remove_override(modules[path])
        # With its patterns: an overridden module inside this one is active where any policy is.
        inner = policy.of_module(fmt)
        if policy.compute in QUANTIZED and fmt not in QUANTIZED:
            # Not those of quantized modules, else it would be a policy that quantizes these alone (`noting_table`).
            # An FP32 lookup is the same in a bf16 context, which notes the weight; autocast is off in an FP32 one.
            low = "bf16" if type(modules[path]) is nn.Embedding else fmt
            inner = inner.with_modules(
                low, tuple(pair for pair in policy.modules if pair[1] not in QUANTIZED)
            )
        modules[path].forward = override = _Override(modules[path], inner, device)
        applied[override] = policy.modules
    return ModuleOverrides(modules, formats)


class _Override:
    """A module's `forward` inside a context of the module's own format."""

    ignored = False  # whether it was trained in an autocast without a policy

    def __init__(self, module: nn.Module, policy: Policy, device_type: str) -> None:
        self._module = module
        self._policy = policy
        self._device_type = device_type
        self.before = module.__dict__.get("forward")

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copied model
        self.__dict__.update(state)
        applied[self] = self._policy.modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before
        if forward is None:
            forward = functools.partial(type(self._module).forward, self._module)
        if not _is_active(self._device_type):
            if torch.is_autocast_enabled(self._device_type) and torch.is_grad_enabled():
                self.ignored = True
            return forward(*args, **kwargs)
        if self._policy.compute == "fp32":
            args, kwargs = to_fp32(args), to_fp32(kwargs)
        lowered_around = torch.is_autocast_enabled(self._device_type)
        with context_of(self._policy, self._device_type):
            result = forward(*args, **kwargs)
        # Where autocast is off around, FP32 weights would meet a 16-bit activation.
        return result if lowered_around else to_fp32(result)


def _remove_override(module: nn.Module) -> None:
    override = module.__dict__.get("forward")
    if isinstance(override, _Override):
        del module.forward
        if override.before is not None:
            module.forward = override.before


def _is_active(device_type: str) -> bool:
    """Whether any policy is active here."""
    return active_policy.current_policy(device_type) is not None


# A constant while tracing (as by torch.compiler.assume_constant_result): Dynamo guards the autocast state it reads.
_is_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def to_fp32(value: Any) -> Any:
    """`value` with each bf16 or fp16 tensor in it replaced by `tensor.float()`; the value itself if there is none."""
    return changed(value, lambda t: t.float() if isinstance(t, Tensor) and t.dtype in SIXTEEN_BITS else t)


def fitting(policy: Policy, model: torch.nn.Module) -> Policy:
    """The policy with only those patterns that match a module of this model."""
    paths = [path for path, _ in walk(model, inside=True)]
    found = tuple(pair for pair in policy.modules if any(matches(pair[0], path) for path in paths))
    return policy if found == policy.modules else policy.with_modules(policy.compute, found)


def no_such_module(pattern: str, paths: Iterable[str], of: str = "the model") -> UnknownNameError:
    """The error for a pattern that matches none of the paths of all modules of `of`."""
    named = [path for path in paths if path]
    own = ", ".join(named[:8]) + f" and {len(named) - 8} more" * (len(named) > 8)
    has = f"Its modules: {own}" if named else "It has no submodules"
    fix = did_you_mean(pattern.replace("*", "0"), named)
    return UnknownNameError(f"policy: module pattern {pattern!r} matches no module of {of}. {has}.{fix}")


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """The paths of a model's last `nn.Linear` in the order of definition, and of those with tied embeddings."""
    layers = [path for name, path, _, _ in _linear_layers(model) if path and name == path]
    return tuple(dict.fromkeys([*_tied(model), *layers[-1:]]))


def _tied(model: nn.Module) -> dict[str, str]:
    """The path of each linear layer that has the weight of an embedding, and the embedding's."""
    layers = {path: id(each.weight) for name, path, each, _ in _linear_layers(model) if path and name == path}
    embedded = _tables(model)
    return {path: embedded[weight] for path, weight in layers.items() if weight in embedded}


def _tables(model: nn.Module) -> dict[int, str]:
    """The path of each embedding, by its weight."""
    named = walk(model, inside=True)
    return {id(module.weight): path for path, module in named if isinstance(module, nn.Embedding)}


def with_heads(policy: Policy, model: nn.Module, *, strict: bool = True) -> Policy:
    """The policy for this model: where factors are quantized with ``module.PATH=bf16`` for each head without a pattern,
    and for the last blocks, where the recipe leaves them in bf16.

    Raises:
        UsageError: a batch of matrices, as of experts, would be quantized if it were linear layers, and no pattern
            matches its module; or the policy names a tied head as quantized. Not `strict`: these stay in bf16.
    """
    if policy.compute in QUANTIZED:
        wide = dict.fromkeys((*heads_of(model), *last_blocks_of(model, policy.quantization.last_blocks)))
        paths = [path for path in wide if is_pattern(path) and policy.format_inside(path) is None]
        policy = replace(policy, modules=(*((path, "bf16") for path in paths), *policy.modules))
    for path, table in _tied(model).items() if strict and policy.compute in QUANTIZED else ():
        fmt = policy.format_for_module(path)
        if fmt in QUANTIZED and (path, fmt) in policy.modules:
            raise UsageError(
                f"policy: module.{path}={fmt}: {path} has the weight of the embedding {table}, which {policy.compute} "
                f"leaves in bf16. Write module.{path}=bf16, or give {path} a weight of its own."
            )
    for path, name, shape in _batched(model) if strict else ():
        fmt, where = policy.format_inside(path) or policy.compute, f"module.{path}="
        if fmt not in QUANTIZED or policy.format_for_module(path) is not None or _ADDED.search(name):
            continue
        if all(size % recipe_of(fmt, policy.scaling, policy.recipe).multiple == 0 for size in shape[1:]):
            fix = f"Compute in bf16 and name the layers to quantize: bf16,module.PATH={fmt}."
            if path:
                fix = (
                    f"Add {where}bf16 to the policy. If no such product has it (it is added, or "
                    f"torch.nn.functional.linear gets one matrix at a time), add {where}{fmt}."
                )
            raise UsageError(
                f"{joined(path, name)} has {shape[0]} matrices of {shape[1]} x {shape[2]}, as of experts. {fmt} "
                f"quantizes linear layers, not batched or grouped products. {fix}"
            )
    return policy


def last_blocks_of(model: nn.Module, share: float) -> list[str]:
    """The paths of the last blocks of a model, at least one: `share` of the longest run of modules of one class in a
    list, of equally long runs the last, and of shorter runs after it (a short decoder after a long encoder). Blocks in
    blocks, such as experts, do not count if there are enough blocks for `share`; lone linear layers after the blocks
    are heads. A module that is there several times is one. A lazy module has the class that it becomes, so that its
    first call changes nothing.
    """
    found: list[str] = []
    longest = 0
    for path, module in walk(model, inside=True) if share else ():
        children = module.named_children() if isinstance(module, (nn.ModuleList, nn.Sequential)) else ()
        is_inside = any(f"{path}.".startswith(f"{block}.") for block in found)
        for kind, run in itertools.groupby(
            children, lambda child: getattr(child[1], "cls_to_become", None) or type(child[1])
        ):
            blocks = list(run)
            if len(blocks) < 2 or not next(_linear_layers(blocks[0][1]), None):
                continue
            names = [joined(path, name) for name, _ in blocks]
            if len(blocks) < longest:
                found += [] if is_inside or kind is nn.Linear else names
            elif not is_inside or len(found) * share < 1:
                found, longest = names, len(blocks)
    return found[-math.ceil(share * len(found)) :]


def described(policy: Policy, model: nn.Module) -> list[str]:
    """For `explain`: which linear layers have quantized factors and which stay in bf16, and why; else empty."""
    quantized = sorted(policy.computed & QUANTIZED)
    if not quantized:
        return []
    from mezzo.pytorch.kernels.quantized_linear import misfit

    recipes = {each: recipe_of(each, policy.scaling, policy.recipe) for each in quantized}
    layers: dict[str, list[str]] = {each: [] for each in quantized}  # also by why they are in none of these
    wide, tables, share = {}, {}, 0.0
    if policy.compute in QUANTIZED:
        tables, share = _tables(model), policy.quantization.last_blocks
        wide = dict.fromkeys(heads_of(model), "the head")
    last = last_blocks_of(model, share)
    for block in last:
        inner = (path for path, _ in walk(model, inside=True) if f"{path}.".startswith(f"{block}."))
        wide.update(dict.fromkeys(inner, "one of the last blocks"))
    for name, path, layer, sizes in _linear_layers(model):
        tied = tables.pop(id(getattr(layer, "weight", None)), None) is not None
        fmt = policy.format_inside(path) or policy.compute
        why = f"bf16 by default: {wide[path]}" if path in wide and fmt == "bf16" else f"the policy says {fmt}"
        if fmt in QUANTIZED:
            why = _TIED if tied else misfit(recipes[fmt], *sizes)
        layers.setdefault(why or fmt, []).append(name)
    if tables:
        layers[_TIED] = [*layers.get(_TIED, []), *tables.values()]
    for path, name, _ in _batched(model):
        if (policy.format_inside(path) or policy.compute) in QUANTIZED:
            layers.setdefault(_BATCH, []).append(joined(path, name))
    lower = {fmt: names for fmt in quantized if (names := _together(fmt, layers))}
    apart = [f"{', '.join(_together(why, layers))} ({why})" for why in layers if why not in quantized]
    named = "" if policy.recipe == "default" else f"recipe {Path(policy.recipe).name}"
    every = named or " and ".join(quantized)
    notes = [] if lower else [_NOTHING.format(every)]
    for fmt, names in lower.items():
        noun = "layers" if len(layers[fmt]) > 1 else "layer"
        notes.append(f"{named or fmt} in {len(layers[fmt])} linear {noun}: {', '.join(names)}.")
    notes += [f"Not in {every}: {'; '.join(apart)}."] if apart else []
    notes += [_NO_BLOCKS.format(every)] if share and not last else []
    device = next((parameter.device for parameter in model.parameters()), None)
    return [*notes, *dict.fromkeys(_computed(recipes[fmt].hardware, device) for fmt in lower if device)]


def _batched(model: nn.Module) -> Iterator[tuple[str, str, torch.Size]]:
    """Parameters that batched or grouped products multiply: of three dimensions, and not a convolution's."""
    apart = (nn.Conv1d, nn.ConvTranspose1d, ParametrizationList)
    for path, module in walk(model, inside=True):
        for name, parameter in () if isinstance(module, apart) else module.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() == 3 and parameter.shape[0] > 1:
                yield path, name, parameter.shape


def _computed(kind: str, device: torch.device) -> str:
    """How a device computes the products of a recipe, and why."""
    from mezzo.pytorch.kernels.quantized_linear import PATH, is_native, why_emulated

    if is_native(device, kind):
        return f"{kind} products run on {device.type} natively. Sums over a part of a block are padded with zeros."
    return f"{EMULATED}{device.type}: {why_emulated(device, kind) or f'{PATH}=emulated'}."


def _together(kind: str, layers: Mapping[str, list[str]]) -> list[str]:
    """The layers of a kind, those of repeated blocks as one: ``blocks.0.up`` and ``blocks.1.up`` are ``blocks.*.up``,
    and ``blocks.0-1.up`` if a block's layer of another kind would have that name too.
    """
    others = {_BLOCK.sub(r"\1.*", name) for each in layers if each != kind for name in layers[each]}
    found: dict[str, list[int]] = {}
    for name in layers[kind]:
        short, number = _BLOCK.sub(r"\1.*", name), _BLOCK.search(name)
        if number and short in others:
            short = f"{name[: number.start(2)]}\0{name[number.end() :]}"
        found.setdefault(short, []).append(int(number[2]) if number else 0)
    return [short.replace("\0", _runs(blocks)) for short, blocks in found.items()]


def _runs(numbers: list[int]) -> str:
    """``0-2,4`` for 0, 1, 2 and 4."""
    firsts, lasts = ([n for n in numbers if n + step not in numbers] for step in (-1, 1))
    return ",".join(f"{one}-{other}" if one < other else str(one) for one, other in zip(firsts, lasts))


_ADDED = re.compile("bias|emb|(^|_)pos")  # names of parameters that are added, not multiplied
_BLOCK = re.compile(r"([^\d.][^.]*)\.(\d+)(?=\.)")
_TIED = "bf16: the weight of an embedding, also in linear products"
_BATCH = "a batch of matrices: only linear products are quantized"
_NO_BLOCKS = "No list of equal blocks was found, so {0} leaves no last blocks in bf16."
_NOTHING = (
    f"{{0}}{IN_NO_LAYER}. Linear layers of fitting sizes multiply in {{0}}, but not the head (the last one). "
    "Convolutions, recurrent layers and attention products are as under bf16."
)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, tuple[int, int]]]:
    """Each linear layer's name, the path that a pattern has to match, module, and numbers of inputs and outputs.

    The projections of `nn.MultiheadAttention`, which calls none of its own modules, have the names of their weights.
    """
    attention: set[nn.Module] = set()
    for path, module in walk(model, inside=True):
        if isinstance(module, nn.MultiheadAttention):
            attention.update(module.modules())
            for name, weight in module.named_parameters():
                if weight.dim() == 2:
                    yield joined(path, name), path, module, (weight.shape[1], weight.shape[0])
        elif isinstance(module, nn.Linear) and module not in attention:
            yield path or "the model", path, module, (module.in_features, module.out_features)
