"""Weak ops: for which finite numbers an operation has no finite result, or no finite slope, and what mends that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Weakness:
    """What is said of one operation; empty where there is nothing to say.

    Args:
        result: where it has no finite result.
        slope: where it has no finite slope.
        mend: what to do about the first, and about the second where `mend_slope` is empty.
        mend_slope: what to do about the second.
        takes_eps: whether one commonly adds an eps to what goes in, which may be 0 in the format.
    """

    result: str = ""
    slope: str = ""
    mend: str = ""
    mend_slope: str = ""
    takes_eps: bool = False


_LOG = Weakness(
    "a logarithm has one only above 0",
    "that of a logarithm is infinite at 0",
    "clamp what goes into the logarithm away from 0",
    takes_eps=True,
)
_DIV = Weakness(
    "a division by 0 has none",
    "that of a division is infinite where the divisor is 0",
    "add an eps to the denominator, or clamp it away from 0",
    takes_eps=True,
)
_POW = Weakness(
    "0 to a negative power has none, nor has a negative number to a fraction",
    "that of a power below 1 is infinite at 0",
    "clamp the base away from 0, and above it for a fraction as exponent",
    "add an eps to the base: the slope of a fraction as exponent is infinite at 0",
    takes_eps=True,
)
_SOFTMAX = Weakness(
    "a row that is -inf throughout has no softmax",
    mend="leave one place of each row open: a row that is masked throughout has no softmax",
)
_LENGTH = Weakness(
    slope="a length has none at 0", mend_slope="add an eps before the root: a length has no slope at 0"
)
_ARC = Weakness(
    "there is one only from -1 to 1",
    "it is infinite at -1 and at 1",
    "keep what goes in inside of (-1, 1): `x.clamp(-1 + 1e-6, 1 - 1e-6)`",
    "keep what goes in inside of (-1, 1): its slope is infinite at both ends",
)
_LOGIT = Weakness(
    "logit has one only between 0 and 1",
    mend="keep what goes in inside of (0, 1): `torch.logit(x, eps=1e-6)` clamps it",
)
_OF_SPREAD = Weakness("there is none of fewer than two elements")
_OF_TARGETS = Weakness(
    "there is no mean over no target", mend="a mean over no target: see that at least one is not ignored"
)

_OPS: dict[str, Weakness] = {
    "log": replace(
        _LOG,
        mend="clamp what goes into the logarithm: `x.clamp(min=1e-6).log()`; of a probability take log_softmax instead",
        mend_slope="take the logarithm only of what is used: torch.where(...) around it still goes through its slope",
    ),
    "log2": _LOG,
    "log10": _LOG,
    "log1p": Weakness("log1p has one only above -1", mend="keep what goes in above -1"),
    "logit": _LOGIT,
    "special_logit": _LOGIT,
    "div": _DIV,
    "addcdiv": _DIV,
    "reciprocal": replace(
        _DIV, result="0 has no reciprocal", mend="add an eps to what is inverted, or clamp it away from 0"
    ),
    "rsqrt": Weakness(
        "one over a root has one only above 0",
        "that of a root is infinite at 0",
        "add an eps under the root",
        takes_eps=True,
    ),
    "sqrt": Weakness(
        "a negative number has no root",
        "that of a root is infinite at 0",
        "clamp what goes under the root at 0, or above",
        "add an eps under the root: its slope is infinite at 0",
        takes_eps=True,
    ),
    "pow": _POW,
    "float_power": _POW,
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "scaled_dot_product_attention": _SOFTMAX,
    "norm": _LENGTH,
    "linalg_vector_norm": _LENGTH,
    "acos": _ARC,
    "asin": _ARC,
    "atanh": replace(_ARC, result="there is one only between -1 and 1", mend_slope=""),
    "mean": Weakness(
        "there is no mean over nothing", mend="a mean over nothing: see that at least one element is left"
    ),
    "std": replace(
        _OF_SPREAD,
        slope="a deviation has none at 0",
        mend="a deviation needs two elements, and an eps under its root for a slope",
        mend_slope="add an eps: `(x.var() + eps).sqrt()`; a deviation has no slope at 0",
    ),
    "var": replace(_OF_SPREAD, mend="a variance needs two elements"),
    "nll_loss": _OF_TARGETS,
    "cross_entropy_loss": _OF_TARGETS,
    "binary_cross_entropy": Weakness(mend="binary_cross_entropy_with_logits on what goes into the sigmoid"),
    # What is no operation, but a function of the script's own on a gradient.
    "gradient hook": Weakness(mend_slope="look at the function that is registered on that tensor's gradient"),
}

WEAK_OPS: Mapping[str, Weakness] = MappingProxyType(_OPS)
"""Op -> its weakness, by the names of `mezzo.core.rules.RULES` where an op is in it."""


def weakness_of(op: str) -> Weakness:
    """What is known of an op; one that says nothing of any other."""
    return WEAK_OPS.get(op, Weakness())


def mends_of(op: str, direction: str) -> Iterator[str]:
    """What to do about an op that has no finite result, or backward no finite slope; nothing if nothing is known."""
    weak = weakness_of(op)
    told = (weak.mend_slope or weak.mend) if direction == "backward" else weak.mend
    if told:
        yield told
