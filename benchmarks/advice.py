"""Measure common advice about mixed precision: what happens to the numbers when it is followed.

    python benchmarks/advice.py            # about a minute; writes benchmarks/results/advice.json

Nothing is timed: each row compares numbers with FP64 or with FP32 training, so results hardly depend on the machine.
Rows that train use five seeds and give the median, the smallest and the largest value.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mezzo
from mezzo.pytorch.hardware import describe

RESULTS = Path(__file__).parent / "results" / "advice.json"
SEEDS = range(5)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def relative(found: Tensor, truth: Tensor) -> float:
    """The 2-norm of the difference over that of the truth."""
    exact = truth.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


def clipping() -> dict[str, Any]:
    """Clip scaled gradients, as some texts have it, or unscaled ones: what the parameters then move by, and learn."""
    images, labels = digits()
    scale, most = 2.0**16, 1.0
    moved: dict[str, list[float]] = {"before": [], "after": []}
    losses: dict[str, list[float]] = {"before": [], "after": []}
    for seed in SEEDS:
        for when in ("before", "after"):
            torch.manual_seed(seed)
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            start = [p.detach().clone() for p in model.parameters()]
            for step in range(300):
                batch = torch.randint(0, 1500, (64,))
                (F.cross_entropy(model(images[batch]), labels[batch]) * scale).backward()
                if when == "before":
                    nn.utils.clip_grad_norm_(model.parameters(), most)
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad /= scale
                if when == "after":
                    nn.utils.clip_grad_norm_(model.parameters(), most)
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    change = [p.detach() - old for p, old in zip(model.parameters(), start)]
                    moved[when].append(float(torch.cat([c.flatten() for c in change]).norm()))
            with torch.no_grad():
                losses[when].append(F.cross_entropy(model(images[1500:]), labels[1500:]).item())
    return {
        "scale": scale,
        "max_norm": most,
        "first_update_norm": {when: spread(values) for when, values in moved.items()},
        "test_loss": {when: spread(values) for when, values in losses.items()},
    }


def loss_in_16_bits() -> dict[str, Any]:
    """A cross entropy of 16-bit logits, computed in their format or in FP32: error of the loss and of its gradient."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        logits = (4 * torch.randn(1024, 1000)).to(dtype)
        target = torch.randint(0, 1000, (1024,))
        truth_in = logits.double().requires_grad_()
        truth = F.cross_entropy(truth_in, target)
        truth.backward()
        low, own = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        lost = F.nll_loss(torch.log_softmax(low, 1), target)
        lost.backward()
        with mezzo.autocast(name, "cpu"):
            kept = F.cross_entropy(own, target)
        kept.backward()
        grads = (truth_in.grad, low.grad, own.grad)
        assert all(grad is not None for grad in grads)
        found[name] = {
            "loss": {"in_16_bits": relative(lost, truth), "in_fp32": relative(kept, truth)},
            "gradient": {
                "in_16_bits": relative(low.grad, truth_in.grad),  # type: ignore[arg-type]
                "in_fp32": relative(own.grad, truth_in.grad),  # type: ignore[arg-type]
            },
        }
    return found


def weights_in_16_bits() -> dict[str, Any]:
    """`model.bfloat16()` against weights whose FP32 value is kept: the loss at the end of a run with small updates."""
    images, labels = digits()

    def end(seed: int, way: str) -> float:
        torch.manual_seed(seed)
        model = network()
        if way == "bf16 alone":
            model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        mp = (
            None
            if way in ("FP32", "bf16 alone")
            else mezzo.MixedPrecision(model, optimizer, "bf16", masters="split")
        )
        for _ in range(1500):
            batch = torch.randint(0, 1500, (64,))
            if mp is None:
                loss = F.cross_entropy(
                    model(images[batch].to(next(model.parameters()).dtype)).float(), labels[batch]
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with mp.autocast():
                    loss = F.cross_entropy(model(images[batch]), labels[batch])
                mp.step(loss)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=way != "FP32"):
            inputs = images[:1500].to(next(model.parameters()).dtype)
            result = F.cross_entropy(model(inputs).float(), labels[:1500]).item()
        if mp is not None:
            mp.close()
        return result

    return {
        way: spread([end(seed, way) for seed in SEEDS]) for way in ("FP32", "bf16 alone", "bf16 with masters")
    }


