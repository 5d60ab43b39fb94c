"""OpObserver: the formats that ran are read from the trace, op by op, and compared with the plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.core.records import OpFormats
from mezzo.pytorch.monitor.formats import COMPILED, OpObserver


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.lstm, self.gru = nn.LSTM(4, 6), nn.GRU(6, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.layer_norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.norm(self.conv(x))).flatten(2).mean(2).unsqueeze(0)
        h, _ = self.lstm(h)
        h, _ = self.gru(h)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        out: torch.Tensor = self.head(self.layer_norm(h)).squeeze(0)
        return out


def _step(policy: str) -> list[OpFormats]:
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    with OpObserver(policy) as observer:
        with mezzo.autocast(policy, "cpu"):
            out = model(x)
        F.cross_entropy(out.float(), target).backward()
        optimizer.step()
    return observer.table()


def _find(table: list[OpFormats], op: str) -> OpFormats:
    return next(row for row in table if row.op == op)


FP16 = {"conv2d": "fp16 -> fp16", "batch_norm": "fp16+fp32 -> fp16", "cross_entropy_loss": "fp32 -> fp32"}
SEEN = [
    ("bf16", {op: text.replace("fp16", "bf16") for op, text in FP16.items()}),
    ("fp16", FP16),
    ("fp32", {op: "fp32 -> fp32" for op in FP16}),
    ("bf16,op.conv2d=fp32,op.batch_norm=fp32", {"conv2d": "fp32 -> fp32", "batch_norm": "fp32 -> fp32"}),
]


@pytest.mark.parametrize(("policy", "seen"), SEEN, ids=[row[0] for row in SEEN])
def test_formats_seen_are_those_planned_and_backward_belongs_to_its_forward_op(
    policy: str, seen: dict[str, str]
) -> None:
    table = _step(policy)
    assert [row for row in table if not row.as_planned] == []
    for op, observed in seen.items():
        row = _find(table, op)
        assert (row.observed, row.planned) == (observed, observed)
    low = policy[:4]
    for op in ("linear", "scaled_dot_product_attention"):
        assert _find(table, op).observed == f"{low} -> {low}"
    for op in ("lstm", "gru"):
        assert _find(table, op).observed.partition(" -> ")[2] == low
    assert not any(row.op in ("addmm", "mkldnn_rnn_layer", "_softmax") for row in table)  # parts of others
    assert not any(row.op in ("view", "transpose", "to", "empty") for row in table)
    inside, conv = "bf16" if policy == "bf16" else "fp32", _find(table, "conv2d.backward")
    assert (conv.observed, conv.planned) == (f"{inside} -> {inside}", "")
    assert conv.rule == ("fp32" if "op.conv2d" in policy else "lower")
    for op in ("linear", "lstm", "gru", "batch_norm", "cross_entropy_loss"):
        assert _find(table, f"{op}.backward").calls >= 1
    assert _find(table, "SGD.step").observed == "fp32 -> fp32"


X, A, D = torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)


def _thrice() -> None:
    layer = nn.Linear(4, 4)
    with mezzo.autocast("bf16", "cpu"):
        layer(layer(layer(X)))


def _inside(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with mezzo.autocast("bf16", "cpu"):
            call()

    return run


def _torchs_own_table() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        torch.softmax(X.bfloat16(), -1)


def _outside() -> None:
    with mezzo.autocast("bf16", "cpu"):
        inside = A @ A
    F.linear(inside.float(), A)


def _both() -> None:
    _inside(lambda: torch.mm(A, A))()
    torch.mm(A, A)


# name -> policy, whether all runs inside, what runs, op, and of its row: planned, observed, calls, casts, as planned
ROWS: dict[str, tuple[str, bool, Callable[[], object], str, tuple[str, str, int, int, bool]]] = {
    # The input, and the weight and the bias once: autocast keeps their copies until its context ends.
    "calls and casts": ("bf16", False, _thrice, "linear", ("bf16 -> bf16", "bf16 -> bf16", 3, 3, True)),
    "a departure": ("bf16", False, _torchs_own_table, "softmax", ("fp32 -> fp32", "bf16 -> bf16", 1, 0, False)),
    "cast up afterwards": (
        "bf16", False, lambda: torch.sigmoid(X.bfloat16()).float(), "sigmoid",
        ("fp32 -> fp32", "bf16 -> bf16", 1, 0, False),
    ),
    "outside": ("bf16", False, _outside, "linear", ("", "fp32 -> fp32", 1, 0, True)),
    "all should be inside": ("bf16", True, _outside, "linear", ("bf16 -> bf16", "fp32 -> fp32", 1, 0, False)),
    "not lowered": ("bf16", False, lambda: torch.mm(A, A), "mm", ("bf16 -> bf16", "fp32 -> fp32", 1, 0, False)),
    "an overridden module": (
        "bf16,module.head=fp32", False, _both, "mm", ("bf16 -> bf16", "bf16 -> bf16", 1, 2, True),
    ),
    "FP64": ("bf16", False, _inside(lambda: torch.mm(D, D)), "mm", ("", "fp64 -> fp64", 1, 0, True)),
    "in place": ("bf16", False, _inside(lambda: A.clone().add_(1.0)), "add_", ("", "fp32 -> fp32", 1, 0, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str) -> None:
    policy, whole, run, op, expected = ROWS[name]
    with OpObserver(policy, whole=whole) as observer:
        run()
    row = _find(observer.table(), op)
    assert (row.planned, row.observed, row.calls, row.casts, row.as_planned) == expected


def test_a_second_observer_says_why_it_sees_nothing() -> None:
    with OpObserver("bf16") as first, OpObserver("bf16") as second:
        torch.mm(A, A)
    assert second.table() == []
    assert "another PyTorch execution trace" in second.note
    assert len(first.table()) == 1


def test_the_users_own_trace_is_not_ended(tmp_path: Path) -> None:
    users = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    users.start()
    with OpObserver("bf16"):
        torch.mm(A, A)
    torch.mm(A, A)
    users.stop()
    users.unregister_callback()
    assert (tmp_path / "trace.json").read_text().count('"aten::mm"') == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_write_into_the_trace() -> None:
    with OpObserver("bf16") as observer:
        torch.mm(A, A)
        child = os.fork()
        if child == 0:
            for _ in range(500):
                torch.add(torch.ones(1), 1)
            os._exit(0)
        os.waitpid(child, 0)
        torch.mm(A, A)
    assert [(row.op, row.calls) for row in observer.table()] == [("mm", 2)]


def test_stderr_is_left_alone_and_no_file_is_left(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with OpObserver("bf16") as observer:
        os.write(2, b"a line of the script's\n")
        torch.ones(1)
    assert not observer.note
    assert capfd.readouterr().err == "a line of the script's\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.heavy
def test_a_compiled_model_runs_as_before_and_is_reported() -> None:
    layer = torch.compile(nn.Linear(4, 4), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)

    def step() -> torch.Tensor:
        with mezzo.autocast("bf16", "cpu"):
            out: torch.Tensor = layer(x)
        out.float().sum().backward()
        return out

    before = step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with OpObserver("bf16") as observer:
        after = step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # nothing was compiled again
    assert torch.equal(before, after)
    row = _find(observer.table(), COMPILED)
    assert row.reason == "compiled: formats not observed"
    assert not any(row.op.startswith(("linear", "addmm", "mm")) for row in observer.table())
