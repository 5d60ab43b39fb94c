"""Remedies: what to try about an overflow report. A text in backquotes that begins with a format is a policy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

from mezzo.core.errors import MezzoError
from mezzo.core.loss_scale import LossScale, StaticLossScale
from mezzo.core.overflow import OUTSIDE, SUM, WEAK_OPS, OverflowReport, Weakness, rounded_to_infinity
from mezzo.core.policy import Policy, policy
from mezzo.core.rules import RULES, Rule

POLICY = re.compile(r"`((?:fp16|bf16|fp32)[^`]*)`")
_EXPONENTIALS = ("exp", "expm1", "sinh", "cosh", "exp2")
_GROWN = 1e3  # a weight of this size was not made by an initialisation
_LESS = 4  # a constant loss scale that is too large is made smaller by so many powers of two
_READERS = 3  # modules after, or before, the one that is named, which are kept in FP32 with it
MODULES = "module "  # sentences that begin so keep more and more modules in FP32
_WIDE = 'compute the loss on `.float()` inputs inside `with mezzo.autocast("fp32"):`'
_CLIPPING = "clipping the norm of the gradients helps if the gradients, not the weights, are large"


def remedies(
    report: OverflowReport,
    used: Policy | None = None,
    *,
    has_bf16: bool = True,
    scaling: LossScale | None = None,
) -> list[str]:
    """What to try, the likeliest first; a policy stands at the end of its sentence, as in "why: `policy`".

    The policies add to `used`, the one under which it happened. `has_bf16`: bf16 is an alternative to fp16.
    `scaling`: the loss scale; None for a dynamic one.
    """
    found: list[str] = []
    if report.cause == "overflow":
        found = _of_overflow(report, used, has_bf16)
    elif report.cause == "invalid":
        found = _of_invalid(report, used)
    elif report.cause == "input":
        reader = "loss" if report.module == OUTSIDE else "model"
        nans = sum(one.nans for one in report.inputs)
        infinities = sum(one.infinities for one in report.inputs)
        found = [
            f"check the data or its source: the {reader}'s input has {nans} NaN and {infinities} infinite values",
            "skip such a batch before the step: `if not torch.isfinite(x).all(): continue`",
        ]
    elif report.cause == "state":
        name = f"{report.module}.{report.op}".strip(".")
        found = [f"resume from the last checkpoint in which {name or 'it'} was finite"]
        if "running_" in report.op:
            found.insert(0, "call reset_running_stats() on that module, or resume from an earlier checkpoint")
        found.append(f"if training made it so, use a lower learning rate; {_CLIPPING}")
    elif report.cause == "loss scale" and isinstance(scaling, StaticLossScale):
        least = 1.0 if scaling.scale > 1.0 else scaling.scale / 2**_LESS
        smaller = max(least, 2.0 ** (math.floor(math.log2(scaling.scale)) - _LESS))
        found = [
            f"a smaller constant loss scale (mezzo calibrate measures one that fits): `fp16,loss_scale={smaller:.17g}`",
            "a loss scale that adjusts itself: `fp16,loss_scale=dynamic`",
        ]
    elif report.cause == "loss scale":
        found = [
            "nothing: the loss scale is dynamic, and the next step uses a smaller one",
            "if this happens often, slower growth: `fp16,loss_scale=dynamic(growth_interval=10000)`",
        ]
    elif report.cause == "loss":
        found = [
            "check the batch of this update: NaN or infinity in it gives such a loss in FP32 too",
            f"if the batch is finite, {_WIDE}",
        ]
    return list(dict.fromkeys(found))


def with_fix(sentence: str, written: Callable[[str], str]) -> str:
    """A remedy's sentence whose policy is `written` as a command or code, which comes first.

    >>> with_fix("operation mul in FP32: `fp16,op.mul=fp32`", lambda policy: f"mezzo run --precision {policy} train.py")
    '`mezzo run --precision fp16,op.mul=fp32 train.py` (operation mul in FP32)'
    """
    found = POLICY.search(sentence)
    if found is None:
        return sentence
    why, rest = sentence[: found.start()].rstrip(": "), sentence[found.end() :]
    return f"`{written(found[1])}` ({why}{rest})"


def training_code(policy: str) -> str:
    """The argument of MixedPrecision for a policy: the user's call has others, which have to stay."""
    return f'precision="{policy}"'


