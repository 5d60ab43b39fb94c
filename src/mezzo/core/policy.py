"""Policy: which op, which module and which tensor of a training run has which number format, as a frozen value.

A policy is resolved and printed before a model is touched. It says nothing of kernels: `mezzo.core.rules` holds what
each op does by default, `mezzo.pytorch` turns both into calls. Its text forms live in `mezzo.core.policy_text`.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.loss_scale import LossScale
from mezzo.core.policy_text import KEYS, canonical_loss_scale, loss_scale_of, read_string, read_toml, to_toml
from mezzo.core.rules import RULES, TABLE_VERSION, Rule, bare

if TYPE_CHECKING:
    from collections.abc import Mapping

STORED_FORMATS = ("fp32", "bf16", "fp16")
COMPUTE_FORMATS = (*STORED_FORMATS, "auto")

_OP_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)?")
_PATTERN = re.compile(r"[^\s.,=()\"'#]+(\.[^\s.,=()\"'#]+)*")


@dataclass(frozen=True)
class Decision:
    """What a policy says of one op: the rule, why, and whether the table or the policy's own text decided."""

    op: str
    rule: Rule
    reason: str
    source: str
    remedy: str = ""


@dataclass(frozen=True)
class Policy:
    """Which format everything has; equal policies are equal values, and printing one gives a string that parses back.

    Args:
        compute: format of the ops under the rule `lower`: fp32, bf16, fp16, or auto (until `resolved`).
        params: format in which parameters are stored. 16 bits only together with the same compute format or fp32.
        output: format of the floating tensors that leave the model.
        loss_scale: `none`, `dynamic`, `dynamic(init=1024,growth_interval=100)`, a number such as `1024`, or `auto`,
            which becomes `dynamic` where anything is computed in fp16 and `none` elsewhere.
        ops: (op, rule) pairs that override or extend the table of `mezzo.core.rules`.
        modules: (path pattern, format) pairs; the last pattern that matches a module decides. Mappings are taken
            for both.

    Raises:
        UnknownNameError: a format, rule or op that does not exist, with the nearest one that does.
        UsageError: a combination that has no meaning.
    """

    compute: str = "fp32"
    params: str = "fp32"
    output: str = "fp32"
    loss_scale: str = "auto"
    ops: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_format("compute", self.compute)
        check_format("params", self.params)
        check_format("output", self.output)
        lowered = {"fp16", "bf16"}
        if {self.compute, self.params} == lowered:
            raise UsageError(
                f"policy: params={self.params} with compute={self.compute}: every weight would be converted between "
                f"two 16-bit formats and lose range or digits. Use params=fp32 or params={self.compute}."
            )
        ops = _pairs("op", self.ops)
        modules = _pairs("module", self.modules)
        object.__setattr__(self, "ops", tuple(sorted((check_op(op), check_rule(rule)) for op, rule in ops)))
        object.__setattr__(
            self,
            "modules",
            tuple((check_pattern(path), check_module_format(path, fmt)) for path, fmt in modules),
        )
        text = canonical_loss_scale(str(self.loss_scale))
        if text == "auto" and self.compute != "auto":
            fp16 = self.compute == "fp16" or any(fmt == "fp16" for _, fmt in self.modules)
            text = "dynamic" if fp16 else "none"
        object.__setattr__(self, "loss_scale", text)

    @property
    def name(self) -> str:
        """The shortest string that parses back to this policy: a preset's name, then what departs from it."""
        parts = [self.compute]
        parts += [
            f"{key}={getattr(self, key)}" for key in ("params", "output") if getattr(self, key) != "fp32"
        ]
        if self.loss_scale != replace(self, loss_scale="auto").loss_scale:
            parts.append(f"loss_scale={self.loss_scale}")
        parts += [f"op.{op}={rule}" for op, rule in self.ops]
        parts += [f"module.{path}={fmt}" for path, fmt in self.modules]
        return ",".join(parts)

    def __str__(self) -> str:
        return self.name

    @property
    def is_fp32(self) -> bool:
        """Whether nothing is lowered: parameters, outputs, every op and every module are FP32."""
        formats = {self.compute, self.params, self.output, *(fmt for _, fmt in self.modules)}
        return formats == {"fp32"}

    def rule_for(self, op: str) -> Decision | None:
        """The rule for an op, by ATen's name (`softmax`, `aten::softmax.int`) or another library's (`mylib::fused`).

        None for an op that neither the table nor this policy knows: it runs in the format of its inputs.
        """
        name = bare(op)
        for own, rule in self.ops:
            if bare(own) == name:
                return Decision(name, Rule(rule), "the policy says so", "policy")
        row = RULES.get(name)
        if row is None:
            return None
        rule_, reason = row.in_format(self.compute)
        return Decision(name, rule_, reason, "table", row.remedy)

    def format_for_module(self, path: str) -> str | None:
        """The format that the last matching pattern gives to the module at this dotted path, or None."""
        for pattern, fmt in reversed(self.modules):
            if _compiled(pattern).fullmatch(path):
                return fmt
        return None

    def fingerprint(self) -> str:
        """A content hash of the policy and the op table, the same in every process."""
        return hashlib.sha256(f"{self.name}|{TABLE_VERSION}".encode()).hexdigest()[:16]

    def make_loss_scale(self) -> LossScale:
        """The loss scale's first state."""
        return loss_scale_of(self.loss_scale)

    def resolved(self, compute: str) -> Policy:
        """This policy with `auto` replaced by a format; itself where compute is no `auto`."""
        return replace(self, compute=compute) if self.compute == "auto" else self

    def to_toml(self) -> str:
        """The policy as the text of a TOML file."""
        return to_toml({key: getattr(self, key) for key in KEYS}, self.ops, self.modules)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Policy:
        """The policy in a TOML file; a wrong key is named with its line."""
        found = read_toml(path)
        return cls(**found.values, ops=tuple(found.ops), modules=tuple(found.modules))


