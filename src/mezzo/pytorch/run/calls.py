"""The outermost calls of a run: each call of a module with parameters computes by the policy, and returns FP32.

A module is called outermost if autocast is off around it. In a backward pass that is a checkpoint's recomputation:
the same context again, and no call of its own. A criterion, a metric or an activation has no parameters: it is the
script's own arithmetic on FP32 values, and stays in FP32. Calls inside meet one question, whether any autocast is on.

Inside `torch.compile` the patched `__call__` is traced like any other function (a compiled step), so this file holds
what Dynamo may see. What must happen once a module (`Preparation.prepare`) happens while Dynamo traces, not in the
graph: a graph break there would cut a step in two for good.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.autocast.context import autocast
from mezzo.pytorch.kernels.unseen import unseen
from mezzo.pytorch.run.prepare import FOLLOWS

if TYPE_CHECKING:
    from mezzo.core.policy import Policy
    from mezzo.pytorch.autocast.context import Context
    from mezzo.pytorch.run.prepare import Preparation
    from mezzo.pytorch.run.session import Session
    from mezzo.runner.patches import ImportWatch, Patches

_any_autocast = torch._C._is_any_autocast_enabled
_label_on = torch.is_autocast_enabled
_LABEL = active_policy.LABEL_DEVICE
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass
_tracing_state = torch._C._get_tracing_state
_is_compiling, _dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_float32 = torch.float32
_LOWERED = (torch.bfloat16, torch.float16)


class _Thread(threading.local):
    """Whether this thread is inside an outermost call in FP32, where autocast's state can't tell."""

    in_fp32 = False
    policy: Policy | None = None  # of the last call, whose context is `region`
    region: Context | None = None


# Of a call that runs: its context, whether the observers are told of its end.
_Entered = tuple["Context | None", bool]


def make_call(session: Session, preparation: Preparation, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `nn.Module.__call__` of a run."""
    thread = _Thread()
    observers = session.observers
    is_wrapped_call = original is vars(nn.Module)["_wrapped_call_impl"]

    def prepare_at_trace_time(context: Any) -> None:
        variable = context.get_local("self")._i_will_not_complain_if_bc_breaks_VariableTracker()
        module = getattr(variable, "value", None)
        if isinstance(module, nn.Module) and preparation.prepare(module, traced=True):
            session.compiled = True

    def traced(self: nn.Module, args: Any, kwargs: Any) -> Any:
        # Dynamo may trace this twice and must take the same way both times: nothing that `prepare` changes
        # is read before it.
        from torch._dynamo.comptime import comptime

        comptime(prepare_at_trace_time)
        if session.left_alone is not None or not session.lowers:
            return original(self, *args, **kwargs)
        with autocast(session.policy, session.device_type):
            out = original(self, *args, **kwargs)
        return to_fp32(out)

    @unseen
    def enter(module: nn.Module, args: Any, kwargs: Any) -> _Entered | None:
        """Begin an outermost call of this module; None if the call is none of ours."""
        if session.left_alone is not None or _tracing_state() is not None or observers.busy:
            return None
        if _graph_task() != -1:  # `checkpoint(model, x)` of the script's calls it again
            if not (session.lowers and preparation.knows(module)):
                return None
            policy = session.policy_now
        elif preparation.prepare(module):
            policy = session.enter()
            if module.training and session.scaling:
                session.networks.call(module)
        else:
            return None
        observers.watch_begins(module)
        if thread.policy is not policy:
            thread.policy = policy
            thread.region = None if policy.is_fp32 else autocast(policy, session.device_type)
        region = thread.region
        if region is None:
            thread.in_fp32 = True
        else:
            region.__enter__()
        try:
            return region, observers.listening and observers.call_begins(module, args, kwargs)
        except BaseException:
            end(region)
            raise

    @unseen
    def leave(module: nn.Module, entered: _Entered, out: Any) -> Any:
        region, told = entered
        try:
            if told:
                observers.call_ended(module, out)
        finally:
            end(region)
        if region is None or (type(out) is Tensor and out.dtype is _float32):
            return out
        return to_fp32(out)

    @unseen
    def fail(entered: _Entered) -> None:
        region, told = entered
        try:
            if told:
                observers.step_dropped()
        finally:
            end(region)

    def end(region: Context | None) -> None:
        if region is None:
            thread.in_fp32 = False
        else:
            region.__exit__(None, None, None)

    def outermost(self: nn.Module, args: Any, kwargs: Any) -> Any:
        entered = enter(self, args, kwargs)
        if entered is None:
            return original(self, *args, **kwargs)
        try:
            out = original(self, *args, **kwargs)
        except BaseException:
            fail(entered)
            raise
        return leave(self, entered, out)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _any_autocast() or _label_on(_LABEL) or FOLLOWS in self.__dict__:
            if is_wrapped_call and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)  # what `original` does, without a frame of its own
            return original(self, *args, **kwargs)
        if not _dynamo_compiling() and thread.in_fp32:
            return original(self, *args, **kwargs)
        if _is_compiling():
            return traced(self, args, kwargs)
        return outermost(self, args, kwargs)

    # Met as a frame of its own (the module inside a compiled model), this is passed over, as PyTorch's own
    # `__call__` is: what is compiled then is the module's `forward`. It is still traced inside a compiled step.
    pieces: Any = eval_frame
    pass_over = pieces._FrameExecStrategy(pieces._FrameAction.SKIP, pieces._FrameAction.DEFAULT)
    for function in (call, outermost):
        pieces.set_code_exec_strategy(function.__code__, pass_over)
    return call


