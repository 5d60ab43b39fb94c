"""Mezzo's precision as a plugin of Lightning's Trainer and Fabric, of both packages: `lightning`, `pytorch_lightning`.

Lightning calls the plugin around each model call, backward and optimizer step. The plugin calls the parts of Mezzo that
`MixedPrecision` calls; there is no loss scaling here. `precision` makes the plugin's class when it is called, because
each package has its own base class and tests for it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, partialmethod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError, checks_keywords
from mezzo.core.loss_scale import LossScale
from mezzo.core.policy import Policy
from mezzo.core.version import library
from mezzo.pytorch.autocast.context import context_of
from mezzo.pytorch.autocast.modules import fitting
from mezzo.pytorch.module_paths import unwrapped
from mezzo.pytorch.optim.adopt import extend
from mezzo.pytorch.snapshot import BufferSnapshot
from mezzo.pytorch.step import parameters
from mezzo.pytorch.trainer_step import TrainerStep
from mezzo.pytorch.training import checks
from mezzo.pytorch.training.backward import Gradients
from mezzo.pytorch.training.networks import Networks
from mezzo.pytorch.training.observers import Observers
from mezzo.pytorch.training.resolved_precision import ResolvedPrecision

OLDEST = "2.6.4"  # 2.6.2 and 2.6.3 were compromised

# What an import of Lightning imports -> the package of its Trainer.
_TREES = {"lightning": "lightning.pytorch", "lightning_fabric": "pytorch_lightning"}

# Scheduler -> whether its optimizer has only skipped steps since the scheduler's last one.
_ONLY_SKIPPED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@checks_keywords
def precision(
    policy: str | Policy | torch.dtype = "auto",
    *,
    loss_scale: LossScale | float | str | None = None,
    params: str | None = None,
    masters: str | None = None,
    state: str | None = None,
    trace: bool | None = None,
) -> Any:
    """The precision plugin for `Trainer(plugins=[...])` and `Fabric(plugins=[...])`; one for each Trainer or Fabric.

    Example::

        trainer = lightning.Trainer(plugins=[mezzo.lightning.precision("fp16,module.head=fp32")])

    It has the attributes `scaler` (a `mezzo.GradScaler`, or None), `policy`, `skipped_steps` and `findings`, and the
    method `was_skipped(optimizer)`. Under a Trainer, `loss_scale` and `skipped_steps` are logged each step.

    Args:
        policy: any precision of `mezzo.MixedPrecision`. `"auto"` is the device's fast 16-bit format; nothing is timed.
        loss_scale, params, masters, state, trace: as for `mezzo.MixedPrecision`.

    Raises:
        UsageError: no Lightning, or one before 2.6.4; an argument that is out of range.
        UnknownNameError: an unknown precision, keyword argument or format.
    """
    arguments: dict[str, Any] = dict(locals())
    imported = [name for name in _TREES if name in sys.modules]
    installed = [name for name in _TREES if importlib.util.find_spec(name) is not None]
    trees = [_TREES[name] for name in imported or installed[:1] or ["lightning"]]
    for tree in trees:
        library(tree.partition(".")[0], OLDEST, "lightning")
    return _class_for(*trees)(arguments)


@cache
def _class_for(*trees: str) -> Any:
    """The plugin's class for these packages; its name, which is that of Lightning's own, is its key in checkpoints."""
    bases = [importlib.import_module(f"{tree}.plugins.precision").MixedPrecision for tree in trees]
    return type("MixedPrecision", (_Plugin, *bases), {"__module__": __name__})


class _Plugin(TrainerStep):
    """What the plugin does, without Lightning's base classes."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._device = torch.device("cpu") if accelerator is None else accelerator
        super().__init__("mezzo.lightning.precision({!r})", self._device.type, **arguments)
        self._arguments = arguments
        if self.scaler is not None:
            self.scaler._evaluated = self._closure_ran  # type: ignore[method-assign]
        self.precision = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(self.policy.compute, "32-true")
        self._trainer: Any = None
        self._base = self._precision("fabric.plugins")
        self._models: list[nn.Module] = []
        self._resolved: list[ResolvedPrecision] = []
        self._handles: list[Any] = []
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._schedulers: list[Any] = []
        self._gradients = Gradients()
        self._before: BufferSnapshot | None = None  # an optimizer's last evaluation of its closure

    def _precision(self, ending: str) -> Any:
        """Lightning's base class whose module's package ends so: of the Trainer, or of Fabric."""
        module = f"{ending}.precision.precision"
        return next(kind for kind in type(self).__mro__ if kind.__module__.endswith(module))

    def __reduce__(self) -> Any:
        return partial(precision, **self._arguments), ()

    def __repr__(self) -> str:
        return self._call(str(self._arguments["policy"]))

    def __str__(self) -> str:  # in Lightning's own errors, where a strategy takes other plugins only
        return f"{self!r} (for one device, or strategy='ddp')"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the weights as the policy says, in place."""
        self.lower(module)
        self._release()
        if self._trainer is None:
            self._models.append(module)
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Begin a `fit`, or another call, of a Trainer: its model is on its device, perhaps wrapped in DDP."""
        root: Any = unwrapped(model)
        trainer = root.trainer
        if self._trainer not in (None, trainer):
            raise UsageError(
                f"{self!r} is the plugin of another Trainer already, with that one's loss scale. Create one for each "
                f"Trainer: Trainer(plugins=[{self!r}])."
            )
        self._trainer = trainer
        loaded = (tree for tree in _TREES.values() if tree in sys.modules)
        tree = next(tree for tree in loaded if isinstance(trainer, sys.modules[tree].Trainer))
        self._base = self._precision(f"{tree}.plugins")
        self._models = [root]
        self._optimizers.clear()
        in_ddp = model is not root
        rewrites = self.scaler is not None or trainer.accumulate_grad_batches > 1 or trainer.gradient_clip_val
        self._gradients = Gradients(fp32=bool(rewrites) and not in_ddp)
        for optimizer in optimizers:
            self._adopt(optimizer)
            self._gradients.cover(optimizer)
        self._schedulers = [] if self.scaler is None else [config.scheduler for config in lr_schedulers]
        for scheduler in self._schedulers:
            if not isinstance(scheduler, _Held):  # an attribute would be in its `state_dict`
                extend(scheduler, _Held)
        self._prepare(model)
        return model, optimizers, lr_schedulers

    def _adopt(self, optimizer: Optimizer) -> None:
        """Give a new optimizer the masters and states that the policy asks for."""
        if optimizer not in self._optimizers:
            self.adopt(optimizer, self._models)
            self._optimizers.add(optimizer)

    def _prepare(self, wrapped: nn.Module | None = None) -> None:
        """Apply the policy to the models, whose device is known now, and begin to observe their calls."""
        self._release()
        single = len(self._models) == 1
        for model in self._models:
            policy = self.policy if single else fitting(self.policy, model)
            device = getattr(model, "device", self._device)  # a LightningModule's, perhaps without parameters
            self._device = next((param.device for param in model.parameters()), device)
            self._resolved.append(ResolvedPrecision(model, policy, self._device.type, None, ""))
        if self.scaler is None:
            return
        root = self._models[0]
        called = self._models if self._trainer is None else list(_parts(root))
        if self._trainer is None or len(self._optimizers) > 1:
            self._handles = [part.register_forward_pre_hook(self.networks.called) for part in called]
        # In DDP the root's call is the whole `training_step`, which can't be called again by itself.
        outermost = [root, *called] if wrapped is root else called
        inside = "" if self._trainer is not None else " inside `with fabric.autocast():`"
        self.observe(outermost, self._resolved[0].context, self._device.type, wrapped or root, inside)

    def _release(self) -> None:
        for resolved in self._resolved:
            resolved.end()
        for handle in self._handles:
            handle.remove()
        self.observing.undo()
        self._resolved, self._handles = [], []
        self.networks, self.observing = Networks(), Observers([], [])

    def teardown(self) -> None:
        """The Trainer's call is over: take hooks and overrides off the model."""
        self._release()
        self._gradients.clear()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The autocast context; inputs and outputs are not cast."""
        if self._models and not self._resolved:
            self._prepare()
        # Without models: Fabric's own `autocast()`, before `setup`.
        context = self._resolved[0].context() if self._models else context_of(self.policy)
        with context, self.observing.live() if torch.is_grad_enabled() else nullcontext():
            yield

    autocast_context_manager = forward_context

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Around `training_step`. With manual optimization it holds all steps of a batch: then the scale is updated."""
        module = self._trainer.lightning_module
        if self.scaler is not None and len(self._optimizers) == 1:
            self.networks.called(module)
        with self.forward_context():
            yield
        if not module.automatic_optimization:
            self._end_batch()

    def _of_base(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Lightning's own method, of the Trainer's plugin or of Fabric's."""
        return getattr(self._base, name)(self, *args, **kwargs)

    pre_backward = partialmethod(_of_base, "pre_backward")
    post_backward = partialmethod(_of_base, "post_backward")
    _after_closure = partialmethod(_of_base, "_after_closure")
    _clip_gradients = partialmethod(_of_base, "_clip_gradients")

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Backward of the scaled loss."""
        if self.scaler is not None:
            self.backward_begins(tensor)
            tensor = self.scaler.scale(tensor)
        with context_of(self.policy, self._device.type, enabled=False):  # manual optimization is inside one
            self._base.backward(self, tensor, model, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step unless a gradient is not finite; returns the closure's result.

        Only an optimizer that needs its closure (LBFGS) runs it again, at a smaller scale, after an overflow.
        """
        optimizer = _unwrapped(optimizer)
        self._adopt(optimizer)
        scaler = self.scaler
        if scaler is None:
            given = {name: one for name, one in (("model", model), ("closure", closure)) if one is not None}
            return self._base.optimizer_step(self, optimizer, **given, **kwargs)
        if closure is not None and checks.needs_closure(optimizer):
            results: list[Any] = []

            def evaluate() -> Any:
                self.observing.step_dropped()  # only the last evaluation is explained
                if self._trainer is not None and len(self._optimizers) == 1:
                    self.networks.called(self._trainer.lightning_module)
                    self._before = self.networks.of(self._trainer.lightning_module).copied()
                results[:] = [closure()]
                return results[0]

            result = scaler.step(optimizer, evaluate, **kwargs)
            self.observing.step_dropped()
            self._ended(optimizer)
            return results[0] if result is None else result
        result = None if closure is None else closure()
        stepped, _ = scaler._last.get(optimizer, (0, None))
        if model is not None and model.automatic_optimization and stepped == scaler._scale_calls:
            return result  # `training_step` returned None, or weight averaging only updates BatchNorm
        with context_of(self.policy, self._device.type, enabled=False):
            self.unscale(optimizer)
            if model is not None:
                self._after_closure(model, optimizer)
            scaler.step(optimizer, **kwargs)
            self._explain(optimizer, scaler.was_skipped(optimizer))
        self._ended(optimizer)
        return result

    def _closure_ran(self, optimizer: Optimizer, finite: bool) -> None:
        """The closure of an optimizer that needs one has run, and the gradients are unscaled."""
        if not finite:
            self._explain(optimizer, skipped=True)
            if self._before is not None:
                self._before.put_back()  # what this evaluation changed; perhaps it is run again
        elif self._trainer is not None:
            self._after_closure(self._trainer.lightning_module, optimizer)

    def _explain(self, optimizer: Optimizer, skipped: bool) -> None:
        if told := self.observing.warning(self.explain(optimizer, skipped), "plugin.findings"):
            warnings.warn(f"overflow in optimizer step {self.steps}: {told}", stacklevel=3)

    def _ended(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, or its step was skipped."""
        skipped = self.ended(optimizer, list(self._optimizers))
        for scheduler in self._schedulers:
            if getattr(scheduler, "optimizer", optimizer) is optimizer:
                _ONLY_SKIPPED[scheduler] = skipped and _ONLY_SKIPPED.get(scheduler, True)
        if self._trainer is None or self._trainer.lightning_module.automatic_optimization:
            self._end_batch()

    def _end_batch(self) -> None:
        """The next loss scale, once for all optimizers that have stepped."""
        if self.update() and self._trainer is not None and self.scaler is not None:
            log = partial(self._trainer.lightning_module.log, on_step=True, on_epoch=False, batch_size=1)
            log("loss_scale", self.scaler._scale)
            log("skipped_steps", self.skipped_steps)

    def was_skipped(self, optimizer: Any) -> bool:
        """Whether the optimizer's last step was skipped: if so, do not step its scheduler (a Trainer does it)."""
        return self.scaler is not None and self.scaler.was_skipped(_unwrapped(optimizer))

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip the unscaled gradients, of fused optimizers too."""
        optimizer = _unwrapped(optimizer)
        if clip_val > 0:
            self.unscale(optimizer)
        self._base.clip_gradients(self, optimizer, clip_val, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Fabric is about to clip; a second call for one step is an error."""
        optimizer = _unwrapped(optimizer)
        self._adopt(optimizer)
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def main_params(self, optimizer: Any) -> Iterator[Tensor]:
        """The parameters to clip; in Fabric, which raises for an infinite norm, a zero if the step will be skipped."""
        optimizer = _unwrapped(optimizer)
        scaler = self.scaler if self._trainer is None and self.is_unscaled(optimizer) else None
        if scaler is None or not bool(scaler._found(scaler._states[id(optimizer)])):
            yield from parameters(optimizer)
        else:
            nothing = torch.zeros(1, requires_grad=True)
            nothing.grad = torch.zeros(1)
            yield nothing

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, which Lightning's own plugin reads as well; nothing without one."""
        return {} if self.scaler is None else self.scaler.state_dict() | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this plugin, or of Lightning's own; ignored without a loss scale."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)
            self.skipped_steps = int(state_dict.get("skipped_steps", 0))


class _Held:
    """The first base class of a scheduler that does not step if its optimizer has only skipped since the last time."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not _ONLY_SKIPPED.pop(self, False):
            super().step(*args, **kwargs)  # type: ignore[misc]


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with parameters that a LightningModule's own code may call."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


def _unwrapped(optimizer: Any) -> Any:
    """The user's optimizer in a LightningOptimizer or a _FabricOptimizer, which only looks like it."""
    return optimizer.optimizer if hasattr(optimizer, "_strategy") else optimizer