def _of_overflow(report: OverflowReport, used: Policy | None, has_bf16: bool) -> list[str]:
    found: list[str] = []
    low = _low_format(report)
    fits = not any(one.format == "fp32" and not one.finite for one in report.outputs)
    if max((one.largest for one in report.inputs if one.name == "weight"), default=0.0) > _GROWN:
        found.append(f"use a lower learning rate: the weights have grown large; {_CLIPPING}")
    if report.op in ("half", "bfloat16", "to", "to_copy", "type"):
        found.append("remove the conversion: autocast converts the inputs of each operation as needed")
    if report.direction == "backward":
        found.append("smaller gradients help: divide the loss by a constant, or normalize the inputs")
    elif (low is None or not fits) and report.op in _EXPONENTIALS:
        found.append(
            "keep the input of the exponential below 88 (subtract the maximum, or clamp): FP32 overflows there too"
        )
    elif low is None or not fits:
        found.append("scale the input down, or clamp it: the result is larger than FP32's largest number too")
    elif _made_before(report, low):
        found.append("scale, normalize or clamp the input")
    if low is not None and (report.direction == "backward" or fits):
        found += _in_fp32(report, low, used)
        if low == "fp16" and has_bf16:
            found.append("bf16, which has FP32's range: `bf16`")
        elif low == "fp16":
            found.append("FP32: this GPU has no bf16 units, and emulated bf16 is slow: `fp32`")
    return found or ["scale the input down, or clamp it"]


def _of_invalid(report: OverflowReport, used: Policy | None) -> list[str]:
    weak, low = WEAK_OPS.get(report.op, Weakness()), _low_format(report)
    found = []
    if low == "fp16" and weak.takes_eps:
        # First: an eps that is there already, and is 0 in this format, is why "add an eps" would be no help.
        found.append("use an eps of at least 2**-24 (6e-8), better 1e-5: 1e-8, for example, is 0 in fp16")
    fix = (report.direction == "backward" and weak.fix_slope) or weak.fix
    if fix or not found:
        found.append(fix or "clamp the input away from where the operation has no finite value or derivative")
    if low is not None:
        # Not the op alone: a number that was rounded to 0 before it is 0 in FP32 too.
        found += [one for one in _in_fp32(report, low, used) if ",op." not in one]
    return found


def _low_format(report: OverflowReport) -> str | None:
    """The 16-bit format of a result, or else of an input; None if all were wider."""
    formats = [one.format for one in (*report.outputs, *report.inputs)]
    return next((form for form in formats if form in ("fp16", "bf16")), None)


def _made_before(report: OverflowReport, low: str) -> bool:
    """Whether an input lies beyond a format: an earlier operation produced it in a wider one."""
    inputs = (one.largest for one in report.inputs if not one.name.startswith("saved "))
    return max(inputs, default=0.0) >= rounded_to_infinity(low)


def _in_fp32(report: OverflowReport, low: str, used: Policy | None) -> list[str]:
    """Policies under which the operation runs in FP32: in its module, in its neighbours as well, in the whole run."""
    if report.module == OUTSIDE and report.op == SUM:
        return []  # the model's output has its format under any policy
    if report.module == OUTSIDE:
        return [_WIDE.replace("the loss", "it")]
    base = used or policy(low)
    found = []
    if report.module:
        # A number that fp16 can't hold goes on through as many modules as leave it as large.
        passed = dict.fromkeys(one.partition(": ")[0] for one in report.propagators)
        reach = [path for path in passed if path not in (report.module, OUTSIDE, "the model")]
        reach = [path for path in reach if base.format_for_module(path) != "fp32"]
        most = min(len(reach), _READERS if _made_before(report, low) else 1)
        for count in range(int(base.format_for_module(report.module) == "fp32"), most + 1):
            text = _kept(base, report.module, *reach[:count])
            side = "before" if report.direction == "backward" else "after"
            others = f"{count} modules" if count > 1 else "the module"
            several = f" and {others} {side} it" if count else ""
            found += [f"{MODULES}{report.module}{several} in FP32: `{text}`"] if text is not None else []
    rule = RULES.get(report.op)
    if rule is not None and rule.in_format(low)[0] not in (Rule.FP32, Rule.BANNED):
        ops = {**dict(base.ops), report.op: "fp32"}
        if ops != dict(base.ops):  # last: it is for every such operation of the run
            found.append(f"operation {report.op} in FP32: `{replace(base, ops=tuple(ops.items()))}`")
    return found


def added(text: str, used: Policy) -> str:
    """The modules and operations that a policy keeps in FP32 and another does not, in words."""
    longer = policy(text)
    names = [f"operation {name}" for name, rule in longer.ops if (name, rule) not in used.ops]
    names += [f"module {name}" for name, form in longer.modules if (name, form) not in used.modules]
    return f"{' and '.join(names)} in FP32"


def _kept(base: Policy, *paths: str) -> str | None:
    """The policy with modules in FP32 as well; None where one of their names can't stand in it."""
    new = [path for path in paths if base.format_for_module(path) != "fp32"]
    modules = [pair for pair in base.modules if pair[0] not in new] + [(path, "fp32") for path in new]
    try:
        return str(replace(base, modules=tuple(modules)))
    except MezzoError:
        return None
