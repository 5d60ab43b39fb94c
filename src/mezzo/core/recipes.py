"""How a linear layer's factors are quantized: element format, block, scale, rounding and transform, as data.

A layer has three products, each of two factors (x: input [M, K], w: weight [N, K], g: gradient of the output [M, N])::

    output           y  = x w^T    sums over K
    input_gradient   dx = g w      sums over N
    weight_gradient  dw = g^T x    sums over M
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.formats import named
from mezzo.core.policy_text import is_toml, load_toml

SCALES: Mapping[str, str] = MappingProxyType(
    {
        "power-of-two": "the smallest power of two that brings the largest magnitude into the format's range",
        "e8m0": "the smallest power of two that brings the largest magnitude into the format's range, in 8 bits",
        "e8m0-floor": "OCP MX's text: 2^(floor(log2 of the largest) - largest exponent); the largest may saturate",
        "fp32": "the largest magnitude over the format's largest value, in FP32",
        "e4m3fn": "NVFP4: FP32 for the tensor, e4m3fn for the block",
    }
)
"""Kinds of scales, each with what it is."""

HARDWARE: Mapping[str, tuple[int, tuple[str, ...], tuple[tuple[int, int], ...]]] = MappingProxyType(
    {
        "mxfp8": (8, ("e8m0", "e8m0-floor"), ((1, 32), (32, 32))),
        "fp8-block": (8, ("power-of-two", "fp32"), ((1, 128), (128, 128))),
        "nvfp4": (4, ("e4m3fn",), ((1, 16), (16, 16))),
    }
)
"""Products of blocks that GPUs compute: bits of an element, kinds of scales, blocks. fp8's are in `Recipe.hardware`."""

ELEMENTS = ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1")
HADAMARD = 16  # rows that the transform mixes
FACTORS = {"output": ("x", "w"), "input_gradient": ("g", "w"), "weight_gradient": ("g", "x")}


