"""What a run patches in PyTorch, when, and how it is undone. All else in this folder is called from here.

| patched                                  | for                                                       |
|------------------------------------------|-----------------------------------------------------------|
| `nn.Module.__call__`                     | the region, outputs as FP32, the nudge                    |
| `torch.autograd.backward`                | the loss; scaling                                         |
| `torch.autograd.grad` (1)                | scaling                                                   |
| `Optimizer._patch_step_function`         | the `step` of each optimizer's class: records; veto       |
| `Optimizer.zero_grad` (1)                | what was not finite and is cleared                        |
| `autocast.__enter__`, `GradScaler.scale` | to notice a script that does all this itself              |
| `mezzo.autocast`, `MixedPrecision`, ...  | likewise, with Mezzo                                      |

(1) only where the policy has a loss scale. `auto` is decided when the first model call shows the device, so
it gets these too, and each asks the session whether there is a scale.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mezzo.core.loss_scale import NoLossScale
from mezzo.scripts.patches import ImportWatch, Patches

if TYPE_CHECKING:
    from mezzo.pytorch.launch.session import Session

# Files of ours that Dynamo must run, not trace. `regions` and `outputs` are traced on purpose, and so are hooks that
# are put on modules, which a compiled function then passes over; those that run in backward are not.
_MARK = "_mezzo_launch_files_are_skipped"
_NOT_TRACED = {
    "launch": (
        *("backward", "companions", "foreign", "journal", "losses", "optimizers", "prepare", "quiet"),
        *("session", "storage", "veto", "watch"),
    ),
    "monitor": ("loss_graph", "operations", "overflow_tracer", "saved_call"),
}


class Instrument:
    """Patches PyTorch once the script has imported it, and undoes it at the end."""

    def __init__(self, session: Session, imports: ImportWatch) -> None:
        self._session = session
        self._imports = imports
        self._patches = Patches()
        self._steps: Any = None
        self._end_loan: Any = lambda: None
        self._release: Any = lambda: None
        self.watch: Any = None
        self.storage: Any = None
        self.preparation: Any = None

    def install(self) -> None:
        """Wait for the imports that matter."""
        self._imports.when("torch", self._torch_imported)
        for name in ("deepspeed", "apex.amp"):
            self._imports.when(name, self._foreign(name))

    def remove(self) -> None:
        """Undo all of it."""
        if self._steps is not None:
            self._steps.undo()
        self._end_loan()
        self._release()
        self._patches.undo()

    def _torch_imported(self, torch: ModuleType | Any) -> None:
        from mezzo.pytorch.launch import backward, foreign, own_use, regions
        from mezzo.pytorch.launch.optimizers import Steps
        from mezzo.pytorch.launch.prepare import Preparation
        from mezzo.pytorch.launch.storage import Storage
        from mezzo.pytorch.launch.veto import Veto
        from mezzo.pytorch.launch.watch import StepWatch
        from mezzo.pytorch.region import fallback
        from mezzo.pytorch.region import patches as region_patches

        session, patches = self._session, self._patches
        veto = Veto(session)
        self.watch = StepWatch(session)
        self._steps = steps = Steps(session, veto, self.watch)
        module, optimizer, autograd = torch.nn.Module, torch.optim.Optimizer, torch.autograd
        original_call = module.__call__
        self._imports.when("torch._dynamo.utils", lambda utils: _tell_dynamo(patches, utils, original_call))
        self._imports.when("torch._dynamo.trace_rules", _skip_our_files)
        self.storage = Storage(session)
        self.preparation = preparation = Preparation(session, steps, self.storage)
        patches.set(module, "__call__", regions.make_call(session, preparation, original_call))
        patches.set(autograd, "backward", backward.make_backward(session, veto, autograd.backward))
        patches.set(
            optimizer, "_patch_step_function", steps.make_patch_step_function(optimizer._patch_step_function)
        )
        if session.policy.compute == "auto" or not isinstance(session.scale, NoLossScale):
            patches.set(autograd, "grad", backward.make_grad(session, autograd.grad))
            patches.set(optimizer, "zero_grad", steps.make_zero_grad(optimizer.zero_grad))
        foreign.watch_torch(session, patches)
        own_use.watch(session, patches, self._imports)
        if session.policy.compute != "fp32":
            self._end_loan = fallback.lend_kernels()
            region_patches.hold()  # once, not at each call of a model
            self._release = region_patches.release
        if session.policy.compute in ("fp32", "tf32"):  # a region of native TF32 switches it on again
            from mezzo.pytorch.tf32 import switch_off_tf32

            switch_off_tf32()

    def _foreign(self, name: str) -> Any:
        from mezzo.pytorch.launch.foreign import watch_initialize

        what = {"deepspeed": "DeepSpeed", "apex.amp": "apex.amp"}[name]
        return watch_initialize(self._session, self._patches, what)


def _tell_dynamo(patches: Patches, utils: Any, original_call: Any) -> None:
    """Dynamo takes a short cut past `nn.Module.__call__` where it finds the one that it found at its own
    import.

    Ours was in place by then, so it would go past ours, and a compiled step would have no region.
    """
    patches.set(utils, "unpatched_nn_module_call", original_call)
    users = sys.modules.get("torch._dynamo.variables.nn_module")
    if users is not None:
        patches.set(users, "unpatched_nn_module_call", original_call)


def _skip_our_files(trace_rules: ModuleType | Any) -> None:
    # Once a process: Dynamo keeps a list, and makes one pattern of it.
    if not hasattr(trace_rules, _MARK):
        for room, names in _NOT_TRACED.items():
            for name in names:
                trace_rules.add(f"mezzo.pytorch.{room}.{name}")
        setattr(trace_rules, _MARK, True)
