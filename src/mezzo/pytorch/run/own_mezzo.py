"""Mezzo's own objects in a script of a run: noticed, switched off (`--own off`), or recorded as they are."""

from __future__ import annotations

import sys
from contextlib import ContextDecorator, nullcontext
from typing import TYPE_CHECKING, Any

from mezzo.core.policy import policy
from mezzo.core.records import SWITCHED_OFF
from mezzo.pytorch.run import foreign

if TYPE_CHECKING:
    from mezzo.pytorch.run.optimizers import Steps
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

_SCALER, _MIXED = "mezzo.pytorch.grad_scaler", "mezzo.pytorch.training.mixed_precision"
_LOW = ("params", "masters", "state", "weights", "loss_scale", "release_gradients")  # of MixedPrecision


class _Unchanged(ContextDecorator, nullcontext[None]):
    """Instead of a `mezzo.autocast` of the script: the run's policy stays on inside."""


def watch(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Notice a `MixedPrecision` that asks for 16 bits, or make it train in FP32."""

    def imported(module: Any) -> None:
        init = module.MixedPrecision.__init__

        def made(self: Any, model: Any, optimizer: Any, precision: Any = "auto", **given: Any) -> None:
            if any(given.get(name) for name in _LOW) or not policy(precision).is_fp32:
                if session.request.own == "off":
                    low = [f"{name}={given.pop(name)}" for name in _LOW if given.get(name)]
                    _switched(session, f"mezzo.MixedPrecision({', '.join([str(precision), *low])})")
                    precision = "fp32"
                elif session.left_alone is None and (where := foreign.user_line(2)) is not None:
                    foreign.stand_back(session, "mezzo.MixedPrecision", where)
            init(self, model, optimizer, precision, **given)

        patches.set(module.MixedPrecision, "__init__", made)

    imports.when(_MIXED, imported)
    if session.request.own == "off":
        _switch_off(session, patches, imports)


def _switched(session: Session, what: str) -> None:
    session.journal.note(f"{SWITCHED_OFF}{what}")


def _switch_off(session: Session, patches: Patches, imports: ImportWatch) -> None:
    def switched(_: Any) -> None:
        _switched(session, "mezzo.autocast in a compiled function")

    def without_autocast(module: Any, autocast: Any) -> None:
        def off(*args: Any, **kwargs: Any) -> Any:
            if sys.modules["torch"].compiler.is_dynamo_compiling():
                if foreign.is_off(args, kwargs):
                    return autocast(*args, **kwargs)
                foreign.at_trace_time(switched)
                return nullcontext()
            made = autocast(*args, **kwargs)
            if made.policy is None:
                return made
            _switched(session, f"mezzo.autocast {made.policy}")
            return _Unchanged()

        patches.set(module, "autocast", off)

    def torch_imported(_: Any) -> None:
        import mezzo
        from mezzo.pytorch.autocast.context import autocast

        def lower_weights(model: Any, *_: Any, **__: Any) -> list[str]:
            _switched(session, f"mezzo.lower_weights({type(model).__name__})")
            return []

        without_autocast(mezzo, autocast)
        patches.set(mezzo, "lower_weights", lower_weights)

    def scaler_imported(module: Any) -> None:
        begin = module.GradScaler._begin

        def off(self: Any, device: Any, enabled: bool, pure: Any) -> None:
            if enabled:
                _switched(session, "mezzo.GradScaler")
            begin(self, device, False, pure)

        patches.set(module.GradScaler, "_begin", off)

    imports.when("torch", torch_imported)
    imports.when("mezzo.amp", lambda amp: without_autocast(amp, amp.autocast))
    imports.when(_SCALER, scaler_imported)


def record(steps: Steps, patches: Patches, imports: ImportWatch) -> None:
    """Record the losses of `mezzo.GradScaler` and `mezzo.MixedPrecision` unscaled, and the steps that they end."""
    from mezzo.pytorch.run import own_recording

    def precision_imported(module: Any) -> None:
        window, kind = module.Accumulation, module.MixedPrecision
        seed, end = window.seed, kind._end_window

        def seeded(self: Any, loss: Any) -> Any:
            if self.scale is not None and loss.grad_fn is not None:
                loss.grad_fn.metadata[own_recording.KEY] = self.scale
            return seed(self, loss)

        def ended(self: Any, *args: Any) -> Any:
            before, scale = steps.done, self._window.scale
            steps.loss_scale = 1.0 if scale is None else float(scale)
            result = end(self, *args)
            if steps.done == before:  # skipped, or taken inside backward
                steps.ended_by_script(self.optimizer, moved=result.stepped)
            steps.loss_scale = 1.0
            return result

        patches.set(window, "seed", seeded)
        patches.set(kind, "_end_window", ended)

    imports.when(_SCALER, lambda module: own_recording.record_scaler(steps, patches, module.GradScaler))
    imports.when(_MIXED, precision_imported)
