"""Policy: the number format of every op, module and tensor of a training run, as a frozen value."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from mezzo.core import policy_text
from mezzo.core.compute import COMPUTE, GRANULARITIES, QUANTIZED, activations_of
from mezzo.core.errors import UnknownNameError, UsageError, checks_fields, did_you_mean, unknown_name
from mezzo.core.loss_scale import LossScale
from mezzo.core.masters import MASTERS, STATE_FORMATS, storage_of, usual_masters
from mezzo.core.policy_text import KEYS, Entry, is_toml, loss_scale_of, matches, precision_name
from mezzo.core.recipes import RECIPES, Recipe, read_recipe, recipe_of
from mezzo.core.rules import RULES, TABLE_VERSION, Rule, bare

STORED_FORMATS = ("fp32", "bf16", "fp16")
COMPUTE_FORMATS = (*COMPUTE, "auto")
HIDDEN = ("auto", "fp32", "compute")
# What each key may say: the noun for an error, and the words.
_ALLOWED = {
    "compute": ("format", COMPUTE_FORMATS),
    "params": ("format", (*STORED_FORMATS, "auto")),
    "output": ("format", STORED_FORMATS),
    "masters": ("kind of masters", (*MASTERS, "auto")),
    "state": ("state format", STATE_FORMATS),
    "scaling": ("fp8 scaling", GRANULARITIES),
    "recipe": ("recipe", ("default", *RECIPES)),
    "bf16_from": ("update", ("none",)),
    "hidden": ("kind of hidden state", HIDDEN),
    "reduce": ("format", ("fp32", "bf16", "fp16")),
    "module": ("format", tuple(COMPUTE)),
}

# Ops whose output backward can make again from what they save anyway: one pass over memory, or two.
RECOMPUTABLE = ("gelu", "layer_norm", "mish", "rms_norm", "silu")

_FOREIGN_OP = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")


@dataclass(frozen=True)
class Decision:
    """The rule of one op under a policy, and why. `source` is ``table`` or ``policy``; a banned op has a `remedy`."""

    op: str
    rule: Rule
    reason: str
    source: str
    remedy: str = ""


@checks_fields
@dataclass(frozen=True, repr=False)
class Policy:
    """The number format of every op, module, parameter and optimizer state of a training run. Frozen and hashable.

    `mezzo.policy("bf16,module.head=fp32")` reads one from text; printed, it reads back as an equal policy.

    Args:
        compute: the format of ops under the rule `lower`: fp32, tf32, bf16, fp16, fp8, or auto until `resolved`.
        params: the format in which parameters are stored: fp32, bf16, fp16, or auto, which becomes the format of
            `activations` where `masters` are named and fp32 elsewhere. Normalizations keep FP32 parameters.
        output: ignored; version 0.1 had it.
        loss_scale: ``none``; ``dynamic``, with any setting of `DynamicLossScale` as in ``dynamic(init=1024)``; a number
            (``1024``, ``2**10``) for a constant; or ``auto``, which becomes ``dynamic`` where anything is computed
            in fp16 and ``none`` elsewhere, once `compute` is known.
        ops: (op, rule) pairs, or a mapping, that override or extend the table in `mezzo.core.rules`. An op of
            another library is written with its namespace: ``mylib::fused``.
        modules: (path pattern, format) pairs, or a mapping; the last pattern that matches a module decides.
        masters: how the FP32 value of a 16-bit parameter is kept: ``fp32`` as a copy; ``split`` into the parameter and
            16 more bits; ``split8`` into it and 8 more bits; ``none``. ``auto`` becomes ``split`` for bf16
            parameters and ``fp32`` for others: an FP32 parameter is its own master.
        state: the format of the optimizer's moments: fp32, bf16 or int8.
        recompute: ``none``, or ops (``gelu+layer_norm``) whose 16-bit output is made again in backward.
        scaling: how fp8 factors are scaled: ``tensorwise`` or ``rowwise``.
        recipe: how linear layers are quantized, instead of by `compute`: a name of `mezzo.core.recipes`, or the path of
            a TOML file.
        bf16_from: ``none``, or the number of an update, counted from 0, from which on linear layers multiply in bf16
            instead of the format with scales. `mezzo.MixedPrecision` and `mezzo run` count updates; other contexts
            refuse it.
        hidden: the format of a recurrent layer's hidden and cell state between time steps: ``fp32``, ``compute``
            (that of `activations`), or ``auto``: what the device's 16-bit operation does.
        reduce: the format in which `DistributedDataParallel` sends gradients; they are averaged in FP32.

    Raises:
        UnknownNameError: a format, rule, op or setting that does not exist; the message has the nearest one.
        UsageError: an invalid pattern, something given twice, or two formats that exclude each other.

    Example:
        >>> str(Policy(compute="bf16", modules=(("head", "fp32"),)))
        'bf16,module.head=fp32'
    """

    compute: str = "fp32"
    params: str = "auto"
    output: InitVar[str] = "fp32"
    loss_scale: str = "auto"
    ops: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    masters: str = "auto"
    state: str = "fp32"
    recompute: str = "none"
    scaling: str = "tensorwise"
    recipe: str = "default"
    bf16_from: str = "none"
    hidden: str = "auto"
    reduce: str = "fp32"

    def __post_init__(self, output: str) -> None:
        if output != "fp32":  # which the policy files of 0.1 have
            warnings.warn(f"policy: output={output} has no effect. Remove it.", DeprecationWarning, 3)
        given = [Entry(key, "", str(getattr(self, key)), "") for key in KEYS]
        given += [Entry("op", name, rule, "") for name, rule in _pairs(self.ops)]
        given += [Entry("module", name, fmt, "") for name, fmt in _pairs(self.modules)]
        said = [entry._replace(where=f"policy '{_left(entry)}={entry.value}': ") for entry in given]
        checked = list(map(_checked, said))
        _no_duplicates(checked)
        for key in KEYS:
            object.__setattr__(self, key, next(entry.value for entry in checked if entry.key == key))
        # The order of ops means nothing, the order of patterns decides.
        object.__setattr__(self, "ops", tuple(sorted((e.name, e.value) for e in checked if e.key == "op")))
        object.__setattr__(self, "modules", tuple((e.name, e.value) for e in checked if e.key == "module"))
        params, masters = storage_of(self.activations, self.params, self.masters)
        object.__setattr__(self, "params", params)
        object.__setattr__(self, "masters", masters)
        if {self.activations, params} == {"bf16", "fp16"}:
            raise UsageError(
                f"policy 'compute={self.compute},params={params}': values would pass between two 16-bit formats, and "
                f"lose range in fp16 and digits in bf16. Use params=fp32 or params={self.activations}."
            )
        for key in ("recipe", "bf16_from"):
            value = getattr(self, key)
            if value not in ("default", "none") and not self.computed & QUANTIZED:
                raise UsageError(
                    f"policy 'compute={self.compute},{key}={value}': nothing here is computed in "
                    f"{', '.join(sorted(QUANTIZED))}. Remove {key}, or compute in one of these."
                )
        if self.recipe != "default" and len(lower := sorted(self.computed & QUANTIZED)) > 1:
            raise UsageError(
                f"policy 'recipe={self.recipe}': it would be that of {' and '.join(lower)}. Remove it, or one of these."
            )
        has_choice = "fp8" in self.computed and self.recipe in ("default", "fp8")
        if self.scaling != "tensorwise" and not has_choice:
            raise UsageError(
                f"policy 'compute={self.compute},scaling={self.scaling}': only fp8 without a recipe has this choice; "
                "other formats and recipes say which elements share a scale. Remove scaling, or compute in fp8."
            )
        if self.loss_scale == "auto" and self.compute != "auto":
            object.__setattr__(self, "loss_scale", "dynamic" if "fp16" in self.computed else "none")

    @cached_property
    def name(self) -> str:
        """The shortest string that reads back as this policy: a preset's name, then settings that differ from it."""
        parts = [f"{_left(entry)}={entry.value}" for entry in self._written]
        return ",".join([self.compute, *parts])

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"policy({self.name!r})"

    @property
    def is_fp32(self) -> bool:
        """Whether parameters, every op, every module and the optimizer's state are FP32."""
        return self.computed | {self.params, self.state} == {"fp32"}

    @property
    def activations(self) -> str:
        """The format of the results of ops under the rule `lower`: bf16 for fp8, fp32 for tf32."""
        return activations_of(self.compute)

    @property
    def is_by_parts(self) -> bool:
        """Whether a layer inside another one may have a format of its own."""
        return bool(self.modules) or self.compute in QUANTIZED

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The ops whose output is made again in backward."""
        return () if self.recompute == "none" else tuple(self.recompute.split("+"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about settings that are allowed but seldom meant."""
        notes = []
        if "fp16" in self.computed and self.loss_scale == "none":
            notes.append(
                "fp16 without a loss scale: gradients under 2^-25 become zero. loss_scale=dynamic keeps them."
            )
        wide = (Rule.FP32, Rule.BANNED)
        for op, rule in () if self.is_fp32 else self.ops:
            row = RULES.get(op)
            if row and row.rule in wide and Rule(rule) not in wide:
                notes.append(f"op.{op}={rule} in place of {row.rule}: {row.reason}.")
        return tuple(notes)

    def rule_for(self, op: str) -> Decision | None:
        """The rule for an op such as `softmax`, `aten::softmax.int` or `mylib::fused`; None for an unknown one, which
        runs in the format of its inputs.
        """
        op = bare(op)
        own, row = self._own_rules.get(op), RULES.get(op)
        if own is not None:
            return Decision(op, own, f"the policy says op.{op}={own}", "policy", row.remedy if row else "")
        if row is None:
            return None
        return Decision(op, *row.in_format(self.activations), "table", row.remedy)

    def format_for_module(self, path: str) -> str | None:
        """The format that the last matching pattern gives to the module at this dotted path, or None."""
        return next((fmt for pattern, fmt in reversed(self.modules) if matches(pattern, path)), None)

    def format_inside(self, path: str) -> str | None:
        """The format of the module at this path: its own, or that of a module around it."""
        parts = path.split(".")
        found = (self.format_for_module(".".join(parts[:n])) for n in range(len(parts), 0, -1))
        return next((fmt for fmt in found if fmt is not None), None)

    def fingerprint(self) -> str:
        """A content hash of the policy and the op table, the same in every process."""
        written = repr(self.quantization) if is_toml(self.recipe) else ""
        return hashlib.sha256(f"{self.name}{written} {TABLE_VERSION}".encode()).hexdigest()[:16]

    @property
    def quantization(self) -> Recipe:
        """How the factors of linear layers are quantized, where `compute` is a format with scales."""
        return recipe_of(self.compute, self.scaling, self.recipe)

    def at(self, update: int) -> Policy:
        """The policy of an update, without `bf16_from`: itself if it has none. Equal results are the same object."""
        if self.bf16_from == "none":
            return self
        return self._before if update < int(self.bf16_from) else self._after

    @cached_property
    def _before(self) -> Policy:
        return replace(self, bf16_from="none")

    @cached_property
    def _after(self) -> Policy:
        low = {name: "bf16" for name in QUANTIZED}
        modules = tuple((pattern, low.get(fmt, fmt)) for pattern, fmt in self.modules)
        return self._before.with_modules(low.get(self.compute, self.compute), modules)

    def make_loss_scale(self) -> LossScale:
        """The loss scale's first state; UsageError before the policy is resolved."""
        if self.loss_scale == "auto":
            raise UsageError(
                f"policy '{self}': the loss scale depends on the compute format, which is auto. Resolve it first: "
                "policy.resolved('fp16')."
            )
        return loss_scale_of(self.loss_scale)

    def resolved(self, compute: str) -> Policy:
        """This policy with `auto` replaced by a format (and the loss scale by that format's); else itself."""
        return replace(self, compute=compute) if self.compute == "auto" else self

    def of_module(self, compute: str) -> Policy:
        """This policy in a module of another format, which stores nothing and scales no loss of its own."""
        own = self.with_modules(compute, self.modules)
        return replace(own, params="fp32", masters="auto", state="fp32", loss_scale="none")

    def with_modules(self, compute: str, modules: tuple[tuple[str, str], ...]) -> Policy:
        """This policy with another format and other patterns, and without settings that no format of these has."""
        formats = {compute, *(fmt for _, fmt in modules)}
        unused: dict[str, Any] = {"scaling": "tensorwise"} if "fp8" not in formats else {}
        unused |= {} if formats & QUANTIZED else {"recipe": "default", "bf16_from": "none"}
        return replace(self, compute=compute, modules=modules, **unused)

    def to_toml(self) -> str:
        """The policy as the text of a TOML file, without settings that have the default of `compute`."""
        return policy_text.print_toml([Entry("compute", "", self.compute, ""), *self._written])

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Policy:
        """The policy in a TOML file.

        Raises:
            UsageError: no such file, or a wrong key or value; the message has the nearest right one.
        """
        return _assembled(policy_text.read_toml(path), f"{os.fspath(path)}: ")

    @cached_property
    def _written(self) -> list[Entry]:
        """The settings that differ from the preset's."""
        plain = Policy(self.compute, modules=self.modules)
        named = {key for key in KEYS if getattr(self, key) != getattr(plain, key)}
        # Each implies the other: masters the usual params, else params the usual masters.
        if "params" in named and self.params == self.activations:
            named.remove("params")
            named.add("masters")
        elif self.masters == usual_masters(self.params):
            named.discard("masters")
        else:
            named.add("masters")
        keys = [Entry(key, "", getattr(self, key), "") for key in KEYS if key in named]
        ops = [Entry("op", name, rule, "") for name, rule in self.ops]
        return keys + ops + [Entry("module", name, fmt, "") for name, fmt in self.modules]

    @cached_property
    def computed(self) -> frozenset[str]:
        """The formats in which anything is computed: `compute`, and those of single modules."""
        return frozenset({self.compute, *(fmt for _, fmt in self.modules)})

    @cached_property
    def _own_rules(self) -> Mapping[str, Rule]:
        return {bare(op): Rule(rule) for op, rule in self.ops}


