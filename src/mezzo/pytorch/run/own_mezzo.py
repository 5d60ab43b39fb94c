"""Mezzo's own objects in a script of a run: noticed, switched off (`--own off`), or recorded as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mezzo.core.policy import policy
from mezzo.pytorch.run import foreign

if TYPE_CHECKING:
    from mezzo.pytorch.run.optimizers import Steps
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

_SCALER, _MIXED = "mezzo.pytorch.grad_scaler", "mezzo.pytorch.training.mixed_precision"
_LOW = ("params", "masters", "state", "weights", "loss_scale", "release_gradients")  # of MixedPrecision


def watch(session: Session, patches: Patches, imports: ImportWatch) -> None:
    """Notice a `MixedPrecision` that asks for 16 bits, or make it train in FP32."""

    def imported(module: Any) -> None:
        init = module.MixedPrecision.__init__

        def made(self: Any, model: Any, optimizer: Any, precision: Any = "auto", **given: Any) -> None:
            if any(given.get(name) for name in _LOW) or not policy(precision).is_fp32:
                if session.request.own == "off":
                    low = [f"{name}={given.pop(name)}" for name in _LOW if given.get(name)]
                    foreign.switched_off(
                        session, f"mezzo.MixedPrecision({', '.join([str(precision), *low])})"
                    )
                    precision = "fp32"
                elif session.left_alone is None and (where := foreign.user_line(2)) is not None:
                    foreign.stand_back(session, "mezzo.MixedPrecision", where)
            init(self, model, optimizer, precision, **given)

        patches.set(module.MixedPrecision, "__init__", made)

    imports.when(_MIXED, imported)
    if session.request.own == "off":
        _switch_off(session, patches, imports)


def _switch_off(session: Session, patches: Patches, imports: ImportWatch) -> None:
    def torch_imported(_: Any) -> None:
        import mezzo

        def lower_weights(model: Any, *_: Any, **__: Any) -> list[str]:
            foreign.switched_off(session, f"mezzo.lower_weights({type(model).__name__})")
            return []

        patches.set(mezzo, "lower_weights", lower_weights)

    def scaler_imported(module: Any) -> None:
        begin = module.GradScaler._begin

        def off(self: Any, device: Any, enabled: bool, pure: Any) -> None:
            if enabled:
                foreign.switched_off(session, "mezzo.GradScaler")
            begin(self, device, False, pure)

        patches.set(module.GradScaler, "_begin", off)

    imports.when("torch", torch_imported)
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
