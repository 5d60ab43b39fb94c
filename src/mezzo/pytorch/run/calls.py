"""The outermost calls of a run: each call of a module with parameters computes by the policy, and returns FP32.

Outermost is a call with autocast off around it. Inside `torch.compile` the patched `__call__` is traced like any other
function, so this file must stay traceable; preparation happens while Dynamo traces (a graph break would cut a step).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.errors import UsageError
from mezzo.core.policy_text import matches
from mezzo.core.records import HAD_TF32
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.autocast.context import context_of
from mezzo.pytorch.autocast.modules import (
    apply_module_overrides,
    described,
    fitting,
    no_such_module,
    to_fp32,
    with_heads,
)
from mezzo.pytorch.autocast.plan import overloads_of
from mezzo.pytorch.distributed import sharded_format
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.hardware import leaves_autocast_off, switch_off_tf32
from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.pytorch.module_paths import unwrapped, walk
from mezzo.pytorch.reduction import average_in, to_average
from mezzo.pytorch.run.weights import holders, nudge, others, trains, widen

if TYPE_CHECKING:
    from mezzo.core.policy import Policy
    from mezzo.pytorch.autocast.context import Context
    from mezzo.pytorch.run.optimizers import Steps
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

_any_autocast = torch._C._is_any_autocast_enabled  # not of the label's device, nor of MPS
_label_on, _LABEL = torch.is_autocast_enabled, active_policy.LABEL_DEVICE
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass
_is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
_is_compiling, _dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_float32 = torch.float32
_AUTOCAST_OFF = ("fp32", "tf32")

IN_FP32 = "_mezzo_in_fp32"
"""Mark in the `__dict__` of modules inside an overridden one in FP32: autocast is off, yet no call is outermost."""


class Preparation:
    """Prepares each module that is called outermost, once: device, module patterns, nudge, storage of weights."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self._session = session
        self._steps = steps
        self.storage = steps.storage
        # A compiled step shows inner modules, too.
        self._nudged: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        # By id, for it is asked at each call and a WeakKeyDictionary is slow.
        self.known: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self._paths: dict[str, None] = {}  # of the modules of all models that were called
        self._unmatched: list[str] = []  # patterns that match none of them so far

    def prepare(self, module: nn.Module, *, traced: bool = False) -> bool:
        """Whether this module's call computes by the policy: it has floating parameters, none 16-bit by the script."""
        found = self.known.get(id(module))
        if found is None or found[0]() is not module:
            key, known = id(module), self._first_call(module)
            self.known[key] = weakref.ref(module, lambda _: self.known.pop(key, None)), known
        else:
            known = found[1]
        if known and self.storage.wanted:
            self.storage.settle(module, traced=traced)
        if known and traced and self._session.scaling:
            self._steps.traced.add(module)
            self._session.networks.call(module)
        return known

    def knows(self, module: nn.Module) -> bool:
        """Whether an earlier call of this module computed by the policy."""
        found = self.known.get(id(module))
        return found is not None and found[1] and found[0]() is module

    @not_traced
    def _first_call(self, module: nn.Module) -> bool:
        session = self._session
        session.dtypes.update(dict.fromkeys(p.dtype for p in module.parameters()))
        params = [p for p in module.parameters() if p.is_floating_point()]
        if not params:
            return False
        model, name = unwrapped(module), type(unwrapped(module)).__name__
        half = next((p.dtype for p in params if p.dtype in SIXTEEN_BITS), None)
        if half is not None and session.request.own == "off" and not session.lowered_weights:
            if not trains(module):
                return False
            widen(session, module, name)
            half = None
        if half is not None and not session.lowered_weights:  # else Mezzo lowered it, or it is a copy
            low = str(half).removeprefix("torch.")
            if not any(p.requires_grad and p.dtype in SIXTEEN_BITS for p in params):
                low = f"frozen {low}"
            session.stand_back(
                f"{name} has {low} parameters: the script chooses its formats itself",
                session.without_own,
            )
            return False
        if gathered := sharded_format(module):
            given = f"fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype={gathered})){session.mp_policy}"
            fix = "to use Mezzo instead, leave out mp_policy="
            session.stand_back(f"{name} has {given}: the script chooses its formats itself", fix)
            return False
        first, undecided = not session.device_type, session.policy.compute == "auto"
        session.resolve(params[0].device.type)
        session.ranks.register(module)
        try:
            for op, _ in session.policy.ops:
                overloads_of(op, session.device_type)  # raises for an op that is not registered
            for wrapper in to_average(module, session.policy):
                average_in(wrapper, session.policy.reduce)
        except UsageError as error:
            session.fatal = error
            raise
        emulated = not leaves_autocast_off(session.policy, session.device_type)
        exact = session.policy.compute == "fp32" or (session.policy.compute == "tf32" and emulated)
        # Where `auto` chose FP32, the switch had PyTorch's own setting until now.
        if first and exact and switch_off_tf32() and not undecided:
            how = f"emulated on this {session.device_type}" if emulated else "switched off by Mezzo"
            session.journal.note(f"{HAD_TF32}; under the policy {session.policy.compute} it is {how}")
        if session.lowers or not session.compiled:  # a compiled step in FP32 shows inner modules, too
            session.modules.setdefault(name)
            session.calls_keras |= type(model).__module__.partition(".")[0] == "keras"
        for pattern in self._missing(session.request.patterns, model) if first else ():
            self._wait_for(pattern, model)
        policy = with_heads(session.applied, model)
        hooks: list[Any] = []

        def describe() -> None:
            for note in described(policy, model):
                session.journal.note(note)
            while hooks:
                hooks.pop().remove()

        if any(map(is_lazy, params)):  # its sizes, which decide what is quantized, are known after this call
            hooks.append(model.register_forward_hook(lambda *_: describe()))
        else:
            describe()
        if policy.modules and not policy.is_fp32:
            self._override(model, policy, first)
        if session.request.nudge and not session.journal.updates:
            fresh = [p for p in params if not is_lazy(p) and p not in self._nudged]
            self._nudged.update(dict.fromkeys(fresh))
            nudge(fresh)
        return True

    def finish(self, status: int) -> None:
        """The script is over: note how its weights were stored; a pattern that never matched is an error."""
        session = self._session
        self.storage.finish()
        if self._unmatched and status == 0 and session.request.stop_after is None:
            models = ", ".join(session.modules)
            session.fatal = no_such_module(self._unmatched[0], self._paths, f"what was called ({models})")

    def _missing(self, patterns: Iterable[str], model: nn.Module) -> list[str]:
        """The patterns that match no module of the models called so far, this one included."""
        self._paths.update(dict.fromkeys(path for path, _ in walk(model, inside=True)))
        return [p for p in patterns if not any(matches(p, path) for path in self._paths)]

    def _override(self, model: nn.Module, policy: Policy, first: bool) -> None:
        patterns = [pattern for pattern, _ in policy.modules] if first else self._unmatched
        for root in (model, *(holders(model) if first else ())):
            self._unmatched = patterns = self._missing(patterns, root)
            if not (fits := fitting(policy, root)).modules:
                continue
            self._session.overridden.add(root)
            formats = apply_module_overrides(root, fits, self._session.device_type).formats
            self._session.formats |= formats
            for path, fmt in formats.items():
                if fmt in _AUTOCAST_OFF:
                    for name, inner in walk(root, inside=True):
                        if f"{name}.".startswith(f"{path}.") and formats.get(name, fmt) in _AUTOCAST_OFF:
                            inner.__dict__[IN_FP32] = True
        for pattern in self._unmatched if first else ():
            self._wait_for(pattern, model)

    def _wait_for(self, pattern: str, model: nn.Module) -> None:
        """A pattern may be for another model than the first that is called: raise if no module alive matches it."""
        if not any(matches(pattern, path) for other in others(model) for path, _ in walk(other, inside=True)):
            self._session.fatal = error = no_such_module(pattern, self._paths)
            raise error
        first = f"{type(model).__name__}, the first model that is called"
        self._session.journal.note(
            f"module pattern {pattern!r} matches nothing in {first}; it was kept for later models"
        )


