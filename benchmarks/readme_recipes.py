"""Generated parts of docs/dev/operations.md and docs/dev/benchmarks.md: op table, advice, softmax, small models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mezzo.core.rules import RULES


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def advice(rows: dict[str, Any]) -> str:
    """One row per piece of common advice: what was measured, and what to do (`advice.json`)."""
    clip = {when: found["median"] for when, found in rows["clipping"]["first_update_norm"].items()}
    loss = rows["loss_in_16_bits"]["bf16"]["loss"]
    end = {kind: f"{found['median']:.3f}" for kind, found in rows["weights_in_16_bits"].items()}
    theirs, _, ours = (f"{found['weight_gradient']:.0e}" for found in rows["norms_in_fp32"].values())
    sums, sigmoid = rows["sums_in_16_bits"], rows["sigmoid_before_the_loss"]["bf16"]
    found = [
        (
            "clip, then call `scaler.step`",
            f"norm of the first update {clip['before']:.1e}; clipped after unscaling {clip['after']:.2g}",
            "`clip_norm=`, or `scaler.clip_grad_norm_`",
        ),
        (
            "compute the loss in 16 bits too",
            f"error of the loss {loss['in_16_bits']:.0e} in bf16; {loss['in_fp32']:.0e} in FP32 from bf16 logits",
            "compute the loss inside the context: it is FP32 there",
        ),
        (
            "`model.bfloat16()` is enough",
            f"training loss {end['bf16 alone']}; FP32 {end['FP32']}; bf16 with masters {end['bf16 with masters']}",
            '`masters="split"`',
        ),
        (
            "convert normalization layers to FP32",
            f"error of a layer norm's weight gradient from bf16 input: PyTorch's bf16 kernel {theirs}, Mezzo's {ours}",
            "nothing: inputs and outputs stay in 16 bits, arithmetic and parameters are FP32",
        ),
        (
            "accumulate gradients in 16 bits",
            f"error of the sum of 64 gradients {sums['bf16']:.0e} in bf16, {sums['fp32']:.0e} in FP32",
            "`accumulate=`: the sums are FP32",
        ),
        (
            "a sigmoid, then `BCELoss`",
            f"a bf16 sigmoid is exactly 1 from {sigmoid['exactly_1_from_logit']:.2f} on: the loss is "
            f"{sigmoid['largest_loss']:.0f} where {sigmoid['loss_should_be']:.0f} is right",
            "`binary_cross_entropy_with_logits`",
        ),
    ]
    return _table(("advice", "measured", "do this instead"), found)


def softmax(rows: list[dict[str, Any]]) -> str:
    """Accuracy of a classifier by the format of its softmax and by its loss (`softmax_ends.json`)."""
    right = {(row["classes"], row["loss"], row["softmax"]): row["right"] for row in rows}
    lines = [
        (f"`{loss}`", f"{classes}", *(_range(right[classes, loss, fmt]) for fmt in ("fp32", "bf16")))
        for classes, loss in dict.fromkeys((row["classes"], row["loss"]) for row in rows)
    ]
    return _table(("loss", "classes", "accuracy, FP32 softmax", "accuracy, bf16 softmax"), lines)


def _range(values: list[float]) -> str:
    return f"{100 * min(values):.0f} to {100 * max(values):.0f} %"


SMALL = {
    "training": "one step per sample",
    "graph": "32 calls, one step",
    "no_grad": "inference",
    "script": "reinforcement learning script",
}
"""Tasks of `small_models.json`."""


def small_models(results: dict[str, Any]) -> str:
    """CPU time of a very small model relative to FP32 without Mezzo, by task (`small_models.json`)."""
    ways = {
        "autocast bf16": "`torch.autocast`, bf16",
        "bf16": "`mezzo run`, bf16",
        "fp16": "`mezzo run`, fp16",
    }
    rows = [
        (label, *(f"{results['rows'][f'{way} {task}']['ratio']:.2f}" for way in ways))
        for task, label in SMALL.items()
    ]
    return _table(("time relative to plain FP32", *ways.values()), rows)


def op_table() -> str:
    """One row per family, rule and reason of `RULES`, with its ops."""
    families: dict[tuple[str, str, str], list[str]] = {}
    for row in RULES.values():
        rule = "; ".join([row.rule.value, *(f"{rule} in {fmt}" for fmt, rule, _ in row.by_format)])
        families.setdefault((row.family, rule, row.reason), []).append(f"`{row.op}`")
    rows = [(family, rule, ", ".join(ops), why) for (family, rule, why), ops in families.items()]
    return f"{len(RULES)} ops:\n\n" + _table(("family", "rule", "ops", "why"), rows)
