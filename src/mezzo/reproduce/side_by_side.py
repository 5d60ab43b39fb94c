"""side-by-side: is a network as good in mixed precision as in FP32? A convolutional one and a transformer, by seed.

The original work trained its networks twice, once in FP32 and once in mixed precision, and put the two results side by
side: every pair agrees (section 4.1, table 1). One run of each can't tell a loss of quality from luck, so here every
precision has the same five seeds or more, and the word is given by `mezzo compare`, whose library is called as it
stands: paired runs of an unchanged script, each in a process of its own, judged by a paired test of equivalence
(``docs/verdict.md``).

Declared before the runs:

- a finding NETWORK-FORMAT-as-good holds if the verdict is **equivalent**: the 90 % interval of the mean difference
  lies within the margin, for the training loss and for the metric. Consistent (no harm seen, nothing proven),
  inconclusive and divergent do not hold.
- margins of ``--quick``: 1 % of FP32's final training loss; 0.5 points of test accuracy (four of the 800 test images;
  the pairs of the original work differ by -0.01 to +0.28 points); 1 % of the validation loss. In full they are those
  of `mezzo compare`: 0.5 %, 0.2 points, 0.5 %, with more seeds where proof takes more.
- in full, a control: fp16 under a constant loss scale of 2^-24, where gradients round to zero. The finding
  cnn-control-divergent holds if the same judge calls it **divergent**. Without it, `equivalent` could be all that the
  judge ever says.

The two comparisons run at the same time, on one thread each, so that nothing is said of speed here.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.demos import find
from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome
from mezzo.verify.compare import compare, schedule
from mezzo.verify.progress import Silent
from mezzo.verify.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = (sys.executable, "-m", "mezzo.reproduce.scripts.one_thread")
CONTROL = "fp16,loss_scale=5.96e-8"
POLL_SECONDS = 0.25

PAPER = {
    "AlexNet": (56.77, 56.93),
    "VGG-D": (65.40, 65.43),
    "GoogLeNet": (68.33, 68.43),
    "Inception v2": (70.03, 70.02),
    "Inception v3": (73.85, 74.13),
    "ResNet-50": (75.92, 76.04),
}
"""Top-1 accuracy in per cent, FP32 and mixed: Micikevicius et al. 2017, table 1."""


@dataclass(frozen=True)
class Side:
    """One comparison, declared.

    Args:
        name: of the network, as findings begin.
        title: of the network, for a reader.
        demo: the demo's name.
        argv: the demo's own arguments.
        precisions: the candidates.
        seeds: pairs.
        margin: of the training loss, as a share of FP32's.
        metric_label: what the metric is, with its unit.
        metric_margin: in the metric's units; None for the same share as the loss's.
    """

    name: str
    title: str
    demo: str
    argv: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: int
    margin: float
    metric_label: str
    metric_margin: float | None = None

    def request(self) -> Request:
        """The comparison as `mezzo compare --demo` would be asked for it."""
        demo = find(self.demo)
        return Request(
            str(demo.path),
            self.argv,
            precisions=self.precisions,
            seeds=self.seeds,
            margin=self.margin,
            metric=demo.metric,
            metric_margin=self.metric_margin,
            demo=self.demo,
        )


_CNN, _GPT = "a convolutional network on handwritten digits", "a transformer on Python's source text"
_ACCURACY, _LOSS = "test accuracy, %", "validation loss, nats a character"
_SMALL_GPT = ("--width", "64", "--layers", "2", "--context", "64", "--characters", "200000", "--lr", "3e-3")

QUICK = (
    Side(
        "cnn", _CNN, "digits", ("--epochs", "7", "--width", "16"), ("bf16", "fp16"), 5, 0.01, _ACCURACY, 0.5
    ),
    Side("transformer", _GPT, "text-gpt", ("--steps", "100", *_SMALL_GPT), ("bf16", "fp16"), 5, 0.01, _LOSS),
)
FULL = (
    Side(
        "cnn",
        _CNN,
        "digits",
        ("--epochs", "8", "--width", "24"),
        ("bf16", "fp16", CONTROL),
        10,
        0.005,
        _ACCURACY,
        0.2,
    ),
    Side(
        "transformer",
        _GPT,
        "text-gpt",
        ("--steps", "240", "--width", "96", "--layers", "3", "--context", "64", "--lr", "3e-3"),
        ("bf16", "fp16"),
        5,
        0.005,
        _LOSS,
    ),
)


class Stopped(KeyboardInterrupt):
    """Raised within a comparison that is to end now: it deletes the run under way and ends the child."""


class Counter(Silent):
    """Counts the runs of one comparison that are over, and parts of the one that goes on; stops it when told to."""

    def __init__(self, stop: threading.Event) -> None:
        self.done = 0.0
        self.name = ""
        self._stop = stop
        self._expected = 0
        self._before = 0

    def begin(self, name: str, index: int, runs: int, steps: int | None) -> None:
        """See `mezzo.verify.progress.Watcher`."""
        self.name, self._before, self._expected = name, index - 1, steps or 0
        self.done = float(self._before)
        self.steps(0)

    def steps(self, done: int) -> None:
        """See `mezzo.verify.progress.Watcher`; this is where a comparison can be stopped from another thread."""
        if self._stop.is_set():
            raise Stopped
        if self._expected:
            self.done = self._before + min(done / self._expected, 1.0)


def compare_all(
    sides: Sequence[Side], effort: Effort, *, command: Sequence[str] = COMMAND
) -> list[dict[str, Any]]:
    """Every comparison's `verdict.json`, run at the same time; the first error stops them all.

    Raises:
        MezzoError: what `mezzo.verify.compare.compare` raises.
    """
    requests = [side.request() for side in sides]
    total = sum(len(schedule(request)) for request in requests)
    stop = threading.Event()
    counters = [Counter(stop) for _ in sides]
    with tempfile.TemporaryDirectory(prefix="mezzo-side-by-side-") as place, ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(compare, request, Path(place) / side.name, watcher=counter, command=tuple(command))
            for request, side, counter in zip(requests, sides, counters)
        ]
        try:
            while any(not future.done() for future in futures):
                wait(futures, timeout=POLL_SECONDS)
                if any(future.done() and future.exception() is not None for future in futures):
                    break
                at_work = ", ".join(f"{side.name} {counter.name}" for side, counter in zip(sides, counters))
                effort.report(f"training, {at_work}", sum(counter.done for counter in counters) / total)
        finally:
            stop.set()
        failed = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(failed, key=lambda error: isinstance(error, Stopped)):
            raise error  # the cause, and not those that it stopped
        return [future.result() for future in futures]


def judged(side: Side, precision: str, candidate: dict[str, Any]) -> Finding:
    """The finding on one candidate, from its part of `verdict.json`."""
    control = precision == CONTROL
    word = candidate["parity"]
    if control:
        expected = "A judge that can tell: fp16 whose loss scale (2^-24) rounds gradients to zero is called divergent."
    else:
        expected = (
            f"{side.title[0].upper()}{side.title[1:]} ends as good in {precision} as in FP32: equivalent, as every "
            "pair in the original work."
        )
    return Finding(
        name=f"{side.name}-control-divergent" if control else f"{side.name}-{precision}-as-good",
        expected=expected,
        seen=_seen(side, precision, candidate),
        holds=word == ("divergent" if control else "equivalent"),
    )


def _seen(side: Side, precision: str, candidate: dict[str, Any]) -> str:
    """The verdict's numbers in one sentence; its `reason` also tells of speed, which means nothing here."""
    word = candidate["parity"]
    if candidate["metric_gap"] is None or candidate["loss_gap"] is None:
        return f"{word}: {candidate['reason']}"
    percent = side.metric_label.endswith("%")
    digits = 2 if percent else 4
    mean, fp32 = candidate["final_metric"], candidate["fp32_metric"]
    gap, margin = candidate["metric_gap"], candidate["metric_margin"]
    text = (
        f"{word}: {side.metric_label.split(',')[0]} {mean:.{digits}f}{' %' * percent} against FP32's "
        f"{fp32:.{digits}f}{' %' * percent} over {candidate['seeds']} seeds, difference {gap:+.2g}"
        f"{_interval(candidate['metric_gap_interval'])}, margin {margin:.2g}; final training loss "
        f"{candidate['loss_gap_relative']:+.2%} of FP32's, margin {candidate['margin_relative']:.1%}"
    )
    if candidate["skipped_steps"]:
        text += f"; {candidate['skipped_steps']} steps were skipped by the loss scale"
    if word in ("consistent", "inconclusive") and None not in (candidate["power"], candidate["metric_power"]):
        text += (
            f"; equal networks would have been proven so with a chance of {candidate['power']:.0%} by the loss and "
            f"{candidate['metric_power']:.0%} by the metric"
        )
    return text + "."


