"""Do block formats train as well as FP32, and do their parts matter? The verdicts in `docs/dev/benchmarks.md`.

    python benchmarks/block_verdicts.py                             # writes benchmarks/results/block_verdicts.json
    python benchmarks/block_verdicts.py --row wide-mlp --keep DIR   # one row; DIR keeps the runs, to continue them

Each row is a script at a small size, compared by `mezzo compare` with FP32 under bf16 and block formats. Rows with
linear layers also run the recipes that lack a part: rounding to nearest instead of stochastic, no Hadamard transform,
scales by FLOOR. All run with the same seeds, so a recipe's difference from the full one is paired, too. The
differences follow from the pairs in `verdict.json`. `minutes` is the length of the runs by candidate, FP32's too,
without the start of their processes; runs that `--keep` kept count as well. FP32 and `FORMATS` together should take
at most 20 on two idle cores.

`gradients` measures the parts without training under them: the error of every linear layer's gradients in a
text-gpt, of the factors that FP32's backward multiplies, relative to the gradient of a batch. `of_one` is the error
in a batch, `of_mean` in the mean over the batches: errors without a common part shrink by the root of their number.
`gain` is the gradient's length along FP32's, 1 for an unbiased one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.compare.comparison import compare
from mezzo.compare.request import Request
from mezzo.core import records
from mezzo.core.commands import compare_command
from mezzo.core.equivalence import paired_interval
from mezzo.core.recipes import RECIPES, Recipe
from mezzo.demos import DEMOS
from mezzo.demos.text_gpt import GPT, batch, load
from mezzo.pytorch.hardware import describe
from mezzo.pytorch.kernels.quantized_linear import quantized_linear

HERE = Path(__file__).parent
FORMATS = ("bf16", "mxfp8", "nvfp4")
LACKING = {
    "mxfp8,recipe=mxfp8-floor": "mxfp8",
    "nvfp4,recipe=nvfp4-nearest": "nvfp4",
    "nvfp4,recipe=nvfp4-plain": "nvfp4",
}
"""Recipes that lack a part, each with the full one."""


@dataclass(frozen=True)
class Row:
    """A comparison: a demo or script, its arguments, the candidates, and the metric of a script."""

    target: Path
    argv: tuple[str, ...]
    precisions: tuple[str, ...]
    metric: str
    demo: str | None = None
    seeds: int = 5


def _demo(name: str, argv: str, precisions: tuple[str, ...]) -> Row:
    return Row(DEMOS[name].path, tuple(argv.split()), precisions, DEMOS[name].metric, name)


_MLP, _ACCURACY = HERE / "wide_mlp.py", r"test accuracy: ([0-9.]+) %"

ROWS = {
    "text-gpt": _demo("text-gpt", "--width 128 --layers 4 --context 64 --steps 240 --lr 3e-3", FORMATS),
    "digits": _demo("digits", "--epochs 3 --width 32", FORMATS),
    "wide-mlp": Row(_MLP, ("--epochs", "10"), (*FORMATS, *LACKING), _ACCURACY),
    "wide-mlp-5e-3": Row(_MLP, ("--epochs", "20", "--lr", "5e-3"), (*FORMATS[1:], *LACKING), _ACCURACY),
}
KEPT = (
    "parity", "seeds", "steps", "final_loss", "fp32_loss", "loss_gap", "loss_gap_interval", "margin", "power",
    "pairs_needed", "noise_floor", "loss_parity", "final_metric", "fp32_metric", "metric_gap", "metric_gap_interval",
    "metric_margin", "metric_parity", "notes", "pairs",
)  # fmt: skip


def compared(row: Row, folder: Path) -> dict[str, Any]:
    """The trimmed verdict of a row, and the paired differences of the recipes that lack a part."""
    request = Request(
        str(row.target),
        row.argv,
        precisions=row.precisions,
        seeds=row.seeds,
        metric=row.metric,
        demo=row.demo,
    )
    found = compare(request, folder)["candidates"]
    asked = request.asked() if row.demo else {**request.asked(), "target": f"benchmarks/{row.target.name}"}
    return {
        "command": compare_command(asked),
        "minutes": minutes(folder / "runs"),
        "candidates": {name: {key: one[key] for key in KEPT} for name, one in found.items()},
        "differences": {
            f"{name} - {full}": difference(found[name], found[full])
            for name, full in LACKING.items()
            if name in found
        },
    }


def minutes(runs: Path) -> dict[str, float]:
    """The minutes of all runs of each candidate, from their records ``CANDIDATE-SEED.jsonl``."""
    found: dict[str, float] = {}
    for path in sorted(runs.glob("*.jsonl")):
        name = path.stem.rpartition("-")[0]
        seconds = sum(one.seconds for one in records.read(path) if isinstance(one, records.RunEnded))
        found[name] = found.get(name, 0.0) + seconds / 60
    return found


def difference(lacking: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """A recipe's final loss minus that of the full recipe, seed by seed, with the 90 % interval of the mean."""
    theirs = {pair["seed"]: pair["loss_gap"] for pair in full["pairs"]}
    gaps = np.array([pair["loss_gap"] - theirs[pair["seed"]] for pair in lacking["pairs"]])
    low, high = paired_interval(gaps)
    return {"mean": float(gaps.mean()), "interval": [float(low), float(high)], "pairs": gaps.tolist()}