def policy(spec: object) -> Policy:
    """Read a policy. Equal policies are equal values, however they were written.

    Args:
        spec: a precision (``"bf16"``, ``"fp16"``, ``"fp32"``, ``"tf32"``, ``"fp8"``, ``"auto"``), a torch dtype,
            another name such as ``"half"`` or ``"16-mixed"``, a string with settings
            (``"fp16,op.softmax=fp32,module.head=fp32"``), the path of a ``.toml`` file, or a `Policy`.

    Raises:
        UsageError: an unknown name or a contradiction; see `Policy` and `Policy.from_toml`.

    Example:
        >>> policy("compute=bf16,state=float32") == policy("bf16-mixed") == policy("bf16")
        True
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, os.PathLike) or (isinstance(spec, str) and is_toml(spec) and "recipe=" not in spec):
        return Policy.from_toml(spec)
    if not isinstance(spec, str) and precision_name(spec) not in PRESETS:
        raise UsageError(
            f"{spec!r} is not a precision. Use one of {', '.join(PRESETS)}, torch.float32, torch.bfloat16, "
            "torch.float16, a policy such as 'bf16,op.softmax=fp32', or the path of a .toml file."
        )
    return _parsed(spec if isinstance(spec, str) else precision_name(spec))


@lru_cache(maxsize=256)  # a context may be entered with the same string at every step
def _parsed(spec: str) -> Policy:
    return _assembled(policy_text.read_string(spec, PRESETS), f"policy {spec!r}: ")


def _assembled(entries: Sequence[Entry], where: str) -> Policy:
    checked = [_checked(entry) for entry in entries]
    _no_duplicates(checked)
    try:
        return Policy(
            **{entry.key: entry.value for entry in checked if not entry.name},
            ops=tuple((entry.name, entry.value) for entry in checked if entry.key == "op"),
            modules=tuple((entry.name, entry.value) for entry in checked if entry.key == "module"),
        )
    except UsageError as error:  # two entries that exclude each other
        raise type(error)(f"{where}{str(error).partition(': ')[2]}") from None


def _checked(entry: Entry) -> Entry:
    """The entry in the one way in which it is written; UsageError, which begins with `entry.where`, if it is wrong."""
    key, name, value, where = entry
    if key not in ("loss_scale", "recompute"):
        entry = entry._replace(value=(value := precision_name(value)))
    if key == "op":
        rules = [rule.value for rule in Rule]
        if value not in rules:
            lower = f" For the format of compute write op.{name}=lower." if value in COMPUTE else ""
            raise UnknownNameError(f"{unknown_name('rule', value, rules, where=where)}{lower}")
        return entry._replace(name=_op(name, where), value=Rule(value).value)
    if key == "loss_scale":
        value = value.strip()
        kept = value if value == "auto" else policy_text.print_loss_scale(loss_scale_of(value, where))
        return entry._replace(value=kept)
    if key == "recompute":
        ops = sorted({op.strip() for op in value.split("+")})
        for op in ops:
            if op not in RECOMPUTABLE and ops != ["none"]:
                raise unknown_name("op to recompute", op, ("none", *RECOMPUTABLE), where=where)
        return entry._replace(value="+".join(ops))
    if key == "module" and not policy_text.is_pattern(name):
        raise UsageError(
            f"{where}{name!r} is not a module pattern. Write a dotted path such as head, blocks.0.norm or "
            "blocks.*.norm. * matches one component or a part of one, ** any number of components."
        )
    if key == "recipe" and is_toml(value):
        read_recipe(value)
        return entry._replace(value=os.path.abspath(value))
    if key == "bf16_from" and value != "none":
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(
                f"{where}{value!r} is not the number of an update. Use none or a whole number from 1 on: for the last "
                "10 % of 1000 updates write bf16_from=900."
            )
        return entry._replace(value=str(int(value)))
    noun, allowed = _ALLOWED[key]
    if value not in allowed:
        text = f" To read a text, call mezzo.policy({value!r})." if "," in value else ""
        raise UnknownNameError(f"{unknown_name(noun, value, allowed, where=where)}{text}")
    return entry


def _op(name: str, where: str) -> str:
    plain = name.removeprefix("aten::")
    if plain in RULES:
        return plain
    if _FOREIGN_OP.fullmatch(name):
        return name
    fix = did_you_mean(plain.rpartition(".")[2], RULES, cutoff=0.5)
    raise UnknownNameError(
        f"{where}unknown op {name!r}.{fix} Use one of the {len(RULES)} ops in mezzo.core.rules.RULES, or for any "
        "other op its name with the namespace, such as mylib::fused."
    )


def _pairs(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    items = value.items() if isinstance(value, Mapping) else value
    return [(str(name), str(item)) for name, item in items]


def _left(entry: Entry) -> str:
    return f"{entry.key}.{entry.name}" if entry.name else entry.key


def _no_duplicates(entries: Sequence[Entry]) -> None:
    seen = set()
    for entry in entries:
        if (entry.key, entry.name) in seen:
            raise UsageError(f"{entry.where}{_left(entry)} is given twice. Remove one of the two.")
        seen.add((entry.key, entry.name))


# Name -> policy. `auto` is resolved by what the machine has and what the user's first steps measure.
PRESETS: Mapping[str, Policy] = MappingProxyType({name: Policy(name) for name in COMPUTE_FORMATS})