@dataclass(frozen=True)
class Factor:
    """How one factor of a product is quantized.

    Args:
        element: the format of its elements, one of `ELEMENTS`.
        block: how many elements share a scale, along the other dimension and along the summed one; 0: all.
        scale: a kind of scale, one of `SCALES`.
        stochastic: round up or down at random, in proportion to the distances, instead of to the nearest.
        hadamard: mix each 16 elements of the summed dimension by a random Hadamard matrix first.

    Raises:
        UsageError: a combination that does not exist.
    """

    element: str
    block: tuple[int, int]
    scale: str = "power-of-two"
    stochastic: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise unknown_name("element format", self.element, ELEMENTS)
        if self.scale not in tuple(SCALES):
            raise unknown_name("scale", self.scale, SCALES)
        block = list(self.block) if isinstance(self.block, tuple) else self.block
        is_pair = isinstance(block, list) and len(block) == 2
        if not is_pair or not all(type(size) is int and size >= 0 for size in block):
            raise UsageError(
                f"block={block!r}: use two numbers from 0 on, such as [1, 32]; 0 is the whole dimension."
            )
        object.__setattr__(self, "block", tuple(block))
        for name, value in (("stochastic", self.stochastic), ("hadamard", self.hadamard)):
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value!r}: use true or false.")
        if self.scale == "e4m3fn" and self.element != "e2m1":
            raise UsageError(
                f"scale='e4m3fn' with element={self.element!r}: the two scales of NVFP4 need element='e2m1'."
            )

    @property
    def largest(self) -> float:
        """The largest value of an element."""
        return named(self.element).max

    def stored_bytes(self, elements: int, scales: int) -> int:
        """What a GPU stores: elements in their bits, a scale in 1 byte, or in 4 if it is FP32 or a power of two."""
        each = 1 if self.scale.startswith(("e8m0", "e4m3fn")) else 4
        return -(-elements * named(self.element).bits // 8) + each * scales + 4 * (self.scale == "e4m3fn")


@dataclass(frozen=True)
class Recipe:
    """The factors of a linear layer's three products.

    Args:
        name: what a policy calls it.
        output: of x and w.
        input_gradient: of g and w.
        weight_gradient: of g and x.
        multiple: a layer runs in bf16 unless its inputs and outputs are multiples of this.
        last_blocks: share of the last repeated blocks of a model that stay in bf16.
    """

    name: str
    output: tuple[Factor, Factor]
    input_gradient: tuple[Factor, Factor]
    weight_gradient: tuple[Factor, Factor]
    multiple: int = 16
    last_blocks: float = 0.0

    def __post_init__(self) -> None:
        if type(self.multiple) is not int or self.multiple < 1:
            raise UsageError(
                f"recipe {self.name!r}: multiple={self.multiple!r} is not a whole number from 1 on, such as 32."
            )
        if not isinstance(self.last_blocks, (int, float)) or not 0 <= self.last_blocks < 1:
            raise UsageError(
                f"recipe {self.name!r}: last_blocks={self.last_blocks!r} is not from 0 to below 1, such as 0.15."
            )
        products = (self.output, self.input_gradient, self.weight_gradient)
        for (what, names), pair in zip(FACTORS.items(), products):
            if what != "weight_gradient" and pair[0].block[0] > 1:
                raise UsageError(
                    f"recipe {self.name!r}: block={list(pair[0].block)} of the first factor of {what} spans several "
                    "rows (tokens), whose number changes. Use 1 or 0 as the first number."
                )
            if pair[0].hadamard != pair[1].hadamard:
                raise UsageError(
                    f"recipe {self.name!r}: only one factor of {what} has hadamard=true, so the transform would stay "
                    f"in the result. Set it for {' and '.join(names)}, or for neither."
                )
            for name, factor in zip(names, pair):
                sizes = factor.block[:1] if what == "weight_gradient" else factor.block  # tokens are padded
                if any(size > 1 and self.multiple % size for size in sizes):
                    raise UsageError(
                        f"recipe {self.name!r}: multiple={self.multiple} is not a multiple of "
                        f"block={list(factor.block)}, which {name} has in {what}. Use "
                        f"multiple={math.lcm(self.multiple, *(size or 1 for size in sizes))}."
                    )

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All six."""
        return (*self.output, *self.input_gradient, *self.weight_gradient)

    @property
    def hardware(self) -> str:
        """The product of GPUs that multiplies these factors: ``fp8`` or one of `HARDWARE`; empty if there is none."""
        pairs = (self.output, self.input_gradient, self.weight_gradient)
        if self.multiple % 16 or any(a.element == b.element == "e5m2" for a, b in pairs):
            return ""
        kinds = {(one.block, one.scale, named(one.element).bits) for one in self.factors}
        if kinds in ({((0, 0), "power-of-two", 8)}, {((1, 0), "power-of-two", 8)}):  # all, or a line
            return "fp8"
        for name, (bits, scales, blocks) in HARDWARE.items():
            if name == "fp8-block" and self.weight_gradient[0].block[0] > 1:
                continue  # only a second factor has squares
            if all(kind in scales and block in blocks and size == bits for block, kind, size in kinds):
                return name
        return ""

    @property
    def is_exact_in_bf16(self) -> bool:
        """Whether bf16 holds every decoded factor: scales are powers of two, or NVFP4's, whose products have 6 bits."""
        return all(factor.scale != "fp32" for factor in self.factors)


def _fp8(name: str, block: tuple[int, int]) -> Recipe:
    wide, range_ = Factor("e4m3fn", block), Factor("e5m2", block)
    return Recipe(name, (wide, wide), (range_, wide), (range_, wide))


def _same(name: str, factor: Factor, weight: Factor | None = None, multiple: int = 32) -> Recipe:
    weight = weight or factor
    return Recipe(name, (factor, weight), (factor, weight), (factor, factor), multiple)


def _nvfp4(name: str, *, stochastic: bool = True, hadamard: bool = True) -> Recipe:
    row, weight = Factor("e2m1", (1, 16), "e4m3fn"), Factor("e2m1", (16, 16), "e4m3fn")
    by_row = Factor("e2m1", (1, 16), "e4m3fn", stochastic)
    by_token = Factor("e2m1", (1, 16), "e4m3fn", stochastic, hadamard)
    held = Factor("e2m1", (1, 16), "e4m3fn", hadamard=hadamard)
    return Recipe(name, (row, weight), (by_row, weight), (by_token, held), 16, 0.15)


_TABLE = (
    _fp8("fp8", (0, 0)),
    _fp8("fp8-rowwise", (1, 0)),
    _same("mxfp8", Factor("e4m3fn", (1, 32), "e8m0")),
    _same("mxfp8-floor", Factor("e4m3fn", (1, 32), "e8m0-floor")),
    _same("fp8-block", Factor("e4m3fn", (1, 128)), Factor("e4m3fn", (128, 128)), multiple=128),
    _nvfp4("nvfp4"),
    _nvfp4("nvfp4-nearest", stochastic=False),
    _nvfp4("nvfp4-plain", stochastic=False, hadamard=False),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({each.name: each for each in _TABLE})
"""Every recipe by name. Sources: arXiv 2209.05433 (fp8); OCP Microscaling Formats 1.0 and Transformer Engine's
MXFP8BlockScaling (mxfp8); DeepSeek-V3, arXiv 2412.19437 (fp8-block); arXiv 2509.25149 (nvfp4)."""


def recipe_of(compute: str, scaling: str = "tensorwise", recipe: str = "default") -> Recipe:
    """The recipe for what a policy computes in; UnknownNameError where it quantizes nothing."""
    if is_toml(recipe):
        return read_recipe(recipe)
    name = compute if recipe == "default" else recipe
    name = "fp8-rowwise" if (name, scaling) == ("fp8", "rowwise") else name
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]


@functools.lru_cache(maxsize=64)
def read_recipe(path: str) -> Recipe:
    """The recipe in a TOML file: the tables output, input_gradient and weight_gradient, each with two factors.

    One factor: ``x = { element = "e4m3fn", block = [1, 32], scale = "e8m0" }``; see `Factor` and `Recipe`.

    Raises:
        UsageError: no such file, or a table, key or value that is wrong.
    """
    example = 'x = { element = "e4m3fn", block = [1, 32], scale = "e8m0" }'
    data = load_toml(path, "recipe", "a copy of the one in docs/formats.md", example)
    options = ("multiple", "last_blocks")
    for key in data:
        if key not in (*FACTORS, *options):
            raise unknown_name("key", key, (*FACTORS, *options), where=f"{path}: ")
    try:
        products: dict[str, Any] = {product: _factors(data.get(product, {}), product) for product in FACTORS}
        return Recipe(path, **products, **{key: data[key] for key in options if key in data})
    except UsageError as error:
        raise type(error)(f"{path}: {error}") from None


def _factors(table: Any, product: str) -> tuple[Factor, ...]:
    known, names, found = [field.name for field in fields(Factor)], FACTORS[product], []
    for name in dict.fromkeys((*names, *(table if isinstance(table, dict) else ()))):
        given, where = table.get(name) if isinstance(table, dict) else None, f"[{product}] {name}: "
        if name not in names:
            raise unknown_name("factor", name, names, where=f"[{product}] ")
        for key in given if isinstance(given, dict) else ():
            if key not in known:
                raise unknown_name("key", key, known, where=where)
        if not isinstance(given, dict) or not {"element", "block"} <= given.keys():
            raise UsageError(f'[{product}] needs {name} = {{ element = "e4m3fn", block = [1, 32] }}.')
        try:
            found.append(Factor(**given))
        except UsageError as error:
            raise type(error)(f"{where}{error}") from None
    return tuple(found)
