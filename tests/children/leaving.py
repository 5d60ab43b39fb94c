"""How a rank ends, so that its exit status says something of Mezzo and nothing of PyTorch's teardown.

Where Dynamo is imported after the process group is made, which `DistributedDataParallel` does, default arguments in
`torch.distributed.nn.functional` keep the group and its threads into the end of the interpreter. Python ends a thread
that then waits for the GIL inside a C++ destructor, which aborts the process ("terminate called without an active
exception": 4 of 30 processes of plain PyTorch 2.13). `mezzo run` imports that module before the group is made.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import torch.distributed as dist


def leave(results: dict[str, Any]) -> NoReturn:
    """Print the results as JSON in a last line, and end this process once every rank has come here."""
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
