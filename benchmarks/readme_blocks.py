"""The tables of docs/dev/benchmarks.md on block formats: verdicts, recipes that lack a part, errors of gradients."""

from __future__ import annotations

from typing import Any

from readme_steps import header


def _interval(ends: list[float]) -> str:
    return f"{ends[0]:+.4f} to {ends[1]:+.4f}"


def verdicts(results: dict[str, Any]) -> str:
    """One row per script and precision, then the commands."""
    lines = header("script", "precision", "verdict", "loss - FP32's", "90 % interval", "margin", "n", "power")
    for name, row in results["rows"].items():
        for precision, one in row["candidates"].items():
            if "recipe=" not in precision:
                cells = [
                    name,
                    f"`{precision}`",
                    f"**{one['parity']}**" if one["parity"] == "divergent" else one["parity"],
                    f"{one['loss_gap']:+.4f}",
                    _interval(one["loss_gap_interval"]),
                    f"{one['margin']:.4f}",
                    str(one["seeds"]),
                    f"{one['power']:.0%}".replace("%", " %"),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    commands = [row["command"] for row in results["rows"].values()]
    return "\n".join([*lines, "", "```bash", *commands, "```"])


def parts(results: dict[str, Any]) -> str:
    """The paired difference of each recipe that lacks a part from the full one, by script."""
    lines = header(
        "without a part - the full recipe", "script", "difference of the loss", "90 % interval", "n"
    )
    found = [
        (pair, name, one) for name, row in results["rows"].items() for pair, one in row["differences"].items()
    ]
    for pair, name, one in sorted(found, key=lambda each: each[0]):
        lacking, full = (text.rpartition("recipe=")[2] for text in pair.split(" - "))
        cells = [f"`{lacking}` - `{full}`", name, f"{one['mean']:+.4f}", _interval(one["interval"])]
        lines.append(f"| {' | '.join(cells)} | {len(one['pairs'])} |")
    return "\n".join(lines)


def gradients(results: dict[str, Any]) -> str:
    """The errors of the weight gradients by recipe."""
    found = results["gradients"]
    mean = f"in the mean over {found['batches']} batches"
    lines = header(
        "recipe", "error in a batch", mean, "length along FP32's", "length of the input's gradient"
    )
    for name, one in found["recipes"].items():
        ours = one["weight"]
        cells = [
            f"{ours['of_one']:.3f}",
            f"{ours['of_mean']:.3f}",
            f"{ours['gain']:.4f}",
            f"{one['input']['gain']:.4f}",
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def sensitivity(results: dict[str, Any]) -> str:
    """The validation loss with each choice of layers that stay in bf16."""
    policy = results["calibrate"]["policy"]
    named = sum("=bf16" in part for part in policy.split(","))
    choices = {
        "nvfp4,module.blocks.5=nvfp4": "none",
        "nvfp4": "the last block (4 layers): `nvfp4`",
        policy: f"the {named} layers that `calibrate --margin 0.00028` names",
    }
    lines = header(
        "layers in bf16, besides the head", "validation loss - FP32's", "90 % interval", "margin", "n"
    )
    for precision, choice in choices.items():
        one = results["compare"][precision]
        cells = [f"{one['metric_gap']:+.4f}", _interval(one["metric_gap_interval"])]
        lines.append(f"| {choice} | {' | '.join(cells)} | {one['metric_margin']:.4f} | {one['seeds']} |")
    return "\n".join(lines)
