"""A script that uses mixed precision itself, in its own code, is left alone. Importing it is not using it.

`--own off` switches it off instead, so that the script trains in FP32 or under Mezzo. Accelerate, Transformers and
Lightning make theirs of PyTorch's autocast, GradScaler, default dtype and conversions of models, which do nothing then,
nor do Mezzo's own. What was switched off is noted, once per setting. What is used in spite of this ends the run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import ContextDecorator, nullcontext
from typing import TYPE_CHECKING, Any

from mezzo.core.policy import policy
from mezzo.core.records import SWITCHED_OFF
from mezzo.pytorch.run.summary import for_keras

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

SWITCH_OFF = "to use Mezzo instead, switch the script's own mixed precision off: its option, or enabled=False"

_LOW = ("params", "masters", "state", "weights", "loss_scale", "release_gradients")  # of MixedPrecision

# Functions of PyTorch's that act for their caller.
_TRANSPARENT = frozenset({"decorate_autocast", "watched", "scale", "<genexpr>", "apply_scale"})

# Module, what is called in it, and its name for the user (default: the module's).
_USES = (
    ("torch", "amp.autocast.__enter__", "torch.autocast"),
    ("torch", "amp.GradScaler.scale", "GradScaler"),
    ("deepspeed", "initialize", ""),
    ("apex.amp", "initialize", ""),
    ("mezzo.apex.amp", "initialize", ""),
    ("transformer_engine.pytorch", "fp8_autocast", ""),
    ("torchao.float8", "convert_to_float8_training", ""),
    ("mezzo.lightning", "precision", "mezzo.lightning.precision"),
    ("mezzo.transformers", "use", ""),
    ("mezzo.accelerate", "attach", ""),
    ("mezzo.accelerate", "Accelerator.__init__", ""),
    ("mezzo.pytorch.grad_scaler", "GradScaler.scale", "mezzo.GradScaler"),
)


def _is_on(*called: Any) -> bool:
    """Whether it is a use to call a method of an object, or a function: not that of a context or scaler that is off."""
    return bool(getattr(called[0] if called else None, "_enabled", True))


def watch(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Notice the first use of PyTorch's mixed precision, of another library's, or of Mezzo's."""

    def noticed(path: str, what: str, module: Any) -> None:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, module)
        if hasattr(owner, name):  # else another version's
            patches.set(owner, name, _noticed(session, getattr(owner, name), what or module.__name__))

    def fit(*args: Any) -> bool:
        if session.request.stop_after is not None or session.request.seed_offset is not None:
            if not session.journal.updates:
                session.journal.stop_after(0)
        elif "mezzo.keras" not in sys.modules:
            for line in for_keras(session):
                session.journal.note(line)
        return False

    def torch_imported(torch: Any) -> None:
        import mezzo

        autocast = importlib.import_module("mezzo.pytorch.autocast.context").autocast
        patches.set(mezzo, "autocast", _autocast(session, autocast))
        for name in ("set_autocast_enabled", "set_autocast_cpu_enabled"):
            patches.set(torch, name, _switch(session, getattr(torch, name), f"torch.{name}"))
        for name in ("calibrate", "find_batch_size"):  # which choose formats themselves
            patches.set(mezzo, name, _noticed(session, _imported(mezzo._PUBLIC[name], name), f"mezzo.{name}"))

    def keras_imported(keras: Any) -> None:
        if hasattr(keras, "Model"):
            patches.set(keras.Model, "fit", _noticed(session, keras.Model.fit, "fit", fit))

    def fsdp_imported(fsdp: Any) -> None:
        init = fsdp.MixedPrecisionPolicy.__init__

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if not session.mp_policy and _is_half(self.param_dtype) and (where := user_line(2)):
                session.mp_policy = f" ({where})"

        patches.set(fsdp.MixedPrecisionPolicy, "__init__", made)

    def mixed_imported(module: Any) -> None:  # one that asks for 16 bits is noticed, or made to train in FP32
        init = module.MixedPrecision.__init__

        def made(self: Any, model: Any, optimizer: Any, precision: Any = "auto", **given: Any) -> None:
            if any(given.get(name) for name in _LOW) or not policy(precision).is_fp32:
                if session.request.own == "off":
                    low = [f"{name}={given.pop(name)}" for name in _LOW if given.get(name)]
                    switched_off(session, f"mezzo.MixedPrecision({', '.join([str(precision), *low])})")
                    precision = "fp32"
                elif session.left_alone is None and (where := user_line(2)) is not None:
                    stand_back(session, "mezzo.MixedPrecision", where)
            init(self, model, optimizer, precision, **given)

        patches.set(module.MixedPrecision, "__init__", made)

    for name, path, what in _USES:
        imports.when(name, functools.partial(noticed, path, what))
    imports.when("torch", torch_imported)
    imports.when("torch.distributed.fsdp", fsdp_imported)
    imports.when("mezzo.amp", lambda amp: patches.set(amp, "autocast", _autocast(session, amp.autocast)))
    imports.when("keras", keras_imported)
    imports.when("mezzo.pytorch.training.mixed_precision", mixed_imported)


