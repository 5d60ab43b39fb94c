"""Calibration: the format, the loss scale and the modules to keep in FP32, from a few FP32 steps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import pairwise

from mezzo.core.commands import DEFAULT_MARGIN
from mezzo.core.compute import COMPUTE, QUANTIZED
from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.formats import Format, named
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale, power_text
from mezzo.core.notebook import html_table
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import is_pattern
from mezzo.core.ranges import GRADIENTS, Histogram, Merged, RangeRow, merge, percent, shift_of
from mezzo.core.records import LossRecord, ModuleRounding, RangesRecord, Record, SensitivityRecord, strict
from mezzo.core.rules import RULES, Rule

FORMATS = ("bf16", "fp16", "fp32", *(name for name in COMPUTE if name in QUANTIZED))
"""What can be recommended; those with scales only if asked for."""
HEADROOM = 1
"""Doublings that the largest numbers may still make in the rest of the run."""
MOST_LOST = 0.5
"""A module is kept in FP32 if fp16 rounds a larger share of its gradient to zero under the recommended scale."""
RANKED = ("bf16", "fp16", "e5m2", "e4m3fn")
"""The formats that are ranked unless others are given."""
SHOWN = 8
"""Modules that are printed; JSON has all of them."""
WORST = 3
"""Modules that a sentence names."""
_NEAR = f"comes within {2**HEADROOM}x of overflow"
INNER = "module "  # begins the cause of an overflow in a module inside of the one that is ranked
_SQUARES = " (the root of the sum of the squares, since the changes are random and partly cancel)"
MOST_ZERO = 0.95
"""A module of an fp16 run is named if more of its weight gradients are exactly zero, and all those of a parameter."""


@dataclass(frozen=True)
class ModuleSensitivity:
    """One module of a ranking.

    Args:
        module: its path; ``""`` is the model itself.
        kind: its class.
        changes: format -> expected change of the loss if the module alone runs in that format; infinite if a result, or
            that of a module inside, is not finite. Only modules with a product have formats of fewer than 16 bits.
        causes: format -> the operation that made the first number too large for the format; ``module PATH`` if one of
            the modules inside did, whose own row has the operation.
        near: the formats for which that number is not too large yet, but would be if doubled.
        bears: the formats whose change is within the ranking's `limit`, the one with the fewest bits first.
        lowest: the first of `bears`; ``fp32`` if there is none.
    """

    module: str
    kind: str
    changes: dict[str, float]
    causes: dict[str, str]
    near: list[str]
    bears: list[str]
    lowest: str

    def refuses(self, format: str) -> bool:
        """Whether the change in a format is beyond the limit."""
        return format in self.changes and format not in self.bears

    def cell(self, format: str) -> str:
        """The change in a table."""
        change, cause = self.changes.get(format), self.causes.get(format)
        if change is None:
            return "-"
        finite, refused = math.isfinite(change), self.refuses(format)
        if cause and not (finite and refused):  # a later operation may absorb an infinity
            return f"{_NEAR if format in self.near else 'overflows'} in {cause}"
        return f"{change:.2g}{' over' if refused else ''}" if finite else "not finite"


@dataclass(frozen=True)
class Sensitivity:
    """A ranking of the modules that compute something themselves, the most sensitive first.

    Args:
        loss: mean magnitude of the losses of the measured steps.
        margin: share of the loss that all modules together may change it by.
        limit: change that one module may make: ``margin * loss / sqrt(number of modules)``, since random changes add in
            squares. Formats with scales: `together`.
        notes: what could not be measured, and why.
        shown: the printed formats, which decide the order: narrower than 16 bits only if no other was asked for.
    """

    formats: list[str]
    shown: list[str]
    modules: list[ModuleSensitivity]
    loss: float
    margin: float
    limit: float
    steps: int
    notes: list[str]

    def title(self, formats: Sequence[str]) -> str:
        """What the numbers of `table` are."""
        found = f"Expected change of the loss ({self.loss:.3g}) if a module alone runs in a format, the largest first."
        if not any(cell.endswith(" over") for _, *cells in self.table(formats) for cell in cells):
            return found
        if set(self.formats) & QUANTIZED:
            most = f"the rest together change it by at most {self.margin:.2%}{_SQUARES}"
            return f"{found} Those marked over stay in bf16; {most}."
        return (
            f"{found} Changes above {self.limit:.2g} are marked over: if each module changed the loss by so much, all "
            f"together would change it by about {self.margin:.2%}{_SQUARES}."
        )

    def table(self, formats: Sequence[str]) -> list[list[str]]:
        """A heading, and a row for each module."""
        rows = [[one.module or "(the model)", *map(one.cell, formats)] for one in self.modules]
        return [["module", *formats], *rows]

    def lines(self, verbose: bool = False) -> list[str]:
        """The most sensitive modules as aligned columns; `verbose`: all modules and formats."""
        formats = self.formats if verbose else self.shown
        rows = self.table(formats)
        cut = rows if verbose else rows[: SHOWN + 1]
        widths = [max(map(len, column)) for column in zip(*cut)]
        lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cut]
        more = [f"  and {len(rows) - len(cut)} less sensitive modules"] * (len(rows) > len(cut))
        return [self.title(formats), *lines, *more, *self.notes]


@dataclass(frozen=True)
class Kept:
    """A module that fp16 can't hold, and why: by a tensor, or, without evidence, by what it does to the loss."""

    module: str
    why: str
    evidence: RangeRow | None = None
    op: str = ""

    @property
    def by_op(self) -> bool:
        """Whether a policy can keep the operation in FP32 and can't name the module."""
        rule = None if is_pattern(self.module) else RULES.get(self.op)
        return rule is not None and rule.in_format("fp16")[0] not in (Rule.FP32, Rule.BANNED)

    @property
    def name(self) -> str:
        """The module's name, for sentences."""
        return self.module or "the model"


