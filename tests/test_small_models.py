"""What a run adds to each call of a small model, counted in function calls, which no load of the machine changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
    for name, work in (("forward", calls), ("graph", graph)):
        # A step costs what it costs: the difference is that of the calls.
        few, more, many = (counted(lambda: work(number)) for number in (20, 80, 400))
        found[name] = {"few": (more - few) / 60, "many": (many - more) / 320}
    with torch.no_grad():
        net(x)
        found["no_grad"] = {"each": counted(lambda: [net(x) for _ in range(20)]) / 20}
    print(json.dumps(found))
"""


# Function calls, Python's and C's, of one outermost call of four layers. Plain Python: 36.
MOST = {"fp32": 85, "bf16": 118, "fp16": 212}


@pytest.mark.parametrize(
    "precision", ["fp16", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fp32", "bf16"))]
)
def test_a_call_passes_through_few_functions_however_many_are_in_its_graph(
    precision: str, tmp_path: Path
) -> None:
    """In a process of its own: each policy that a process has met lengthens the label, which every call reads."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    words = [sys.executable, "-m", "mezzo", "run", "--precision", precision, "--quiet", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, float]] = json.loads(ran.stdout.splitlines()[-1])
    assert found["no_grad"]["each"] <= MOST[precision]
    for what in ("forward", "graph"):
        assert found[what]["many"] <= 1.15 * found[what]["few"], what