def gradients(steps: int = 100, batches: int = 16) -> dict[str, Any]:
    """Errors of the weight gradients of a text-gpt that was trained for so many steps, by recipe."""
    torch.manual_seed(0)
    text, model = load(400_000), GPT(128, 4, 4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        _loss(model, text).backward()
        optimizer.step()
        optimizer.zero_grad()
    layers = [layer for block in model.blocks for layer in block.modules() if isinstance(layer, nn.Linear)]
    inputs: dict[nn.Module, Tensor] = {}
    grads: dict[nn.Module, Tensor] = {}
    for layer in layers:
        layer.register_forward_hook(lambda layer, args, _: inputs.update({layer: args[0].detach()}))
        layer.register_full_backward_pre_hook(lambda layer, out: grads.update({layer: out[0].detach()}))  # type: ignore[index]
    # Per kind of gradient: exact ones of each batch and layer, and each recipe's.
    exact: dict[str, list[list[Tensor]]] = {"weight": [], "input": []}
    found: dict[str, dict[str, list[list[Tensor]]]] = {name: {"weight": [], "input": []} for name in RECIPES}
    for _ in range(batches):
        model.zero_grad()
        _loss(model, text).backward()
        exact["weight"].append([_gradient(layer.weight).clone() for layer in layers])
        exact["input"].append([grads[layer] @ layer.weight.detach() for layer in layers])
        for name, recipe in RECIPES.items():
            both = [_backward(inputs[layer], layer.weight, grads[layer], recipe) for layer in layers]
            for kind, of_layers in zip(("weight", "input"), zip(*both)):
                found[name][kind].append(list(of_layers))
    return {
        "layers": len(layers),
        "batches": batches,
        "recipes": {
            name: {kind: _errors(of[kind], exact[kind]) for kind in exact} for name, of in found.items()
        },
    }


def _backward(x: Tensor, weight: Tensor, grad: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The gradients of a quantized layer's weight and input."""
    x, weight = x.clone().requires_grad_(), weight.detach().requires_grad_()
    quantized_linear(x, weight, recipe=recipe).backward(grad)
    return _gradient(weight), _gradient(x)


def _errors(found: list[list[Tensor]], exact: list[list[Tensor]]) -> dict[str, float]:
    """Errors relative to the size of a batch's gradient, and the gain, over all layers."""
    rows = []
    for ours, theirs in ((torch.stack(a), torch.stack(b)) for a, b in zip(zip(*found), zip(*exact))):
        error, size = ours - theirs, float(theirs.square().sum())
        of_mean = error.mean(0).square().sum() * len(error)
        rows.append(
            (float(error.square().sum()) / size, float(of_mean) / size, float((ours * theirs).sum()) / size)
        )
    one, mean, gain = np.mean(rows, axis=0)
    return {"of_one": float(np.sqrt(one)), "of_mean": float(np.sqrt(mean)), "gain": float(gain)}


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _loss(model: nn.Module, text: Tensor) -> Tensor:
    inputs, targets = batch(text, 16, 64)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = (*ROWS, "gradients")
    parser.add_argument("--row", choices=parts, action="append", help="only this row (may be repeated)")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs of each row")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "block_verdicts.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": {}}
    )
    results["machine"] = describe()
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.row or parts:
            if name == "gradients":
                results[name] = gradients()
            else:
                results["rows"][name] = compared(ROWS[name], (arguments.keep or Path(scratch)) / name)
            results["rows"] = {row: results["rows"][row] for row in ROWS if row in results["rows"]}
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: written to {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
