"""One unmodified PyTorch script under one policy: the state of the run, what it patches, and how it ends.

This file imports no torch: a script may set `OMP_NUM_THREADS` or `CUDA_VISIBLE_DEVICES` before its own `import torch`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mezzo.core.commands import run_command
from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale, Observation, StaticLossScale
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.records import LEFT_ALONE, OWN, OWN_PRECISION, RecordWriter, RunStarted
from mezzo.pytorch.run import foreign
from mezzo.pytorch.run.summary import is_told, nothing_ran, summary
from mezzo.runner import lifecycle, script
from mezzo.runner.children import VARIABLE, Children, Parent
from mezzo.runner.journal import Journal, check_events, number, of_rank
from mezzo.runner.lifecycle import RunRequest
from mezzo.runner.patches import ImportWatch, Patches
from mezzo.runner.seeds import Seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mezzo.pytorch.auto import TimedTrial, TrialDecision
    from mezzo.pytorch.run.observers import Observers
    from mezzo.pytorch.run.ranks import RunRanks
    from mezzo.pytorch.training.networks import Networks


def run(request: RunRequest) -> int:
    """Run a script as `python SCRIPT ARGS...` would, under a policy; its exit status (see `lifecycle.run`)."""
    policy, target = checked(request)
    widen = None if request.tensorboard is None else functools.partial(_with_events, request.tensorboard)
    journal = Journal(
        request.records, lambda: _started(session), widen, request.summary and not lifecycle.rank_here()
    )
    session = Session(request, policy, journal, ImportWatch())
    session.begin = functools.partial(_begin_forked, session, os.getpid())
    told, status = functools.partial(summary, session), 130
    try:
        status = lifecycle.run(
            session,
            target,
            session.parts(),
            finish=session.finish,
            summary=told,
            in_child=lambda: UsageError(error) if (error := session.children.error) else None,
        )
        return status
    except MezzoError as error:
        if is_told(session, error):
            return 2
        raise
    finally:
        session.children.dismiss(interrupted=status == 130)


def join(run: dict[str, Any]) -> None:
    """Apply the run of another process to this one, which its script has started (`runner/startup`)."""
    request = RunRequest.from_json(json.dumps(run["request"]))
    journal = Journal(None, lambda: _started(session))  # until `_attend` knows the rank
    session = Session(request, policy_of(request.policy), journal, ImportWatch())
    _attend(session, run, session.parts())


def _attend(session: Session, run: dict[str, Any], parts: Sequence[lifecycle.Part]) -> None:
    """Make this process one of several: it has records of its own, and a summary if it is rank 0."""
    request = RunRequest.from_json(json.dumps(run["request"]))

    def widen(_: RecordWriter | None) -> RecordWriter | None:
        file = request.records and of_rank(request.records, session.rank)
        writer = RecordWriter(file) if file else None
        session.begin()
        if request.tensorboard is None or session.rank:
            return writer
        return _with_events(request.tensorboard, writer)

    def started() -> RunStarted:
        return replace(_started(session), script=sys.argv[0], argv=sys.argv[1:])

    session.journal = Journal(None, started, widen, request.summary and not session.rank)
    session.only_counts = False
    told = functools.partial(summary, session)
    session.begin = lifecycle.attend(session, parts, Parent(run), finish=session.finish, summary=told)


def _begin_forked(session: Session, first: int) -> None:
    """A rank that the script made by fork begins; the first process itself is none."""
    if os.getpid() != first:
        _attend(session, json.loads(os.environ[VARIABLE]), ())
        session.begin()


def checked(request: RunRequest) -> tuple[Policy, script.Target]:
    """A request's policy and its script's place; a MezzoError if they can't be run, or TensorBoard is missing."""
    policy = policy_of(request.policy)
    check(policy)
    target = script.locate(request.target, is_module=request.is_module, source=request.source)
    if request.tensorboard is not None:
        check_events(request.tensorboard)
    return policy, target


