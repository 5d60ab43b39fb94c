"""Weight updates that are lost where there are no FP32 masters: how many, and what becomes of the training.

Micikevicius et al. 2017, section 3.1: a 16-bit weight rounds an update away that is smaller than half a unit in the
weight's last place, which is between 2^-12 and 2^-11 of the weight in fp16 and between 2^-9 and 2^-8 in bf16. Here a
real training in FP32 is watched (the size of each update beside its weight), and then repeated with 16-bit weights
that plain PyTorch updates, and with Mezzo's ways to keep what was lost: FP32 masters, masters split into weight and
remainder, and no masters but stochastic rounding.

The network is a small one on handwritten digits. Plain SGD, without momentum, leaves nothing but the rounding of
the weight to differ: a power-of-two loss scale is divided out of the learning rate, and PyTorch's own step
adds the update in FP32 before it rounds. The effect depends on learning rate times gradient beside the weight. So
the learning rate is varied, with the number of steps, so that all trainings could travel as far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.core import formats
from mezzo.pytorch.region.autocast import autocast
from mezzo.pytorch.training.mixed_precision import MixedPrecision
from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome
from mezzo.reproduce.lost_updates_figure import draw

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LOSS_SCALE = 1024  # far from fp16's limits on both sides for this network
WIDTH, BATCH = 256, 64
SAMPLES, POINTS = 20, 40  # moments at which updates are looked at; points of a curve
LOWEST = -40  # log2 of the smallest ratio that the histogram tells apart


@dataclass(frozen=True)
class Arm:
    """One way to keep the weights.

    Args:
        name: as in the numbers.
        precision: the policy of its forward and backward passes, and of `MixedPrecision`.
        naive: 16-bit weights, updated by PyTorch's own optimizer.
    """

    name: str
    precision: str
    naive: bool = False


ARMS = (
    Arm("fp32", "fp32"),
    Arm("fp16", "fp16", naive=True),
    Arm("bf16", "bf16", naive=True),
    Arm("fp16 with masters", f"fp16,masters=fp32,loss_scale={LOSS_SCALE}"),
    Arm("bf16 with split masters", "bf16,masters=split"),
    Arm("bf16 rounded stochastically", "bf16,masters=none"),
)
SWEPT = ARMS[:3]


@dataclass(frozen=True)
class Size:
    """How far the trainings go: ``steps = travel / learning rate``.

    Args:
        learning_rates: the first is that of all arms, the others of `SWEPT`.
        travel: learning rate times steps.
    """

    learning_rates: tuple[float, ...]
    travel: float

    def steps(self, learning_rate: float) -> int:
        """Updates of one training."""
        return round(self.travel / learning_rate)


QUICK = Size((0.002, 0.008, 0.032), 6.0)
FULL = Size((0.0005, 0.002, 0.008, 0.032), 8.0)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The digits demo's images as 64 features, and labels: training ones, then test ones."""
    from mezzo.demos.digits import load

    images, labels, test_images, test_labels = load()
    return F.avg_pool2d(images, 2).flatten(1), labels, F.avg_pool2d(test_images, 2).flatten(1), test_labels


