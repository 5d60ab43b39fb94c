"""A precision for Keras, as a value: the policy of every layer by its path, and the loss scale. Imports no framework.

Keras names a layer by its path, ``encoder/dense_1``, which in some kinds of model begins with the model's name. So the
pattern ``head`` names ``net/head`` too, and ``/head`` does not. Layers inside a layer follow it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mezzo.core import policy_text
from mezzo.core.errors import UsageError
from mezzo.core.formats import format_name, named
from mezzo.core.loss_scale import LossScale, NoLossScale
from mezzo.core.policy import Policy, policy
from mezzo.core.policy_text import as_loss_scale, is_pattern, matches, precision_name, print_loss_scale

# Keras's name of a dtype -> Mezzo's of its format.
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NAMES = {dtype: format_name(dtype) for dtype in _DTYPES}
SIXTEEN_BITS = frozenset(dtype for dtype, name in NAMES.items() if named(name).storage_bits == 16)
NARROW = frozenset(dtype for dtype, name in NAMES.items() if named(name).storage_bits < 32)

# Mezzo's word -> Keras's.
POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
WORDS = {keras: mezzo for mezzo, keras in POLICIES.items()}

# A word that names a precision: the first one of the text, or the value of a key.
_NAMED = re.compile(r"(?:^|=)\s*([\w-]+)\s*(?=,|$)")

# Formats that Keras has no policy for -> what to use.
_NO_POLICY = {
    "tf32": "It is a switch of the backend, not of a layer: tf.config.experimental.enable_tensor_float_32_execution, "
    'jax.config.update("jax_default_matmul_precision", "tensorfloat32") or torch.set_float32_matmul_precision("high")',
    "fp8": 'Use bf16; Keras\'s own is model.quantize("float8"), after the model is built',
    **dict.fromkeys(("mxfp8", "nvfp4", "fp8-block"), "Mezzo has block formats on PyTorch only: use bf16"),
    "auto": "Mezzo does not measure Keras models: use bf16 if the device has it, else fp16",
}

# Keras's own policies without mixed precision -> what to use.
_REFUSED = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16", "float64": "float32"}

# What Keras can't do: a policy's key, its default, what to do instead.
_CANNOT = (
    ("ops", (), "Keras sets formats per layer and not per operation. Use module.PATTERN=fp32"),
    ("params", "fp32", "its mixed policies keep FP32 variables. Remove params and masters"),
    ("state", "fp32", "its optimizers keep FP32 state. Remove the key state"),
    ("recompute", "none", "use keras.remat, which recomputes the activations of the layer that it wraps"),
    ("scaling", "tensorwise", "Mezzo has fp8 on PyTorch only. Remove the key scaling"),
    ("recipe", "default", "Mezzo has block formats on PyTorch only. Remove the key recipe"),
    ("bf16_from", "none", "Mezzo has block formats on PyTorch only. Remove the key bf16_from"),
    ("hidden", "auto", "its recurrent layers carry the format of their policy. Use module.PATTERN=fp32"),
    ("reduce", "fp32", "Mezzo sends gradients in 16 bits on PyTorch only. Remove the key reduce"),
)


@dataclass(frozen=True)
class KerasPlan:
    """The policy of each layer of a Keras model, and the loss scale; prints as a table.

    Args:
        default: Keras's name of the policy of every layer that no pattern names.
        paths: (pattern over layer paths, Keras policy name); of those that name one layer, the last decides.
        loss_scale: its first state; `NoLossScale` where nothing is computed in float16, unless asked for.
        precision: the short string that reads back as this plan.
    """

    default: str
    paths: tuple[tuple[str, str], ...]
    loss_scale: LossScale
    precision: str

    def policy_for(self, path: str) -> str:
        """Keras's name of the policy of the layer at this path.

        The innermost of the layer and those around it that a pattern names decides, by the last such pattern.

        >>> plan("fp16,module.encoder=fp32,module.encoder/norm=bf16").policy_for("net/encoder/norm/inner")
        'mixed_bfloat16'
        """
        return self.decision(path)[1]

    def decision(self, path: str) -> tuple[str | None, str]:
        """The last pattern that names the layer at this path, or else the nearest one around it; and the policy."""
        components = path.split("/")
        for length in range(len(components), 0, -1):
            around = "/".join(components[:length])
            for pattern, name in reversed(self.paths):
                if names(pattern, around):
                    return pattern, name
        return None, self.default

    def unmatched(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The patterns that name none of the layers at these paths nor any around them, in their order."""
        known = {"/".join(path.split("/")[:end]) for path in paths for end in range(1, path.count("/") + 2)}
        return tuple(pattern for pattern, _ in self.paths if not any(names(pattern, path) for path in known))

    @property
    def policies(self) -> frozenset[str]:
        """Every policy name in it."""
        return frozenset({self.default, *(name for _, name in self.paths)})

    @property
    def is_fp32(self) -> bool:
        """Whether it is Keras's default: float32 everywhere, no loss scale."""
        return self.policies == {"float32"} and isinstance(self.loss_scale, NoLossScale)

    def __str__(self) -> str:
        first = "every other layer" if self.paths else "every layer"
        rows = [(first, self.default), *self.paths, ("loss scale", print_loss_scale(self.loss_scale))]
        width = max(len(left) for left, _ in rows)
        lines = [self.precision, *(f"  {left:<{width}}  {right}" for left, right in rows)]
        later = ["  (patterns are not checked yet: compile or the first call reports one without a layer)"]
        return "\n".join([*lines, *later * bool(self.paths)])


