"""Measure the cost of formats that this machine lacks: time and bytes of training steps, compared with FP32.

    python benchmarks/emulation.py                          # writes benchmarks/results/emulation.json
    python benchmarks/emulation.py --only digits --policy fp16 --rounds 10 --out digits.json
    python benchmarks/emulation.py --only text-lstm --policy fp16 --native none --where 8

Columns. `ms`: the median step. `time / fp32`: the whole step (forward, backward, unscaling, the optimizer), each
policy alternating with FP32 in a random order; a ratio of medians with a 95 % bootstrap interval over processes and
their rounds, since processes may differ by a tenth. `kept`, relative to FP32: the bytes that forward created and that
are alive at its end, each storage once: what autograd saved, 16-bit copies of weights, the loss, and workspaces of
kernels. Bytes have no noise.

`native` selects the formats that count as native: `own`, those of this machine (`mezzo doctor`), or `none`, as with
MEZZO_ASSUME_NATIVE="", where everything is stored in its format and computed in FP32. Each runs in a separate process
with its own FP32 steps. Policies that this version of Mezzo does not have are listed and left out.

Goals: BARS below. A time worse than its goal is *missed* if its whole interval is worse, and *open* if the interval
includes the goal. `--where N` prints the N shapes with the most bytes kept by forward, and the ops that made them,
instead of a table: use it when the bytes exceed their goal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import text_lstm as lstm_script
from clocks import seconds
from live import tensors_in
from models import WORKLOADS, Workload
from pairs import ratio_of_medians, ratio_over_processes

RESULTS = Path(__file__).parent / "results" / "emulation.json"
FP32 = "fp32"
POLICIES = ("bf16", "fp16", "fp8", "fp8,masters=split", "tf32")
NATIVE: Mapping[str, str | None] = {"own": None, "none": ""}
"""Word -> MEZZO_ASSUME_NATIVE in the child's environment; None: unset."""


@dataclass(frozen=True)
class Bar:
    """Upper limits for a policy, relative to FP32: the time of a step, and the bytes kept for backward."""

    time: float | None = None
    kept: float | None = None


BARS: Mapping[str, Bar] = {
    "bf16": Bar(kept=0.6),
    "fp16": Bar(time=1.4, kept=0.6),
    "fp8": Bar(time=2.5, kept=0.6),
}


def _lstm_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten())


def text_lstm(streams: int = 32, context: int = 64, width: int = 256, layers: int = 2) -> Workload:
    """The model of text_lstm.py on the first window of its text."""
    torch.manual_seed(0)
    inputs, targets = next(lstm_script.windows(lstm_script.load(200_000), streams, context))
    model = lstm_script.CharacterLSTM(width, layers, dropout=0.1)
    summary = f"text_lstm.py: {layers} x {width}, {streams * context} characters"
    return Workload(model, inputs.contiguous(), targets.contiguous(), summary, _lstm_loss, lr=8e-3)


MODELS: Mapping[str, Callable[[], Workload]] = {
    "digits": WORKLOADS["digits"],
    "text-gpt": WORKLOADS["text-gpt"],
    "text-lstm": text_lstm,
}


def _place(tensor: Tensor) -> tuple[int, Any, int]:
    """A key of what holds the tensor's bytes, that object, and their count: its storage, or itself where oneDNN keeps
    it packed."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return id(tensor), tensor, tensor.numel() * tensor.element_size()
    return storage._cdata, storage, storage.nbytes()


class Made(TorchDispatchMode):
    """The storages that ops make while it is entered, with the shape, dtype and op of each; weakly."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._seen: dict[int, tuple[weakref.ref[Any], int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        came = {_place(tensor)[0] for tensor in tensors_in([args, kwargs or {}])}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in([out]):
            key, holder, count = _place(tensor)
            if key not in came:
                dtype = str(tensor.dtype).removeprefix("torch.")
                name = f"{dtype} {list(tensor.shape)} of {func}"
                self._seen[key] = (weakref.ref(holder), count, name)
        return out

    def alive(self) -> list[tuple[int, str]]:
        """Bytes and description of those that are alive now."""
        gc.collect()
        return [(count, name) for storage, count, name in self._seen.values() if storage() is not None]