@dataclass(frozen=True)
class Recommendation:
    """What a calibration recommends, and why.

    Args:
        format: ``bf16``, ``fp16`` or ``fp32``.
        why: a sentence.
        policy: as text for `mezzo.policy`, `--precision` and `MixedPrecision`.
        steps: number of watched steps.
        constant: the constant loss scale for fp16.
        start: the first value of a dynamic one: the same, within the bounds of `DynamicLossScale`.
        gradient: the tensor with the largest gradient, which decides both, with its histogram over all steps.
        gradients: all gradients together.
        kept: modules that fp16 needs in FP32.
        notes: further sentences.
        sensitivity: the ranking of the modules; None if not measured.
    """

    format: str
    why: str
    policy: str
    steps: int
    constant: float
    start: float
    gradient: RangeRow
    gradients: Histogram
    kept: list[Kept]
    notes: list[str]
    sensitivity: Sensitivity | None

    @property
    def plain(self) -> list[str]:
        """The recommendation in a few sentences."""
        scale = f"loss scale (dynamic from {power_text(self.start)}, or constant {power_text(self.constant)})"
        some = _names([f"{one.name} ({one.why})" for one in self.kept], "; ")
        found = [f"Use {self.format}: {self.why}."]
        if self.format in QUANTIZED:
            found += [f"Keep in bf16: {some}." if some else "No linear layer has to stay in bf16."]
            return [*found, f"Policy: {self.policy}", *self.notes]
        keep = f"Keep in FP32: {some}." if some else "No module has to stay in FP32."
        keep += self._absorbed
        if self.format == "fp16":
            needs = f"It needs a {scale}: the largest gradient is the {self.gradient}."
            found += [needs, keep, f"Policy: {self.policy}"]
        else:
            found += [f"fp16 would need a {scale}. {keep}"]
        return [*found, *self.notes]

    @property
    def _absorbed(self) -> str:
        """A sentence on the modules that are not kept although their numbers are too large for fp16, or nothing."""
        kept = {one.module for one in self.kept} | {one.op for one in self.kept if one.by_op}
        found = [
            (one.module, op)
            for one in (self.sensitivity.modules if self.sensitivity else [])
            if not {one.module, op := one.causes.get("fp16", INNER)} & kept and not op.startswith(INNER)
        ]
        if not found:
            return ""
        where = _names([f"{op} in {module or 'the model'}" for module, op in found], " and ")
        fix = _names([f"module.{module}=fp32" for module, _ in found if module])
        absorbed = f"Later operations absorb an infinity of {where}, as tanh does, so no step is skipped."
        return f" {absorbed}{fix and f' To avoid it, add {fix}.'}"

    def lines(self, verbose: bool = False) -> list[str]:
        """`plain`, and the ranking; `verbose`: all modules and formats."""
        if self.sensitivity is None:
            return self.plain
        return [*self.plain, "", *self.sensitivity.lines(verbose)]

    def to_json(self) -> str:
        """All of it, histograms included; numbers that are not finite are strings."""
        return json.dumps(strict(asdict(self)), indent=2, allow_nan=False)

    def to_toml(self) -> str:
        """The policy as a file that `mezzo.policy` reads, below comments with the reasons."""
        head = f"Recommended by mezzo calibrate from {self.steps} step{'s' * (self.steps != 1)} in FP32."
        return "".join(f"# {line}\n" for line in [head, *self.plain]) + policy_of(self.policy).to_toml()

    def __repr__(self) -> str:
        return f"Recommendation({self.policy!r}, steps={self.steps})"

    def _repr_html_(self) -> str:
        title, ranking = " ".join(self.plain), self.sensitivity
        head, *rows = [[]] if ranking is None else ranking.table(ranking.shown)
        return html_table(title, rows, head)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def ranked_for(format: str | None) -> tuple[str, ...]:
    """The formats of the ranking for a recommendation of this one; () for `RANKED`, or others."""
    return (format,) if format in QUANTIZED else ()