class _Thread(threading.local):
    """Whether this thread is inside an outermost call in FP32, which autocast's state can't tell."""

    in_fp32 = False
    policy: Policy | None = None  # of the last call, with its context
    context: Context | None = None


def make_call(session: Session, preparation: Preparation, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `nn.Module.__call__` of a run."""
    thread = _Thread()
    observers, widens = session.observers, session.request.own == "off"
    is_wrapped_call = original is vars(nn.Module)["_wrapped_call_impl"]

    def prepare_at_trace_time(context: Any) -> None:
        variable = context.get_local("self")._i_will_not_complain_if_bc_breaks_VariableTracker()
        module = getattr(variable, "value", None)
        if isinstance(module, nn.Module) and preparation.prepare(module, traced=True):
            session.compiled = True

    def traced(self: nn.Module, args: Any, kwargs: Any) -> Any:
        # Dynamo may trace this twice and must take the same branches both times: nothing that `prepare` changes is read
        # before it.
        from torch._dynamo.comptime import comptime

        comptime(prepare_at_trace_time)
        if widens:
            args, kwargs = to_fp32(args), to_fp32(kwargs)
        if session.left_alone is not None or not session.lowers:
            return original(self, *args, **kwargs)
        with context_of(session.applied, session.device_type):
            out = original(self, *args, **kwargs)
        return to_fp32(out)

    @not_traced
    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Context | None, bool] | None:
        """Begin an outermost call: its context, and whether observers see its end; None if it is not by the policy."""
        if session.left_alone is not None or _is_jit_tracing() or (session.observes and observers.busy):
            return None
        if _graph_task() != -1:  # `checkpoint(model, x)` of the script's calls it again
            if not (session.lowers and preparation.knows(module)):
                return None
            policy = session.policy_now
        elif preparation.prepare(module):
            policy = session.enter()
            if session.scaling and module.training:
                session.networks.call(module)
        else:
            return None
        if session.observes:
            observers.watch_begins(module)
        if thread.policy is not policy:
            thread.policy = policy
            thread.context = None if policy.is_fp32 else context_of(policy, session.device_type)
        context = thread.context
        if context is None:
            thread.in_fp32 = True
        else:
            context.__enter__()
        if not session.observes:
            return context, False
        try:
            return context, observers.call_begins(module, args, kwargs)
        except BaseException:
            leave(module, context, False, None)
            raise

    @not_traced
    def leave(
        module: nn.Module, context: Context | None, is_observed: bool, out: Any, *, failed: bool = False
    ) -> Any:
        try:
            if is_observed and failed:
                observers.tell("step_dropped")
            elif is_observed:
                observers.tell("call_ended", module, out)
        finally:
            if context is None:
                thread.in_fp32 = False
            else:
                context.__exit__()
        if context is None or (type(out) is Tensor and out.dtype is _float32):
            return out
        return to_fp32(out)

    known, is_quick = preparation.known, is_wrapped_call and not widens and not preparation.storage.wanted

    def outermost(self: nn.Module, args: Any, kwargs: Any) -> Any:
        if session.only_counts and is_quick and _graph_task() == -1 and not _is_jit_tracing():
            found, context = known.get(id(self)), thread.context
            is_ready = found is not None and found[1] and found[0]() is self
            if is_ready and context and thread.policy is session.applied and self._compiled_call_impl is None:
                session.model_calls += 1
                session.lowered_calls += 1
                begun = context.begin()
                try:
                    out = self._call_impl(*args, **kwargs)
                finally:
                    context.end(begun)
                return out if type(out) is Tensor and out.dtype is _float32 else to_fp32(out)
        entered = enter(self, args, kwargs)
        if entered is None:
            return original(self, *args, **kwargs)
        try:
            if widens:  # the script converts inputs for the 16-bit weights that it would have
                args, kwargs = to_fp32(args), to_fp32(kwargs)
            out = original(self, *args, **kwargs)
        except BaseException:
            leave(self, *entered, None, failed=True)
            raise
        return leave(self, *entered, out)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _any_autocast() or _label_on(_LABEL) or IN_FP32 in self.__dict__:
            if is_wrapped_call and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)  # what `original` does, without another stack frame
            return original(self, *args, **kwargs)
        if not _dynamo_compiling() and thread.in_fp32:
            if widens:
                args, kwargs = to_fp32(args), to_fp32(kwargs)
            return original(self, *args, **kwargs)
        if _is_compiling():
            return traced(self, args, kwargs)
        return outermost(self, args, kwargs)

    # As a separate frame (the module inside a compiled model), this is skipped, as PyTorch's own `__call__` is: the
    # module's `forward` is compiled. It is still traced inside a compiled step.
    for function in (call, outermost):
        not_traced(function, inner="DEFAULT")
    return call


# Files that Dynamo must run, not trace. This one is traced on purpose, and so are hooks that are put on modules, which
# a compiled function then passes over; those that run in backward are not.
_MARK = "_mezzo_run_files_are_skipped"
_NOT_TRACED = (
    *(f"run.{name}" for name in ("backward", "observers", "optimizers", "session", "weights")),
    *(f"monitor.{name}" for name in ("backward_trace", "operations", "overflow_tracer", "replay")),
)


def hide_from_dynamo(imports: ImportWatch, patches: Patches, original_call: Any) -> None:
    """Once the script has imported Dynamo, have it skip our files, and trace our `__call__` without its short cut."""

    def utils_imported(utils: Any) -> None:
        for user in (utils, sys.modules.get("torch._dynamo.variables.nn_module")):
            if user is not None:
                patches.set(user, "unpatched_nn_module_call", original_call)

    def rules_imported(trace_rules: Any) -> None:
        # Once a process: Dynamo keeps a list, and makes one pattern of it.
        if not hasattr(trace_rules, _MARK):
            for name in _NOT_TRACED:
                trace_rules.add(f"mezzo.pytorch.{name}")
            setattr(trace_rules, _MARK, True)

    imports.when("torch._dynamo.utils", utils_imported)
    imports.when("torch._dynamo.trace_rules", rules_imported)
