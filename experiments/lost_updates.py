"""Weight updates that are lost without FP32 masters: how many, and how the training suffers.

Micikevicius et al. 2017, section 3.1: a 16-bit weight rounds away an update smaller than half a unit in the weight's
last place, which is between 2^-12 and 2^-11 of the weight in fp16 and between 2^-9 and 2^-8 in bf16. This script
observes a training in FP32 (the size of each update relative to its weight), then repeats it with 16-bit weights that
plain PyTorch updates, and with Mezzo's ways to keep what was lost: FP32 masters, masters split into weight and
remainder, and no masters but stochastic rounding.

The network is a small one on handwritten digits. With plain SGD, without momentum, only the rounding of the weight
differs: a power-of-two loss scale is divided out of the learning rate, and PyTorch's own step adds the update in FP32
before it rounds. The effect depends on learning rate times gradient relative to the weight. So the learning rate is
varied with the number of steps, so that all trainings could travel equally far.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import figures
import mezzo
from common import Finding, Numbers, main, progress
from mezzo.core import formats
from mezzo.demos.digits import load

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LOSS_SCALE = 1024  # far from fp16's limits on both sides for this network
WIDTH, BATCH = 256, 64
SAMPLES, POINTS = 20, 40  # moments at which updates are looked at; points of a curve
LOWEST = -40  # log2 of the smallest ratio that the histogram tells apart
PLAIN = ("fp32", "fp16", "bf16")  # weights of this format, updated by PyTorch's own optimizer
KEPT = {
    "fp16 with masters": f"fp16,masters=fp32,loss_scale={LOSS_SCALE}",
    "bf16 with split masters": "bf16,masters=split",
    "bf16 rounded stochastically": "bf16,masters=none",
}  # trained by mezzo.MixedPrecision with this policy
# Learning rates (the first for all ways, the others for PLAIN), and learning rate times steps.
QUICK = ((0.002, 0.008, 0.032), 6.0)
FULL = ((0.0005, 0.002, 0.008, 0.032), 8.0)
ACCURACY_IS_LATE = (
    "Most digits are recognized long before the loss is low, so accuracy hardly falls even if the loss is several "
    "times FP32's. In bf16, with 3 bits fewer, accuracy falls."
)
RATE_IS_TOO_LARGE = (
    "The learning rate is not small enough: at the full size, with a quarter of it and more steps, "
    "it falls by more."
)


class Updates:
    """The size of the updates of FP32 weights, relative to their weights.

    Equals, for each weight w and update u, with round16 to fp16 or bf16::

        lost = u != 0 and round16(round16(w) + u) == round16(w)
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(
            1 - LOWEST, dtype=torch.int64
        )  # of floor(log2 ratio): LOWEST (and less) to 0
        self.underflows = 0
        self.steps: list[int] = []
        self.lost: dict[str, list[float]] = {form: [] for form in DTYPES}
        self.within_rule = {form: True for form in DTYPES}

    def look(self, step: int, weights: Tensor, updates: Tensor) -> None:
        """Count the updates of this step; both [n]."""
        moves = updates != 0
        w, u = weights[moves], updates[moves]
        binned = (u / w).abs().double().log2().floor().clamp(LOWEST, 0).long() - LOWEST
        self.counts += torch.bincount(binned, minlength=len(self.counts))
        self.underflows += int((u.abs() < float(formats.named("fp16").smallest_subnormal)).sum())
        self.steps.append(step)
        for form in DTYPES:
            stored = formats.round(w, form).double()
            lost = formats.round(stored + u.double(), form) == stored
            self.lost[form].append(float(lost.double().mean()))
            self.within_rule[form] &= within_rule(form, stored, u.double(), lost)


def within_rule(form: str, stored: Tensor, update: Tensor, lost: Tensor) -> bool:
    """Whether in fp16 nothing above 2^-11 of the weight is lost, and all but 1 % of what is below 2^-12.

    That 1 % are weights at a power of two, below which the gap is half as wide. In the subnormal range, whose gaps no
    longer shrink with the weight, the rule says nothing.
    """
    half_ulp = math.ldexp(1.0, -formats.named(form).nmant - 1)
    normal = stored.abs() >= float(formats.named(form).smallest_normal)
    above = normal & (update.abs() > half_ulp * stored.abs())
    below = normal & (update.abs() < half_ulp / 2 * stored.abs())
    survivors = float((~lost[below]).double().mean()) if below.any() else 0.0
    return bool(not lost[above].any() and survivors < 0.01)


