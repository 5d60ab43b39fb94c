"""One rank of Accelerate's data parallelism under fp16, with an overflow in the other rank's batch only."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

import mezzo

rank, meeting = int(sys.argv[1]), sys.argv[2]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of no use: the group exists
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
accelerator = mezzo.accelerate.Accelerator("fp16", cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
skips = []
for step in range(3):
    x = torch.randn(8, 4) * (1e30 if step == rank == 1 else 1.0)
    accelerator.backward(model(x).pow(2).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    skips.append(accelerator.optimizer_step_was_skipped)
weights = [param.detach().double().sum().item() for param in model.parameters()]
scale, kind = accelerator.mezzo.loss_scale, type(model).__name__
accelerator.end_training()
print(json.dumps({"skips": skips, "weights": weights, "loss_scale": scale, "kind": kind}))
