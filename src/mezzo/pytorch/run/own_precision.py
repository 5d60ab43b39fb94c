"""`--own off`: a script's mixed precision is switched off, so that it trains in FP32 or under Mezzo.

Accelerate, Transformers and Lightning make theirs of PyTorch's autocast, GradScaler, default dtype and conversions of
models, which do nothing here. What was switched off is noted, once per setting. `foreign.watch` still notices what is
used in spite of this, and the run ends there.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mezzo.pytorch.run import foreign

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

_LIGHTNING = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")


def switch_off(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Switch off what sets a precision, as PyTorch and Lightning are imported."""
    imports.when("torch", functools.partial(_torch, session, patches))
    for package in _LIGHTNING:
        for file, plugin in (("amp", "MixedPrecision"), ("half", "HalfPrecision")):
            convert = functools.partial(_keep_inputs, patches, plugin)
            imports.when(f"{package}.plugins.precision.{file}", convert)


def _torch(session: Session, patches: Patches, torch: Any) -> None:
    default = torch.set_default_dtype

    @functools.wraps(default)
    def set_default_dtype(d: Any) -> None:
        if _is_half(d):
            package = sys._getframe(1).f_globals.get("__name__", "__main__").partition(".")[0]
            by = "" if package == "__main__" else f" by {package}"
            foreign.switched_off(session, f"torch.set_default_dtype({d}){by}")
        else:
            default(d)

    patches.set(torch, "set_default_dtype", set_default_dtype)
    patches.set(torch.amp.autocast, "__init__", _autocast(session, torch.amp.autocast))
    patches.set(torch.amp.GradScaler, "__init__", _scaler(session, torch.amp.GradScaler.__init__))
    patches.set(torch.nn.Module, "_apply", _conversion(session, torch.nn.Module._apply))


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_half(dtype: Any) -> bool:
    return _short(dtype) in ("bfloat16", "float16")


def _autocast(session: Session, autocast: Any) -> Any:
    """A context that the script or a library enables changes nothing: Mezzo's policy may be on around it."""
    from mezzo.pytorch.autocast import active_policy

    init = autocast.__init__
    nothing = {"__enter__": lambda self: self, "__exit__": lambda self, *exc_info: None}
    off = type(autocast.__name__, (autocast,), nothing)

    @functools.wraps(init)
    def made(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        # Dynamo makes an `_UnmanagedAutocast` of a context in a compiled function, also of Mezzo's.
        if "Unmanaged" in type(self).__name__:
            theirs = not active_policy.belongs(device_type, dtype)
        else:
            theirs = foreign.user_line(2, {"__init__"}) is not None
        init(self, device_type, dtype, enabled and not theirs, cache_enabled)
        if enabled and theirs:
            self.__class__ = off
            foreign.switched_off(session, f"torch.autocast {_short(self.fast_dtype)}")

    return made


def _scaler(session: Session, init: Any) -> Any:
    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self._enabled and not type(self).__module__.startswith("mezzo."):
            self._enabled = False
            foreign.switched_off(session, "GradScaler")

    return made


def _conversion(session: Session, apply: Any) -> Any:
    """`half()`, `bfloat16()` and `to()` of modules all call `_apply`. Without trained parameters they convert."""
    from mezzo.pytorch.run.own_weights import trains

    @functools.wraps(apply)
    def applied(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(fn, "_mezzo_dtypes") or not trains(self):
            return apply(self, fn, *args, **kwargs)
        dtypes: set[Any] = set()

        def wide(tensor: Any) -> Any:
            result = fn(tensor)
            if not _is_half(result.dtype) or _is_half(tensor.dtype):
                return result
            dtypes.add(result.dtype)
            return tensor.to(result.device)

        wide._mezzo_dtypes = dtypes  # type: ignore[attr-defined]  # the parts of this module are called with it, too
        result = apply(self, wide, *args, **kwargs)
        for dtype in dtypes:
            foreign.switched_off(session, f"{type(self).__name__} in {_short(dtype)}")
        return result

    return applied


def _keep_inputs(patches: Patches, plugin: str, module: Any) -> None:
    """Lightning's plugins round a model's inputs, too."""
    patches.set(getattr(module, plugin), "convert_input", lambda self, data: data)