def check(policy: Policy) -> None:
    """Raise UsageError unless an unmodified script can be run with weights stored as this policy says."""
    if policy.params == "fp16":
        raise UsageError(
            f"policy '{policy}': `mezzo run` can't train fp16 weights, because unscaled fp16 gradients lose small "
            "values. Remove params and masters, use bf16 instead of fp16, or call mezzo.MixedPrecision(model, "
            "optimizer, 'fp16', masters='fp32') in the script."
        )
    if policy.params not in ("fp32", policy.activations):
        raise UsageError(
            f"policy '{policy}': mezzo run stores weights in {policy.params} only if compute is {policy.params} too. "
            f"Use {policy.params},params={policy.params}."
        )


@dataclass
class Session:
    """The state of a run, which all patched functions share."""

    request: RunRequest
    policy: Policy  # `auto` until the first model call shows the device
    journal: Journal
    imports: ImportWatch
    scale: LossScale = field(default_factory=NoLossScale)  # `NoLossScale` switches all scaling off
    device_type: str = ""
    lowers: bool = False  # whether anything runs in fewer than 32 bits; plain, for Dynamo guards on it
    left_alone: str | None = None  # why Mezzo changes nothing for the rest of the run
    # Plain, because every call, backward and step asks.
    records_own: bool = False  # whether the script runs in its own precision, and is recorded
    scaling: bool = False  # whether backward passes are scaled
    observes: bool = False  # whether there may be observers
    only_counts: bool = False  # whether passes and steps only have to be counted; found after a step
    mp_policy: str = ""  # the line of the script's first `MixedPrecisionPolicy` with 16 bits, in parentheses
    fatal: MezzoError | None = None  # the user's mistake that only a model call could show
    model_calls: int = 0  # outermost calls of modules with parameters
    lowered_calls: int = 0  # those of them in 16 bits
    modules: dict[str, None] = field(default_factory=dict)  # their class names, in order
    dtypes: dict[Any, None] = field(default_factory=dict)  # of the parameters of all modules that were called
    calls_keras: bool = False  # whether one of them is a Keras model, on Keras's torch backend
    compiled: bool = False  # whether a module's call was traced into a compiled function of the script's
    reruns: int = 0  # backward passes that were run again before the script saw their gradients
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    optimizers_made: int = 0
    lowered_weights: int = 0  # weights stored in 16 bits; with any, the script can't be left alone any more
    applied: Policy = field(init=False)  # the policy of the next update; plain, as `lowers`
    overridden: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # models with module overrides
    formats: dict[str, str] = field(default_factory=dict)  # of the modules with overrides, by path
    trial: TimedTrial | None = None
    precision_reason: str = ""
    rank: int | None = field(default_factory=lifecycle.rank_here)  # in the process group, or a launcher's
    world_size: int = field(default_factory=lifecycle.ranks_here)
    store: Any = None  # of the process group, from when it is made to the end
    children: Children = field(init=False)
    begin: Callable[[], None] = lambda: None  # a process that the script started begins to train
    observers: Observers = field(init=False)  # from `import torch` on
    networks: Networks = field(init=False)  # running statistics of the models; from `import torch` on
    ranks: RunRanks = field(init=False)  # from `import torch` on
    _patches: Patches = field(default_factory=Patches)
    undo: list[Any] = field(default_factory=list)  # also called at the end, the latest first
    _endings: list[Any] = field(default_factory=list)  # called with the exit status when the script is over
    _counting: int | None = None  # the optimizer whose steps the scale counts in a row now
    _counted: dict[int | None, dict[str, int]] = field(default_factory=dict)  # of the others

    def __post_init__(self) -> None:
        request = replace(self.request, policy=str(self.policy))  # a file's name may be relative
        fail = functools.partial(setattr, self, "fatal")
        self.children = Children(request, __name__, self.imports, fail)
        self.records_own = self.request.own == "record"
        self.applied = self.policy
        self._settle()

    def _settle(self) -> None:
        """What follows from the policy, except from an `auto` that is not decided yet."""
        request = self.request
        if self.policy.compute != "auto":
            self.lowers = not self.policy.is_fp32
            self.scale = self.policy.make_loss_scale()
            self.applied = self.policy.at(0)
        self.scaling = self.left_alone is None and not isinstance(self.scale, NoLossScale)
        self.observes = bool(request.watch) or request.sensitivity or (self.scaling and request.trace)
        self.only_counts = False

    def has_settled(self) -> bool:
        """After a step: whether all that the next passes and steps need is to be counted."""
        asked = self.scaling or self.observes or self.records_own or self.left_alone or self.journal.writes
        self.only_counts = not (asked or self.trial is not None or self.store is not None)
        return self.only_counts

    def parts(self) -> list[lifecycle.Part]:
        """What this run installs, in order."""
        parts: list[lifecycle.Part] = [self.imports, self.children, self]
        if self.request.seed_offset is not None:
            parts.append(Seeds(self.request.seed_offset, self.imports))
        return parts

    @property
    def only_launched(self) -> bool:
        """Whether this process trained nothing, but processes that the script started did."""
        return not (self.model_calls or self.journal.losses) and bool(self.children.marks())

    def install(self) -> None:
        """Wait for the imports that need patches."""
        self.imports.when("torch", self._torch_imported)
        if self.request.own == "off":
            foreign.switch_off(self, self._patches, self.imports)
        foreign.watch(self, self._patches, self.imports)

    def remove(self) -> None:
        """Undo all patches."""
        while self.undo:
            self.undo.pop()()
        self._patches.undo()

    def _torch_imported(self, torch: ModuleType | Any) -> None:
        from mezzo.pytorch.autocast import fallback
        from mezzo.pytorch.autocast import patches as autocast_patches
        from mezzo.pytorch.autocast.dispatch import direct
        from mezzo.pytorch.hardware import switch_off_tf32
        from mezzo.pytorch.run import backward, calls, own_recording
        from mezzo.pytorch.run.observers import Observers, observed_step
        from mezzo.pytorch.run.optimizers import Steps
        from mezzo.pytorch.run.ranks import RunRanks
        from mezzo.pytorch.training.networks import Networks

        patches = self._patches
        self.observers, self.networks, self.ranks = Observers(self), Networks(), RunRanks()
        watch = lifecycle.StepWatch(self.request.observe, lambda: observed_step(self))
        steps = Steps(self, watch)
        preparation = calls.Preparation(self, steps)
        self._endings += [
            lambda status: steps.masters.finish(),
            lambda status: steps.lost.finish(),
            lambda status: watch.finish(self.journal, told=self.left_alone is None),
            preparation.finish,
            lambda status: self.journal.seen(self.observers.finish()),
        ]
        scales = self.policy.compute == "auto" or not isinstance(self.scale, NoLossScale)
        self.ranks.patch(self, patches, scales=scales)
        module, optimizer, autograd = torch.nn.Module, torch.optim.Optimizer, torch.autograd
        if self.records_own:
            own_recording.record(steps, patches, self.imports)
            patches.set(optimizer, "load_state_dict", steps.masters.load(optimizer.load_state_dict))
        else:
            calls.hide_from_dynamo(self.imports, patches, module.__call__)
            patches.set(module, "__call__", calls.make_call(self, preparation, module.__call__))
        patches.set(autograd, "backward", backward.make_backward(self, steps.overflows, autograd.backward))
        patch_step = steps.make_patch_step_function(optimizer._patch_step_function)
        patches.set(optimizer, "_patch_step_function", patch_step)
        if scales:
            patches.set(autograd, "grad", backward.make_grad(self, steps.overflows, autograd.grad))
        if self.policy.compute != "fp32":
            for name in ("softmax", "log_softmax"):
                function = direct(getattr(torch.nn.functional, name), f"{name}.int", getattr(torch, name))
                patches.set(torch.nn.functional, name, function)
            self.undo.append(fallback.lend_kernels())
            autocast_patches.hold()  # once, not at each call of a model
            self.undo.append(autocast_patches.release)
        # A context of native TF32 switches it on again.
        if self.policy.compute in ("fp32", "tf32") and not self.records_own:
            switch_off_tf32()

    def finish(self, status: int) -> None:
        """The script is over: finish measurements and notes."""
        for ending in self._endings:
            ending(status)
        if self.only_launched:
            self.journal.give_way()
            return
        if status == 0 and self.left_alone is None and isinstance(self.scale, NoLossScale):
            self._check_finite()
        if status == 0 and (why := nothing_ran(self)):
            self.journal.note(why)
        if not self.journal.losses and self.left_alone is None and status == 0:
            self.journal.note("the script never called backward() (autograd.grad and torch.func don't count)")

    def _check_finite(self) -> None:
        """Note a last loss, or weights, that are not finite, and the command that finds the operation."""
        loss, bad = self.journal.last_loss, []
        if loss is not None and not math.isfinite(value := number(loss)):
            bad = [f"the last loss is {value}"]
        weights = [p for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]]
        # Not those of other classes: of a sharded one this would wait for other processes.
        plain = [p for p in weights if type(p).__name__ in _DENSE and p.dtype.itemsize > 1 and not p.is_meta]
        if count := sum(not p.isfinite().all() for p in plain):
            bad.append(f"NaN or infinity is in {count} of {len(weights)} weight tensors")
        if bad:
            find, options = str(replace(self.policy, loss_scale="1")), ["--own", "off"] * self.records_own
            if self.records_own:  # `policy` does not apply: Mezzo's in the same formats
                fp16, kind = any(str(p.dtype) == "torch.float16" for p in weights), self.request.masters
                find = "fp16,loss_scale=1" if fp16 else f"bf16{f',masters={kind}' * bool(kind)},loss_scale=1"
            command = self.command(find, *options)
            self.journal.note(f"{', and '.join(bad)}. Find the operation that made it: {command}")

    def command(self, policy: str, *options: str) -> str:
        """The command that runs this script under another policy, or with other options only."""
        precision = ("--precision", policy) if policy else ()
        if policy and self.request.own == "off" and "--own" not in options:
            options = ("--own", "off", *options)
        return run_command(vars(self.request), *options, *precision)

    @property
    def without_own(self) -> str:
        """What to do with mixed precision of the script's that can be switched off."""
        asked = self.request.policy
        policy = "bf16" if asked in ("auto", "fp32") else asked
        return f"to use Mezzo instead: {self.command(policy, '--own', 'off')}"

    def stand_back(self, why: str, fix: str) -> None:
        """Leave the script alone from here on, or end it (`RunRequest.own`); note why, and what the user may do."""
        if self.records_own:
            self.journal.note(f"{OWN_PRECISION}{why}")
            return
        if self.request.own != "keep" and ("parameters" not in why or "frozen" in why):
            from mezzo.pytorch.run.weights import lowered

            if any(True for optimizer in self.optimizers for _ in lowered(optimizer)):
                why += ", and trains 16-bit parameters"
        # A 16-bit weight fails with the FP32 inputs of a call outside autocast: then calls stay under the policy.
        if self.lowered_weights:
            self.journal.note(f"not left alone, though {why}: there its own precision applies")
        elif self.left_alone is None:
            self.left_alone = why
            self.scaling = self.only_counts = False
            self.observers.tell("step_dropped")
            self.journal.note(f"{LEFT_ALONE}{why}")
            self.journal.note(fix)
            if self.request.own in ("off", "refuse"):
                off = "--own off does not switch this off: " if self.request.own == "off" else ""
                self.fatal = error = UsageError(f"{off}{why}; {fix}")
                raise error

    def resolve(self, device_type: str) -> None:
        """The device is known: replace `auto`, and begin the trial that decides whether 16 bits pay here."""
        if self.device_type:
            return
        self.device_type = device_type
        if self.policy.compute == "auto":
            from mezzo.pytorch.auto import TimedTrial, resolve

            self.policy, self.precision_reason = resolve(self.policy, device_type)
            self._settle()
            if self.policy.compute != "fp32":
                self.trial = TimedTrial(self.policy.compute, device_type)

    def enter(self) -> Policy:
        """An outermost call begins: its policy, which alternates with FP32 while the trial of `auto` runs."""
        self.model_calls += 1
        policy = self.applied
        if self.trial is not None:
            self.trial.start()
            policy = self.policy_now
        self.lowered_calls += self.lowers and policy is not _FP32
        return policy

    @property
    def policy_now(self) -> Policy:
        """The policy of the step that runs."""
        return _FP32 if self.trial is not None and self.trial.precision == "fp32" else self.applied

    def counted(self) -> None:
        """An update of the first optimizer is over: the next one may be the first in bf16, or none may follow."""
        if (policy := self.policy.at(self.journal.first_updates)) is not self.applied:
            self.applied = policy
            self.journal.note(f"linear layers multiply in bf16 from update {self.policy.bf16_from} on")
            from mezzo.pytorch.autocast.modules import apply_module_overrides, fitting

            for model in self.overridden:
                if (fits := fitting(policy, model)).modules:
                    apply_module_overrides(model, fits, self.device_type)
        self.journal.stop_after(self.request.stop_after)

    def observe(self, *, found_inf: bool, optimizer: int | None = None, before: Any = None) -> None:
        """One step of this optimizer (None: of the last one) is over: the scale for the next, its counts for each.

        A backward pass changes the scale once. `before` is the scale before an earlier step used the same pass.
        """
        now: Any = self.scale
        counts = {name: getattr(now, name) for name in _COUNTS if hasattr(now, name)}
        if optimizer is not None and optimizer != self._counting:
            self._counted[self._counting] = counts
            counts = self._counted.get(optimizer, dict.fromkeys(counts, 0))
            self.scale = now = replace(now, **counts)
            self._counting = optimizer
        if before is None:
            self.scale = now.next(Observation(found_inf))
        elif found_inf:
            after: Any = replace(before, **counts).next(Observation(found_inf))
            self.scale = replace(after, scale=min(after.scale, now.scale))
        else:
            self.scale = replace(now, **dict.fromkeys(counts, 0))

    def overflowed(self, scale: float) -> float:
        """A backward at `scale` overflowed before the script saw its gradients: the scale at which to run it again.

        With several ranks the scale for other backward passes stays, since this happened on one rank alone.
        """
        from mezzo.pytorch.distributed import is_distributed

        self.reruns += 1
        moves = not isinstance(self.scale, (NoLossScale, StaticLossScale)) and self.scale.scale > 1.0
        if moves and not is_distributed():
            self.observe(found_inf=True)
        return max(1.0, scale * 0.5)

    def decide(self, decision: TrialDecision) -> None:
        """The trial of `auto` is over."""
        self.trial = None
        self.precision_reason = decision.reason
        if decision.precision == "fp32":
            self.policy = Policy("fp32", state=self.policy.state)
            self._settle()


