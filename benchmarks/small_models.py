"""Measure the cost of 16 bits for models too small to gain: two small layers and a dropout, one sample at a time.

    python benchmarks/small_models.py                   # writes benchmarks/results/small_models.json
    python benchmarks/small_models.py --rounds 15 --no-write

Each contender is a separate process: plain Python, plain Python with `torch.autocast` (bf16) around each call, and
`mezzo run` with fp32, bf16 and fp16. All run at once and take turns in an order that changes from round to round. Each
reports the CPU time (`time.process_time`) of its own work, on one thread. A row is the ratio of medians to plain
Python, with a 95 % interval over rounds. The rows:

- training: a call with one sample, its loss, backward and a step of Adam, for each of 32 samples;
- graph: 32 calls with one sample each, then one backward and one step;
- no_grad: 128 calls with one sample;
- script: policy gradients (REINFORCE) on a cart and pole; each episode of at most 500 steps is one backward and one
  step of Adam. A round is five episodes, 1,000 calls in all, of the same lengths for all contenders.

`--least` adds two contenders without Mezzo, "least bf16" and "least fp16": the same arithmetic written by hand into
plain Python, without what a program that runs other people's scripts needs. In bf16: `torch.autocast` around the
outermost call, entered by a replaced `nn.Module.__call__`, softmax in FP32, an FP32 result. In fp16, emulated: factors
and results of the linear layers are rounded to fp16, softmax and loss are FP32, the loss is scaled, gradients are
unscaled and checked before the step.

To measure another version of Mezzo: PYTHONPATH=/path/to/src python benchmarks/small_models.py --no-write.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTENDERS = ("plain", "autocast bf16", "fp32", "bf16", "fp16")
LEAST = ("least bf16", "least fp16")
CALLS = {"training": 32, "graph": 32, "no_grad": 128}
LENGTHS = (20, 60, 120, 300, 500)
"""Of the script's episodes in a round, in calls of the network."""