def ranked_format(format: str | Format) -> Format:
    """A format of the ranking; ``nvfp4`` and the like are that of their factors in forward, under their name."""
    if format in QUANTIZED:
        return replace(named(COMPUTE[format].forward), name=str(format))
    return named(format)


def check_format(format: str | None) -> None:
    """Raise UnknownNameError for a format that can't be recommended."""
    if format is not None and format not in FORMATS:
        raise unknown_name("format", format, FORMATS)


def recommend(
    measured: Iterable[Record],
    *,
    native: Collection[str],
    format: str | None = None,
    ranked: Sequence[str | Format] = RANKED,
    margin: float = DEFAULT_MARGIN,
) -> Recommendation:
    """What to train in, from a few FP32 steps; `native` formats of the hardware, `ranked` those of the records; for a
    change of the loss by all modules together of at most `margin`, a share.
    """
    measured = list(measured)
    records = [one for one in measured if isinstance(one, RangesRecord) and one.rows]
    sensitivities = [one for one in measured if isinstance(one, SensitivityRecord)]
    formats = [ranked_format(one) for one in ranked]
    sensitivity = rank(sensitivities, formats, margin)
    merged: Merged = {}  # over all steps
    for record in records:
        merge(merged, record.rows)
    tensors = list(merged.values())
    gradients = [one for one in tensors if one.what in GRADIENTS]
    losses = [one for one in measured if isinstance(one, LossRecord) and not math.isfinite(one.loss)]
    if losses:
        raise UsageError(
            f"in FP32, without mixed precision, the loss is {losses[0].loss} at step {losses[0].index}, so nothing can "
            "be recommended. Lower the learning rate, or fix the data or the loss"
        )
    source = max(gradients, key=lambda one: one.histogram.largest, default=None)
    if source is None or source.histogram.largest == 0:
        steps = f"in {len(records)} watched step{'s' * (len(records) != 1)}"
        raise UsageError(f"nothing to calibrate with: {steps} no gradient was finite and not 0")
    constant, start = _scales(source.histogram.largest)
    kept = _kept(tensors, start, sensitivity, {one.name for one in formats if one.bits < 16})
    chosen, why = _format(native, format)
    notes, policy = _notes(tensors, kept), _policy(chosen, start, kept)
    if chosen in QUANTIZED:
        policy, kept, notes = _quantized(chosen, sensitivity, sensitivities)
    if chosen == "bf16" and sensitivity:
        # Only a note: near a loss of 0 rounding to bf16 is over in ordinary modules, and FP32 costs time.
        over = [one.module for one in sensitivity.modules if one.refuses(chosen)]
        add = ",".join(f"module.{path}=fp32" for path in over[:WORST] if is_pattern(path))
        fix = f" If mezzo compare finds harm, add {add} to the policy." if add else ""
        why += "" if over else ". No module has to stay in FP32"
        notes = [f"bf16 changes the loss by more than the limit in {_names(over)}.{fix}"] * bool(over) + notes
    if chosen not in QUANTIZED and source.histogram.overflows("fp16", shift_of(start)):
        every = f"{source}: this overflows fp16 under every dynamic loss scale"
        notes = [f"{every}. Train in bf16 or fp32.", *notes]
    return Recommendation(
        format=chosen,
        why=why,
        policy=policy,
        steps=len(records),
        constant=constant,
        start=start,
        gradient=source,
        gradients=reduce(Histogram.plus, (one.histogram for one in gradients)),
        kept=kept,
        notes=notes,
        sensitivity=sensitivity,
    )


