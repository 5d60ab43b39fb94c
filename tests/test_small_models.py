"""What a run adds to each call of a small model, counted in function calls, which no load of the machine changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import Ran, launcher

SCRIPT = """
    import json, sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(-1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(1, 4)

    def counted(work):
        events = 0

        def count(frame, event, argument):
            nonlocal events
            events += event in ("call", "c_call")

        sys.setprofile(count)
        work()
        sys.setprofile(None)
        return events

    def calls(number):
        return [-net(x)[0, 0].log() for _ in range(number)]

    def graph(number):
        losses = calls(number)
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        graph(5)
    found = {}
    if sys.argv[1] == "no_grad":
        with torch.no_grad():
            net(x)
            found = {"each": counted(lambda: [net(x) for _ in range(20)]) / 20}
    else:
        # A step costs what it costs: the difference is that of the calls.
        work = graph if sys.argv[1] == "graph" else calls
        few, more, many = (counted(lambda: work(number)) for number in (20, 80, 400))
        found = {"few": (more - few) / 60, "many": (many - more) / 320}
    print(json.dumps(found))
"""


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a script in this process."""
    return launcher(tmp_path, capsys)


def _counted(launch: Callable[..., Ran], precision: str, what: str) -> dict[str, float]:
    ran = launch(SCRIPT, what, policy=precision)
    assert ran.status == 0, ran.err
    found: dict[str, float] = json.loads(ran.lines[-1])
    return found


# Function calls, Python's and C's, of one outermost call of four layers. Plain Python: 36.
MOST = {"fp32": 90, "bf16": 135, "fp16": 215}


@pytest.mark.parametrize("precision", MOST)
def test_a_call_passes_through_few_functions(precision: str, launch: Callable[..., Ran]) -> None:
    assert _counted(launch, precision, "no_grad")["each"] <= MOST[precision]


@pytest.mark.parametrize("what", ["forward", "graph"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_work_for_a_call_does_not_grow_with_the_calls_in_its_graph(
    precision: str, what: str, launch: Callable[..., Ran]
) -> None:
    found = _counted(launch, precision, what)
    assert found["many"] <= 1.15 * found["few"]
