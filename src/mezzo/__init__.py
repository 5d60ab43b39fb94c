"""Mixed precision training for PyTorch, Keras and TensorFlow, compared with FP32 on your own script.

Without changing a script, in a shell::

    mezzo doctor                                # which precisions are fast on this machine
    mezzo compare train.py --precision bf16     # train in FP32 and in bf16; compare loss, metric, time and memory
    mezzo run --precision bf16 train.py         # train in bf16

In your own training loop::

    import mezzo

    mp = mezzo.MixedPrecision(model, optimizer, "bf16", clip_norm=1.0)
    for x, y in loader:
        with mp.autocast():
            loss = loss_fn(model(x), y)
        mp.step(loss)  # backward, unscale, clip, step or skip, zero_grad

From torch.amp: write `from mezzo.amp import autocast, GradScaler` instead of `from torch.amp import ...`. In Keras,
call `mezzo.keras.set_policy("bf16")` before the model is built. Its names::

    train                        MixedPrecision, autocast, GradScaler, keras, tensorflow
    choose what stays in FP32    policy, Policy, explain, calibrate
    set the loss scale           DynamicLossScale, StaticLossScale
    save memory                  optim, nn, lower_weights, find_batch_size, keep_memory
    save and load FP32 weights   master_state_dict, load_master_state_dict
    look inside                  formats, TensorBoardWriter
    in other libraries           amp (torch.amp), apex, transformers, accelerate, lightning

`help(mezzo.MixedPrecision)` shows the code that it replaces. `import mezzo` alone imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.core.lazy import lazy
from mezzo.core.version import VERSION

__version__ = VERSION

# Module -> the public names that are in it, or the one that it is.
_MODULES = {
    "pytorch.autocast.context": "autocast",
    "pytorch.grad_scaler": "GradScaler",
    "pytorch.training.mixed_precision": "MixedPrecision",
    "core.policy": "Policy policy",
    "core.loss_scale": "StaticLossScale DynamicLossScale",
    "pytorch.monitor.tensorboard": "TensorBoardWriter",
    "core.formats": "formats",
    "pytorch.calibrate": "calibrate",
    "pytorch.batch_size": "find_batch_size BatchSizeResult",
    "pytorch.monitor.explain": "explain Explanation",
    **{name: name for name in ("nn", "keras", "tensorflow", "optim")},
    "pytorch.keep_memory": "keep_memory",
    "pytorch.weights.stored_parameters": "lower_weights",
    "pytorch.weights.master_state": "master_state_dict load_master_state_dict",
    "pytorch.training.result": "StepResult",
    "core.overflow": "OverflowReport",
    "core.calibration": "Recommendation",
    "core.errors": "BannedOpError CallOrderError LossScaleCollapseError MezzoError UnknownArgumentError "
    "UnknownNameError UnsupportedPrecisionError UsageError",
}
_PUBLIC = {name: f"mezzo.{module}" for module, names in _MODULES.items() for name in names.split()}

# Modules for other libraries: `import mezzo` and `mezzo.lightning` are enough, and `dir(mezzo)` does not list them.
_INTEGRATIONS = {name: f"mezzo.{name}" for name in ("accelerate", "amp", "apex", "lightning", "transformers")}

# Name -> the module that it is in, and what to use instead.
_MOVED = {"NoLossScale": ("mezzo.core.loss_scale", "loss_scale='none'")}
_COMMANDS = ("run", "compare", "doctor", "report")
# Name -> what to use instead.
_REMOVED = {
    "StatisticalLossScale": "was removed in version 0.2: use mezzo.DynamicLossScale (loss_scale='dynamic')",
    **{verb: f"is a command. In a shell: mezzo {verb} --help" for verb in _COMMANDS},
}
__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from mezzo import keras as keras
    from mezzo import nn as nn
    from mezzo import optim as optim
    from mezzo import tensorflow as tensorflow
    from mezzo.core import formats as formats
    from mezzo.core.calibration import Recommendation as Recommendation
    from mezzo.core.errors import BannedOpError as BannedOpError
    from mezzo.core.errors import CallOrderError as CallOrderError
    from mezzo.core.errors import LossScaleCollapseError as LossScaleCollapseError
    from mezzo.core.errors import MezzoError as MezzoError
    from mezzo.core.errors import UnknownArgumentError as UnknownArgumentError
    from mezzo.core.errors import UnknownNameError as UnknownNameError
    from mezzo.core.errors import UnsupportedPrecisionError as UnsupportedPrecisionError
    from mezzo.core.errors import UsageError as UsageError
    from mezzo.core.loss_scale import DynamicLossScale as DynamicLossScale
    from mezzo.core.loss_scale import StaticLossScale as StaticLossScale
    from mezzo.core.overflow import OverflowReport as OverflowReport
    from mezzo.core.policy import Policy as Policy
    from mezzo.core.policy import policy as policy
    from mezzo.pytorch.autocast.context import autocast as autocast
    from mezzo.pytorch.batch_size import BatchSizeResult as BatchSizeResult
    from mezzo.pytorch.batch_size import find_batch_size as find_batch_size
    from mezzo.pytorch.calibrate import calibrate as calibrate
    from mezzo.pytorch.grad_scaler import GradScaler as GradScaler
    from mezzo.pytorch.keep_memory import keep_memory as keep_memory
    from mezzo.pytorch.monitor.explain import Explanation as Explanation
    from mezzo.pytorch.monitor.explain import explain as explain
    from mezzo.pytorch.monitor.tensorboard import TensorBoardWriter as TensorBoardWriter
    from mezzo.pytorch.training.mixed_precision import MixedPrecision as MixedPrecision
    from mezzo.pytorch.training.result import StepResult as StepResult
    from mezzo.pytorch.weights.master_state import load_master_state_dict as load_master_state_dict
    from mezzo.pytorch.weights.master_state import master_state_dict as master_state_dict
    from mezzo.pytorch.weights.stored_parameters import lower_weights as lower_weights

__getattr__, __dir__ = lazy("mezzo", _PUBLIC | _INTEGRATIONS, removed=_REMOVED, moved=_MOVED)


def load_ipython_extension(shell: object) -> None:
    """Answer ``%load_ext mezzo``: there is nothing to load."""
    print(
        "Mezzo has no magic commands: write `import mezzo` in a cell. A command starts with !: !mezzo doctor"
    )