def network() -> nn.Module:
    """[N, 64] -> [N, 10] logits."""
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Layers as small as these gain nothing from a second thread, and lose much where it has to be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Updates:
    """What the updates of a model with FP32 weights are, beside their weights.

    Equals, for each weight w and update u, with round16 to fp16 or bf16::

        lost = u != 0 and round16(round16(w) + u) == round16(w)

    Args:
        model: in FP32; its gradients are there when `look` is called.
        learning_rate: of plain SGD.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._model, self._rate = model, learning_rate
        self.counts = torch.zeros(
            1 - LOWEST, dtype=torch.int64
        )  # of floor(log2 ratio): LOWEST (and less) to 0
        self.zero = self.total = self.underflows = 0
        self.steps: list[int] = []
        self.lost: dict[str, list[float]] = {form: [] for form in DTYPES}
        self.within_rule = {form: True for form in DTYPES}

    def look(self, step: int) -> None:
        """Count the updates of this step."""
        weights = [p for p in self._model.parameters() if p.dim() > 1 and p.grad is not None]
        w = torch.cat([p.detach().flatten() for p in weights])
        u = torch.cat([p.grad.flatten() for p in weights if p.grad is not None]) * -self._rate
        moves = u != 0
        self.total += u.numel()
        self.zero += int((~moves).sum())
        w, u = w[moves], u[moves]
        ratio = (u / w).abs().double()
        binned = ratio.log2().floor().clamp(LOWEST, 0).long() - LOWEST
        self.counts += torch.bincount(binned, minlength=len(self.counts))
        self.underflows += int((u.abs() < float(formats.named("fp16").smallest_subnormal)).sum())
        self.steps.append(step)
        for form in DTYPES:
            stored = formats.round(w, form).double()
            is_lost = formats.round(stored + u.double(), form) == stored
            self.lost[form].append(float(is_lost.double().mean()))
            self._check_rule(form, stored=stored, update=u.double(), is_lost=is_lost)

    def _check_rule(self, form: str, *, stored: Tensor, update: Tensor, is_lost: Tensor) -> None:
        """Above 2^-11 of the weight nothing is lost (fp16), and below 2^-12 everything is, but for 1 % of it.

        Those 1 % are weights at a power of two, below which the gap is half as wide. In fp16's subnormal range, whose
        gaps no longer shrink with the weight, the rule says nothing.
        """
        half_ulp = math.ldexp(1.0, -formats.named(form).nmant - 1)
        normal = stored.abs() >= float(formats.named(form).smallest_normal)
        above = normal & (update.abs() > half_ulp * stored.abs())
        below = normal & (update.abs() < half_ulp / 2 * stored.abs())
        survivors = float((~is_lost[below]).double().mean()) if below.any() else 0.0
        self.within_rule[form] &= not is_lost[above].any() and survivors < 0.01

    def numbers(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return {
            "lowest": LOWEST, "counts": self.counts.tolist(), "zero": self.zero, "total": self.total,
            "underflows": self.underflows, "steps": self.steps, "lost": self.lost, "within_rule": self.within_rule,
        }  # fmt: skip


def train(
    arm: Arm,
    learning_rate: float,
    steps: int,
    *,
    watch: bool = False,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Train the network from one seed; its loss curve, final loss and test accuracy.

    Args:
        arm: how the weights are kept.
        learning_rate: of plain SGD.
        steps: updates.
        watch: look at updates on the way; for FP32 weights.
        tell: called now and then with the number of steps done.
    """
    torch.manual_seed(0)
    images, labels, test_images, test_labels = data()
    model = network()
    step, region = _stepper(arm, model, learning_rate)
    updates = Updates(model, learning_rate) if watch else None
    losses = torch.empty(steps)
    for i in range(steps):
        batch = torch.randint(len(labels), (BATCH,))
        with region():
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        losses[i] = loss.detach()
        if updates is not None and i % max(steps // SAMPLES, 1) == 0:
            _gradients(model, loss)
            updates.look(i)
        step(loss)
        if i % 100 == 0:
            tell(i)
    model.float()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).double().mean()
    windows = losses.double().tensor_split(min(POINTS, steps))
    found: dict[str, Any] = {
        "learning_rate": learning_rate,
        "steps": steps,
        "curve": [float(window.mean()) for window in windows],
        "loss": float(losses[-max(steps // 10, 1) :].double().mean()),
        "accuracy": float(right),
    }
    return found if updates is None else {**found, "updates": updates.numbers()}


def _gradients(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True)):
        parameter.grad = gradient


def _stepper(
    arm: Arm, model: nn.Module, learning_rate: float
) -> tuple[Callable[[Tensor], object], Callable[[], Any]]:
    """What follows the loss, and the region of the forward pass."""
    if not arm.naive:
        sgd = torch.optim.SGD(model.parameters(), lr=learning_rate)
        mp = MixedPrecision(model, sgd, precision=arm.precision)

        def mezzo_step(loss: Tensor) -> None:
            sgd.zero_grad()
            mp.step(loss)

        return mezzo_step, mp.autocast
    model.to(DTYPES[arm.precision])
    scale = LOSS_SCALE if arm.precision == "fp16" else 1
    sgd = torch.optim.SGD(model.parameters(), lr=learning_rate / scale)

    def naive_step(loss: Tensor) -> None:
        sgd.zero_grad()
        (loss.float() * scale).backward()  # type: ignore[no-untyped-call,unused-ignore]
        sgd.step()

    return naive_step, lambda: autocast(arm.precision, "cpu")


def run(effort: Effort) -> Outcome:
    """Watch the updates in FP32, train with each way to keep the weights, and at larger learning rates."""
    size = QUICK if effort.quick else FULL
    jobs = [(arm, size.learning_rates[0]) for arm in ARMS]
    jobs += [(arm, rate) for rate in size.learning_rates[1:] for arm in SWEPT]
    total, done = sum(size.steps(rate) for _, rate in jobs), 0
    arms: dict[str, Any] = {}
    sweep: dict[str, list[Any]] = {arm.name: [] for arm in SWEPT}
    with _one_thread():
        for arm, rate in jobs:
            words = f"training, {arm.name}, learning rate {rate:g}"

            def tell(now: int, words: str = words, before: int = done) -> None:
                effort.report(words, (before + now) / total)

            result = train(
                arm,
                rate,
                size.steps(rate),
                watch=rate == size.learning_rates[0] and arm.name == "fp32",
                tell=tell,
            )
            done += size.steps(rate)
            if rate == size.learning_rates[0]:
                arms[arm.name] = result
            if arm in SWEPT:
                sweep[arm.name].append(
                    {key: result[key] for key in ("learning_rate", "steps", "loss", "accuracy")}
                )
    updates = arms["fp32"].pop("updates")
    numbers = {"updates": updates, "arms": arms, "sweep": sweep, "travel": size.travel}
    return Outcome(_findings(numbers), numbers)


def share_below(updates: dict[str, Any], power: int) -> float:
    """The share of updates (but for those that are zero) smaller than 2**power of their weight."""
    counts: list[int] = updates["counts"]
    return sum(counts[: power - updates["lowest"]]) / max(sum(counts), 1)


def _findings(numbers: dict[str, Any]) -> tuple[Finding, ...]:
    updates, arms, sweep = numbers["updates"], numbers["arms"], numbers["sweep"]
    lost = {form: sum(shares) / len(shares) for form, shares in updates["lost"].items()}
    last = {form: shares[-1] for form, shares in updates["lost"].items()}
    small = share_below(updates, -11)
    moved = sum(updates["counts"])
    underflows = updates["underflows"] / moved
    loss = {name: arm["loss"] for name, arm in arms.items()}
    accuracy = {name: arm["accuracy"] for name, arm in arms.items()}
    kept = [name for name in arms if name not in ("fp32", *DTYPES)]
    worst = max(kept, key=lambda name: abs(loss[name] - loss["fp32"]))
    gap = abs(loss[worst] / loss["fp32"] - 1)
    learned = {form: (arms[form]["curve"][0] - loss[form]) for form in ("fp32", *DTYPES)}
    first, fast = (
        {form: sweep[form][place]["loss"] / sweep["fp32"][place]["loss"] for form in DTYPES}
        for place in (0, -1)
    )
    rate, fast_rate = (sweep["fp32"][place]["learning_rate"] for place in (0, -1))
    relative = {form: 1 - accuracy[form] / accuracy["fp32"] for form in DTYPES}
    return (
        Finding(
            "updates-are-small",
            "Many updates are smaller than 2^-11 of their weight.",
            f"{small:.0%} of {moved:,} updates are, in FP32 at a learning rate of {rate:g}.",
            small > 0.5,
        ),
        Finding(
            "updates-are-lost",
            "A 16-bit weight rounds them away, more of them in bf16 and more of them as the gradients shrink.",
            f"fp16 loses {lost['fp16']:.0%} of updates ({last['fp16']:.0%} at the end), "
            f"bf16 {lost['bf16']:.0%} ({last['bf16']:.0%}).",
            0.5 < lost["fp16"] < lost["bf16"]
            and all(last[form] > updates["lost"][form][0] for form in DTYPES),
        ),
        Finding(
            "rule-of-2048",
            "What is lost is what is smaller than half a unit in the weight's last place: nothing above 2^-11 of the "
            "weight in fp16 (2^-8 in bf16), everything below half of that.",
            f"fp16 loses {lost['fp16']:.1%}, between the {share_below(updates, -12):.1%} under 2^-12 and the "
            f"{small:.1%} under 2^-11; bf16 {lost['bf16']:.1%}, between {share_below(updates, -9):.1%} and "
            f"{share_below(updates, -8):.1%}.",
            all(updates["within_rule"].values())
            and share_below(updates, -12) <= lost["fp16"] <= small
            and share_below(updates, -9) <= lost["bf16"] <= share_below(updates, -8),
        ),
        Finding(
            "updates-underflow",
            "Some are lost in whatever weight, being smaller than fp16's smallest number, 2^-24: about 5 % of the "
            "gradients of the speech model.",
            f"{underflows:.1%} of updates are.",
            underflows > 0.005,
        ),
        Finding(
            "fp16-weights-fall-behind",
            "Without masters fp16 training falls behind FP32.",
            f"The training loss ends at {loss['fp16']:.3f} where FP32 reaches {loss['fp32']:.3f} "
            f"({first['fp16']:.2f} times).",
            first["fp16"] > 1.2,
        ),
        Finding(
            "bf16-weights-stagnate",
            "bf16 weights, with 3 bits fewer, stand still all but at once.",
            f"The training loss goes down by {learned['bf16']:.2f}, by {learned['fp32']:.2f} in FP32, to "
            f"{loss['bf16']:.3f} ({first['bf16']:.2f} times FP32's).",
            learned["bf16"] < 0.5 * learned["fp32"],
        ),
        Finding(
            "masters-keep-them",
            "FP32 masters bring it back to FP32; so do masters split into weight and remainder, and stochastic "
            "rounding without masters.",
            f"None of {', '.join(kept)} ends further from FP32 than {gap:.2%} ({worst}: {loss[worst]:.4f}).",
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
            "Without masters the speech model lost 80 % of its accuracy, relatively.",
            f"This one loses {relative['fp16']:.0%} in fp16: test accuracy is {accuracy['fp32']:.1%} in FP32 and "
            f"{accuracy['fp16']:.1%} with fp16 weights.",
            relative["fp16"] >= 0.8,
        ),
        Finding(
            "bf16-accuracy-falls-by-80-per-cent",
            "The same, in the 16-bit format with fewer digits.",
            f"Test accuracy goes from {accuracy['fp32']:.1%} in FP32 to {accuracy['bf16']:.1%} with bf16 weights: "
            f"{relative['bf16']:.0%} of it is lost.",
            relative["bf16"] >= 0.8,
        ),
    )


EXPERIMENT = Experiment(
    name="lost-updates",
    title="Weight updates that are lost without FP32 masters",
    source="Micikevicius et al. 2017, section 3.1 and figure 2",
    run=run,
    draw=draw,
)
