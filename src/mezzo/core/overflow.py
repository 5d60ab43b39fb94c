"""OverflowReport: where a value that is not finite was made, from what, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mezzo.core.formats import named
from mezzo.core.notebook import html_table

OUTSIDE = "(outside the model)"
"""The module of an op that no watched model's call holds: a loss, a penalty, arithmetic between two models."""

SUM = "sum of gradients"
"""The `op` of a finding about a sum of several gradients of one tensor, which is not an operation."""

ALARMS = 20
"""Places with a cause other than the loss scale that a run reports; later skipped steps are counted only."""
REPEATS = 16
"""Reports of a place that is known that count as a new one: looking at each skipped step takes time."""

CAUSES = {
    "loss scale": "the gradients overflow at this loss scale and are finite at a smaller one. A dynamic loss scale "
    "goes down by itself; a constant one is too large",
    "overflow": "the inputs are finite and the result is larger than the largest number of its format",
    "invalid": "the operation has no finite result for its inputs, such as log(0), 0 / 0, or the root of 0 in backward",
    "input": "the model's input contains NaN or infinity",
    "state": "a parameter or a buffer contained NaN or infinity before the step",
    "loss": "the loss itself is NaN or infinite. No loss scale helps; the cause is the batch, the model or the "
    "loss function",
    "unknown": "the cause is unknown",
}
"""What can be behind a step whose gradients are not finite."""


@dataclass(frozen=True)
class Weakness:
    """How to fix an op without a finite result (`fix`) or derivative (`fix_slope`); `takes_eps`: users add one."""

    fix: str = ""
    fix_slope: str = ""
    takes_eps: bool = False


_INSIDE = "keep the input inside (-1, 1), where the derivative is finite: `x.clamp(-1 + 1e-6, 1 - 1e-6)`"
_BY_OPS = {
    "log": Weakness(
        "clamp the input of the logarithm: `x.clamp(min=1e-6).log()`; for a probability use log_softmax",
        "compute the logarithm only for the elements that you use: torch.where(...) around it differentiates all",
        takes_eps=True,
    ),
    "log2, log10": Weakness("clamp the input of the logarithm away from 0", takes_eps=True),
    "log1p": Weakness("keep the input above -1"),
    "logit, special_logit": Weakness("keep the input inside (0, 1): `torch.logit(x, eps=1e-6)` clamps it"),
    "div, addcdiv, reciprocal": Weakness(
        "add an eps to the denominator, or clamp it away from 0", takes_eps=True
    ),
    "rsqrt": Weakness("add an eps under the root", takes_eps=True),
    "sqrt": Weakness(
        "clamp the input of the root at 0 or above",
        "add an eps under the root: its derivative is infinite at 0",
        takes_eps=True,
    ),
    "pow, float_power": Weakness(
        "clamp the base away from 0; with a fractional exponent keep it above 0",
        "add an eps to the base: with a fractional exponent the derivative is infinite at 0",
        takes_eps=True,
    ),
    "softmax, log_softmax, scaled_dot_product_attention": Weakness(
        "leave at least one position of each row unmasked: the softmax of a fully masked row is NaN"
    ),
    "norm, linalg_vector_norm": Weakness(
        fix_slope="add an eps before the root: a norm has no derivative at 0"
    ),
    "acos, asin, atanh": Weakness(_INSIDE),
    "mean": Weakness("the mean of no elements is NaN: check that at least one element is left"),
    "std": Weakness(
        "a standard deviation needs at least two elements",
        "add an eps: `(x.var() + eps).sqrt()`; a standard deviation has no derivative at 0",
    ),
    "var": Weakness("a variance needs at least two elements"),
    "nll_loss, cross_entropy_loss": Weakness(
        "the mean over no targets is NaN: check that at least one target is not ignored"
    ),
    "binary_cross_entropy": Weakness("use binary_cross_entropy_with_logits on the input of the sigmoid"),
    # Not an operation: a function of the script's own on a gradient.
    "gradient hook": Weakness(
        fix_slope="check the hook that the script registered on that tensor's gradient"
    ),
}

WEAK_OPS: Mapping[str, Weakness] = MappingProxyType(
    {op: weakness for ops, weakness in _BY_OPS.items() for op in ops.split(", ")}
)
"""Op -> its weakness, by the names of `mezzo.core.rules.RULES` where an op is in it."""


@dataclass(frozen=True)
class TensorFacts:
    """Facts of a tensor; `name` is its role in the operation: ``input 0``, ``weight``, ``gradient of output``.

    `largest` and `smallest` are magnitudes of finite elements, without zeros; 0 where there is none.
    """

    name: str
    shape: list[int]
    format: str
    largest: float
    smallest: float
    zeros: int
    infinities: int
    nans: int

    @property
    def finite(self) -> bool:
        """Whether every element is."""
        return not self.infinities and not self.nans

    def __str__(self) -> str:
        counts = {"infinite": self.infinities, "NaN": self.nans}
        bad = "".join(f", {count} {word}" for word, count in counts.items() if count)
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} {self.format} {shape}, largest {self.largest:.4g}{bad}"


