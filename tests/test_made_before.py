"""`mezzo run` of a script whose optimizer was made before `fully_shard`: it would train nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from mezzo.cli.main import main
from releases import before_torch

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
fully_shard(net)
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("went on")
"""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_optimizer_made_before_fully_shard_ends_the_run(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before_torch(2, 12, "fully_shard leaves no mark on the parameters that it replaces")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    try:
        status = main(["run", "--precision", precision, "train.py"])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    told = capfd.readouterr()
    assert (status, told.out) == (2, "")
    assert "created before fully_shard" in told.err
    assert "optimizer = SGD(model.parameters(), ...)" in told.err
    assert "Traceback" not in told.err