class PlannedName(str):
    """A planned policy's name, ``"mixed_float16"``, with the plan; a layer passes it on to the layers inside it."""

    plan: KerasPlan

    def __new__(cls, text: str, plan: KerasPlan) -> PlannedName:  # noqa: D102
        self = super().__new__(cls, text)
        self.plan = plan
        return self

    def __deepcopy__(self, memo: Any) -> PlannedName:
        return self  # wrappers copy a config before they make a layer from it

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # unpickling does not need Mezzo


def plan_behind(policy: Any) -> KerasPlan | None:
    """The plan that gave a layer this policy; None for a policy of the layer's own."""
    name = getattr(policy, "name", None)
    return name.plan if isinstance(name, PlannedName) else None


def names(pattern: str, path: str) -> bool:
    """Whether a pattern names the layer at a path."""
    dotted = pattern.replace("/", ".")
    return matches(dotted[1:] if dotted.startswith(".") else f"**.{dotted}", path.replace("/", "."))


def plan(precision: Any, loss_scale: LossScale | float | str | None = None) -> KerasPlan:
    """The plan of a precision; arguments and errors as those of `mezzo.keras.set_policy`."""
    given = _as_policy(precision)
    where = f"policy {str(given)!r}: "
    for key, nothing, fix in _CANNOT:
        value = getattr(given, key)
        if value != nothing:
            said = {"ops": "op.{0[0][0]}", "params": "params={0},masters={1}"}.get(key, f"{key}={{0}}")
            raise UsageError(f"{where}Keras cannot do {said.format(value, given.masters)}: {fix}.")
    default = _keras_name(given.compute, f"{where}compute={given.compute}")
    paths = []
    for pattern, fmt in given.modules:
        if not is_pattern(pattern.replace("/", ".").removeprefix(".")):
            raise UsageError(
                f"{where}{pattern!r} is not a pattern of layer paths. Write a path such as head, encoder/dense_1 or "
                "encoder/*/norm: * is one component or a part of one, ** any number of components."
            )
        paths.append((pattern, _keras_name(fmt, f"{where}module.{pattern}={fmt}")))
    asked = as_loss_scale(loss_scale, f"precision {str(given)!r}")
    if asked is not None:
        given = replace(given, loss_scale=print_loss_scale(asked))
    scale = asked if asked is not None else given.make_loss_scale()
    return KerasPlan(default, tuple(paths), scale, given.name)


def _keras_name(word: str, where: str) -> str:
    if word not in POLICIES:
        known = ", ".join(POLICIES)
        raise UsageError(f"{where}: Keras cannot compute in {word}. {_NO_POLICY[word]}. Use one of {known}.")
    return POLICIES[word]


def _as_policy(precision: Any) -> Policy:
    if isinstance(precision, (Policy, os.PathLike)):
        return policy(precision)
    if hasattr(precision, "compute_dtype") and not hasattr(precision, "default_policy"):
        precision = precision.name  # a keras.DTypePolicy
    if not isinstance(precision, str) and precision_name(precision) in POLICIES:
        precision = precision_name(precision)  # a torch.dtype
    if not isinstance(precision, str):
        raise UsageError(
            f"precision is {precision!r}. Give a string such as 'bf16', 'fp16,module.head=fp32' or 'mixed_float16', a "
            "mezzo.Policy, or the path of a .toml file. Instead of a keras.DTypePolicyMap, write its keys as patterns."
        )
    for word in () if policy_text.is_toml(precision) else _NAMED.findall(precision):
        if word in _REFUSED:
            raise UsageError(
                f"policy {precision!r}: Keras's {word} is not mixed precision: variables have that format too. Use "
                f"{_REFUSED[word]}, or keras.config.set_dtype_policy."
            )
    return policy(precision)