def _quantized(
    format: str, found: Sensitivity | None, measured: Sequence[SensitivityRecord]
) -> tuple[str, list[Kept], list[str]]:
    """The policy, the linear layers that it keeps in bf16, and notes, for a precision whose factors have scales."""
    if found is None:
        why = dict.fromkeys(note for record in measured for note in record.notes)
        raise UsageError("; ".join([f"no linear layer of the model was measured in {format}", *why]))
    over = [one for one in found.modules if not one.bears]
    lowered = [one for one in found.modules if one.bears]
    # A pattern of its own takes a last block out of the precision's own rule.
    freed = dict.fromkeys(path for record in measured for path in record.wide)
    modules = [
        (path, format) for path in freed if any(f"{one.module}.".startswith(f"{path}.") for one in lowered)
    ] + [(one.module, "bf16") for one in over if is_pattern(one.module)]
    left = math.sqrt(math.fsum(one.changes[format] ** 2 for one in lowered))
    note = (
        f"{len(over)} of {len(found.modules)} linear layers stay in bf16, besides the head; the {len(lowered)} in "
        f"{format} together are expected to change the loss by {left:.2g} (root of the sum of squares)."
    )
    kept = [Kept(one.module, f"alone changes the loss by {one.changes[format]:.2g}") for one in over]
    return str(Policy(format, modules=tuple(modules))), kept, [note, *_notes([], kept)]


def _scales(largest_gradient: float) -> tuple[float, float]:
    """The constant loss scale for fp16, and the first value of a dynamic one."""
    constant = StaticLossScale.from_largest(largest_gradient, "fp16", HEADROOM).scale
    bounds = DynamicLossScale()
    return constant, max(bounds.floor, min(constant, bounds.ceiling))


def conclusions(tensors: Sequence[RangeRow], scale: float | None = None) -> list[str]:
    """What watched tensors show, in sentences: the loss scale at which fp16 holds them, or the modules that need FP32;
    and updates that 16-bit weights lose. `scale`: the run's own; by default the one that calibration recommends.

    >>> conclusions([RangeRow("a", "weight gradient", "fp32", Histogram(-3, [4], largest=0.2), "weight")])
    ['fp16 holds all watched tensors at loss scale 2^17; it rounds none of the gradients to zero']
    """
    where, found = "", list[str]()
    if any(one.format == "fp16" for one in tensors):  # a run in fp16, which keeps these modules in FP32
        wide = {one.module for one in tensors if one.what == "activation" and one.format == "fp32"}
        tensors = [one for one in tensors if one.module not in wide]
        where = " outside of the modules in FP32" if wide else ""
        if zero := _zero(tensors):
            why = "an infinity that a division turned into 0, numbers too small for fp16, dead units, or (in the first "
            why += "update) weights that begin at 0. mezzo calibrate finds the modules that need FP32"
            found = [f"nearly all weight gradients of {_names(zero)} are exactly 0, because of {why}"]
    gradients = [one.histogram for one in tensors if one.what in GRADIENTS and one.histogram.largest > 0]
    if gradients:
        start = scale or _scales(max(one.largest for one in gradients))[1]
        kept = [one for one in _kept(tensors, start) if one.evidence and one.evidence.module == one.module]
        found += [f"for fp16 keep {one.name} in FP32: it {one.why}" for one in kept[:WORST]]
        if kept:
            more = f"; {len(kept) - WORST} more modules are in the report (--out DIR)" if kept[WORST:] else ""
            found += [f"bf16 has FP32's range and holds them{more}. mezzo calibrate writes a policy for fp16"]
        elif not found:
            shares = reduce(Histogram.plus, gradients).shares("fp16", shift_of(start))
            lost = percent(shares.underflow) if shares and shares.underflow else "none"
            holds = f"fp16 holds all watched tensors{where} at loss scale {power_text(start)}"
            found.append(f"{holds}; it rounds {lost} of the gradients to zero")
    ratios = [one for one in tensors if one.what == "update ratio" and one.format in ("bf16", "fp16")]
    worst = max(ratios, key=lambda one: one.histogram.lost(one.format) or 0.0, default=None)
    if worst is not None and (share := worst.histogram.lost(worst.format) or 0.0) > MOST_LOST:
        weights = f"{worst.format} weights without masters lose {percent(share)} of the updates"
        found.append(f"{weights} of {worst.module or 'the model'}; masters=split keeps them")
    return found