def train(name: str, learning_rate: float, steps: int, updates: Updates | None = None) -> dict[str, Any]:
    """Train the network from one seed; its loss curve, final loss and test accuracy.

    Args:
        name: how the weights are kept: one of `PLAIN` or `KEPT`.
        learning_rate: of plain SGD.
        steps: number of updates.
        updates: looks at updates on the way, of FP32 weights.
    """
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    images, test_images = (F.avg_pool2d(each, 2).flatten(1) for each in (images, test_images))
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    step, region = stepper(name, model, learning_rate)
    losses = torch.empty(steps)
    for i in range(steps):
        batch = torch.randint(len(labels), (BATCH,))
        with region():
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        losses[i] = loss.detach()
        if updates is not None and i % max(steps // SAMPLES, 1) == 0:
            weights = [p for p in model.parameters() if p.dim() > 1]
            gradients = torch.autograd.grad(loss, weights, retain_graph=True)
            flat = [
                torch.cat([each.detach().flatten() for each in tensors]) for tensors in (weights, gradients)
            ]
            updates.look(i, flat[0], flat[1] * -learning_rate)
        step(loss)
    model.float()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).double().mean()
    return {
        "learning_rate": learning_rate,
        "steps": steps,
        "curve": [float(window.mean()) for window in losses.double().tensor_split(min(POINTS, steps))],
        "loss": float(losses[-max(steps // 10, 1) :].double().mean()),
        "accuracy": float(right),
    }


def stepper(
    name: str, model: nn.Module, learning_rate: float
) -> tuple[Callable[[Tensor], object], Callable[[], Any]]:
    """What follows the loss, and the context of the forward pass."""
    if name in DTYPES:
        model.to(DTYPES[name])
        scale = LOSS_SCALE if name == "fp16" else 1
        sgd = torch.optim.SGD(model.parameters(), lr=learning_rate / scale)

        def plain_step(loss: Tensor) -> None:
            sgd.zero_grad()
            (loss.float() * scale).backward()  # type: ignore[no-untyped-call,unused-ignore]
            sgd.step()

        return plain_step, lambda: mezzo.autocast(name, "cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=learning_rate)
    mp = mezzo.MixedPrecision(model, sgd, precision=KEPT.get(name, "fp32"))

    def step(loss: Tensor) -> None:
        sgd.zero_grad()
        mp.step(loss)

    return step, mp.autocast


def run(full: bool) -> tuple[list[Finding], Numbers]:
    """Observe the updates in FP32, train with each way to keep the weights, and at larger learning rates."""
    rates, travel = FULL if full else QUICK
    updates = Updates()
    arms: dict[str, Any] = {}
    sweep: dict[str, list[Any]] = {name: [] for name in PLAIN}
    for rate in rates:
        for name in (*PLAIN, *KEPT) if rate == rates[0] else PLAIN:
            progress(f"training, {name}, learning rate {rate:g}")
            observed = updates if (name, rate) == ("fp32", rates[0]) else None
            result = train(name, rate, round(travel / rate), observed)
            if rate == rates[0]:
                arms[name] = result
            if name in PLAIN:
                sweep[name].append(
                    {key: result[key] for key in ("learning_rate", "steps", "loss", "accuracy")}
                )
    seen = {**vars(updates), "counts": updates.counts.tolist()}
    numbers = {"updates": seen, "arms": arms, "sweep": sweep}
    return findings(numbers, full), numbers


def share_below(updates: dict[str, Any], power: int) -> float:
    """The share of updates (but for those that are zero) smaller than 2**power of their weight."""
    counts: list[int] = updates["counts"]
    return sum(counts[: power - LOWEST]) / max(sum(counts), 1)


def findings(numbers: Numbers, full: bool) -> list[Finding]:
    """Compare the updates with the rule of 2048, and the trainings with FP32's."""
    updates, arms, sweep = numbers["updates"], numbers["arms"], numbers["sweep"]
    lost = {form: sum(shares) / len(shares) for form, shares in updates["lost"].items()}
    last = {form: shares[-1] for form, shares in updates["lost"].items()}
    small = share_below(updates, -11)
    moved = sum(updates["counts"])
    underflows = updates["underflows"] / moved
    loss = {name: arm["loss"] for name, arm in arms.items()}
    accuracy = {name: arm["accuracy"] for name, arm in arms.items()}
    worst = max(KEPT, key=lambda name: abs(loss[name] - loss["fp32"]))
    gap = abs(loss[worst] / loss["fp32"] - 1)
    learned = {form: arms[form]["curve"][0] - loss[form] for form in PLAIN}
    first, fast = (
        {form: sweep[form][place]["loss"] / sweep["fp32"][place]["loss"] for form in DTYPES}
        for place in (0, -1)
    )
    rate, fast_rate = (sweep["fp32"][place]["learning_rate"] for place in (0, -1))
    relative = {form: 1 - accuracy[form] / accuracy["fp32"] for form in DTYPES}
    return [
        Finding(
            "updates-are-small",
            "Many updates are smaller than 2^-11 of their weight.",
            f"{small:.0%} of {moved:,} updates are, in FP32 at a learning rate of {rate:g}.",
            small > 0.5,
        ),
        Finding(
            "updates-are-lost",
            "A 16-bit weight rounds these updates away: more of them in bf16, and more as the gradients shrink.",
            f"fp16 loses {lost['fp16']:.0%} of updates ({last['fp16']:.0%} at the end), "
            f"bf16 {lost['bf16']:.0%} ({last['bf16']:.0%}).",
            0.5 < lost["fp16"] < lost["bf16"]
            and all(last[form] > updates["lost"][form][0] for form in DTYPES),
        ),
        Finding(
            "rule-of-2048",
            "Updates smaller than half a unit in the weight's last place are lost: none above 2^-11 of the weight in "
            "fp16 (2^-8 in bf16), all below half of that.",
            f"fp16 loses {lost['fp16']:.1%}, between the {share_below(updates, -12):.1%} under 2^-12 and the "
            f"{small:.1%} under 2^-11; bf16 {lost['bf16']:.1%}, between {share_below(updates, -9):.1%} and "
            f"{share_below(updates, -8):.1%}.",
            all(updates["within_rule"].values())
            and share_below(updates, -12) <= lost["fp16"] <= small
            and share_below(updates, -9) <= lost["bf16"] <= share_below(updates, -8),
        ),
        Finding(
            "updates-underflow",
            "Some updates are lost for any weight, because they are smaller than fp16's smallest number, 2^-24: about "
            "5 % of the gradients of the paper's speech model.",
            f"{underflows:.1%} of updates are.",
            underflows > 0.005,
        ),
        Finding(
            "fp16-weights-fall-behind",
            "Without masters, training with fp16 weights ends with a higher loss than FP32.",
            f"The training loss ends at {loss['fp16']:.3f} where FP32 reaches {loss['fp32']:.3f} "
            f"({first['fp16']:.2f} times).",
            first["fp16"] > 1.2,
        ),
        Finding(
            "bf16-weights-stagnate",
            "bf16 weights, with 3 bits fewer, stop changing almost at once.",
            f"The training loss falls by {learned['bf16']:.2f} (FP32: {learned['fp32']:.2f}), to "
            f"{loss['bf16']:.3f} ({first['bf16']:.2f} times FP32's).",
            learned["bf16"] < 0.5 * learned["fp32"],
        ),
        Finding(
            "masters-keep-them",
            "FP32 masters restore the loss of FP32; so do masters split into weight and remainder, and stochastic "
            "rounding without masters.",
            f"None of {', '.join(KEPT)} ends further from FP32 than {gap:.2%} ({worst}: {loss[worst]:.4f}).",
            gap < 0.03,
        ),
        Finding(
            "it-is-the-ratio",
            "With a larger learning rate over fewer steps the same 16-bit weights lose less.",
            f"At {fast_rate:g} fp16 ends at {fast['fp16']:.3f} times FP32's loss ({first['fp16']:.2f} times at "
            f"{rate:g}), bf16 at {fast['bf16']:.2f} times ({first['bf16']:.2f}).",
            fast["fp16"] < 1.05 and all(fast[form] - 1 < 0.5 * (first[form] - 1) for form in DTYPES),
        ),
        Finding(
            "fp16-accuracy-falls-by-80-per-cent",
            "Without masters, the paper's speech model lost 80 % of its accuracy.",
            f"This one loses {relative['fp16']:.0%} in fp16: test accuracy is {accuracy['fp32']:.1%} in FP32 and "
            f"{accuracy['fp16']:.1%} with fp16 weights.",
            relative["fp16"] >= 0.8,
            known=ACCURACY_IS_LATE,
        ),
        Finding(
            "bf16-accuracy-falls-by-80-per-cent",
            "The same in bf16, the 16-bit format with fewer digits.",
            f"Test accuracy goes from {accuracy['fp32']:.1%} in FP32 to {accuracy['bf16']:.1%} with bf16 weights: "
            f"{relative['bf16']:.0%} of it is lost.",
            relative["bf16"] >= 0.8,
            known="" if full else RATE_IS_TOO_LARGE,
        ),
    ]


def draw(numbers: Numbers, figure: Figure) -> None:
    """Four panels: how small updates are, how many are lost, the training curves, the learning rates."""
    axes = figure.subplots(2, 2)
    updates, arms, sweep = numbers["updates"], numbers["arms"], numbers["sweep"]
    colours = {"fp32": figures.FP32, "fp16": figures.FP16, "bf16": figures.BF16}

    total = sum(updates["counts"])
    percent = [100 * count / total for count in updates["counts"]]
    axes[0, 0].bar(range(LOWEST, 1), percent, width=0.9, align="edge", color=figures.FP32)
    for form, power in (("fp16", -11), ("bf16", -8)):
        axes[0, 0].axvline(
            power, color=colours[form], linewidth=1.5, label=f"{form} loses what is under 2^{power}"
        )
    axes[0, 0].set(
        title="Update relative to its weight (FP32)", xlabel="log₂ |update / weight|", ylabel="updates, %"
    )
    axes[0, 0].set(xlim=(-26, 0), ylim=(0, max(percent) * 1.35))

    for form, shares in updates["lost"].items():
        lost = [100 * share for share in shares]
        axes[0, 1].plot(updates["steps"], lost, "o-", color=colours[form], markersize=3, label=form)
    axes[0, 1].set(title="Updates that rounding the weight loses", xlabel="step", ylabel="updates, %")
    axes[0, 1].set_ylim(0, 103)

    kept = zip(KEPT, ("--", ":", "-."), (figures.FP16_SAFE, figures.BF16_SAFE, figures.INK))
    for name, line, colour in (*((name, "-", colours[name]) for name in PLAIN), *kept):
        curve = arms[name]["curve"]
        at = [arms[name]["steps"] * (i + 0.5) / len(curve) for i in range(len(curve))]
        axes[1, 0].plot(at, curve, line, color=colour, label=f"{name} weights" if name in DTYPES else name)
    axes[1, 0].set(title="Training loss", xlabel="step", ylabel="cross entropy, nats", ylim=(0, None))

    for name, rows in sweep.items():
        rates, losses = [row["learning_rate"] for row in rows], [row["loss"] for row in rows]
        axes[1, 1].plot(rates, losses, "o-", color=colours[name], markersize=4, label=name)
    axes[1, 1].set(title="Final loss: smaller rate, more steps", ylabel="cross entropy, nats", ylim=(0, None))
    axes[1, 1].set(xscale="log", xlabel="learning rate (rate × steps is the same)")
    axes[1, 1].set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes[1, 1].minorticks_off()
    axes[1, 1].invert_xaxis()
    for one in axes.flat:
        one.legend()


if __name__ == "__main__":
    TITLE = "Weight updates that are lost without FP32 masters"
    sys.exit(main("lost-updates", TITLE, "Micikevicius et al. 2017, section 3.1 and figure 2", run, draw))
