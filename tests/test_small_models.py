"""What a run adds to each call of a small model, counted in function calls, which no load of the machine changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mezzo.pytorch.run import session
from mezzo.runner.lifecycle import RunRequest

pytestmark = pytest.mark.usefixtures("forked")

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
def test_a_call_passes_through_few_functions_in_a_graph_of_many(precision: str, tmp_path: Path) -> None:
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


COUNTS = """
    import sys
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    session = sys.modules["mezzo.pytorch.run.session"].made[-1]
    for step in range(6):
        if step == 3 and "group" in sys.argv:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        loss = net(torch.randn(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
    journal = session.journal
    assert (journal.losses, journal.updates, journal.first_updates) == (6, 6, 6)
    assert (session.model_calls, session.lowered_calls) == (6, 6)
    assert float(journal.last_loss) == float(loss.detach())
    print(session.only_counts)
    if "group" in sys.argv:
        torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("policy", "words", "settings", "short"),
    [
        ("bf16", [], {}, True),
        ("bf16", ["group"], {}, False),
        ("bf16", [], {"stop_after": 9}, False),
        ("bf16", [], {"records": Path("run.jsonl")}, False),
        ("bf16", [], {"masters": "split"}, False),
        ("mxfp8,bf16_from=9", [], {}, False),
        ("fp16", [], {"trace": False}, False),
    ],
)
def test_the_short_way_counts_what_the_long_one_does(
    policy: str,
    words: list[str],
    settings: dict[str, Any],
    short: bool,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(textwrap.dedent(COUNTS))
    made: list[session.Session] = []
    begin = session.Session.__init__

    def noted(self: session.Session, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(session.Session, "__init__", noted)
    monkeypatch.setattr(session, "made", made, raising=False)  # for the script
    assert session.run(RunRequest("script.py", tuple(words), policy=policy, **settings)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(short)


SOFTMAX = """
    import warnings

    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    warnings.simplefilter("ignore")

    class Sub(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert not (kwargs or {}).get("dtype")  # it sees the script's call
            return super().__torch_function__(func, types, args, kwargs)

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return F.softmax(x, -1)

    compiled = torch.compile(lambda x: F.softmax(x, -1), backend="aot_eager")

    # Each is called with a function of F's, and with the same of torch's, which goes through the dispatcher.
    CALLS = {
        "dense": lambda f, x: f(x, -1),
        "first": lambda f, x: f(x.t(), 0),
        "fp32": lambda f, x: f(x.float(), -1),
        "fp64": lambda f, x: f(x.double(), -1),
        "integers": lambda f, x: f(x.int(), -1),
        "dtype": lambda f, x: f(x, -1, dtype=torch.float64),
        "no dim": lambda f, x: f(x) if f in (F.softmax, F.log_softmax) else f(x, 1),
        "nested": lambda f, x: f(torch.nested.as_nested_tensor([x[0], x[1]]), -1),
        "sparse": lambda f, x: f(x.to_sparse(), -1),
        "oneDNN": lambda f, x: f(x.to_mkldnn(), -1).to_dense(),
        "subclass": lambda f, x: f(x.as_subclass(Sub), -1),
        "vmap": lambda f, x: torch.func.vmap(lambda row: f(row, -1))(x),
        "grad": lambda f, x: torch.func.grad(lambda x: f(x, -1)[0, 0])(x),
        "checkpoint": lambda f, x: checkpoint(lambda x: f(x, -1), x, use_reentrant=False),
        "script": lambda f, x: scripted(x) if f is F.softmax else f(x, -1),
        "compile": lambda f, x: compiled(x) if f is F.softmax else f(x, -1),
    }

    def outcome(call, f, x):
        x = x.detach().requires_grad_()
        try:
            out = call(f, x)
            parts = out.unbind() if out.is_nested else [out]
            if out.requires_grad and not out.is_nested:
                parts += torch.autograd.grad(out[0, 0].double(), x)
        except Exception as error:
            return type(error)
        return [(type(t), t.dtype, t.detach().as_subclass(Tensor).double().tolist()) for t in parts]

    class Net(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            for name in ("softmax", "log_softmax"):
                for kind, call in CALLS.items():
                    ours, theirs = (outcome(call, getattr(owner, name), x) for owner in (F, torch))
                    if ours != theirs:
                        print(name, kind, ours, theirs)
            assert x.dtype in (torch.bfloat16, torch.float16)
            return x

    Net(4, 4)(torch.randn(3, 4))
    print("all")
"""


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,op.softmax=lower"])
def test_softmax_without_the_dispatchers_way_into_python(policy: str, tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SOFTMAX))
    assert session.run(RunRequest(str(script), (), policy=policy)) == 0
    assert capsys.readouterr().out.splitlines() == ["all"]