@dataclass(frozen=True, repr=False)
class OverflowReport:
    """Where a value that is not finite was produced, not where it was passed on. Printed: `sentence` and `advice`.

    Args:
        cause: a key of `CAUSES`.
        module: path of the module in its model, ``""`` for the model itself, or `OUTSIDE`.
        op: the operation that produced it: ``exp``, ``linear``, ``DivBackward0``.
        direction: ``forward`` or ``backward``.
        propagators: those that passed it on, in order, as ``module: op``; the first few.
        line: the user's line that called the operation, as ``file.py:12: code``; ``""`` if unknown.
        how: ``replay`` (the step's model calls were run again), ``live`` (watched as it happened); other words of a
            step that was not run again.
        remedies: what to try, the likeliest first. A command or code between backquotes was tried on the step, as far
            as one model call and its gradients show.
        seconds, kept_bytes: the time that finding it took, and the bytes kept for it until the step's end.
        note: what limits the report.
    """

    cause: str
    module: str = ""
    op: str = ""
    direction: str = "forward"
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    propagators: list[str] = field(default_factory=list)
    line: str = ""
    how: str = "replay"
    remedies: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kept_bytes: int = 0
    note: str = ""

    @property
    def alarms(self) -> bool:
        """Whether it is a fault, and not the normal search of a dynamic loss scale."""
        return self.cause != "loss scale"

    @property
    def is_located(self) -> bool:
        """Whether watching a later step would not tell more: it has a line, or was inside of a model call."""
        return bool(self.line) or self.module != OUTSIDE

    @property
    def place(self) -> tuple[str, ...]:
        """Equal for reports that differ in numbers only."""
        names = [one.name for one in self.inputs] if self.cause in ("input", "state") else []
        why_not = self.note if self.cause in ("unknown", "loss") else ""
        return (self.cause, self.module, self.op, self.direction, self.line, why_not, *names)

    def __str__(self) -> str:
        return f"{self.sentence}.{self.advice}" if self.remedies else self.sentence

    def __repr__(self) -> str:
        return f"OverflowReport({self.sentence!r})"

    @property
    def advice(self) -> str:
        """The remedies as the last sentence of a message; empty if there are none."""
        return f" Try: {'; or '.join(self.remedies)}." if self.remedies else ""

    @property
    def sentence(self) -> str:
        """What happened, where and why, without a full stop."""
        if self.cause == "unknown":
            return f"{self.why}{': ' + self.note if self.note else ''}"
        if self.cause == "loss":
            return f"{self.why}{f' ({self.note})' if self.note else ''}"
        line = f" ({self.line})" if self.line else ""
        if self.cause in ("input", "state"):  # a tensor that was there
            names = ", ".join(facts.name for facts in self.inputs)
            return f"{names or 'a tensor'}{f' of {self.module}' if self.module else ''}{line}: {CAUSES[self.cause]}"
        return f"{self.where}{line}: {self.why}"

    @property
    def where(self) -> str:
        """The operation and its module in words."""
        where = "outside the model" if self.module == OUTSIDE else f"in {self.module or 'the model'}"
        return f"{self.direction} of {self.op or 'an operation'} {where}"

    def _repr_html_(self) -> str:
        rows = [("cause", self.why), ("module", self.module), ("operation", self.op), ("line", self.line)]
        rows += [("input", str(facts)) for facts in self.inputs]
        rows += [("output", str(facts)) for facts in self.outputs]
        rows += [("passed on by", ", ".join(self.propagators)), ("note", self.note)]
        rows += [("try", remedy) for remedy in self.remedies]
        return html_table(self.sentence, [row for row in rows if row[1]])

    @property
    def why(self) -> str:
        """The cause in words, of this operation and these numbers where they are known."""
        if self.cause == "overflow":
            made = next((one.name for one in self.outputs if "grad" in one.name and not one.finite), "result")
            return self._not_fitting() or CAUSES["overflow"].replace("result", made)
        if self.cause == "unknown" and self.how not in ("replay", "live"):
            return "the cause is unknown, and the step can't be run again"
        if self.cause != "invalid":
            return CAUSES.get(self.cause, "")
        what = "derivative" if self.direction == "backward" else "result"
        return f"the operation has no finite {what} for its inputs"

    def _not_fitting(self) -> str:
        """That a number which went in lies itself beyond the format of what came out; empty where none does."""
        # What is kept for backward went into the operation, not into its slope.
        went_in = [one for one in self.inputs if not one.name.startswith("saved ")]
        bad = (one.format for one in self.outputs if not one.finite)
        made = next((form for form in bad if form in ("fp16", "bf16")), None)
        most = max(went_in, key=lambda one: one.largest, default=None)
        if made is None or most is None or most.largest < rounded_to_infinity(made):
            return ""
        what = most.name.removeprefix("model ").partition(" ")[0] or "input"
        told = f"{'an' if what[0] in 'aeiou' else 'a'} {what} of {most.largest:.4g}"
        if self.direction == "backward":
            told = f"the {most.name} is {most.largest:.4g} without the loss scale, and"
        told += f" does not fit {made}, whose largest number is {float(named(made).max):.6g}"
        if most.name.startswith("model "):
            return f"{told}. It is an input of the model"
        # Nothing of this step made a parameter, and the operation itself the gradients of what it was given.
        earlier = what == "input" or most.name == "gradient of output"
        return f"{told}. An earlier operation produced it" if earlier else told


def rounded_to_infinity(name: str) -> float:
    """The smallest number that a format rounds to infinity: half a unit beyond its largest."""
    form = named(name)
    return float(form.max) + 2.0 ** (form.maxexp - form.nmant - 2)
