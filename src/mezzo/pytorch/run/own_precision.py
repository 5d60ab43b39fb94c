"""`--own off`: where each library's mixed precision is switched off, so that a script trains in FP32 or under Mezzo.

Each switch acts on a setting before the library reads it. What was switched off is noted, once per setting.
`foreign.watch` still notices what is used in spite of this, and the run ends there.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from mezzo.core.errors import UsageError
from mezzo.core.records import SWITCHED_OFF
from mezzo.pytorch.run import foreign

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches


class Argument(NamedTuple):
    """An argument of a constructor that sets the precision."""

    module: str
    owner: str  # the class
    name: str
    off: str  # its value without mixed precision
    wide: tuple[object, ...]  # other values that use no 16 bits
    variable: str  # the environment variable that sets it, too


_TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_NO_LIGHTNING = (None, 32, 64, "32", "64", "32-true", "64-true")
ARGUMENTS = (
    Argument(
        "accelerate.accelerator", "Accelerator", "mixed_precision", "no", (None, "no"), "ACCELERATE_MIXED_PRECISION"
    ),
    *(
        Argument(module, owner, "precision", "32-true", _NO_LIGHTNING, variable)
        for owner, variable, modules in (
            ("Trainer", "PL_TRAINER_PRECISION", _TRAINERS),
            ("Fabric", "LT_PRECISION", ("lightning.fabric.fabric", "lightning_fabric.fabric")),
        )
        for module in modules
    ),
)  # fmt: skip
_FIELDS = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")  # fields of Transformers' TrainingArguments


def switch_off(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Switch off every setting below, as its library is imported."""
    imports.when("torch", lambda torch: _torch(session, patches, torch))
    for row in ARGUMENTS:
        imports.when(row.module, functools.partial(_argument, session, patches, row))
    imports.when("transformers.trainer", lambda module: _trainer(session, patches, module.Trainer))
    imports.when("transformers.modeling_utils", lambda module: _pretrained(session, patches, module))


def _switched(session: Session, what: str) -> None:
    session.journal.note(f"{SWITCHED_OFF}{what}")


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"--own off: this version has no {what}, so its mixed precision can't be switched off here. Switch it off in "
        "the script, or install a version that has it (accelerate>=1.10, transformers>=5.0, lightning>=2.6.4)."
    )