class Contender:
    """A policy's training step on separate objects."""

    def __init__(self, policy: str, work: Workload) -> None:
        import mezzo

        self.policy, self._work = policy, work
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)
        self._mp = mezzo.MixedPrecision(work.model, optimizer, policy)

    def step(self) -> None:
        """Forward, backward and update."""
        with self._mp.autocast():
            loss = self._work.loss()
        self._mp.step(loss)

    def kept(self) -> list[tuple[int, str]]:
        """What one forward pass leaves for backward, which is run afterwards."""
        made = Made()
        with made, self._mp.autocast():
            loss = self._work.loss()
        found = made.alive()
        self._mp.step(loss)
        return found


def kept_bytes(demo: str, policy: str) -> list[tuple[int, str]]:
    """What the second step's forward keeps: in the first, kernels are compiled and states made."""
    contender = Contender(policy, MODELS[demo]())
    contender.step()
    return contender.kept()


def measure(demo: str, policies: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Every policy and FP32 on one demo's model, in this process, as plain JSON values: seconds, bytes, what raised."""
    from mezzo.core.errors import UnknownNameError
    from mezzo.core.policy import policy as policy_of

    raised: dict[str, str] = {}
    kept: dict[str, int] = {}
    contenders: dict[str, Contender] = {}
    for policy in (FP32, *policies):
        try:
            policy_of(policy)
        except UnknownNameError as error:
            raised[policy] = f"left out: {error}"
            continue
        try:
            kept[policy] = sum(count for count, _ in kept_bytes(demo, policy))
            contenders[policy] = Contender(policy, MODELS[demo]())
            for _ in range(2):
                contenders[policy].step()
        except Exception as error:  # whatever a policy raises is a result about it
            if policy == FP32:
                raise
            contenders.pop(policy, None)
            raised[policy] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    times: dict[str, list[float]] = {policy: [] for policy in contenders}
    draw, order = random.Random(0), list(contenders)
    for _ in range(rounds):
        draw.shuffle(order)
        for policy in order:
            times[policy].append(seconds(contenders[policy].step, "cpu"))
    return {"summary": MODELS[demo]().summary, "seconds": times, "kept_bytes": kept, "raised": raised}


def relative_to_fp32(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several processes measured of one demo, a row for each policy that none of them raised under."""
    first = processes[0]
    raised = {policy: why for found in processes for policy, why in found["raised"].items()}
    rows = {}
    for policy in (policy for policy in first["seconds"] if policy not in raised):
        times, fp32 = ([found["seconds"][name] for found in processes] for name in (policy, FP32))
        ratio = ratio_over_processes(times, fp32)
        kept = first["kept_bytes"]
        rows[policy] = {
            "milliseconds": float(f"{1e3 * statistics.median(t for one in times for t in one):.5g}"),
            "time": [round(value, 4) for value in (ratio.value, ratio.low, ratio.high)],
            "time_by_process": [round(ratio_of_medians(*pair).value, 4) for pair in zip(times, fp32)],
            "kept_bytes": kept[policy],
            "kept": round(kept[policy] / kept[FP32], 4),
        }
    return {
        "summary": first["summary"],
        "processes": len(processes),
        "rounds": len(first["seconds"][FP32]),
        "policies": rows,
        "raised": raised,
    }


def judge(policy: str, row: Mapping[str, Any]) -> dict[str, str]:
    """``time`` and ``kept`` -> met, open or missed, for what the policy has a bar for."""
    bar, found = BARS.get(policy.partition(",")[0], Bar()), {}
    if bar.time is not None:
        value, low, _ = row["time"]
        found["time"] = "met" if value <= bar.time else "open" if low <= bar.time else "missed"
    if bar.kept is not None:
        found["kept"] = "met" if row["kept"] <= bar.kept else "missed"
    return found


def in_a_process(
    demo: str, policies: tuple[str, ...], native: str, rounds: int, threads: int
) -> dict[str, Any]:
    """`measure`, in a child in which these formats count as native."""
    environment = {key: value for key, value in os.environ.items() if key != "MEZZO_ASSUME_NATIVE"}
    if (assumed := NATIVE[native]) is not None:
        environment["MEZZO_ASSUME_NATIVE"] = assumed
    words = [sys.executable, __file__, "--child", demo, json.dumps(policies), str(rounds), str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{demo}, native={native}: exit status {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Mapping[str, Any]) -> Table:
    """What `measure` found of one demo, in 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for column in ("ms", "time / fp32", "bar", "kept", "bar"):
        shown.add_column(column, justify="right", no_wrap=True)
    for policy, row in found["policies"].items():
        verdict, bar = judge(policy, row), BARS.get(policy.partition(",")[0], Bar())
        shown.add_row(
            policy,
            f"{row['milliseconds']:.0f}",
            "" if policy == FP32 else "{:.2f} ({:.2f} to {:.2f})".format(*row["time"]),
            f"{bar.time:g} {verdict['time']}" if bar.time is not None else "",
            f"{row['kept']:.3f}",
            f"{bar.kept:g} {verdict['kept']}" if bar.kept is not None else "",
        )
    return shown


def show(demos: Mapping[str, Any], console: Console) -> None:
    """Print a table for each demo and kind of machine, and what was left out."""
    for demo, by_native in demos.items():
        for native, found in by_native.items():
            console.print(f"{demo}, native={native}: {found['summary']}")
            console.print(table(found))
            for policy, why in found["raised"].items():
                console.print(f"  {policy}: {why}", markup=False)


def where(demo: str, policy: str, most: int, console: Console) -> None:
    """Print of which shapes and ops a policy keeps the most bytes, and the same sums for FP32."""
    for name in (FP32, policy):
        sums: dict[str, list[int]] = {}
        for count, what in kept_bytes(demo, name):
            sums.setdefault(what, []).append(count)
        total = sum(map(sum, sums.values()))
        console.print(f"{demo}, {name}: {total / 1e6:.2f} MB kept")
        for what, counts in sorted(sums.items(), key=lambda item: -sum(item[1]))[:most]:
            console.print(f"  {sum(counts) / 1e6:8.2f} MB  {len(counts):3} x {what}", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=tuple(MODELS),
        action="append",
        help="run only this demo (may be repeated; default: all)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help="run only this policy (may be repeated; default: bf16, fp16, fp8, tf32)",
    )
    parser.add_argument("--native", choices=(*NATIVE, "both"), default="both", help="default %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=8, help="timed steps of each policy in a process (default %(default)s)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=4,
        help="processes per row, one after the other (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default %(default)s")
    parser.add_argument(
        "--where",
        type=int,
        metavar="N",
        help="show the N largest groups of kept tensors instead of measuring",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="default %(default)s")
    return parser


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        name, words, rounds, threads = sys.argv[2:]
        torch.set_num_threads(int(threads))
        print(json.dumps(measure(name, tuple(json.loads(words)), int(rounds))))
        return
    options = _parser().parse_args()
    if options.rounds < 2:
        raise SystemExit(f"--rounds {options.rounds}: an interval needs 2 rounds or more")
    if options.processes < 1:
        raise SystemExit(f"--processes {options.processes}: 1 or more")
    console = Console(highlight=False)
    policies = tuple(options.policy or POLICIES)
    natives = tuple(NATIVE) if options.native == "both" else (options.native,)
    demos = options.only or tuple(MODELS)
    if options.where:
        if len(natives) > 1 or len(demos) > 1 or len(policies) > 1:
            raise SystemExit("--where looks at one thing: give --only, --policy and --native, each once")
        os.environ.pop("MEZZO_ASSUME_NATIVE", None)
        if (assumed := NATIVE[natives[0]]) is not None:
            os.environ["MEZZO_ASSUME_NATIVE"] = assumed
        where(demos[0], policies[0], options.where, console)
        return
    from mezzo.pytorch.hardware import describe

    found: dict[str, Any] = {}
    rows = [(demo, native) for demo in demos for native in natives]
    for demo, native in track(rows, "demos", console=Console(stderr=True), transient=True):
        measured = [
            in_a_process(demo, policies, native, options.rounds, options.threads)
            for _ in range(options.processes)
        ]
        found.setdefault(demo, {})[native] = relative_to_fp32(measured)
    results = {
        "schema": 1,
        "machine": describe() | {"threads": options.threads},
        "bars": {policy: {"time": bar.time, "kept": bar.kept} for policy, bar in BARS.items()},
        "demos": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(found, console)
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