def _interval(interval: Sequence[float] | None) -> str:
    return f" (90 % interval {interval[0]:+.2g} to {interval[1]:+.2g})" if interval else ""


def numbers_of(sides: Sequence[Side], verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the figure and the sentences come from."""
    found: dict[str, Any] = {
        "paper": [
            {"network": name, "fp32_top1": fp32, "mixed_top1": mixed, "points": round(mixed - fp32, 2)}
            for name, (fp32, mixed) in PAPER.items()
        ],
        "networks": {},
    }
    for side, verdict in zip(sides, verdicts):
        candidates = {}
        for precision, one in verdict["candidates"].items():
            candidates["control" if precision == CONTROL else precision] = {
                key: value
                for key, value in one.items()
                if not key.startswith(("speed", "steps_timed", "reason"))
            }
        found["networks"][side.name] = {**asdict(side), "candidates": candidates}
    return found


def run(effort: Effort, *, sides: Sequence[Side] | None = None) -> Outcome:
    """Compare both networks, and turn each verdict into a finding."""
    sides = sides or (QUICK if effort.quick else FULL)
    verdicts = compare_all(sides, effort)
    findings = tuple(
        judged(side, precision, one)
        for side, verdict in zip(sides, verdicts)
        for precision, one in verdict["candidates"].items()
    )
    return Outcome(findings, numbers_of(sides, verdicts))


def draw(numbers: dict[str, Any], figure: Figure) -> None:
    """Above: every seed's metric in each precision. Below: what it differs from FP32's, and the margin's band."""
    from mezzo.reproduce.side_by_side_figure import draw as drawn

    drawn(numbers, figure)


EXPERIMENT = Experiment(
    "side-by-side",
    "A CNN and a transformer, FP32 and mixed precision side by side",
    "Micikevicius et al. 2017, section 4.1, table 1 (top-1 accuracy in FP32 and in mixed precision)",
    run,
    draw,
)
