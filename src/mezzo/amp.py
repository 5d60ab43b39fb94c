"""The names of `torch.amp`: change `from torch.amp import autocast, GradScaler` to `from mezzo.amp import ...`.

`GradScaler` is `mezzo.GradScaler`, and `autocast` is `mezzo.autocast`, which also takes the arguments of
`torch.cuda.amp.autocast`. The others are PyTorch's own. docs/torch-amp.md lists the differences.
"""

from __future__ import annotations

from typing import Any

from torch.amp import custom_bwd, custom_fwd, is_autocast_available

from mezzo.pytorch.autocast import context
from mezzo.pytorch.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]


def autocast(*args: Any, **kwargs: Any) -> context.Context:
    """`mezzo.autocast` with the arguments of `torch.amp.autocast`, or of `torch.cuda.amp.autocast` (no device type).

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ... Without it: the accelerator of this computer, or ``"cpu"``.
        dtype: a torch dtype, its name, or a policy. Default: `torch.get_autocast_dtype` of the device type.
        enabled: False for a context without autocast. `torch.cuda.amp` has it first: ``autocast(use_amp)``.
        cache_enabled: as in `mezzo.autocast`, whose errors it raises.
    """
    has_device = not isinstance(args[0], bool) if args else bool(kwargs.keys() & {"device_type", "policy"})
    return context.autocast(*args, **kwargs) if has_device else _without_device(*args, **kwargs)


def _without_device(
    enabled: bool = True, dtype: Any = None, cache_enabled: bool | None = None, **unknown: Any
) -> context.Context:
    device_type = context.default_device_type()
    return context.autocast(None, device_type, enabled, cache_enabled, dtype=dtype, **unknown)