_FP32 = Policy("fp32")
_DENSE = ("Parameter", "Tensor")
_COUNTS = ("overflows", "stuck", "skips")  # of a loss scale's state: what a good step sets to 0


def _with_events(folder: Path, also: RecordWriter | None) -> RecordWriter | None:
    """Writes the records as TensorBoard events too, unless the script never imported PyTorch."""
    if "torch" not in sys.modules:
        return also
    from mezzo.pytorch.monitor.tensorboard import TensorBoardWriter

    return TensorBoardWriter(folder, also=also)


def _started(session: Session) -> RunStarted:
    machine: dict[str, Any] = {}
    # With TensorFlow imported, `describe` would load Triton, whose LLVM aborts where another one is loaded.
    used = session.device_type or session.journal.losses or session.model_calls
    idle = "keras" in sys.modules and not used
    if "torch" in sys.modules and not idle:
        import torch

        from mezzo.pytorch.hardware import describe, has_tf32, native_formats
        from mezzo.pytorch.kernels.quantized_linear import NATIVE, why_emulated

        machine = describe()
        if device := session.device_type:
            others = {name for name in NATIVE if not why_emulated(torch.device(device), name)}
            native = native_formats(device) | others | ({"tf32"} if has_tf32(device) else set())
            machine |= {"device_type": device, "native_formats": sorted(native)}
    if "keras" in sys.modules:  # readers of the records can tell that Keras trained
        machine["keras"] = getattr(sys.modules["keras"], "__version__", "")
    policy = OWN if session.records_own else str(session.policy)
    return lifecycle.started(session.request, policy, machine)