def _argument(session: Session, patches: Patches, row: Argument, module: Any) -> None:
    kind = getattr(module, row.owner)
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if row.name not in signature.parameters:
            session.fatal = error = _unknown(f"{row.owner}({row.name}=...)")
            raise error
        given = signature.bind(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        value = given.get(row.name)
        value = os.environ.get(row.variable) if value is None else value
        if value not in row.wide:
            _switched(session, f"{row.owner}({row.name}={value!r})")
            if row.variable in os.environ:
                os.environ[row.variable] = row.off
            names = [name for name in signature.parameters if name != "self"]
            kwargs = {**dict(zip(names, args)), **kwargs, row.name: row.off}
            args = ()
        if kwargs.get("plugins") is not None:
            kwargs["plugins"] = _other_plugins(session, row.owner, kwargs["plugins"])
        original(self, *args, **kwargs)

    patches.set(kind, "__init__", made)


def _other_plugins(session: Session, owner: str, plugins: Any) -> Any:
    """Lightning's plugins without those that set the precision."""
    listed = plugins if isinstance(plugins, list) else [plugins]
    kept = [one for one in listed if "Precision" not in {kind.__name__ for kind in type(one).__mro__}]
    if len(kept) == len(listed):
        return plugins
    for one in listed:
        if one not in kept:
            _switched(session, f"{owner}(plugins=[{type(one).__name__}])")
    return kept


def _trainer(session: Session, patches: Patches, trainer: Any) -> None:
    name = "create_accelerator_and_postprocess"
    original = getattr(trainer, name, None)

    def switched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if original is None:
            session.fatal = error = _unknown(f"Trainer.{name}")
            raise error
        settings = self.args
        for field in _FIELDS:
            if getattr(settings, field, False):
                _switched(session, f"{type(settings).__name__}({field}=True)")
                setattr(settings, field, False)
        settings.mixed_precision = "no"  # made from the fields above, and from Accelerate's variable
        return original(self, *args, **kwargs)

    patches.set(trainer, "__init__" if original is None else name, switched)


def _pretrained(session: Session, patches: Patches, module: Any) -> None:
    """Models of Transformers: `from_pretrained`, whose default is the checkpoint's format, and `from_config`."""
    import torch

    model = module.PreTrainedModel
    halves = {name: dtype for dtype in _halves() for name in (dtype, str(dtype).removeprefix("torch."))}

    def wrapped(name: str, default: Any) -> None:
        original = vars(model)[name].__func__

        @functools.wraps(original)
        def load(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
            stored = default(cls, source) if asked in (None, "auto") else asked
            if asked in (None, "auto") or asked in halves:
                kwargs.pop("torch_dtype", None)
                kwargs["dtype"] = torch.float32
            if stored in halves:
                short = str(halves[stored]).removeprefix("torch.")
                _switched(session, f"{cls.__name__} in {short}")
            return original(cls, source, *args, **kwargs)

        patches.set(model, name, classmethod(load))

    def of_checkpoint(cls: Any, source: Any) -> Any:
        with suppress(Exception):  # only for the note
            found, _ = cls.config_class.get_config_dict(source)
            return found.get("dtype", found.get("torch_dtype"))
        return None

    wrapped("from_pretrained", of_checkpoint)
    wrapped("_from_config", lambda cls, config: getattr(config, "dtype", None))


def _halves() -> tuple[Any, ...]:
    import torch

    return torch.bfloat16, torch.float16


def _torch(session: Session, patches: Patches, torch: Any) -> None:
    _autocast(session, patches, torch.amp.autocast)
    _scaler(session, patches, torch.amp.GradScaler)
    for name in ("half", "bfloat16"):
        patches.set(torch.nn.Module, name, _conversion(session, name, getattr(torch.nn.Module, name)))
    patches.set(torch.nn.Module, "to", _to(session, torch.nn.Module.to))
    default = torch.set_default_dtype

    @functools.wraps(default)
    def set_default_dtype(d: Any) -> None:
        if d in _halves():
            _switched(session, f"torch.set_default_dtype({d})")
        else:
            default(d)

    patches.set(torch, "set_default_dtype", set_default_dtype)


def _autocast(session: Session, patches: Patches, autocast: Any) -> None:
    """A context that the script enables changes nothing: Mezzo's policy may be on around it."""
    init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

    @functools.wraps(init)
    def made(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        # Dynamo makes an `_UnmanagedAutocast` of a context in a compiled function.
        off = enabled and (
            "Unmanaged" in type(self).__name__ or foreign.user_line(2, {"__init__"}) is not None
        )
        init(self, device_type, dtype, enabled and not off, cache_enabled)
        self._mezzo_off = off
        if off:
            _switched(session, f"torch.autocast {str(self.fast_dtype).removeprefix('torch.')}")

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        return self if getattr(self, "_mezzo_off", False) else enter(self)

    @functools.wraps(leave)
    def left(self: Any, *exc_info: Any) -> Any:
        return None if getattr(self, "_mezzo_off", False) else leave(self, *exc_info)

    for name, function in (("__init__", made), ("__enter__", entered), ("__exit__", left)):
        patches.set(autocast, name, function)


def _scaler(session: Session, patches: Patches, scaler: Any) -> None:
    original = scaler.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        if given.arguments["enabled"] and not type(self).__module__.startswith("mezzo."):
            _switched(session, "GradScaler")
            given.arguments["enabled"] = False
        original(*given.args, **given.kwargs)

    patches.set(scaler, "__init__", made)


def trains(module: Any) -> bool:
    """Whether a module has parameters to train: a frozen one keeps its format."""
    return any(p.requires_grad and p.is_floating_point() for p in module.parameters())


def _conversion(session: Session, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def convert(self: Any) -> Any:
        if not trains(self):
            return original(self)
        _switched(session, f"{type(self).__name__}.{name}()")
        return self

    return convert


def _to(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        halves = _halves()
        low = [
            one for one in (*args, *kwargs.values()) if one in halves or getattr(one, "dtype", None) in halves
        ]
        if not low or not trains(self):
            return original(self, *args, **kwargs)
        dtype = getattr(low[0], "dtype", low[0])
        _switched(session, f"{type(self).__name__}.to({dtype})")
        args = tuple(getattr(one, "device", one) for one in args if one not in halves)  # a tensor: its device
        kwargs = {key: getattr(one, "device", one) for key, one in kwargs.items() if one not in halves}
        if "tensor" in kwargs:
            kwargs["device"] = kwargs.pop("tensor")
        return original(self, *args, **kwargs) if args or kwargs else self

    return to