def _tasks(contender: str) -> dict[str, Callable[[], int]]:
    """What is timed: each runs once and gives the number of its calls of the network."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear: Callable[..., nn.Module] = nn.Linear
    softmax: Callable[..., nn.Module] = nn.Softmax
    scale = 1024.0 if contender == "least fp16" else None
    if contender in LEAST:
        linear, softmax = _least(contender)

    def network() -> nn.Module:
        return nn.Sequential(linear(4, 128), nn.Dropout(0.6), nn.ReLU(), linear(128, 2), softmax(-1))

    def backward(value: torch.Tensor) -> None:
        (value if scale is None else value * scale).backward()

    def step(optimizer: torch.optim.Optimizer) -> None:
        if scale is not None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            found = torch.zeros(1)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(1 / scale))
            if found.item():
                return
        optimizer.step()

    def called(net: nn.Module, x: torch.Tensor) -> Any:
        if contender != "autocast bf16":
            return net(x)
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    def loss(probabilities: torch.Tensor) -> torch.Tensor:
        return -probabilities[0, 0].log()

    samples = torch.randn(128, 1, 4).unbind()

    def training() -> int:
        for x in samples[: CALLS["training"]]:
            backward(loss(called(trained, x)))
            step(steps)
            steps.zero_grad()
        return CALLS["training"]

    def graph() -> int:
        losses = [loss(called(trained, x)) for x in samples[: CALLS["graph"]]]
        backward(torch.stack(losses).sum())
        step(steps)
        steps.zero_grad()
        return CALLS["graph"]

    def no_grad() -> int:
        with torch.no_grad():
            for x in samples[: CALLS["no_grad"]]:
                called(used, x)
        return CALLS["no_grad"]

    def episode(length: int) -> None:
        state = torch.zeros(4).uniform_(-0.05, 0.05).tolist()
        log_probs, rewards = [], []
        for _ in range(length):
            choice = torch.distributions.Categorical(called(policy, torch.tensor([state])))
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            state, fell = moved(state, int(action.item()))
            rewards.append(0.0 if fell else 1.0)
            if fell:  # played on from the middle: the episodes of all contenders are equally long
                state = torch.zeros(4).uniform_(-0.05, 0.05).tolist()
        returns: list[float] = []
        total = 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        wanted = torch.tensor(returns)
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
        total_loss = torch.cat([-log_prob * r for log_prob, r in zip(log_probs, wanted)]).sum()
        adam.zero_grad()
        backward(total_loss)
        step(adam)

    def script() -> int:
        for length in LENGTHS:
            episode(length)
        return sum(LENGTHS)

    trained, used, policy = network(), network(), network()
    steps = torch.optim.Adam(trained.parameters(), lr=1e-3)
    adam = torch.optim.Adam(policy.parameters(), lr=1e-2)
    return {"training": training, "graph": graph, "no_grad": no_grad, "script": script}


def _least(contender: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The layers of "least bf16", whose calls are replaced as a run must replace them, or of "least fp16"."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Softmax(nn.Softmax):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(x, self.dim, dtype=torch.float32)

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, bias = self.weight.half().float(), self.bias.half().float()
            return F.linear(x.half().float(), weight, bias).half()

    if contender == "least fp16":
        return Linear, Softmax
    is_on = torch._C._is_any_autocast_enabled

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_on():
            return self._call_impl(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            out = self._call_impl(*args, **kwargs)
        return out if out.dtype is torch.float32 else out.float()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    return nn.Linear, Softmax


def moved(state: list[float], action: int) -> tuple[list[float], bool]:
    """The cart and pole 0.02 s later, pushed to one side, and whether the pole fell or the cart left the track."""
    import math

    x, speed, angle, turning = state
    push = 10.0 if action == 1 else -10.0
    sin, cos = math.sin(angle), math.cos(angle)
    pushed = (push + 0.05 * turning**2 * sin) / 1.1
    bent = (9.8 * sin - cos * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    driven = pushed - 0.05 * bent * cos / 1.1
    now = [x + 0.02 * speed, speed + 0.02 * driven, angle + 0.02 * turning, turning + 0.02 * bent]
    return now, abs(now[0]) > 2.4 or abs(now[2]) > 0.21


def serve(contender: str) -> None:
    """Time the tasks named on standard input, one per line."""
    tasks = _tasks(contender)
    for task in tasks.values():
        for _ in range(4):
            task()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        task = tasks[json.loads(line)]
        begun = time.process_time()
        calls = task()
        print(json.dumps((time.process_time() - begun) / calls), flush=True)


class _Process:
    def __init__(self, contender: str) -> None:
        words = [__file__, "--serve", contender]
        if contender in ("fp32", "bf16", "fp16"):
            words = ["-m", "mezzo", "run", "--precision", contender, "--quiet", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def seconds(self, task: str) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(task) + "\n")
        self._child.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", choices=CONTENDERS + LEAST, help=argparse.SUPPRESS)
    parser.add_argument("--least", action="store_true", help="also time the same arithmetic without Mezzo")
    parser.add_argument("--rounds", type=int, default=40, help="rounds per row (default %(default)s)")
    parser.add_argument("--no-write", action="store_true", help="print the table, write no file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "small_models.json")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from mezzo.pytorch.hardware import describe
    from pairs import ratio_of_medians

    console = Console()
    tasks = (*CALLS, "script")
    contenders = CONTENDERS + (LEAST if arguments.least else ())
    processes = {contender: _Process(contender) for contender in contenders}
    times: dict[str, dict[str, list[float]]] = {task: {name: [] for name in contenders} for task in tasks}
    for number in track(range(arguments.rounds), description="rounds", console=console):
        turned = number % len(contenders)
        order = (*contenders[turned:], *contenders[:turned])
        for task in tasks:
            for contender in order if number % 2 else order[::-1]:
                times[task][contender].append(processes[contender].seconds(task))
    for process in processes.values():
        process.close()
    table = Table("row", "us per call", "ratio to plain Python", "ratio to torch.autocast in bf16")
    rows: dict[str, Any] = {}
    for task, of_task in times.items():
        for contender, seconds in of_task.items():
            ratio = ratio_of_medians(seconds, of_task["plain"])
            to_amp = ratio_of_medians(seconds, of_task["autocast bf16"])
            row = rows[f"{contender} {task}"] = {
                "ratio": ratio.value,
                "interval": [ratio.low, ratio.high],
                "to_autocast": to_amp.value,
                "to_autocast_interval": [to_amp.low, to_amp.high],
                "median_microseconds": statistics.median(seconds) * 1e6,
            }
            table.add_row(
                f"{contender} {task}",
                f"{row['median_microseconds']:.1f}",
                f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                f"{to_amp.value:.2f} [{to_amp.low:.2f}, {to_amp.high:.2f}]",
            )
    console.print(table)
    if not arguments.no_write:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": describe(), "rounds": arguments.rounds, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