def _noticed(session: Session, original: Any, name: str, is_used: Callable[..., bool] = _is_on) -> Any:
    """This function, after whose first call with an object that `is_used` the script is left alone."""
    seen = False

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        is_on = session.left_alone is None and not seen and kwargs.get("enabled", True)
        if is_on and is_used(*args[:1]):
            seen = _notice(session, name) and session.records_own
        return original(*args, **kwargs)

    watched._torchdynamo_disable = True  # type: ignore[attr-defined]
    return watched


def _switch(session: Session, original: Any, name: str) -> Any:
    """A function that sets autocast's switch: to switch it on is noticed, or not done. Mezzo's contexts may do it."""
    from mezzo.pytorch.autocast import active_policy

    @functools.wraps(original)
    def switched(*args: Any, **kwargs: Any) -> Any:
        is_on = True in (*args, kwargs.get("enabled")) and not active_policy.label()
        if is_on and (where := user_line(2)) is not None:
            if session.request.own == "off":
                return switched_off(session, name)
            if session.left_alone is None:
                stand_back(session, name, where)
        return original(*args, **kwargs)

    return switched


def _imported(home: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is called."""
    return lambda *args, **kwargs: getattr(importlib.import_module(home), name)(*args, **kwargs)


class _Unchanged(ContextDecorator, nullcontext[None]):
    """Instead of a `mezzo.autocast` of the script: the run's policy stays on inside."""


def _autocast(session: Session, autocast: Any) -> Any:
    """The `mezzo.autocast` of a run: noticed, or off; in a compiled function when Dynamo traces it."""
    from mezzo.pytorch.kernels.not_traced import not_traced

    torch: Any = sys.modules["torch"]
    compiling, own = torch.compiler.is_dynamo_compiling, session.request.own

    def notice_at_trace_time(_: Any) -> None:
        stack = torch._guards.TracingContext.extract_stack()
        line = next(frame for frame in reversed(stack) if frame.filename != __file__)
        where = f"{os.path.basename(line.filename)} line {line.lineno}"
        if own == "off":
            switched_off(session, "mezzo.autocast in a compiled function")
        elif own != "keep":
            stand_back(session, "mezzo.autocast", where)
        else:  # to be left alone would change what the graph's guards check
            why = f"it uses mezzo.autocast in a compiled function ({where})"
            session.journal.note(f"not left alone, though {why}: there its own precision applies")

    @not_traced
    @functools.wraps(autocast)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            if "fp32" in args or not kwargs.get("enabled", True):
                return autocast(*args, **kwargs)
            from torch._dynamo.comptime import comptime

            comptime(notice_at_trace_time)
            return nullcontext() if own == "off" else autocast(*args, **kwargs)
        made = autocast(*args, **kwargs)
        if made.policy is not None and own == "off":
            switched_off(session, f"mezzo.autocast {made.policy}")
            return _Unchanged()
        if made.policy is not None and session.left_alone is None:
            _notice(session, "mezzo.autocast")
        return made

    return watched


def switched_off(session: Session, what: str) -> None:
    """Note a setting of the script that `--own off` has switched off."""
    session.journal.note(f"{SWITCHED_OFF}{what}")


def _notice(session: Session, name: str) -> bool:
    """Leave the script alone if the caller of the patched function is the script's or a library's code."""
    if (where := user_line(3)) is not None:
        stand_back(session, name, where)
    return where is not None


def user_line(depth: int, transparent: Collection[str] = ()) -> str | None:
    """The line of the script or of a library that called, through functions of PyTorch's that act for their caller.

    None if Mezzo or PyTorch itself called. `depth` counts callers: 1 is that of the caller of this function.
    """
    called = ""  # a library's line, below which the script's is searched
    for frame, line in itertools.islice(traceback.walk_stack(inspect.currentframe()), depth, None):
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        package = module.partition(".")[0]
        here = f"{os.path.basename(frame.f_code.co_filename)} line {line}"
        if module == "__main__" or (package in ("", "__mp_main__") and not called):
            return f"{here}, through {called}" if called else here
        acts_for_caller = package == "torch" and (name in _TRANSPARENT or name in transparent)
        if not called and not acts_for_caller:
            if package in ("mezzo", "torch"):
                return None
            called = f"{package}, {here}"
    return called or None


def stand_back(session: Session, name: str, where: str) -> None:
    """Leave the script alone, with what to do about this use at this line."""
    fix = session.without_own if name.startswith(("torch.", "GradScaler")) else SWITCH_OFF
    if name == "mezzo.apex.amp" and session.request.apex:
        if session.request.policy == "auto":  # else every call of amp does nothing
            session.stand_back(f"it uses apex.amp itself ({where})", f"another: {session.command('bf16')}")
        return
    if name.startswith("mezzo."):
        request = session.request
        given = [f"{key}= instead of --{key}" for key in ("watch", "records") if getattr(request, key)]
        options = f" (and {', '.join(given)})" if given and "Mixed" in name else ""
        fix = f"to choose the precision, edit that line{options}, or remove {name} and use mezzo run"
        if request.own in ("off", "refuse"):  # a comparison
            fix = f"remove {name}, or put it behind an option of the script: this command sets the precision itself"
    session.stand_back(f"it uses {name} itself ({where})", fix)


def switch_off(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Switch off what sets a precision, as PyTorch and Lightning are imported."""

    def keep_inputs(plugin: str, module: Any) -> None:  # Lightning's plugins round a model's inputs, too
        patches.set(getattr(module, plugin), "convert_input", lambda self, data: data)

    imports.when("torch", functools.partial(_torch_off, session, patches))
    imports.when("mezzo.pytorch.grad_scaler", functools.partial(_mezzo_scaler_off, session, patches))
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        for file, plugin in (("amp", "MixedPrecision"), ("half", "HalfPrecision")):
            imports.when(f"{package}.plugins.precision.{file}", functools.partial(keep_inputs, plugin))


def _mezzo_scaler_off(session: Session, patches: Patches, module: Any) -> None:
    begin = module.GradScaler._begin

    def off(self: Any, device: Any, enabled: bool, pure: Any) -> None:
        if enabled:
            switched_off(session, "mezzo.GradScaler")
        begin(self, device, False, pure)

    patches.set(module.GradScaler, "_begin", off)


def _torch_off(session: Session, patches: Patches, torch: Any) -> None:
    import mezzo

    default = torch.set_default_dtype

    @functools.wraps(default)
    def set_default_dtype(d: Any) -> None:
        if _is_half(d):
            package = sys._getframe(1).f_globals.get("__name__", "__main__").partition(".")[0]
            by = "" if package == "__main__" else f" by {package}"
            switched_off(session, f"torch.set_default_dtype({d}){by}")
        else:
            default(d)

    def lower_weights(model: Any, *_: Any, **__: Any) -> list[str]:
        switched_off(session, f"mezzo.lower_weights({type(model).__name__})")
        return []

    patches.set(mezzo, "lower_weights", lower_weights)
    patches.set(torch, "set_default_dtype", set_default_dtype)
    patches.set(torch.amp.autocast, "__init__", _autocast_off(session, torch.amp.autocast))
    patches.set(torch.amp.GradScaler, "__init__", _scaler_off(session, torch.amp.GradScaler.__init__))
    patches.set(torch.nn.Module, "_apply", _conversion_off(session, torch.nn.Module._apply))


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_half(dtype: Any) -> bool:
    return _short(dtype) in ("bfloat16", "float16")


def _autocast_off(session: Session, autocast: Any) -> Any:
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
            theirs = user_line(2, {"__init__"}) is not None
        init(self, device_type, dtype, enabled and not theirs, cache_enabled)
        if enabled and theirs:
            self.__class__ = off
            switched_off(session, f"torch.autocast {_short(self.fast_dtype)}")

    return made


def _scaler_off(session: Session, init: Any) -> Any:
    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self._enabled and not type(self).__module__.startswith("mezzo."):
            self._enabled = False
            switched_off(session, "GradScaler")

    return made


def _conversion_off(session: Session, apply: Any) -> Any:
    """`half()`, `bfloat16()` and `to()` of modules all call `_apply`. Without trained parameters they convert."""
    from mezzo.pytorch.run.weights import trains

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
            switched_off(session, f"{type(self).__name__} in {_short(dtype)}")
        return result

    return applied