def check_format(key: str, value: str) -> str:
    """The format, if `compute`, `params` or `output` may have it."""
    allowed = COMPUTE_FORMATS if key == "compute" else STORED_FORMATS
    if value not in allowed:
        raise unknown_name("format", str(value), allowed, where=f"policy '{key}={value}': ")
    return value


def check_rule(value: str) -> str:
    """The rule's plain value, if it is one of the five."""
    rules = [rule.value for rule in Rule]
    if value not in rules:
        raise unknown_name("rule", str(value), rules, where="policy: ")
    return Rule(value).value


def check_op(op: str) -> str:
    """The op's name as the table has it; a name with a namespace (`mylib::fused`) may be new."""
    name = op.removeprefix("aten::")
    if name in RULES or (_OP_NAME.fullmatch(op) and "::" in op):
        return name if name in RULES else op
    raise unknown_name("op", op, RULES, where="policy: ")


def check_pattern(pattern: str) -> str:
    """The pattern, if it is a dotted path whose components may hold `*`."""
    if not _PATTERN.fullmatch(pattern):
        raise UsageError(
            f"policy: {pattern!r} is no module pattern. Write a dotted path such as head, blocks.0.norm or "
            "blocks.*.norm; * stands for one component or a part of it."
        )
    return pattern


def check_module_format(pattern: str, fmt: str) -> str:
    """The format, if a module may have it."""
    if fmt not in STORED_FORMATS:
        raise unknown_name("format", str(fmt), STORED_FORMATS, where=f"policy 'module.{pattern}={fmt}': ")
    return fmt


def _pairs(kind: str, value: object) -> tuple[tuple[str, str], ...]:
    items = value.items() if isinstance(value, dict) else value
    pairs = tuple((str(a), b) for a, b in items)  # type: ignore[attr-defined]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"policy: {kind} {name!r} is given twice. Keep one of the two.")
    return pairs


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = [
        "[^.]+" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")
    ]
    return re.compile(r"\.".join(parts))


# Name -> policy; `auto` is resolved by what the machine has.
PRESETS: Mapping[str, Policy] = MappingProxyType({name: Policy(name) for name in COMPUTE_FORMATS})


def policy(spec: str | os.PathLike[str] | Policy) -> Policy:
    """A policy from a preset's name, a short string, the path of a TOML file (it ends in `.toml`), or itself."""
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, os.PathLike) or spec.endswith(".toml"):
        return Policy.from_toml(spec)
    found = read_string(spec, PRESETS)
    return Policy(**found.values, ops=tuple(found.ops), modules=tuple(found.modules))
