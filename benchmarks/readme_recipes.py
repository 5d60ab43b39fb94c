"""The parts of the recipe pages: the examples, as they are run, and what `advice.json` says of common advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# Page under docs/recipes/ -> its example under examples/.
EXAMPLES = {
    "cnn": "cnn",
    "transformer": "transformer",
    "recurrent": "recurrent",
    "gan": "gan",
    "fine-tuning": "fine_tuning",
    "accumulation-and-clipping": "accumulation_and_clipping",
}


def example(name: str) -> Callable[[], str]:
    """The code of an example, as a block."""

    def block() -> str:
        code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").rstrip()
        return f"`examples/{name}.py`, which CI runs:\n\n```python\n{code}\n```"

    return block


def _number(value: float) -> str:
    return f"{value:.3g}"


def _spread(found: dict[str, float]) -> str:
    return f"{_number(found['median'])} ({_number(found['least'])} to {_number(found['most'])})"


def clipping(rows: dict[str, Any]) -> str:
    """Clip before or after unscaling."""
    found = rows["clipping"]
    lines = [
        f"| a clip to {found['max_norm']:g}, loss scale {found['scale']:g} | norm of the first update | test loss |",
        "|---|---|---|",
    ]
    for when, title in (("before", "of scaled gradients"), ("after", "of unscaled gradients")):
        update, loss = found["first_update_norm"][when], found["test_loss"][when]
        lines.append(f"| {title} | {_spread(update)} | {_spread(loss)} |")
    return "\n".join(lines)


def loss(rows: dict[str, Any]) -> str:
    """A cross entropy in 16 bits or in FP32, of the same logits."""
    lines = [
        "| logits | the loss is computed in | error of the loss | error of its gradient |",
        "|---|---|---|---|",
    ]
    for fmt, found in rows["loss_in_16_bits"].items():
        for how, title in (("in_16_bits", fmt), ("in_fp32", "FP32")):
            lines.append(f"| {fmt} | {title} | {found['loss'][how]:.1e} | {found['gradient'][how]:.1e} |")
    return "\n".join(lines)


def weights(rows: dict[str, Any]) -> str:
    """Training loss with weights in bf16 alone, and with masters."""
    lines = ["| weights | training loss at the end |", "|---|---|"]
    return "\n".join(
        lines + [f"| {way} | {_spread(found)} |" for way, found in rows["weights_in_16_bits"].items()]
    )


def norms(rows: dict[str, Any]) -> str:
    """Three ways to run a layer norm on bf16 activations."""
    lines = [
        "| layer norm on bf16 | bytes an output element | error of the output | error of the weight's gradient |",
        "|---|---|---|---|",
    ]
    for way, found in rows["norms_in_fp32"].items():
        errors = f"{found['output']:.1e} | {found['weight_gradient']:.1e}"
        lines.append(f"| {way} | {found['output_bytes']} | {errors} |")
    return "\n".join(lines)


def sums(rows: dict[str, Any]) -> str:
    """The error of a sum of gradients."""
    found = rows["sums_in_16_bits"]
    return (
        "| 64 gradients gathered in | error of the sum |\n|---|---|\n"
        f"| bf16 | {found['bf16']:.1e} |\n| FP32 | {found['fp32']:.1e} |"
    )


def sigmoid(rows: dict[str, Any]) -> str:
    """From where on a 16-bit sigmoid is exactly 1."""
    lines = [
        "| sigmoid in | exactly 1 from the logit | largest loss up to logit 20 | it should be |",
        "|---|---|---|---|",
    ]
    for fmt, found in rows["sigmoid_before_the_loss"].items():
        cells = " | ".join(
            _number(found[key]) for key in ("exactly_1_from_logit", "largest_loss", "loss_should_be")
        )
        lines.append(f"| {fmt} | {cells} |")
    return "\n".join(lines)


ADVICE: dict[str, Callable[[dict[str, Any]], str]] = {
    "clipping": clipping,
    "loss": loss,
    "weights": weights,
    "norms": norms,
    "sums": sums,
    "sigmoid": sigmoid,
}
