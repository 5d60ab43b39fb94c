"""Ranges on a GPU: the counts of the CPU's reference, and no wait of the host in a watched update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.pytorch.kernels.exponents import WORDS, counter, reference
from mezzo.pytorch.monitor.ranges import RangeWatch
from test_reductions import DTYPES, awkward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # PyTorch's own and Triton's, at their imports and first compilations.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2047, 1 << 15, 3 * (1 << 15) + 5, 1 << 22])
@pytest.mark.parametrize("odd", [0, 1])
def test_counts_equal_the_reference(dtype: torch.dtype, size: int, odd: int) -> None:
    x = awkward(dtype, size + odd)
    ours, expected = (
        torch.zeros(WORDS, dtype=torch.int64, device="cuda"),
        torch.zeros(WORDS, dtype=torch.int64),
    )
    for _ in range(2):
        counter("cuda")(x.cuda()[odd:], ours)
        reference(x[odd:], expected)
    assert torch.equal(ours.cpu(), expected)


def test_a_watched_update_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = RangeWatch(model, optimizer, every=1)
    x = torch.randn(32, 64, device="cuda")
    scale, skipped = torch.tensor(8.0, device="cuda"), torch.tensor(False, device="cuda")

    def update(index: int) -> None:
        watch.call_begins(model, (x,), {})
        out = model(x)
        watch.call_ended(model, out)
        loss = out.square().mean()
        watch.backward_begins(loss, scale)
        (loss * scale).backward()
        watch.update_begins(optimizer, scale)
        optimizer.step()
        watch.update_ended(optimizer, index=index, number=0, skipped=skipped, loss_scale=scale)
        optimizer.zero_grad()

    update(0)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, second = watch.drain()
    assert len(watch.rows) == 3 * 2 + 3 * 4
    assert first.rows != second.rows
