"""Mezzo: mixed precision training, switched on without a change to the script, measured, and judged.

`import mezzo` imports no framework: each public name below is fetched from its room when it is first asked for,
so that tools which only read records or policies start in milliseconds and need no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.core.lazy import lazy
from mezzo.core.version import VERSION

__version__ = VERSION

# Public name -> the module that has it, or that it is.
_PUBLIC = {
    "autocast": "mezzo.pytorch.autocast.context",
    "GradScaler": "mezzo.pytorch.grad_scaler",
    "MixedPrecision": "mezzo.pytorch.training.mixed_precision",
    "Policy": "mezzo.core.policy",
    "policy": "mezzo.core.policy",
    "StaticLossScale": "mezzo.core.loss_scale",
    "DynamicLossScale": "mezzo.core.loss_scale",
    "NoLossScale": "mezzo.core.loss_scale",
    "LossScaleCollapseError": "mezzo.core.errors",
    "TensorBoardWriter": "mezzo.pytorch.monitor.tensorboard",
    "formats": "mezzo.core.formats",
    "calibrate": "mezzo.pytorch.calibrate",
    "find_batch_size": "mezzo.pytorch.batch_size",
    "explain": "mezzo.pytorch.monitor.explain",
    "nn": "mezzo.nn",
    "keras": "mezzo.keras",
    "tensorflow": "mezzo.tensorflow",
    "optim": "mezzo.optim",
    "keep_memory": "mezzo.pytorch.keep_memory",
    "lower_weights": "mezzo.pytorch.weights.stored_parameters",
    "master_state_dict": "mezzo.pytorch.weights.master_state",
    "load_master_state_dict": "mezzo.pytorch.weights.master_state",
}

# Name -> what to use in its place.
_REMOVED = {
    "StatisticalLossScale": "was removed in version 0.2: use mezzo.DynamicLossScale (loss_scale='dynamic')"
}
__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from mezzo import keras as keras
    from mezzo import nn as nn
    from mezzo import optim as optim
    from mezzo import tensorflow as tensorflow
    from mezzo.core import formats as formats
    from mezzo.core.errors import LossScaleCollapseError as LossScaleCollapseError
    from mezzo.core.loss_scale import DynamicLossScale as DynamicLossScale
    from mezzo.core.loss_scale import NoLossScale as NoLossScale
    from mezzo.core.loss_scale import StaticLossScale as StaticLossScale
    from mezzo.core.policy import Policy as Policy
    from mezzo.core.policy import policy as policy
    from mezzo.pytorch.autocast.context import autocast as autocast
    from mezzo.pytorch.batch_size import find_batch_size as find_batch_size
    from mezzo.pytorch.calibrate import calibrate as calibrate
    from mezzo.pytorch.grad_scaler import GradScaler as GradScaler
    from mezzo.pytorch.keep_memory import keep_memory as keep_memory
    from mezzo.pytorch.monitor.explain import explain as explain
    from mezzo.pytorch.monitor.tensorboard import TensorBoardWriter as TensorBoardWriter
    from mezzo.pytorch.training.mixed_precision import MixedPrecision as MixedPrecision
    from mezzo.pytorch.weights.master_state import load_master_state_dict as load_master_state_dict
    from mezzo.pytorch.weights.master_state import master_state_dict as master_state_dict
    from mezzo.pytorch.weights.stored_parameters import lower_weights as lower_weights

__getattr__, __dir__ = lazy("mezzo", _PUBLIC, removed=_REMOVED)