def _names(modules: Sequence[str], between: str = ", ") -> str:
    more = [f"{len(modules) - WORST} more modules"] * (len(modules) > WORST)
    return between.join([*(name or "the model" for name in modules[:WORST]), *more])


def _zero(tensors: Iterable[RangeRow]) -> list[str]:
    """Modules without weight gradients other than 0. An embedding has some: for the rows that occurred."""
    rows = [(one.module, one.histogram) for one in tensors if one.what == "weight gradient"]
    zero = dict.fromkeys(module for module, one in rows if 0 < one.elements == one.zeros)
    sums = [(name, reduce(Histogram.plus, (one for module, one in rows if module == name))) for name in zero]
    return [name for name, one in sums if one.zeros > MOST_ZERO * one.elements]


def _kept(
    tensors: Sequence[RangeRow],
    start: float,
    sensitivity: Sensitivity | None = None,
    narrow: Collection[str] = (),
) -> list[Kept]:
    """Modules that fp16 can't hold, and those that ran after them (which read the number, or make the gradient).

    A module without a product leaves an FP32 input in FP32. The ranking shows it by having no `narrow` format.
    """
    ranked = sensitivity.modules if sensitivity and narrow else []
    spared = {one.module for one in ranked if not one.changes.keys() & narrow}
    found: dict[str, Kept] = {}
    after = dict(pairwise(dict.fromkeys(one.module for one in tensors if one.what == "activation")))

    def keep(one: RangeRow, why: str, reads: str) -> None:
        found.setdefault(one.module, Kept(one.module, why, one))
        reader = after.get(one.module)
        if reader is not None and reader not in spared and one.what != "weight":
            found.setdefault(reader, Kept(reader, reads, one))

    for one in tensors:
        name = one.module or "the model"
        if one.what in ("activation", "weight") and one.histogram.overflows("fp16", HEADROOM):
            largest = f"up to {one.histogram.largest:.4g}"
            beyond = "beyond" if one.histogram.overflows("fp16") else f"within {2**HEADROOM}x of"
            noun = "returned numbers" if one.what == "activation" else f"has a {one.name} of"
            why = f"{noun} {largest}, {beyond} fp16's largest number, {named('fp16').max:.0f}"
            keep(one, why, f"may read the output of {name}")
        elif one.what == "activation gradient":
            shares = one.histogram.shares("fp16", shift_of(start))
            if shares is not None and shares.underflow > MOST_LOST:
                part, scale = percent(shares.underflow), power_text(start)
                why = f"has an output gradient of which fp16 rounds {part} to zero even at loss scale {scale}"
                keep(one, why, f"computes the output gradient of {name}")
    for inside in sensitivity.modules if sensitivity else ():
        if inside.refuses("fp16"):
            path, op, change = inside.module, inside.causes.get("fp16", ""), inside.changes["fp16"]
            if op.startswith(INNER):
                continue  # that module is kept: this one gets its result in FP32
            whys = ["alone changes the loss by more than the limit"] * (math.isfinite(change) or not op)
            does = _NEAR if "fp16" in inside.near else "overflows"
            whys += [f"its operation {op} {does} in fp16"] * bool(op)
            found.setdefault(path, Kept(path, ", and ".join(whys), op=op))
    return list(found.values())


def _format(native: Collection[str], asked: str | None) -> tuple[str, str]:
    if asked is not None:
        return asked, "as asked"
    if "bf16" in native:
        return "bf16", "it is native here, has FP32's range, and needs no loss scale"
    if "fp16" in native:
        return "fp16", "it is native here, and bf16 is not"
    return "fp32", (
        "neither bf16 nor fp16 is native here, and emulated formats save no time. For other hardware name the format: "
        "--precision fp16, or format='fp16' in Python"
    )


