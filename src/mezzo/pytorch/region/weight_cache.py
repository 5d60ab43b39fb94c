"""Autocast's 16-bit copies of weights are dropped as soon as a weight is written.

`torch.autocast` keeps the copy of an FP32 weight until the outermost region ends, and does not notice that the
weight changed. In Mezzo's regions it is made to forget wherever a weight may be written (`writers`), and by the step of
every `torch.optim.Optimizer`, whatever its kernel is.

No copy outlives its outermost region, not even between the losses of an accumulation window, where a second
forward could use it. A write between two regions can be of any kind; ``p.data.add_`` raises no version counter
of the parameter's; and what holds the memory otherwise (NumPy, another process) is seen by nothing. The price is a
cast a forward: 48 ms for 17 M weights where each copy is made on new pages, a sixteenth of a GPT's step there.
Weights stored in 16 bits (``weights="split"``) have nothing to cast.
"""

from __future__ import annotations

import threading

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from mezzo.core.policy import Policy
from mezzo.pytorch.region import identity, writers

_lock = threading.Lock()
_installed = False


def install(_code: int, device_type: str, _policy: Policy) -> None:
    """Clear the cache after writes from now on: called when a policy gets its label."""
    global _installed
    with _lock:
        if not _installed:
            register_optimizer_step_post_hook(_forget_casts)
            _installed = True
        writers.install(device_type)


def _forget_casts(_optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if not torch.compiler.is_compiling() and identity.label():
        torch.clear_autocast_cache()
