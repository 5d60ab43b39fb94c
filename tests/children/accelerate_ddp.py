"""One rank of Accelerate's data parallelism under fp16; an overflow in the other rank's batch only."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
if rank == 0:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting.with_suffix(".new").write_text(str(port))
    meeting.with_suffix(".new").rename(meeting)
while not meeting.exists():
    time.sleep(0.05)
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": str(rank),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": meeting.read_text(),
}

import mezzo  # noqa: E402

accelerator = mezzo.accelerate.Accelerator("fp16", cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
skips = []
for step in range(3):
    x = torch.randn(8, 4)
    if step == 1 and rank == 1:
        x *= 1e30
    accelerator.backward(model(x).pow(2).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    skips.append(accelerator.optimizer_step_was_skipped)
weights = [float(param.detach().double().sum()) for param in model.parameters()]
accelerator.end_training()
print(json.dumps({"skips": skips, "weights": weights, "loss_scale": accelerator.mezzo.loss_scale}))
