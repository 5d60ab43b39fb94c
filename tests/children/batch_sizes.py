"""Largest batch sizes in a process where no other test keeps tensors alive: prints START-MULTIPLE -> what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import mezzo
from alive import bytes_alive
from test_batch_size import peak_of, small


def found_by(start: int, multiple: int) -> dict[str, Any]:
    limit = bytes_alive() + 500_000
    model, optimizer, step = small()
    found = mezzo.find_batch_size(
        step, start, limit=limit, multiple_of=multiple, rounds=1, model=model, optimizer=optimizer
    )
    sizes = {found.largest, found.largest + multiple, *(trial.size for trial in found.trials)}
    return {
        "asked": limit,
        "limit": found.limit,
        "device": found.device,
        "largest": found.largest,
        "trials": [[one.size, one.peak_bytes, one.fits, one.seconds is not None] for one in found.trials],
        "peaks": {size: peak_of(step, size) for size in sizes},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(
        {f"{start}-{multiple}": found_by(start, multiple) for start in (16, 512) for multiple in (1, 16)},
        sys.stdout,
    )