def norms_in_fp32() -> dict[str, Any]:
    """A layer norm under a bf16 region: PyTorch's list casts to FP32 and back, Mezzo's kernel reads and writes bf16."""
    torch.manual_seed(0)
    rows, width = 4096, 512
    x = torch.randn(rows, width).bfloat16()
    gradient = torch.randn(rows, width).bfloat16()

    def run(forward: Callable[[Tensor, nn.LayerNorm], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        layer = nn.LayerNorm(width).to(torch.float64 if dtype is torch.float64 else torch.float32)
        out = forward(x.to(dtype) if dtype is torch.float64 else x, layer)
        out.backward(gradient.to(out.dtype))
        assert layer.weight.grad is not None
        return out.detach(), layer.weight.grad

    def native(inputs: Tensor, layer: nn.LayerNorm) -> Tensor:
        # PyTorch's 16-bit kernel, as on its CPU list.
        return F.layer_norm(inputs, (width,), layer.weight.bfloat16(), layer.bias.bfloat16())

    def in_fp32(inputs: Tensor, layer: nn.LayerNorm) -> Tensor:
        out: Tensor = layer(inputs.float())
        return out

    def ours(inputs: Tensor, layer: nn.LayerNorm) -> Tensor:
        with mezzo.autocast("bf16", "cpu"):
            out: Tensor = layer(inputs)
        return out

    truth, truth_grad = run(lambda inputs, layer: layer(inputs), torch.float64)
    found = {}
    for name, way in (("PyTorch's bf16 kernel", native), ("in FP32", in_fp32), ("Mezzo's kernel", ours)):
        out, grad = run(way, torch.bfloat16)
        found[name] = {
            "output": relative(out, truth),
            "weight_gradient": relative(grad, truth_grad),
            "output_bytes": out.element_size(),
        }
    return found


def sums_in_16_bits() -> dict[str, Any]:
    """Gradients of 64 micro-batches gathered in a bf16 `.grad`, or in FP32: the sum's error."""
    images, labels = digits()
    torch.manual_seed(0)
    model = network().double()
    truth = [torch.zeros_like(p) for p in model.parameters()]
    low = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
    wide = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for _ in range(64):
        batch = torch.randint(0, 1500, (16,))
        grads = torch.autograd.grad(
            F.cross_entropy(model(images[batch].double()), labels[batch]), list(model.parameters())
        )
        for i, grad in enumerate(grads):
            each = grad.bfloat16()
            truth[i] += each.double()
            low[i] += each
            wide[i] += each.float()

    def whole(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten().double() for part in parts])

    return {"bf16": relative(whole(low), whole(truth)), "fp32": relative(whole(wide), whole(truth))}


def sigmoid_before_the_loss() -> dict[str, Any]:
    """Probabilities of confident logits from a 16-bit sigmoid: where they are exactly 1, and what BCE makes of it."""
    logits = torch.linspace(-20, 20, 2001)
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        low = logits.to(dtype).sigmoid()
        wrong = F.binary_cross_entropy(low.float(), torch.zeros_like(logits), reduction="none")
        right = F.binary_cross_entropy_with_logits(
            logits.to(dtype).float(), torch.zeros_like(logits), reduction="none"
        )
        found[name] = {
            "exactly_1_from_logit": float(logits[(low == 1)].min()),
            "largest_loss": float(wrong.max()),
            "loss_should_be": float(right.max()),
        }
    return found


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "clipping": clipping,
    "loss_in_16_bits": loss_in_16_bits,
    "weights_in_16_bits": weights_in_16_bits,
    "norms_in_fp32": norms_in_fp32,
    "sums_in_16_bits": sums_in_16_bits,
    "sigmoid_before_the_loss": sigmoid_before_the_loss,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=ROWS, action="append", help="run only these rows and write no file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    found = {}
    for name in arguments.only or ROWS:
        found[name] = ROWS[name]()
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if not arguments.only:
        arguments.out.write_text(
            json.dumps({"machine": describe(), "rows": found}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