# -------------------------------------------------------------------------------------------------- what is returned


def to_fp32(value: Any) -> Any:
    """`value` with each bf16 or fp16 tensor in it replaced by `tensor.float()`; the value itself where there is none.

    Looks into dicts (and their subclasses, such as a library's `ModelOutput`), lists, tuples, named tuples,
    dataclasses, `types.SimpleNamespace` and `torch.distributions`. A container is copied, shallowly, only
    if a tensor in it changes. FP32, FP64, integer and complex tensors pass as they are, and so does every
    other object.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOWERED else value
    if isinstance(value, dict):
        new = {key: to_fp32(item) for key, item in value.items()}
        if not _any_changed(value.values(), new.values()):
            return value
        if type(value) is dict:
            return new
        result = copy.copy(value)
        for key, item in new.items():
            if item is not value[key]:
                result[key] = item  # a ModelOutput sets the attribute of the same name as well
        return result
    if isinstance(value, (tuple, list)):
        parts = [to_fp32(item) for item in value]
        if not _any_changed(value, parts):
            return value
        if type(value) is list:
            return parts
        if isinstance(value, tuple):
            return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
        listed = copy.copy(value)
        listed[:] = parts
        return listed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_attributes(value, [f.name for f in dataclasses.fields(value)])
    if isinstance(value, (types.SimpleNamespace, torch.distributions.Distribution)):
        return _with_attributes(value, list(vars(value)))
    return value


def _with_attributes(value: Any, names: list[str]) -> Any:
    before = {name: getattr(value, name, None) for name in names}
    after = {name: to_fp32(old) for name, old in before.items()}
    if not _any_changed(before.values(), after.values()):
        return value
    result = copy.copy(value)
    for name, new in after.items():
        if new is not before[name]:
            object.__setattr__(result, name, new)  # a frozen dataclass, too
    return result


def _any_changed(before: Any, after: Any) -> bool:
    return any(a is not b for a, b in zip(before, after))


# -------------------------------------------------------------------------------------------------- torch.compile

# Files that Dynamo must run, not trace. This one is traced on purpose, and so are hooks that are put on modules, which
# a compiled function then passes over; those that run in backward are not.
_MARK = "_mezzo_run_files_are_skipped"
_NOT_TRACED = (
    *(f"run.{name}" for name in ("backward", "observers", "optimizers", "prepare", "session")),
    *(f"monitor.{name}" for name in ("loss_graph", "operations", "overflow_tracer", "replay")),
)


def hide_from_dynamo(imports: ImportWatch, patches: Patches, original_call: Any) -> None:
    """Once the script has imported Dynamo, have it skip our files, and trace our `__call__`.

    Dynamo takes a short cut past `nn.Module.__call__` where it finds the one that it found at its own import. Ours was
    in place by then, so it would go past ours, and a compiled step would not run by the policy.
    """

    def utils_imported(utils: Any) -> None:
        patches.set(utils, "unpatched_nn_module_call", original_call)
        users = sys.modules.get("torch._dynamo.variables.nn_module")
        if users is not None:
            patches.set(users, "unpatched_nn_module_call", original_call)

    def rules_imported(trace_rules: Any) -> None:
        # Once a process: Dynamo keeps a list, and makes one pattern of it.
        if not hasattr(trace_rules, _MARK):
            for name in _NOT_TRACED:
                trace_rules.add(f"mezzo.pytorch.{name}")
            setattr(trace_rules, _MARK, True)

    imports.when("torch._dynamo.utils", utils_imported)
    imports.when("torch._dynamo.trace_rules", rules_imported)
