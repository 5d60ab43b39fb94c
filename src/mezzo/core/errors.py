"""The errors that Mezzo raises on purpose. Messages say what was received, what is allowed, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mezzo.core.overflow import OverflowReport


class MezzoError(Exception):
    """Base of every error that Mezzo raises on purpose."""

    # AutoGraph makes a StagingError of an error that it cannot rebuild, and who catches a UsageError around a
    # tf.function would not. One with this mark leaves the function as it was raised.
    ag_pass_through = True


class UsageError(MezzoError, ValueError):
    """The call, the policy or the command line is wrong; the message says how to mend it (CLI exit status 2)."""


class UnknownNameError(UsageError, LookupError):
    """A name (format, precision, op, demo, module pattern) that is not in its table."""


class UnsupportedPrecisionError(MezzoError, RuntimeError):
    """A precision that no path on this machine can run."""


class BannedOpError(MezzoError, RuntimeError):
    """An op that the policy bans in the compute format; the message says what to use in its place."""


class CallOrderError(UsageError, RuntimeError):
    """The right call at the wrong time: a step before backward, gradients unscaled twice."""


class LossScaleCollapseError(MezzoError, RuntimeError):
    """The loss scale fell to its floor and steps are still skipped after the patience ran out.

    The message has `what` happened, what to look at (`always`), and what to try while the cause is `unknown`.
    """

    def __init__(self, what: str, always: str = "", unknown: str = "") -> None:
        super().__init__(" ".join(filter(None, (what, always, unknown))))
        self._what, self._always, self._unknown = what, always, unknown

    def named(self, culprit: OverflowReport) -> LossScaleCollapseError:
        """The same, with what makes the steps fail; the remedies of what is found take the place of general advice."""
        why = f"What makes them fail: {culprit}."
        if culprit.cause in ("loss scale", "unknown"):  # nothing that is known to mend it
            return LossScaleCollapseError(self._what, why, f"{self._always} {self._unknown}".strip())
        remedies = f"Try: {'; or '.join(culprit.remedies)}." if culprit.remedies else self._always
        return LossScaleCollapseError(self._what, why, remedies)

    def going_on(self, how: str) -> LossScaleCollapseError:
        """The same, with what to call once that is mended."""
        return LossScaleCollapseError(f"{self} Once that is mended, {how}.")


class ScriptError(MezzoError, RuntimeError):
    """The user's script failed under its FP32 baseline, so there is nothing to compare with."""


def unknown_name(kind: str, received: str, allowed: Iterable[str], *, where: str = "") -> UnknownNameError:
    """The error for a wrong name of this kind: what was received, what is allowed, and the nearest right one.

    >>> print(unknown_name("format", "f15", ["bf16", "fp16", "fp32"], where="policy 'compute=f15': "))
    policy 'compute=f15': unknown format 'f15'. Use one of bf16, fp16, fp32. Did you mean 'fp16'?
    """
    names = sorted(allowed)
    plain = {name.lower(): name for name in names}  # BF16 is nearer to bf16 than to fp16
    near = difflib.get_close_matches(received.lower(), plain, n=1, cutoff=0.4)
    mend = f" Did you mean {plain[near[0]]!r}?" if near else ""
    return UnknownNameError(f"{where}unknown {kind} {received!r}. Use one of {', '.join(names)}.{mend}")
