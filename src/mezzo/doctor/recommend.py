"""Which precision to use, and why: from what was measured, or from a GPU's compute capability alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mezzo.doctor.gpus import Capability, formats_at

CANDIDATES = ("bf16", "fp16")
"""In the order in which they are preferred: bf16 has FP32's range, and needs no loss scale."""

WORTH_IT = 1.1
"""A format must make the work this much faster than fp32 to be worth the coarser numbers."""

_EMULATED = "Mezzo computes it in fp32 between casts, at about fp32's speed, to try its numerics."
_FP16 = "fp16 reaches from 6e-8 to 65504 only: Mezzo scales the loss, and skips steps that overflow."


@dataclass(frozen=True)
class Recommendation:
    """A precision to ask for (``"fp32"``, ``"bf16"``, ``"fp16"``), and the reasons as sentences."""

    precision: str
    reasons: tuple[str, ...]


def from_rates(
    rates: Mapping[tuple[str, str], float], native: Iterable[str], *, device: str
) -> Recommendation:
    """Recommend from measured rates.

    Args:
        rates: (what, format) -> rate, higher is faster, NaN where it could not run; ``what`` is
            ``"matmul"`` or ``"conv step"``.
        native: the 16-bit formats that the device trains in natively.
        device: how to call the device in a sentence, for instance ``"this CPU"``.
    """
    native = frozenset(native)
    reasons: list[str] = []
    chosen = "fp32"
    for form in CANDIDATES:
        matmul, conv = _speedup(rates, "matmul", form), _speedup(rates, "conv step", form)
        measured = f"matrix products run {_times(matmul)}, a convolution's training step {_times(conv)}"
        if form not in native:
            reasons.append(_not_native(form, device, measured, conv))
        elif _is_worth_it(matmul, conv):
            reasons.append(f"{form}: {device} computes in {form} itself; against fp32, {measured}.")
            if chosen == "fp32":
                chosen = form
        else:
            reasons.append(f"{form}: {device} has {form}, but gains too little by it here: {measured}.")
    if chosen == "bf16":
        reasons.append("bf16 comes before fp16: it has the range of fp32, so it needs no loss scale.")
    if chosen == "fp16":
        reasons.append(
            "fp16 reaches from 6e-8 to 65504 only: Mezzo scales the loss, and skips steps that overflow."
        )
    if chosen == "fp32":
        reasons.append("fp32: 16 bits would save memory here, but no time.")
    return Recommendation(chosen, tuple(reasons))


def from_capability(capability: Capability) -> Recommendation:
    """Recommend for a CUDA device of this compute capability, without having it."""
    formats = formats_at(capability)
    text = "{}.{}".format(*capability)
    if "bf16" in formats:
        return Recommendation(
            "bf16",
            (
                f"bf16: tensor cores multiply it from compute capability 8.0, and this is {text}.",
                "bf16 comes before fp16: as fast, and with fp32's range, so it needs no loss scale.",
            ),
        )
    if "fp16" in formats:
        return Recommendation(
            "fp16",
            (
                f"fp16: tensor cores multiply it from compute capability 7.0, and this is {text}.",
                "bf16 needs 8.0: below that PyTorch runs it without tensor cores, slower than fp32.",
                _FP16,
            ),
        )
    return Recommendation(
        "fp32", (f"fp32: there are tensor cores from compute capability 7.0, and this is {text}.",)
    )


def _is_worth_it(*speedups: float) -> bool:
    """One kind of work gains and none loses; written so that NaN, what cannot run, is a loss."""
    return any(one >= WORTH_IT for one in speedups) and all(one >= 1 / WORTH_IT for one in speedups)


def _not_native(form: str, device: str, measured: str, conv: float) -> str:
    sentence = f"{form}: {device} does not train in {form} natively"
    if conv != conv:
        return f"{sentence}, nor can PyTorch run it there. {_EMULATED}"
    return f"{sentence}: against fp32, {measured}. {_EMULATED}"


def _speedup(rates: Mapping[tuple[str, str], float], what: str, form: str) -> float:
    return rates.get((what, form), float("nan")) / rates.get((what, "fp32"), float("nan"))


def _times(speedup: float) -> str:
    if speedup != speedup:
        return "not at all"
    if 0.95 <= speedup <= 1.05:
        return "as fast"
    if speedup > 1:
        return f"{speedup:.3g} times as fast"
    return f"{1 / speedup:.3g} times as slow"