def _notes(tensors: Sequence[RangeRow], kept: Sequence[Kept]) -> list[str]:
    notes = []
    for one in tensors:
        # Infinite activations are usually masks, and a ratio to a weight of 0 is infinite.
        bad = one.histogram.nans + (one.histogram.infinities if one.what != "activation" else 0)
        if bad and one.what != "update ratio":
            where = f"the {one.what} of {one.module or 'the model'}"
            notes.append(f"In FP32 itself {bad} numbers of {where} were NaN or infinite.")
    unnamed = ", ".join(one.name for one in kept if not is_pattern(one.module) and not one.by_op)
    if unnamed:
        notes.append(f"No policy can name {unnamed}: change the model, or train in bf16 or fp32.")
    test = "Not tried yet: `mezzo compare` tests whether it trains as well as FP32, and whether it is faster."
    return [*notes, test]


def _policy(format: str, start: float, kept: Sequence[Kept]) -> str:
    if format != "fp16":
        return str(Policy(format))
    modules = tuple((one.module, "fp32") for one in kept if is_pattern(one.module))
    ops = tuple({one.op: "fp32" for one in kept if one.by_op}.items())
    scale = "auto" if start == DynamicLossScale().init else f"dynamic(init={start!r})"
    return str(Policy("fp16", loss_scale=scale, ops=ops, modules=modules))


def expected_square(roundings: Sequence[ModuleRounding]) -> float:
    """The expected squared change of the loss, from one module and format in several steps.

    For random errors ``signed**2`` and ``squares`` have the same expectation, and `squares` varies less. Errors with a
    common direction (cancellation, saturation) show in `signed` only. So it is the mean of the larger of the two.
    """
    if not all(math.isfinite(one.signed) and math.isfinite(one.squares) for one in roundings):
        return math.inf
    return math.fsum(max(one.signed**2, one.squares) for one in roundings) / len(roundings)


def together(changes: Iterable[float], most: float) -> float:
    """The largest of those changes that add up, in squares and from the smallest on, to at most `most`; 0.0 if none.

    >>> together([3.0, 1.0, 2.0, 2.0], 3.0)
    2.0
    """
    limit = total = 0.0
    for change in sorted(changes):
        total += change * change
        if math.sqrt(total) > most:
            return limit
        limit = change
    return limit


def rank(
    records: Sequence[SensitivityRecord], formats: Sequence[Format], margin: float = DEFAULT_MARGIN
) -> Sensitivity | None:
    """The ranking of the modules, from a record per measured step: by 16-bit formats first; None without records."""
    found: dict[str, dict[str, list[ModuleRounding]]] = {}
    for row in (row for record in records for row in record.rows):
        found.setdefault(row.module, {}).setdefault(row.format, []).append(row)
    if not found:
        return None
    loss = math.fsum(abs(record.loss) for record in records) / len(records)
    limit = margin * loss / math.sqrt(len(found))
    bits = {form.name: form.bits for form in formats}
    limits: dict[str, float] = {}
    for name in QUANTIZED.intersection(bits):
        squares = (expected_square(rows[name]) for rows in found.values() if name in rows)
        limits[name] = together(map(math.sqrt, squares), margin * loss)
    modules = []
    for module, by_format in found.items():
        changes = {name: math.sqrt(expected_square(rows)) for name, rows in by_format.items()}
        bears = [name for name, change in changes.items() if change <= limits.get(name, limit)]
        causes, near = {}, list[str]()
        for name, rows in by_format.items():  # an operation of its own comes before the modules inside
            if some := [row for row in rows if row.cause]:
                worst = min(some, key=lambda one: (one.cause.startswith(INNER), one.near))
                causes[name] = worst.cause
                near += [name] * worst.near
        bears.sort(key=lambda name: (bits[name], changes[name]))
        kind = next(iter(by_format.values()))[0].kind
        modules.append(ModuleSensitivity(module, kind, changes, causes, near, bears, [*bears, "fp32"][0]))

    shown = [name for name, width in bits.items() if width >= 16] or list(bits)
    # By how many formats are refused, then by the change in the first.
    modules.sort(key=lambda one: (sum(map(one.refuses, shown)), one.changes.get(shown[0], 0.0)), reverse=True)
    notes = list(dict.fromkeys(note for record in records for note in record.notes))
    return Sensitivity(list(bits), shown, modules, loss, margin, limit, len(records), notes)
