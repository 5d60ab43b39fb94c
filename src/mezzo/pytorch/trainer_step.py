"""TrainerStep: a policy and a loss scale in the loop of another library (Lightning, Accelerate, Transformers).

The library calls the models, backward and the optimizers; its integration calls a method of TrainerStep at each of
these points. Together they do what `MixedPrecision.step` does, with the numbers of `mezzo.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale
from mezzo.core.overflow import OverflowReport
from mezzo.core.policy import policy as policy_of
from mezzo.core.policy_text import as_loss_scale, print_loss_scale
from mezzo.pytorch import auto
from mezzo.pytorch.autocast.modules import fitting
from mezzo.pytorch.grad_scaler import GradScaler
from mezzo.pytorch.monitor.overflow_tracer import OverflowTracer
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training import cast_parameters
from mezzo.pytorch.training.backward import leaves_of
from mezzo.pytorch.training.networks import Networks
from mezzo.pytorch.training.observers import Observers
from mezzo.pytorch.weights.stored_parameters import lower_weights

_MOVING = ("_scale", "_growth_tracker", "_overflows", "_stuck")


class TrainerStep:
    """The base class of integrations: `policy`, and `scaler`, which is None without a loss scale.

    `skipped_steps` counts them, and `findings` has the last hundred reports on them.
    """

    def __init__(
        self,
        written: str,
        device_type: str,
        policy: Any,
        *,
        loss_scale: LossScale | float | str | None,
        trace: bool | None,
        **storage: str | None,
    ) -> None:
        """Check the arguments, which are `MixedPrecision`'s. `written`: the user's call, with {!r} for the policy."""
        self.where = written.partition("(")[0]
        asked, _ = cast_parameters.stored(
            policy_of(policy), device_type=device_type, where=self.where, **storage
        )
        if asked.reduce != "fp32":
            fix = f'after wrapping: mezzo.pytorch.reduction.average_in(ddp_model, "{asked.reduce}")'
            raise UsageError(
                f"{self.where}: reduce= does not reach the trainer's wrapper. Remove it, and call {fix}"
            )
        self.policy, _ = auto.resolve(asked, device_type)
        pure = as_loss_scale(loss_scale, self.where) or self.policy.make_loss_scale()
        self._scaling = pure
        self.scaler = None if isinstance(pure, NoLossScale) else GradScaler.of(pure)
        self.skipped_steps = 0
        self.findings: list[OverflowReport] = []
        self.networks = Networks()
        self.observing = Observers([], [])
        self.steps = 0
        # Of the last `update`: how many losses had been scaled; the loss scale before; the checks of steps since then.
        self._updated: tuple[int, dict[str, Any], dict[int, dict[str, Any]]] = (-1, {}, {})
        self._trace, self._written = trace, written
        text = print_loss_scale(loss_scale) if isinstance(loss_scale, LossScale) else loss_scale
        self._given = {**storage, "loss_scale": text, "trace": trace}

    def _call(self, policy: str) -> str:
        """The user's call with another policy. It has the other arguments, except those that the policy replaces."""
        kept = [name for name, one in self._given.items() if one is not None and f"{name}=" not in policy]
        rest = "".join(f", {name}={self._given[name]!r}" for name in kept if name != "params")
        return f"{self._written.format(policy).removesuffix(')')}{rest})"

    def lower(self, model: nn.Module) -> None:
        """Store a model's weights as the policy says, in place."""
        if self.policy.params != "fp32":
            lower_weights(model, fitting(self.policy, model))

    def adopt(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
        """Give an optimizer the masters and states of the policy; False if it trains none of these models."""
        mine = {id(param) for param in parameters(optimizer)}
        owner = next((one for one in models if not mine.isdisjoint(map(id, one.parameters()))), None)
        policy, _ = cast_parameters.with_stored_format(self.policy, "", optimizer, self.where)
        if owner is not None:
            cast_parameters.apply(owner, optimizer, fitting(policy, owner), where=self.where)
        return owner is not None

    def observe(
        self,
        models: Sequence[nn.Module],
        enter: Callable[[], AbstractContextManager[Any]],
        device_type: str,
        model: nn.Module | None = None,
        inside: str = "",
    ) -> None:
        """Explain skipped steps by the calls of models, if that was asked for, or on a CPU, where it need not wait."""
        tracers: list[OverflowTracer] = []
        if self.scaler is not None and (device_type == "cpu" if self._trace is None else self._trace):
            how: Any = {"waits": bool(self._trace), "written": self._call, "inside": inside}
            tracers = [OverflowTracer(enter=enter, model=model, scaling=lambda: self._scaling, **how)]
        self.observing = Observers(models, tracers)

    def backward_begins(self, loss: Any, divisor: int = 1) -> None:
        """A loss is about to be divided, scaled and backpropagated."""
        scaler = self.scaler
        if scaler is None or not isinstance(loss, Tensor):
            return
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(loss.device)
        scaler._scale_again()
        if self.observing.listening and scaler._scale is not None:
            self.observing.backward_begins(loss, scaler._scale / divisor)
        if len(self.networks) > 1:
            self.networks.backward(leaves_of([loss]))

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether its gradients are unscaled, and its step is still to come."""
        states = {} if self.scaler is None else self.scaler._states
        return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer, once per step."""
        scaler = self.scaler
        if scaler is None or self.is_unscaled(optimizer):
            return
        states = scaler._states
        if states[id(optimizer)]["stage"] is OptState.STEPPED:
            # It steps twice between two updates of the scale, which depends on the checks of both steps.
            earlier = states.pop(id(optimizer))
            states[id(earlier)] = earlier
        scaler.unscale_(optimizer)

    def explain(self, optimizer: Optimizer, skipped: bool) -> OverflowReport | None:
        """The report on a step that is over, if it was skipped."""
        if self.scaler is None or not self.observing.listening:
            return None
        scale = self.scaler._scale_in_use()
        finding = self.observing.update_ended(optimizer, index=self.steps, skipped=skipped, loss_scale=scale)
        self.observing.drain()
        if finding is not None:
            self.findings.append(finding)
            del self.findings[:-100]
        return finding

    def ended(self, optimizer: Optimizer, every: Sequence[Optimizer]) -> bool:
        """One optimizer of `every` has stepped, or was skipped: then buffers get their values of before, and True."""

        def owned() -> set[int]:
            return {id(param) for each in every for param in parameters(each)}

        skipped = self.scaler is not None and self.scaler.was_skipped(optimizer)
        self.steps += 1
        self.skipped_steps += skipped
        self.networks.step_ended(parameters(optimizer), skipped, owned, alone=len(every) == 1)
        return skipped

    def update(self) -> bool:
        """The next loss scale, once for all steps after the same backward passes; False if there were none."""
        scaler = self.scaler
        if scaler is None:
            return False
        # Gradients of other optimizers that are unscaled and wait for their step must not be unscaled again.
        states = scaler._states
        waiting = {
            key: states.pop(key) for key in list(states) if states[key]["stage"] is not OptState.STEPPED
        }
        stepped = bool(states)
        try:
            if stepped:
                if self._updated[0] != scaler._scale_calls:
                    self._updated = scaler._scale_calls, {name: vars(scaler)[name] for name in _MOVING}, {}
                _, before, checked = self._updated
                checked |= {id(state): state for state in states.values()}
                states |= checked
                vars(scaler).update(before)
                scaler.update()
        except LossScaleCollapseError as collapse:
            raise collapse.named(self.findings[-1]) if self.findings else collapse from None
        states.update(waiting)
        return stepped
