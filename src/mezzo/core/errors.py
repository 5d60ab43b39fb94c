"""The errors that Mezzo raises on purpose. Messages say what was received, what is allowed, and how to fix it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from mezzo.core.overflow import OverflowReport

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)


class MezzoError(Exception):
    """Base class of every error that Mezzo raises on purpose."""

    # AutoGraph replaces an error that it cannot rebuild by a StagingError, which `except UsageError` around a
    # tf.function would miss. An error with this mark leaves the function as it was raised.
    ag_pass_through = True


class UsageError(MezzoError, ValueError):
    """A wrong call, policy or command line. The message says how to fix it (exit status 2 on the command line)."""


class UnknownNameError(UsageError, LookupError):
    """An unknown name of a format, precision, op, demo or module pattern. The message suggests the nearest one."""


class UnknownArgumentError(UnknownNameError, TypeError):
    """An unknown keyword argument. The message suggests the nearest one."""


class UnknownDeviceError(UnknownNameError, RuntimeError):
    """An unknown device type; a RuntimeError as in PyTorch. The message suggests the nearest one."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument of the wrong type."""


class UnsupportedPrecisionError(MezzoError, RuntimeError):
    """A precision that this machine cannot run."""


class BannedOpError(MezzoError, RuntimeError):
    """An op that the policy bans in the compute format. The message says what to use instead."""


class CallOrderError(UsageError, RuntimeError):
    """A call at the wrong time: a step before backward, gradients unscaled twice."""


class LossScaleCollapseError(MezzoError, RuntimeError):
    """The loss scale is at its smallest value and `patience` steps in a row were skipped.

    The message has `what` happened, what to look at (`always`), and what to try while the cause is `unknown`.
    """

    def __init__(self, what: str, always: str = "", unknown: str = "") -> None:
        super().__init__(" ".join(filter(None, (what, always, unknown))))
        self._what, self._always, self._unknown = what, always, unknown

    def named(self, culprit: OverflowReport) -> LossScaleCollapseError:
        """The same error with the cause of the skipped steps, and its remedies instead of general advice."""
        why = f"Cause: {culprit.sentence}."
        if culprit.cause in ("loss scale", "unknown"):  # has no known fix
            return LossScaleCollapseError(self._what, why, f"{self._always} {self._unknown}".strip())
        return LossScaleCollapseError(self._what, why, culprit.advice.strip() or self._always)

    def going_on(self, how: str) -> LossScaleCollapseError:
        """The same error, with the call that continues the training."""
        return LossScaleCollapseError(f"{self} After fixing the cause, call {how}.")


class ScriptError(MezzoError, RuntimeError):
    """The script failed in its FP32 run, so there is nothing to compare with."""


# Names of PyTorch's, Apex's and of trainers, and likely ones -> Mezzo's, where it has no such name.
_OTHERS = {
    **dict(init_scale="init", amp="auto", mixed="auto", f32="fp32", enabled="precision='fp32'"),
    **dict(true="auto", bfloat="bf16", o0="fp32", o1="fp16", o2="fp16"),
    **dict.fromkeys(("dtype", "amp_dtype", "autocast_dtype", "compute_dtype", "policy"), "precision"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping", "gradient_clip_val"), "clip_norm"),
}

# Arguments of 0.1.0, and values -> what to do instead.
_REMOVED = {
    "find_batch_size(...): multiple_of": "round the result down, as in found.largest // 8 * 8",
    "find_batch_size(...): on_trial": "print in the step function, or read the result's `trials`",
    **dict.fromkeys(
        ("PrecisionMonitor(...): watch", "PrecisionMonitor(...): probe"),
        "Keras's mixed policies keep weights in FP32. Exponents of a PyTorch model: mezzo.MixedPrecision(watch=...)",
    ),
    "enable_mixed_precision_graph_rewrite(...): op_lists": "set TensorFlow's environment variables, such as "
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD=Tanh (docs/keras.md)",
    "statistical": "use 'dynamic' (DynamicLossScale)",
}
# Arguments of PyTorch's optimizers -> what to do without them in `mezzo.optim`.
_OF_TORCH = {
    **dict.fromkeys(("fused", "foreach"), "Leave it out: mezzo.optim always steps in one fused kernel."),
    **dict.fromkeys(
        ("amsgrad", "capturable", "differentiable"),
        "mezzo.optim lacks it. Give torch.optim's class to mezzo.with_masters, or to MixedPrecision.",
    ),
}


def did_you_mean(received: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """A question with the name that is most like the received one, in upper or lower case; empty if none is."""
    plain = {name.lower(): name for name in names}  # BF16 is nearer to bf16 than to fp16
    if (other := _OTHERS.get(received.lower(), "")).partition("=")[0] in plain:
        return f" Did you mean {other if '=' in other else repr(other)}?"
    near = difflib.get_close_matches(received.lower(), plain, n=1, cutoff=cutoff)
    return f" Did you mean {plain[near[0]]!r}?" if near else ""


def unknown_name(
    kind: str,
    received: str,
    allowed: Iterable[str],
    *,
    where: str = "",
    error: type[UnknownNameError] = UnknownNameError,
) -> UnknownNameError:
    """The error for a wrong name of this kind: what was received, what is allowed, and the nearest right one.

    >>> print(unknown_name("format", "f15", ["bf16", "fp16", "fp32"], where="policy 'compute=f15': "))
    policy 'compute=f15': unknown format 'f15'. Use one of bf16, fp16, fp32. Did you mean 'fp16'?
    """
    names = sorted(allowed)
    instead = _REMOVED.get(f"{where}{received}")
    fix = f" It was removed in 0.2: {instead}" if instead else did_you_mean(str(received), names)
    return error(f"{where}unknown {kind} {received!r}. Use one of {', '.join(names)}.{fix}")


def unknown_argument(function: Callable[..., Any], received: str) -> UnknownNameError:
    """The error for a keyword argument that the function does not have."""
    code = function.__code__
    allowed = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self"}
    where = function.__qualname__.removesuffix(".__init__")
    if received in _OF_TORCH and "lr" in allowed:
        return UnknownArgumentError(f"{where}(...): no argument {received!r}. {_OF_TORCH[received]}")
    return unknown_name("argument", received, allowed, where=f"{where}(...): ", error=UnknownArgumentError)


def checks_keywords(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """A decorator: an unknown keyword argument raises UnknownArgumentError, with the nearest right name."""
    code = function.__code__
    allowed = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        for name in kwargs:
            if name not in allowed:
                raise unknown_argument(function, name)
        return function(*args, **kwargs)

    return checked


def checks_fields(cls: _Class) -> _Class:
    """`checks_keywords` for the constructor that `dataclass` made."""
    cls.__init__ = checks_keywords(cls.__init__)  # type: ignore[misc]
    return cls
