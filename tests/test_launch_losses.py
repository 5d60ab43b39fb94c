"""The note on a loss outside the model: what the FP32 copy of its logits takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launching import launcher
from mezzo.pytorch.launch.losses import fp32_logits

ROWS, CLASSES = 6, 5
TARGET = torch.arange(ROWS) % CLASSES
BYTES = 2 * 4 * ROWS * CLASSES  # FP32 logits, and their log-softmax


def logits(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(ROWS, CLASSES, requires_grad=True).to(dtype) * 2).float()


LOSSES: list[tuple[str, Callable[[Tensor], Tensor], int]] = [
    ("plain", lambda x: F.cross_entropy(x, TARGET), BYTES),
    ("as criterion", lambda x: torch.nn.CrossEntropyLoss()(x, TARGET), BYTES),
    ("view", lambda x: F.cross_entropy(x.view(2, 3, CLASSES).flatten(0, 1), TARGET), BYTES),
    ("transposed", lambda x: F.cross_entropy(x.view(2, 3, -1).transpose(1, 2), TARGET.view(2, 3)), BYTES),
    ("shifted", lambda x: F.cross_entropy(x[:-1], TARGET[1:]), BYTES * (ROWS - 1) // ROWS),
    ("by hand", lambda x: F.nll_loss(F.log_softmax(x, 1), TARGET), BYTES),
    (
        "sum of two",
        lambda x: F.cross_entropy(x, TARGET) + 0.1 * F.cross_entropy(x, TARGET.flip(0)),
        2 * BYTES,
    ),
    ("scaled", lambda x: F.cross_entropy(x, TARGET, reduction="none").mean() / 4, BYTES),
    ("another loss", lambda x: F.mse_loss(x, torch.zeros_like(x)), 0),
    ("its logits moved on", lambda x: F.cross_entropy(x * 2, TARGET), 0),
    ("no graph", lambda x: F.cross_entropy(x.detach(), TARGET), 0),
]


@pytest.mark.parametrize(("name", "loss", "expected"), LOSSES, ids=[name for name, _, _ in LOSSES])
def test_bytes_of_widened_logits(name: str, loss: Callable[[Tensor], Tensor], expected: int) -> None:
    assert fp32_logits(loss(logits(torch.bfloat16))) == expected


def test_logits_that_were_fp32_all_along_are_no_copy() -> None:
    assert fp32_logits(F.cross_entropy(logits(torch.float32), TARGET)) == 0


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
classes = {classes}
model = nn.Linear(8, classes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 8), torch.randint(classes, (64,))
for _ in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("policy", "classes", "told"), [("bf16", 4096, "2 MiB"), ("bf16", 16, ""), ("fp32", 4096, "")]
)
def test_a_run_says_what_moving_the_loss_would_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, classes: int, told: str
) -> None:
    ran = launcher(tmp_path, capsys)(SCRIPT.format(classes=classes), policy=policy)
    assert ran.status == 0
    note = "with their log-softmax takes"
    assert (f"{note} {told} until backward" in ran.notes) if told else (note not in ran.notes)
