"""Autocast's 16-bit copies of weights are dropped when an optimizer has moved the weights.

`torch.autocast` keeps the copy of an FP32 weight until the outermost region ends, and does not notice that
the weight changed: an optimizer stepped inside a region goes on training with the old copies, in silence. In
Mezzo's regions the cache is cleared after each step of a `torch.optim` optimizer. Weights that a script
changes by hand inside a region (`p.data.add_(...)`) are still seen at their old value until it ends: end the
region first, or enter it with ``cache_enabled=False``.
"""

from __future__ import annotations

import threading

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from mezzo.pytorch.region import identity

_lock = threading.Lock()
_installed = False


def install(*_: object) -> None:
    """Clear the cache after optimizer steps from now on: called when the first policy gets its label."""
    global _installed
    with _lock:
        if not _installed:
            register_optimizer_step_post_hook(_forget_casts)
            _installed = True


def _forget_casts(_optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if not torch.compiler.is_compiling() and identity.label():
        torch.clear_autocast_cache()
